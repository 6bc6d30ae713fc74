"""The rollout engine of a custom loop, shared by all sets of trained weights: which of them it has."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jppo import settings
from jppo.data.tokenizer import decode
from jppo.errors import UserError
from jppo.learner.ppo import Learner
from jppo.models.lora import Lora
from jppo.rollout.make import Source
from jppo.rollout.publish import publish_base, publish_policy
from jppo.run.agreement import LogpGap, Mismatch, limits
from jppo.run.responses import Responses
from jppo.settings import Settings
from jppo.types import Params, Prompt, Sampling, TrainState, Trajectory


@dataclasses.dataclass(frozen=True, eq=False)
class Kept:
    """A copy of a policy's trained weights, to sample from."""

    learned: Params
    state: TrainState


class Engine:
    """The engine, or none, with the owner of its weights."""

    def __init__(
        self, c: Settings, learner: Learner, served: Any, adapters: Lora | None, tokenizer: Any, ends: Sequence[int]
    ):
        self._c, self._learner, self._adapters = c, learner, adapters
        self._sampler: Source | None = None
        if served is not None:
            self._sampler = served.ready(eos_token_ids=ends, decode=lambda ids: decode(tokenizer, ids))
        self._based = False
        self._version = -1
        self._plain = True  # all samples of this version are of the trainer's distribution
        self.holds: object = None  # the model, or the Kept, whose weights the engine has
        self.closed = False

    def publish(self, owner: object, now: TrainState) -> None:
        """Gives the engine, if any, the policy of `now`."""
        if self._sampler is None:
            return
        self.holds, self._plain = None, True
        self._version = max(self._version + 1, int(now.step))
        numbered = dataclasses.replace(now, step=np.asarray(self._version, np.int32))
        if not self._based:
            publish_base(self._c, self._learner, self._sampler, self._version)
            self._based = True
        publish_policy(self._c, self._learner, self._sampler, numbered, self._adapters)
        self.holds = owner

    def ensure(self, kept: Kept) -> None:
        """Gives the engine the kept weights, unless it has them."""
        if self.holds is not kept:
            self.publish(kept, kept.state)

    def generate(self, prompts: list[Prompt], how: Sampling) -> list[Trajectory]:
        """Samples with the weights that it holds."""
        if self._sampler is None:
            raise UserError("this model was opened without an engine; open it with engine='inprocess' or 'vllm'")
        r = self._c.rollout
        usual = how.temperature == r.temperature and (how.top_p, how.top_k, how.min_p) == (1.0, -1, 0.0)
        self._plain = self._plain and usual
        return self._sampler.generate(prompts, how, version=self._version)

    def require_match(self, c: Settings, batch: Responses, logprob: np.ndarray) -> None:
        """Raises Mismatch where the engine's log-probs of its current weights' samples are far from the trainer's."""
        current = all((t.version[t.sampled] == self._version).all() for t in batch.trajectories)
        mask = np.asarray(batch.data.mask)
        if not current or not self._plain or settings.cuts(c.rollout) or not mask.any():
            return
        gap, bound = LogpGap(np.abs(logprob - np.asarray(batch.data.rollout_logprob))[mask]), limits(c)
        if not gap.within(bound):
            raise Mismatch(
                f"the log-probs of engine and trainer differ by {gap}; {bound}: they do not have the same policy;"
                " compare rollout.dtype and model.compute_dtype, or raise rollout.logp_tolerance if rounding explains"
                " the difference"
            )

    def forget(self, owner: object) -> None:
        """Forgets that the engine has the weights of `owner`, which have changed."""
        if self.holds is owner:
            self.holds = None

    def close(self) -> None:
        """Drops the weights; the caller closes the engine."""
        self.closed, self.holds = True, None
        if self._sampler is not None:
            self._sampler.close()
