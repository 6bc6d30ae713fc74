"""PPO on custom questions, with a language model as the judge of the answers.

    export OPENAI_API_KEY=...
    python -m jppo.train --config=configs/judge.py --config.data.train_files=FILE --config.data.val_files=FILE \
        --config.reward.judge.model=NAME

FILE is jsonl or parquet of rows {prompt}, and ground_truth if the judge should see it. The judge is the only reward.
`reward.judge.base_url` selects another server with this interface, such as a local vLLM, and `reward.judge.api_type`
another provider. Equal answers are judged once (`cache_dir`). `python -m jppo.rewards.check --config=configs/judge.py
...` has some answers of eight rows judged before training, empty ones too.

Hardware and memory: one GPU of 80 GB, as configs/gsm8k.py. Time: with 256 answers a step and 32 requests at a time a
step waits for eight times what the judge takes for one. Expected: no figure; whether the judge's score means anything
is for a test with rules, or people, to say.
"""

import ml_collections

from jppo import settings


def get_config() -> ml_collections.ConfigDict:
    """The recipe with a judge."""
    config = settings.recipe("gsm8k")

    config.data.train_files = "data/questions/train.jsonl"
    config.data.val_files = "data/questions/test.jsonl"

    config.reward.weights = "judge_score=1"  # no rules
    config.reward.judge.api_type = "openai"
    config.reward.judge.model = "gpt-4o-mini"
    config.reward.judge.preset = "dialogue"
    config.reward.judge.cache_dir = "runs/judge/cache"

    config.trainer.run_dir = "runs/judge"
    return config.lock()
