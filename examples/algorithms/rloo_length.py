r"""RLOO, divided by the number of the response's trained tokens.

    python -m jppo.train --config=configs/math_grpo.py \
        --config.algorithm.extension=examples/algorithms/rloo_length.py:rloo_length
"""

from jppo.algorithms import advantage
from jppo.learner.algorithm import Algorithm


def rloo_length(power: float = 1.0):
    return Algorithm(outcome=lambda view: advantage.rloo(view.score, view.group) / view.length.clip(1) ** power)
