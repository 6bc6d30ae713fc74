"""The token record of a step: text, reward, value, advantage and log-ratios of each token of some responses."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jppo.algorithms import values
from jppo.data.tokenizer import pieces
from jppo.run.start import Run
from jppo.types import Array, Batch, Trajectory


def record_tokens(run: Run, step: int, data: Batch, trajectories: Sequence[Trajectory], value_norm: Any) -> None:
    """Writes samples/tokens_STEP.jsonl of `trainer.token_samples` responses; `value_norm` is from before the step."""
    chosen = choose_responses(np.asarray(data.mask)[: len(trajectories)], run.c.trainer.token_samples)
    if run.hosts.first and chosen:
        known = quantities(data, chosen, value_norm, bypass=run.learner.recipe.bypass)
        rows = records(data, trajectories, chosen, known, lambda ids: pieces(run.inputs.tokenizer, ids))
        run.logger.samples(f"tokens_{step}", rows)


def choose_responses(mask: np.ndarray, count: int) -> list[int]:  # [B, L] bool
    """Returns at most `count` evenly spaced responses among those with a trained token."""
    usable = np.flatnonzero(mask.any(1))
    places = np.linspace(0, len(usable) - 1, min(count, len(usable))).round().astype(int)
    return [int(i) for i in usable[places]]


def quantities(data: Batch, chosen: Sequence[int], value_norm: Any, *, bypass: bool) -> dict[str, np.ndarray]:
    """Returns the recorded quantities of the chosen responses, each [chosen, L], by name.

    Values are on the scale of the rewards. A log-ratio is the old policy's log-prob minus the engine's or the
    reference's. With `bypass` the engine's log-prob is the old policy's, so there is none.
    """

    def of(x: Array | None) -> Any:
        return None if x is None else np.asarray(x)[list(chosen)]

    def minus(x: Array | None, y: Array | None) -> Any:
        return None if x is None or y is None else of(x) - of(y)

    value = of(data.value)
    if value is not None and value_norm is not None:
        value = np.asarray(values.denormalised(value, np.asarray(value_norm)))
    found = {
        "reward": of(data.reward),
        "value": value,
        "advantage": of(data.advantage),
        "log_ratio_engine": None if bypass else minus(data.old_logprob, data.rollout_logprob),
        "log_ratio_reference": minus(data.old_logprob, data.ref_logprob),
    }
    return {name: x for name, x in found.items() if x is not None}


def records(
    data: Batch,
    trajectories: Sequence[Trajectory],
    chosen: Sequence[int],
    known: dict[str, np.ndarray],
    split: Callable[[list[int]], list[str]],
) -> list[dict[str, Any]]:
    """Returns a row per chosen response: a list per field, with an entry per token; None where it is not trained on.

    `sample` is the response's line in samples/step_STEP.jsonl, from 0.
    """
    rows = []
    for i, b in enumerate(chosen):
        ids = trajectories[b].tokens[data.first[b] + 1 :].tolist()
        trained = data.mask[b, : len(ids)].tolist()
        row = {"sample": b, "uid": trajectories[b].uid, "tokens": ids, "pieces": split(ids), "trained": trained}
        rows.append(row | {name: numbers(x[i], trained) for name, x in known.items()})
    return rows


def numbers(x: np.ndarray, trained: Sequence[bool]) -> list[float | None]:
    """Returns an f32 array as the shortest decimal numbers that read back as the same f32."""
    return [float(text) if there else None for text, there in zip(x.astype(str), trained, strict=False)]
