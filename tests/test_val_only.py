"""trainer.val_only tests the policy that a start would have, and changes nothing of what the run has written."""

import pathlib

import numpy as np
import pytest
import safetensors.numpy

from jppo import settings, train
from tests.make import read_lines

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture
def look(small_run, engine):
    """The lines of metrics.jsonl of a look at the run, and the tensors that the engine had."""

    def look():
        loaded = {}
        engine.load = lambda tensors, *, version, mode: loaded.update({name: np.array(x) for name, x in tensors})
        small_run.trainer.val_only = True
        settings.check(small_run)
        train.train(small_run)
        return read_lines(pathlib.Path(small_run.trainer.run_dir) / "val_only/metrics.jsonl"), loaded

    return look


def contents(run):
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and "val_only" not in path.parts}


def test_a_finished_run_is_tested_by_its_checkpoint_and_stays_as_it_is(small_run, engine, look, capsys):
    run = pathlib.Path(small_run.trainer.run_dir)
    small_run.algorithm.adv_estimator, small_run.actor.lr = "reinforce_plus_plus", 1e-2  # no critic to compile
    train.train(small_run)
    (run / "checkpoints/9.orbax-checkpoint-tmp-1").mkdir()  # another process may be writing it
    before = contents(run)
    small_run.trainer.max_ckpt_to_keep = 1
    how = small_run.rollout.val_kwargs
    how.n, how.temperature, how.top_p, how.top_k = 3, 0.7, 0.9, 5
    engine.asked.clear()
    [line], loaded = look()
    assert contents(run) == before and (run / "checkpoints/9.orbax-checkpoint-tmp-1").is_dir()
    assert sorted(path.name for path in (run / "checkpoints").iterdir() if path.name.isdecimal()) == ["1", "2"]
    assert line["step"] == 2 and {"val/score", "val/score_se", "val/pass@3", "val/maj@3", "val/worst@2"} <= line.keys()
    assert not [name for name in line if name.startswith(("actor/", "critic/"))]
    test = engine.asked[-1]
    assert (test.n, test.temperature, test.top_p, test.top_k) == (3, 0.7, 0.9, 5)
    rows = read_lines(run / "val_only/samples/test_2.jsonl")
    assert len(rows) == 3 * 4 and rows[0]["uid"] == rows[2]["uid"] != rows[3]["uid"]
    last = safetensors.numpy.load_file(run / "hf/model.safetensors")
    for name, array in last.items():
        np.testing.assert_array_equal(loaded[name], array)
    assert "nothing was trained" in capsys.readouterr().out

    small_run.trainer.resume_mode = str(run / "checkpoints/1")
    lines, loaded = look()
    assert [m["step"] for m in lines] == [1] and contents(run) == before
    assert any((loaded[name] != array).any() for name, array in last.items())


def test_a_run_that_is_new_is_tested_by_its_model_and_is_still_new(small_run, look, engine):
    small_run.trainer.val_before_train = False
    [line], _ = look()
    run = pathlib.Path(small_run.trainer.run_dir)
    assert line["step"] == 0 and (run / "val_only/samples/test_0.jsonl").is_file()
    assert {path.name for path in run.iterdir()} == {"val_only"}
    assert len(engine.asked) == 2, "the comparison of log-probs, and the test"
