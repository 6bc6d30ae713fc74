"""SPO (arXiv:2509.13232): a Beta tracker of each prompt as its baseline, and prompts by its uncertainty.

python -m jppo.train --config=configs/gsm8k.py --config.algorithm.extension=examples/algorithms/spo.py:spo
"""

import jax.numpy as jnp
import numpy as np

from jppo.learner.algorithm import Algorithm


def spo(forget: float = 0.875, start: float = 4.0):
    def value(memory):  # of all prompts: the expected score, from 0 to 1
        return memory[:, 0] / memory.sum(axis=1)

    def prompts(memory, rng, n):
        weight = np.sqrt(value(memory) * (1 - value(memory))) + 0.05
        return rng.choice(len(weight), n, replace=False, p=weight / weight.sum())

    def advantage(view):
        raw, some = view.outcome, view.mask.any(axis=1)
        scaled = (raw - jnp.mean(raw, where=some)) / (jnp.std(raw, where=some) + 1e-6)
        return jnp.where(view.mask, scaled[:, None], 0.0)

    def update(memory, step):
        for place, reward in zip(step.places, step.rewards, strict=True):
            if reward.unusable is None:
                memory[place] = forget * memory[place] + (reward.score, 1 - reward.score)
        return memory

    return Algorithm(
        init=lambda prompts: np.full((len(prompts), 2), start / 2), prompts=prompts, update=update,
        columns=lambda memory, places: {"value": value(memory)[places]},
        outcome=lambda view: view.score - view.column("value"), advantage=advantage,
    )  # fmt: skip
