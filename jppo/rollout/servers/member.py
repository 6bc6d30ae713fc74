"""The servers of a fleet: each with its requests in flight and their timeouts; and the router, on one event loop.

Requests with a common prefix go to the same server, unless another has less work.
"""

import asyncio
import collections
import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from jppo.rollout.servers.endpoint import Endpoint, ServerFault
from jppo.rollout.servers.process import Server

CONNECTIONS = 256  # least default of the requests in flight at one server, which queues the rest


@dataclasses.dataclass(frozen=True)
class ServerLimits:
    """Timeouts and restart limits of servers, as in the settings of `rollout`."""

    request_timeout_s: float
    health_timeout_s: float
    max_restarts: int
    sleep_level: int = 0
    connections: int = CONNECTIONS  # requests in flight at one server


class Cut(ServerFault):
    """The server was given up while the request was in flight: not the request's fault."""


@dataclasses.dataclass(eq=False)
class Member:
    """One server.

    A request waits in the server's own queue for earlier ones, so its time in the queue is not limited. It is late if
    the server has answered nothing for the endpoint's timeout after it must have left the queue, unless the server is
    still sampling: for any request, or for as many as are here once later ones are answered.
    """

    endpoint: Endpoint
    server: Server | None  # None: attached
    model: str
    max_model_len: int
    connections: int = CONNECTIONS  # requests in flight
    up: bool = True
    mending: bool = False
    asleep: bool = False
    blank: bool = False  # works, but has no weights before the next delivery; not `up`
    under_way: int = 0
    requests: set[asyncio.Task[Any]] = dataclasses.field(default_factory=set)
    answers: int = 0
    answered: float = 0.0  # time of the last answer
    looks: dict[int, asyncio.Task[bool]] = dataclasses.field(default_factory=dict)  # late requests share them

    async def ask(self, route: str, body: Mapping[str, Any], working: Callable[[int], bool]) -> Any:
        """Returns the route's JSON; ServerFault if it is late, Cut if the server is given up.

        `working` looks whether the server samples for so many requests; it blocks.
        """
        request = asyncio.ensure_future(self.endpoint.ask(route, body))
        self.requests.add(request)
        try:
            await self._wait(request, route, working)
            if request.cancelled():
                raise Cut(f"the server at {self.endpoint.url} was given up")
            self.resumed()
            self.answers += 1
            return request.result()
        finally:
            request.cancel()
            self.requests.discard(request)

    def resumed(self) -> None:
        """Resets the timeout: requests in flight have waited for an update or for others."""
        self.answered = asyncio.get_running_loop().time()

    def give_up(self) -> None:
        """Ends all requests in flight."""
        for request in self.requests:
            request.cancel()

    async def _wait(self, request: asyncio.Task[Any], route: str, working: Callable[[int], bool]) -> None:
        loop, timeout_s = asyncio.get_running_loop(), self.endpoint.timeout_s
        due, before, its_turn = max(loop.time(), self.answered) + timeout_s, self.answers, False
        while not request.done():
            if (left := due - loop.time()) > 0:
                await asyncio.wait({request}, timeout=left)
            elif not its_turn and self.answers - before >= self.connections:  # all earlier requests are done
                its_turn, due = True, loop.time() + timeout_s
            elif not its_turn and self.answered + timeout_s > loop.time():
                due = self.answered + timeout_s
            elif await self._works(working, len(self.requests) if its_turn else 1):
                due = loop.time() + timeout_s
            elif not request.done():
                raise self.endpoint.late(route)

    async def _works(self, working: Callable[[int], bool], requests: int) -> bool:
        if requests not in self.looks:
            self.looks[requests] = asyncio.ensure_future(asyncio.to_thread(working, requests))
            self.looks[requests].add_done_callback(lambda _: self.looks.pop(requests))
        return await asyncio.shield(self.looks[requests])


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
