"""LUFFY (Yan et al., 2025, arXiv:2504.14945): demonstrations of a row take places in its prompt's group.

    python -m jppo.train ... --config.rollout.n=8 --config.algorithm.adv_estimator=examples/algorithms/luffy.py:luffy

The column `demonstrations` of each row is a list of texts, [] for none. They are graded as samples are, and GRPO
compares all n: where no sample succeeds, only they have a positive advantage, and where all do, none has any.
"""

import dataclasses
from collections.abc import Sequence

from jppo.learner import estimators
from jppo.learner.algorithm import Algorithm
from jppo.settings import Settings
from jppo.types import Prompt


def demonstrations(prompt: Prompt) -> Sequence[str]:
    """Returns the texts of the row."""
    texts: Sequence[str] = prompt.extra["demonstrations"]
    return texts


def luffy(c: Settings) -> Algorithm:
    """The entry: GRPO over samples and demonstrations."""
    grpo = estimators.grpo(norm_adv_by_std=c.algorithm.norm_adv_by_std_in_grpo)
    return dataclasses.replace(grpo, given=demonstrations)
