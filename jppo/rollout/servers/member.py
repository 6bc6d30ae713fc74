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
import enum
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


def require_free_ports(port: int, servers: int) -> None:
    """Raises UserError if a requested port is in use."""
    for candidate in range(port, port + servers) if port else ():
        try:
            _reserve_port(candidate).close()
        except OSError as e:
            raise UserError(
                f"rollout.port={port}: port {candidate} cannot be used ({e.strerror}); 0 takes free ones"
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
        self._stopped = False
        self._start_stop_lock = threading.Lock()  # a restart must not follow a stop
        self._take_port(program.port, within_s=0.0)

    def start(self) -> None:
        """Starts the server without blocking."""
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
        with self._start_stop_lock:
            if self._stopped:
                raise RolloutError(f"the server at {self.url} was ended")
            self._kill()
            self._port.close()
            self._take_port(int(self.url.rpartition(":")[2]), within_s=PORT_S)
            self.start()

    def wait_ready(self) -> None:
        """Returns when our own process answers; RolloutError with its last log lines if it ends or is late."""
        stolen = 0
        while not self._is_ready():
            if not self.alive():
                if stolen == STOLEN or self._stopped or not re.search(r"(?i)address already in use", self._read_log()):
                    raise RolloutError(f"the server did not start; {self.excerpt()}")
                stolen += 1
                self.restart()
            if time.monotonic() > self._deadline:
                message = f"was not ready after rollout.start_timeout_s={self._program.start_timeout_s:g}"
                raise RolloutError(f"the server {message}; {self.excerpt()}")
            time.sleep(POLL_S)
        self._port.close()

    @property
    def pid(self) -> int | None:
        """Returns the leading process; None if there is none."""
        process = self._process
        return None if process is None else process.pid

    def alive(self) -> bool:
        process = self._process
        return process is not None and process.poll() is None

    def excerpt(self) -> str:
        """Returns the relevant lines of the log, and its path."""
        return "\n  ".join([f"{self.log} says:", *(line[:300] for line in relevant_lines(self._read_log()))])

    def stop(self) -> None:
        """Ends the process and its children for good; may be called twice."""
        with self._start_stop_lock:
            self._stopped = True
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
        """Ends the process and its children at once, for a restart."""
        process, self._process = self._process, None
        if process is not None:
            atexit.unregister(self.stop)
            _kill_group(process)

    def _take_port(self, port: int, *, within_s: float) -> None:
        """Reserves this port, or a free one if it stays in use and was not requested."""
        # Bound but not listening, so that the server can bind it. So can others, who get no token: see guard.py.
        deadline = time.monotonic() + within_s
        while True:
            try:
                self._port = _reserve_port(port)
                break
            except OSError:
                out_of_time = time.monotonic() > deadline
                if out_of_time and self._program.port:
                    message = f"rollout.port: port {port} was taken by another program; 0 takes free ones"
                    raise RolloutError(message) from None
                port = 0 if out_of_time else port
            time.sleep(POLL_S / 4)
        self.url = f"http://{HOST}:{self._port.getsockname()[1]}"

    def _read_log(self) -> str:
        try:
            with open(self.log, "rb") as log:
                log.seek(self._log_start)
                return log.read().decode(errors="replace")
        except OSError as e:  # it was removed; the fault that it would explain counts
            return str(e)

    def _is_ready(self) -> bool:
        """Whether our own process answers on the port."""
        try:
            served = Endpoint(self.url, timeout_s=5.0, explain=str, key=self.key).get_field("/v1/models", "data", list)
            return self.name in [model["id"] for model in served]
        except (RolloutError, KeyError, TypeError):  # or another program on a stolen port
            return False


def stop_all(servers: Sequence[Server]) -> None:
    """Stops all servers for good, concurrently."""
    if servers:
        with ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(Server.stop, servers))


def relevant_lines(text: str) -> list[str]:
    """Returns the relevant lines of a log: its distinct exceptions, otherwise the last lines."""
    prefix = r"\x1b\[[0-9;]*m|^\(\w+ pid=\d+\) |^(ERROR|WARNING|INFO) [\d-]+ [\d:]+ \[[^\]]*\] "
    lines = [_strip_prefixes(prefix, line) for line in text.splitlines()]
    lines = list(dict.fromkeys(line for line in lines if line))
    relevant: dict[str, None] = {}  # an ordered set
    for i, line in enumerate(lines):
        if re.match(r"[\w.]+(Error|Exception)\b|the server's process ended", line):
            relevant[line] = None
            for detail in lines[i + 1 : i + 4]:
                if not detail.startswith("  ") or detail.lstrip().startswith("File "):
                    break
                relevant[detail] = None
    return (list(relevant) if relevant else lines)[-LOG_LINES:]


def _strip_prefixes(prefix: str, line: str) -> str:
    while (shorter := re.sub(prefix, "", line)) != line:
        line = shorter
    return line.rstrip()


def _reserve_port(port: int) -> socket.socket:
    """Returns a socket bound to the port, 0: a free one, so that no other program takes it; OSError if it is in use."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((HOST, port))
    except OSError:
        bound.close()
        raise
    return bound


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


CONNECTIONS = 256  # least default of the requests in flight at one server


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How to run the servers: settings of `rollout` by their names, and what servers must know of the model."""

    max_model_len: int  # prompt and response together
    vocab_size: int  # answers have ids below it
    max_positions: int = 0  # in place of max_position_embeddings in config.json; 0: that
    lora_rank: int = 0  # of the adapters; 0: whole weights only
    delta: tuple[str, bool] | None = None  # the family, and whether its projections are one; None: no gated delta nets
    head_sizes: tuple[int, ...] = ()  # of the model's attention, unless it is latent
    latent: tuple[int, int] | None = None  # kv_lora_rank and qk_rope_head_dim; None: no latent attention
    experts: tuple[int, int, int] | None = None  # layers, active and all experts, if answers have each token's
    python: str = ""
    servers: int = 1
    port: int = 0
    dtype: str = "float32"
    quantization: str = "none"
    mask_replay: bool = False
    enforce_eager: bool = False
    sleep_level: int = 0
    max_num_seqs: int = 256
    max_concurrent_requests: int = -1
    gpu_memory_utilization: float = 0.4
    kv_cache_memory_bytes: int = -1
    cache_on_cpu: int = 1 << 28
    omp_threads: int = 1
    tensor_model_parallel_size: int = 1
    devices: tuple[str, ...] = ()  # the GPUs of all servers; (): all visible ones
    engine_args: str = ""
    start_timeout_s: float = 900.0
    request_timeout_s: float = 600.0
    health_timeout_s: float = 60.0
    max_restarts: int = 5
    publish_via: str = "file"
    publish_host: str = ""
    publish_dir: str = ""
    publish_delta: bool = False

    @property
    def connections(self) -> int:
        """The largest number of requests in flight at one server, which queues those over `max_num_seqs`."""
        asked = self.max_concurrent_requests
        return asked if asked > 0 else max(CONNECTIONS, self.max_num_seqs)


@dataclasses.dataclass(frozen=True)
class ServerFacts:
    """Facts that a server reports."""

    model: str  # name for requests
    max_model_len: int
    process: str  # random id of its process; '': unknown


class RequestDropped(ServerFault):
    """The server was given up while the request was in flight: not the request's fault."""


class State(enum.Enum):
    """What a server gets."""

    UP = enum.auto()  # requests and weights: it has the current ones
    WITHOUT_WEIGHTS = enum.auto()  # weights, with the next publish and not before
    BROKEN = enum.auto()  # nothing before its repair, or for ever: it has left


@dataclasses.dataclass(eq=False)
class Member:
    """One server.

    A request waits in the server's own queue for earlier ones, so its time in the queue is not limited. It is late if
    the server has answered nothing for the endpoint's timeout after it must have left the queue, unless the server is
    still sampling: for any request, or for as many as are here once later ones are answered.
    """

    endpoint: Endpoint
    server: Server | None  # None: attached
    facts: ServerFacts
    connections: int = CONNECTIONS  # requests in flight
    state: State = State.UP
    in_repair: bool = False  # a task checks or repairs it, in any state: it gets no request, and weights by its state
    asleep: bool = False  # the trainer has its memory, until the next publish
    in_flight: int = 0
    requests: set[asyncio.Task[Any]] = dataclasses.field(default_factory=set)
    answers: int = 0
    last_answer_time: float = 0.0  # time of the last answer
    working_checks: dict[int, asyncio.Task[bool]] = dataclasses.field(default_factory=dict)  # late requests share them

    @property
    def up(self) -> bool:
        return self.state is State.UP

    @property
    def works(self) -> bool:
        """Whether it can get weights."""
        return self.state is not State.BROKEN

    async def ask(
        self, route: str, body: Mapping[str, Any], is_sampling: Callable[[int], bool], *, max_bytes: int | None = None
    ) -> Any:
        """Returns the route's JSON; ServerFault if it is late, RequestDropped if the server is given up.

        `is_sampling` asks whether the server samples for so many requests; it blocks. `max_bytes`: of the answer.
        """
        request = asyncio.ensure_future(self.endpoint.ask(route, body, max_bytes=max_bytes))
        self.requests.add(request)
        try:
            await self._await(request, route, is_sampling)
            if request.cancelled():
                raise RequestDropped(f"the server at {self.endpoint.url} was given up")
            self.reset_timeout()
            self.answers += 1
            return request.result()
        finally:
            request.cancel()
            self.requests.discard(request)

    def require_distinct(self, others: Iterable["Member"]) -> None:
        """Raises UserError if one of the others is the same server, at another address."""
        for other in others:
            if self.facts.process and self.facts.process == other.facts.process:
                urls = f"{other.endpoint.url} and {self.endpoint.url}"
                raise UserError(f"rollout.urls: {urls} are addresses of one server; name it once")

    def reset_timeout(self) -> None:
        """Resets the timeout: requests in flight have waited for an update or for others."""
        self.last_answer_time = asyncio.get_running_loop().time()

    def cancel_requests(self) -> None:
        for request in self.requests:
            request.cancel()

    async def _await(self, request: asyncio.Task[Any], route: str, is_sampling: Callable[[int], bool]) -> None:
        """Returns when the request is done; ServerFault if it is late."""
        loop, timeout_s = asyncio.get_running_loop(), self.endpoint.timeout_s
        deadline, answers_before, is_next = max(loop.time(), self.last_answer_time) + timeout_s, self.answers, False
        while not request.done():
            if (seconds_left := deadline - loop.time()) > 0:
                await asyncio.wait({request}, timeout=seconds_left)
            elif not is_next and self.answers - answers_before >= self.connections:  # all earlier requests are done
                is_next, deadline = True, loop.time() + timeout_s
            elif not is_next and self.last_answer_time + timeout_s > loop.time():
                deadline = self.last_answer_time + timeout_s
            elif await self._is_working(is_sampling, len(self.requests) if is_next else 1):
                deadline = loop.time() + timeout_s
            elif not request.done():
                raise self.endpoint.timeout_fault(route)

    async def _is_working(self, is_sampling: Callable[[int], bool], requests: int) -> bool:
        """Whether the server samples for so many requests; requests that ask at once share the check."""
        if requests not in self.working_checks:
            self.working_checks[requests] = asyncio.ensure_future(asyncio.to_thread(is_sampling, requests))
            self.working_checks[requests].add_done_callback(lambda _: self.working_checks.pop(requests))
        return await asyncio.shield(self.working_checks[requests])


SLACK = 32  # more requests in flight than on another server are accepted for a shared prefix


class Router:
    """The servers' places for requests; a request waits for one while all are taken or an update holds them."""

    def __init__(self, members: Sequence[Member]):
        self.members = tuple(members)  # replaced as a whole: other threads read it
        self.holds_requests = False  # by an update: new requests wait here, not at the servers
        self.fatal: Exception | None = None  # ends all requests
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()

    async def take(self, near: Hashable, *, urgent: bool = False) -> Member:
        """Returns a server with room, or any working server for an urgent request; counts the request."""
        while True:
            if self.fatal is not None:
                raise self.fatal
            members = self.members
            available = [member for member in members if member.up and not member.in_repair]
            if available and not self.holds_requests:
                least = min(available, key=lambda member: member.in_flight)
                preferred = members[hash(near) % len(members)]
                limit = min(least.in_flight + SLACK, preferred.connections - 1)
                chosen = preferred if preferred in available and (urgent or preferred.in_flight <= limit) else least
                if urgent or chosen.in_flight < chosen.connections:
                    chosen.in_flight += 1
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
        """Counts a request of the member as ended, and lets a waiting one try again."""
        member.in_flight -= 1
        self._wake(1)

    def wake_all(self) -> None:
        self._wake(len(self._waiting))

    def fail(self, error: Exception) -> None:
        """Ends all requests with this error, or with the first."""
        self.fatal = self.fatal or error
        for member in self.members:
            member.cancel_requests()
        self.wake_all()

    def _wake(self, count: int) -> None:
        while count and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                count -= 1
