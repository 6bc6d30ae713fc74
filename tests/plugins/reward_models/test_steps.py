"""Token classifiers that score steps: beside transformers' own, and the amounts that responses earn, by hand."""

import json
import math
import pathlib
import re
import sys

import numpy as np
import pytest
import transformers

from jppo import settings, train
from jppo.errors import UserError
from jppo.learner import sharding, state
from jppo.models import hf
from jppo.plugins.reward_models.classifier import JaxRewardModel, convert_weights, read_classifier
from jppo.plugins.reward_models.model import StepPart, Texts
from jppo.plugins.reward_models.model_process import TransformersRewardModel
from jppo.rewards.parts import RewardSum, Sample, parse_weights
from jppo.types import Prompt
from tests.plugins.reward_models.test_model import WORDS, edit, load_tokenizer, make_model

torch = pytest.importorskip("torch")
files_of_torch = pytest.importorskip("safetensors.torch")
model_worker = pytest.importorskip("jppo.plugins.reward_models.torch_worker")

MARK = " [SEP] "  # a special token of the model's tokenizer
TEXTS = ["w1 w2\n\nw3 w4 w5\n\n \n\nw6", "w7", "w8 w9\n\n", "w1\n\n" * 9]
STEPS = [["w1 w2", "w3 w4 w5", "w6"], ["w7"], ["w8 w9"], ["w1"] * 9]
ENDS = [[4, 14, 21], [1], [4], [4 * k + 1 for k in range(9)]]  # characters, which are the policy's tokens


def make_classifier(folder, family, *, labels, **more):
    return make_model(folder, family, labels=labels, kind="Token", **more)


def as_text(ids):
    return bytes(ids).decode()


def sample(text, question="w10 w11", tokens=True):
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32) if tokens else None
    prompt = Prompt("u", "source", [{"role": "user", "content": question}], np.zeros(1, np.int32), "", {})
    return Sample(prompt, text, length=len(text), finish="stop", tokens=ids)


def opened(folder, max_length=128, directory=None):
    tokenizer = load_tokenizer(folder)
    what = read_classifier(str(folder), tokenizer=tokenizer, max_length=max_length, steps=True, directory=directory)
    return what, Texts(tokenizer, max_length=max_length)


def made(scorer, texts, aggregation="sum", batch_size=3, delimiter="\n\n", mark=MARK):
    how = dict(batch_size=batch_size, aggregation=aggregation, delimiter=delimiter, mark=mark, decode=as_text)
    return StepPart(scorer, texts, **how)


def graded(part, samples):
    futures = [part.submit(one) for one in samples]
    part.flush()
    return [future.result(60) for future in futures]


def ids_by_hand(steps, question="w10 w11"):
    """The words of the whole input, and the places of the marks."""
    words, places = f"<user> {question} [SEP] <assistant>".split(), []
    for step in steps:
        words += [*step.split(), "[SEP]"]
        places.append(len(words) - 1)
    return [WORDS.index(word) for word in [*words, "[SEP]"]], places


def logits_by_hand(model, steps):
    """transformers' logits at the marks, of one text alone: [steps, labels]."""
    ids, places = ids_by_hand(steps)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, places].double().numpy()


def good_by_hand(logits):
    if logits.shape[-1] == 1:
        return 1 / (1 + np.exp(-logits[:, 0]))
    return np.exp(logits[:, 1]) / np.exp(logits).sum(axis=1)


class Fixed:
    """A scorer with prepared log-odds for each text."""

    def __init__(self, *odds):
        self.odds = list(odds)

    def score_at(self, ids, places):
        return [self.odds.pop(0) for _ in ids]

    def close(self):
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A llama with one label, as an HF directory."""
    where = tmp_path_factory.mktemp("llama")
    make_classifier(where, "llama", labels=1)
    return where


# --- beside transformers


@pytest.mark.parametrize("family, labels", [("qwen2", 2), ("llama", 1), ("gemma2", 2)])
def test_step_scores_are_those_of_transformers_through_the_whole_text_path(family, labels, tmp_path, quick_compilation):
    model = make_classifier(tmp_path, family, labels=labels)
    with torch.no_grad():
        model.score.bias.copy_(torch.tensor([0.7, -0.4][:labels]))
    model.save_pretrained(tmp_path)
    what, texts = opened(tmp_path)
    scorer = JaxRewardModel(what, batch_size=3, max_length=128)
    expected = [logits_by_hand(model, steps) for steps in STEPS]
    asked = [ids_by_hand(steps) for steps in STEPS]
    odds = scorer.score_at([ids for ids, _ in asked], [places for _, places in asked])
    for found, logits in zip(odds, expected, strict=True):
        np.testing.assert_allclose(found, logits[:, -1] - (logits[:, 0] if labels == 2 else 0), atol=1e-4)
    part = made(scorer, texts)
    for found, logits, ends in zip(graded(part, map(sample, TEXTS)), expected, ENDS, strict=True):
        assert found.error is None and [token for token, _ in found.earned] == ends
        np.testing.assert_allclose([amount for _, amount in found.earned], good_by_hand(logits), atol=1e-4)
        assert found.score == pytest.approx(good_by_hand(logits).sum(), abs=1e-4)
        assert found.parts == {"steps": len(ends)}
    part.close()


def test_sharded_over_a_mesh_the_step_scores_are_the_same(folder, quick_compilation):
    what, _ = opened(folder)
    mesh = sharding.mesh_of_shape((1, 2, 2, 2))
    _, cfg = hf.read_config(str(folder))
    places = state.model_weights(cfg, mesh, head="trunk", param_dtype="float32").shardings
    whole = JaxRewardModel(
        what, batch_size=3, max_length=128, shardings=places, rows=sharding.whole_rows_sharding(mesh)
    )
    asked = [ids_by_hand(steps) for steps in STEPS]
    found, expected = (
        scorer.score_at([ids for ids, _ in asked], [places for _, places in asked])
        for scorer in (whole, JaxRewardModel(what, batch_size=3, max_length=128))
    )
    assert np.concatenate(found) == pytest.approx(np.concatenate(expected), abs=1e-4)


def test_a_family_of_transformers_alone_is_scored_in_its_process(tmp_path):
    model = make_classifier(tmp_path, "deberta-v2", labels=2)
    what, texts = opened(tmp_path)
    part = made(TransformersRewardModel(what, log=tmp_path / "rm.log", timeout_s=120), texts, "last")
    for found, steps, ends in zip(graded(part, map(sample, TEXTS)), STEPS, ENDS, strict=True):
        good = good_by_hand(logits_by_hand(model, steps))
        assert found.score == pytest.approx(good[-1], abs=1e-4)
        assert [token for token, _ in found.earned] == ends
        np.testing.assert_allclose(np.cumsum([amount for _, amount in found.earned]), good, atol=1e-4)
    part.close()


def test_a_value_head_is_read_at_every_step_with_its_bias(tmp_path, quick_compilation):
    """Skywork-o1's form: a causal model with v_head.summary, one logit for each token."""
    source = tmp_path / "skywork"
    model = make_classifier(source, "llama", labels=1)
    tensors = dict(model.state_dict())
    tensors["v_head.summary.weight"] = tensors.pop("score.weight")
    tensors["v_head.summary.bias"] = tensors.pop("score.bias") + 0.5
    files_of_torch.save_file(
        tensors | {"lm_head.weight": torch.ones(len(WORDS), 36)},
        source / "model.safetensors",
        metadata={"format": "pt"},
    )
    edit(source, architectures=["LlamaForCausalLM"], id2label=None, label2id=None)
    with torch.no_grad():
        model.score.bias.add_(0.5)
    copies = [
        convert_weights(source, python=sys.executable, cache=str(tmp_path / "c"), steps=steps)
        for steps in (True, False)
    ]
    assert copies[0] != copies[1]
    what, _ = opened(source, directory=copies[0])
    ids, places = ids_by_hand(STEPS[0])
    expected = logits_by_hand(model, STEPS[0])[:, 0]
    found = JaxRewardModel(what, batch_size=2, max_length=64).score_at([ids], [places])[0]
    np.testing.assert_allclose(found, expected, atol=1e-4)
    loaded = model_worker.load_classifier(str(copies[0]), device="cpu", dtype="float32", kind="token")
    np.testing.assert_allclose(model_worker.score_at(loaded, [ids], [places])[0], expected, atol=1e-4)


# --- aggregates


@pytest.mark.parametrize(
    "aggregation, amounts",
    [
        ("last", [0.5, 0.25, -0.5, 0.125]),
        ("min", [0.5, 0.0, -0.25, 0.0]),
        ("prod", [0.5, 0.375 - 0.5, 0.09375 - 0.375, 0.03515625 - 0.09375]),
        ("sum", [0.5, 0.75, 0.25, 0.375]),
        ("mean", [0.5, 0.625 - 0.5, 0.5 - 0.625, 0.46875 - 0.5]),
    ],
)
def test_a_step_earns_the_change_of_the_aggregate(folder, aggregation, amounts):
    good = np.array([0.5, 0.75, 0.25, 0.375])
    part = made(Fixed(np.log(good / (1 - good)).tolist()), opened(folder)[1], aggregation)
    (found,) = graded(part, [sample("w1\n\nw2\n\nw3\n\nw4")])
    assert [token for token, _ in found.earned] == [1, 5, 9, 13]
    assert [amount for _, amount in found.earned] == pytest.approx(amounts, abs=1e-12)
    assert found.score == pytest.approx(sum(amounts), abs=1e-12)
    part.close()


def test_certain_scores_a_text_without_steps_and_one_without_tokens(folder):
    part = made(Fixed([1e4, -1e4], [], [0.0]), opened(folder)[1])
    certain, empty, check = graded(part, [sample("w1\n\nw2"), sample(" \n\n"), sample("w1", tokens=False)])
    assert certain.score == 1.0 and certain.earned == ((1, 1.0), (5, 0.0))
    assert (empty.score, empty.earned, empty.parts, empty.error) == (0.0, (), {"steps": 0.0}, None)
    assert (check.score, check.earned) == (0.5, ())
    reward_sum = RewardSum({"rm_score": part}, parse_weights("rm_score=2", ["rm_score"]), score_on_error=None)
    part._step_model.odds = [[0.0, 0.0]]
    (found,) = reward_sum.testing().grade([sample("w1\n\nw2")])
    assert (found.score, found.earned) == (2.0, ((1, 1.0), (5, 1.0)))
    part.close()


# --- the text


@pytest.mark.parametrize("mark", ["\n\n", "\n", " ки\n", "<|im_end|>"])
def test_scores_are_read_at_the_token_that_completes_the_mark(shared, mark):
    """With a byte-level tokenizer, which merges line breaks with the character before them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(shared / "tokenizers/qwen2.5")
    texts = Texts(tokenizer, max_length=512)
    steps = ["First, 1+1=2.", "Ähm … 🙂", "\tSo: 2)"]
    ids, places, cut = texts.read_marked(sample("unread", "Was ist 1+1?"), [step + mark for step in steps])
    assert not cut and tokenizer.decode(ids).count("Was ist 1+1?") == 1
    for k, place in enumerate(places):
        ended = "".join(step + mark for step in steps[: k + 1])
        assert tokenizer.decode(ids[: place + 1]).endswith(f"assistant\n{ended}")
    whole, _ = texts.read(sample("".join(step + mark for step in steps), "Was ist 1+1?"))
    assert ids == whole


def test_truncation_may_take_the_prompt_but_no_step(folder):
    ids, _ = ids_by_hand(STEPS[0], "w10 " * 30)
    part = made(Fixed([0.0] * 3), opened(folder, max_length=12)[1])
    found, lost = graded(part, [sample(TEXTS[0], "w10 " * 30), sample(TEXTS[3])])
    assert found.score == 1.5 and part.metrics() == {"reward/rm_cut": 1.0}
    assert math.isnan(lost.score) and "max_length=12 removes 3 of 9 steps" in lost.error
    read, places, _ = opened(folder, max_length=12)[1].read_marked(
        sample("", "w10 " * 30), [s + MARK for s in STEPS[0]]
    )
    assert read == ids[-12:] and [read[k] for k in places] == [WORDS.index("[SEP]")] * 3
    part.close()


# --- bad input


def test_what_goes_wrong_is_an_error_of_the_samples_that_it_concerns(folder):
    texts = opened(folder)[1]
    part = made(Fixed([0.0, math.nan], [0.0], [0.0]), texts)
    nan, short, right = graded(part, [sample("w1\n\nw2"), sample("w1\n\nw2"), sample("w1")])
    assert math.isnan(nan.score) and "[0.0, nan]; they must be finite" in nan.error and nan.earned == ()
    assert math.isnan(short.score) and "gave 1 scores for 2 steps" in short.error
    assert right.score == 0.5
    texts._tokenizer.chat_template = "{{ messages[0]['content'] }}"
    (found,) = graded(part, [sample("w1")])
    assert "omits the response" in found.error
    part.close()


@pytest.mark.parametrize(
    "change, steps, said",
    [
        ({}, False, r"LlamaForTokenClassification.*scores steps; set reward.model.step_aggregation=min"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            True,
            "scores responses; leave .*step_aggregation empty",
        ),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, True, "3 labels; a model of steps has one, or two"),
    ],
)
def test_a_classifier_of_another_kind_is_refused(tmp_path, change, steps, said):
    make_classifier(tmp_path, "llama", labels=1)
    edit(tmp_path, **change)
    with pytest.raises(UserError, match=rf"reward.model.path={tmp_path}: .*{said}"):
        read_classifier(str(tmp_path), tokenizer=load_tokenizer(tmp_path), max_length=64, steps=steps)


@pytest.mark.parametrize(
    "tensors, said",
    [
        ({"score.weight": (3, 36)}, r"score.weight has shape \[3, 36\], not \[1, 36\] or \[2, 36\]"),
        ({"score.bias": (2,)}, r"score.bias has shape \[2\]; it has shape \[1\] in a token classifier"),
        ({"score.0.weight": (36, 36)}, r"score.0.weight, which its config.json has no place for"),
    ],
)
def test_weights_of_another_form_are_refused(tmp_path, tensors, said):
    model = make_classifier(tmp_path, "llama", labels=1)
    held = dict(model.state_dict()) | {name: torch.zeros(shape) for name, shape in tensors.items()}
    files_of_torch.save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"reward.model.path={tmp_path}: .*{said}"):
        JaxRewardModel(opened(tmp_path)[0], batch_size=1, max_length=64)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"engine": "vllm"}, "reward.model.engine='vllm' scores whole responses"),
        ({"normalize": True}, "reward.model.normalize=True is for logits"),
        ({"clip": 2.0}, "reward.model.clip=2.0 is for logits"),
        ({"step_delimiter": ""}, "reward.model.step_delimiter='' separates no steps"),
        ({"step_aggregation": "max"}, "reward.model.step_aggregation='max' is not known"),
        ({"step_aggregation": "", "step_token": "<extra_0>"}, "is read only with reward.model.step_aggregation set"),
    ],
)
def test_settings_that_cannot_be_are_one_line(small_run, change, said):
    small_run.reward.model.update({"path": "some/prm", "step_aggregation": "min"} | change)
    with pytest.raises(UserError) as e:
        settings.check(small_run)
    assert said in str(e.value) and "\n" not in str(e.value)


# --- a run


def test_a_run_learns_from_a_model_that_scores_steps(small_run, tmp_path, quick_compilation):
    """The model's tokenizer, of words, is not the policy's, of characters."""
    make_classifier(tmp_path / "prm", "llama", labels=2)
    m, c = small_run.reward.model, small_run
    m.path, m.step_aggregation, m.step_delimiter, m.step_token = str(tmp_path / "prm"), "sum", "9", " [SEP] "
    m.max_length = 64
    c.reward.weights, c.trainer.total_training_steps, c.trainer.test_freq, c.trainer.save_freq = "rm_score=2", 1, -1, -1
    settings.check(c)
    train.train(c)
    run = pathlib.Path(c.trainer.run_dir)
    rows = [json.loads(line) for line in (run / "samples/step_1.jsonl").read_text().splitlines()]
    assert {row["error"] for row in rows} == {None}
    several = 0
    for row in rows:
        ends = [match.end() - 1 for match in re.finditer("[^9]+", row["response"])]  # a token has one character
        amounts = dict(row["earned"])
        assert list(amounts) == ends and row["score"] == pytest.approx(sum(amounts.values()), abs=1e-6)
        assert all(0 < amount < 2 for amount in amounts.values())
        several += len(amounts) > 1
    assert several
