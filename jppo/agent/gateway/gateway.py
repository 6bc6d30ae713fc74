"""The gateway of a run: starts an agent's program for each sample and answers its requests, in a thread of its own.

`talk` is the run's `Talk`: any engine samples the answers, and asynchronous modes label them with their versions.
The server is a minimal HTTP/1.1 on the loopback interface, with JSON bodies and event streams, for hundreds of clients.
"""

import asyncio
import contextlib
import contextvars
import hmac
import json
import re
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from jppo.agent.gateway import process
from jppo.agent.gateway.apis import APIS, RESPONSES
from jppo.agent.gateway.episode import MODEL, Episode, Language, Rules
from jppo.agent.gateway.request import BadRequest, Request
from jppo.process import allow_files
from jppo.rollout.protocol import Answer, Ask, RolloutError
from jppo.settings import UserError
from jppo.types import Prompt, Sampling, Trajectory

HOST = "127.0.0.1"
MOST_HEAD, MOST_BODY = 2**16, 2**24  # bytes
HEAD_S = 10.0  # until a connection's first request must have shown a key
_UNKNOWN = 512  # connections without a key yet; the oldest make room for further ones
_AT_ONCE, _BACKLOG = 64, 1024  # connections accepted before any is read, a part of _UNKNOWN; those that wait for that
_PROBE_S = 0.5  # between two looks whether a client that sends no more still reads
REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 413: "Content Too Large"}


class HttpRequest(NamedTuple):
    """A request as it arrived."""

    method: str
    path: str
    key: str  # the bearer's, or Anthropic's
    body: bytes


Events = Iterable[tuple[str, Any]]  # (name or '', JSON)
Answering = Callable[[HttpRequest], Awaitable[dict[str, Any] | Events]]
Admitting = Callable[[str], object]


class _Reader(asyncio.StreamReader):
    """A reader with an event for the end of what the client sends."""

    def __init__(self) -> None:
        super().__init__(limit=MOST_HEAD, loop=asyncio.get_running_loop())
        self.ended = asyncio.Event()

    def feed_eof(self) -> None:
        super().feed_eof()
        self.ended.set()

    def set_exception(self, exc: BaseException) -> None:
        super().set_exception(exc)  # type: ignore[arg-type]
        self.ended.set()


async def start_server(answer: Answering, admit: Admitting) -> asyncio.Server:
    """Starts the server on a free port; `answer` returns JSON or events, or raises BadRequest.

    `admit` raises BadRequest for an unknown key, before the body is read. Other users of the machine can connect, too.
    The answer to a client that has gone is cancelled.
    """
    unknown: dict[asyncio.StreamWriter, asyncio.TimerHandle] = {}  # with the end of their time, the oldest first

    def forget(writer: asyncio.StreamWriter) -> None:
        if (late := unknown.pop(writer, None)) is not None:
            late.cancel()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def known(key: str) -> None:
            admit(key)
            forget(writer)

        unknown[writer] = asyncio.get_running_loop().call_later(HEAD_S, writer.transport.abort)
        if len(unknown) > _UNKNOWN:
            oldest = next(iter(unknown))
            forget(oldest)
            oldest.transport.abort()
        try:
            with contextlib.suppress(OSError, EOFError, asyncio.CancelledError):  # the client or the episode has gone
                while await _one(reader, writer, answer, known):
                    pass
        finally:
            forget(writer)
            writer.close()

    listening = socket.create_server((HOST, 0))
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: asyncio.StreamReaderProtocol(_Reader(), handle), sock=listening, backlog=_AT_ONCE
    )
    listening.listen(_BACKLOG)
    return server


async def _one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: Answering, admit: Admitting) -> bool:
    """Answers one request; returns whether the connection stays open."""
    stays = False
    try:
        call, stays = await _read(reader, writer, admit)
        reply = await _while_there(answer(call), reader, writer)
        status = 200
    except BadRequest as e:
        error = {"message": str(e), "type": e.code, "code": e.code, "param": None}
        status, reply = e.status, {"type": "error", "error": error}
    if isinstance(reply, dict):
        writer.write(_head(status, "application/json", stays, body := json.dumps(reply).encode()) + body)
    else:
        writer.write(_head(status, "text/event-stream", stays, body := _stream(reply)) + body)
    await writer.drain()
    return stays


async def _read(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, admit: Admitting
) -> tuple[HttpRequest, bool]:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.LimitOverrunError as e:
        raise BadRequest(f"the head of the request must be at most {MOST_HEAD} bytes") from e
    line, *rest = head.rstrip().split("\r\n")
    fields = {name.strip().lower(): value.strip() for name, _, value in (field.partition(":") for field in rest)}
    parts = line.split(" ")
    length, coding = fields.get("content-length", "0"), fields.get("transfer-encoding", "").lower()
    if len(parts) != 3 or not parts[2].startswith("HTTP/1.") or coding not in ("", "chunked"):
        raise BadRequest("the request must be HTTP/1.1 with a Content-Length, or chunked")
    if not (length.isascii() and length.isdecimal() and len(length) < 16):
        raise BadRequest(f"Content-Length={length[:40]!r} must be a number")
    _require_short(int(length))
    key = fields.get("x-api-key") or fields.get("authorization", "").split(" ")[-1]
    admit(key)
    if fields.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = await _chunks(reader) if coding else await reader.readexactly(int(length))
    stays = fields.get("connection", "keep-alive").lower() != "close" and parts[2] == "HTTP/1.1"
    stays &= parts[0] != "HEAD"  # its client expects no body
    return HttpRequest(parts[0], parts[1].partition("?")[0], key, body), stays


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    """Returns a chunked body; fields after it are dropped."""
    body = b""
    while True:
        line = (await reader.readuntil(b"\n")).partition(b";")[0].strip()
        if not re.fullmatch(rb"[0-9a-fA-F]{1,8}", line):
            raise BadRequest(f"a chunk of the body has the size {line[:40]!r}; it must be a hexadecimal number")
        if not (size := int(line, 16)):
            break
        _require_short(len(body) + size)
        body += await reader.readexactly(size)
        await reader.readuntil(b"\n")
    while (await reader.readuntil(b"\n")).strip():
        pass
    return body


def _require_short(length: int) -> None:
    if length > MOST_BODY:
        raise BadRequest(f"the body has {length} bytes or more; it must have at most {MOST_BODY}", status=413)


async def _while_there(answer: Awaitable[Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Any:
    """Returns the answer; cancels it and raises ConnectionError when the client has closed the connection."""
    assert isinstance(reader, _Reader)
    working, ended = asyncio.ensure_future(answer), asyncio.ensure_future(reader.ended.wait())
    try:
        await asyncio.wait({working, ended}, return_when=asyncio.FIRST_COMPLETED)
        while not working.done():
            if _gone(writer):
                raise ConnectionResetError
            await asyncio.wait({working}, timeout=_PROBE_S)
        return working.result()
    finally:
        ended.cancel()
        working.cancel()


def _gone(writer: asyncio.StreamWriter) -> bool:
    """Whether a client that sends no more does not read either: at an interim reply its system then resets."""
    if not writer.is_closing():
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return writer.is_closing() or bool(writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))


def _head(status: int, kind: str, stays: bool, body: bytes) -> bytes:
    lines = [
        f"HTTP/1.1 {status} {REASONS.get(status, 'Error')}",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body)}",
        f"Connection: {'keep-alive' if stays else 'close'}",
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def _stream(events: Events) -> bytes:
    """Returns a whole stream: an answer's tokens arrive from the engine together."""
    pairs = list(events)
    lines = [(f"event: {name}\n" if name else "") + f"data: {json.dumps(data)}\n\n" for name, data in pairs]
    return ("".join(lines) + ("" if all(name for name, _ in pairs) else "data: [DONE]\n\n")).encode()


FILES_OF_ONE, OTHER_FILES = 5, 128  # open ones of an episode, with two connections; of the rest of the process


class _Open(NamedTuple):
    """An episode whose program runs."""

    secret: str
    episode: Episode
    failure: "asyncio.Future[None]"  # of the engine
    answering: "set[asyncio.Task[Any]]"


class Gateway:
    """Runs the episodes of a run; starts with the first one."""

    def __init__(self, agent: str, language: Language, rules: Rules, *, concurrency: int):
        """`agent` is a command line or PATH.py:FUNCTION."""
        if (allowed := allow_files()) < (needed := FILES_OF_ONE * concurrency + OTHER_FILES):
            raise UserError(
                f"rollout.agent_concurrency={concurrency} needs {needed} open files; the limit is {allowed}:"
                f" lower it to {max(1, (allowed - OTHER_FILES) // FILES_OF_ONE)}, or raise the limit (ulimit -n)"
            )
        self._program = process.program_of(agent)
        self._language, self._rules, self._concurrency = language, rules, concurrency
        self._open: dict[str, _Open] = {}  # by name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    async def talk(self, ask: Ask, prompt: Prompt, *, sampling: Sampling, seed: int, near: Hashable) -> Trajectory:
        """Runs an episode; `Talk`."""
        engine, context = asyncio.get_running_loop(), contextvars.copy_context()  # with the sample's span

        async def on_engine(ids: Sequence[int], *, sampling: Sampling, seed: int) -> Answer:
            asked = ask(ids, sampling=sampling, seed=seed, near=near)
            return await asyncio.wrap_future(context.run(asyncio.run_coroutine_threadsafe, _whole(asked), engine))

        arguments = (self._language, self._rules, on_engine, prompt, sampling, seed)
        future = asyncio.run_coroutine_threadsafe(self._hold(*arguments), self._running())
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Ends all programs and the server; may be called twice."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(self._end(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join()
            loop.close()

    def _running(self) -> asyncio.AbstractEventLoop:
        """Returns the gateway's loop after starting the server on it."""
        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=loop.run_forever, name="jppo-gateway", daemon=True)
                self._thread.start()
                asyncio.run_coroutine_threadsafe(self._start(), loop).result()
                self._loop = loop
            return self._loop

    async def _start(self) -> None:
        self._slots = asyncio.Semaphore(self._concurrency)
        self._server = await start_server(self._answer, self._admit)
        self._url = f"http://{HOST}:{self._server.sockets[0].getsockname()[1]}"

    async def _end(self) -> None:
        self._server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._program.close()

    async def _hold(self, *arguments: Any) -> Trajectory:
        async with self._slots:
            episode, name, secret = Episode(*arguments), secrets.token_hex(8), secrets.token_urlsafe(32)
            failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._open[name] = _Open(secret, episode, failure, set())
            env = process.episode_variables(self._url, f"{name}.{secret}")
            program = process.run_agent(self._program, episode.task(), env, self._rules.timeout_s)
            running = asyncio.ensure_future(program)
            try:
                either: set[asyncio.Future[Any]] = {running, failure}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if failure.done():
                    failure.result()
                return episode.trajectory(await running)
            except OSError as e:
                raise RolloutError(f"an agent cannot be started: {e}; see rollout.agent_concurrency") from e
            finally:
                ending: list[asyncio.Future[Any]] = [*self._open.pop(name).answering, failure, running]
                for task in ending:
                    task.cancel()
                await asyncio.wait({running})

    def _admit(self, key: str) -> "_Open":
        name, _, secret = key.partition(".")
        running = self._open.get(name)
        known = secrets.token_urlsafe(32) if running is None else running.secret
        if not hmac.compare_digest(known.encode(), secret.encode()) or running is None:
            raise BadRequest("the key is of no episode that runs; send OPENAI_API_KEY", "authentication_error", 401)
        return running

    async def _answer(self, call: HttpRequest) -> Any:
        running = self._admit(call.key)
        episode = running.episode
        if call.method == "GET" and call.path == "/v1/models":
            return {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "jppo", "created": 0}]}
        api = APIS.get(call.path)
        if call.method != "POST" or (api is None and call.path != "/v1/reward"):
            paths = ", ".join((*APIS, "/v1/reward"))
            raise BadRequest(f"there is no {call.method[:16]} {call.path[:80]!r}; POST one of {paths}", status=404)
        body = _parsed(call.body)
        if api is None:
            return episode.post(body)
        request: Request = api.read(body, episode.earlier) if api is RESPONSES else api.read(body)
        answering = asyncio.current_task()
        assert answering is not None
        running.answering.add(answering)
        try:
            reply = await episode.answer(request)
        except (BadRequest, asyncio.CancelledError):
            raise
        except Exception as e:  # of the engine: it ends the run
            if not running.failure.done():
                running.failure.set_exception(e)
            raise BadRequest("the rollout engine failed", "server_error", 500) from e
        finally:
            running.answering.discard(answering)
        if api is RESPONSES:
            messages = request.messages[1:] if body.get("instructions") else request.messages
            episode.keep(reply.id, (*messages, reply.choices[0].message))
        return api.events(reply, request) if request.stream else api.write(reply, request)


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError) as e:
        raise BadRequest(f"the body is not valid JSON: {e}") from e
    if not isinstance(parsed, dict):
        raise BadRequest("the body must be a JSON object")
    return parsed


async def _whole(asked: Any) -> Answer:
    answer: Answer = await asked
    return answer
