"""configs/gsm8k.py is the published recipe; the numbers below are typed from it, not read from the code."""

import importlib.util
import pathlib

import pytest

from jppo import settings

RECIPE = {
    "model.path": "Qwen/Qwen2.5-0.5B-Instruct",
    "data.train_batch_size": 256,
    "data.max_prompt_length": 1024,
    "data.max_response_length": 512,
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.use_kl_in_reward": True,
    "algorithm.kl_coef": 0.001,
    "actor.ppo_mini_batch_size": 64,
    "actor.ppo_epochs": 1,
    "actor.clip_ratio": 0.2,
    "actor.entropy_coeff": 0.001,
    "actor.use_kl_loss": False,
    "actor.lr": 1e-6,
    "actor.grad_clip": 1.0,
    "critic.path": "",  # the policy's, so that one local path replaces both
    "critic.cliprange_value": 0.5,
    "critic.lr": 1e-5,
    "critic.grad_clip": 1.0,
    "rollout.n": 1,
    "rollout.temperature": 1.0,
    "trainer.test_freq": 10,
    "trainer.total_epochs": 15,
}


def load():
    path = pathlib.Path(__file__).parents[1] / "configs/gsm8k.py"
    spec = importlib.util.spec_from_file_location("gsm8k_config", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_recipe_to_the_number():
    config = load().get_config()
    got = {name: config[name.split(".")[0]][name.split(".")[1]] for name in RECIPE}
    assert got == RECIPE and config.is_locked


def test_an_argument_is_refused():
    with pytest.raises(settings.UserError, match="takes no argument"):
        settings.parse(["--config=configs/gsm8k.py:big"], "", settings.default())
