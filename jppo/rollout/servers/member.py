"""One server of a fleet with its requests in flight and their timeouts."""

import asyncio
import dataclasses
from collections.abc import Mapping
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
    the server has answered nothing for the endpoint's timeout after it must have left the queue.
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

    async def ask(self, route: str, body: Mapping[str, Any]) -> Any:
        """Returns the route's JSON; ServerFault if it is late, Cut if the server is given up."""
        request = asyncio.ensure_future(self.endpoint.ask(route, body))
        self.requests.add(request)
        try:
            await self._wait(request, route)
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

    async def _wait(self, request: asyncio.Task[Any], route: str) -> None:
        loop, timeout_s = asyncio.get_running_loop(), self.endpoint.timeout_s
        sent, before, its_turn = loop.time(), self.answers, False
        while not request.done():
            left = max(sent, self.answered) + timeout_s - loop.time()
            if left <= 0:
                raise self.endpoint.late(route)
            await asyncio.wait({request}, timeout=timeout_s if its_turn else left)
            if its_turn and not request.done():
                raise self.endpoint.late(route)
            its_turn = self.answers - before >= self.connections  # all earlier requests are done
