"""Parts of the reward by rule, custom function, length and format; functions run in worker processes (`pool.py`).

`RulePart` maps each data source to its rule. A grader takes a response and the row's ground truth and returns a reward.
A wrong or missing answer is a score of 0, of `math_dapo` -1. A grader that fails gives an error, which is counted and
shown, never a 0.

`reward.function='path.py:name'` is checked before training. The parameter names select the form (`pool_worker.py`):

    compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float or {"score": float, ...}
    compute_score(data_sources, solution_strs, ground_truths, extra_infos) -> list of those
    compute_score(completions, **kwargs) -> list of those; TRL's

The last two get all samples submitted before `flush` at once. A dict may have amounts that are earned inside the
response (`earned.py`).
"""

import collections
import functools
import math
import pathlib
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from jppo import plugins
from jppo.errors import UserError, expanded
from jppo.registry import Registry, did_you_mean, read_source, require_name
from jppo.rewards import rules
from jppo.rewards.parts import Part, Sample, at_characters, failed, graded
from jppo.rewards.pool import AnswerReader, Pool, Target, as_plain, require_prepared
from jppo.rewards.rules import Verdict
from jppo.types import Reward

Grader = Callable[[str, str], Verdict | Reward]  # (response, ground truth)
V = TypeVar("V")


def run_tests(response: str, ground_truth: str) -> Verdict:
    """The rule `code` in this process; a run has it in its pool."""
    verdict: Verdict = plugins.load("sandbox.code").code(response, ground_truth, time_s=8.0, memory_bytes=2**31)
    return verdict


# The grader of each data source; `reward.grader` names one of these keys to override it for all rows. Data sources of
# verl 0.9.1 are graded as there. A key that ends in * stands for all sources that begin so.
_BUILT_IN: dict[str, Grader] = {
    "openai/gsm8k": rules.gsm8k_strict,
    "gsm8k_strict": rules.gsm8k_strict,
    "gsm8k": rules.gsm8k,
    "gsm8k_flexible": rules.gsm8k_flexible,
    "arithmetic": rules.exact,
    "exact": rules.exact,
    "multiplication": rules.behind_tools,
    "lighteval/MATH": rules.math_reward,
    "DigitalLearningGmbH/MATH-lighteval": rules.math_reward,
    "HuggingFaceH4/MATH-500": rules.math_reward,
    "math_reward": rules.math_reward,
    "math": rules.math_dapo,
    "math_dapo": rules.math_dapo,
    "math_dapo_reasoning": rules.math_dapo,
    "aime*": rules.math_dapo,
    "math_verify": rules.math_verify,
    "searchR1_*": rules.search_r1,
    "search_r1": rules.search_r1,
    "aqua": rules.choice,
    "deepmind/aqua_rat": rules.choice,
    "choice": rules.choice,
    "choice_strict": rules.choice_strict,
    "mentions": rules.mentions,
    "code": run_tests,
}
GRADERS = Registry("graders", _BUILT_IN)
# What verl 0.9.1 grades and jppo does not, with the reason and the remedy.
_NUMINA = "verl's rule evaluates text of the response as Python; set reward.grader=math_verify, which parses it"
_PROGRAMS = "verl's rule runs programs without a sandbox; set reward.grader=code, which has one, and reward.allow_code"
REFUSED = {
    "numina_*": _NUMINA,
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), _PROGRAMS),
    "hiyouga/geometry3k": "its questions are images and jppo's models read text; leave these rows out",
}
RUNS_CODE = (run_tests,)  # only where reward.allow_code says so
# These run in the pool, as programs do; the others in the trainer's own thread.
_MAY_HANG: dict[Grader, str] = {rules.math_verify: "math_verify"}
_PROGRAM_SHARE = 0.8  # fraction of reward.timeout_s for a program: one that never ends is wrong, not an error


class RulePart(Part):
    """The rules of the data sources as a part of the reward; closes the pool with itself."""

    def __init__(
        self,
        data_sources: Iterable[str],
        *,
        override: str = "",
        allow_code: bool = False,
        sandbox: tuple[str, ...] = ("strict",),  # reward.sandbox and reward.sandbox_url
        tests_in: str = "strict",  # reward.code.tests
        pool: Pool,
    ):
        """Finds the grader of each source and prepares those that run in the pool; UserError if one is missing."""
        self._graders = graders_for(data_sources, override=override, allow_code=allow_code)
        self._targets = {
            source: self._target(grader, pool, tests_in, sandbox) for source, grader in self._graders.items()
        }
        self._pool = pool
        self._counts: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()
        for target in {target for target in self._targets.values() if target is not None}:
            require_prepared(pool, target, f"the rule {target[1] if target[0] == 'rule' else target[0]!r}")

    @staticmethod
    def _target(grader: Grader, pool: Pool, tests_in: str, sandbox: tuple[str, ...]) -> Target | None:
        """Returns the pool's target for a grader that may hang; None for one that runs in the trainer."""
        if grader is run_tests:
            return ("code", str(_PROGRAM_SHARE * pool.timeout_s), str(pool.memory_bytes), tests_in, *sandbox)
        return ("rule", _MAY_HANG[grader]) if grader in _MAY_HANG else None

    def submit(self, sample: Sample) -> Future[Reward]:
        """Grades the sample at once by a quick rule, or submits it to the pool."""
        source = sample.prompt.data_source
        target = self._targets.get(source)
        if target is not None:
            submitted = self._pool.submit(target, as_plain(sample))
            if target[0] == "code":
                submitted.add_done_callback(self._count)
            return submitted
        if source not in self._graders:
            return graded(failed(f"data_source={source!r} is not one of the sources at the start of the run"))
        return graded(_grade_safely(self._graders[source], sample.text, sample.prompt.ground_truth))

    def _count(self, finished: Future[Reward]) -> None:
        """Counts the reward of a graded program for `metrics`."""
        code, reward = plugins.load("sandbox.code"), finished.result()
        with self._lock:
            self._counts.update(
                suspicious=int(reward.parts.get(code.SUSPICIOUS, 0)),  # with names that reach into their interpreter
                retries=int(reward.parts.get(code.RETRIES, 0)),  # of requests to a sandbox service
                errors=int(reward.error is not None),
            )

    def metrics(self) -> dict[str, float]:
        """Returns the counts of graded programs since the last call; empty without code."""
        if run_tests not in self._graders.values():
            return {}
        with self._lock:
            counts, self._counts = self._counts, collections.Counter()
        return {
            "reward/code/suspicious": float(counts["suspicious"]),
            "reward/code/errors": float(counts["errors"]),
            "reward/code/retries": float(counts["retries"]),
        }

    def close(self) -> None:
        self._pool.close()


def graders_for(data_sources: Iterable[str], *, override: str = "", allow_code: bool = False) -> dict[str, Grader]:
    """Returns the grader of each data source before training starts; a source without one is a UserError."""
    return {source: _require_grader(source, override, allow_code) for source in sorted(set(data_sources))}


def _require_grader(source: str, override: str, allow_code: bool) -> Grader:
    """Returns the grader of a source; UserError if there is none, or if it needs reward.allow_code."""
    name, setting = (override, "reward.grader") if override else (source, "data_source")
    if (reason := _match_source(REFUSED, name)) is not None:
        raise UserError(f"{setting}={name!r} cannot be graded as verl grades it: {reason}")
    grader = grader_of(name)
    if grader is None:
        raise UserError(
            f"{setting}={name!r} has no grader; known are {', '.join(GRADERS)}; rename the source in the data file,"
            f" choose one with reward.grader, or set reward.function=PATH.py:NAME{did_you_mean(name, GRADERS)}"
        )
    if grader in RUNS_CODE and not allow_code:
        raise UserError(
            f"{setting}={name!r} runs the programs in responses, in the sandbox of reward.sandbox; if that is"
            " what you want, set reward.allow_code=True"
        )
    return grader


def refusal(source: str, ground_truth: str, *, override: str = "", tests_in: str = "strict") -> str:
    """Returns why a row cannot be graded and is left out of a run, or ''."""
    if grader_of(override or source) not in RUNS_CODE or tests_in != "strict":
        return ""
    reason: str = plugins.load("sandbox.code").refusal_reason(ground_truth)
    return reason


def describe_refused(refused: Sequence[str]) -> str:
    """Returns a console line on the rows that a run leaves out; '' without any."""
    if not refused:
        return ""
    return (
        f"{len(refused)} rows left out, whose asserts reward.code.tests=strict cannot grade; the first, {refused[0]};"
        " native grades all, and a program can cheat there"
    )


def grader_of(source: str) -> Grader | None:
    """Returns the grader of a data source; None without one."""
    return _match_source(GRADERS, source)


def _match_source(table: Mapping[str, V], source: str) -> V | None:
    prefixes = (key for key in table if key.endswith("*") and source.startswith(key[:-1]))
    return table.get(source, table.get(next(prefixes, source)))


def _grade_safely(grader: Grader, response: str, ground_truth: str) -> Reward:
    """Calls the grader; an exception or a non-finite score becomes a reward with an error."""
    try:
        reward = grader(response, ground_truth)
        if isinstance(reward, Verdict):
            reward = Reward(reward.score, reward.parts, error=None, answer=reward.answer)
        if not math.isfinite(reward.score):
            raise ValueError(f"the score is {reward.score}; it must be a finite number")
        return reward
    except Exception as e:  # an exception of a grader is an error of its sample only
        return failed(f"{type(e).__name__}: {e}")


NAME = "compute_score"  # of the function, where the setting names only the file


class FunctionPart(Part):
    """A custom function as a part of the reward; loads the file at once, and closes the pool with itself.

    Invalid files and functions are UserErrors here. In training, a failure is an error of its sample, or of all samples
    of the batch in the second form.
    """

    def __init__(self, function: str, *, pool: Pool, decode: Callable[[list[int]], str]):
        target = _function_target(function)
        self.batch = require_prepared(pool, target, f"reward.function={function!r}")
        self._target, self._pool, self._decode = target, pool, decode
        self._waiting: list[tuple[Sample, Future[Reward]]] = []
        self._lock = threading.Lock()

    def submit(self, sample: Sample) -> Future[Reward]:
        """Submits the sample to a worker, or keeps it for the batch."""
        if not self.batch:
            return self._pool.submit(self._target, self._plain_sample(sample), self._make_reader(sample))
        future: Future[Reward] = Future()
        with self._lock:
            self._waiting.append((sample, future))
        return future

    def flush(self) -> None:
        """Submits all waiting samples to one worker as a batch, for a function that scores many at once."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        plain_samples = [self._plain_sample(sample) for sample, _ in waiting]
        readers = [self._make_reader(sample) for sample, _ in waiting]
        batch_futures = self._pool.submit_batch(self._target, plain_samples, readers)
        for inner, (_, future) in zip(batch_futures, waiting, strict=True):
            inner.add_done_callback(functools.partial(_copy_result, future))

    def _plain_sample(self, sample: Sample) -> dict[str, Any]:
        """Returns the sample as workers read it, with prompt, columns, turns, and a conversation's texts in `extra`."""
        row_values = {"prompt": sample.prompt.messages, "columns": sample.prompt.extra}
        plain = as_plain(sample) | row_values | {"turns": len(sample.turns)}
        if sample.exchange is None or sample.tokens is None or not isinstance(plain["extra"], Mapping):
            return plain
        texts = [self._decode(sample.tokens[begin:end].tolist()) for begin, end in sample.turns]
        return plain | {"extra": {**plain["extra"], "turns": texts}}

    def _make_reader(self, sample: Sample) -> AnswerReader:
        return functools.partial(_reward_of_answer, sample, self._decode)

    def close(self) -> None:
        """Stops the pool's processes; waiting samples become errors."""
        self._pool.close()
        self.flush()


def _copy_result(future: Future[Reward], finished: Future[Reward]) -> None:
    future.set_result(finished.result())


def _reward_of_answer(sample: Sample, decode: Callable[[list[int]], str], answer: dict[str, Any]) -> Reward:
    """Makes the reward from a worker's answer and places its amounts on the tokens of the sample."""
    unit, amounts = answer.pop("earned", ("", ()))
    if sample.tokens is None:  # a text without tokens, as in checks
        amounts = ()
    elif unit == "turns":
        amounts = [(sample.turns[turn][1] - 1, amount) for turn, amount in amounts]
    else:
        amounts = at_characters(amounts, sample.tokens.tolist(), decode)
    return Reward(**answer, earned=tuple(amounts))


def require_function(function: str) -> None:
    """Raises a UserError if the file of reward.function is missing or cannot define the function; does not run it."""
    _, path, name, source = _function_target(function)
    require_name(source, pathlib.Path(path), name, f"reward.function={function!r}")


def _function_target(function: str) -> Target:
    """Parses reward.function and reads its file; returns the pool's target, UserError if the file cannot be read."""
    file, colon, name = (function, ":", NAME) if function.endswith(".py") else function.rpartition(":")
    if not (colon and file.endswith(".py") and name):
        raise UserError(f"reward.function={function!r} must be PATH.py, or PATH.py:NAME, as in mine.py:{NAME}")
    path = expanded(file).resolve()
    return ("function", str(path), name, read_source(path, f"reward.function={function!r}"))


def overlong(length: int, *, max_response_length: int, buffer_tokens: int) -> float:
    """DAPO's soft length penalty (arXiv 2503.14476, eq. 13; verl's overlong buffer), with L tokens and buffer b.

    0 while length <= L - b, then (L - b - length) / b, which is -1 at L.
    """
    return min(0.0, (max_response_length - buffer_tokens - length) / buffer_tokens)


class OverlongPart(Part):
    """`overlong` as a part of the reward."""

    def __init__(self, *, max_response_length: int, buffer_tokens: int):
        if not 0 < buffer_tokens <= max_response_length:
            raise UserError(
                f"reward.overlong_buffer_tokens={buffer_tokens} must be above 0 and at most "
                f"data.max_response_length={max_response_length}"
            )
        self._limits = dict(max_response_length=max_response_length, buffer_tokens=buffer_tokens)

    def submit(self, sample: Sample) -> Future[Reward]:
        return graded(Reward(overlong(sample.length, **self._limits), {}, error=None))


class FormatPart(Part):
    """1 if a pattern matches the whole response, line breaks included, else 0.

    It runs in the pool, because some patterns take extremely long on some texts; such a sample is an error. The pool is
    closed with it.
    """

    def __init__(self, pattern: str, *, pool: Pool):
        try:
            re.compile(pattern, re.DOTALL)
        except (re.error, OverflowError, RecursionError) as e:
            raise UserError(f"reward.format_regex={pattern!r} is not a regular expression: {e}; fix it") from e
        self._target: Target = ("format", pattern)
        self._pool = pool

    def submit(self, sample: Sample) -> Future[Reward]:
        return self._pool.submit(self._target, as_plain(sample) | {"extra": None})

    def close(self) -> None:
        self._pool.close()
