"""The referee: its statistics by hand and by scipy, broken algorithms on a toy task, what it tells, a tiny contest."""

import math
import pathlib
import re
import shutil

import jax
import numpy as np
import pytest
import scipy.stats

from jppo import prove, settings
from jppo.configs import learning
from jppo.errors import UserError
from jppo.learner.views import EpisodeView
from jppo.plugins.prove import contest, tasks, verdict
from jppo.plugins.prove.page import write_page
from jppo.settings import parts
from tests import xla_flags
from tests.make import ROOT, one_line

BAD = f"{ROOT}/benchmarks/known_bad.py"


def test_a_paired_difference_has_students_interval():
    a, b = np.array([0.9, 0.7, 0.8, 0.95]), np.array([0.6, 0.65, 0.5, 0.7])
    theirs = scipy.stats.ttest_rel(a, b).confidence_interval(0.95)
    mean, half = verdict.interval(a - b)
    assert (mean - half, mean + half) == pytest.approx(tuple(theirs))
    # Mean 3, standard deviation sqrt(2.5); 2.776445 is the quantile of 4 degrees of freedom in printed tables.
    assert verdict.interval([1, 2, 3, 4, 5]) == pytest.approx((3.0, 2.776445 * math.sqrt(2.5 / 5)), rel=1e-6)
    assert verdict.interval([0.25, 0.25]) == (0.25, 0.0) and math.isnan(verdict.interval([1.0]).half)


@pytest.mark.parametrize(
    ("differences", "word"),
    [
        ([0.0, 0.0], "tie"),  # equal to the bit
        ([0.10, 0.11, 0.12], "tie"),  # 0.11 ± 0.025 excludes 0 and is within 0.15
        ([0.12, 0.13, 0.14], "better"),  # 0.13 ± 0.025
        ([-0.12, -0.13, -0.14], "worse"),
        ([-0.2, 0.0, 0.2], "undecided"),  # 0 ± 0.497
        ([0.0, 0.1, 0.2], "undecided"),  # 0.1 ± 0.248
        ([0.1, 0.5], "undecided"),  # 0.3 ± 2.54: two seeds
        ([5.0], "undecided"),
    ],
)
def test_the_word_for_differences(differences, word):
    assert verdict.compare(np.array(differences)) == word


def flat(starts, ends):
    """Curves of 10 steps: a first score, then nothing, then two last ones around a mean."""
    return np.array([[start, *[9.0] * 7, end - 0.1, end + 0.1] for start, end in zip(starts, ends, strict=True)])


def test_scores_of_a_task_are_in_units_of_the_better_reference():
    curves = {"PPO": flat([0.25, 0.35], [0.5, 0.5]), "GRPO": flat([7, 7], [0.7, 0.9]), "mine": flat([7, 7], [0.6, 1.1])}
    found = verdict.summarise("chain", curves)
    # The unit is 0.5: GRPO's 0.8 over PPO's first step, 0.3.
    assert found.gain == pytest.approx([(0.6 - 0.25) / 0.5, (1.1 - 0.35) / 0.5])
    assert found.differences["PPO"] == pytest.approx([0.2, 1.2])
    assert found.differences["GRPO"] == pytest.approx([-0.2, 0.4])
    with pytest.raises(UserError, match="chain: no reference learns it in 10 steps"):
        verdict.summarise("chain", curves | {"PPO": flat([1, 1], [1, 1]), "GRPO": flat([0, 0], [1, 1])})


def scores(gains, ppo, grpo):
    """Scores by seed that start from 0 and have the unit 1."""
    finals = {"PPO": np.array(ppo), "GRPO": np.array(grpo), "mine": np.array(gains)}
    differences = {name: finals["mine"] - finals[name] for name in ("PPO", "GRPO")}
    return verdict.TaskScores(np.zeros(len(gains)), finals, finals["mine"], differences)


def test_the_verdict_over_tasks():
    good, even = scores([1.0, 1.01, 1.02], [1.0, 1.0, 1.0], [0.5, 0.5, 0.51]), [1.0, 1.01, 1.02]
    assert verdict.judge({"a": good, "b": good}) == ("passes", "ties with PPO, better than GRPO")
    # Worse by 0.3 on one task and better by 0.3 on the other is a tie in the mean.
    up, down = scores(even, [0.7, 0.7, 0.7], even), scores(even, [1.3, 1.3, 1.3], even)
    assert verdict.judge({"a": up, "b": down}) == ("passes", "ties with PPO, ties with GRPO")
    assert verdict.judge({"a": scores([0.5, 0.51, 0.52], even, even)}) == ("fails", "worse than PPO, worse than GRPO")
    flat_one = scores([0.1, 0.11, 0.12], even, even)  # gains 0.11 ± 0.025 of 1
    assert verdict.judge({"a": good, "b": flat_one, "c": flat_one}) == ("fails", "does not learn b, c")
    unsure = scores([0.2, 1.0, 1.8], even, even)  # 1 ± 2
    assert verdict.judge({"a": unsure, "b": good}) == ("undecided", "undecided a; use more --seeds")
    assert verdict.judge({"a": unsure, "b": flat_one}) == ("fails", "does not learn b")


def made(spec):
    """The algorithm of a setting, as a run makes it."""
    c = settings.recipe("gsm8k")
    c.rollout.n = 4
    setattr(c.algorithm, "extension" if ":" in spec else "adv_estimator", spec)
    return parts.estimator(settings.typed(c))


def toy_curves(spec, seeds, steps=40, prompts=4, n=8, rate=0.05):
    """The mean scores of a softmax policy over four answers, each of which scores 0, 0.2, 0.4 or 1, in numpy."""
    outcome, group = made(spec).outcome, np.repeat(np.arange(prompts), n)
    first = jax.numpy.array(group * n)  # the place of the group's first sample
    advantages = jax.jit(lambda score: outcome(EpisodeView({"score": score, "group": first}.__getitem__)))
    worth, curves = np.array([0, 0.2, 0.4, 1.0]), []
    for seed in seeds:
        rng, logits = np.random.default_rng(seed), np.zeros((prompts, 4))
        curves.append([])
        for _ in range(steps):
            p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
            answer = (rng.random((prompts * n, 1)) > p[group].cumsum(axis=1)[:, :3]).sum(axis=1)
            weight = np.asarray(advantages(worth[answer].astype(np.float32)))
            np.add.at(logits, group, rate * weight[:, None] * (np.eye(4)[answer] - p[group]))
            curves[-1].append(worth[answer].mean())
    return np.array(curves)


@pytest.mark.parametrize(
    ("spec", "seeds", "judged"),
    [
        ("grpo", range(5), ("passes", "ties with PPO, ties with GRPO")),  # its twin, to the bit
        ("grpo", range(5, 10), ("passes", "ties with PPO, ties with GRPO")),  # and by the margin
        (f"{BAD}:sign_flipped", range(5), ("fails", "does not learn toy")),
        (f"{BAD}:other_sample", range(5), ("fails", "does not learn toy")),
        (f"{BAD}:constant_reward", range(5), ("fails", "does not learn toy")),
    ],
    ids=["twin", "other seeds", "sign flipped", "other sample", "constant reward"],
)
def test_equal_algorithms_tie_and_broken_ones_fail_on_a_toy_task(spec, seeds, judged):
    reference = toy_curves("grpo", range(5))
    assert reference[:, 0].mean() < 0.5 and reference[:, -8:].mean() > 0.8
    by_name = {"PPO": reference, "GRPO": reference, "tried": toy_curves(spec, seeds)}
    assert verdict.judge({"toy": verdict.summarise("toy", by_name)}) == judged


def test_an_algorithm_chooses_its_samples_and_its_settings(tmp_path):
    ppo, grpo = (contest.enter(name, tmp_path, label=name) for name in ("gae", "grpo"))
    assert ppo.overrides == learning.CRITIC | {
        "algorithm.adv_estimator": "gae", "rollout.n": 1, "data.train_batch_size": 64
    }  # fmt: skip
    assert grpo.overrides == {"algorithm.adv_estimator": "grpo", "rollout.n": 8, "data.train_batch_size": 8}
    assert ppo.critic and not grpo.critic
    four = contest.enter("grpo", tmp_path, ["--config.rollout.n=4", "--config.actor.lr=0.0"], steps=3)
    (run,) = four.plan_all(["chain"], 1)
    config, _ = settings.parse(list(run.arguments), "", settings.default())
    assert (config.rollout.n, config.data.train_batch_size, config.actor.lr) == (4, 16, 0.0)
    assert (config.trainer.total_training_steps, config.trainer.seed) == (3, 1)
    assert config.model.path == f"{tmp_path}/tasks/chain/sft/hf" and config.trainer.run_dir == str(run.folder)
    assert f"--config.critic.path={tmp_path}/tasks/rlhf/rm/hf" in ppo.plan("rlhf", 1).arguments
    assert not [word for word in grpo.plan("rlhf", 1).arguments if "critic" in word]
    for change, problem in (
        ("--config.data.max_response_length=9", "an algorithm may change settings of"),
        ("--config.rollout.n=3", "must divide 64"),
        ("--config.algorithm.filter_groups=True", "algorithm.filter_groups samples until"),
        ("--seed=3", "an algorithm may change settings of"),
    ):
        with pytest.raises(UserError, match=problem):
            contest.enter("grpo", tmp_path, [change])


def test_the_folder_of_an_algorithm_follows_from_its_files_and_settings(tmp_path):
    shutil.copy(BAD, tmp_path / "mine.py")
    spec = f"{tmp_path}/mine.py:constant_reward"
    first = contest.enter(spec, tmp_path)
    assert first.folder.name.startswith("constant_reward-") and first.overrides["rollout.n"] == 1
    assert contest.enter(spec, tmp_path) == first
    assert contest.enter(spec, tmp_path, ["--config.actor.lr=0.1"]).folder != first.folder
    (tmp_path / "mine.py").write_text((tmp_path / "mine.py").read_text() + "# changed\n")
    assert contest.enter(spec, tmp_path).folder != first.folder


def test_the_folder_of_a_module_follows_from_its_files(tmp_path, monkeypatch):
    package = tmp_path / "proved"
    (package / "inner").mkdir(parents=True)
    shutil.copy(BAD, package / "inner/rules.py")
    for file in (package / "__init__.py", package / "inner/__init__.py"):
        file.touch()
    (package / "mine.py").write_text("from proved.inner.rules import constant_reward\n")
    monkeypatch.syspath_prepend(tmp_path)
    first = contest.enter("proved.mine:constant_reward", tmp_path).folder
    assert contest.enter("proved.mine:constant_reward", tmp_path).folder == first
    with (package / "inner/rules.py").open("a") as file:
        file.write("# changed\n")
    assert contest.enter("proved.mine:constant_reward", tmp_path).folder != first


def test_the_page_has_scores_words_and_curves(tmp_path):
    curves = {"PPO": flat([0.25, 0.35], [0.5, 0.5]), "GRPO": flat([7, 7], [0.7, 0.9]), "mine": flat([7, 7], [0.5, 0.5])}
    scores = {"chain": verdict.summarise("chain", curves)}
    page = write_page(tmp_path, verdict.judge(scores), ["mine", "a machine"], {"chain": curves}, scores)
    text = page.read_text()
    assert text.startswith("# mine: undecided\n\n**undecided chain; use more --seeds**\n")
    # Of two seeds: 12.706 times the deviation over the root of 2, that is half the distance.
    start, grpo = f"0.300 ± {12.7062 * 0.05:.3f}", f"0.800 ± {12.7062 * 0.1:.3f}"
    assert (
        f"| chain | {start} | 0.500 ± 0.000 | {grpo} | 0.500 ± 0.000 | 0.400 ± {12.7062 * 0.1:.3f} undecided |" in text
    )
    assert f"| 0.000 ± 0.000 tie | -0.600 ± {12.7062 * 0.2:.3f} undecided |" in text
    assert "](chain.svg)" in text and text.endswith("- a machine\n")
    assert {"PPO", "GRPO", "mine"} <= set(re.findall(r">([^<>]+)</text>", (tmp_path / "chain.svg").read_text()))
    crashed = write_page(tmp_path, verdict.Verdict("fails", "crashed: mine chain seed 1: why"), ["mine"], {}, {})
    assert crashed.read_text() == "# mine: fails\n\n**crashed: mine chain seed 1: why**\n\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gae", "--tasks=chain,sums"], "'sums' is not one of quickstart, rlhf, chain, bisection"),
        (["gae", "--seeds=1"], "--seeds=1 must be 2 or more"),
        (["gae", "--tasks=rlhf"], "--stories_model=None must be the directory of a TinyStories Llama"),
        (["gea"], "algorithm.adv_estimator='gea' is not known"),
        (["none.py:algorithm"], "none.py"),
        (["gae", "--config.trainer.seed=2"], "all else is equal for all"),
    ],
)
def test_it_refuses(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert said in one_line(capsys, prove.main, *words)


def test_an_interrupt_is_one_line(tmp_path, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(contest, "prepare_all", interrupt)
    assert one_line(capsys, prove.main, "rloo", "--tasks=chain", f"--out={tmp_path}", code=130) == "interrupted\n"


@pytest.mark.timeout(1800)
def test_a_contest_with_a_twin_a_broken_algorithm_and_a_crash(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tasks, "IMITATION_STEPS", 60)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", xla_flags.quick())
    folder = tmp_path / contest.base_name() / "tasks/bisection"
    tasks.prepare("bisection", folder, None)
    words = ["--tasks=bisection", "--seeds=2", "--steps=10", f"--out={tmp_path}"]

    def proved(algorithm):
        with pytest.raises(SystemExit) as ended:
            prove.main([algorithm, *words])
        *_, said, page = capsys.readouterr().out.splitlines()
        assert ended.value.code == 1  # two seeds show too little
        return said, pathlib.Path(page).read_text()

    (tmp_path / "mine.py").write_text(CRASHES)
    said, text = proved(f"{tmp_path}/mine.py:crashes")
    assert "fails: crashed: " in said and "division by zero" in said and "division by zero" in text
    _, text = proved("gae")
    assert "| 0.000 ± 0.000 tie |" in text and not list(folder.parents[1].glob("gae-*/*/checkpoints"))
    before = {path: path.stat().st_mtime_ns for path in folder.parents[1].glob("[gGP]*/*/metrics.jsonl")}
    assert len(before) == 6  # of gae, PPO and GRPO
    said, text = proved(f"{BAD}:sign_flipped")
    assert said == "known_bad.py:sign_flipped fails: does not learn bisection" and "](bisection.svg)" in text
    assert before == {path: path.stat().st_mtime_ns for path in before}


CRASHES = """
from jppo.learner.algorithm import Algorithm

def crashes():
    return Algorithm(outcome=lambda view: view.score, listen=lambda memory, step: {"mine/x": 1 / 0})
"""
