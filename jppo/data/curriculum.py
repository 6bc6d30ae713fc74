"""User-defined samplers of prompts that learn from scores: classes of `data.sampler`."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jppo.registry import resolve, said
from jppo.settings import UserError
from jppo.types import Prompt, Reward


class Curriculum:
    """A class of `data.sampler`, whose batches depend on earlier scores.

    Its methods are pure functions of a state, which passes through JSON between all calls: a resumed run calls them
    with what a run that was not interrupted calls them with.
    """

    def __init__(self, spec: str, prompts: Sequence[Prompt], *, seed: int, batch_size: int):
        """Makes the user's object and draws a first batch, to fail before anything starts."""
        self._said, self._place = f"data.sampler={spec!r}", {prompt.uid: i for i, prompt in enumerate(prompts)}
        self._made = self._call("__init__", resolve(spec, "data.sampler"), prompts, seed)
        for name in ("begin", "batch", "update"):
            if not callable(getattr(self._made, name, None)):
                raise UserError(f"{self._said} has no method {name}; a class has begin, batch and update")
        self.batch("", batch_size)

    def batch(self, state: str, size: int) -> tuple[np.ndarray, str]:
        """Returns the indices of the next `size` prompts, [N] i64, and the state after them; '' is the first state."""
        now = state or self._json("begin", self._call("begin", self._made.begin))
        found = self._call("batch", self._made.batch, json.loads(now), size)
        indices, after = found if isinstance(found, tuple) and len(found) == 2 else ((), None)
        chosen = self._call("batch", np.asarray, indices)
        if chosen.dtype.kind not in "iu" or chosen.shape != (size,) or len(set(chosen.tolist())) < size:
            raise UserError(f"{self._said}: batch must return ({size} different indices, state), not {str(found)[:99]}")
        if chosen.min() < 0 or chosen.max() >= len(self._place):
            raise UserError(f"{self._said}: batch returns indices outside 0 to {len(self._place) - 1}; correct it")
        return chosen.astype(np.int64), self._json("batch", after)

    def update(self, state: str, prompts: Sequence[Prompt], rewards: Sequence[Reward]) -> str:
        """Returns the state after a step; `rewards` has n consecutive ones per prompt."""
        n = len(rewards) // len(prompts)
        groups = [rewards[i : i + n] for i in range(0, len(rewards), n)]
        scores = [[r.score for r in group if r.unusable is None] for group in groups]
        places = [self._place[prompt.uid] for prompt in prompts]
        return self._json("update", self._call("update", self._made.update, json.loads(state), places, scores))

    def _call(self, name: str, function: Callable[..., Any], *given: Any) -> Any:
        try:
            return function(*given)
        except Exception as e:  # a user's class may raise anything
            raise UserError(f"{self._said}: {name} raises {said(e)}; correct it") from e

    def _json(self, name: str, state: Any) -> str:
        return str(self._call(name, json.dumps, state))
