"""Runs an agent's program for one episode: its environment, time limit, output, and the end of all its processes."""

import asyncio
import contextlib
import importlib.util
import itertools
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from typing import IO, Any, NamedTuple

import numpy as np

from jppo import child_process
from jppo.errors import UserError, expanded
from jppo.registry import read_source, require_name
from jppo.rollout.protocol import RolloutError

MOST_OUTPUT = 2**16  # bytes of the output's end that are read
MOST_SHOWN = 2000  # characters of the ends of output and error output in the error of a sample
MOST_DEATHS = 3  # of the process that forks, without a program that ends between them
CLOSE_S = 10.0  # for the process to kill its forks
_NOT_PASSED = ("JPPO_SERVER_TOKEN", "ANTHROPIC_AUTH_TOKEN")  # of the servers; in place of the episode's key
_FUNCTION = re.compile(r"[^\s:]+:[A-Za-z_]\w*")
_INTERPRETER = re.compile(r"(.*/)?((ba|da|z)?sh|python[\d.]*)")
_FORKS = "jppo.plugins.agents.gateway.forks"

Files = Sequence[IO[bytes]]  # input, output, error output
End = tuple[int, str]  # exit code; why, if the program did not end by itself


class ProgramEnd(NamedTuple):
    """How a program ended."""

    code: int | None  # None: it exceeded its time
    last: str  # line of its output
    error: str  # the last line of its error output
    tail: str = ""  # of both, for people


def parse_agent(agent: str) -> "Program":
    """Returns the program of `rollout.agent`: a command line, or PATH.py:FUNCTION; starts nothing."""
    if _FUNCTION.fullmatch(agent):
        path_or_module, _, name = agent.rpartition(":")
        file = expanded(path_or_module) if path_or_module.endswith(".py") else _module_file(path_or_module, agent)
        if file is not None and not file.is_file():
            raise UserError(f"rollout.agent={agent!r}: there is no file {path_or_module}; write its path")
        if file is not None:
            setting = f"rollout.agent={agent!r}"
            require_name(read_source(file, setting), file, name, setting)
        return Program(agent, ("function", agent))
    try:
        command = shlex.split(agent)
    except ValueError as e:
        raise UserError(f"rollout.agent={agent!r} is no command line: {e}; mend its quotes") from e
    if not command or shutil.which(command[0]) is None:
        program = repr(command[0]) if command else "it"
        remedy = (
            f"{agent}:FUNCTION, or python {agent}" if agent.endswith(".py") else "a command line, or PATH.py:FUNCTION"
        )
        raise UserError(f"rollout.agent={agent!r}: {program} is no program; write {remedy}")
    script = next((word for word in command[1:2] if _INTERPRETER.fullmatch(command[0]) and word[0] != "-"), None)
    if script is not None and not expanded(script).is_file():
        remedy = f"{script} alone for a function" if _FUNCTION.fullmatch(script) else "its path"
        raise UserError(f"rollout.agent={agent!r}: there is no file {script}; write {remedy}")
    return Program(agent, ("command", *command))


def _module_file(name: str, agent: str) -> pathlib.Path | None:
    """Returns the file of a top-level module as `forks.py` finds it, with this folder last; imports nothing."""
    top, dot, _ = name.partition(".")
    here = os.getcwd()
    other_paths = [place for place in sys.path if place not in ("", here)]
    search_paths = [*child_process.python_path().split(os.pathsep), *other_paths, here]
    # the last: built-in, or of other finders
    spec = PathFinder.find_spec(top, search_paths) or importlib.util.find_spec(top)
    if spec is None:
        raise UserError(f"rollout.agent={agent!r}: there is no module {top}; install it, or write PATH.py:FUNCTION")
    return pathlib.Path(spec.origin) if spec.origin and spec.origin.endswith(".py") and not dot else None


def episode_variables(url: str, key: str) -> dict[str, str]:
    """Returns the variables of an episode: the gateway's addresses and the key."""
    env = {"OPENAI_BASE_URL": f"{url}/v1", "ANTHROPIC_BASE_URL": url, "OPENAI_API_KEY": key, "ANTHROPIC_API_KEY": key}
    no_proxy = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    hosts = "127.0.0.1,localhost" + (f",{no_proxy}" if no_proxy else "")
    return env | dict.fromkeys(("NO_PROXY", "no_proxy"), hosts)


class Program:
    """A process that forks for every episode (`forks.py`): a function's imports are paid for once, all end with it."""

    def __init__(self, agent: str, work: Sequence[str]):
        """`agent` is the value of rollout.agent, `work` the command line of `forks.py`, which starts its programs."""
        self._agent, self._work = agent, work
        self._process: asyncio.subprocess.Process | None = None
        self._failed: RolloutError | None = None
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[asyncio.Future[None], asyncio.Future[End]]] = {}  # its start, its end
        self._deaths = 0  # of the process, since the last program that ended
        self._starting = asyncio.Lock()

    async def start(self, env: Mapping[str, str], files: Files, timeout_s: float) -> "tuple[int, asyncio.Future[End]]":
        """Starts an episode; returns its number and its end. The first also imports the function, in `timeout_s`."""
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        async with self._starting:  # one at a time: with hundreds unanswered, both sides would block in sending
            if self._failed is not None:
                raise self._failed
            if self._process is None:
                await self._start_process(loop, timeout_s)
            self._waiting[number] = futures = loop.create_future(), loop.create_future()
            message = json.dumps({"id": number, "env": dict(env)}).encode()
            with contextlib.suppress(ConnectionError):  # the process has just ended: `_read_message` notices
                socket.send_fds(self._channel, [message], [file.fileno() for file in files])
            await futures[0]
            return number, futures[1]

    def end(self, number: int) -> None:
        """Kills an episode's processes, if it has not ended."""
        if number in self._waiting:
            with contextlib.suppress(ConnectionError):
                self._channel.send(json.dumps({"id": number}).encode())  # the id alone ends it (`forks.py`)

    async def close(self) -> None:
        """Ends the process and its forks; may be called twice."""
        process, self._process = self._process, None
        if process is None:
            return
        asyncio.get_running_loop().remove_reader(self._channel)
        self._channel.close()  # it kills its forks then, and ends
        with contextlib.suppress(TimeoutError):
            runs = self._ready.done() and self._failed is None  # else it may still import
            await asyncio.wait_for(process.wait(), CLOSE_S if runs else 0)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        self._log.close()

    async def _start_process(self, loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
        self._channel, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        self._ready = loop.create_future()
        env = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED}
        with child_socket:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", _FORKS, str(child_socket.fileno()), *self._work),
                stdin=asyncio.subprocess.DEVNULL, stdout=self._log, stderr=self._log,
                env=env | {"PYTHONPATH": child_process.python_path()},
                pass_fds=[child_socket.fileno()], start_new_session=True,
            )  # fmt: skip
        loop.add_reader(self._channel, self._read_message)
        timer = loop.call_later(timeout_s, self._fail, f"its import exceeds rollout.agent_timeout_s={timeout_s:g}")
        try:
            await self._ready
        finally:
            timer.cancel()

    def _read_message(self) -> None:
        """Reads a message of the process: it is ready, or an episode has started or ended."""
        data = b""
        with contextlib.suppress(ConnectionError):
            data = self._channel.recv(2**16)
        if not data:
            self._handle_lost_process()
            return
        message = json.loads(data)
        if "ready" in message:
            self._ready.set_result(None)
        elif "code" in message:
            self._deaths = 0
            _resolve(self._waiting.pop(message["id"])[1], (message["code"], ""))
        else:
            _resolve(self._waiting[message["id"]][0], None)

    def _handle_lost_process(self) -> None:
        """Ends the episodes of a process that has ended, and their samples; the next episode starts another one."""
        reason, self._deaths = last_line(self._log), self._deaths + 1
        if not self._ready.done() or self._deaths == MOST_DEATHS:
            self._fail(reason or "its process ended")
            return
        asyncio.get_running_loop().remove_reader(self._channel)
        self._channel.close()
        self._log.close()
        self._process = None
        for started, ended in self._waiting.values():
            _resolve(started, None)
            _resolve(ended, (-signal.SIGKILL, f"the process that starts all agents has ended; {reason}".rstrip("; ")))
        self._waiting.clear()

    def _fail(self, reason: str) -> None:
        """Fails all episodes, also later ones."""
        asyncio.get_running_loop().remove_reader(self._channel)
        complete = reason.startswith("rollout.agent=")  # a UserError
        self._failed = RolloutError(reason if complete else f"the agent {self._agent} cannot be run: {reason}")
        waiting: list[asyncio.Future[Any]] = [self._ready]
        for future in (*waiting, *(future for futures in self._waiting.values() for future in futures)):
            if not future.done():
                future.set_exception(self._failed)
                future.exception()  # some are awaited by no one
        self._waiting.clear()


def _resolve(future: asyncio.Future[Any], result: Any) -> None:
    """Sets a future's result, unless it is done or cancelled."""
    if not future.done():  # cancelled
        future.set_result(result)


async def run_agent(program: Program, task: Mapping[str, Any], env: Mapping[str, str], timeout_s: float) -> ProgramEnd:
    """Runs a program with the task as JSON on its input; afterwards none of its processes is left."""
    with contextlib.ExitStack() as stack:
        task_file, output, error = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        task_file.write(json.dumps(task, default=_to_json).encode() + b"\n")
        task_file.seek(0)
        starting = asyncio.ensure_future(program.start(env, (task_file, output, error), timeout_s))
        code, reason = None, ""
        try:
            _, ended = await asyncio.shield(starting)
            with contextlib.suppress(TimeoutError):
                code, reason = await asyncio.wait_for(asyncio.shield(ended), timeout_s)
        finally:
            number, ended = await starting
            program.end(number)
            await asyncio.wait({ended})
        tail = "\n".join(filter(None, (last_text(file)[-MOST_SHOWN:].strip() for file in (output, error))))
        return ProgramEnd(code, last_line(output), reason or last_line(error), tail)


def _to_json(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)


def last_text(file: IO[bytes]) -> str:
    """Returns the end of a file."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - MOST_OUTPUT))
    return file.read().decode(errors="replace")


def last_line(file: IO[bytes]) -> str:
    """Returns the last line that is not empty, of the end of a file."""
    lines = [line for line in re.split(r"[\r\n]", last_text(file)) if line.strip()]  # JSON may contain other separators
    return lines[-1].strip() if lines else ""
