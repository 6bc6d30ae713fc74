"""An algorithm in one file: whole runs of examples/algorithms, killed and resumed to the bit."""

import json
import pathlib
import re

import numpy as np
import pytest

from jppo import settings, train
from jppo.data.memory import Curriculum, from_text
from jppo.data.stream import Cursor, next_batch
from jppo.errors import UserError
from jppo.rewards import graders
from jppo.run.inputs import read_inputs
from jppo.runlog.watchdog import Stopped
from jppo.settings import parts
from jppo.types import Reward
from tests.make import ROOT, read_lines, untimed, weights
from tests.test_resume import again, broken_off

pytestmark = pytest.mark.usefixtures("quick_compilation")
EXAMPLES = ROOT / "examples/algorithms"
TIMES = ("rollout/sampling_s", "rollout/hidden")


@pytest.fixture
def run(small_run, monkeypatch):
    """changes -> the config of a small run whose random responses are worth something."""
    monkeypatch.setitem(graders.GRADERS.own, "arithmetic", lambda text, _: Reward(int(f"0{text}"[-1]) / 9, {}, None))

    def run(extension, options=(), **changes):
        small_run.algorithm.extension = str(extension)
        small_run.algorithm.options.update(dict(options))
        return again(small_run, **changes)

    return run


def state_of(config, step):
    about = pathlib.Path(config.trainer.run_dir) / f"checkpoints/{step}/about/metadata"
    return from_text(json.loads(about.read_text())["meta"]["cursor"]["curriculum"])


@pytest.mark.parametrize(
    "changes",
    [
        dict(algorithm__adv_estimator="grpo"),
        dict(rollout__mode="async", rollout__max_staleness=1, rollout__n=2, data__packing="prefix"),
        dict(algorithm__filter_groups=True, rollout__n=2, data__train_batch_size=2, trainer__total_training_steps=3),
    ],
    ids=["synchronous", "asynchronous", "dynamic"],
)
def test_spo_as_a_users_file_is_resumed_to_the_bit(run, monkeypatch, tmp_path, changes):
    c = run(f"{EXAMPLES}/spo.py:spo", dict(forget=0.5), **changes)
    train.train(c)
    other = broken_off(c, tmp_path / "other", monkeypatch, in_call_of=train.ppo.learn, at=2, error=Stopped(0, "asked"))
    train.train(other)
    assert untimed(other.trainer.run_dir, *TIMES) == untimed(c.trainer.run_dir, *TIMES)
    assert weights(other.trainer.run_dir) == weights(c.trainer.run_dir)
    last = c.trainer.total_training_steps
    np.testing.assert_array_equal(state_of(other, last), state_of(c, last))
    assert not (state_of(c, last) == state_of(c, last - 1)).all(), "the last step is remembered"


def test_a_listener_alone_changes_nothing_of_a_run(run, tmp_path):
    """The estimator, here gae with its critic, stays as it is."""
    plain = run("", trainer__run_dir=str(tmp_path / "plain"))
    train.train(plain)
    c = run(f"{EXAMPLES}/histogram.py:histogram", dict(bins=4))
    train.train(c)
    folder = pathlib.Path(c.trainer.run_dir)
    assert untimed(folder, "mine/") == untimed(plain.trainer.run_dir)
    assert weights(folder) == weights(plain.trainer.run_dir)
    logged = [line for line in read_lines(folder / "metrics.jsonl") if line["step"]]
    rows = read_lines(folder / "advantages.jsonl")
    assert [row["step"] for row in rows] == [line["step"] for line in logged] == [1, 2]
    for row, line in zip(rows, logged, strict=True):
        assert len(row["counts"]) == 4 and sum(row["counts"]) == line["response_length/mean"] * 4
        assert line["mine/zero_advantages"] == 0


def test_rloo_by_length_is_rloo_divided_by_the_length(run):
    """Against the scores and the tokens that the run has written; gae's whitening is not inherited."""
    given = dict(rollout__n=2, data__train_batch_size=2, trainer__token_samples=4)
    c = run(f"{EXAMPLES}/rloo_length.py:rloo_length", dict(power=2), **given)
    train.train(c)
    folder = pathlib.Path(c.trainer.run_dir) / "samples"
    for step in (1, 2):
        scores = [row["score"] for row in read_lines(folder / f"step_{step}.jsonl")]
        for row in read_lines(folder / f"tokens_{step}.jsonl"):
            i, found = row["sample"], [x for x in row["advantage"] if x is not None]
            assert found == pytest.approx([(scores[i] - scores[i ^ 1]) / len(found) ** 2] * len(found), abs=1e-6)


OTHER = "reinforce_plus_plus"  # an estimator without a critic, as COUNTS has none
COUNTS = """
import numpy as np
from jppo.learner.algorithm import Algorithm

def columns(memory, places):
    found = {"seen": memory["seen"][places], "place": places}
    memory["seen"][:] = 77  # of a copy
    return found

def update(memory, step):
    for place in np.unique(step.places):
        memory["seen"][place] += 1
    memory["steps"].append(step.number)
    return memory

def listen(memory, step):
    assert memory["steps"][-1] == step.number, "the memory after its update"
    assert len(step.prompts) == len(step.places) == len(step.trajectories) == len(step.rewards) == len(step.rows)
    for array in (step.batch["advantage"], step.batch.mask, step.trajectories[0].tokens):
        try:
            array[:] = 1
        except ValueError:
            continue
        raise AssertionError("an array can be written")
    episode = step.batch.arrays.get("episode", np.arange(len(step.batch.mask)))
    there = np.flatnonzero(step.batch.mask.any(axis=1))
    assert [t.uid for t in step.trajectories] == [prompt.uid for prompt in step.prompts]
    for row in there:
        [i] = np.flatnonzero(step.rows == episode[row])
        np.testing.assert_array_equal(step.batch["advantage"][row][step.batch.mask[row]], step.places[i])
    dropped = step.rows < 0
    branches = (episode != np.arange(len(episode))).sum()
    seen = step.batch["column of the memory: seen"][there].max()
    return {"mine/rows": len(there), "mine/dropped": dropped.sum(), "mine/branches": branches, "mine/seen": seen}

def counts():
    return Algorithm(
        init=lambda prompts: {"seen": np.zeros(len(prompts), np.int16), "steps": []}, columns=columns, update=update,
        outcome=lambda view: view.column("place") + 0 * view.column("seen") + 0 * view.score, listen=listen,
    )
"""


PLACE, LAST = '"place": places}', "update=update,"


@pytest.fixture
def counts(tmp_path):
    (tmp_path / "counts.py").write_text(COUNTS)
    return f"{tmp_path}/counts.py:counts"


def mine(config):
    rows = [
        {k: v for k, v in row.items() if k.startswith("mine/")}
        for row in read_lines(f"{config.trainer.run_dir}/metrics.jsonl")
    ]
    return [row for row in rows if row]


@pytest.mark.parametrize("mix", ["", "train=0.5,other=0.5"])
def test_a_memory_goes_with_the_datas_own_order(run, counts, tmp_path, mix):
    """Its columns are of the memory before the step's update; functions get copies, and read-only arrays."""
    more = {}
    if mix:
        (tmp_path / "other.jsonl").write_text((tmp_path / "train.jsonl").read_text())
        more = dict(data__train_files=f"{tmp_path}/train.jsonl,{tmp_path}/other.jsonl", data__mix=mix)
    plain = run("", trainer__run_dir=str(tmp_path / "plain"), trainer__total_training_steps=4, **more)
    train.train(plain)
    c = run(counts, trainer__total_training_steps=4, **more)
    train.train(c)
    memory = state_of(c, 4)
    assert memory["steps"] == [1, 2, 3, 4] and memory["seen"].dtype == np.int16 and memory["seen"].sum() == 16
    assert [row["mine/rows"] for row in mine(c)] == [4] * 4
    assert mix or [row["mine/seen"] for row in mine(c)] == [0, 0, 1, 1], "8 prompts in epochs of two steps"
    for step in (1, 2, 3, 4):
        asked = [
            [row["uid"] for row in read_lines(f"{one.trainer.run_dir}/samples/step_{step}.jsonl")] for one in (c, plain)
        ]
        assert asked[0] == asked[1]


def test_dynamic_sampling_shows_what_it_drops(run, counts):
    c = run(counts, algorithm__filter_groups=True, rollout__n=2, data__train_batch_size=2, data__gen_batch_size=4)
    train.train(c)
    for row, line in zip(
        mine(c), [line for line in read_lines(f"{c.trainer.run_dir}/metrics.jsonl") if line["step"]], strict=True
    ):
        evicted, surplus = (
            line[f"training/filter_groups/{name}"] for name in ("evicted_samples", "discarded_surplus_samples")
        )
        assert row["mine/dropped"] == 2 * (evicted + surplus) > 0
    assert state_of(c, 2)["seen"].sum() > 4, "the dropped prompts are remembered too"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"mine/rows"', '"critic/score/mean"', "listen returns 'critic/score/mean', a name of the step's own metrics"),
        ('"mine/rows"', '"actor/pg_loss"', "listen returns 'actor/pg_loss', a name of the step's own metrics; use"),
        ('"mine/rows"', '"step"', "listen returns 'step', a name of the step's own metrics"),
        ('"mine/rows"', '"val/score"', "listen returns 'val/score', a name of the step's own metrics"),
        ("len(there)", '"many"', "listen raises ValueError: could not convert string to float: 'many'; correct it"),
        ('memory["steps"]', 'memory["other"]', "update raises KeyError: 'other'; correct it"),
        ("return memory\n", "return {1j}\n", "update raises TypeError: Object of type set is not JSON serializable"),
    ],
)  # fmt: skip
def test_a_host_function_that_fails_costs_its_step_alone(run, counts, tmp_path, old, new, said):
    """It is called before the update of the weights."""
    (tmp_path / "counts.py").write_text(
        COUNTS.replace(old, new)
        .replace(
            "def update(memory, step):", "def update(memory, step):\n    if step.number == 1:\n        return memory"
        )
        .replace("def listen(memory, step):", "def listen(memory, step):\n    if step.number == 1:\n        return {}")
    )
    c = run(counts, trainer__save_freq=-1)
    with pytest.raises(UserError, match=re.escape(said)) as e:
        train.train(c)
    assert str(e.value).startswith(f"algorithm.extension={counts!r}: ") and "\n" not in str(e.value)
    assert (pathlib.Path(c.trainer.run_dir) / "checkpoints/1").is_dir()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (PLACE, '"plaze": places}', "no 'place', which is read; it returns 'seen', 'plaze'; did you mean 'plaze'?"),
        (PLACE, '"place": places[1:]}', "'place' as int64 of shape (3,); it must have a number for each of the 4"),
        (PLACE, '"place": [str(p) for p in places]}', "'place' as <U1 of shape (4,); it must have a number for"),
        ("return found", "return places", "columns returns ndarray; it must return arrays by name, as a dict"),
        ("columns=columns, ", "", "it reads a column of its memory, and has no function `columns`; correct it"),
        ("len(prompts), np.int16)", "prompts.count)", "init raises TypeError"),
        (
            LAST,
            f"{LAST} prompts=lambda memory, rng, n: [0] * n,",
            "prompts must return 4 different places of prompts, not",
        ),
        (
            LAST,
            f"{LAST} prompts=lambda memory, rng, n: range(7, 7 + n),",
            "prompts returns indices outside 0 to 7; correct",
        ),
    ],
)
def test_a_memory_that_cannot_be_is_one_line_before_anything_starts(run, counts, tmp_path, old, new, said):
    assert COUNTS.count(old) == 1
    (tmp_path / "counts.py").write_text(COUNTS.replace(old, new))
    with pytest.raises(UserError, match=re.escape(said)) as e:
        read_inputs(settings.typed(run(counts)))
    assert f"algorithm.extension={counts!r}: " in str(e.value) and "\n" not in str(e.value)


SAMPLER = """
class Least:
    def __init__(self, prompts, seed): pass
    def begin(self): return 0
    def batch(self, state, size): return range(size), state
    def update(self, state, places, scores): return state
def backwards(prompts, epoch, seed): return range(len(prompts))[::-1]
"""


def test_one_thing_alone_chooses_the_prompts(run, counts, tmp_path):
    (tmp_path / "order.py").write_text(SAMPLER)
    spo, said = (
        f"{EXAMPLES}/spo.py:spo",
        "chooses the prompts of a step, and so does the function `prompts` of algorithm.ext",
    )
    for setting, value in (("data__sampler", f"{tmp_path}/order.py:backwards"), ("data__mix", "train=1")):
        with pytest.raises(UserError, match=f"{setting.replace('__', '.')}='.*' {said}"):
            run(spo, **{setting: value})
    with pytest.raises(
        UserError, match=r"order\.py:Least' is a class with a state, and algorithm.extension=.* has a memory"
    ):
        read_inputs(settings.typed(run(counts, data__sampler=f"{tmp_path}/order.py:Least")))
    read = read_inputs(settings.typed(run(counts, data__sampler=f"{tmp_path}/order.py:backwards")))
    assert next_batch(Cursor(), n=8, batch_size=4, seed=0, shuffle=True, order_of=read.train.order_of)[0].tolist() == [
        7,
        6,
        5,
        4,
    ]
    listener = run(f"{EXAMPLES}/histogram.py:histogram", data__sampler=f"{tmp_path}/order.py:Least")
    assert isinstance(read_inputs(settings.typed(listener)).train.order_of, Curriculum)


def test_rules_between_settings_hold_and_name_the_extension(run, counts):
    rloo = f"{EXAMPLES}/rloo_length.py:rloo_length"
    with pytest.raises(
        UserError, match=rf"algorithm\.extension='{rloo}' compares the samples of a prompt, and rollout\.n=1"
    ):
        run(rloo)
    with pytest.raises(
        UserError, match=rf"critic_warmup=1 trains a critic, and algorithm\.extension='{counts}' has none"
    ):
        run(counts, trainer__critic_warmup=1)
    histogram = f"{EXAMPLES}/histogram.py:histogram"
    with pytest.raises(
        UserError, match=r"algorithm\.adv_estimator='grpo' compares the samples of a prompt, and rollout\.n=1"
    ):
        run(histogram, algorithm__adv_estimator="grpo")
    assert not parts.estimator(settings.typed(run(counts, algorithm__adv_estimator="grpo"))).compares


def test_a_memory_belongs_to_its_extension(run, counts, tmp_path):
    c = run(counts, trainer__total_training_steps=1)
    train.train(c)
    (tmp_path / "others.py").write_text(COUNTS)
    with pytest.raises(
        UserError, match=r"algorithm\.extension='' was '.*counts' when the checkpoint was written, with its"
    ):
        train.train(again(c, algorithm__extension="", algorithm__adv_estimator=OTHER, trainer__total_training_steps=2))


def test_an_algorithm_by_name_may_have_a_memory_too(run, tmp_path):
    """As adv_estimator, whose function gets the settings; errors name that."""
    (tmp_path / "named.py").write_text(COUNTS.replace("def counts():", "def counts(c):"))
    named = f"{tmp_path}/named.py:counts"
    c = run("", algorithm__adv_estimator=named, trainer__total_training_steps=2)
    train.train(c)
    assert state_of(c, 2)["steps"] == [1, 2]
    with pytest.raises(
        UserError, match=rf"algorithm\.adv_estimator='{OTHER}' was '.*counts' when the checkpoint was written, wi"
    ):
        train.train(again(c, algorithm__adv_estimator=OTHER, trainer__total_training_steps=3))
    (tmp_path / "named.py").write_text(
        COUNTS.replace("def counts():", "def counts(c):").replace("return found", "return 3")
    )
    with pytest.raises(
        UserError, match=rf"algorithm\.adv_estimator='{named}': columns returns int; it must return arrays"
    ):
        read_inputs(settings.typed(c))


@pytest.mark.parametrize("staleness", [1, 2])
def test_prompts_are_chosen_ahead_by_the_memory_of_that_time(run, counts, tmp_path, staleness):
    """Each step takes the prompts that fewest steps have seen when it was asked for: `staleness` updates before it."""
    chosen = "lambda memory, rng, n: np.lexsort((np.arange(8), memory['seen']))[:n]"
    (tmp_path / "counts.py").write_text(COUNTS.replace("update=update,", f"update=update, prompts={chosen},"))
    steps = dict(trainer__total_training_steps=6, trainer__max_ckpt_to_keep=6)
    c = run(counts, rollout__mode="async", rollout__max_staleness=staleness, **steps)
    train.train(c)
    seen, places = [np.zeros(8, int)], []
    for step in range(1, 7):
        known = seen[max(0, step - 1 - staleness)]
        places.append(np.lexsort((np.arange(8), known))[:4])
        after = seen[-1].copy()
        after[places[-1]] += 1
        seen.append(after)
        np.testing.assert_array_equal(state_of(c, step)["seen"], after, err_msg=f"step {step}")


def test_a_listener_has_no_metric_of_a_term(run, tmp_path):
    file = tmp_path / "loss.py"
    file.write_text("""
from jppo.learner.algorithm import Algorithm, Term


def made():
    terms = (Term(lambda view: -view.advantage * view.logprob, "mine/loss"),)
    return Algorithm(terms=terms, listen=lambda memory, step: {"mine/loss": 1.0})
""")
    with pytest.raises(UserError, match="listen returns 'mine/loss', a name of the step's own metrics"):
        train.train(run(f"{file}:made"))
