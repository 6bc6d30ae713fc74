"""A server process: start, readiness, restart, and end with the trainer.

It runs under `launch.py` in its own session: Ctrl-C in the terminal reaches only the trainer, and a killed trainer
takes it along. Starting does not block; the trainer compiles meanwhile.
"""

import atexit
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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from jppo.rollout.protocol import RolloutError
from jppo.rollout.servers import guard
from jppo.rollout.servers.endpoint import Endpoint
from jppo.settings import UserError

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
                    said = f"rollout.port: port {port} was taken by another program; 0 takes free ones"
                    raise RolloutError(said) from None
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
            served = Endpoint(self.url, timeout_s=5.0, why=str, key=self.key).get_field("/v1/models", "data")
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
