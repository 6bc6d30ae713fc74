"""The proof that sampler and trainer have one policy: the same tokens, the same log-probs."""

import dataclasses

from ml_collections import ConfigDict

from jppo.assemble.engine import sampling
from jppo.assemble.inputs import Inputs
from jppo.assemble.learner import Learner
from jppo.io import trajectories
from jppo.io.hosts import ALONE, Hosts
from jppo.learner import batch, correct
from jppo.models import offload
from jppo.rollout.sampler import RolloutError, Sampler
from jppo.structs import TrainState


def agree(
    c: ConfigDict,
    inputs: Inputs,
    learner: Learner,
    now: TrainState,
    sampler: Sampler,
    version: int,
    hosts: Hosts = ALONE,
) -> str:
    """Proves that the sampler and the trainer have the same policy, or stops the run and says how far they differ.

    Of several hosts each has its own sampler asked.
    """
    count = max(1, min(16, c.actor.ppo_mini_batch_size, len(inputs.train.prompts)) // hosts.count)
    # Of the whole distribution: where it is cut, the sampler's log-probs are of what is left, the trainer's never are.
    some = dataclasses.replace(sampling(c, version), n=1, top_p=1.0, top_k=-1, min_p=0.0)
    longest = sorted(inputs.train.prompts, key=lambda p: -len(p.ids))[:count]
    drawn = trajectories.of_all(hosts, hosts.together(lambda: sampler.generate(longest, some, version=version)))
    rows, policy = batch.make(drawn, plan=learner.plan, mesh=learner.mesh), offload.to_device(learner.policy(now))
    gaps = batch.each(lambda r: learner.passes.gap(r, learner.passes.logprob(policy, r)[0]), rows)
    gap = correct.gap_metrics(gaps)["rollout/logp_gap_max"]
    if not gap <= c.rollout.logp_tolerance:
        raise RolloutError(
            f"the log-probs of the sampler and the trainer differ by up to {gap:.3g} on the same tokens, more than"
            f" rollout.logp_tolerance={c.rollout.logp_tolerance:g}: they do not have the same policy; compare"
            " rollout.dtype and model.compute_dtype, or raise the tolerance if bfloat16 explains the gap"
        )
    return f"sampler and trainer agree: largest log-prob gap {gap:.1e} on {sum(len(t.tokens) for t in drawn)} tokens"
