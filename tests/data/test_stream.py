import dataclasses
import json

import numpy as np
import pytest

from jppo.data.stream import Cursor, MixPart, mix_parts, next_batch, parse_mix, seen, steps_per_epoch, user_order
from jppo.errors import UserError
from jppo.types import Prompt, Reward


def draw(cursor, steps, **kw):
    batches = []
    for _ in range(steps):
        batch, cursor = next_batch(cursor, **kw)
        batches.append(batch)
    return np.stack(batches), cursor


def test_an_epoch_draws_no_prompt_twice_and_drops_the_part_batch():
    batches, cursor = draw(Cursor(), 3, n=10, batch_size=3, seed=0, shuffle=True)
    assert len(set(batches.ravel())) == 9 and set(batches.ravel()) <= set(range(10))
    assert cursor == Cursor(0, 9)
    _, cursor = next_batch(cursor, n=10, batch_size=3, seed=0, shuffle=True)
    assert cursor == Cursor(1, 3)
    assert steps_per_epoch(10, 3) == 3


def test_unshuffled_is_file_order():
    batches, _ = draw(Cursor(), 4, n=7, batch_size=3, seed=5, shuffle=False)
    assert batches.tolist() == [[0, 1, 2], [3, 4, 5], [0, 1, 2], [3, 4, 5]]


def test_resume_in_the_middle_of_an_epoch_draws_the_same():
    kw = {"n": 50, "batch_size": 4, "seed": 3, "shuffle": True}
    whole, _ = draw(Cursor(), 40, **kw)
    first, cursor = draw(Cursor(), 17, **kw)
    rest, _ = draw(Cursor(cursor.epoch, cursor.index), 23, **kw)
    np.testing.assert_array_equal(whole, np.concatenate([first, rest]))


def test_epochs_and_seeds_shuffle_differently():
    kw = {"n": 100, "batch_size": 100, "shuffle": True}
    both, _ = draw(Cursor(), 2, seed=1, **kw)
    other, _ = draw(Cursor(), 1, seed=2, **kw)
    assert (both[0] != both[1]).any() and (both[0] != other[0]).any()
    assert sorted(both[1]) == list(range(100))


@pytest.mark.parametrize("batch_size", [0, 11])
def test_a_batch_must_fit(batch_size):
    with pytest.raises(UserError, match=f"train_batch_size={batch_size} .* 10"):
        next_batch(Cursor(), n=10, batch_size=batch_size, seed=0, shuffle=True)


def part(name, first, n, weight=None):
    return MixPart(name, np.arange(first, first + n), weight)


def through_json(cursor):
    return Cursor(**json.loads(json.dumps(dataclasses.asdict(cursor))))


MIXED = (part("a", 0, 30, 0.7), part("b", 30, 50, 0.2), part("c", 80, 20, 0.1))


def test_a_mixed_batch_has_of_each_source_as_its_weight_says():
    kw = {"n": 100, "batch_size": 16, "seed": 1, "shuffle": True, "parts": MIXED}
    batches, cursor = draw(Cursor(), 200, **kw)
    counts = np.stack([[np.isin(batch, p.indices).sum() for p in MIXED] for batch in batches])
    for i, p in enumerate(MIXED):  # 11.2, 3.2 and 1.6 of 16
        assert set(counts[:, i]) == {int(p.weight * 16), int(p.weight * 16) + 1}
        assert counts[:, i].mean() == pytest.approx(p.weight * 16, abs=0.1)
    assert all(len(set(batch)) == 16 for batch in batches)
    assert (cursor.epoch, cursor.index) == (33, 32)  # 6 batches are an epoch of 100 prompts
    assert len({tuple(np.isin(batch, MIXED[0].indices)) for batch in batches}) > 100  # no source stands always first


def test_each_mixed_source_is_passed_over_before_it_comes_again():
    kw = {"n": 100, "batch_size": 10, "seed": 1, "shuffle": True, "parts": MIXED}
    batches, _ = draw(Cursor(), 40, **kw)
    b = [i for batch in batches for i in sorted(batch) if 30 <= i < 80]  # 2 a batch, 50 of them
    assert sorted(b[:50]) == list(range(30, 80)) and len(b) == 80
    other, _ = draw(Cursor(), 40, **(kw | {"seed": 2}))
    assert (batches != other).any()
    plain, _ = draw(Cursor(), 3, **(kw | {"shuffle": False}))
    assert [i for batch in plain for i in sorted(batch) if 30 <= i < 80] == [30, 31, 32, 33, 34, 35]


@pytest.mark.parametrize("parts", [MIXED, tuple(part(p.name, p.indices[0], len(p.indices)) for p in MIXED), ()])
@pytest.mark.parametrize("at", [1, 17, 33])
def test_resume_is_exact_with_several_sources(parts, at):
    kw = {"n": 100, "batch_size": 16, "seed": 3, "shuffle": True, "parts": parts}
    whole, _ = draw(Cursor(), 40, **kw)
    first, cursor = draw(Cursor(), at, **kw)
    rest, _ = draw(through_json(cursor), 40 - at, **kw)
    np.testing.assert_array_equal(whole, np.concatenate([first, rest]))


@pytest.mark.parametrize("mix", [{"a": 1.0, "b": 3.0}, {}])
def test_the_order_of_the_files_is_no_part_of_the_place(mix):
    """Prompt 7 of a stands elsewhere in the set when b is read first; it is drawn at the same time."""
    names = np.array([f"a{i}" for i in range(20)] + [f"b{i}" for i in range(40)])
    forth = (np.arange(60), (part("a", 0, 20), part("b", 20, 40)))
    back = (np.roll(np.arange(60), -20), (part("b", 0, 40), part("a", 40, 20)))

    def drawn(cursor, steps, order, parts):
        sources = [names[i][0] for i in order]
        weights = {name: weight / 4 for name, weight in mix.items()}
        parts = mix_parts(weights, parts, sources, batch_size=8) if mix else parts
        batches, cursor = draw(cursor, steps, n=60, batch_size=8, seed=1, shuffle=True, parts=parts)
        return names[order][batches].tolist(), through_json(cursor)

    whole, _ = drawn(Cursor(), 30, *forth)
    got, cursor = drawn(Cursor(), 10, *forth)
    for steps, setting in ((9, back), (11, forth)):
        more, cursor = drawn(cursor, steps, *setting)
        got += more
    assert got == whole


def test_unshuffled_is_the_settings_order_of_files():
    parts = (part("b", 0, 4), part("a", 4, 4))
    batches, _ = draw(Cursor(), 2, n=8, batch_size=4, seed=1, shuffle=False, parts=parts)
    assert batches.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_place_in_other_sources_is_refused():
    kw = {"n": 100, "batch_size": 10, "seed": 1, "shuffle": True}
    _, cursor = draw(Cursor(), 2, parts=MIXED, **kw)
    with pytest.raises(UserError, match=r"data.mix names 2 sources, but the checkpoint has 3"):
        next_batch(cursor, parts=(part("a", 0, 50, 0.5), part("b", 50, 50, 0.5)), **kw)
    unmixed, _ = next_batch(cursor, parts=(), **kw)
    assert len(unmixed) == 10  # mixing may be turned off


def test_weights_are_scaled():
    assert parse_mix("a=7, openai/gsm8k = 3") == {"a": 0.7, "openai/gsm8k": 0.3}
    assert parse_mix("") == {}


@pytest.mark.parametrize("mix", ["a", "a=", "=1", "a=0", "a=-1", "a=nan", "a=inf", "a=b"])
def test_a_weight_that_is_none(mix):
    with pytest.raises(UserError, match=r"data.mix=.* must be a file's stem or a data source, =, and a number above 0"):
        parse_mix(mix)


def test_weights_that_do_not_fit_the_prompts():
    parts, sources = (part("a", 0, 4), part("b", 4, 4)), ["x"] * 6 + ["y"] * 2
    by_source = mix_parts({"x": 0.5, "y": 0.5}, parts, sources, batch_size=4)
    assert [p.indices.tolist() for p in by_source] == [[0, 1, 2, 3, 4, 5], [6, 7]]
    for weights, batch_size, said in (
        ({"a": 1.0}, 2, "gives no weight to a prompt of 'b' whose data_source is 'x'"),
        ({"a": 0.5, "b": 0.25, "x": 0.25}, 2, "gives two weights to a prompt of 'a'"),
        ({"a": 0.5, "b": 0.4, "z": 0.1}, 2, "up to 1 prompts of 'z', which has 0"),
        ({"a": 0.75, "b": 0.25}, 8, "up to 6 prompts of 'a', which has 4"),
    ):
        with pytest.raises(UserError, match=said):
            mix_parts(weights, parts, sources, batch_size=batch_size)
    with pytest.raises(UserError, match="'a' twice"):
        parse_mix("a=1,a=2")


CURRICULUM = """
import numpy as np
def short_first(prompts, epoch, seed):
    order = np.argsort([len(prompt) for prompt in prompts], kind="stable")
    return order if epoch == 0 else order[::-1]
def column(prompts, epoch, seed):
    return short_first(prompts, epoch, seed)[:, None]
def once_more(prompts, epoch, seed):
    return [0, 1, 1]
def broken(prompts, epoch, seed):
    return order
"""


@pytest.mark.parametrize("name", ["short_first", "column"])
def test_a_user_defined_order_goes_by_epochs(tmp_path, name):
    (tmp_path / "mine.py").write_text(CURRICULUM)
    order = user_order(f"{tmp_path}/mine.py:{name}", ["long one", "a", "two"], seed=1, batch_size=1)
    kw = dict(n=3, batch_size=1, seed=1, shuffle=True, order_of=order)
    assert draw(Cursor(), 6, **kw)[0].ravel().tolist() == [1, 2, 0, 0, 2, 1]
    assert draw(through_json(draw(Cursor(), 4, **kw)[1]), 2, **kw)[0].ravel().tolist() == [2, 1], "a resume"


@pytest.mark.parametrize(
    "name,said",
    [
        ("once_more", r"returns int64 of shape \(3,\) for epoch 0; it must return each index from 0 to 2 once"),
        ("broken", r"raises NameError: name 'order' is not defined for epoch 0; correct it"),
        ("other", r"defines no 'other'"),
    ],
)
def test_a_wrong_order_is_refused(tmp_path, name, said):
    (tmp_path / "mine.py").write_text(CURRICULUM)
    with pytest.raises(UserError, match=rf"data\.sampler='.*mine\.py:{name}'.* {said}"):
        user_order(f"{tmp_path}/mine.py:{name}", ["a", "b", "c"], seed=1, batch_size=1)


LEARNING = """
import numpy as np
class Uncertain:
    def __init__(self, prompts, seed):
        self.n, self.seed = len(prompts), seed
    def begin(self):
        return {"step": 0, "mean": [0.5] * self.n}
    def batch(self, state, size):
        weight = np.array(state["mean"]) * (1 - np.array(state["mean"])) + 0.01
        rng = np.random.default_rng([self.seed, state["step"]])
        chosen = rng.choice(self.n, size, replace=False, p=weight / weight.sum())
        state["step"] += 1
        return chosen, state
    def update(self, state, indices, scores):
        for i, found in zip(indices, scores):
            if found:
                state["mean"][i] = sum(found) / len(found)
        return state
class Same(Uncertain):
    def batch(self, state, size):
        return [0] * size, state
class Beyond(Uncertain):
    def batch(self, state, size):
        return [self.n - size + 1 + i for i in range(size)], state
class Alone(Uncertain):
    def batch(self, state, size):
        return range(size)
class Deaf(Uncertain):
    update = None
class Lost(Uncertain):
    def __init__(self, prompts):
        pass
class Odd(Uncertain):
    def begin(self):
        return {1j}
"""
MEMBERS = [Prompt(f"p{i}", "", "", np.array([i], np.int32), "", {}) for i in range(6)]


def curriculum(tmp_path, name="Uncertain"):
    (tmp_path / "mine.py").write_text(LEARNING)
    return user_order(f"{tmp_path}/mine.py:{name}", MEMBERS, seed=3, batch_size=2)


def graded(*scores):
    return [Reward(score, {}, None, unusable="not graded" if score is None else None) for score in scores]


def test_a_curriculum_sees_the_usable_scores_of_each_prompt(tmp_path):
    order = curriculum(tmp_path)
    _, cursor = next_batch(Cursor(), n=6, batch_size=2, seed=3, shuffle=True, order_of=order)
    cursor = seen(cursor, order, [MEMBERS[4], MEMBERS[1]], graded(1.0, None, 0.0, 0.5))
    assert json.loads(cursor.curriculum) == {"step": 1, "mean": [0.5, 0.25, 0.5, 0.5, 1.0, 0.5]}
    assert seen(cursor, None, MEMBERS, []) is cursor


def test_a_curriculum_resumes_from_the_position_alone(tmp_path):
    kw = dict(n=6, batch_size=2, seed=3, shuffle=True)

    def steps(order, cursor, first, last, drawn):
        for step in range(first, last):
            batch, cursor = next_batch(cursor, order_of=order, **kw)
            drawn.append(batch.tolist())
            rewards = graded(*(float((i + step) % 3 == 0) for i in (*batch, *batch)))
            cursor = seen(cursor, order, [MEMBERS[i] for i in batch], rewards)
        return cursor

    whole, halves = [], []
    end = steps(curriculum(tmp_path), Cursor(), 0, 20, whole)
    middle = through_json(steps(curriculum(tmp_path), Cursor(), 0, 7, halves))
    assert steps(curriculum(tmp_path), middle, 7, 20, halves) == end and halves == whole
    unseen, _ = draw(Cursor(), 20, order_of=curriculum(tmp_path), **kw)
    assert unseen[0].tolist() == whole[0] and unseen.tolist() != whole, "the scores matter"


@pytest.mark.parametrize(
    "name,said",
    [
        ("Same", r"batch must return \(2 different indices, state\), not \(\[0, 0\]"),
        ("Beyond", "batch returns indices outside 0 to 5; correct it"),
        ("Alone", r"batch must return \(2 different indices, state\), not range\(0, 2\)"),
        ("Deaf", "has no method update; a class has begin, batch and update"),
        ("Lost", "__init__ raises TypeError: .*; correct it"),
        ("Odd", "begin raises TypeError: Object of type set is not JSON serializable; correct it"),
    ],
)
def test_a_wrong_curriculum_is_refused_before_anything_starts(tmp_path, name, said):
    with pytest.raises(UserError, match=rf"data\.sampler='.*mine\.py:{name}'.* ?{said}"):
        curriculum(tmp_path, name)
