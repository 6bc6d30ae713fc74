"""A server of a fleet: its process, if it was started here, and its requests in flight; and the router between them.

A process runs under `launch.py` in its own session: Ctrl-C in the terminal reaches only the trainer, and a killed
trainer takes it along. Starting does not block; the trainer compiles meanwhile. The router, on one event loop, sends
requests with a common prefix to the same server, unless another has less work.
"""

import asyncio
import atexit
import collections
import contextlib
import dataclasses
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jppo.errors import UserError
from jppo.rollout.protocol import RolloutError
from jppo.rollout.servers import guard
from jppo.rollout.servers.endpoint import Endpoint, ServerFault

HOST = "127.0.0.1"  # other users of the machine can reach it: see guard.py
STOP_S = 15.0  # longer than the launcher takes
POLL_S = 0.2
LOG_LINES = 15
PORT_S = 2.0  # until a killed program's port is free again
STOLEN = 3  # times that another program takes the port between two checks, before giving up


def check_ports(port: int, servers: int) -> None:
    """UserError if a requested port is in use."""
    for wanted in range(port, port + servers) if port else ():
        try:
            _reserve(wanted).close()
        except OSError as e:
            raise UserError(
                f"rollout.port={port}: port {wanted} cannot be used ({e.strerror}); 0 takes free ones"
            ) from e


@dataclasses.dataclass(frozen=True)
class ServerProgram:
    """A server's command, environment and limits."""

    command: Callable[[int, str], list[str]]  # takes the port and the model name, by which the server is recognised
    env: Mapping[str, str]  # without the server's key
    log: pathlib.Path
    port: int  # 0: a free one
    folder: str | None  # removed with it when the trainer is killed
    start_timeout_s: float


class Server:
    """One server process and its log."""

    def __init__(self, program: ServerProgram):
        self.log = program.log
        self.name = f"policy-{uuid.uuid4().hex[:12]}"
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False
        self._changing = threading.Lock()  # a restart must not follow a stop
        self._take_port(program.port, within_s=0.0)

    def start(self) -> None:
        """Starts it without blocking."""
        port = self._port.getsockname()[1]
        folder = "" if self._program.folder is None else self._program.folder
        launch = [sys.executable, "-m", "jppo.rollout.servers.launch", str(os.getpid()), folder]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.key = guard.new_key()  # an earlier key, caught on an old port, is useless
        with open(self.log, "ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [*launch, *self._program.command(port, self.name)],
                env={**self._program.env, **self.key.environment()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        atexit.register(self.stop)
        self._deadline = time.monotonic() + self._program.start_timeout_s

    def restart(self) -> None:
        """Kills the server's remaining processes and starts it again, on another port if its port is in use."""
        with self._changing:
            if self._ended:
                raise RolloutError(f"the server at {self.url} was ended")
            self._kill()
            self._port.close()
            self._take_port(int(self.url.rpartition(":")[2]), within_s=PORT_S)
            self.start()

    def wait_ready(self) -> None:
        """Returns when our own process answers; RolloutError with its last log lines if it ends or is late."""
        stolen = 0
        while not self._answers():
            if not self.alive():
                if stolen == STOLEN or self._ended or not re.search(r"(?i)address already in use", self._said()):
                    raise RolloutError(f"the server did not start; {self.why()}")
                stolen += 1
                self.restart()
            if time.monotonic() > self._deadline:
                late = f"was not ready after rollout.start_timeout_s={self._program.start_timeout_s:g}"
                raise RolloutError(f"the server {late}; {self.why()}")
            time.sleep(POLL_S)
        self._port.close()

    @property
    def pid(self) -> int | None:
        """Returns the leading process; None if there is none."""
        process = self._process
        return None if process is None else process.pid

    def alive(self) -> bool:
        """Whether the process runs."""
        process = self._process
        return process is not None and process.poll() is None

    def why(self) -> str:
        """Returns the relevant lines of the log, and its path."""
        return "\n  ".join([f"{self.log} says:", *(line[:300] for line in telling(self._said()))])

    def stop(self) -> None:
        """Ends the process and its children for good; may be called twice."""
        with self._changing:
            self._ended = True
            self._port.close()
            process, self._process = self._process, None
        if process is None:
            return
        atexit.unregister(self.stop)
        try:
            process.terminate()  # the launcher forwards it
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
        finally:
            _kill_group(process)

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            atexit.unregister(self.stop)
            _kill_group(process)

    def _take_port(self, port: int, *, within_s: float) -> None:
        # Bound but not listening, so that the server can bind it. So can others, who get no token: see guard.py.
        deadline = time.monotonic() + within_s
        while True:
            try:
                self._port = _reserve(port)
                break
            except OSError:
                late = time.monotonic() > deadline
                if late and self._program.port:
                    message = f"rollout.port: port {port} was taken by another program; 0 takes free ones"
                    raise RolloutError(message) from None
                port = 0 if late else port
            time.sleep(POLL_S / 4)
        self.url = f"http://{HOST}:{self._port.getsockname()[1]}"

    def _said(self) -> str:
        try:
            with open(self.log, "rb") as log:
                log.seek(self._log_start)
                return log.read().decode(errors="replace")
        except OSError as e:  # it was removed; the fault that it would explain counts
            return str(e)

    def _answers(self) -> bool:
        try:
            served = Endpoint(self.url, timeout_s=5.0, why=str, key=self.key).get_field("/v1/models", "data", list)
            return self.name in [model["id"] for model in served]
        except (RolloutError, KeyError, TypeError):  # or another program on a stolen port
            return False


def stop_all(servers: Sequence[Server]) -> None:
    """Stops all servers for good, concurrently."""
    if servers:
        with ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(Server.stop, servers))


def telling(text: str) -> list[str]:
    """Returns the relevant lines of a log: its distinct exceptions, otherwise the last lines."""
    prefix = r"\x1b\[[0-9;]*m|^\(\w+ pid=\d+\) |^(ERROR|WARNING|INFO) [\d-]+ [\d:]+ \[[^\]]*\] "
    lines = [_strip(prefix, line) for line in text.splitlines()]
    lines = list(dict.fromkeys(line for line in lines if line))
    told: dict[str, None] = {}  # an ordered set
    for i, line in enumerate(lines):
        if re.match(r"[\w.]+(Error|Exception)\b|the server's process ended", line):
            told[line] = None
            for more in lines[i + 1 : i + 4]:
                if not more.startswith("  ") or more.lstrip().startswith("File "):
                    break
                told[more] = None
    return (list(told) if told else lines)[-LOG_LINES:]


def _strip(prefix: str, line: str) -> str:
    while (shorter := re.sub(prefix, "", line)) != line:
        line = shorter
    return line.rstrip()


def _reserve(port: int) -> socket.socket:
    taken = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind((HOST, port))
    except OSError:
        taken.close()
        raise
    return taken


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


CONNECTIONS = 256  # least default of the requests in flight at one server, which queues the rest


@dataclasses.dataclass(frozen=True)
class ServerLimits:
    """Timeouts and restart limits of servers, as in the settings of `rollout`."""

    request_timeout_s: float
    health_timeout_s: float
    max_restarts: int
    sleep_level: int = 0
    connections: int = CONNECTIONS  # requests in flight at one server


@dataclasses.dataclass(frozen=True)
class Inspected:
    """Facts that a server reports."""

    model: str  # name for requests
    max_model_len: int
    process: str  # random id of its process; '': unknown


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
    about: Inspected
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

    async def ask(
        self, route: str, body: Mapping[str, Any], working: Callable[[int], bool], *, most: int | None = None
    ) -> Any:
        """Returns the route's JSON; ServerFault if it is late, Cut if the server is given up.

        `working` looks whether the server samples for so many requests; it blocks. `most`: bytes of the answer.
        """
        request = asyncio.ensure_future(self.endpoint.ask(route, body, most=most))
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

    def require_apart(self, others: Iterable["Member"]) -> None:
        """Raises UserError if one of the others is the same server, at another address."""
        for other in others:
            if self.about.process and self.about.process == other.about.process:
                urls = f"{other.endpoint.url} and {self.endpoint.url}"
                raise UserError(f"rollout.urls: {urls} are addresses of one server; name it once")

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
