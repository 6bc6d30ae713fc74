"""The judge of the settings."""

from jppo.plugins.judge.client import JudgeClient
from jppo.plugins.judge.judge import OPEN_ENDED, JudgePart, make_rubric
from jppo.settings import Judge


def make_judge(j: Judge) -> JudgePart:
    """Makes the judge and its client."""
    rubric = make_rubric(j)
    return JudgePart(JudgeClient(j), rubric, concurrency=j.concurrency, retries=j.retries, cache_dir=j.cache_dir)


def asks_for_truth(j: Judge) -> bool:
    """Whether the judge's question has the ground truth, which the rows must then have."""
    return "{ground_truth}" in make_rubric(j).scoring and bool(j.scoring_prompt or j.preset not in OPEN_ENDED)
