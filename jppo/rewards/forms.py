"""The signatures of a custom reward function: one sample, a batch, and TRL's; parameter names tell them apart.

Runs in worker processes. Standard library only.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

Sample = dict[str, Any]  # as in `pool_tasks.py`; for a custom function also with prompt and columns
Function = Callable[..., Any]

ONE = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
TRL = "completions"
NOT_PASSED = ("completion_ids", "trainer_state", "log_extra", "log_metric", "environments")  # by TRL alone


def takes_batch(function: Function) -> bool:
    """Whether the function scores many samples in one call."""
    return bool({BATCH[1], TRL} & set(_parameters(function)))


def check(function: Function, name: str) -> None:
    """Raises ValueError unless the function has one of the signatures."""
    if inspect.iscoroutinefunction(function):
        what = "is async"
    elif TRL in _parameters(function):
        wanted = [one for one in _required(function) if one in NOT_PASSED]
        if not wanted:
            return
        what = f"asks for {wanted[0]!r}, which jppo does not pass"
    elif _takes(function, BATCH if takes_batch(function) else ONE):
        return
    else:
        what = f"has the signature {_signature(function)}"
    raise ValueError(
        f"{name!r} {what}; it must be a plain function of ({', '.join(ONE)}=None), of ({', '.join(BATCH)}) for all"
        f" samples at once, or of ({TRL}, **kwargs) as in TRL"
    )


def call(function: Function, samples: Sequence[Sample]) -> list[Any]:
    """Returns the function's result for each sample; raises ValueError for another number of results."""
    if not takes_batch(function):
        return [function(**dict(zip(ONE, _arguments(sample), strict=True))) for sample in samples]
    if TRL in _parameters(function):
        given = _as_trl(function, samples)
    else:
        given = dict(zip(BATCH, map(list, zip(*map(_arguments, samples), strict=True)), strict=True))
    results = function(**given)
    kind = type(results).__name__
    if isinstance(results, str | bytes | dict):  # whose elements are no scores
        raise ValueError(f"the function returned {kind}; it must be a list of scores")
    try:
        results = list(results)
    except TypeError as e:
        raise ValueError(f"the function returned {kind}; it must be a list of scores") from e
    if len(results) != len(samples):
        raise ValueError(f"the function returned {len(results)} scores for {len(samples)} samples")
    return results


def _as_trl(function: Function, samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Returns TRL's arguments: prompts, completions (messages where the prompt is) and every column of the rows."""
    rows = [{"data_source": one["data_source"], "ground_truth": one["truth"]} | one["columns"] for one in samples]
    given = {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
    given["prompts"] = [one["prompt"] for one in samples]
    given[TRL] = [
        one["text"] if isinstance(one["prompt"], str) else [{"role": "assistant", "content": one["text"]}]
        for one in samples
    ]
    for name in _required(function):
        if name not in given:
            raise ValueError(f"the parameter {name!r} is no column of the data; it has {', '.join(given)}")
    parameters = inspect.signature(function).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return given
    return {name: value for name, value in given.items() if name in parameters}


def _arguments(sample: Sample) -> tuple[Any, ...]:
    return sample["data_source"], sample["text"], sample["truth"], sample["extra"]


def _parameters(function: Function) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some builtins have none
        return {}


def _required(function: Function) -> list[str]:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [n for n, p in _parameters(function).items() if p.kind in named and p.default is inspect.Parameter.empty]


def _signature(function: Function) -> str:
    try:
        return str(inspect.signature(function))
    except (TypeError, ValueError):
        return "(?)"


def _takes(function: Function, names: Sequence[str]) -> bool:
    try:
        inspect.signature(function).bind(**dict.fromkeys(names))
    except (TypeError, ValueError):
        return False
    return True
