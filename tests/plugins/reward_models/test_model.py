"""Reward models against transformers' own sequence classifiers, random ones of a few shapes."""

import importlib.util
import io
import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import threading
import time
import types

import httpx
import numpy as np
import pytest
import tokenizers
import transformers

from jppo.data import tokenizer
from jppo.errors import UserError
from jppo.learner import sharding, state
from jppo.models import hf
from jppo.plugins.reward_models import classifier
from jppo.plugins.reward_models.classifier import (
    JaxRewardModel,
    choose_engine,
    compiled_lengths,
    convert_weights,
    read_classifier,
    without_padding,
)
from jppo.plugins.reward_models.model import ModelPart, Normalizer, ScoringError, Texts
from jppo.plugins.reward_models.model_process import TransformersRewardModel, VllmRewardModel
from jppo.rewards.parts import Sample
from jppo.types import Prompt
from tests.make import alive

torch = pytest.importorskip("torch")
files_of_torch = pytest.importorskip("safetensors.torch")
model_worker = pytest.importorskip("jppo.plugins.reward_models.torch_worker")

PAD, BOS, EOS = 0, 1, 2
SPECIAL = ["[PAD]", "[CLS]", "[SEP]"]
WORDS = [*SPECIAL, "<user>", "<assistant>", *(f"w{i}" for i in range(60))]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} [SEP] {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
SHAPES = {
    "qwen2": dict(num_key_value_heads=1, hidden_size=64, num_attention_heads=2),
    "llama": dict(num_key_value_heads=2, hidden_size=36, num_attention_heads=4, head_dim=10),
    "gemma2": dict(
        num_key_value_heads=1,
        hidden_size=32,
        num_attention_heads=2,
        head_dim=12,
        sliding_window=6,
        query_pre_attn_scalar=9,
    ),
    "deberta-v2": dict(
        hidden_size=32, num_attention_heads=2, pos_att_type=["p2c", "c2p"], relative_attention=True, type_vocab_size=0
    ),
}


def make_model(folder, family, *, labels=1, template=TEMPLATE, kind="Sequence", **more):
    """A random classifier of that family with a tokenizer of words, as an HF directory; the torch model."""
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[PAD]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    ends = [("[CLS]", BOS), ("[SEP]", EOS)]
    single = "[CLS] $A [SEP]" if family == "deberta-v2" else "[CLS] $A"
    plain.post_processor = tokenizers.processors.TemplateProcessing(single=single, special_tokens=ends)
    plain.add_special_tokens(SPECIAL)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="[PAD]", bos_token="[CLS]", eos_token="[SEP]", chat_template=template
    ).save_pretrained(folder)
    shape = dict(intermediate_size=48, num_hidden_layers=2, max_position_embeddings=512, pad_token_id=PAD)
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=len(WORDS),
        num_labels=labels,
        bos_token_id=BOS,
        eos_token_id=EOS,
        **shape | SHAPES[family] | more,
    )
    how = {"attn_implementation": "eager"} if family == "gemma2" else {}
    cls = getattr(transformers, f"AutoModelFor{kind}Classification")
    model = cls.from_config(config, dtype=torch.float32, **how).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """family -> its directory and torch model, made once."""
    there = {}

    def make(family):
        if family not in there:
            folder = tmp_path_factory.mktemp(family)
            there[family] = str(folder), make_model(folder, family)
        return there[family]

    return make


def load_tokenizer(path):
    """As it was saved: by its model_type transformers would make a byte-level one for qwen2."""
    return transformers.PreTrainedTokenizerFast.from_pretrained(path)


def opened(path, max_length=128):
    tokenizer = load_tokenizer(path)
    return read_classifier(path, tokenizer=tokenizer, max_length=max_length), Texts(tokenizer, max_length=max_length)


def logit(model, ids):
    """transformers' score of one sequence, alone and without padding."""
    with torch.no_grad():
        return float(model(torch.tensor([ids])).logits[0, 0])


def sample(messages, text):
    prompt = Prompt("u", "source", messages, np.zeros(1, np.int32), "", {})
    return Sample(prompt, text, length=1, finish="stop")


def sentence(rng, count):
    return " ".join(f"w{i}" for i in rng.integers(0, 60, count))


def chats(seed, lengths):
    rng = np.random.default_rng(seed)
    return [sample([{"role": "user", "content": sentence(rng, 4)}], sentence(rng, n)) for n in lengths]


class Counting:
    """A scorer whose score is the number of tokens; it remembers its batches, and fails or waits when told to."""

    def __init__(self):
        self.batches, self.closed, self.fails = [], 0, None
        self.go, self.asked = threading.Event(), threading.Event()
        self.go.set()

    def score(self, ids):
        self.asked.set()
        self.go.wait(60)
        self.batches.append([len(one) for one in ids])
        if self.fails is not None:
            raise self.fails
        return [float(len(one)) for one in ids]

    def close(self):
        self.closed += 1
        self.go.set()


class Words:
    """Texts of which every word is a token."""

    def read(self, one):
        if one.text == "bad":
            raise ValueError("no such role")
        ids = one.text.split()
        return ids[-5:], len(ids) > 5


def counted(*lengths):
    return [sample("", " ".join(["w"] * n)) for n in lengths]


# --- the jax engine


@pytest.mark.parametrize("family", ["qwen2", "llama", "gemma2"])
def test_scores_are_those_of_transformers_through_the_whole_text_path(family, made, quick_compilation):
    path, model = made(family)
    what, texts = opened(path)
    part = ModelPart(JaxRewardModel(what, batch_size=3, max_length=128), texts, batch_size=3)
    samples = chats(0, [1, 40, 7, 90, 3])
    futures = [part.submit(one) for one in samples]
    part.flush()
    for one, future in zip(samples, futures, strict=True):
        content = one.prompt.messages[0]["content"]
        text = f"<user> {content} [SEP] <assistant> {one.text} [SEP] "
        ids = [WORDS.index(word) for word in text.split()]
        reward = future.result(60)
        assert reward.error is None
        assert reward.parts["rm_raw"] == reward.score == pytest.approx(logit(model, ids), abs=1e-4)
    part.close()


def test_the_score_stands_where_transformers_puts_it_when_a_text_ends_in_padding(made, quick_compilation):
    path, model = made("qwen2")
    what, _ = opened(path)
    texts = [[5, 6, 7, PAD, PAD], [5, PAD, 6], [PAD, PAD]]
    found = JaxRewardModel(what, batch_size=4, max_length=128).score(texts)
    assert found == pytest.approx([logit(model, ids) for ids in texts], abs=1e-4)
    assert without_padding([5, 6, PAD], None) == [5, 6, PAD]


def test_sharded_over_a_mesh_the_scores_are_the_same(made, quick_compilation):
    path, model = made("qwen2")
    what, _ = opened(path)
    mesh = sharding.mesh_of_shape((1, 2, 2, 2))
    _, cfg = hf.read_config(path)
    places = state.model_weights(cfg, mesh, head="value", param_dtype="float32").shardings
    scorer = JaxRewardModel(
        what, batch_size=3, max_length=128, shardings=places, rows=sharding.whole_rows_sharding(mesh)
    )
    texts = [[5, 6, 7], [8, 9, 10, 11], [12], [13] * 30, [14, 15]]
    assert scorer.score(texts) == pytest.approx([logit(model, ids) for ids in texts], abs=1e-4)


def test_few_shapes_are_compiled(made, quick_compilation, monkeypatch):
    traced, real = [], classifier._compute_scores  # a function is traced once for each program
    monkeypatch.setattr(classifier, "_compute_scores", lambda *given: traced.append(given[-2].shape) or real(*given))
    path, _ = made("qwen2")
    what, _ = opened(path)
    assert compiled_lengths(300) == [64, 128, 256, 300]
    assert compiled_lengths(48) == [48] and compiled_lengths(64) == [64]
    scorer = JaxRewardModel(what, batch_size=2, max_length=100)
    for length in (1, 5, 63, 64, 65, 99, 100):
        scorer.score([[7] * length] * (1 + length % 3))
    assert traced == [(2, 64), (2, 100)]
    with pytest.raises(ValueError, match="101 tokens"):
        scorer.score([[7] * 101])


@pytest.mark.parametrize(
    "change, complaint",
    [
        (lambda d: (d / "model.safetensors").unlink(), "neither model.safetensors"),
        (lambda d: edit(d, id2label={"0": "a", "1": "b"}), "2 labels"),
        (lambda d: edit(d, vocab_size=40), "ids up to 64.*vocab_size=40"),
        (lambda d: (d / "config.json").unlink(), "config.json is missing"),
        (lambda d: (d / "config.json").write_text("{"), "not valid JSON"),
    ],
)
def test_what_is_no_reward_model_is_refused_by_the_setting_that_names_it(made, tmp_path, change, complaint):
    model = made("qwen2")[1]
    folder = tmp_path / "rm"
    model.save_pretrained(folder)
    tokenizer = load_tokenizer(made("qwen2")[0])
    change(folder)
    with pytest.raises(UserError, match=rf"(?s)reward.model.path={folder}: .*{complaint}"):
        JaxRewardModel(read_classifier(str(folder), tokenizer=tokenizer, max_length=64), batch_size=1, max_length=64)


def edit(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize("labels, complaint", [(None, "no score.weight"), (2, r"shape \[2, 64\], not \[1, 64\]")])
def test_weights_without_one_label_are_refused(tmp_path, labels, complaint):
    model = make_model(tmp_path, "qwen2", labels=labels or 1)
    if labels is None:
        transformers.Qwen2ForCausalLM(model.config).save_pretrained(tmp_path)
    edit(tmp_path, id2label={"0": "LABEL_0"})
    with pytest.raises(UserError, match=f"reward.model.path={tmp_path}: .*{complaint}"):
        JaxRewardModel(opened(str(tmp_path))[0], batch_size=1, max_length=64)


def test_other_faults_name_their_setting(made):
    path = made("qwen2")[0]
    tokenizer = load_tokenizer(path)
    with pytest.raises(UserError, match=r"reward.model.path=no/such/place/at all: .*not a directory"):
        read_classifier("no/such/place/at all", tokenizer=tokenizer, max_length=64)
    with pytest.raises(UserError, match=r"reward.model.max_length=513 is more than the 512 tokens .*512 or less"):
        read_classifier(path, tokenizer=tokenizer, max_length=513)


def test_auto_takes_jax_for_the_families_that_it_knows():
    assert choose_engine("auto", "gemma2") == "jax" and choose_engine("auto", "deberta-v2") == "transformers"
    assert choose_engine("transformers", "qwen2") == "transformers" and choose_engine("vllm", "qwen2") == "vllm"
    with pytest.raises(UserError, match=r"but the model is a deberta-v2; set it to 'transformers'"):
        choose_engine("jax", "deberta-v2")


# --- the text


def test_the_text_is_the_prompt_and_the_response(made, tmp_path):
    _, texts = opened(made("qwen2")[0])
    user = [{"role": "user", "content": "w1 w2"}]
    assert texts.render(sample(user, "w3")) == ("<user> w1 w2 [SEP] <assistant> w3 [SEP] ", True)
    assert texts.render(sample("w1 w2 ", "w3")) == ("w1 w2 w3", False)
    assert texts.read(sample("w1 w2 ", "w3"))[0] == [BOS, *(WORDS.index(w) for w in ("w1", "w2", "w3"))]
    make_model(tmp_path, "qwen2", template=None)
    _, bare = opened(str(tmp_path))
    assert bare.render(sample(user, "w3")) == ("w1 w2\nw3", False)


@pytest.mark.parametrize("family, special", [("qwen2", ([BOS], [])), ("deberta-v2", ([BOS], [EOS]))])
def test_of_a_long_text_the_end_is_kept_between_the_special_tokens(family, special, made):
    _, texts = opened(made(family)[0], max_length=6)
    before, after = special
    words = [f"w{i}" for i in range(9)]
    ids, cut = texts.read(sample("w20 w21 ", " ".join(words)))
    kept = 6 - len(before) - len(after)
    assert ids == [*before, *(WORDS.index(w) for w in words[-kept:]), *after] and cut
    ids, cut = texts.read(sample([{"role": "user", "content": "w9"}], " ".join(words)))
    assert ids == [*(WORDS.index(w) for w in words[-5:]), EOS] and cut
    assert texts.read(sample("w1 ", "w2"))[1] is False  # and the tokenizer cuts nothing from then on
    assert len(texts.read(sample("", "w1 w2 w3"))[0]) == 3 + len(before) + len(after)


# --- the part


def test_batches_are_scored_as_they_fill_in_order_and_the_rest_at_the_flush():
    scorer = Counting()
    part = ModelPart(scorer, Words(), batch_size=2)
    futures = [part.submit(one) for one in counted(1, 2, 3, 4, 2)]
    assert futures[3].result(60).score == 4.0  # before any flush
    assert not futures[4].done()
    part.flush()
    assert [f.result(60).score for f in futures] == [1.0, 2.0, 3.0, 4.0, 2.0]
    assert scorer.batches == [[1, 2], [3, 4], [2]]
    part.flush()  # nothing waits: nothing is asked
    futures = [part.submit(one) for one in counted(9, 1)]
    assert [f.result(60).parts for f in futures] == [{"rm_raw": 5.0}, {"rm_raw": 1.0}]
    assert part.metrics() == {"reward/rm_cut": 1.0} and part.metrics() == {"reward/rm_cut": 0.0}
    part.close()
    part.close()
    assert len(scorer.batches) == 4 and scorer.closed == 2
    assert "closed" in part.submit(counted(1)[0]).result(60).error
    part.flush()


def test_samples_come_from_many_threads():
    part = ModelPart(Counting(), Words(), batch_size=7)
    lengths = [1 + i % 5 for i in range(200)]
    found = {}

    def submit(numbers):
        for i in numbers:
            found[i] = part.submit(counted(lengths[i])[0])

    threads = [threading.Thread(target=submit, args=(range(k, 200, 8),)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    part.flush()
    assert [found[i].result(60).score for i in range(200)] == lengths
    part.close()


def test_what_goes_wrong_is_an_error_of_the_samples_that_it_concerns():
    scorer = Counting()
    part = ModelPart(scorer, Words(), batch_size=3, normalizer=Normalizer())
    futures = [part.submit(one) for one in [*counted(1), sample("", "bad"), *counted(3)]]
    part.flush()
    assert futures[1].result(60).error == "ValueError: no such role" and np.isnan(futures[1].result().score)
    assert [futures[i].result(60).score for i in (0, 2)] == [-1.0, 1.0]  # of scores 1 and 3
    scorer.fails = ScoringError("it burns")
    futures = [part.submit(one) for one in counted(1, 2)]
    part.flush()
    assert [f.result(60).error for f in futures] == ["it burns"] * 2
    scorer.score = lambda ids: [1.0] * 3
    future = part.submit(counted(1)[0])
    part.flush()
    assert "3 scores for 1 texts" in future.result(60).error
    scorer.score = lambda ids: [float("inf"), 1.0]
    futures = [part.submit(one) for one in counted(1, 2)]
    part.flush()
    assert "finite" in futures[0].result(60).error and futures[1].result(60).error is None
    assert part.state()["count"] == 3.0
    part.close()


def test_closing_fails_what_has_no_score():
    scorer = Counting()
    scorer.go.clear()
    part = ModelPart(scorer, Words(), batch_size=1)
    futures = [part.submit(one) for one in counted(1, 2, 3)]
    assert scorer.asked.wait(60)
    part.close()
    assert futures[0].result(0).score == 1.0
    assert all("closed" in f.result(0).error for f in futures[1:])


# --- normalisation


def test_the_normalizer_is_numpys_mean_and_deviation_of_all_scores_so_far():
    rng = np.random.default_rng(0)
    batches = [rng.normal(1e3, 2.0, n) for n in (1, 5, 0, 40, 3)]
    one = Normalizer()
    for i, batch in enumerate(batches):
        one.update(batch)
        far = np.concatenate(batches[: i + 1])
        assert one.mean == pytest.approx(far.mean(), rel=1e-12)
        assert one.squares / one.count == pytest.approx(far.var(), rel=1e-9, abs=1e-18)
        if far.std() > 0:
            np.testing.assert_allclose(one.apply(batch), (batch - far.mean()) / far.std(), atol=1e-9)
    alike = Normalizer()
    alike.update(np.full(3, 0.1))
    np.testing.assert_allclose(alike.apply(np.full(3, 0.1)), 0.0, atol=1e-6)


def test_scores_are_normalised_at_the_flush_and_clipped_after():
    part = ModelPart(Counting(), Words(), batch_size=2, normalizer=Normalizer(), clip=1.2)
    seen = []
    for lengths in ([1, 2, 3, 5], [5, 5, 1], [4]):
        futures = [part.submit(one) for one in counted(*lengths)]
        assert not any(f.done() for f in futures)
        part.flush()
        seen += lengths
        expected = np.clip((np.array(lengths) - np.mean(seen)) / np.std(seen), -1.2, 1.2)
        assert [f.result(60).score for f in futures] == pytest.approx(expected.tolist(), abs=1e-12)
        assert [f.result(60).parts["rm_raw"] for f in futures] == lengths
    part.close()


def test_a_run_that_goes_on_has_the_scores_of_one_that_was_not_broken_off():
    def run(part, lengths):
        futures = [part.submit(one) for one in counted(*lengths)]
        part.flush()
        return [f.result(60).score for f in futures]

    whole, first, second = (ModelPart(Counting(), Words(), batch_size=2, normalizer=Normalizer()) for _ in range(3))
    run(whole, [1, 2, 5])
    run(first, [5, 1, 2])  # in another order
    second.load(json.loads(json.dumps(first.state())))
    assert run(second, [3, 4]) == run(whole, [3, 4])
    assert second.state() == whole.state()
    plain = ModelPart(Counting(), Words(), batch_size=1, clip=2.0)
    plain.load(plain.state())
    assert run(plain, [1, 4]) == run(plain.testing(), [1, 4]) == [1.0, 2.0]
    for part in (whole, first, second, plain):
        part.close()


def test_two_tests_of_a_run_are_on_one_scale():
    """A policy whose answers are worth 4 in every test has 4 in each, whatever training saw before."""
    part = ModelPart(Counting(), Words(), batch_size=2, normalizer=Normalizer(), clip=1.5)

    def scores(part, *lengths):
        futures = [part.submit(one) for one in counted(*lengths)]
        part.flush()
        return [f.result(60).score for f in futures]

    before = scores(part.testing(), 4, 4)
    scores(part, 1, 2, 9)
    state = part.state()
    assert before == scores(part.testing(), 4, 4) == [4.0, 4.0]
    assert part.state() == state and part.state()["count"] == 3
    part.close()


# --- the process of transformers


TORCH = "float32 = 'f32'\ndef set_num_threads(n): print('threads', n)\n"
TRANSFORMERS = """
class AutoConfig:
    num_labels = 2
    def from_pretrained(directory, local_files_only): return AutoConfig()
    def get_text_config(self): return self
class AutoModelForTokenClassification:
    def from_pretrained(directory, dtype, **how): raise OSError(f"no weights in {directory} for {dtype}")
"""


def test_a_worker_reads_its_arguments(tmp_path):
    """With stand-ins for torch and transformers, whose imports take seconds."""
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "transformers.py").write_text(TRANSFORMERS)
    command = [sys.executable, "-m", "jppo.plugins.reward_models.torch_worker", "folder", str(os.getpid())]
    found = os.pathsep.join(map(str, (tmp_path, *filter(None, sys.path))))
    worker = subprocess.run(
        [*command, "cpu", "float32", "3", "token"], env={"PYTHONPATH": found}, capture_output=True, timeout=60
    )
    assert json.loads(worker.stdout[8:]) == {"refused": "no weights in folder for f32"}
    assert worker.stderr == b"threads 3\n"


def test_a_model_of_another_family_is_scored_in_its_process_and_survives_one_crash(made, tmp_path):
    path, model = made("deberta-v2")
    what, texts = opened(path)
    scorer = TransformersRewardModel(what, log=tmp_path / "run/rm.log", timeout_s=120)
    part = ModelPart(scorer, texts, batch_size=2)
    # one whose parent is not there: it ends, though its input does not
    command = [
        sys.executable,
        "-m",
        "jppo.plugins.reward_models.torch_worker",
        path,
        "1",
        "cpu",
        "float32",
        "1",
        "sequence",
    ]
    orphan = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    scorer.wait_ready()
    samples = [sample("w1 w2 ", "w3"), sample("", "w5 " * 30), *chats(1, [7])]
    futures = [part.submit(one) for one in samples]
    part.flush()
    expected = [logit(model, texts.read(one)[0]) for one in samples]
    assert [f.result(60).score for f in futures] == pytest.approx(expected, abs=1e-4)
    with pytest.raises(ScoringError, match=r"IndexError|RuntimeError"):
        scorer.score([[5, 6], [len(WORDS) + 1000]])  # of a batch: the process lives on
    # in flight: it has the question, and is killed before it can answer
    process = scorer._process
    os.kill(process.pid, signal.SIGSTOP)
    future = part.submit(samples[0])
    part.flush()
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGKILL)
    reward = future.result(60)
    assert np.isnan(reward.score) and "ended with code -9" in reward.error and "rm.log says:" in reward.error
    future = part.submit(samples[0])
    part.flush()
    assert future.result(60).score == pytest.approx(expected[0], abs=1e-4)
    again = scorer._process
    again.kill()
    again.wait()
    future = part.submit(samples[0])
    part.flush()
    assert "crashed 2 times" in future.result(60).error
    part.close()
    assert not alive(process.pid) and not alive(again.pid)
    with orphan:
        assert orphan.wait(60) == 1


def test_a_process_that_does_not_start_says_what_it_printed_last(made, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no torch here >&2\nexit 3\n")
    python.chmod(0o755)
    what, _ = opened(made("deberta-v2")[0])
    scorer = TransformersRewardModel(what, log=tmp_path / "log", python=str(python))
    with pytest.raises(UserError, match=r"(?s)reward.model.path=.*ended with code 3.*no torch here"):
        scorer.wait_ready()
    scorer.close()
    scorer.close()
    with pytest.raises(UserError, match="'/no/python' is not a program"):
        TransformersRewardModel(what, log=tmp_path / "log", python="/no/python")


def test_the_worker_loads_whole_models_of_one_label_only(made, tmp_path):
    model = made("deberta-v2")[1]
    model.deberta.save_pretrained(tmp_path / "trunk")
    edit(tmp_path / "trunk", id2label={"0": "LABEL_0"})
    with pytest.raises(model_worker.Refused, match=r"lack .*classifier"):
        model_worker.load_classifier(str(tmp_path / "trunk"), device="cpu", dtype="float32")
    make_model(tmp_path / "two", "deberta-v2", labels=2)
    with pytest.raises(model_worker.Refused, match="num_labels=2"):
        model_worker.load_classifier(str(tmp_path / "two"), device="cpu", dtype="float32")
    make_model(tmp_path / "cut", "deberta-v2")
    (tmp_path / "cut/model.safetensors").unlink()
    with pytest.raises(model_worker.Refused, match=r"model\.safetensors"):
        model_worker.load_classifier(str(tmp_path / "cut"), device="cpu", dtype="float32")


def test_what_a_library_prints_is_no_message_of_the_worker(monkeypatch, capfdbinary):
    def load(*_, **__):
        os.write(1, b"from a library")
        raise model_worker.Refused("no model")

    monkeypatch.setattr(model_worker, "load_classifier", load)
    monkeypatch.setattr(model_worker, "_exit_with_parent", lambda parent: None)
    fdopen, files = os.fdopen, []
    monkeypatch.setattr(model_worker.os, "fdopen", lambda *args: files.append(fdopen(*args)) or files[0])
    output = os.dup(1)
    try:
        model_worker.main("model", os.getppid(), "cpu", "float32", torch.get_num_threads(), "sequence")
    finally:
        os.dup2(output, 1)
        os.close(output)
        files[0].close()
    out, err = capfdbinary.readouterr()
    assert json.loads(out[8:]) == {"refused": "no model"} and int.from_bytes(out[:8], "big") == len(out) - 8
    assert err == b"from a library"


def to_v_head(folder, model, head, root):
    """The classifier's weights as those of a causal model with a value head."""
    (folder / "model.safetensors").unlink()
    tensors = {name.replace("model.", f"{root}.", 1): tensor for name, tensor in model.state_dict().items()}
    tensors[head] = tensors.pop("score.weight")
    edit(folder, architectures=["LlamaForCausalLM"], id2label=None, label2id=None)
    return tensors | {f"{head.removesuffix('weight')}bias": torch.tensor([0.5]), "lm_head.weight": torch.ones(65, 36)}


@pytest.mark.parametrize(
    "head, root, file",
    [
        pytest.param("v_head.weight", "transformer", "pytorch_model.bin", marks=pytest.mark.slow),  # Starling
        ("v_head.summary.weight", "model", "model.safetensors"),  # TRL
    ],
)
def test_a_causal_model_with_a_value_head_scores_as_the_classifier(tmp_path, head, root, file, quick_compilation):
    folder = tmp_path / "starling"
    model = make_model(folder, "llama")
    tensors = to_v_head(folder, model, head, root)
    if file.endswith(".bin"):
        torch.save(tensors, folder / file)
    else:
        files_of_torch.save_file(tensors, folder / file, metadata={"format": "pt"})
    copy = convert_weights(folder, python=sys.executable, cache=str(tmp_path / "cache"))
    what = read_classifier(str(folder), tokenizer=load_tokenizer(str(folder)), max_length=64, directory=copy)
    found = JaxRewardModel(what, batch_size=2, max_length=64).score([[1, 7, 8, 9], [1, 5]])
    np.testing.assert_allclose(found, [logit(model, [1, 7, 8, 9]), logit(model, [1, 5])], rtol=1e-4, atol=1e-5)
    assert convert_weights(folder, python="/no/python", cache=str(tmp_path / "cache")) == copy  # made once


def test_the_converter_writes_a_classifier_to_the_folder_that_it_is_given(tmp_path, monkeypatch):
    source, target = tmp_path / "trl", tmp_path / "classifier"
    model = make_model(source, "llama")
    tensors = to_v_head(source, model, "v_head.summary.weight", "model")
    files_of_torch.save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    target.mkdir()
    monkeypatch.setattr(sys, "argv", ["convert_worker", str(source), str(target), "sequence"])
    runpy.run_module("jppo.plugins.reward_models.convert_worker", run_name="__main__")
    found, expected = files_of_torch.load_file(target / "model.safetensors"), model.state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    about = json.loads((target / "config.json").read_text())
    assert about["architectures"] == ["LlamaForSequenceClassification"] and (target / "tokenizer.json").is_file()
    assert len(about["id2label"]) == 1


def test_pytorch_weights_are_converted_once_and_run_no_code(tmp_path):
    folder = tmp_path / "deberta"
    model = make_model(folder, "deberta-v2")
    assert convert_weights(folder, python=sys.executable, cache=str(tmp_path / "cache")) == folder
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    copy = convert_weights(folder, python=sys.executable, cache=str(tmp_path / "cache"))
    loaded = model_worker.load_classifier(str(copy), device="cpu", dtype="float32")
    np.testing.assert_allclose(model_worker.score(loaded, [[1, 7, 8, 2]]), [logit(model, [1, 7, 8, 2])], rtol=1e-5)
    torch.save({"score.weight": Hostile(tmp_path / "hit")}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"reward.model.path=.*cannot be converted to safetensors: .*"):
        convert_weights(folder, python=sys.executable, cache=str(tmp_path / "cache"))
    assert not (tmp_path / "hit").exists()


class Hostile:
    """A pickle that touches a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


def test_a_tokenizer_of_sentencepiece_alone_is_read(tmp_path):
    """As DeBERTa-v3 has it."""
    sentencepiece = pytest.importorskip("sentencepiece")
    texts, written = [f"alpha beta gamma {i} two three" for i in range(200)], io.BytesIO()
    pieces = {f"{name}_piece": f"[{name.upper()}]" for name in ("pad", "unk")}
    pieces |= {
        "minloglevel": 2,
        "hard_vocab_limit": False,
        "bos_piece": "[CLS]",
        "eos_piece": "[SEP]",
        "pad_id": 0,
        "bos_id": 1,
        "eos_id": 2,
        "unk_id": 3,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=written, vocab_size=60, **pieces
    )
    (tmp_path / "spm.model").write_bytes(written.getvalue())
    (tmp_path / "config.json").write_text('{"model_type": "deberta-v2", "vocab_size": 200}')
    found = tokenizer.load_tokenizer(str(tmp_path))("beta gamma two")["input_ids"]
    plain = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    assert found == [1, *plain.encode("beta gamma two"), 2]


def test_a_model_with_code_of_its_own_is_refused_with_the_way_around_it(made, tmp_path):
    folder = tmp_path / "rm"
    made("qwen2")[1].save_pretrained(folder)
    tokenizer = load_tokenizer(made("qwen2")[0])
    edit(
        folder, auto_map={"AutoModel": "modeling.X"}, model_type="internlm2", architectures=["InternLM2ForRewardModel"]
    )
    with pytest.raises(model_worker.Refused, match=r"(?s)own code \(auto_map\) is not run: .*reward.function"):
        model_worker.load_classifier(str(folder), device="cpu", dtype="float32")
    edit(folder, model_type="llama", id2label={str(i): f"LABEL_{i}" for i in range(19)})  # as ArmoRM
    with pytest.raises(UserError, match=r"has 19 labels; a reward model has one; reward.function"):
        read_classifier(str(folder), tokenizer=tokenizer, max_length=64)


@pytest.mark.parametrize("pad", [PAD, None])
def test_the_worker_scores_a_batch_as_one_by_one(tmp_path, pad):
    model = make_model(tmp_path, "gemma2", pad_token_id=pad, attn_logit_softcapping=0.5)
    loaded = model_worker.load_classifier(str(tmp_path), device="cpu", dtype="float32")
    texts = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16], [17]]
    assert model_worker.score(loaded, texts) == pytest.approx([logit(model, ids) for ids in texts], abs=1e-5)


# --- vLLM


@pytest.mark.parametrize(
    "code, answer, said",
    [
        (200, {"data": [{"index": 1, "probs": [0.5]}, {"index": 0, "probs": [-1.0]}]}, None),
        (400, {"error": "too long"}, "answered 400: .*too long"),
        (200, {"data": [{"index": 1, "probs": [0.5]}]}, "did not answer with one score for each text"),
        (200, {"data": [{"index": i, "probs": [0.5, 0.5]} for i in range(2)]}, "must be a list of one, not of 2"),
        *(
            (200, {"data": [{"index": i, "probs": [x]} for i in range(2)]}, "no finite number")
            for x in ("7", True, None)
        ),
        (200, {"data": [{"index": str(i), "probs": [0.5]} for i in range(2)]}, "no integer"),
        (200, {"data": [{"index": 0}, {"index": 1}]}, "'probs' is missing"),
        *((200, x, "answered unexpectedly") for x in ([], None, {"data": 1}, {}, {"data": [1]})),
        (200, b'{"data": "\xff"}', "answered unexpectedly"),
        (200, b"[" * 100_000, "answered unexpectedly"),
    ],
)
def test_scores_of_vllm_are_read_in_the_order_of_the_texts(monkeypatch, tmp_path, code, answer, said):
    asked = []

    def handle(request):
        asked.append(json.loads(request.content))
        raw = isinstance(answer, bytes)
        return httpx.Response(code, content=answer) if raw else httpx.Response(code, json=answer)

    monkeypatch.setattr(VllmRewardModel, "_start", lambda self: None)
    monkeypatch.setattr(VllmRewardModel, "_ensure", lambda self: None)
    what = types.SimpleNamespace(path="model", directory="model", pad_token_id=PAD)
    scorer = VllmRewardModel(what, build="cpu", batch_size=2, max_length=128, log=tmp_path / "rm.log")
    scorer._client = httpx.Client(transport=httpx.MockTransport(handle), base_url="http://reward-model")
    if said is None:
        assert scorer.score([[5, 6, PAD], [7]]) == [-1.0, 0.5]
    else:
        with pytest.raises(ScoringError, match=said):
            scorer.score([[5, 6, PAD], [7]])
    scorer.close()
    assert [one["input"] for one in asked] == [[[5, 6], [7]]] and asked[0]["use_activation"] is False


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make setup")
def test_vllm_serves_the_same_scores_and_ends_when_it_is_told(made, tmp_path):
    path, model = made("qwen2")
    what, _ = opened(path)
    scorer = VllmRewardModel(what, build="cpu", batch_size=2, max_length=128, log=tmp_path / "run/rm.log")
    scorer.wait_ready()
    texts = [[5, 6, 7], [8] * 128, [9, 10, PAD], list(range(5, 40))]
    assert scorer.score(texts) == pytest.approx([logit(model, ids) for ids in texts], abs=1e-4)
    with pytest.raises(ScoringError, match="answered 400"):
        scorer.score([[5] * 129])
    launcher = scorer._process
    children = [int(p) for p in pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()]
    os.kill(children[0], signal.SIGKILL)
    with pytest.raises(ScoringError, match=r"(?s)the reward model's vLLM .*rm.log says:"):
        scorer.score(texts)
    scorer.close()
    scorer.close()
    assert not any(alive(pid) for pid in [launcher.pid, *children])
    assert not pathlib.Path(scorer._folder).exists()
    with pytest.raises(ScoringError, match="closed"):
        scorer.score(texts)
