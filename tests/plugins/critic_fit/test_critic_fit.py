"""A critic fitted on logged samples: what is read, its returns, its table, and a run that begins with it."""

import dataclasses
import json
import pathlib
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from jppo import __main__, critic_fit, settings, train
from jppo.errors import UserError
from jppo.plugins.critic_fit import explained, fit, logged
from jppo.run.inputs import read_inputs
from jppo.run.make import make_learner, read_models
from jppo.run.tokenizer import load_tokenizer
from jppo.runlog.logger import read_metrics
from jppo.types import Reward, given_text
from tests.make import changed, typed, write_lines

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 0.5 * len(solution_str) - 3.0
"""
SAMPLE = {"uid": "a", "prompt": "1+1=", "score": 1.0, "earned": [], "unusable": None, "finish": "stop"}


def by_a_loop(returns, values):
    """1 - Var(R - V) / (Var(R) + 1e-5), sums one by one."""

    def variance(x):
        mean = sum(x) / len(x)
        return sum((one - mean) ** 2 for one in x) / (len(x) - 1)

    errors = [r - v for r, v in zip(returns, values, strict=True)]
    return 1 - variance(errors) / (variance(returns) + 1e-5)


def test_explained_variance_by_position_turn_and_source():
    rng, count = np.random.default_rng(1), 400
    position, turn = rng.integers(0, 9, count), rng.integers(0, 2, count)
    source = rng.choice(["math", "code"], count)
    returns = rng.normal(3.0, 2.0, count)
    values = returns + rng.normal(1.0, 1.0 + (source == "code") + turn, count)
    rows = explained.explain(explained.ValuedTokens(returns, values, position, turn, source))
    ranges = {"token 1": (1, 1), "tokens 2-3": (2, 3), "tokens 4-7": (4, 7), "tokens 8-15": (8, 15)}
    expected = {"all tokens": range(count)}
    for name, (low, high) in ranges.items():
        expected[name] = [i for i in range(count) if low <= position[i] + 1 <= high]
    expected |= {f"turn {t + 1}": [i for i in range(count) if turn[i] == t] for t in (0, 1)}
    expected |= {name: [i for i in range(count) if source[i] == name] for name in ("code", "math")}
    assert [row.name for row in rows] == [*expected]
    for row in rows:
        chosen = expected[row.name]
        assert row.tokens == len(chosen) and row.mean == pytest.approx(np.mean([returns[i] for i in chosen]))
        assert row.explained == pytest.approx(by_a_loop([returns[i] for i in chosen], [values[i] for i in chosen]))


def test_one_turn_one_source_and_one_token_have_no_row_and_the_picture_has_a_bar_for_each():
    returns, zeros = np.array([0.0, 1.0, 1.0, 3.0, 3.0]), np.zeros(5, int)
    tokens = explained.ValuedTokens(returns, -returns, np.array([0, 0, 1, 2, 3]), zeros, np.array(["<a>"] * 5))
    rows = explained.explain(tokens)
    assert [row.name for row in rows] == ["all tokens", "token 1", "tokens 2-3"]  # the one at 3 has no variance
    assert rows[0].explained == pytest.approx(1 - 4.0, abs=1e-4)  # Var(2R) is 4 Var(R)
    picture = ET.fromstring(explained.draw([*rows, explained.Explained("<a>", 4, 0.0, 1.0, 0.5)]))
    bars = [bar for bar in picture if "height" in bar.attrib and bar.get("height") == "16"]
    assert [float(bar.get("width")) for bar in bars] == [explained.BAR] * 3 + [explained.BAR / 2]
    assert bars[0].get("fill") != bars[-1].get("fill")
    assert len(explained.format_table(rows).splitlines()) == 4


@pytest.fixture
def run(small_run, tmp_path):
    """A run whose log has samples of 24 prompts: a record with tool output, texts with amounts, and unusable ones."""
    c = changed(small_run, {"algorithm.gamma": 0.5, "critic.lr": 1e-3, "data.max_response_length": 8})
    folder = pathlib.Path(c.trainer.run_dir)
    (folder / "samples").mkdir(parents=True)
    (folder / "config.json").write_text(settings.dump(c))
    talk = SAMPLE | {"prompt": "2+2=", "response": "3456", "data_source": "talk"}
    text = SAMPLE | {"response": "12", "score": 2.0, "earned": [[0, 0.5]]}
    left_out = [SAMPLE | {"response": "1", "score": None}, SAMPLE | {"response": "1", "unusable": "stale"}]
    more = [SAMPLE | {"prompt": f"{i}+1=", "response": str(i), "score": i % 3} for i in range(20)]
    write_lines(folder / "samples/step_1.jsonl", [talk, text, *left_out, talk])
    write_lines(folder / "samples/step_10.jsonl", more)
    record = {"sample": 0, "prompt_tokens": [4, 5], "tokens": [6, 7, 8, 9], "trained": [True, False, True, True]}
    rejected = record | {"sample": 4, "trained": [False, True, True, True], "reward": [None, 0.25, 0.0, 2.0]}
    write_lines(folder / "samples/tokens_1.jsonl", [record | {"reward": [0.5, None, 0.0, 1.0]}, rejected])
    return c


def read(c, last_step=-1):
    encode = logged.make_encode(typed(c), load_tokenizer(c.model.path))
    return logged.read_run(pathlib.Path(c.trainer.run_dir), encode, last_step)


def test_samples_are_read_from_records_and_texts(run):
    talk, _, text = read(run, last_step=9)
    assert talk.trajectory.tokens.tolist() == [4, 5, 6, 7, 8, 9] and talk.source == "talk"
    assert talk.trajectory.sampled.tolist() == [False, False, True, False, True, True]
    tokenizer = load_tokenizer(run.model.path)
    assert text.trajectory.tokens.tolist() == [*tokenizer("1+1=12")["input_ids"], tokenizer.eos_token_id]
    assert text.trajectory.sampled.tolist() == [False] * 4 + [True] * 3 and text.source == "unknown"
    assert len(read(run)) == 23
    assert [logged.fits(talk, *lengths) for lengths in ((2, 4), (1, 4), (2, 3))] == [True, False, False]


def test_an_evaluation_is_read_as_text(run):
    folder = pathlib.Path(run.trainer.run_dir) / "samples"
    (folder / "step_10.jsonl").unlink()
    (folder / "step_1.jsonl").rename(folder / "test.jsonl")
    assert [one.source for one in read(run)] == ["talk", "unknown", "talk"]
    (folder / "test.jsonl").unlink()
    with pytest.raises(UserError, match="has neither"):
        read(run)


def test_returns_count_amounts_where_they_are_earned_and_bridge_observations(run):
    """γ = 0.5. The record: 0.5 + γ (0 + γ 1), 0.5, 1. The text earns 0.5 at once and 1.5 at its end.

    A record whose first token was rejected: 0.25 + γ (0 + γ 2), γ 2, 2 from the second on.
    """
    c, samples = typed(run), read(run, last_step=9)
    opened, params, _ = fit.open_fit(c, samples, epochs=1)
    ((part, data),) = fit.batches(opened, samples)
    assert [one.source for one in part] == ["talk", "talk", "unknown"]
    expected = [[0.75, 0.0, 0.5, 1.0], [0.75, 1.0, 2.0, 0.0], [0.5 + 0.25 * 1.5, 0.75, 1.5, 0.0]]
    np.testing.assert_allclose(data["returns"][:3, :4], expected, rtol=1e-6)
    assert data.mask[0, :4].tolist() == [True, False, True, True]
    tokens = fit.value_tokens(opened, params, samples)
    np.testing.assert_allclose(tokens.returns, [0.75, 0.5, 1.0, 0.75, 1.0, 2.0, 0.875, 0.75, 1.5], rtol=1e-6)
    assert tokens.position.tolist() == [0, 2, 3, 0, 1, 2, 0, 1, 2]
    assert tokens.turn.tolist() == [0, 1, 1, 0, 0, 0, 0, 0, 0] and not tokens.values.any()  # of a new head
    assert tokens.source.tolist() == ["talk"] * 6 + ["unknown"] * 3
    c = typed(changed(run, {"critic.value_norm_decay": 0.9}))
    norm = fit.measure_norm(dataclasses.replace(opened, c=c), samples)
    np.testing.assert_allclose(norm, [1.0, np.mean(tokens.returns), np.var(tokens.returns)], rtol=1e-5)


def test_no_prompt_is_on_both_sides():
    trajectory, reward = given_text(np.arange(3), np.arange(3) > 0), Reward(1.0, {}, None)
    samples = [logged.Logged(f"prompt {i % 500}", "", trajectory, reward) for i in range(1000)]
    sides = [logged.split(samples, share=0.3, seed=seed) for seed in (1, 2)]
    for learned, held_out in sides:
        assert len(learned) + len(held_out) == 1000 and 240 < len(held_out) < 360
        assert not {one.prompt for one in learned} & {one.prompt for one in held_out}
    assert {one.prompt for one in sides[0][1]} != {one.prompt for one in sides[1][1]}
    with pytest.raises(UserError, match="leaves one side empty"):
        logged.split(samples[:1], share=0.5, seed=1)


@pytest.mark.parametrize(
    "changes, fault",
    [
        ({"critic.value_bins": 8}, "always new"),
        (
            {"rollout.multi_turn.enable": True, "rollout.multi_turn.environment": "mine.py:Talk"},
            "trainer.token_samples",
        ),
        ({"trainer.run_dir": "elsewhere"}, "no settings of jppo.train"),
    ],
)
def test_what_cannot_be_fitted_is_refused(run, tmp_path, changes, fault, capsys):
    folder = changes.pop("trainer.run_dir", run.trainer.run_dir)
    if "rollout.multi_turn.enable" in changes:
        (pathlib.Path(folder) / "samples/tokens_1.jsonl").unlink()
    options = [f"--config.{name}={value}" for name, value in changes.items()]
    with pytest.raises(SystemExit):
        critic_fit.main([str(folder), f"--out={tmp_path / 'critic'}", *options])
    assert fault in capsys.readouterr().err and not (tmp_path / "critic").exists()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of runpy: the module is imported already
@pytest.mark.parametrize("decay", [None, 0.9])
def test_a_fitted_critic_is_read_as_it_was_measured(run, tmp_path, decay, capsys):
    """A token's return follows from the token before it: 0.5, 1, 2 and 4 at the tokens of 123 and its end."""
    changes = {"critic.value_norm_decay": decay, "critic.lr": 1e-2, "critic.cliprange_value": 4.0}
    c = changed(run, changes | {"data.train_batch_size": 32, "actor.ppo_mini_batch_size": 8})
    rows = [SAMPLE | {"prompt": f"{i}+1=", "response": "123", "score": 4.0} for i in range(200)]
    write_lines(tmp_path / "run/samples/step_1.jsonl", rows)
    (tmp_path / "run/samples/tokens_1.jsonl").unlink()
    (tmp_path / "run/config.json").write_text(settings.dump(c))
    __main__.main(["critic", "fit", c.trainer.run_dir, f"--out={tmp_path / 'critic'}", "--epochs=2", "--last_step=1"])
    printed, table = capsys.readouterr().out, json.loads((tmp_path / "critic/explained.json").read_text())
    assert f"{table[0]['explained']:.3f}\n" in printed and table[0]["explained"] > 0.5
    ET.parse(tmp_path / "critic/explained.svg")
    c = typed(changed(c, {"critic.path": str(tmp_path / "critic/hf")}))
    samples = read(run, last_step=1)
    _, held_out = logged.split(samples, share=0.1, seed=c.trainer.seed)
    opened, params, _ = fit.open_fit(c, samples, epochs=1)
    tokens = fit.value_tokens(opened, params, held_out)
    assert by_a_loop(tokens.returns.tolist(), tokens.values.tolist()) == pytest.approx(table[0]["explained"], abs=1e-4)
    assert abs(tokens.values.mean() - tokens.returns.mean()) < 0.5  # on the scale of the rewards
    if decay is not None:
        few = settings.changed(c, {"data.train_batch_size": 4, "actor.ppo_mini_batch_size": 4})  # of the 8 prompts
        _, begin = make_learner(few, read_inputs(few), opened.mesh)  # of a run
        assert begin.value_norm.tolist() == opened.norm.tolist() and opened.norm[0] == 1
        c = settings.changed(c, {"critic.value_norm_decay": None})
        with pytest.raises(UserError, match="value_norm_decay=None reads them as"):
            read_models(c, with_critic=True, with_reference=False)


def test_a_run_begins_with_what_its_fitted_critic_explains(small_run, engine, tmp_path):
    """The engine samples alike in the first step of both runs."""
    (tmp_path / "reward.py").write_text(REWARD)
    changes = {"reward.function": f"{tmp_path / 'reward.py'}:compute_score", "actor.lr": 0.0, "critic.lr": 3e-3}
    changes |= {"critic.value_norm_decay": 0.9, "critic.lam": 1.0, "data.train_batch_size": 8, "trainer.test_freq": -1}
    changes |= {"trainer.token_samples": 100, "trainer.save_freq": -1, "trainer.total_training_steps": 6}
    c = changed(small_run, changes)
    train.train(c)
    critic_fit.main([c.trainer.run_dir, f"--out={tmp_path / 'critic'}", "--held_out=0.4"])
    changes = {"critic.path": str(tmp_path / "critic/hf"), "trainer.run_dir": str(tmp_path / "begun")}
    begun = changed(c, changes | {"critic.lr": 0.0, "trainer.total_training_steps": 2})
    train.train(begun)
    first, second = (line for line in read_metrics(tmp_path / "begun") if "critic/vf_explained_var" in line)
    samples = read(c, last_step=1)
    opened, params, _ = fit.open_fit(typed(begun), samples, epochs=1)
    tokens = fit.value_tokens(opened, params, samples)
    expected = by_a_loop(tokens.returns.tolist(), tokens.values.tolist())
    assert first["critic/vf_explained_var"] == pytest.approx(expected, abs=1e-3) and abs(expected) > 0.01
    for name, found in (("mean", tokens.values.mean()), ("max", tokens.values.max()), ("min", tokens.values.min())):
        assert first[f"critic/values/{name}"] == pytest.approx(found, abs=1e-3)
    # On the scale that the returns of the first step have changed a little.
    assert second["critic/values/mean"] == pytest.approx(first["critic/values/mean"], abs=0.3)
