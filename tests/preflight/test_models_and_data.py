"""What a run reads, with made faults: models, tokenizer, data, reward, parity."""

import json
import shutil
import sys

import jax
import numpy as np
import pytest

from jppo.errors import UserError
from jppo.learner.make import make_mesh
from jppo.preflight import models_and_data
from jppo.preflight.finding import Check, examine
from jppo.run.inputs import read_inputs
from tests.make import typed


@pytest.fixture(autouse=True)
def ample(monkeypatch):
    """A machine with room, whatever else it runs."""
    monkeypatch.setattr(models_and_data.memory_budget, "host_room", lambda: 2**40)


@pytest.fixture
def real(small_run, tiny_model, tmp_path):
    """The small run with weights in files of its own."""
    shutil.copytree(tiny_model, tmp_path / "hf")
    small_run.model.path, small_run.model.init = str(tmp_path / "hf"), "pretrained"
    return small_run


def looked(check, *args):
    return list(examine([Check("it", lambda: check(*map(typed, args)))]))


def test_a_model_that_is_whole(real):
    (found,) = looked(models_and_data.check_models, real)
    assert found.verdict == "OK" and "qwen2" in found.found
    (found,) = looked(models_and_data.check_tokenizer, real)
    assert found.verdict == "OK" and "14 tokens" in found.found and "<eos>" in found.found


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def forget(name):
    return lambda folder: (folder / name).unlink()


def small_vocabulary(folder):
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"vocab_size": 8}))


@pytest.mark.parametrize(
    "fault, said",
    [
        (forget("config.json"), "config.json"),
        (forget("model.safetensors"), "safetensors"),
        (cut, "model.safetensors"),
        (small_vocabulary, "has shape"),
    ],
)
def test_a_model_that_is_not_whole(real, tmp_path, fault, said):
    fault(tmp_path / "hf")
    (found,) = looked(models_and_data.check_models, real)
    assert found.verdict == "FAIL" and found.remedy and said in f"{found.found}; {found.remedy}"


def test_a_tokenizer_that_is_too_large_or_missing(small_run, tmp_path):
    small_vocabulary(tmp_path / "model")
    (found,) = looked(models_and_data.check_tokenizer, small_run)
    assert found.verdict == "FAIL" and "the tokenizer has 14 tokens" in found.found
    (tmp_path / "model/tokenizer.json").unlink()
    (found,) = looked(models_and_data.check_tokenizer, small_run)
    assert found.verdict == "FAIL" and "no tokenizer.json" in found.found


def test_data_as_they_are_and_with_faults(small_run, tmp_path):
    def data():
        return looked(lambda c: models_and_data.check_data(typed(c), read_inputs(typed(c))), small_run)

    found = data()
    assert [one.verdict for one in found[:1]] == ["OK"] and "8 of 8 rows" in found[0].found
    file = tmp_path / "train.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0], {**rows[1], "data_source": "odd"}]))
    warned = {one.found.split(":")[0]: one for one in data() if one.verdict == "WARN"}
    assert {"duplicates", "source"} <= set(warned) and all(one.remedy for one in warned.values())
    file.write_text(json.dumps({"prompt": "1+1="}) + "\n")
    (found,) = data()
    assert found.verdict == "FAIL" and "train.jsonl" in found.found


def test_a_reward_that_knows_nothing(small_run, tmp_path):
    def reward(play=True):
        inputs = read_inputs(typed(small_run))
        agent = inputs.agent if play else None
        return looked(models_and_data.check_reward, small_run, inputs, make_mesh(typed(small_run)), agent)

    (found,) = reward()
    assert found.verdict == "OK" and "right answers earn 1" in found.found
    (tmp_path / "mine.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"
    )
    small_run.reward.function = f"{tmp_path / 'mine.py'}:score"
    (found,) = reward()
    assert found.verdict == "FAIL" and "right answers earn 1, others' 1" in found.found and found.remedy
    (tmp_path / "agent.py").write_text("def play(task): raise KeyError(task['ground_truth'])\n")
    small_run.rollout.agent, small_run.rollout.agent_format = f"{tmp_path / 'agent.py'}:play", "plain"
    of_responses, of_agent = reward()
    assert of_responses.verdict == "FAIL" and "right answers earn 1, others' 1" in of_responses.found
    assert of_agent.verdict == "FAIL" and "the agent exited with 70: KeyError" in of_agent.found and of_agent.remedy
    of_responses, not_run = reward(play=False)  # as in a dry run
    assert of_responses.verdict == "FAIL" and not_run.verdict == "OK" and "jppo.doctor runs it" in not_run.found


def test_parity_with_transformers_and_without_torch(real, quick_compilation, tmp_path, monkeypatch):
    """The process for transformers is `parity_worker.py`."""
    (found,) = looked(models_and_data.check_parity, real)
    if "skipped" not in found.found:
        assert found.verdict == "OK" and "largest gap" in found.found
        theirs = models_and_data.transformers_logprobs

        def other(*args):
            return theirs(*args) + np.float32(0.01)

        with monkeypatch.context() as patch:
            patch.setattr(models_and_data, "transformers_logprobs", other)
            (found,) = looked(models_and_data.check_parity, real)
        assert found.verdict == "FAIL" and "more than 0.001" in found.found
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # the same Python without its site-packages
    bare.chmod(0o755)
    real.rollout.python = str(bare)
    (found,) = looked(models_and_data.check_parity, real)
    assert found.verdict == "OK" and "skipped: no torch" in found.found
    monkeypatch.setattr(models_and_data.memory_budget, "host_room", lambda: 1)
    (found,) = looked(models_and_data.check_parity, real)
    assert found.verdict == "WARN" and "skipped: it takes" in found.found
    real.model.init = "random"
    assert "random weights" in looked(models_and_data.check_parity, real)[0].found


def test_a_model_that_transformers_cannot_read(real, tmp_path):
    real.rollout.python = str(tmp_path / "none")
    (found,) = looked(models_and_data.check_parity, real)
    assert found.verdict == "FAIL" and "rollout.python" in found.remedy


def test_what_transformers_said_last_is_shown(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho one >&2; echo two >&2; echo three is wrong >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(UserError, match="transformers cannot read here: three is wrong; download"):
        models_and_data.transformers_logprobs(str(python), "here", np.array([3, 4]))


def test_our_log_probs_are_of_the_tokens_that_follow(tiny_model, quick_compilation):
    from jppo.models import hf

    _, cfg = hf.read_config(tiny_model)
    ids = np.arange(2, 10, dtype=np.int32)
    found = models_and_data.own_logprobs(tiny_model, cfg, ids)
    assert found.shape == (7,) and np.all(found < 0)
    other = models_and_data.own_logprobs(tiny_model, cfg, np.append(ids[:-1], 3).astype(np.int32))
    assert np.array_equal(found[:-1], other[:-1]) and found[-1] != other[-1]  # only the last is another token
    assert jax.devices()[0].platform == "cpu"
