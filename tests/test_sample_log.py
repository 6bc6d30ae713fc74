"""The log of a step's samples: kept tokens and the token record by hand, and the tokens of a sample in the report."""

import dataclasses
import pathlib

import numpy as np
import pytest

from jppo.data.tokenizer import load_tokenizer, pieces, spell
from jppo.plugins.report import page, write_report
from jppo.run import sample_log
from jppo.types import OVERFLOW, Batch, Reward
from tests.make import read_lines, sample, trajectory
from tests.plugins.report.test_report import require_clean, row, tab, unpacked, write_run  # noqa: F401

# The first byte of a character in one token, the others in the next ones; then a line break and an end token.
PIECES = ["4", "2 <script>window.caught=1</script>", "", "\U0001f600", "\n", "\u202eabc"]


def kept(*rows):
    """A response of as many tokens, whose samples had these tokens to choose from."""
    sampled = [False, *[True] * len(rows)]
    one = trajectory(list(range(len(sampled))), sampled)
    return dataclasses.replace(one, kept=np.array([[-1, -1, -1], *rows], np.int32))


def test_kept_tokens_are_counted_where_they_are_known():
    one = kept([0, 7, -1], [3, -1, -1], [-1, -1, -1])  # of two, of one, of all
    other = kept([OVERFLOW, -1, -1], [0, 1, 2])
    found = sample_log.kept_token_metrics([dataclasses.replace(one, branches=(other,))])
    assert found == pytest.approx(
        {"rollout/mask_tokens_mean": (2 + 1 + 3) / 3, "rollout/mask_replayed": 3 / 5, "rollout/mask_overflow": 1 / 5}
    )
    assert sample_log.kept_token_metrics([kept([0, -1, -1])])["rollout/mask_tokens_mean"] == 1.0  # token 0 is a token
    assert sample_log.kept_token_metrics([kept([-1, -1, -1])])["rollout/mask_tokens_mean"] == 0.0
    assert sample_log.kept_token_metrics([trajectory([1, 2], [False, True])]) == {}


def batch_of(**more) -> Batch:
    zeros, mask = np.zeros((2, 4), np.float32), np.array([[True, False, True, False], [True, True, True, True]])
    first, score = np.array([1, 0], np.int32), np.zeros(2, np.float32)
    length = mask.sum(1).astype(np.float32)
    return Batch(mask, zeros + 0.5, first, score, np.arange(2, dtype=np.int32), length, more)


def test_a_record_has_the_batchs_numbers_where_tokens_are_trained():
    data = batch_of(
        reward=np.arange(8, dtype=np.float32).reshape(2, 4),
        value=np.full((2, 4), 3.0, np.float32),
        advantage=np.array([[0.1] * 4, [-0.2] * 4], np.float32),
        old_logprob=np.full((2, 4), 0.75, np.float32),
        ref_logprob=np.full((2, 4), -0.25, np.float32),
    )
    chosen = sample_log.choose_responses(data.mask, 2)
    known = sample_log.collect_arrays(data, chosen, None, bypass=False)
    trajectories = [trajectory(ids, np.ones(5), uid) for uid, ids in (("a", [9, 9, 1, 2, 3]), ("b", [9, 5, 6, 7, 8]))]
    first, second = sample_log.make_records(data, trajectories, chosen, known, lambda ids: [str(i) for i in ids])
    assert first == {
        "sample": 0,
        "uid": "a",
        "prompt_tokens": [9, 9],
        "tokens": [1, 2, 3],
        "pieces": ["1", "2", "3"],
        "trained": [True, False, True],
        "reward": [0.0, None, 2.0],
        "value": [3.0, None, 3.0],
        "advantage": [0.1, None, 0.1],  # as short as f32 allows
        "log_ratio_engine": [0.25, None, 0.25],
        "log_ratio_reference": [1.0, None, 1.0],
    }
    assert second["tokens"] == [5, 6, 7, 8] and second["reward"] == [4.0, 5.0, 6.0, 7.0]


def test_a_given_response_is_marked_and_has_no_log_ratio_to_the_engine():
    data = batch_of(old_logprob=np.full((2, 4), -1.0, np.float32), advantage=np.ones((2, 4), np.float32))
    some = [trajectory([9, 9, 1, 2, 3], np.ones(5), version=v) for v in (0, -1)]
    known = sample_log.collect_arrays(data, [0, 1], None, bypass=False)
    sampled, shown = sample_log.make_records(data, some, [0, 1], known, lambda ids: [str(i) for i in ids])
    assert "log_ratio_engine" in sampled and "log_ratio_engine" not in shown and "advantage" in shown
    prompt, reward = sample("").prompt, Reward(0.0, {}, None)
    rows = sample_log.sample_rows([prompt] * 2, some, [reward] * 2)
    assert [row.get("given") for row in rows] == [None, True]


def test_what_a_run_does_not_have_is_not_recorded():
    found = sample_log.collect_arrays(batch_of(advantage=np.ones((2, 4))), [0], None, bypass=True)
    assert list(found) == ["advantage"]


def test_values_are_recorded_on_the_scale_of_rewards():
    norm = np.array([4.0, 10.0, 9.0], np.float32)  # count, mean, variance
    data = batch_of(value=np.full((2, 4), 2.0, np.float32))
    found = sample_log.collect_arrays(data, [1], norm, bypass=True)["value"]
    assert np.allclose(found, 10.0 + 3.0 * 2.0)


@pytest.mark.parametrize("count, expected", [(0, []), (1, [0]), (2, [0, 3]), (9, [0, 2, 3])])
def test_responses_are_evenly_spaced_among_those_with_trained_tokens(count, expected):
    mask = np.array([[True], [False], [True], [True]])
    assert sample_log.choose_responses(mask, count) == expected


def array(column):
    return np.array([np.nan if x is None else x for x in column])


def by_the_definition(reward, value, a):
    """GAE of the trained tokens of one response, from its end."""
    out, ahead, next_value = [], 0.0, 0.0
    for r, v in reversed([(r, v) for r, v in zip(reward, value, strict=True) if not np.isnan(r)]):
        ahead = r + a.gamma * next_value - v + a.gamma * a.lam * ahead
        out, next_value = [ahead, *out], v
    return out


def test_a_run_writes_records_that_match_its_samples(finished_run):
    folder, c = pathlib.Path(finished_run.trainer.run_dir), finished_run
    files = sorted((folder / "samples").glob("tokens_*.jsonl"))
    assert len(files) == c.trainer.total_training_steps
    for file in files:
        found, written = list[float](), list[float]()
        records, samples = read_lines(file), read_lines(file.with_name(file.name.replace("tokens", "step")))
        assert len(records) == min(c.trainer.token_samples, len(samples))
        for record in records:
            sample = samples[record["sample"]]
            assert sample["uid"] == record["uid"] and "".join(record["pieces"]).startswith(sample["response"])
            assert all(len(record[name]) == len(record["pieces"]) for name in ("tokens", "trained", "advantage"))
            assert np.isclose(np.nansum(array(record["reward"])), sample["score"])  # the reward has no KL
            # Whitening is affine and the same for all tokens of the step.
            found += by_the_definition(array(record["reward"]), array(record["value"]), c.algorithm)
            written += [x for x in record["advantage"] if x is not None]
        assert len(found) == len(written) > 8
        slope, level = np.polyfit(found, written, 1)
        assert slope > 0
        np.testing.assert_allclose(np.multiply(found, slope) + level, written, atol=1e-4)


def test_a_character_of_several_tokens_belongs_to_the_last(shared):
    tokenizer = load_tokenizer(str(shared / "tokenizers" / "qwen2.5"))
    text = "naïve \U0001f469‍\U0001f680 ༄ 漢字\n<|im_end|>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    found = pieces(tokenizer, ids)
    assert "".join(found) == spell(tokenizer, ids) == text and len(found) == len(ids)
    assert "" in found and not any("\N{REPLACEMENT CHARACTER}" in piece for piece in found)
    assert pieces(tokenizer, []) == []


# --- in the report


def record(sample: int = 1, **more) -> dict:
    n = len(PIECES)
    trained = [True] * (n - 1) + [False]
    reward = [0.0, 0.0, 0.0, 0.0, 1.0, None]
    base = {"sample": sample, "uid": "u1", "tokens": list(range(n)), "pieces": PIECES, "trained": trained}
    return base | {"reward": reward, "advantage": [-0.5, 0.25, 0.0, 0.5, 0.1, None]} | more


def make_run(path, records):
    rows = {"step_3": [row(0), row(1, response="".join(PIECES)), row(2)], "tokens_3": records}
    return write_run(path, [{"step": 3, "a": 1.0}], rows)


def test_the_document_links_samples_and_records(tmp_path):
    (run,) = page.make_document([make_run(tmp_path / "run", [record()])])["runs"]
    (entry,) = run["samples"]
    assert [r.get("token_record") for r in unpacked(entry["packed"])] == [None, 0, None]
    (found,) = unpacked(entry["records"])
    assert found["pieces"] == PIECES and found["gone"] == 0 and run["tokens_left_out"] is None


@pytest.mark.parametrize(
    "broken",
    [{"pieces": "abc"}, {"reward": [1.0]}, {"sample": -1}, {"sample": None}, {"pieces": [1] * len(PIECES)}],
)
def test_a_broken_record_is_left_out_and_reported(broken, tmp_path):
    (run,) = page.make_document([make_run(tmp_path / "run", [record(), record(**{"sample": 2} | broken)])])["runs"]
    assert len(unpacked(run["samples"][0]["records"])) == 1
    assert any("1 of 2 records are broken" in note for note in run["notes"])


def test_a_long_response_loses_its_middle(tmp_path):
    n = 6000
    long = {"sample": 0, "pieces": ["a"] * n, "trained": [True] * n, "reward": list(np.arange(n) / 7)}
    (run,) = page.make_document([make_run(tmp_path / "run", [long])])["runs"]
    (found,) = unpacked(run["samples"][0]["records"])
    assert found["gone"] == 1000 and len(found["pieces"]) == len(found["reward"]) == 5000
    assert found["reward"][-1] == pytest.approx((n - 1) / 7, rel=1e-3)


def test_records_over_the_budget_are_left_out_and_reported(tmp_path):
    rng = np.random.default_rng(0)
    rows = {f"step_{i}": [row(1)] for i in range(1, 9)}
    for i in range(1, 9):
        n = 3000
        reward = [float(x) for x in rng.normal(size=n)]
        rows[f"tokens_{i}"] = [{"sample": 0, "pieces": ["a"] * n, "trained": [True] * n, "reward": reward}]
    folder = write_run(tmp_path / "run", [{"step": 8}], rows)
    (run,) = page.make_document([folder], budget=160_000)["runs"]
    kept = [entry for entry in run["samples"] if entry["records"]]
    assert 0 < len(kept) < 8 and sum(len(e["records"]) for e in kept) <= 40_000
    assert run["tokens_left_out"] == f"{len(kept)} of 8 files of token values are in this page"


@pytest.mark.parametrize("width", [1280, 360])
def test_tokens_are_coloured_and_their_numbers_read(tab, tmp_path, width):  # noqa: F811
    file = write_report([make_run(tmp_path / "run", [record()])], tmp_path / "report.html")
    tab.open(file, width=width, height=900)
    choose = """(value) => { const node = document.querySelector('.colouring select'); node.value = value;
        node.dispatchEvent(new Event('change')); }"""
    tab.wait("document.querySelectorAll('.colouring option').length === 3")
    assert tab.ask("document.querySelectorAll('.colouring').length") == 1  # one of three samples has a record
    assert tab.ask("document.querySelectorAll('.token').length") == 0
    tab.ask(f"({choose})('advantage')")
    colours = "[...document.querySelectorAll('.token')].map((node) => node.style.backgroundColor)"
    found = tab.ask(colours)
    assert len(found) == len(PIECES) and found[0] != found[3] != "" and found[-1] == ""
    assert tab.ask("document.querySelectorAll('.token')[5].classList.contains('untrained')")
    assert "lowest −0.5, highest 0.5" in tab.ask("document.querySelector('.scale').textContent").replace("-", "−")
    readout = "document.querySelector('.values').textContent"
    box = "document.querySelectorAll('.token')[1].getBoundingClientRect()"
    tab.ask("document.querySelector('.tokens').scrollIntoView({ block: 'center' })")
    left, top = tab.ask(f"(({{left, top}}) => [left, top])({box})")
    tab.mouse("mousePressed", left + 4, top + 8, button="left", clickCount=1)
    assert "token 2 of 6" in tab.ask(readout) and "advantage 0.25" in tab.ask(readout)
    tab.ask("document.querySelector('.tokens').focus()")
    tab.press("ArrowRight")
    tab.press("ArrowRight")
    tab.press("ArrowRight")
    assert "token 5 of 6" in tab.ask(readout) and "reward 1" in tab.ask(readout)
    tab.press("End")
    assert "not trained on" in tab.ask(readout)
    assert tab.ask("window.caught === undefined") and "\\u{202e}" in tab.ask(
        "document.querySelector('.tokens').innerText"
    )
    require_clean(tab, file)
    tab.ask(f"({choose})('')")
    assert tab.ask("document.querySelectorAll('.token').length") == 0


def test_a_report_without_records_is_as_before(tab, tmp_path):  # noqa: F811
    file = write_report([write_run(tmp_path / "run", [{"step": 1}], {"step_1": [row(1)]})], tmp_path / "report.html")
    tab.open(file)
    tab.wait("document.querySelectorAll('.sample').length === 1")
    assert tab.ask("document.querySelectorAll('.colouring').length") == 0
    require_clean(tab, file)
