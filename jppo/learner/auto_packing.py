"""The layout of rows that `data.packing=auto` takes where a prompt has several samples: buckets or prefix.

A step is packed both ways, with prompts of the data's lengths and responses of all lengths, and the cheaper layout by
the cost model of `packing.py` and `cost.py` is taken. The choice depends on settings, data and devices alone, so hosts,
dry runs and resumed runs make the same.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from jppo.errors import UserError
from jppo.learner import make, packing
from jppo.learner.ppo import ModelConfigs
from jppo.settings import Loop, changed, check
from jppo.types import Trajectory, given_text

L = TypeVar("L", bound=Loop)

UPDATE = 3  # cost of a gradient in forward passes
ENOUGH = 0.9  # prefix saves a tenth at least: the costs are estimates, and it has more shapes to compile


def with_packing(c: L, inputs: ModelConfigs, mesh: Any) -> tuple[L, str]:
    """Returns the config with the layout that 'auto' takes for samples of one prompt, and a line on the choice.

    A layout that the settings or a model refuse is left out. `auto` on a TPU keeps its segments: how much slower XLA's
    attention is than a TPU's kernel has not been measured. `routing_replay` shares as much of a prompt as the engine
    repeats its experts, which no data tells.
    """
    samples_share = c.data.packing == "auto" and c.rollout.n > 1 and not c.rollout.routing_replay
    if not samples_share or make.packing_kind(c, mesh) != "buckets":
        return c, ""
    shared = changed(c, {"data.packing": "prefix"})
    models = [cfg for cfg in (inputs.policy, inputs.critic, inputs.reference) if cfg is not None]
    try:
        check(shared)
        for cfg in models:
            make.attention_kernel(shared, cfg, mesh)
    except UserError:
        return c, ""
    separate = changed(c, {"data.packing": "buckets"})
    samples = _samples_of_step(c, inputs.prompt_lengths or (c.data.max_prompt_length,))
    costs = [_cost_of_step(config, inputs, mesh, samples) for config in (shared, separate)]
    ratio = costs[0] / costs[1]
    chosen = shared if ratio <= ENOUGH else separate
    note = f"data.packing={chosen.data.packing}, by cost: prefix is estimated at {ratio:.2f} of the time of buckets"
    return chosen, note


def _samples_of_step(c: Loop, prompts: Sequence[int]) -> list[Trajectory]:
    """Makes the samples of a step, of equal tokens: prompts and responses at evenly spaced ranks of their lengths."""
    n, count, longest = c.rollout.n, c.sequences_of_step // c.rollout.n, c.data.max_response_length
    ranked, samples = sorted(prompts), []
    for i in range(count):
        prompt = ranked[(2 * i + 1) * len(ranked) // (2 * count)]
        for j in range(n):
            total = prompt + max(1, (2 * j + 1) * longest // (2 * n))
            samples.append(given_text(np.zeros(total, np.int32), np.arange(total) >= prompt, uid=str(i)))
    return samples


def _cost_of_step(c: Loop, inputs: ModelConfigs, mesh: Any, samples: Sequence[Trajectory]) -> float:
    """Returns the cost of a step's scoring pass and updates, in tokens without attention."""
    size = c.actor.ppo_mini_batch_size
    plan = make.plan_rows(
        c, mesh, tokens_per_device=c.actor.max_tokens_per_device, sequences=size, steps=inputs.total_steps,
        policy=inputs.policy, sizes=() if c.rollout.has_branches else (size,),
    )  # fmt: skip
    price = make.token_price(c, mesh, inputs.policy)
    prices = {length: price(length) for length in plan.lengths}

    def cost_of(some: Sequence[Trajectory]) -> float:
        return packing.total_cost(packing.micro_batch_shapes(some, plan), prices)

    count = -(-len(samples) // size)  # of mini-batches, each of which takes every `count`-th sample or prompt
    unit = 1 if c.actor.shuffle else c.rollout.n
    units = [samples[i : i + unit] for i in range(0, len(samples), unit)]
    order = [sample for k in range(count) for one in units[k::count] for sample in one]
    updates = sum(cost_of(order[start : start + size]) for start in range(0, len(order), size))
    return cost_of(samples) + UPDATE * c.actor.ppo_epochs * updates
