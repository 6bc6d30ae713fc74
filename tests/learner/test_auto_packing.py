"""The layout of `data.packing=auto`: estimated costs by hand, and what forbids shared prompts."""

import types

import numpy as np
import pytest

from jppo import settings
from jppo.learner import auto_packing, packing
from jppo.learner.ppo import ModelConfigs
from jppo.models import config_reader
from tests.learner.test_cost import SHAPE, SLIDING
from tests.make import typed

CPU, H100, TPU = ("cpu", "cpu", None), ("gpu", "NVIDIA H100", "9.0"), ("tpu", "TPU v5e", None)
# One step of a prompt of 100 tokens with 8 responses of 1, 3, 6, 8, 11, 13, 16 and 18 tokens of at most 20.
STEP = {
    "data.train_files": "train", "data.val_files": "test", "model.path": "model", "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": 1, "rollout.n": 8, "actor.ppo_mini_batch_size": 8, "data.row_lengths": 1,
    "data.max_prompt_length": 100, "data.max_response_length": 20, "model.compute_dtype": "bfloat16",
}  # fmt: skip
PAIRS, CAUSAL, SHARED = 8 * 10816, 8 * 7260, 36864


def qwen(width=12, **changes):
    shape = SHAPE | {"hidden_size": 16, "intermediate_size": width, "model_type": "qwen2", "hidden_act": "silu"}
    return config_reader.parse_config(shape | {"rope_theta": 1e4} | changes, path="here")


def choose(changes=None, device=CPU, prompts=(100,), policy=None, critic=None):
    config = settings.default()
    config.update_from_flattened_dict(STEP | (changes or {}))
    platform, kind, capability = device
    one = types.SimpleNamespace(platform=platform, device_kind=kind, compute_capability=capability)
    shape = dict(data=1, fsdp=1, tensor=1, sequence=1, expert=1)
    mesh = types.SimpleNamespace(devices=np.array([one], object), size=1, shape=shape)
    models = ModelConfigs(policy=policy or qwen(), critic=critic, prompt_lengths=prompts, total_steps=1)
    chosen, note = auto_packing.with_packing(typed(config), models, mesh)
    return chosen.data.packing, note


@pytest.mark.parametrize(
    "device, width, slower, slower_shared, pairs, expected",
    [
        (CPU, 12, 2.5, 2.5, PAIRS, "prefix"),
        (H100, 12, 5.0, 10.4, CAUSAL, "buckets"),
        (H100, 1200, 5.0, 10.4, CAUSAL, "prefix"),
    ],
    ids=["cpu", "small gpu", "wide gpu"],
)
def test_the_costs_of_a_step_by_hand(device, width, slower, slower_shared, pairs, expected):
    """Buckets: 8 rows of 120. Prefix: one row of 264, for 99 shared entries and 76 of the samples; a micro-batch each.

    XLA scores 64 x 64 + 56 x 120 pairs of a row of 120, cuDNN 120 x 121 / 2. Of the row of 264 it scores 64 x 64 +
    64 x 128 + 2 x 64 x (100 + 84) + 8 x (100 + 28). A token has 2 FLOP for each of the weights of both layers and of
    the head; a pair has 2 of 16 numbers in 2 heads of both layers.
    """
    policy = qwen(width)
    by_pair = 2 * 16 * 2 * 2 / (2 * (2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * width) + 16 * 10))
    buckets = 8 * 120 + slower * pairs * by_pair + packing.MICRO_TOKENS
    prefix = 264 + slower_shared * SHARED * by_pair + packing.MICRO_TOKENS
    found, note = choose(device=device, policy=policy)
    assert found == expected and f"prefix is estimated at {prefix / buckets:.2f} of the time of buckets" in note


@pytest.mark.parametrize(
    "changes, models",
    [
        ({"rollout.n": 1, "data.train_batch_size": 8, "algorithm.adv_estimator": "gae"}, {}),
        ({"data.packing": "none"}, {}),
        ({"model.lora_rank": 2, "model.lora_dropout": 0.1}, {}),
        ({"rollout.routing_replay": True}, {}),
        ({}, {"policy": SLIDING}),
        ({}, {"critic": SLIDING}),
        ({"model.attention": "cudnn"}, {"device": H100, "policy": qwen(1200)}),
        ({}, {"device": TPU}),
    ],
    ids=["one sample", "explicit", "dropout", "replayed experts", "window", "critic's window", "cudnn", "tpu"],
)
def test_no_prompt_is_shared_where_that_is_refused_or_means_nothing(changes, models):
    assert choose(changes, **models) == (changes.get("data.packing", "auto"), "")


def test_lengths_of_the_data_decide_and_their_limits_where_there_is_none():
    lengths = {"data.row_lengths": 4}
    assert choose(lengths, prompts=(2,))[0] == "buckets" and choose(lengths, prompts=())[0] == "prefix"


@pytest.mark.parametrize("shuffle, expected", [(False, "prefix"), (True, "buckets")])
def test_samples_of_a_prompt_that_are_in_other_mini_batches_share_nothing(shuffle, expected):
    assert choose({"data.train_batch_size": 8, "actor.shuffle": shuffle})[0] == expected
