"""The judge of the settings."""

from jppo.plugins.judge.client import JudgeClient
from jppo.plugins.judge.judge import OPEN_ENDED, JudgePart, Rubric, make_rubric
from jppo.settings import Judge


def make_judge(j: Judge) -> JudgePart:
    """Makes the judge and its client."""
    client = JudgeClient(
        j.api_type,
        model=j.model,
        base_url=j.base_url,
        temperature=j.temperature,
        max_tokens=j.max_tokens,
        timeout_s=j.timeout_s,
    )
    return JudgePart(client, _make_rubric(j), concurrency=j.concurrency, retries=j.retries, cache_dir=j.cache_dir)


def _make_rubric(j: Judge) -> Rubric:
    return make_rubric(j.preset, system_prompt=j.system_prompt, scoring_prompt=j.scoring_prompt, max_score=j.max_score)


def asks_for_truth(j: Judge) -> bool:
    """Whether the judge's question has the ground truth, which the rows must then have."""
    return "{ground_truth}" in _make_rubric(j).scoring and bool(j.scoring_prompt or j.preset not in OPEN_ENDED)
