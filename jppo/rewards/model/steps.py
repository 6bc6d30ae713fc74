"""Step scores: a token classifier as a part of the reward.

The response is split at a delimiter; blank texts are no steps. The model reads each step followed by a mark, and its
log-odds at the last token of the mark give p, the probability that the step is good. The score of a response is an
aggregate of p_1 to p_K. A step earns the change of the aggregate over the steps so far, at its last token. So the
amounts sum to the score, and are potential-based shaping of it (Ng, Harada and Russell 1999).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from jppo.rewards.earned import at_characters, step_ends
from jppo.rewards.model.classifier import Texts
from jppo.rewards.model.part import ModelPart
from jppo.rewards.parts import Sample, failed
from jppo.types import Reward

# Aggregates of the first, the first two, ... of the steps' probabilities [K]: [K].
AGGREGATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "last": lambda p: p,
    "min": np.minimum.accumulate,
    "prod": np.cumprod,
    "sum": np.cumsum,
    "mean": lambda p: np.cumsum(p) / np.arange(1, len(p) + 1),
}


@dataclasses.dataclass(frozen=True)
class Asked:
    """A response for the model."""

    ids: list[int]
    places: list[int]  # among the ids: the last token of each step's mark
    earn_at: list[int]  # tokens of the response that end its steps; none for a text without tokens


class StepPart(ModelPart):
    """A token classifier as a part; `parts` has the number of steps. A response without steps scores 0."""

    def __init__(
        self,
        model: Any,
        texts: Texts,
        *,
        batch_size: int,
        aggregation: str,
        delimiter: str,
        mark: str,
        decode: Callable[[list[int]], str],
    ):
        """`model` is a Scorer with `score_at(ids, places)`, which returns the log-odds of each text at its places.

        `decode` is the policy's tokenizer; `mark` follows each step in the model's input.
        """
        super().__init__(model, texts, batch_size=batch_size)
        self._steps, self._decode = model, decode
        self._running, self._delimiter, self._mark = AGGREGATIONS[aggregation], delimiter, mark

    def testing(self) -> "StepPart":
        """Returns the part itself: it has no statistics."""
        return self

    def _read(self, sample: Sample) -> tuple[Asked, bool]:
        pieces = [piece for piece in sample.text.split(self._delimiter) if piece.strip()]
        tokens = [] if sample.tokens is None else sample.tokens.tolist()
        ends = tuple((end, 0.0) for end in step_ends(sample.text, self._delimiter))
        ids, places, cut = self._texts.read_marked(sample, [piece + self._mark for piece in pieces])
        return Asked(ids, places, [token for token, _ in at_characters(ends, tokens, self._decode)]), cut

    def _scores(self, asked: Sequence[Asked]) -> list[list[float]]:
        return self._steps.score_at([one.ids for one in asked], [one.places for one in asked])

    def _finish(self, future: Future[Reward], asked: Asked, odds: Any) -> None:
        if len(odds) != len(asked.places):
            reward = failed(f"the reward model gave {len(odds)} scores for {len(asked.places)} steps")
        elif not all(map(math.isfinite, odds)):
            reward = failed(f"the reward model's scores of the steps are {odds}; they must be finite numbers")
        else:
            good = 0.5 * (1.0 + np.tanh(0.5 * np.array(odds, np.float64)))  # σ without overflow
            amounts = np.diff(self._running(good), prepend=0.0).tolist()
            earned = tuple(zip(asked.earn_at, amounts, strict=True)) if asked.earn_at else ()
            reward = Reward(math.fsum(amounts), {"steps": float(len(amounts))}, error=None, earned=earned)
        self._resolve(future, reward)
