"""A reward that an HTTP API computes, as `reward.function`. docs/rewards.md explains the settings.

    export REWARD_URL=https://HOST/score REWARD_KEY=...       # the key, if the API wants one, goes into no file
    python -m jppo.rewards.check --config.data.train_files=train.jsonl --config.reward.function=examples/http_reward.py
    python -m jppo.train --config=FILE --config.reward.function=examples/http_reward.py --config.reward.workers=16

The API gets {"response": ..., "ground_truth": ...} by POST and answers {"score": NUMBER}; further numbers are logged.
"""

import os
import time

import httpx

URL, KEY = os.environ["REWARD_URL"], os.environ.get("REWARD_KEY")
PAUSES_S = (0.5, 1.0, None)  # after each try; None: the last one
BUSY = (408, 429, 500, 502, 503, 504)  # worth another try
# 2.5 seconds to connect, and to wait for an answer: three tries fit into reward.timeout_s, 10 seconds by default.
CLIENT = httpx.Client(timeout=2.5, headers={"Authorization": f"Bearer {KEY}"} if KEY else {})


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Returns the API's answer. What it raises becomes an error of this sample, which is then not trained on."""
    for pause_s in PAUSES_S:
        try:
            reply = CLIENT.post(URL, json={"response": solution_str, "ground_truth": ground_truth})
            if pause_s is None or reply.status_code not in BUSY:
                return reply.raise_for_status().json()
        except httpx.TransportError:  # no connection, or no answer in time
            if pause_s is None:
                raise
        time.sleep(pause_s)
