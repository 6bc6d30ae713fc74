"""Agents, tools and environments trained through a real vLLM: trained.py, and its comparison of tokens."""

import importlib.util

import numpy as np
import pytest

from tests.plugins.agents import trained


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tasks")


@pytest.fixture
def task(folder, shared):
    """Returns the folder of a task, prepared once."""

    def prepared(make):
        if not (folder / make.__name__).is_dir():
            make(folder / make.__name__, shared / "tokenizers/qwen2.5")
        return folder / make.__name__

    return prepared


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make setup")
@pytest.mark.parametrize("name", trained.MODES)
def test_it_learns_and_trains_on_the_tokens_of_the_server(task, name, tmp_path):
    row = trained.run(name, task(trained.MODES[name].task), tmp_path / "run")
    assert trained.lacks(row) == [], row


def test_what_a_run_lacks_is_named():
    tokens = {"wrong": 0, "trained": 9, "given": 3, "mixed": 2}
    printed = {"val/score": {"0": 0.4, "24": 1.0}, "agent/faults": 0.0}
    row = {"settings": trained.given("abort"), "printed": printed, "tokens": tokens}
    assert trained.lacks(row) == []
    for change, lack in [
        ({"tokens": tokens | {"wrong": 1}}, "1 wrong tokens"),
        ({"tokens": tokens | {"given": 0}}, "no given tokens"),
        ({"tokens": tokens | {"mixed": 0}}, "no conversation of several versions"),
        ({"printed": printed | {"val/score": {"0": 0.5, "16": 0.7}}}, "score 0.500 -> 0.700"),
        ({"printed": printed | {"agent/faults": 2.0}}, "2 faults"),
    ]:
        assert trained.lacks(row | change) == [lack]


@pytest.mark.parametrize(
    "change,wrong",
    [
        (lambda t: None, 0),
        (lambda t: t["trained"].__setitem__(4, True), 1),  # a tool's token
        (lambda t: t["trained"].__setitem__(3, False), 1),  # a sampled one
        (lambda t: t["tokens"].__setitem__(6, 99), 2),  # another token than the server's, so its answer is not found
        (lambda t: t["logprob"].__setitem__(7, -3.0), 2),
    ],
)
def test_wrong_tokens_are_counted(change, wrong):
    """A prompt of two tokens, an answer of two, two tokens of a tool, an answer of two."""
    seen = trained.Tokens()
    seen.gave[1, 2] = [([3], [-1.0]), ([3, 4], [-1.0, -2.0])]  # another response was cut after one token
    seen.gave[1, 2, 3, 4, 5, 6] = [([7, 8], [-0.5, -0.25])]
    sampled = np.array([False, False, True, True, False, False, True, True])
    logprob = np.float32([0, 0, -1.0, -2.0, 0, 0, -0.5, -0.25])
    t = {"tokens": [1, 2, 3, 4, 5, 6, 7, 8], "trained": sampled, "logprob": logprob}
    change(t)
    seen.compare(**t, first=2)
    assert seen.wrong == wrong
