"""A reward model as a command: its gradient is torch's, it learns, and what it writes is a classifier."""

import json
import pathlib
import types

import jax
import numpy as np
import pytest

from examples import arithmetic
from jppo import reward_model, settings
from jppo.data.preferences import Pair
from jppo.errors import UserError
from jppo.learner import batch, packing, sharding
from jppo.learner.make import load_trained, make_adapters, make_trainable
from jppo.models import hf, hf_write
from jppo.plugins.reward_models.classifier import JaxRewardModel, choose_engine, read_classifier
from jppo.plugins.reward_models.model import Texts
from jppo.run import pairs
from jppo.runlog.durable_files import own
from jppo.runlog.logger import read_metrics
from tests.make import changed, record_reads, typed, unread

SHAPE = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "pad_token_id": None}


def rows(count, seed):
    """Pairs of which the one with a 7 is preferred, more so with two of them; prompts and responses of any length."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(count):
        prompt = "".join(rng.choice(list("0123456789+"), rng.integers(1, 5))) + "="
        halves = ["".join(rng.choice(list("012345689"), rng.integers(2, 7))) for _ in range(2)]
        place = rng.integers(len(halves[0]))
        found.append({"prompt": prompt, "chosen": halves[0][:place] + "7" + halves[0][place + 1 :]})
        found[-1] |= {"rejected": halves[1], "gap": float(rng.integers(3)) / 2}
    return found


@pytest.fixture
def config(tmp_path):
    """A training in seconds, with the quickstart's tokenizer."""
    arithmetic.write_model(tmp_path / "model")
    (tmp_path / "model/config.json").write_text(json.dumps(arithmetic.MODEL | SHAPE))
    for name, count in (("train", 512), ("test", 100)):
        text = "".join(json.dumps(row) + "\n" for row in rows(count, seed=count))
        (tmp_path / f"{name}.jsonl").write_text(text)
    c = settings.reward_model_default()
    c.model.path, c.model.init = str(tmp_path / "model"), "random"
    c.data.train_files, c.data.val_files = str(tmp_path / "train.jsonl"), str(tmp_path / "test.jsonl")
    c.data.train_batch_size, c.data.row_lengths = 64, 1
    c.data.max_prompt_length, c.data.max_response_length = 6, 6
    c.trainer.run_dir, c.trainer.logger = str(tmp_path / "run"), "jsonl"
    c.optim.lr = 3e-3
    settings.check(c)
    return c


@pytest.fixture
def seen(monkeypatch):
    """The settings that a training reads."""
    return record_reads(monkeypatch)


@pytest.fixture
def trained(config, seen):
    """The folder of a training that has learned its preference."""
    config.trainer.total_training_steps, config.trainer.test_freq, config.mesh.sequence = 60, 30, 2
    config.loss.center_rewards_coefficient = 0.01
    reward_model.train(typed(config))
    return pathlib.Path(config.trainer.run_dir)


def theirs(path):
    """The directory as transformers has it, with all of its weights."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    model, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    return model.eval(), transformers.AutoTokenizer.from_pretrained(path)


def test_it_learns_and_transformers_gives_the_same_scores(trained, config, seen):
    make_adapters(typed(changed(config, {"model.lora_rank": 2})))  # reads what only adapters have
    assert unread(config, seen) == {"trainer.total_epochs"}, "which total_training_steps replaces"
    found = read_metrics(trained)
    assert [m["step"] for m in found if "rm/val_accuracy" in m] == [30, 60]
    assert abs(found[0]["rm/accuracy"] - 0.5) < 0.25 and found[-1]["rm/val_accuracy"] > 0.9
    assert found[-1]["rm/loss"] < 0.5 * found[0]["rm/loss"] and found[-1]["rm/chosen"] > found[-1]["rm/rejected"]
    model, tokenizer = theirs(trained / "hf")
    assert type(model).__name__ == "Qwen2ForSequenceClassification" and model.config.num_labels == 1
    assert model.config.pad_token_id == 0  # the tokenizer's: the model that it was made from names none
    what = read_classifier(str(trained / "hf"), tokenizer=tokenizer, max_length=16)
    assert choose_engine("auto", what.model_type) == "jax"
    texts = ["1+2=7", "1+2=33333", "=5", "9+9+9=12745"]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    filled = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    expected = model(**filled).logits[:, 0].tolist()
    np.testing.assert_allclose(JaxRewardModel(what, batch_size=3, max_length=16).score(ids), expected, atol=2e-5)
    assert min(expected[0], expected[3]) > max(expected[1], expected[2])


@pytest.mark.parametrize(
    "tokens, kind",
    [
        (16, "segments"),
        (8192, "segments"),
        pytest.param(16, "buckets", marks=pytest.mark.slow),
        pytest.param(8192, "buckets", marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradient_are_torchs_however_the_batch_is_cut(config, kind, tokens):
    torch = pytest.importorskip("torch")
    c = config
    c.data.packing, c.data.max_tokens_per_row, c.data.row_lengths = kind, -1 if kind == "buckets" else 16, 3
    c.optim.max_tokens_per_device, c.loss.margin_column, c.loss.center_rewards_coefficient = tokens, "gap", 0.1
    c.mesh.fsdp, c.mesh.tensor, c.mesh.sequence = (8, 1, 1) if tokens == 8192 else (1, 2, 2)
    task = reward_model.prepare(typed(c))
    cfg, some = task.cfg, task.pairs.pairs[:12]
    how = dict(head="value", key=jax.random.key(3), adapters=task.adapters)
    trained = load_trained(typed(c), task.mesh, cfg, c.model.path, **how)
    trainable, _ = make_trainable(typed(c).optim, "rm", task.loss, trained, 1, scaled=False)
    how = dict(source=c.model.path, dtype="float32", head="value", changes=task.changes)
    path = hf_write.save_model(c.trainer.run_dir, trained.learned, cfg, **how)
    micros = pairs.pack_pairs(task, some)
    assert len(micros) > 2 or tokens == 8192
    slopes = task.slope(pairs.score_pairs(task, trainable, trained.learned, micros, len(some)), pairs.margins(some))
    carry = trainable.zeros()
    mini = batch.Mini(micros, batch.count(micros), sharding.rows_sharding(task.mesh))
    for micro in mini.micros:
        rows = jax.device_put(micro, mini.place)
        carry, _ = task.loss.accumulate(trained.learned, None, carry, rows, mini.counts, None, slopes[1])
    # groups of devices along `data` have sums of their own
    whole = jax.tree.map(lambda g, p: g.sum(0) if g.ndim > p.ndim else g, carry[0], trained.learned)
    ours = dict(hf_write.hf_tensors(whole, cfg, head="value"))

    model, _ = theirs(path)
    halves = [
        torch.stack([model(torch.tensor(getattr(pair, half))[None].long()).logits[0, 0] for pair in some])
        for half in ("chosen", "rejected")
    ]
    gap = halves[0] - halves[1] - torch.tensor([pair.margin for pair in some])
    expected = (torch.log(1 + torch.exp(-gap)) + 0.1 * (halves[0] + halves[1]) ** 2).mean()
    expected.backward()
    (loss, metrics), _ = slopes
    assert float(loss) == pytest.approx(expected.item(), rel=1e-5)
    assert float(metrics["accuracy"]) == float((halves[0] > halves[1]).float().mean())
    assert float(metrics["margin"]) == pytest.approx((halves[0] - halves[1]).mean().item(), abs=1e-5)
    gradients = {name: tensor.grad for name, tensor in model.named_parameters()}
    assert gradients.keys() == ours.keys()
    for name, gradient in gradients.items():
        np.testing.assert_allclose(ours[name], gradient.numpy(), atol=2e-5, err_msg=name)
    assert max(float(g.abs().max()) for g in gradients.values()) > 0.05


def test_a_text_is_read_to_its_end_and_packed_once(config):
    task = types.SimpleNamespace(
        plan=packing.Plan((6,), ((4,),), share_rows=False), sequence=reward_model.as_trajectory
    )
    [made] = pairs.pack_pairs(task, [Pair(np.array([5, 6, 7]), np.array([5, 8]), margin=0.0)])
    assert made.inputs[:2].tolist() == [[5, 6, 7, 0, 0, 0], [5, 8, 0, 0, 0, 0]]
    assert made.mask[:2].tolist() == [[False, False, True] + [False] * 3, [False, True] + [False] * 4]
    assert made.sequence[made.mask].tolist() == [0, 1]


def test_encode_is_what_a_reward_model_of_a_run_reads(config, tiny_model):
    from jppo.data.tokenizer import load_tokenizer
    from jppo.rewards.parts import Sample
    from jppo.types import Prompt

    encode = reward_model.make_encode(load_tokenizer(str(tiny_model)), 0)
    texts = Texts(load_tokenizer(str(tiny_model)), max_length=99)
    sample = Sample(Prompt("u", "s", "1+2=", np.array([1]), "3", {}), "3", 1, "stop")
    assert encode("1+2=", "3") == texts.read(sample)[0] == [3, 12, 4, 13, 5]


def test_a_dry_run_says_what_it_would_be(config, quick_compilation):
    config.trainer.total_epochs = 3
    said = reward_model.dry_run(typed(config))
    assert "pairs            512 (0 over-long ones and 0 with equal halves left out)" in said
    assert "held out         100 (" in said and "steps            24, each of 64 pairs" in said
    assert "its optimizer" in said and "temporaries: rm" in said and "\n  scores " in said
    assert "checks of this machine, as by jppo.doctor: " in said and "FAIL" not in said
    pathlib.Path(config.trainer.run_dir).write_text("a file")
    assert f"FAIL permission: {config.trainer.run_dir} is not writable" in reward_model.dry_run(typed(config))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"data.val_files": ""}, "data.val_files is empty"),
        ({"loss.margin": 0.5, "loss.margin_column": "gap"}, "both set the margin"),
        ({"loss.margin": -1.0}, "loss.margin=-1.0 must be at least 0.0"),
        ({"loss.center_rewards_coefficient": -0.1}, "must be at least 0.0"),
        ({"trainer.test_freq": 0}, "trainer.test_freq=0 must be at least 1, or -1"),
    ],
)
def test_settings_that_cannot_be_are_refused(config, changes, complaint):
    config.update_from_flattened_dict(changes)
    with pytest.raises(UserError, match=complaint):
        settings.check(config)


def test_a_config_of_another_command_is_one_line(capsys):
    with pytest.raises(SystemExit) as e:
        reward_model.main(["--config=configs/quickstart_sft.py"])
    assert e.value.code == 2 and "is a config of jppo.sft; name one of jppo.reward_model" in capsys.readouterr().err


def test_adapters_are_merged_into_what_is_written(config):
    config.trainer.total_training_steps, config.model.lora_rank = 2, 2
    reward_model.train(config)
    _, cfg = hf.read_config(config.trainer.run_dir + "/hf")
    hf.check_weights(config.trainer.run_dir + "/hf", cfg, head="value")


def test_a_folder_of_another_process_is_left_alone(config, tmp_path):
    (tmp_path / "run").mkdir()
    with own(tmp_path / "run"), pytest.raises(UserError, match="belongs to process"):
        reward_model.train(config)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.lock"]
