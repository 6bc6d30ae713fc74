"""LUFFY (arXiv:2504.14945): demonstrations of a row take places in its prompt's group, with a loss of their own.

--config.algorithm.extension=examples/algorithms/luffy.py:luffy --config.algorithm.options.gamma=0.1

The column `demonstrations` of each row is a list of texts, [] for none. They are graded as samples are, and GRPO
compares all n: where no sample succeeds, only they have a positive advantage, and where all do, none has any.
"""

import jax.numpy as jnp

from jppo.algorithms import advantage
from jppo.learner.algorithm import Algorithm, Term


def luffy(gamma: float = 0.1, clip: float = 0.2):
    def loss(view):
        pi = jnp.exp(jnp.where(view.mask & view.given, view.logprob, 0.0))
        ratio = jnp.exp(jnp.where(view.mask & ~view.given, view.logprob - view.old_logprob, 0.0))
        clipped = jnp.clip(ratio, 1 - clip, 1 + clip)
        sampled = jnp.minimum(view.advantage * ratio, view.advantage * clipped)
        return -jnp.where(view.given, view.advantage * pi / (pi + gamma), sampled)

    return Algorithm(
        given=lambda prompt: prompt.extra["demonstrations"],
        outcome=lambda view: advantage.grpo(view.score, view.group, norm_adv_by_std=True),
        terms=(Term(loss, "actor/pg_loss"),),
    )
