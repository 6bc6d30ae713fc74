"""The gateway of a run: starts an agent's program for each sample and answers its requests, in a thread of its own.

`talk` is the run's `Talk`: any engine samples the answers, and asynchronous modes label them with their versions.
"""

import asyncio
import contextvars
import hmac
import json
import secrets
import threading
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from jppo.agent.gateway import chat, completions, http, messages, process, responses
from jppo.agent.gateway.episode import MODEL, Episode, Language, Rules
from jppo.agent.gateway.request import BadRequest, Request
from jppo.process import allow_files
from jppo.rollout.protocol import Answer, Ask, RolloutError
from jppo.settings import UserError
from jppo.types import Prompt, Sampling, Trajectory

FILES_OF_ONE, OTHER_FILES = 5, 128  # open ones of an episode, with two connections; of the rest of the process
_APIS: dict[str, Any] = {
    "/v1/chat/completions": chat,
    "/v1/completions": completions,
    "/v1/messages": messages,
    "/v1/responses": responses,
}


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

        how = (self._language, self._rules, on_engine, prompt, sampling, seed)
        future = asyncio.run_coroutine_threadsafe(self._hold(*how), self._running())
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
        self._server = await http.serve(self._answer, self._admit)
        self._url = f"http://{http.HOST}:{self._server.sockets[0].getsockname()[1]}"

    async def _end(self) -> None:
        self._server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._program.close()

    async def _hold(self, *how: Any) -> Trajectory:
        async with self._slots:
            episode, name, secret = Episode(*how), secrets.token_hex(8), secrets.token_urlsafe(32)
            failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._open[name] = _Open(secret, episode, failure, set())
            env = process.environment(self._url, f"{name}.{secret}")
            running = asyncio.ensure_future(process.run(self._program, episode.task(), env, self._rules.timeout_s))
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
        found = self._open.get(name)
        known = secrets.token_urlsafe(32) if found is None else found.secret
        if not hmac.compare_digest(known.encode(), secret.encode()) or found is None:
            raise BadRequest("the key is of no episode that runs; send OPENAI_API_KEY", "authentication_error", 401)
        return found

    async def _answer(self, call: http.Call) -> Any:
        of = self._admit(call.key)
        episode = of.episode
        if call.method == "GET" and call.path == "/v1/models":
            return {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "jppo", "created": 0}]}
        api = _APIS.get(call.path)
        if call.method != "POST" or (api is None and call.path != "/v1/reward"):
            paths = ", ".join((*_APIS, "/v1/reward"))
            raise BadRequest(f"there is no {call.method[:16]} {call.path[:80]!r}; POST one of {paths}", status=404)
        body = _parsed(call.body)
        if api is None:
            return episode.post(body)
        request: Request = api.read(body, episode.earlier) if api is responses else api.read(body)
        answering = asyncio.current_task()
        assert answering is not None
        of.answering.add(answering)
        try:
            reply = await episode.answer(request)
        except (BadRequest, asyncio.CancelledError):
            raise
        except Exception as e:  # of the engine: it ends the run
            if not of.failure.done():
                of.failure.set_exception(e)
            raise BadRequest("the rollout engine failed", "server_error", 500) from e
        finally:
            of.answering.discard(answering)
        if api is responses:
            said = request.messages[1:] if body.get("instructions") else request.messages
            episode.keep(reply.id, (*said, reply.choices[0].message))
        return api.events(reply, request) if request.stream else api.write(reply, request)


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as e:
        raise BadRequest(f"the body is not valid JSON: {e}") from e
    if not isinstance(found, dict):
        raise BadRequest("the body must be a JSON object")
    return found


async def _whole(asked: Any) -> Answer:
    answer: Answer = await asked
    return answer
