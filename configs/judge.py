"""PPO on questions of one's own, whose answers a language model judges over its API.

    export OPENAI_API_KEY=...
    python -m jppo.train --config=configs/judge.py --config.data.train_files=FILE --config.data.val_files=FILE \
        --config.reward.judge.model=NAME

FILE is jsonl or parquet of rows {prompt, data_source}, and ground_truth where the judge should see one. The judge is
the only reward; `reward.judge.base_url` names another server with this interface, such as a vLLM of one's own,
`reward.judge.api_type` another provider. Equal answers are asked once (`cache_dir`). `python -m jppo.rewards.check
--config=configs/judge.py ...` asks it about one right and one wrong answer before anything is trained.

Hardware and memory: one GPU of 80 GB, as configs/gsm8k.py. Time: with 256 answers a step and 32 requests at a time a
step waits for eight times what the judge takes for one. Expected: no figure; whether the judge's score means anything
is for a test with rules, or people, to say.
"""

import ml_collections

from jppo import config as settings


def get_config() -> ml_collections.ConfigDict:
    """The recipe with a judge."""
    config = settings.recipe("gsm8k")

    config.data.train_files = "data/questions/train.jsonl"
    config.data.val_files = "data/questions/test.jsonl"

    config.reward.weights = "judge_score=1"  # no rule is asked
    config.reward.judge.api_type = "openai"
    config.reward.judge.model = "gpt-4o-mini"
    config.reward.judge.preset = "dialogue"
    config.reward.judge.cache_dir = "runs/judge/cache"

    config.trainer.run_dir = "runs/judge"
    return config.lock()
