"""The gateway of a run: starts an agent's program for each sample and answers its requests, in a thread of its own.

`talk` is the run's `Talk`: any engine samples the answers, and asynchronous modes label them with their versions.
The server is on the loopback interface, with JSON bodies and event streams, for hundreds of clients.
"""

import asyncio
import contextvars
import hmac
import json
import secrets
import threading
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from jppo.errors import BadRequest, UserError
from jppo.event_loop import LoopThread, cancel_tasks
from jppo.http_server import HttpReply, HttpRequest, HttpServer, json_object, json_reply
from jppo.plugins.agents.gateway import process
from jppo.plugins.agents.gateway.apis import APIS, RESPONSES
from jppo.plugins.agents.gateway.episode import MODEL, Episode, Language, Rules
from jppo.plugins.agents.gateway.request import Request
from jppo.process import allow_files
from jppo.rollout.protocol import Answer, Ask, RolloutError
from jppo.types import Prompt, Sampling, Trajectory

HOST = "127.0.0.1"
FILES_OF_ONE, OTHER_FILES = 5, 128  # open ones of an episode, with two connections; of the rest of the process


class _OpenEpisode(NamedTuple):
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
        self._program = process.parse_agent(agent)
        self._language, self._rules, self._concurrency = language, rules, concurrency
        self._open: dict[str, _OpenEpisode] = {}  # by name
        self._stray_refusal = ""  # of the last request whose episode is unknown
        self._thread: LoopThread | None = None
        self._lock = threading.Lock()

    async def talk(self, ask: Ask, prompt: Prompt, *, sampling: Sampling, seed: int, near: Hashable) -> Trajectory:
        """Runs an episode of the agent's program for one sample; the run's `Talk`."""
        engine, context = asyncio.get_running_loop(), contextvars.copy_context()  # with the sample's span

        async def on_engine(ids: Sequence[int], *, sampling: Sampling, seed: int) -> Answer:
            asked = ask(ids, sampling=sampling, seed=seed, near=near)
            return await asyncio.wrap_future(context.run(asyncio.run_coroutine_threadsafe, asked, engine))

        arguments = (self._language, self._rules, on_engine, prompt, sampling, seed)
        return await asyncio.wrap_future(self._start_thread().submit(self._run_episode(*arguments)))

    def close(self) -> None:
        """Ends all programs and the server; may be called twice."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.close(self._end_all())

    def _start_thread(self) -> LoopThread:
        """Returns the gateway's thread after starting the server in it."""
        with self._lock:
            if self._thread is None:
                thread = LoopThread("jppo-gateway")
                thread.submit(self._start()).result()
                self._thread = thread
            return self._thread

    async def _start(self) -> None:
        self._slots = asyncio.Semaphore(self._concurrency)
        self._server = HttpServer(self._answer_request, self._find_episode, _refusal)
        _, port = await self._server.start(HOST, 0)
        self._url = f"http://{HOST}:{port}"

    async def _end_all(self) -> None:
        self._server.close()
        await cancel_tasks()
        await self._program.close()

    async def _run_episode(self, *arguments: Any) -> Trajectory:
        """Runs an agent's program for one sample; returns the trajectory of its requests."""
        async with self._slots:
            episode, name, secret = Episode(*arguments), secrets.token_hex(8), secrets.token_urlsafe(32)
            failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._open[name] = _OpenEpisode(secret, episode, failure, set())
            env = process.episode_variables(self._url, f"{name}.{secret}")
            program = process.run_agent(self._program, episode.task(), env, self._rules.timeout_s)
            running = asyncio.ensure_future(program)
            try:
                first_of: set[asyncio.Future[Any]] = {running, failure}
                await asyncio.wait(first_of, return_when=asyncio.FIRST_COMPLETED)
                if failure.done():
                    failure.result()
                return episode.trajectory(await running, self._stray_refusal)
            except OSError as e:
                raise RolloutError(f"an agent cannot be started: {e}; see rollout.agent_concurrency") from e
            finally:
                ending: list[asyncio.Future[Any]] = [*self._open.pop(name).answering, failure, running]
                for task in ending:
                    task.cancel()
                await asyncio.wait({running})

    def _find_episode(self, key: str) -> _OpenEpisode:
        """Returns the running episode of a key; BadRequest if there is none."""
        name, _, secret = key.partition(".")
        running = self._open.get(name)
        expected = secrets.token_urlsafe(32) if running is None else running.secret
        if not hmac.compare_digest(expected.encode(), secret.encode()) or running is None:
            self._stray_refusal = "the key is of no episode that runs; send OPENAI_API_KEY"
            raise BadRequest(self._stray_refusal, "authentication_error", 401)
        return running

    async def _answer_request(self, call: HttpRequest) -> HttpReply:
        """Answers a request of an agent by its API."""
        running = self._find_episode(call.key)
        try:
            return await self._answer_episode(running, call)
        except BadRequest as e:
            running.episode.refusal = str(e)
            raise

    async def _answer_episode(self, running: _OpenEpisode, call: HttpRequest) -> HttpReply:
        episode = running.episode
        if call.method == "GET" and call.path == "/v1/models":
            model = {"id": MODEL, "object": "model", "owned_by": "jppo", "created": 0}
            return json_reply({"object": "list", "data": [model]})
        api = APIS.get(call.path)
        if call.method != "POST" or (api is None and call.path != "/v1/reward"):
            paths = ", ".join((*APIS, "/v1/reward"))
            raise BadRequest(f"there is no {call.method[:16]} {call.path[:80]!r}; POST one of {paths}", status=404)
        body = json_object(call.body)
        if api is None:
            return json_reply(episode.post(body))
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
            episode.remember(reply.id, (*messages, reply.choices[0].message))
        return _stream(api.events(reply, request)) if request.stream else json_reply(api.write(reply, request))


def _refusal(error: BadRequest) -> HttpReply:
    """Returns an error in a form that OpenAI's and Anthropic's clients read."""
    fields = {"message": str(error), "type": error.code, "code": error.code, "param": None}
    return json_reply({"type": "error", "error": fields}, error.status)


def _stream(events: Iterable[tuple[str, Any]]) -> HttpReply:
    """Returns a whole stream of (name or '', JSON): an answer's tokens arrive from the engine together."""
    pairs = list(events)
    lines = [(f"event: {name}\n" if name else "") + f"data: {json.dumps(data)}\n\n" for name, data in pairs]
    text = "".join(lines) + ("" if all(name for name, _ in pairs) else "data: [DONE]\n\n")
    return HttpReply(text.encode(), "text/event-stream")
