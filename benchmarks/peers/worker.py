"""The side of a worker: it reads the work, makes ready, says so, and then runs one stage a line.

    PYTHON peer_torch.py FOLDER --dtype float32

FOLDER has a model as transformers saves it, `batch.npz` and `work.json` (see `contest.py`, which writes them). A line
`go STAGE` on stdin is one repeat of that stage, a line of JSON on stdout its answer: the seconds of each part, and a
number that says what was computed. What anything else prints goes to stderr.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

Parts = dict[str, float]  # seconds
Stage = Callable[[], tuple[Parts, float]]


@dataclasses.dataclass(frozen=True)
class Work:
    """The workload of every worker: P prompt tokens, at most N response tokens."""

    model: str  # a directory of weights in float32
    dtype: str  # of the products: float32, or bfloat16 with weights in float32
    tokens: np.ndarray  # [B, P + N] i32, 0 behind a response
    responses: np.ndarray  # [B] i32, the tokens of each
    advantage: np.ndarray  # [B, N] f32
    returns: np.ndarray  # [B, N] f32
    value: np.ndarray  # [B, N] f32, the old ones
    prompt: int
    mini_batch: int
    how: dict[str, Any]  # numbers of loss and optimizer, by jppo's names

    @property
    def mask(self) -> np.ndarray:
        """[B, N] bool, the tokens of the responses."""
        return np.arange(self.advantage.shape[1]) < self.responses[:, None]

    @property
    def valid(self) -> np.ndarray:
        """[B, P + N] bool, the tokens of prompts and responses."""
        return np.arange(self.tokens.shape[1]) < (self.prompt + self.responses)[:, None]


def read(folder: pathlib.Path, dtype: str) -> Work:
    """Reads the workload in the folder."""
    batch = np.load(folder / "batch.npz")
    fields = json.loads((folder / "work.json").read_text())
    return Work(model=str(folder / "model"), dtype=dtype, **{name: batch[name] for name in batch.files}, **fields)


def timed(call: Callable[[], float]) -> tuple[float, float]:
    """Returns seconds and result."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def best_of(choices: Iterable[int], run: Callable[[int], Any]) -> int:
    """Returns the fastest choice; each is timed once after a warm-up."""
    choices = list(choices)
    run(choices[0])
    return min(choices, key=lambda choice: timed(lambda: run(choice))[0])


def serve(begin: Callable[[Work], tuple[dict[str, Any], dict[str, Stage]]]) -> None:
    """The command line: `begin` warms up and returns a description and the stages."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    report, stages = begin(read(args.folder, args.dtype))
    print(json.dumps(report | {"stages": list(stages)}), file=answers, flush=True)
    for line in sys.stdin:
        _, name = line.split()
        seconds, check = stages[name]()
        print(json.dumps({"seconds": seconds, "check": check}), file=answers, flush=True)
