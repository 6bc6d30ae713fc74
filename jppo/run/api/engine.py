"""The rollout engine of a loop on `jppo.open`, which all sets of trained weights share."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jppo import settings
from jppo.data.tokenizer import decode
from jppo.errors import UserError
from jppo.learner.ppo import Learner
from jppo.models.lora import Lora
from jppo.rollout.inprocess import Source
from jppo.rollout.make import make_publish_settings
from jppo.rollout.publish import publish_base, publish_policy
from jppo.run.agreement import LogpGap, Mismatch, disagreement, limits
from jppo.run.api.responses import Responses
from jppo.settings import Loop
from jppo.types import Params, Prompt, Sampling, TrainState, Trajectory


@dataclasses.dataclass(frozen=True, eq=False)
class Kept:
    """A copy of a policy's trained weights, to sample from."""

    learned: Params
    state: TrainState


class Engine:
    """The engine, or none, with the owner of its weights."""

    def __init__(
        self, c: Loop, learner: Learner, served: Any, adapters: Lora | None, tokenizer: Any, ends: Sequence[int]
    ):
        self._c, self._learner, self._adapters = c, learner, adapters
        self._sampler: Source | None = None
        if served is not None:
            self._sampler = served.ready(eos_token_ids=ends, decode=lambda ids: decode(tokenizer, ids))
        self._base_published = False
        self._version = -1
        self._unfiltered = True  # all samples of this version are of the trainer's distribution
        self.holds: object = None  # the model, or the Kept, whose weights the engine has
        self.closed = False

    def publish(self, owner: object, now: TrainState) -> None:
        """Gives the engine, if any, the policy of `now`."""
        if self._sampler is None:
            return
        self.holds, self._unfiltered = None, True
        self._version = max(self._version + 1, int(now.step))
        numbered = dataclasses.replace(now, step=np.asarray(self._version, np.int32))
        how = make_publish_settings(self._c, self._adapters)
        if not self._base_published:
            publish_base(how, self._learner, self._sampler, self._version)
            self._base_published = True
        publish_policy(how, self._learner, self._sampler, numbered)
        self.holds = owner

    def ensure(self, kept: Kept) -> None:
        """Gives the engine the kept weights, unless it has them."""
        if self.holds is not kept:
            self.publish(kept, kept.state)

    def generate(self, prompts: list[Prompt], options: Sampling) -> list[Trajectory]:
        """Samples with the weights that it holds."""
        if self._sampler is None:
            raise UserError("this model was opened without an engine; open it with engine='inprocess' or 'vllm'")
        r = self._c.rollout
        usual = options.temperature == r.temperature and (options.top_p, options.top_k, options.min_p) == (1.0, -1, 0.0)
        self._unfiltered = self._unfiltered and usual
        return self._sampler.generate(prompts, options, version=self._version)

    def require_match(self, c: Loop, responses: Responses, logprob: np.ndarray) -> None:
        """Raises Mismatch where the engine's log-probs of its current weights' samples are far from the trainer's."""
        current = all((t.version[t.sampled] == self._version).all() for t in responses.trajectories)
        mask = np.asarray(responses.data.mask)
        if not current or not self._unfiltered or settings.cuts(c.rollout) or not mask.any():
            return
        gap, bound = LogpGap(np.abs(logprob - np.asarray(responses.data.rollout_logprob))[mask]), limits(c)
        if not gap.within(bound):
            raise Mismatch(disagreement(gap, bound))

    def forget(self, owner: object) -> None:
        """Forgets that the engine has the weights of `owner`, which have changed."""
        if self.holds is owner:
            self.holds = None

    def close(self) -> None:
        """Drops the weights; the caller closes the engine."""
        self.closed, self.holds = True, None
        if self._sampler is not None:
            self._sampler.close()
