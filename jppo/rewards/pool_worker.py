"""A worker process for scoring code that may hang, crash, print, fork or exhaust memory; `pool.py` starts it.

    python -m jppo.rewards.pool_worker PARENT_PID MEMORY_BYTES

It consists of two processes. The worker runs jobs: requests are pickled over stdin, replies are JSON over stdout, each
with a length prefix; output of jobs goes to stderr. The guard waits. When the worker or the trainer ends, or on
SIGTERM, the guard kills all of its descendants, including those outside the worker's group, and exits like the worker.

A job's target is a tuple of texts. `prepare_target` imports, compiles or loads it once per worker and returns a
callable on samples, which are plain dicts: a rule, a pattern, or a custom function of one sample, of a batch, or in
TRL's form, by the names of its parameters. Answers are plain JSON dicts. Standard library only: neither jax nor the
trainer.
"""

import asyncio
import contextlib
import functools
import importlib
import inspect
import json
import math
import os
import pathlib
import pickle
import re
import resource
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jppo import child_process, plugins, user_files
from jppo.rewards import earned, rules

Sample = dict[str, Any]  # data_source, text, truth, extra; for custom functions also turns, prompt and columns
Function = Callable[..., Any]

ONE = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
TRL = "completions"
ONLY_IN_TRL = ("completion_ids", "trainer_state", "log_extra", "log_metric", "environments")  # by TRL alone


def _takes_batch(function: Function) -> bool:
    """Whether the function scores many samples in one call."""
    return bool({BATCH[1], TRL} & set(_parameters(function)))


def _check_signature(function: Function, name: str) -> None:
    """Raises ValueError unless the custom function has one of the three signatures."""
    if TRL in _parameters(function):
        refused_parameters = [parameter for parameter in _required_parameters(function) if parameter in ONLY_IN_TRL]
        if not refused_parameters:
            return
        fault = f"asks for {refused_parameters[0]!r}, which jppo does not pass"
    else:
        fault = "has the signature (?)"
        if (signature := _signature(function)) is not None:
            fault = f"has the signature {signature}"
            with contextlib.suppress(TypeError):
                signature.bind(**dict.fromkeys(BATCH if _takes_batch(function) else ONE))
                return
    raise ValueError(
        f"{name!r} {fault}; it must be a function of ({', '.join(ONE)}=None), of ({', '.join(BATCH)}) for all"
        f" samples at once, or of ({TRL}, **kwargs) as in TRL"
    )


def call_function(function: Function, samples: Sequence[Sample]) -> list[Any]:
    """Calls the custom function and returns its result for each sample; ValueError for another number of results."""
    if not _takes_batch(function):
        return _call_all(function, [dict(zip(ONE, _sample_arguments(sample), strict=True)) for sample in samples])
    if TRL in _parameters(function):
        arguments = _trl_arguments(function, samples)
    else:
        arguments = dict(zip(BATCH, map(list, zip(*map(_sample_arguments, samples), strict=True)), strict=True))
    results = _call_all(function, [arguments])[0]
    type_name = type(results).__name__
    if isinstance(results, str | bytes | dict):  # whose elements are no scores
        raise ValueError(f"the function returned {type_name}; it must be a list of scores")
    try:
        results = list(results)
    except TypeError as e:
        raise ValueError(f"the function returned {type_name}; it must be a list of scores") from e
    if len(results) != len(samples):
        raise ValueError(f"the function returned {len(results)} scores for {len(samples)} samples")
    return results


def _call_all(function: Function, calls: Sequence[dict[str, Any]]) -> list[Any]:
    """Calls the function with each set of arguments; calls of an async function run concurrently."""
    if not user_files.is_async(function):
        return [function(**call) for call in calls]

    async def every() -> list[Any]:
        under_way = [asyncio.ensure_future(function(**call)) for call in calls]
        try:
            return list(await asyncio.gather(*under_way))
        finally:  # a failure leaves the other calls running
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    return _event_loop().run(every())


@functools.cache
def _event_loop() -> asyncio.Runner:
    """Makes the event loop of all calls: a client that a user's file makes once belongs to it."""
    return asyncio.Runner()


def _trl_arguments(function: Function, samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Returns TRL's arguments: prompts, completions (messages where the prompt is) and every column of the rows."""
    rows = [
        {"data_source": sample["data_source"], "ground_truth": sample["truth"]} | sample["columns"]
        for sample in samples
    ]
    arguments = {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
    arguments["prompts"] = [sample["prompt"] for sample in samples]
    arguments[TRL] = [
        sample["text"] if isinstance(sample["prompt"], str) else [{"role": "assistant", "content": sample["text"]}]
        for sample in samples
    ]
    for name in _required_parameters(function):
        if name not in arguments:
            raise ValueError(f"the parameter {name!r} is no column of the data; it has {', '.join(arguments)}")
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _sample_arguments(sample: Sample) -> tuple[Any, ...]:
    return sample["data_source"], sample["text"], sample["truth"], sample["extra"]


def _signature(function: Function) -> inspect.Signature | None:
    """Returns the function's signature; None where Python does not know it, as of some builtins."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _parameters(function: Function) -> dict[str, inspect.Parameter]:
    signature = _signature(function)
    return {} if signature is None else dict(signature.parameters)


def _required_parameters(function: Function) -> list[str]:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [n for n, p in _parameters(function).items() if p.kind in named and p.default is inspect.Parameter.empty]


_Answer = dict[str, Any]  # score, parts, error and, if any, answer as in Reward; earned as from `earned.read_amounts`


class Prepared(NamedTuple):
    """A prepared target: returns an answer for each sample."""

    call: Callable[[Sequence[Sample]], list[_Answer]]
    batch: bool  # it takes many samples at once


def prepare_target(target: Sequence[str]) -> Prepared:
    """Imports, compiles or loads a target, so that it can score samples; ValueError with a readable reason."""
    kind, *arguments = target
    if kind == "function":
        return _prepare_function(*arguments)
    makers: dict[str, Callable[..., Callable[[Sample], rules.Verdict]]]
    makers = {"rule": _make_rule, "code": _make_code, "program": _make_program, "format": _make_format}
    score = makers[kind](*arguments)

    def call(samples: Sequence[Sample]) -> list[_Answer]:
        verdicts = [score(sample) for sample in samples]
        return [{"score": v.score, "parts": v.parts, "error": None, "answer": v.answer} for v in verdicts]

    return Prepared(call, batch=False)


_LOADERS = tuple(map(os.path.dirname, (__file__, user_files.__file__, importlib.__file__)))  # of a user's file
_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def _failed_answer(error: str) -> _Answer:
    return {"score": math.nan, "parts": {}, "error": error[:2000]}


def explain(e: BaseException) -> str:
    """Describes an exception in one line, with the line in the user's file."""
    if isinstance(e, SystemExit):
        return f"it called exit({'' if e.code is None else e.code})"
    frames = traceback.extract_tb(e.__traceback__)
    user_frames = [f for f in frames if os.path.dirname(f.filename) not in _LOADERS and "<frozen " not in f.filename]
    user_frames = [f for f in user_frames if not f.filename.startswith(_LIBRARIES)] or user_frames  # of a package
    location = f" ({os.path.basename(user_frames[-1].filename)}:{user_frames[-1].lineno})" if user_frames else ""
    return f"{type(e).__name__}: {e}{location}"


def answer_of(result: Any, sample: Sample) -> _Answer:
    """Converts a custom function's result to an answer: a number, or a dict with a score and further numbers.

    Entries of the dict that are not finite numbers are dropped. `pred`, verl's name for the extracted answer, is kept
    as text. Without a score, the sum of the amounts earned inside the response is the score.
    """
    if not isinstance(result, dict):
        return _checked_answer(result, {})
    try:
        amounts = earned.read_amounts(result, text=sample["text"], turns=sample["turns"])
    except ValueError as e:
        return _failed_answer(str(e))
    if "score" not in result and amounts is None:
        return _failed_answer(f"the function returned a dict without 'score'; it has {sorted(map(str, result))[:20]}")
    score = result["score"] if "score" in result or amounts is None else sum(amount for _, amount in amounts[1])
    parts = {str(key): earned.finite(value) for key, value in result.items() if key != "score"}
    checked = _checked_answer(score, {key: value for key, value in parts.items() if value is not None})
    if checked["error"] is None and amounts is not None:
        checked["earned"] = amounts
    return checked | ({"answer": _as_text(result["pred"])} if "pred" in result else {})


def _checked_answer(score: Any, parts: dict[str, float]) -> _Answer:
    """Returns the answer with this score; an error if the score is not a finite number."""
    number = earned.finite(score)
    if number is None:
        return _failed_answer(f"the function returned the score {earned.short(score)}; it must be a finite number")
    return {"score": number, "parts": parts, "error": None}


def _as_text(value: Any) -> str:
    """Returns a prediction as text; None stays None."""
    try:
        return "" if value is None else str(value).strip()
    except Exception:  # a foreign __str__ may raise anything
        return ""


def _make_rule(name: str) -> Callable[[Sample], rules.Verdict]:
    """Makes the scoring function of a rule of `rules.py`."""
    rule: rules.Rule = getattr(rules, name)
    if name == "math_verify":
        rule(r"\boxed{1/2}", "0.5")  # imports and fills sympy's caches before a deadline runs
    return lambda sample: rule(sample["text"], sample["truth"])


def _make_code(time_s: str, memory_bytes: str, tests_in: str, *sandbox: str) -> Callable[[Sample], rules.Verdict]:
    """Makes the scoring function of the rule `code`; texts are its limits, reward.code.tests and the sandbox."""
    limits = dict[str, Any](time_s=float(time_s), memory_bytes=int(memory_bytes))
    runner, code = plugins.load("sandbox.choice").make_runner(*sandbox), plugins.load("sandbox.code").code
    return lambda sample: code(sample["text"], sample["truth"], tests_in=tests_in, runner=runner, **limits)


def _make_program(time_s: str, memory_bytes: str, *sandbox: str) -> Callable[[Sample], rules.Verdict]:
    """Makes the function that runs a sample's text as a program; its output is the answer, without a score."""
    limits = dict[str, Any](time_s=float(time_s), memory_bytes=int(memory_bytes))
    runner, code = plugins.load("sandbox.choice").make_runner(*sandbox), plugins.load("sandbox.code")
    return lambda sample: rules.Verdict(0.0, {}, code.program_output(sample["text"], runner=runner, **limits))


def _make_format(pattern: str) -> Callable[[Sample], rules.Verdict]:
    """Makes the scoring function of a regular expression: 1 if it matches the whole response."""
    compiled = re.compile(pattern, re.DOTALL)
    return lambda sample: rules.Verdict(float(compiled.fullmatch(sample["text"]) is not None), {})


def _prepare_function(path: str, name: str, source: str) -> Prepared:
    """Loads a custom function, whose results become answers."""
    function = _load_function(path, name, source)

    def score(samples: Sequence[Sample]) -> list[_Answer]:
        results = call_function(function, samples)
        return [answer_of(result, sample) for result, sample in zip(results, samples, strict=True)]

    return Prepared(score, _takes_batch(function))


def _load_function(path: str, name: str, source: str) -> Callable[..., Any]:
    """Runs the user's file from its text and returns the function; ValueError if it is missing or unfit."""
    try:
        module = user_files.load(pathlib.Path(path), source)
    except MemoryError:
        raise
    except BaseException as e:  # exit(), too
        raise ValueError(f"the file raises at import: {explain(e)}") from e
    function: Callable[..., Any] | None = getattr(module, name, None)
    if function is None:
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        remedy = f"; give FILE.py:{functions[0]}" if len(functions) == 1 else ""
        raise ValueError(f"the file has no {name!r}; it has {', '.join(functions) or 'no function'}{remedy}")
    if not callable(function):
        raise ValueError(f"{name!r} is of type {type(function).__name__}; it must be a function")
    _check_signature(function, name)
    return function


def main(parent: int, memory_bytes: int) -> None:
    """Guards a worker until it ends, or has to end; never returns."""
    requests, replies = os.dup(0), os.dup(1)  # not inherited by children across exec
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    child_process.inherit_orphans()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # out of memory, the kernel kills a worker before the trainer
        pathlib.Path("/proc/self/oom_score_adj").write_text("500")
    child_process.hide()
    signal.pthread_sigmask(signal.SIG_BLOCK, child_process.GUARDED)
    guard = os.getpid()
    worker = os.fork()
    if worker == 0:
        child_process.end_with_parent(guard, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, child_process.GUARDED)
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        _run_jobs(requests, replies)
    os.close(requests)
    os.close(replies)
    code = child_process.guard(worker, parent)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)
    child_process.kill_all()
    child_process.exit_like(code)


def _run_jobs(requests: int, replies: int) -> None:
    """The worker's loop: answers requests until the trainer closes the pipe; never returns."""
    worker_pid = os.getpid()
    prepared: dict[tuple[str, ...], Prepared] = {}
    with os.fdopen(requests, "rb") as stream:
        while len(head := stream.read(child_process.LENGTH.size)) == child_process.LENGTH.size:
            reply = _run_job(pickle.loads(stream.read(*child_process.LENGTH.unpack(head))), prepared)
            if os.getpid() != worker_pid:  # a fork made by the job returned here: only the first may answer
                os._exit(0)
            child_process.send(replies, json.dumps(reply).encode())
            if reply.get("retire"):
                break
    os._exit(0)


def _run_job(request: dict[str, Any], prepared: dict[tuple[str, ...], Prepared]) -> dict[str, Any]:
    """Prepares the request's target, or scores its samples; an exception becomes an error in the reply."""
    try:
        target = tuple(request["target"])
        if request["samples"] is None:
            prepared[target] = prepare_target(target)
            return {"batch": prepared[target].batch}
        return {"answers": prepared[target].call(request["samples"])}
    except MemoryError:
        return {"memory": True, "retire": True}  # the memory may still be held
    except ValueError as e:
        return {"error": str(e) if request["samples"] is None else explain(e)}
    except BaseException as e:  # exit() and any other exception of a job is an error of its sample
        return {"error": explain(e)}


if __name__ == "__main__":
    sys.path.append(os.getcwd())  # last: started with -P, a file json.py in it is not Python's own
    main(int(sys.argv[1]), int(sys.argv[2]))
