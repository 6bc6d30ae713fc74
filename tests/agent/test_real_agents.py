"""benchmarks/conversations.py: its runs through a real vLLM, the comparison of tokens, and the table of the docs."""

import importlib.util
import json
import pathlib

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("conversations", ROOT / "benchmarks/conversations.py")
conversations = importlib.util.module_from_spec(spec)
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "benchmarks")
    spec.loader.exec_module(conversations)


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
@pytest.mark.parametrize("name", conversations.MODES)
def test_it_learns_and_trains_on_the_tokens_of_the_server(task, name, tmp_path):
    row = conversations.run(name, task(conversations.MODES[name].task), tmp_path / "run")
    assert conversations.lacks(row) == [], row


def recorded():
    [path] = (ROOT / "benchmarks/results").glob("*-conversations.jsonl")
    return list(map(json.loads, path.read_text().splitlines()))


def test_the_table_of_the_docs_is_that_of_the_results():
    rows = recorded()
    assert [conversations.lacks(row) for row in rows] == [[] for _ in rows]
    assert all(row["settings"] == conversations.given(row["run"]) for row in rows)
    assert conversations.table(rows) in (ROOT / "benchmarks/README.md").read_text()


def test_what_a_run_lacks_is_named():
    row = next(row for row in recorded() if row["run"] == "abort")
    printed, tokens = row["printed"], row["tokens"]
    for change, lack in [
        ({"tokens": tokens | {"wrong": 1}}, "1 wrong tokens"),
        ({"tokens": tokens | {"given": 0}}, "no given tokens"),
        ({"tokens": tokens | {"mixed": 0}}, "no conversation of several versions"),
        ({"printed": printed | {"val/score": {"0": 0.5, "16": 0.7}}}, "score 0.500 -> 0.700"),
        ({"printed": printed | {"agent/faults": 2.0}}, "2 faults"),
    ]:
        assert conversations.lacks(row | change) == [lack]


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
    seen = conversations.Tokens()
    seen.gave[1, 2] = [([3], [-1.0]), ([3, 4], [-1.0, -2.0])]  # another response was cut after one token
    seen.gave[1, 2, 3, 4, 5, 6] = [([7, 8], [-0.5, -0.25])]
    sampled = np.array([False, False, True, True, False, False, True, True])
    logprob = np.float32([0, 0, -1.0, -2.0, 0, 0, -0.5, -0.25])
    t = {"tokens": [1, 2, 3, 4, 5, 6, 7, 8], "trained": sampled, "logprob": logprob}
    change(t)
    seen.compare(**t, first=2)
    assert seen.wrong == wrong
