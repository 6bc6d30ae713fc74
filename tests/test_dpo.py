"""DPO: a small policy learns a preference; its losses are those of transformers' log-probs; runs resume to the bit."""

import dataclasses
import json
import pathlib
import re
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from examples import arithmetic
from jppo import dpo, settings
from jppo.data.preferences import Pair, PairSet
from jppo.errors import UserError
from jppo.export import card
from jppo.learner import batch, sharding
from jppo.learner.make import load_trained, make_trainable
from jppo.plugins.report import page
from jppo.run import pairs, supervised
from jppo.run.trained_model import TrainedPolicy
from jppo.runlog.logger import read_metrics
from jppo.runlog.watchdog import Stopped
from tests.make import typed
from tests.test_reward_model import SHAPE, rows

STEPS = 30


@pytest.fixture
def config(tmp_path):
    """A training in seconds, with the quickstart's tokenizer."""
    return make_config(tmp_path)


def make_config(folder, run="run", **changes):
    arithmetic.write_model(folder / "model")
    (folder / "model/config.json").write_text(json.dumps(arithmetic.MODEL | SHAPE))
    for name, count in (("train", 256), ("test", 50)):
        text = "".join(json.dumps(row) + "\n" for row in rows(count, seed=count))
        (folder / f"{name}.jsonl").write_text(text)
    c = settings.dpo_default()
    c.model.path, c.model.init = str(folder / "model"), "random"
    c.data.train_files, c.data.val_files = str(folder / "train.jsonl"), str(folder / "test.jsonl")
    c.data.train_batch_size, c.data.row_lengths = 32, 1
    c.data.max_prompt_length, c.data.max_response_length = 6, 8
    c.trainer.run_dir, c.trainer.logger = str(folder / run), "jsonl"
    c.trainer.total_training_steps, c.trainer.test_freq, c.optim.lr = STEPS, STEPS, 3e-3
    c.update_from_flattened_dict({name.replace("__", "."): value for name, value in changes.items()})
    settings.check(c)
    return c


def train(c):
    dpo.train(typed(c))
    return read_metrics(pathlib.Path(c.trainer.run_dir))


def logprobs(path, some, half):
    """transformers' log-probs of the responses with their end tokens, and the numbers of their tokens."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    found, counts = [], []
    for row in some:
        asked = tokenizer(row["prompt"])["input_ids"]
        answer = [*tokenizer(row[half], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            logp = torch.log_softmax(model(torch.tensor([asked + answer])).logits[0, :-1].double(), -1)
        of_answer = logp[len(asked) - 1 :][range(len(answer)), answer]
        found.append(float(of_answer.sum()))
        counts.append(len(answer))
    return np.array(found), np.array(counts)


@pytest.fixture(scope="module")
def initial(tmp_path_factory):
    """The random model that every run here begins with, as a directory."""
    folder = tmp_path_factory.mktemp("initial")
    c = make_config(folder, trainer__total_training_steps=1, optim__lr=0.0)
    dpo.train(typed(c))
    return folder / "run/hf"


LOSSES = {
    "sigmoid": ({"dpo__beta": 0.3}, lambda c, r, n, m: np.logaddexp(0, -0.3 * (c - r))),
    "ipo": ({"dpo__loss_type": "ipo", "dpo__beta": 0.2}, lambda c, r, n, m: (c / n - r / m - 2.5) ** 2),
    "lora": ({"model__lora_rank": 4, "dpo__reference": "mesh"}, lambda c, r, n, m: np.logaddexp(0, -0.1 * (c - r))),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_it_learns_and_its_loss_is_that_of_the_log_probs_of_transformers(kind, tmp_path, initial):
    changes, loss_of = LOSSES[kind]
    found = train(make_config(tmp_path, **changes))
    assert found[0]["dpo/accuracy"] == 0.0 and found[0]["dpo/margin"] == pytest.approx(0, abs=1e-5)  # equal policies
    assert found[-1]["dpo/val_accuracy"] > 0.9 and found[-1]["dpo/val_loss"] < found[0]["dpo/loss"]
    held_out, ratios = rows(50, seed=50), []
    for half in ("chosen", "rejected"):
        (now, tokens), (then, _) = (logprobs(path, held_out, half) for path in (tmp_path / "run/hf", initial))
        ratios.append((now - then, tokens))
    (chosen, n), (rejected, m) = ratios
    assert found[-1]["dpo/val_accuracy"] == pytest.approx(np.mean(chosen > rejected))
    assert found[-1]["dpo/val_loss"] == pytest.approx(float(np.mean(loss_of(chosen, rejected, n, m))), rel=1e-4)


def test_a_cached_reference_is_the_one_on_the_mesh_and_a_run_that_was_broken_off_resumes_to_the_bit(
    tmp_path, monkeypatch, quick_compilation
):
    few = {"trainer__total_training_steps": 4, "trainer__test_freq": 2, "trainer__save_freq": 1}
    cached, mesh = (train(make_config(tmp_path, run, dpo__reference=run, **few)) for run in ("cached", "mesh"))
    plain = [[{k: v for k, v in line.items() if k.startswith("dpo/")} for line in run] for run in (cached, mesh)]
    for one, other in zip(*plain, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
    real, calls = supervised.take_step, []

    def broken(*args):
        calls.append(1)
        if len(calls) == 3:
            raise Stopped(143, "asked")
        return real(*args)

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(supervised, "take_step", broken)
        train(make_config(tmp_path, "broken", **few))
    again = train(make_config(tmp_path, "broken", **few))
    assert [{k: v for k, v in line.items() if k.startswith("dpo/")} for line in again] == plain[0]
    weights = [(tmp_path / run / "hf/model.safetensors").read_bytes() for run in ("broken", "cached")]
    assert weights[0] == weights[1]
    other = make_config(tmp_path, "broken", **few | {"trainer__total_training_steps": 5})
    other.model.path, other.model.init = str(tmp_path / "cached/hf"), "pretrained"
    with pytest.raises(UserError, match=r"model\.path: the checksum of its frozen weights has changed"):
        train(other)


def test_each_half_has_as_many_tokens_as_follow_its_own_prompt(config, monkeypatch):
    """The prompts of whole chats may differ."""
    found = []

    def train_on_pairs(c, prepare, columns, given, begin):
        begin(None, None, {})
        two = [Pair(np.arange(9), np.arange(7), 0.0, (2, 3)), Pair(np.arange(5), np.arange(6), 0.0, (4, 1))]
        found.extend(given(None, PairSet(two, 0, 0), [1, 0]))

    monkeypatch.setattr(pairs, "train_on_pairs", train_on_pairs)
    monkeypatch.setattr(pairs, "pack_pairs", lambda task, some: some)
    monkeypatch.setattr(pairs, "score_pairs", lambda task, model, params, rows, count: [len(p.chosen) for p in rows])
    config.dpo.reference = "mesh"
    dpo.train(typed(config))
    assert found[0].tolist() == [5, 9] and found[1].tolist() == [1, 7, 5, 4]


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"dpo__beta": 0.0}, r"dpo.beta=0.0"),
        ({"dpo__loss_type": "hinge"}, r"dpo.loss_type='hinge' .*sigmoid"),
        ({"data__max_response_length": 1, "data__max_prompt_length": 1}, "no pair is left: 256 are longer than 2"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, changes, said):
    with pytest.raises(UserError, match=said):
        dpo.train(make_config(tmp_path, **changes))


@pytest.mark.parametrize("reference", ["cached", "mesh"])
def test_a_loss_is_given_the_initial_log_probs_and_the_lengths_of_the_responses(config, monkeypatch, reference):
    """Of the pairs that it asks for, first of all chosen responses, then of all rejected ones."""
    trained = PairSet([Pair(np.zeros(n + 9), np.zeros(n + 3), 0.0, (n, n - 2)) for n in range(2, 42)], 0, 0)
    held_out = PairSet([Pair(np.zeros(8), np.zeros(5), 0.0, (3, 4))], 0, 0)
    task, given = SimpleNamespace(pairs=trained, held_out=held_out), []

    def scores(task, model, params, some, count):  # of a policy that gives each token the log-prob `params`
        assert len(some) == count <= 32  # a batch
        return [params * len(half) for half in (*(p.chosen for p in some), *(p.rejected for p in some))]

    monkeypatch.setattr(pairs, "train_on_pairs", lambda *arguments: given.extend(arguments[3:]))
    monkeypatch.setattr(pairs, "pack_pairs", lambda task, some: some)
    monkeypatch.setattr(pairs, "score_pairs", scores)
    config.dpo.reference = reference
    dpo.train(typed(config))
    given[1](task, None, -1.0)
    logp, tokens = given[0](task, trained, [35, 0])
    np.testing.assert_array_equal(logp, [-46, -11, -40, -5])
    np.testing.assert_array_equal(tokens, [9, 9, 5, 5])
    logp, tokens = given[0](task, held_out, [0])
    np.testing.assert_array_equal(logp, [-8, -5])
    np.testing.assert_array_equal(tokens, [5, 1])


def test_card_and_report_know_a_run_of_dpo(config):
    config.dpo.beta = 0.5
    policy = TrainedPolicy("model", 30, "float32", settings.by_name(config), versions={}, write=print)
    text = card(policy, [], name="x")
    assert "trained by DPO with jppo after step 30" in text and "| `dpo.beta` | 0.5 |" in text
    found = {row["name"]: row for row in page.setting_rows([settings.as_dict(config)])}
    assert found["dpo.beta"] == {"name": "dpo.beta", "default": "0.1", "values": ["0.5"], "differs": True}
    assert not found["dpo.loss_type"]["differs"] and found["dpo.loss_type"]["default"] == '"sigmoid"'


def test_a_dry_run_reads_no_weight_and_counts_the_programs(config):
    config.dpo.reference = "mesh"
    text = dpo.dry_run(typed(config))
    assert "pairs            256 (" in text and "to compile       7 programs for 2 shape(s)" in text
    assert re.search(r"dpo gradient .*\n(.*\n)*  initial policy", text)


def of_numpy(source, folder, seed):
    """A copy of a model whose weights come from numpy alone, so that another library's numbers on it can be kept."""
    shutil.copytree(source, folder)
    rng, file = np.random.default_rng(seed), folder / "model.safetensors"
    tensors = {name: tensor.shape for name, tensor in sorted(load_file(file).items())}
    save_file({name: rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in tensors.items()}, file)
    return folder


# TRL 1.16: DPOTrainer.compute_loss in float32 on these pairs, the gradient's norm, and its logged rewards
BY_TRL = {
    "sigmoid 0.1": {
        "loss": 0.7370297,
        "grad_norm": 0.2026608,
        "chosen": -0.11189,
        "rejected": -0.02961425,
        "accuracy": 0.3125,
    },
    "sigmoid 0.5": {
        "loss": 0.964609,
        "grad_norm": 1.190534,
        "chosen": -0.5594499,
        "rejected": -0.1480712,
        "accuracy": 0.3125,
    },
    "ipo 0.2": {
        "loss": 7.397714,
        "grad_norm": 4.323427,
        "chosen": -0.22378,
        "rejected": -0.05922849,
        "accuracy": 0.3125,
    },
}


@pytest.mark.parametrize("name", BY_TRL)
def test_loss_gradient_and_rewards_are_those_of_trl(name, tmp_path, initial):
    loss_type, beta = name.split()
    reference, policy = (of_numpy(initial, tmp_path / str(seed), seed) for seed in (1, 2))
    c = typed(make_config(tmp_path, model__init="pretrained", dpo__loss_type=loss_type, dpo__beta=float(beta)))
    task = dpo.prepare(dataclasses.replace(c, model=dataclasses.replace(c.model, path=str(policy))))
    some = task.pairs.pairs[:16]
    rows, scores = pairs.pack_pairs(task, some), []
    for path in (policy, reference):
        trained = load_trained(c, task.mesh, task.cfg, str(path), head="lm", key=jax.random.key(0), adapters=None)
        model, opt = make_trainable(c.optim, "dpo", task.loss, trained, 1, scaled=False)
        scores.append((model, opt, trained.learned, pairs.score_pairs(task, model, trained.learned, rows, len(some))))
    (model, opt, params, now), (*_, then) = scores
    halves = [(p.chosen, p.starts[0]) for p in some] + [(p.rejected, p.starts[1]) for p in some]
    tokens = np.array([len(ids) - start for ids, start in halves], np.float32)
    (loss, metrics), slope = task.slope(now, then, tokens)
    mini = batch.Mini(rows, batch.count(rows), sharding.rows_sharding(task.mesh))
    stats = model.learn(params, opt, np.int32(0), [mini], slope)[2]
    found = {
        "loss": loss,
        "grad_norm": stats["dpo/grad_norm"],
        **{k: metrics[k] for k in ("chosen", "rejected", "accuracy")},
    }
    found = {name: float(value) for name, value in found.items()}
    assert found == pytest.approx(BY_TRL[name], rel=2e-4)
