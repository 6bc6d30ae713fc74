"""One server of a fleet with its requests in flight and their timeouts."""

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
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
