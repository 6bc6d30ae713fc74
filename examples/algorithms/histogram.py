r"""A histogram of each step's advantages, in RUN/advantages.jsonl, and a metric; the algorithm stays as it is.

    python -m jppo.train --config=configs/gsm8k.py --config.algorithm.options.bins=24 \
        --config.algorithm.extension=examples/algorithms/histogram.py:histogram
"""

import json

import numpy as np

from jppo.learner.algorithm import Algorithm


def histogram(bins: int = 12, most: float = 3.0):
    edges = np.linspace(-most, most, bins + 1)

    def listen(memory, step):
        advantages = step.batch["advantage"][step.batch.mask]
        counts = np.histogram(np.clip(advantages, -most, most), edges)[0]
        with (step.folder / "advantages.jsonl").open("a") as file:
            file.write(json.dumps({"step": step.number, "counts": counts.tolist()}) + "\n")
        return {"mine/zero_advantages": np.mean(advantages == 0)}

    return Algorithm(listen=listen)
