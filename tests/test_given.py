"""Given responses: their tokens and places by hand, what is refused, and whole runs with half of each group given."""

import dataclasses
import json
import pathlib
import statistics

import numpy as np
import pytest

from jppo import settings, train
from jppo.data.stream import Cursor
from jppo.data.tokenizer import load_tokenizer
from jppo.errors import UserError
from jppo.learner.algorithm import Algorithm
from jppo.run.inputs import read_inputs
from jppo.runlog.timers import Count
from jppo.runlog.watchdog import Stopped
from jppo.samples import given, queue
from jppo.samples.make import make_given, mark_stale
from jppo.settings import parts
from jppo.types import Prompt, Reward
from tests.learner.test_compilations import compilations
from tests.make import ROOT, changed, read_lines, trajectory, typed, untimed, weights, write_lines
from tests.test_prefetch import HOW, TRAIN, RewardSum, Slow
from tests.test_resume import again, broken_off

LUFFY = f"{ROOT}/examples/algorithms/luffy.py:luffy"


def letters(ids):
    """Decodes 3 to c, 4 to d; 1 and 2 are end tokens."""
    return "".join(chr(96 + i) for i in ids if i > 2)


@pytest.mark.parametrize(
    ("ids", "how", "tokens", "finish"),
    [
        ([5, 6], {}, [5, 6, 1], "stop"),
        ([5, 6, 7], {}, [5, 6, 7, 1], "stop"),
        ([5, 6, 7, 8], {}, [5, 6, 7, 8], "length"),  # no room for an end token
        ([5, 6, 7, 8, 9], {}, [5, 6, 7, 8], "length"),
        ([5, 2, 6], {}, [5, 2], "stop"),  # the policy would have ended there
        ([5, 6, 7, 1], {}, [5, 6, 7, 1], "stop"),
        ([5, 6, 7, 8], {"stop": ("fg",)}, [5, 6, 7], "stop"),
        ([5, 6, 7], {"stop": ("x",)}, [5, 6, 7, 1], "stop"),
        ([5, 1, 6], {"ends": ()}, [5, 1, 6], "length"),  # rollout.ignore_eos
    ],
)
def test_a_text_has_the_tokens_of_a_sampled_response(ids, how, tokens, finish):
    answer = given.answer_of(ids, decode=letters, **({"limit": 4, "stop": (), "ends": (1, 2)} | how))
    assert answer.tokens == tokens and answer.finish == finish
    assert answer.version == [-1] * len(tokens) and answer.logprob == [0.0] * len(tokens)


def make(c, texts, monkeypatch, ends=(1,)):
    """The given responses of a prompt for which an algorithm gives `texts`."""
    algorithm = Algorithm(outcome=lambda view: view.score, given=lambda prompt: texts)
    monkeypatch.setattr(parts, "estimator", lambda _: algorithm)
    prompt = Prompt("p", "", "", np.array([2, 3], np.int32), "", {})
    return make_given(typed(c), load_tokenizer(c.model.path), ends)(prompt)


def test_given_responses_look_like_sampled_ones_but_for_who_sampled_them(small_run, monkeypatch):
    small_run.rollout.n = 2
    short, long = make(small_run, ["47", "123456789"], monkeypatch, ends=(0, 1))  # the tokenizer's is 1
    tokens = load_tokenizer(small_run.model.path)("47", add_special_tokens=False)["input_ids"]
    assert short.tokens.tolist() == [2, 3, *tokens, 1] and short.text == "47" and short.finish == "stop"
    assert short.sampled.tolist() == [False, False, True, True, True] and short.version.tolist() == [-1] * 5
    assert long.text == "123456" and long.finish == "length", "data.max_response_length is 6"
    assert short.given and long.given and short.turns == 1
    small_run.rollout.ignore_eos = True
    assert make(small_run, ["47"], monkeypatch)[0].tokens.tolist() == [2, 3, *tokens]
    assert not trajectory([1, 2], [0, 1]).given and not trajectory([1, 2], [0, 0]).given


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["1", "2", "3"], r"returns 3 responses for prompt p, .* rollout\.n=2 samples; return fewer, or raise"),
        ("12", r"returns '12' for prompt p; it must be a list of texts that are not blank, \[\] for none"),
        (["1", " "], r"returns \['1', ' '\] for prompt p; it must be a list of texts"),
        ([1], r"returns \[1\] for prompt p"),
        (None, r"returns None for prompt p"),
    ],
)
def test_what_cannot_take_places_is_refused(small_run, monkeypatch, texts, said):
    small_run.rollout.n = 2
    with pytest.raises(UserError, match=said):
        make(small_run, texts, monkeypatch)


# --- places in the queue


def give(count, text="t"):
    """Gives `count` responses to each prompt of an even number."""

    def of(prompt):
        some = 0 if prompt.ids[0] % 2 else count
        how = dict(version=-1, text=f"{text}{prompt.uid}")
        return [trajectory([prompt.ids[0], ord(text[0]), i], [0, 1, 1], prompt.uid, **how) for i in range(some)]

    return of


def make_queue(sampler, cursor=None, reward_sum=None, **changes):
    how = dataclasses.replace(
        HOW, **({"n": 3, "sampling": lambda step: dataclasses.replace(HOW.sampling(step), n=3)} | changes)
    )
    return queue.SampleQueue(how, TRAIN, sampler, reward_sum or RewardSum(), cursor or Cursor())


@pytest.mark.parametrize("count", [0, 1, 2, 3])
@pytest.mark.parametrize("how", [{}, {"greedy": True}, {"partial": True, "staleness": 2}])
def test_they_take_the_last_places_and_nobody_is_asked_for_them(count, how):
    sampler, plain = Slow(), Slow()
    it, other = make_queue(sampler, give=give(count), **how), make_queue(plain, **how)
    for step in range(3):
        sampler.version = plain.version = step
        drawn, without = it.take(step), other.take(step)
        if not how:
            samples = [t for t in drawn.trajectories if not t.given]
            assert it.progress(step) == Count("responses", 6, 6, 2 * len(samples)), "of 2 tokens each"
        for i, t in enumerate(drawn.trajectories):
            prompt, place = drawn.prompts[i // 3], i % 3
            assert t.given == (prompt.ids[0] % 2 == 0 and place >= 3 - count)
            if not t.given:  # the same seed and number as without given ones
                assert t.tokens.tolist() == without.trajectories[i].tokens.tolist()
        rewards, best = drawn.wait_for_rewards()
        assert [r.answer for r in rewards] == [t.text for t in drawn.trajectories] and bool(best) == ("greedy" in how)
        assert queue.ages(drawn.trajectories, step).max() <= min(step, 2)
        it.forget(step), other.forget(step)


def test_staleness_and_versions_are_of_sampled_responses(config):
    config.rollout.mode, config.rollout.max_staleness, config.algorithm.old_logprob = "async", 2, "correction"
    mixed = trajectory([1, 2, 3], [0, 1, 1], version=[0, 3, 5])
    some = [trajectory([1, 2], [0, 1], version=v) for v in (4, 5, -1)]
    drawn = queue.StepSamples([], [mixed, *some], Cursor(), 0.0, 1.0, lambda: ([], None))
    rewards = [Reward(0.0, {}, None)] * 4
    found, metrics = mark_stale(typed(config), drawn, 5, rewards)
    assert found == rewards
    assert metrics["rollout/staleness_mean"] == pytest.approx((2 + 1 + 0) / 3) and metrics["rollout/staleness_max"] == 2
    assert metrics["rollout/mixed_versions"] == pytest.approx(1 / 3)


def test_saved_ones_are_graded_once_and_those_of_another_algorithm_are_not_used():
    sampler, sums = Slow(), RewardSum()
    it = make_queue(sampler, reward_sum=sums, give=give(2))
    it.take(0)
    it.forget(0)
    state = json.loads(json.dumps(it.state()))
    waiting = len(state["steps"][0]["found"][0]["numbers"])
    assert waiting == 6, "step 1 is asked for, and answered"

    even = sum(int(TRAIN.prompts[i].ids[0]) % 2 == 0 for i in state["steps"][0]["indices"])
    assert even, "a prompt of the step has given responses"

    def resumed(**how):
        later, sums = Slow(), RewardSum()
        later.version = 1
        it = make_queue(later, Cursor(**state["cursor"]), sums, **how)
        [line] = it.load(state, 1)
        assert line.startswith(f"{6 - 2 * even} samples that the checkpoint has of the next steps are not drawn again")
        count = sums.count
        return it.take(1), count

    same, graded = resumed(give=give(2))
    assert graded == state["reward"]["count"], "none is graded again"
    assert sum(t.given for t in same.trajectories) == 2 * even
    other, graded = resumed(give=give(2, text="u"))
    assert graded == state["reward"]["count"] + 2 * even, "new texts are graded"
    assert all(t.text.startswith("u") for t in other.trajectories if t.given)
    fewer, graded = resumed(give=give(1))
    assert [t.given for t in fewer.trajectories].count(True) == even and len(fewer.trajectories) == 6
    none, _ = resumed()
    assert not any(t.given for t in none.trajectories) and len(none.trajectories) == 6


def test_a_curriculum_learns_from_scores_of_samples(monkeypatch):
    seen = []
    monkeypatch.setattr(queue, "seen", lambda cursor, order, prompts, rewards: (seen.extend(rewards), cursor)[1])
    it = make_queue(Slow(), give=give(1))
    drawn = it.take(0)
    rewards = drawn.wait_for_rewards()[0]
    it.note_rewards(drawn, rewards)
    assert [r.score for r in seen] == [r.score for r in rewards]
    assert [r.unusable is not None for r in seen] == [t.given for t in drawn.trajectories]


# --- rules


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"algorithm.old_logprob": "bypass"},
            "takes the engine's log-probs, .* gives have none; set decoupled or corr",
        ),
        ({"rollout.mask_replay": True, "rollout.top_p": 0.9}, "replays the engine's kept tokens, .* have none"),
        ({"rollout.routing_replay": True}, "replays the engine's experts, .* gives have none; set it to False"),
        ({"rollout.agent": "examples/calculator_openai.py:multiply", "rollout.agent_reward": "reported"}, "of several"),
        ({"rollout.multi_turn.enable": True}, "makes responses of several turns, .* gives have one; set it to False"),
    ],
)
def test_what_given_responses_cannot_go_with(config, changes, said):
    config.algorithm.extension, config.rollout.n = LUFFY, 2
    settings.check(config)
    with pytest.raises(UserError, match=said) as e:
        changed(config, changes)
    assert "\n" not in str(e.value) and LUFFY in str(e.value)


# --- whole runs


def write_demonstrations(c, of=lambda i: ["12", "9"]):
    """Adds the column `demonstrations` to the training rows, by their number."""
    path = pathlib.Path(c.data.train_files)
    rows = read_lines(path)
    path.write_text("".join(json.dumps(row | {"demonstrations": of(i)}) + "\n" for i, row in enumerate(rows)))


GRADE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return (len(solution_str) + sum(map(ord, solution_str)) % 7) / 10
"""


@pytest.fixture
def run(small_run, tmp_path):
    """Three steps of GRPO, two of four responses to each prompt given; the engine in the process."""
    (tmp_path / "grade.py").write_text(GRADE)
    write_demonstrations(small_run)
    changes = {
        "reward.function": f"{tmp_path / 'grade.py'}:compute_score",
        "rollout.name": "inprocess",
        "rollout.n": 4,
        "rollout.logp_tolerance": 1e-3,
        "algorithm.extension": LUFFY,
        "trainer.token_samples": 100,
        "trainer.total_training_steps": 3,
        "trainer.test_freq": -1,
    }
    return changed(small_run, changes)


def read_step(c, step):
    """Metrics, samples and token records of a step."""
    folder = pathlib.Path(c.trainer.run_dir)
    [metrics] = [line for line in read_lines(folder / "metrics.jsonl") if line["step"] == step]
    return metrics, *(read_lines(folder / f"samples/{name}_{step}.jsonl") for name in ("step", "tokens"))


def require_as_by_hand(c, step, given_places=(2, 3), n=4):
    """The step's advantages are GRPO's over each whole group, and metrics are of the sampled responses alone."""
    metrics, samples, records = read_step(c, step)
    scores = [row["score"] for row in samples]
    for i, row in enumerate(samples):
        assert row.get("given", False) is (i % n in given_places)
        group = scores[i - i % n : i - i % n + n]
        expected = (scores[i] - statistics.mean(group)) / (statistics.stdev(group) + 1e-6)
        [record] = [r for r in records if r["sample"] == i]  # trained once
        assert all(record["trained"]) and record["advantage"] == pytest.approx(
            [expected] * len(record["tokens"]), abs=1e-4
        )
        assert ("log_ratio_engine" in record) is not row.get("given", False)
    own = [
        (row, r)
        for row, r in zip(samples, sorted(records, key=lambda r: r["sample"]), strict=True)
        if not row.get("given")
    ]
    others = [row["score"] for row in samples if row.get("given")]
    assert (
        metrics["critic/score/mean"]
        == metrics["reward_mean"]
        == pytest.approx(np.mean([row["score"] for row, _ in own]))
    )
    assert metrics["critic/rewards/max"] == pytest.approx(max(row["score"] for row, _ in own))
    assert metrics["response_length/mean"] == pytest.approx(np.mean([len(r["tokens"]) for _, r in own]))
    assert metrics["response_length/clip_ratio"] == np.mean([row["finish"] == "length" for row, _ in own])
    assert metrics["given/count"] == len(others) and metrics["given/score/mean"] == pytest.approx(np.mean(others))
    return metrics, own


def test_half_of_each_group_is_given(run):
    run.actor.ppo_mini_batch_size, run.actor.lr = 2, 1e-2
    rows = read_lines(run.data.train_files)
    of_two = [row | {"data_source": ("even", "odd")[i % 2]} for i, row in enumerate(rows, 1)]
    write_lines(pathlib.Path(run.data.train_files), of_two)
    settings.check(run)
    with compilations() as seen:
        train.train(run)
    assert seen.count("jit(advantages)") == 1, "the start compiles what each step runs"
    for step in (1, 2, 3):
        metrics, own = require_as_by_hand(run, step)
        for i, source in enumerate(("even", "odd")):
            scores = [row["score"] for row, _ in own if int(row["uid"].rpartition(":")[2]) % 2 == i]
            assert metrics[f"train/{source}/score"] == pytest.approx(np.mean(scores))
        gaps = np.abs(np.concatenate([r["log_ratio_engine"] for _, r in own]))
        assert metrics["rollout/logp_gap_max"] == pytest.approx(gaps.max(), abs=1e-6) and gaps.max() < 1e-4
        assert abs(metrics["rollout_corr/kl"]) < 1e-5 and metrics["actor/grad_norm"] > 0


@pytest.mark.parametrize(
    ("of", "said"),
    [
        (lambda i: ["1"] * (i + 2), r"returns 5 responses for prompt train:4, .* rollout\.n=4 samples"),
        (lambda i: None, "returns None for prompt train:1; it must be a list of texts"),
    ],
)
def test_each_row_is_checked_before_a_device_is_used(run, of, said):
    write_demonstrations(run, of)
    with pytest.raises(UserError, match=said) as e:
        read_inputs(typed(run))
    assert str(e.value).startswith(f"algorithm.extension='{LUFFY}': `given` ")


def test_rows_without_the_column_are_one_line(run):
    rows = [{k: v for k, v in row.items() if k != "demonstrations"} for row in read_lines(run.data.train_files)]
    write_lines(pathlib.Path(run.data.train_files), rows)
    with pytest.raises(UserError, match=r"`given` raises KeyError: 'demonstrations' for prompt train:1; correct it"):
        read_inputs(typed(run))


def test_every_response_may_be_given(run):
    """Then nothing is sampled: metrics of samples are left out, and β stays, whose KL is of samples."""
    adaptive = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl_type": "adaptive", "ref.path": "policy"}
    run = changed(run, adaptive | {"rollout.n": 2, "actor.ppo_mini_batch_size": 4})
    train.train(run)
    metrics, samples, _ = read_step(run, 3)
    assert metrics["actor/reward_kl_penalty_coeff"] == pytest.approx(run.algorithm.kl_coef)
    assert all(row["given"] for row in samples) and metrics["given/count"] == len(samples) == 8
    assert not {"critic/score/mean", "response_length/mean", "non_finite"} & metrics.keys()
    assert metrics["actor/grad_norm"] > 0 and metrics["rollout_corr/kl"] == metrics["actor/entropy"] == 0


PREFIX = {"data.packing": "prefix", "algorithm.norm_adv_by_std_in_grpo": True}
CORRECTED = {
    "algorithm.old_logprob": "correction",
    "algorithm.rollout_is": "sequence",
    "algorithm.rollout_rs": "token_k1",
    "algorithm.rollout_rs_threshold": "0.8_1.25",
    "algorithm.filter_truncated": True,
}
ASYNC = {"rollout.name": "vllm", "rollout.mode": "async", "rollout.max_staleness": 1, "rollout.logp_tolerance": 100.0}
PARTIAL = {"rollout.partial": True, "rollout.on_update": "abort", "rollout.max_staleness": 2}


@pytest.mark.parametrize(
    ("changes", "function", "at"),
    [
        (PREFIX, train.ppo.learn, 3),
        (ASYNC, train.ppo.learn, 2),
        pytest.param(ASYNC | PARTIAL, train.ppo.learn, 3, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_resumes_to_the_bit(run, engine, monkeypatch, tmp_path, changes, function, at):
    """Of rows with one given response, none, and two."""
    write_demonstrations(run, lambda i: ["12", "9"][: i % 3])
    c = again(changed(run, changes), trainer__save_freq=1)
    train.train(c)
    metrics = [read_step(c, step)[0] for step in (1, 2, 3)]
    assert sum(line.get("given/count", 0) for line in metrics) > 0
    if "rollout.mode" in changes:
        assert [line["rollout/staleness_max"] for line in metrics] == [0, 1, 1] or "rollout.partial" in changes
        assert [line["rollout/stale_dropped"] for line in metrics] == [0, 0, 0]
    stopped = broken_off(c, tmp_path / "other", monkeypatch, in_call_of=function, at=at, error=Stopped(0, "asked"))
    train.train(stopped)
    timed = ("rollout/sampling_s", "rollout/hidden")
    assert untimed(stopped.trainer.run_dir, *timed) == untimed(c.trainer.run_dir, *timed)
    assert weights(stopped.trainer.run_dir) == weights(c.trainer.run_dir)


WITH_CRITIC = """
from jppo.learner.algorithm import Algorithm

def shown():
    return Algorithm(given=lambda prompt: prompt.extra["demonstrations"])
"""


def test_samples_far_from_the_policy_are_corrected_and_given_responses_are_not(run, engine, tmp_path):
    """The sampler answers at random, so that samples are rejected; a critic learns from given ones, too."""
    (tmp_path / "shown.py").write_text(WITH_CRITIC)
    changes = CORRECTED | {"rollout.name": "vllm", "rollout.logp_tolerance": 100.0, "rollout.max_kl_jump": 0.0}
    changes |= {"algorithm.extension": f"{tmp_path / 'shown.py'}:shown", "critic.value_head_std": 0.2}
    changes["algorithm.adv_estimator"] = "gae"
    write_demonstrations(run, lambda i: ["123456789", "9"])  # the first is cut: over-long filtering leaves it
    c = changed(run, changes)
    train.train(c)
    metrics, samples, records = read_step(c, 2)
    trained = {record["sample"] for record in records if all(record["trained"])}
    given_ones = {i for i, row in enumerate(samples) if row.get("given")}
    assert len(given_ones) == 8 and given_ones <= trained
    assert {row["finish"] for i, row in enumerate(samples) if i in given_ones} == {"length", "stop"}
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] > 0.3
    for record in (r for r in records if r["sample"] in given_ones):
        assert sum(record["reward"]) == pytest.approx(samples[record["sample"]]["score"]) and all(record["value"])
    assert metrics["critic/grad_norm"] > 0 and metrics["critic/vf_loss"] > 0
    gaps = [abs(x) for r in records for x in r.get("log_ratio_engine", []) if x is not None]
    assert len(records) > len(given_ones) and metrics["rollout/logp_gap_max"] >= max(gaps)


def test_dynamic_sampling_compares_given_responses_too(run):
    """Of equal samples and another given response, the group is kept: it is what the group learns from."""
    grade = pathlib.Path(run.reward.function.rpartition(":")[0])
    grade.write_text(GRADE.replace("return", "return float(solution_str == '9999') #"))
    write_demonstrations(run, lambda i: ["9999"] if i % 2 else ["11"])
    c = changed(run, {"algorithm.filter_groups": True, "data.train_batch_size": 2, "data.gen_batch_size": 4})
    c = changed(c, {"actor.ppo_mini_batch_size": 2, "algorithm.max_num_gen_batches": 0})
    train.train(c)
    for step in (1, 2, 3):
        metrics, samples, _ = read_step(c, step)
        assert [row["response"] for row in samples if row.get("given")] == ["9999", "9999"]
        assert metrics["given/score/mean"] == 1.0 and metrics["critic/score/mean"] == 0.0
        assert metrics["train/sampled_score"] == 0.0 and metrics["actor/grad_norm"] > 0
