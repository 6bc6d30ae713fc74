"""benchmarks/learning.py: intervals against scipy and by hand, the rewards of its tasks, and a tiny run of each."""

import asyncio
import json
import math
import types

import pytest
import scipy.stats

from examples import bisection, chain
from jppo.plugins.prove import tasks
from tests import make


def script(name):
    return make.script(f"benchmarks/{name}.py")


@pytest.fixture(scope="module")
def learning():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(make.ROOT / "benchmarks")
        yield script("learning")


def test_intervals_of_a_mean_and_a_difference(learning):
    # Mean 3, standard deviation sqrt(2.5); 2.776445 is the quantile of 4 degrees of freedom in printed tables.
    found = learning.interval([1, 2, 3, 4, 5])
    assert found == pytest.approx((3.0, 2.776445 * math.sqrt(2.5 / 5)), rel=1e-6)
    theirs = scipy.stats.ttest_1samp([0.2, 0.9, 0.4], 0.0).confidence_interval(0.95)
    found = learning.interval([0.2, 0.9, 0.4])
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx(tuple(theirs))
    assert math.isnan(learning.interval([1.0]).half) and str(learning.interval([1.0])) == "1.000"
    a, b = [1.0, 2.0, 4.0], [0.5, 0.6, 0.7, 0.9]
    theirs = scipy.stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    found = learning.difference(a, b)
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx(tuple(theirs))


def test_mean_score_by_sampled_tokens(learning):
    # Steps of 10, 30 and 20 tokens; of the first 50 tokens, 10 score 1, 30 score 2 and 10 score 5.
    assert learning.mean_score([10, 30, 20], [1.0, 2.0, 5.0], 0, 50) == pytest.approx((10 + 60 + 50) / 50)
    assert learning.mean_score([10, 30, 20], [1.0, 2.0, 5.0], 25, 45) == pytest.approx((15 * 2 + 5 * 5) / 20)


def row(learning, algorithm, seed, scores, tokens):
    curves = {learning.SCORE: scores}
    if algorithm == "PPO":
        curves[learning.EXPLAINED] = [0.1 * seed] * len(scores)
    chosen = json.loads(json.dumps(learning.settings_of("chain", algorithm, {})))
    about = {"task": "chain", "algorithm": algorithm, "seed": seed, "settings": chosen, "start": 1}
    return about | {"tokens": [tokens] * len(scores), "test": 0.5, "curves": curves}


def test_tables_compare_at_the_smallest_budget_and_leave_out_incomplete_tasks(learning):
    rows = [row(learning, name, seed, [0.25 * seed] * 10, 10) for name in learning.ALGORITHMS for seed in (1, 2)]
    rows[0] = row(learning, "PPO", 1, [0.0] * 10 + [100.0] * 10, 10)  # what follows the others' 100 tokens is no score
    text = learning.tables(rows, ["chain", "rlhf"], seeds=2)
    # Scores 0 and 0.5; quantile 12.706205 of one degree of freedom, deviation 0.5 / sqrt(2).
    assert f"| chain (100) | PPO | 2 | 0.250 ± {12.706205 * 0.25:.3f} |" in text
    assert "| 0.500 ± 0.000 | 0.150 ± 0.635 |" in text  # the test, then the explained variances 0.1 and 0.2
    assert "| chain | GRPO | -0.125 ±" in text  # GRPO has 0.25 and 0.5
    assert "Without 2 seeds of every algorithm: rlhf." in text
    other = [*rows[:-1], rows[-1] | {"settings": rows[-1]["settings"] | {"actor.lr": 1.0}}]
    assert "Without 2 seeds of every algorithm: chain." in learning.tables(other, ["chain"], seeds=2)
    other = [*rows, rows[-1] | {"start": 2}]  # the runs before it began with another model
    assert "Without 2 seeds of every algorithm: chain." in learning.tables(other, ["chain"], seeds=2)


def test_tables_of_sao_compare_at_each_staleness():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(make.ROOT / "benchmarks")
        sao = script("sao")
    args = types.SimpleNamespace(tasks=["chain"], staleness=[0, 4], seeds=2, steps=None, engine="inprocess")
    short = types.SimpleNamespace(steps=7, engine="vllm")
    assert sao.changes_of("SAO", 2, short) == {
        "algorithm.lam_alpha": 1.5, "algorithm.old_logprob": "bypass", "algorithm.rollout_is": "token",
        "algorithm.rollout_is_threshold": "0.2_4.0", "actor.loss_mode": "gpg", "critic.freeze": "*.self_attn.*",
        "critic.lam": 1.0, "critic.ppo_epochs": 2, "rollout.mode": "async", "rollout.max_staleness": 2,
        "rollout.name": "vllm", "trainer.total_training_steps": 7,
    }  # fmt: skip
    assert sao.changes_of("PPO", 0, args) == {"algorithm.old_logprob": "correction", "algorithm.rollout_is": "token"}
    rows = []
    for arm, (algorithm, _) in sao.ARMS.items():
        for seed in (1, 2):
            chosen = json.loads(json.dumps(sao.settings_of("chain", algorithm, sao.changes_of(arm, 4, args))))
            curves = {"critic/score/mean": [0.25 * seed + (arm == "SAO")] * 10, sao.AGE: [0.0, 3.0] * 5}
            row = {"task": "chain", "arm": arm, "seed": seed, "settings": chosen, "start": 1, "tokens": [10] * 10}
            rows.append(row | {"test": 0.5, "curves": curves})
    text = sao.tables(rows, args)
    # Scores 1.25 and 1.5; quantile 12.706205 of one degree of freedom, deviation 0.25 / sqrt(2). Ages 0 and 3.
    assert f"| chain | 4 | SAO | 2 | 1.50 | 1.375 ± {12.706205 * 0.125:.3f} |" in text
    assert "| chain | 4 | GRPO | 1.000 ±" in text and "Without 2 seeds of every algorithm: chain at 0." in text


def test_rewards_of_a_chain():
    got = chain.chain("chain", "55,63,61,69,99,7,107", "47+8")
    # 47+8=55 and 55+8=63 are right, 61 is not, 61+8=69 is right, 99 is not, (99+8) % 100 is written 07.
    assert got["steps"] == pytest.approx([0.05, 0.05, 0.0, 0.05, 0.0, 0.0, 0.0])
    assert got["score"] == pytest.approx(0.15) and got["delimiter"] == ","
    endless = chain.chain("chain", ",".join(f"{(1 + i) % 100:02d}" for i in range(1, 31)), "1+1")
    assert endless["score"] == pytest.approx(1.0) and endless["steps"][20:] == [0.0] * 10
    assert chain.chain("chain", "", "47+8") == {"score": 0, "steps": [], "delimiter": ","}


def test_rewards_of_a_bisection():
    async def play(number, guesses):
        world = bisection.Bisection()
        assert await world.reset(types.SimpleNamespace(ground_truth=str(number))) == ""
        return [await world.step(guess) for guess in guesses]

    # 20 of 0..31: above 15 leaves 16 numbers, 1 bit of 5; above 15 again gains nothing; below 24 leaves 16..23.
    got = asyncio.run(play(20, ["f", "f", "o", "zz", "k"]))
    assert [(reply, over) for reply, _, over in got] == [
        (">", False), (">", False), ("<", False), ("?", False), (">", True)
    ]  # fmt: skip
    assert [gained for _, gained, _ in got] == pytest.approx([0.2, 0.0, 0.2, 0.0, 0.6])


@pytest.mark.slow
@pytest.mark.parametrize("task", ["quickstart", "rlhf", "chain", "bisection"])
def test_a_tiny_run_of_a_task_and_its_resume(learning, task, shared, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tasks, "IMITATION_STEPS", 2)
    monkeypatch.setattr(tasks, "PAIR_STEPS", 2)
    monkeypatch.setattr(tasks, "SAMPLES", 2)
    given = [f"--tasks={task}", "--steps=3", f"--work={tmp_path / 'work'}", f"--out={tmp_path / 'out'}"]
    given += [f"--stories_model={shared / 'models/tinystories-656k'}", "--algorithms=PPO,GRPO"]
    learning.main([*given, "--seeds=1"])
    (path,) = (tmp_path / "out").glob("*-learning.jsonl")
    first = path.read_text()
    ppo, grpo = map(json.loads, first.splitlines())
    assert ppo["settings"]["trainer.total_training_steps"] == 3 == len(ppo["tokens"]) == len(grpo["tokens"])
    assert len(ppo["curves"][learning.EXPLAINED]) == 3 and learning.EXPLAINED not in grpo["curves"]
    assert min(ppo["tokens"] + grpo["tokens"]) >= 64 and "Without 1 seeds" in capsys.readouterr().out
    learning.main([*given, "--seeds=1"])  # nothing is missing
    assert path.read_text() == first
