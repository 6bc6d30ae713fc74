"""The code that a worker process can run: rules, patterns and custom functions. Used by `pool_worker.py`.

A target is a tuple of texts. `prepare` imports, compiles or loads it once per worker and returns a callable on samples,
which are plain dicts. Answers are plain JSON dicts. Standard library only: neither jax nor the trainer.
"""

import functools
import math
import os
import re
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jppo.rewards import code, earned, forms, rules
from jppo.sandbox.choice import make_runner

_Answer = dict[str, Any]  # score, parts, error and, if any, answer as in Reward; earned as from `earned.read`
_Sample = dict[str, Any]  # data_source, text, truth, extra; for custom functions also turns, prompt and columns

_MODULE = "jppo_reward_function"


class Prepared(NamedTuple):
    """A prepared target: returns an answer for each sample."""

    call: Callable[[Sequence[_Sample]], list[_Answer]]
    batch: bool  # it takes many samples at once


def prepare(target: Sequence[str]) -> Prepared:
    """Prepares a target; raises ValueError with a readable reason."""
    kind, *rest = target
    makers: dict[str, Callable[..., Prepared]]
    makers = {"rule": _rule, "code": _code, "program": _program, "format": _format, "function": _function}
    return makers[kind](*rest)


def _failed(error: str) -> _Answer:
    """Returns the answer for a sample that could not be scored."""
    return {"score": math.nan, "parts": {}, "error": error[:2000]}


def explain(e: BaseException) -> str:
    """Describes an exception in one line, with the line in the user's file."""
    if isinstance(e, SystemExit):
        return f"it called exit({'' if e.code is None else e.code})"
    here = os.path.dirname(__file__)
    places = [f for f in traceback.extract_tb(e.__traceback__) if os.path.dirname(f.filename) != here]
    where = f" ({os.path.basename(places[-1].filename)}:{places[-1].lineno})" if places else ""
    return f"{type(e).__name__}: {e}{where}"


def answer_of(result: Any, sample: _Sample) -> _Answer:
    """Converts a custom function's result to an answer: a number, or a dict with a score and further numbers.

    Entries of the dict that are not finite numbers are dropped. `pred`, verl's name for the extracted answer, is kept
    as text. Without a score, the sum of the amounts earned inside the response is the score.
    """
    if not isinstance(result, dict):
        return _checked(result, {})
    try:
        found = earned.read(result, text=sample["text"], turns=sample["turns"])
    except ValueError as e:
        return _failed(str(e))
    if "score" not in result and found is None:
        return _failed(f"the function returned a dict without 'score'; it has {sorted(map(str, result))[:20]}")
    score = result["score"] if "score" in result or found is None else sum(amount for _, amount in found[1])
    parts = {str(k): earned.finite(v) for k, v in result.items() if k != "score"}
    checked = _checked(score, {k: v for k, v in parts.items() if v is not None})
    if checked["error"] is None and found is not None:
        checked["earned"] = found
    return checked | ({"answer": _text(result["pred"])} if "pred" in result else {})


def _checked(score: Any, parts: dict[str, float]) -> _Answer:
    number = earned.finite(score)
    if number is None:
        return _failed(f"the function returned the score {earned.short(score)}; it must be a finite number")
    return {"score": number, "parts": parts, "error": None}


def _text(value: Any) -> str:
    """Returns a prediction as text; None stays None."""
    try:
        return "" if value is None else str(value).strip()
    except Exception:  # a foreign __str__ may raise anything
        return ""


def _each(score: Callable[[_Sample], rules.Verdict]) -> Prepared:
    def call(samples: Sequence[_Sample]) -> list[_Answer]:
        verdicts = [score(sample) for sample in samples]
        return [{"score": v.score, "parts": v.parts, "error": None, "answer": v.answer} for v in verdicts]

    return Prepared(call, batch=False)


def _rule(name: str) -> Prepared:
    rule: rules.Rule = getattr(rules, name)
    if name == "math_verify":
        rule(r"\boxed{1/2}", "0.5")  # imports and fills sympy's caches before a deadline runs
    return _each(lambda sample: rule(sample["text"], sample["truth"]))


def _code(time_s: str, memory_bytes: str, *sandbox: str) -> Prepared:
    runner = make_runner(*sandbox)
    rule = functools.partial(code.code, time_s=float(time_s), memory_bytes=int(memory_bytes), runner=runner)
    return _each(lambda sample: rule(sample["text"], sample["truth"]))


def _program(time_s: str, memory_bytes: str, *sandbox: str) -> Prepared:
    """Runs the text of a sample; its output is the answer, without a score."""
    runner = make_runner(*sandbox)
    execute = functools.partial(code.run_program, time_s=float(time_s), memory_bytes=int(memory_bytes), runner=runner)

    def run(sample: _Sample) -> rules.Verdict:
        return rules.Verdict(0.0, {}, execute(sample["text"]))

    return _each(run)


def _format(pattern: str) -> Prepared:
    compiled = re.compile(pattern, re.DOTALL)

    def score(sample: _Sample) -> rules.Verdict:
        matches = float(compiled.fullmatch(sample["text"]) is not None)
        return rules.Verdict(matches, {})

    return _each(score)


def _function(path: str, name: str, source: str) -> Prepared:
    function = _load(path, name, source)

    def score(samples: Sequence[_Sample]) -> list[_Answer]:
        results = forms.call(function, samples)
        return [answer_of(result, sample) for result, sample in zip(results, samples, strict=True)]

    return Prepared(score, forms.takes_batch(function))


def _load(path: str, name: str, source: str) -> Callable[..., Any]:
    """Loads the function from the source text read at the start of the run."""
    module = types.ModuleType(_MODULE)
    module.__file__ = path
    sys.modules[_MODULE] = module
    sys.path.append(os.path.dirname(path))  # it may import files in its folder
    try:
        exec(compile(source, path, "exec"), module.__dict__)
    except MemoryError:
        raise
    except BaseException as e:  # exit(), too
        raise ValueError(f"the file raises at import: {explain(e)}") from e
    function: Callable[..., Any] | None = getattr(module, name, None)
    if function is None:
        there = [k for k, v in vars(module).items() if callable(v) and not k.startswith("_")]
        raise ValueError(f"the file has no {name!r}; it has {', '.join(there) or 'no function'}")
    if not callable(function):
        raise ValueError(f"{name!r} is of type {type(function).__name__}; it must be a function")
    forms.check(function, name)
    return function
