"""The rollout engine of a loop on `jppo.open`, which all sets of trained weights share."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jppo import settings
from jppo.data.tokenizer import decode
from jppo.errors import UserError
from jppo.learner.ppo import Learner
from jppo.models.lora import Lora
from jppo.rollout.inprocess import InprocessEngine, PolicySampler
from jppo.rollout.make import make_publish_settings
from jppo.rollout.publish import publish_base, publish_policy
from jppo.run.agreement import LogpGap, Mismatch, describe_mismatch, limits
from jppo.run.api.responses import Responses
from jppo.settings import Loop
from jppo.types import Params, Prompt, Sampling, TrainState, Trajectory

if TYPE_CHECKING:
    from jppo.rollout.servers.fleet import ServerEngine


@dataclasses.dataclass(frozen=True, eq=False)
class Snapshot:
    """A copy of a policy's trained weights, to sample from."""

    learned: Params
    state: TrainState


class Engine:
    """The rollout engine, if the model was opened with one, and whose weights it has."""

    def __init__(
        self, c: Loop, learner: Learner, started: "ServerEngine | InprocessEngine | None", adapters: Lora | None,
        tokenizer: Any, end_ids: Sequence[int],
    ):  # fmt: skip
        """`started` is of `open_engine`, None without an engine; `end_ids` are the tokens that end a response."""
        self._c, self._learner, self._adapters = c, learner, adapters
        self._sampler: PolicySampler | None = None
        if started is not None:
            self._sampler = started.ready(eos_token_ids=end_ids, decode=lambda ids: decode(tokenizer, ids))
        self._base_published = False
        self._version = -1
        self._unfiltered = True  # all samples of this version are of the trainer's distribution
        self.weights_owner: object = None  # the model or Snapshot whose weights the engine has
        self.closed = False

    def publish(self, owner: object, now: TrainState) -> None:
        """Gives the engine, if any, the policy of `now`."""
        if self._sampler is None:
            return
        self.weights_owner, self._unfiltered = None, True
        self._version = max(self._version + 1, int(now.step))
        numbered = dataclasses.replace(now, step=np.asarray(self._version, np.int32))
        publish_settings = make_publish_settings(self._c, self._adapters)
        if not self._base_published:
            publish_base(publish_settings, self._learner, self._sampler, self._version)
            self._base_published = True
        publish_policy(publish_settings, self._learner, self._sampler, numbered)
        self.weights_owner = owner

    def generate(self, prompts: list[Prompt], options: Sampling) -> list[Trajectory]:
        """Samples with the weights that it holds."""
        if self._sampler is None:
            raise UserError("this model was opened without an engine; open it with engine='inprocess' or 'vllm'")
        r = self._c.rollout
        cuts = (options.top_p, options.top_k, options.min_p)
        unfiltered = options.temperature == r.temperature and cuts == (1.0, -1, 0.0)
        self._unfiltered = self._unfiltered and unfiltered
        return self._sampler.generate(prompts, options, version=self._version)

    def require_match(self, c: Loop, responses: Responses, logprob: np.ndarray) -> None:
        """Raises Mismatch where the engine's log-probs of its current weights' samples are far from the trainer's."""
        current = all((t.version[t.sampled] == self._version).all() for t in responses.trajectories)
        mask = np.asarray(responses.data.mask)
        if not current or not self._unfiltered or settings.cuts(c.rollout) or not mask.any():
            return
        gap, bound = LogpGap(np.abs(logprob - np.asarray(responses.data.rollout_logprob))[mask]), limits(c)
        if not gap.within(bound):
            raise Mismatch(describe_mismatch(gap, bound))

    def forget(self, owner: object) -> None:
        """Forgets that the engine has the weights of `owner`, which have changed."""
        if self.weights_owner is owner:
            self.weights_owner = None

    def close(self) -> None:
        """Drops the weights; the caller closes the engine."""
        self.closed, self.weights_owner = True, None
        if self._sampler is not None:
            self._sampler.close()
