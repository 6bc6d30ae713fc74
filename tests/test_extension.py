"""An algorithm in one file: whole runs of examples/algorithms, killed and resumed to the bit."""

import json
import pathlib

import numpy as np
import pytest

from jppo import train
from jppo.data.memory import from_text
from jppo.rewards import graders
from jppo.runlog.watchdog import Stopped
from jppo.types import Reward
from tests.make import ROOT, untimed, weights
from tests.test_resume import again, broken_off

pytestmark = pytest.mark.usefixtures("quick_compilation")
EXAMPLES = ROOT / "examples/algorithms"
TIMES = ("rollout/sampling_s", "rollout/hidden")


@pytest.fixture
def run(small_run, monkeypatch):
    """changes -> the config of a small run whose random responses are worth something."""
    monkeypatch.setitem(graders.GRADERS.own, "arithmetic", lambda text, _: Reward(int(f"0{text}"[-1]) / 9, {}, None))

    def run(extension, options=(), **changes):
        small_run.algorithm.extension = str(extension)
        small_run.algorithm.options.update(dict(options))
        return again(small_run, **changes)

    return run


def state_of(config, step):
    about = pathlib.Path(config.trainer.run_dir) / f"checkpoints/{step}/about/metadata"
    return from_text(json.loads(about.read_text())["meta"]["cursor"]["curriculum"])


@pytest.mark.parametrize(
    "changes",
    [
        dict(algorithm__adv_estimator="grpo"),
        dict(rollout__mode="async", rollout__max_staleness=1, rollout__n=2, data__packing="prefix"),
        dict(algorithm__filter_groups=True, rollout__n=2, data__train_batch_size=2, trainer__total_training_steps=3),
    ],
    ids=["synchronous", "asynchronous", "dynamic"],
)
def test_spo_as_a_users_file_is_resumed_to_the_bit(run, monkeypatch, tmp_path, changes):
    c = run(f"{EXAMPLES}/spo.py:spo", dict(forget=0.5), **changes)
    train.train(c)
    other = broken_off(c, tmp_path / "other", monkeypatch, in_call_of=train.ppo.learn, at=2, error=Stopped(0, "asked"))
    train.train(other)
    assert untimed(other.trainer.run_dir, *TIMES) == untimed(c.trainer.run_dir, *TIMES)
    assert weights(other.trainer.run_dir) == weights(c.trainer.run_dir)
    last = c.trainer.total_training_steps
    np.testing.assert_array_equal(state_of(other, last), state_of(c, last))
    assert not (state_of(c, last) == state_of(c, last - 1)).all(), "the last step is remembered"
