"""Small parts of a run's start; whole starts are in test_train.py."""

import dataclasses
import types

import pytest

from jppo import train
from jppo.data.prompts import PromptSet
from jppo.errors import UserError
from jppo.learner import packing
from jppo.learner.make import make_mesh
from jppo.run import start
from jppo.run.inputs import engine_arguments, read_inputs
from jppo.run.start import describe_sizes
from tests.conftest import write_small_run
from tests.make import changed, typed


def test_the_sizes_of_a_run(small_run):
    c = typed(small_run)
    inputs = dataclasses.replace(read_inputs(c), train=PromptSet([], 3, truncated=5), val=PromptSet([], 4, truncated=7))
    plan = packing.Plan((8, 16), ((4,), (2, 1)), share_rows=False)
    prompts, devices, which = describe_sizes(inputs, make_mesh(c), plan, 12)
    assert prompts == "0 prompts to train on, 0 to test on (7 over-long ones left out, 12 cut)"
    assert devices.endswith("rows of shape 4x8, 2x16, 1x16") and which == "resuming from the checkpoint of step 12"
    assert describe_sizes(inputs, make_mesh(c), plan, None)[-1] == "a new run"


def test_an_engine_gets_the_turns_of_an_agent(small_run):
    inputs = read_inputs(typed(small_run))
    alone = engine_arguments(inputs)
    assert set(alone) == {"eos_token_ids", "decode"} and alone["decode"]([3, 4]) == "12"
    talk = object()
    with_agent = engine_arguments(dataclasses.replace(inputs, agent=types.SimpleNamespace(talk=talk)))
    assert with_agent["talk"] is talk and set(with_agent) == {*alone, "talk"}


@pytest.mark.parametrize("name", ["model.path", "critic.path", "ref.path"])
def test_a_missing_model_names_its_setting(small_run, name):
    c = changed(small_run, {"algorithm.use_kl_in_reward": True, name: "/no/where"})
    with pytest.raises(UserError, match=f"^{name} '/no/where' is not a directory; give"):
        read_inputs(typed(c))


def test_a_batch_of_more_prompts_than_there_are_is_refused_before_a_model_is_loaded(small_run):
    filled = {"data.train_batch_size": 512, "trainer.total_training_steps": 3}
    with pytest.raises(UserError, match=r"data\.train_batch_size=512 must be at most the number of prompts, \d+$"):
        read_inputs(typed(changed(small_run, filled)))


def test_servers_that_do_not_answer_are_found_before_a_model_is_loaded(config, tmp_path, monkeypatch):
    c = changed(write_small_run(config, tmp_path), {"rollout.urls": "http://127.0.0.1:9"})
    monkeypatch.setattr(start, "make_learner", lambda *_, **__: pytest.fail("it loads a model"))
    with pytest.raises(UserError, match=r"127\.0\.0\.1:9"):
        train.train(c)
    assert not (tmp_path / "run").exists(), "a refused run leaves no folder"
