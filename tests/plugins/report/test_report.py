"""The report: its document on made folders, and its page in a real browser."""

import base64
import collections
import json
import math
import os
import pathlib
import zlib

import numpy as np
import pytest

from jppo import report as command
from jppo import settings as config
from jppo.errors import UserError
from jppo.plugins.report import page, report_line, run_folder, write_report
from tests.make import ROOT, one_line, write_lines
from tests.plugins.report import browser

HOSTILE = "</script><script>window.caught=1</script><img src=x onerror='window.caught=1'>{{data}} \u2028 \ud800 &lt;"


def write_run(path, lines=(), rows=None, settings=None):
    """A run's folder; `rows` by the name of their file."""
    (path / "samples").mkdir(parents=True)
    write_lines(path / "metrics.jsonl", lines)
    for name, some in (rows or {}).items():
        write_lines(path / "samples" / f"{name}.jsonl", some)
    if settings is not None:
        (path / "config.json").write_text(json.dumps(settings))
    return path


def row(i, score=1.0, **more):
    answer = str(i + 1)
    return {"uid": f"u{i}", "prompt": f"{i}+1=", "response": answer, "ground_truth": answer, "score": score} | more


def unpacked(text):
    return json.loads(zlib.decompress(base64.b64decode(text)))


def metric_lines(steps, seed=0):
    """About sixty metrics as a run of many steps has them: trends, noise, a few spikes, a value that is none."""
    rng = np.random.default_rng(seed)
    done = np.arange(1, steps + 1) / steps
    walk = np.cumsum(rng.normal(0, 0.02, steps))
    columns = {
        "critic/score/mean": 0.9 - 0.6 * np.exp(-6 * done) + rng.normal(0, 0.03, steps),
        "actor/ppo_kl": np.abs(rng.normal(0.01, 0.008, steps)) + 0.5 * (rng.random(steps) < 0.0005),
        "actor/pg_clipfrac": np.abs(0.15 + rng.normal(0, 0.04, steps)),
        "actor/entropy": 1.2 * np.exp(-2 * done) + 0.05 * walk + 0.2,
        "actor/ratio_max": 1 + rng.lognormal(-1, 0.5, steps),
        "actor/ratio_min": 1 / (1 + rng.lognormal(-1, 0.5, steps)),
        "critic/vf_explained_var": 0.8 - np.exp(-5 * done) + rng.normal(0, 0.05, steps),
        "response_length/mean": 180 + 90 * done + rng.normal(0, 12, steps),
        "rollout/logp_gap_mean": rng.lognormal(-6, 0.3, steps),
        "rollout/logp_gap_max": rng.lognormal(-2, 0.3, steps),
        "actor/grad_norm": rng.lognormal(-0.5, 0.4, steps),
        "critic/grad_norm": rng.lognormal(1, 0.5, steps),
        "actor/lr": 1e-6 * 0.5 * (1 + np.cos(math.pi * done)),
        "critic/lr": np.full(steps, 1e-5),
        "perf/throughput": 5200 + rng.normal(0, 300, steps),
        "perf/total_num_tokens": rng.integers(90_000, 120_000, steps),
        **{f"extra/metric_{i}": walk * i + rng.normal(0, 1, steps) for i in range(34)},
    }
    stages = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
    columns |= {f"timing_s/{stage}": rng.lognormal(i % 4 - 1, 0.2, steps) for i, stage in enumerate(stages)}
    columns["timing_s/step"] = sum(columns[f"timing_s/{stage}"] for stage in stages) + 0.1
    names, values = list(columns), np.stack(list(columns.values())).T.tolist()
    lines = [{"step": i + 1} | dict(zip(names, row, strict=True)) for i, row in enumerate(values)]
    for line in lines[99::100]:
        line |= {"val/score": min(1.0, line["critic/score/mean"] + 0.03), "timing_s/testing": 20.0}
    lines[steps // 3] |= {"actor/grad_norm": None, "nonfinite": {"actor/grad_norm": "nan"}}
    return lines


def long_run(path, steps=10_000, kinds=20):
    """A run of many steps with samples of every one: `kinds` different files under all of their names."""
    rng = np.random.default_rng(1)
    words = np.array(["".join(rng.choice(list("etaoinshrdlu"), rng.integers(2, 9))) for _ in range(2000)])
    run = write_run(
        path, metric_lines(steps), settings={"trainer": {"total_training_steps": steps}, "rollout": {"n": 4}}
    )
    for kind in range(kinds):
        rows = [
            {
                "uid": f"train:{i // 4}",
                "prompt": [{"role": "user", "content": " ".join(rng.choice(words, 60))}],
                "response": " ".join(rng.choice(words, 250)),
                "ground_truth": str(i),
                "score": float(np.clip(rng.normal(kind / kinds, 0.3), 0, 1)),
                "parts": {"rule_score": 1.0, "length": -0.25},
                "error": None,
                "finish": "stop",
            }
            for i in range(64)
        ]
        write_lines(run / "samples" / f"kind_{kind}.jsonl", rows)
    for step in range(1, steps + 1):
        kind = run / "samples" / f"kind_{(step - 1) * kinds // steps}.jsonl"
        os.link(kind, run / "samples" / f"step_{step}.jsonl")
        if step % 100 == 0:
            os.link(kind, run / "samples" / f"test_{step}.jsonl")
    write_lines(run / "warnings.jsonl", [{"step": 9, "name": "high KL", "found": "0.5", "remedy": "lower actor.lr"}])
    return run


# --- the document


def test_a_short_curve_is_kept_value_by_value():
    found = run_folder.curves(
        [{"step": 0, "val/score": 0.5}, {"step": 1, "a": 1.234567}, {"step": 2, "a": 3, "val/score": 1}]
    )
    axes = [axis["steps"] for axis in found["axes"]]
    assert {n: (axes[s["axis"]], s["mean"]) for n, s in found["series"].items()} == {
        "a": ([1, 2], [1.2346, 3.0]),
        "val/score": ([0, 2], [0.5, 1.0]),
    }
    assert not any("low" in s for s in found["series"].values())


def test_a_long_curve_keeps_its_spikes_and_its_mean():
    values = np.sin(np.arange(5000) / 300)
    values[3217] = 77.0
    lines = [{"step": i + 1, "a": v} for i, v in enumerate(values)]
    found = run_folder.curves(lines, points=100)
    (axis,), one = found["axes"], found["series"]["a"]
    assert axis["width"] == 50 and axis["steps"] == list(range(1, 5000, 50))
    chunks = values.reshape(100, 50)
    np.testing.assert_allclose(one["mean"], chunks.mean(1), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(one["low"], chunks.min(1), rtol=1e-4, atol=1e-7)
    assert max(one["high"]) == 77.0 == one["high"][3217 // 50]


def test_values_that_are_no_numbers_are_gaps_and_named():
    lines = [{"step": i, "a": float(i)} for i in range(1, 9)]
    lines[2] |= {"a": None, "nonfinite": {"a": "nan"}, "note": "text", "flag": True}
    lines[6]["a"] = 10**400  # more than a float holds
    found = run_folder.curves(lines)
    assert found["odd"] == {"a": {"count": 2, "steps": [3, 7]}}
    assert found["series"]["a"]["mean"] == [1, 2, None, 4, 5, 6, None, 8]
    assert set(found["series"]) == {"a"}
    thinned = run_folder.curves(lines, points=2)["series"]["a"]
    assert thinned["mean"] == [round(7 / 3, 4), round(19 / 3, 4)]
    assert (thinned["low"], thinned["high"]) == ([1, 5], [4, 8])


def test_stage_times_add_up():
    lines = [{"step": 0, "timing_s/start": 30.0, "timing_s/testing": 2.0}] + [
        {"step": i, "timing_s/gen": 1.0, "timing_s/novel": 0.5, "timing_s/step": 2.0, "timing_s/save": 0.25 * (i == 4)}
        for i in range(1, 5)
    ]
    found = run_folder.stage_times(lines, bars=2)
    assert found["totals"] == {"start": 30, "gen": 4, "novel": 2, "testing": 2, "save": 0.25, "other": 2}
    assert (found["steps"], found["width"]) == ([1, 3], 2)
    bars = {"gen": [1, 1], "novel": [0.5, 0.5], "testing": [0, 0], "save": [0, 0.125], "other": [0.5, 0.5]}
    assert found["bars"] == bars


def test_samples_within_the_budget_are_all_kept():
    rows = [row(i) for i in range(50)]
    kept, packed, ratio = page.pack_fitting(rows, 100_000)
    assert ratio == pytest.approx(len(page.compact(rows)) / len(packed))
    assert kept == 50 and unpacked(packed) == rows


def test_samples_over_the_budget_keep_whole_prompts_evenly_spread():
    rng = np.random.default_rng(0)
    rows = [row(i // 4, response=rng.bytes(300).hex()) for i in range(400)]
    kept, packed, _ = page.pack_fitting(rows, 20_000)
    found = [r["uid"] for r in unpacked(packed)]
    assert len(packed) <= 20_000 and kept == len(found) >= 20
    assert set(collections.Counter(found).values()) == {4}
    assert {"u0", "u99"} <= set(found)
    assert page.pack_fitting(rows, 10) == (0, "", page.RATIO)


def test_a_very_long_text_is_cut_in_the_middle():
    text = "a" * 30_000 + "b" * 30_000
    short = page.shorten({"response": [text]})["response"][0]
    assert short.startswith("a" * 10_000) and short.endswith("b" * 10_000) and "40,000 characters" in short
    assert len(short) < 20_100


@pytest.mark.parametrize("count, most, expected", [(3, 5, [0, 1, 2]), (9, 3, [0, 4, 8]), (5, 1, [4]), (0, 3, [])])
def test_spread(count, most, expected):
    assert page.pick_evenly(range(count), most) == expected


def test_the_histogram_counts_what_is_there():
    few = page.score_levels([0.0, 1.0, 1.0])
    entries = [
        {"kind": "test", "step": 0, "scores": [1.0]},
        {"kind": "step", "step": 1, "scores": [0.0, 1.0, None, 1.0]},
        {"kind": "step", "step": 2, "scores": []},
    ]
    assert page.score_histogram(entries, few) == {"kind": "step", "steps": [1], "counts": [[1, 2]], "ungraded": [1]}
    scores = [i / 7 for i in range(700)]
    many = page.score_levels(scores)
    found = page.score_histogram([{"kind": "test", "step": 5, "scores": scores}], many)
    assert found["kind"] == "test" and sum(found["counts"][0]) == 700 and len(found["counts"][0]) == page.BINS


def test_given_responses_are_marked_and_in_no_distribution_of_scores(tab, tmp_path):
    rows = [row(0, 0.0, finish="stop"), row(0, 1.0, finish="stop", given=True), row(1, 0.0, finish="stop")]
    folder = write_run(tmp_path / "run", [{"step": 1}], {"step_1": rows})
    assert page.make_document([folder])["runs"][0]["scores"]["counts"] == [[2]]
    tab.open(write_report([folder], tmp_path / "report.html"))
    tab.wait("document.querySelectorAll('.sample').length === 3")
    marked = "[...document.querySelectorAll('.sample')].map((one) => one.textContent.includes('given, not sampled'))"
    assert tab.ask(marked) == [False, True, False]
    assert "Further fields" not in tab.ask("document.querySelectorAll('.sample')[1].textContent")


def test_settings_of_one_run_are_held_against_the_defaults():
    c = config.default()
    c.actor.lr = 0.5
    found = {r["name"]: r for r in page.setting_rows([json.loads(config.dump(c)) | {"old": {"gone": 1}}])}
    assert [n for n, r in found.items() if r["differs"]] == ["actor.lr", "old.gone"]
    assert found["actor.lr"] == {"name": "actor.lr", "default": "1e-06", "values": ["0.5"], "differs": True}
    assert found["old.gone"]["default"] is None
    tuned = page.setting_rows([json.loads(config.dump(config.sft_default()))])
    assert tuned and not any(r["differs"] for r in tuned)


def test_settings_of_several_runs_are_held_against_each_other():
    a, b = {"actor": {"lr": 1, "x": None}}, {"actor": {"lr": 2, "x": None}, "new": 0}
    found = {r["name"]: (r["values"], r["differs"]) for r in page.setting_rows([a, b, None])}
    assert found == {
        "actor.lr": (["1", "2", None], True),
        "actor.x": (["null", "null", None], False),
        "new": ([None, "0", None], True),
    }


def test_what_a_run_says_of_itself(tmp_path):
    lines = [{"step": 0, "val/score": 0.25, "timing_s/start": 9.0}] + [
        {"step": i, "val/score": s, "timing_s/step": 2.0, "perf/total_num_tokens": 100}
        for i, s in ((1, 0.75), (2, None), (3, 0.5))
    ]
    run = write_run(
        tmp_path / "run", lines, {"step_1": [row(1)]}, {"trainer": {"total_training_steps": 3}, "rollout": {}}
    )
    warned = [{"step": i, "name": "high KL", "found": f"{i}", "remedy": "lower actor.lr"} for i in (1, 3)]
    write_lines(run / "warnings.jsonl", warned)
    (run / "server-0.log").write_text("INFO 11-21 [x.py:1]  version 0.32.0\n")
    (one,) = page.make_document([run])["runs"]
    assert (one["best"], one["last"], one["seconds"], one["tokens"]) == ((1, 0.75), (3, 0.5), 15.0, 300.0)
    assert one["versions"] == {"vLLM": "0.32.0"} and one["notes"] == [] and one["left_out"] is None
    assert one["warnings"] == [
        {"name": "high KL", "count": 2, "first": 1, "last": 3, "found": "3", "remedy": "lower actor.lr"}
    ]
    assert (one["step"], one["total"], one["finished"]) == (3, 3, False)
    (run / "hf").mkdir()
    assert page.make_document([run])["runs"][0]["finished"]


def test_what_is_cut_or_missing_is_said(tmp_path):
    run = write_run(
        tmp_path / "run", [{"step": 1, "a": 1.0}, {"step": 2, "a": 2.0}, {"step": 2, "a": 3.0}, {"step": 10**30}]
    )
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "a')
    (run / "config.json").write_text('{"cut')
    (run / "samples/step_1.jsonl").write_text("[1]\n" + json.dumps(row(1)) + '\n{"uid')
    (one,) = page.make_document([run])["runs"]
    assert one["curves"]["series"]["a"]["mean"] == [1.0, 3.0]
    assert [e["of"] for e in one["samples"]] == [1]
    assert one["notes"] == [
        "metrics.jsonl: 1 of 5 lines cannot be read and are left out",
        "metrics.jsonl: 2 lines have no step or a repeated one and are skipped",
        "config.json cannot be read: no settings, and no planned number of steps",
        "step_1.jsonl: 2 of 3 lines cannot be read and are left out",
    ]


def test_an_empty_folder_of_a_run_has_a_report(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    (one,) = page.make_document([tmp_path])["runs"]
    assert one["curves"]["series"] == {} and one["stages"]["names"] == [] and one["samples"] == []
    assert [note.split(":")[0] for note in one["notes"]] == [
        "metrics.jsonl is empty",
        "no config.json",
        "no samples/step_N.jsonl or test_N.jsonl",
    ]


def test_names_tell_runs_apart(tmp_path):
    paths = [tmp_path / name for name in ("a/run", "b/run", "c")]
    assert run_folder.distinct_names(paths) == ["a/run", "b/run", "c"]
    assert len(run_folder.distinct_names([paths[0], paths[0]])) == 2


# --- the command and the hook


@pytest.mark.parametrize("make, said", [(lambda p: None, "no such folder"), (lambda p: p.mkdir(), "is not a run")])
def test_a_path_that_is_no_run_is_one_line(tmp_path, capsys, make, said):
    make(tmp_path / "run")
    assert said in one_line(capsys, command.main, tmp_path / "run")


def test_the_command_writes_where_it_says(tmp_path, capsys, monkeypatch):
    runs = [write_run(tmp_path / name, [{"step": 1, "a": 1.0}]) for name in "ab"]
    monkeypatch.chdir(tmp_path)
    for args, expected in (
        ([str(runs[0])], runs[0] / "report.html"),
        ([str(r) for r in runs], pathlib.Path("report.html")),
        ([str(runs[0]), "--out", "deep/er/x.html"], pathlib.Path("deep/er/x.html")),
    ):
        command.main(args)
        assert capsys.readouterr().out == f"{expected}\n" and expected.read_text().startswith("<!doctype html>")
    assert "--out" in one_line(capsys, command.main, runs[0], "--out", tmp_path)


def test_a_report_that_fails_does_not_fail_a_run(tmp_path):
    run = write_run(tmp_path / "run", [{"step": 1, "a": 1.0}])
    assert report_line(run) == str(run / "report.html")
    (run / "report.html").unlink()
    (run / "report.html").mkdir()
    line = report_line(run)
    assert line.startswith("not written (IsADirectoryError") and "python -m jppo.report" in line and "\n" not in line
    with pytest.raises(UserError, match="no such folder"):
        write_report([tmp_path / "none"], tmp_path / "x.html")


def test_no_text_of_a_run_stands_in_the_page_as_it_is(tmp_path):
    run = write_run(tmp_path / "<b>run", [{"step": 1, HOSTILE: 1.0}], {"step_1": [row(1, response=HOSTILE)]})
    text = page.make_page(page.make_document([run]))
    assert "window.caught" not in text and "<b>run" not in text and "{{" not in text
    assert "&lt;b&gt;run" in text
    assert text.count("</script>") == text.count("<script")


# --- the page, in a browser


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    """A tab of a headless browser."""
    if browser.find() is None:
        pytest.skip(f"no browser: none of {', '.join(browser.NAMES)} is installed")
    with browser.browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def require_clean(tab, file):
    """Nothing was said on the console, nothing asked of anyone but the file, and nothing is wider than the window."""
    assert tab.errors == []
    assert set(tab.requests) == {file.resolve().as_uri()}
    assert tab.ask("document.scrollingElement.scrollWidth <= innerWidth")


def rows_of(png):
    """How many different rows of pixels a PNG has, and its size; a blank picture has one or two."""
    width, height = (int.from_bytes(png[i : i + 4], "big") for i in (16, 20))
    data, at = b"", 8
    while at < len(png):
        size = int.from_bytes(png[at : at + 4], "big")
        data += png[at + 8 : at + 8 + size] if png[at + 4 : at + 8] == b"IDAT" else b""
        at += size + 12
    raw = zlib.decompress(data)
    return width, height, len({raw[i : i + len(raw) // height] for i in range(0, len(raw), len(raw) // height)})


@pytest.mark.slow
def test_a_report_of_ten_thousand_steps_is_small_and_opens_at_once(tab, tmp_path):
    file = write_report([long_run(tmp_path / "run")], tmp_path / "report.html")
    assert 1e6 < file.stat().st_size < 20e6
    for _ in range(3):  # other programs may be in the way once
        tab.open(file)
        if (took := tab.ask("Number(document.documentElement.dataset.drawn)")) < 3000:
            break
    assert took < 3000
    assert tab.ask("document.querySelectorAll('#main-curves .card').length") >= 12
    assert tab.ask("document.querySelectorAll('#main-curves .envelope').length") > 0
    said = tab.ask("document.body.textContent")
    assert "200 of 10,100 files of samples are in this page" in said
    assert "lower actor.lr" in said and "actor/grad_norm was no finite number at step 3,334" in said
    require_clean(tab, file)


def test_pictures(tab, tmp_path):
    """Into docs/ of the run that JPPO_PICTURES_OF names; of a made one otherwise, to be looked at by the test alone."""
    named = os.environ.get("JPPO_PICTURES_OF")
    run = pathlib.Path(named) if named else write_run(tmp_path / "run", metric_lines(60), {"step_60": [row(1)]})
    into = ROOT / "docs" if named else tmp_path
    file = write_report([run], tmp_path / "report.html")
    for name, width, height in (("desktop", 1280, 1180), ("phone", 390, 1180)):
        tab.open(file, width=width, height=height)
        png = tab.picture(into / f"report-{name}.png")
        scale = 2 if name == "phone" else 1
        assert rows_of(png)[:2] == (width * scale, height * scale) and rows_of(png)[2] > 300
        assert len(png) < 400_000
        require_clean(tab, file)


def test_several_runs_dark_and_narrow(tab, tmp_path):
    runs = [
        write_run(
            tmp_path / f"run-{i}", metric_lines(40, seed=i), {"step_40": [row(i)]}, {"actor": {"lr": i}, "rollout": {}}
        )
        for i in range(3)
    ]
    file = write_report([*runs, write_run(tmp_path / "empty")], tmp_path / "report.html")
    tab.open(file, width=390, height=844, dark=True)
    assert tab.ask("getComputedStyle(document.body).backgroundColor") == "rgb(14, 19, 26)"
    curves = "document.querySelectorAll('#main-curves .card:nth-child(2) .curve').length"
    tab.ask("document.querySelector('#main-curves').scrollIntoView()")
    tab.wait(f"{curves} === 3")
    tab.ask("document.querySelector('#legend input').click()")
    assert tab.ask(curves) == 2
    assert tab.ask("document.querySelector('#setting-list tbody').textContent").startswith("actor.lr012–")
    assert "empty: metrics.jsonl is empty" in tab.ask("document.querySelector('#warnings').textContent")
    require_clean(tab, file)


def test_values_are_read_by_mouse_and_keys(tab, tmp_path):
    lines = [{"step": i, "critic/score/mean": i / 10, "actor/entropy": i * 3.0} for i in range(1, 11)]
    file = write_report(
        [write_run(tmp_path / "run", lines, {f"step_{i}": [row(i)] for i in (2, 8)})], tmp_path / "r.html"
    )
    tab.open(file)
    tab.wait("document.querySelectorAll('#main-curves svg').length === 2")
    box = "document.querySelector('#main-curves .plot').getBoundingClientRect()"
    place = tab.ask(f"(({{left, top, width}}) => [left, top, width])({box})")
    tab.mouse("mouseMoved", place[0] + 48 + (place[2] - 58) * 4 / 9, place[1] + 60)  # step 5 of 1 to 10
    readouts = "[...document.querySelectorAll('#main-curves .readout')].map((node) => node.textContent)"
    assert tab.ask(readouts) == ["0.5", "15"]  # the other chart, too
    tab.ask("document.querySelector('#main-curves .plot').focus()")
    tab.press("ArrowRight")
    tab.press("ArrowRight")
    assert tab.ask(readouts) == ["0.7", "21"]
    tab.ask(
        "(f => { f.value = 'ENTROPY'; f.dispatchEvent(new Event('input')); })(document.querySelector('#curve-filter'))"
    )
    titles = "[...document.querySelectorAll('.card h3')].filter((h) => h.offsetParent).map((h) => h.textContent)"
    assert tab.ask(titles)[:2] == ["Entropy", "actor/entropy"] and "Training reward" not in tab.ask(titles)
    tab.press("Enter")
    tab.wait("document.querySelector('#sample-browser [role=status]').textContent.includes('of step 8')")
    require_clean(tab, file)


def test_samples_are_searched_and_filtered(tab, tmp_path):
    rows = [
        row(i, score=float(i % 2), parts={"exact": i % 2}, finish="length" if i == 7 else "stop") for i in range(60)
    ]
    rows[5] |= {"score": None, "error": "the judge is gone", "novel": {"deep": [1]}}
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the needle"}]
    run = write_run(
        tmp_path / "run", [{"step": 1, "a": 1.0}], {"step_1": rows, "step_2": [row(1, prompt=chat)], "test_2": []}
    )
    file = write_report([run], tmp_path / "report.html")
    tab.open(file)
    status = "document.querySelector('#sample-browser [role=status]').textContent"
    cards = "[...document.querySelectorAll('.sample')].map((node) => node.textContent)"
    assert tab.ask(status) == "1 of 1 samples of step 2, mean score 1"
    choose = """(selector, value, kind) => { const node = document.querySelector(selector); node.value = value;
        node.dispatchEvent(new Event(kind)); }"""
    tab.ask(f"({choose})('#sample-browser select', '0', 'change')")
    tab.wait(f"{status}.startsWith('60 of 60 samples of step 1')")
    assert len(tab.ask(cards)) == 20
    tab.ask("[...document.querySelectorAll('#sample-browser button')].at(-1).click()")
    assert len(tab.ask(cards)) == 40
    tab.ask(f"({choose})('#sample-browser input[type=number]', '1', 'input')")
    tab.wait(f"{status}.startsWith('29 of 60')")
    tab.ask(f"({choose})('#sample-browser input[type=number]', '', 'input')")
    tab.ask(f"({choose})('#sample-browser select:has(option[value=\"not graded\"])', 'not graded', 'change')")
    tab.wait(f"{status}.startsWith('1 of 60')")
    (card,) = tab.ask(cards)
    assert "no score" in card and "the judge is gone" in card and 'novel: {"deep":[1]}' in card
    tab.ask(f"({choose})('#sample-browser select:has(option[value=\"not graded\"])', 'all', 'change')")
    tab.ask(f"({choose})('#sample-browser input[type=search]', 'NEEDLE', 'input')")
    tab.ask("document.querySelector('#sample-browser input[type=checkbox]').click()")
    tab.wait(f"{status}.startsWith('1 of 61')")
    assert "user: the needle" in tab.ask(cards)[0] and tab.ask("document.querySelector('mark').textContent") == "needle"
    require_clean(tab, file)


def test_hostile_texts_are_only_texts(tab, tmp_path):
    rows = [row(1, response=HOSTILE, prompt=[{"role": HOSTILE, "content": HOSTILE}], error=HOSTILE, parts={HOSTILE: 1})]
    rows += [row(2, response=None, prompt={"a": 1}, score="nan", parts="none", finish=[1], uid=None), {}]
    lines = [{"step": 1, HOSTILE: 1.0, "timing_s/</script>": 2.0}]
    run = write_run(tmp_path / "<i>run", lines, {"step_1": rows}, {"rollout": {HOSTILE: HOSTILE}})
    write_lines(run / "warnings.jsonl", [{"name": HOSTILE, "found": HOSTILE, "remedy": HOSTILE}, {"step": "x"}])
    file = write_report([run], tmp_path / "report.html")
    tab.open(file)
    assert tab.ask("document.querySelectorAll('.sample').length") == 3
    assert tab.ask("document.querySelectorAll('main img, main script, h1 i').length") == 0
    assert tab.ask("window.caught === undefined")
    assert "</script><script>window.caught=1" in tab.ask("document.querySelector('.sample').textContent")
    require_clean(tab, file)
