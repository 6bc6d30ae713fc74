"""GRPO on the tokens of highest entropy (arXiv:2506.01939), and a small loss of the logits' squared log-partition.

--config.algorithm.extension=examples/algorithms/high_entropy.py:high_entropy --config.algorithm.options.share=0.2
"""

import jax.numpy as jnp

from jppo.algorithms import advantage
from jppo.learner.algorithm import Algorithm, Term


def high_entropy(share: float = 0.2, clip: float = 0.2, z_coef: float = 1e-3):
    def of_tokens(view):
        least = jnp.nanquantile(jnp.where(view.mask, view.entropy, jnp.nan), 1 - share)
        return jnp.where(view.mask & (view.entropy >= least), view.outcome[:, None], 0.0)

    def surrogate(view):
        ratio = jnp.exp(jnp.where(view.mask, view.logprob - view.old_logprob, 0.0))
        return -jnp.minimum(view.advantage * ratio, view.advantage * jnp.clip(ratio, 1 - clip, 1 + clip))

    return Algorithm(
        outcome=lambda view: advantage.grpo(view.score, view.group, norm_adv_by_std=True),
        advantage=of_tokens,
        statistics={"logsumexp": lambda logits, targets, vocabulary: vocabulary.logsumexp(logits)},
        terms=(
            Term(surrogate, "actor/pg_loss"),
            Term(lambda view: view.statistic("logsumexp") ** 2, "mine/z_loss", z_coef, corrected=False),
        ),
    )
