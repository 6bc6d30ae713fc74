"""Routes requests to the servers of a run, on one event loop.

Requests with a common prefix go to the same server, unless another has less work.
"""

import asyncio
import collections
from collections.abc import Hashable, Sequence

from jppo.rollout.servers.member import Member

SLACK = 32  # more requests in flight than on another server are accepted for a shared prefix


class Router:
    """The servers' places for requests; a request waits for one while all are taken or an update holds them."""

    def __init__(self, members: Sequence[Member]):
        self.members = tuple(members)  # replaced as a whole: other threads read it
        self.held = False  # by an update: new requests wait here, not at the servers
        self.fatal: Exception | None = None  # ends all requests
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()

    async def take(self, near: Hashable, *, urgent: bool = False) -> Member:
        """Returns a server with room, or any working server for an urgent request; counts the request."""
        while True:
            if self.fatal is not None:
                raise self.fatal
            members = self.members
            fit = [member for member in members if member.up and not member.mending]
            if fit and not self.held:
                least = min(fit, key=lambda member: member.under_way)
                home = members[hash(near) % len(members)]
                most = min(least.under_way + SLACK, home.connections - 1)
                chosen = home if home in fit and (urgent or home.under_way <= most) else least
                if urgent or chosen.under_way < chosen.connections:
                    chosen.under_way += 1
                    return chosen
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    self._wake(1)  # its waiter has gone
                raise

    def release(self, member: Member) -> None:
        """Ends a request."""
        member.under_way -= 1
        self._wake(1)

    def wake_all(self) -> None:
        """Lets every waiting request try again."""
        self._wake(len(self._waiting))

    def fail(self, why: Exception) -> None:
        """Ends all requests with this error, or with the first."""
        self.fatal = self.fatal or why
        for member in self.members:
            member.give_up()
        self.wake_all()

    def _wake(self, count: int) -> None:
        while count and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                count -= 1
