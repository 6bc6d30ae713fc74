"""A language model as the judge: scores samples over HTTP, concurrently with the rollout.

    sample -> `Rubric.question` -> cache, or `JudgeClient.ask` with retries -> `read_score` -> Reward

A failure is an error of its sample, never a 0. Keys come from the environment and are only sent in requests. Cost is
reported in tokens.
"""

import asyncio
import collections
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import random
import secrets
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from jppo.errors import expanded
from jppo.rewards.judge.client import JudgeClient, JudgeError, JudgeReply
from jppo.rewards.judge.prompts import Rubric, read_score
from jppo.rewards.parts import Part, Sample, failed, graded
from jppo.settings import UserError
from jppo.types import Reward


class JudgePart(Part):
    """The judge as a part of the reward, with its own event loop in a thread."""

    def __init__(
        self,
        client: JudgeClient,
        rubric: Rubric,
        *,
        concurrency: int,
        retries: int,
        cache_dir: str = "",
        first_wait_s: float = 2.0,  # before a retry; doubles each time
        longest_wait_s: float = 60.0,
    ):
        self._client, self._rubric = client, rubric
        self._retries, self._first_wait_s, self._longest_wait_s = retries, first_wait_s, longest_wait_s
        self._cache = ScoreCache(cache_dir) if cache_dir else None
        self._slots = asyncio.Semaphore(concurrency)
        self._counts: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()  # guards the counts and _closed
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="jppo-judge", daemon=True)
        self._thread.start()

    def submit(self, sample: Sample) -> Future[Reward]:
        """Submits a sample from any thread; the reward has a score from 0 to 1 and `judge_raw` from 0 to max_score."""
        future: Future[Reward] = Future()
        future.set_running_or_notify_cancel()  # it cannot be cancelled any more
        with self._lock:
            if not self._closed:
                asyncio.run_coroutine_threadsafe(self._grade(sample, future), self._loop)
                return future
        self._count(errors=1)
        return graded(failed("the judge was closed before the sample was submitted"))

    def metrics(self) -> dict[str, float]:
        """Returns counts since the last call: errors are samples, requests include retries."""
        names = ("requests", "retries", "cache_hits", "prompt_tokens", "completion_tokens", "errors", "cache_failures")
        with self._lock:
            counts, self._counts = self._counts, collections.Counter()
        return {f"judge/{name}": float(counts[name]) for name in names}

    def close(self) -> None:
        """Stops requests and connections; waiting samples become errors. May be called twice."""
        with self._lock:
            first, self._closed = not self._closed, True
            if first:
                ended = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        if first:
            try:
                ended.result()
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    async def _grade(self, sample: Sample, future: Future[Reward]) -> None:
        """Resolves the future of a sample; a failure of any kind is an error of the sample."""
        try:
            future.set_result(await self._score(sample))
            return
        except asyncio.CancelledError:
            said = "the judge was closed before it answered"
        except Exception as e:
            said = self._client.scrub(str(e) if isinstance(e, JudgeError) else f"{type(e).__name__}: {e}")
        self._count(errors=1)
        future.set_result(failed(said))

    async def _score(self, sample: Sample) -> Reward:
        question = self._rubric.question(sample)  # without the random marks
        asked = {**self._client.asked, **dataclasses.asdict(self._rubric), "question": question}
        async with self._slots:  # held during retries, so a busy server gets fewer requests
            score = None if self._cache is None else self._cache.get(asked)
            if score is not None:
                self._count(cache_hits=1)
            else:
                answer = await self._answer(self._rubric.question(sample, mark=secrets.token_hex(8)))
                score = self._read(answer)
                self._remember(asked, score, answer.text)
        return Reward(score, {"judge_raw": score * self._rubric.max_score}, error=None)

    async def _answer(self, question: str) -> JudgeReply:
        """Asks the judge, with retries after growing delays."""
        for attempt in range(self._retries + 1):
            self._count(requests=1, retries=int(attempt > 0))
            try:
                answer = await self._client.ask(self._rubric.system, question)
            except JudgeError as e:
                if not e.again:
                    raise
                if attempt == self._retries:
                    raise JudgeError(f"{e}; {attempt + 1} requests were sent") from e
                if e.after_s > self._longest_wait_s:
                    raise JudgeError(f"{e}; it asks to retry after {e.after_s:g} s, which is too long") from e
                pause = min(self._first_wait_s * 2**attempt, self._longest_wait_s)
                await asyncio.sleep(max(pause * random.uniform(0.5, 1.0), e.after_s * random.uniform(1.0, 1.1)))
            else:
                self._count(prompt_tokens=answer.prompt_tokens, completion_tokens=answer.completion_tokens)
                return answer
        raise AssertionError("unreachable")

    def _read(self, answer: JudgeReply) -> float:
        if answer.finish in ("content_filter", "refusal"):
            raise JudgeError(f"the judge refused ({answer.finish}): {answer.text[:200]!r}")
        if not answer.text.strip():
            raise JudgeError(f"the judge's reply is empty; it finished with {answer.finish!r}")
        return read_score(answer.text, self._rubric.max_score, cut=answer.finish in ("length", "max_tokens"))

    def _remember(self, asked: Mapping[str, Any], score: float, reply: str) -> None:
        try:
            if self._cache is not None:
                self._cache.put(asked, score, self._client.scrub(reply))
        except OSError:  # a full disk must not lose a score
            self._count(cache_failures=1)

    def _count(self, **more: int) -> None:
        with self._lock:
            self._counts.update(more)


class ScoreCache:
    """Scores from 0 to 1, keyed by the request and the judge: a file per entry, shared by any number of processes.

    An unreadable entry is ignored and rewritten.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self._folder = expanded(folder)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise UserError(f"reward.judge.cache_dir={str(folder)!r} cannot be created: {e}; choose another") from e

    def get(self, asked: Mapping[str, Any]) -> float | None:
        """Returns the score of an entry, or None."""
        try:
            score = json.loads(self._file(asked).read_bytes())["score"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        known = isinstance(score, float | int) and not isinstance(score, bool)
        return float(score) if known and math.isfinite(score) and 0 <= score <= 1 else None

    def put(self, asked: Mapping[str, Any], score: float, reply: str) -> None:
        """Writes an entry atomically; `reply` is for human readers."""
        file = self._file(asked)
        file.parent.mkdir(exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, suffix=".tmp")
        try:
            with open(handle, "w") as f:
                json.dump({"score": score, "reply": reply}, f)
            os.replace(name, file)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise

    def _file(self, asked: Mapping[str, Any]) -> pathlib.Path:
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
        return self._folder / digest[:2] / f"{digest[2:]}.json"
