"""scripts/draw_kl.py on the metrics of runs."""

import importlib.util
import json
import math
import pathlib
import xml.etree.ElementTree as ET

import pytest

FILE = pathlib.Path(__file__).resolve().parents[1] / "scripts/draw_kl.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("draw_kl", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(folder, rows):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_rewards_of_each_run_and_the_mean_kl(script, tmp_path, monkeypatch):
    def rows(kl):
        steps = [{"step": i, "reward_mean": i / 2, "actor/reward_kl_penalty_seq": kl * i} for i in (1, 2)]
        return [{"step": 0, "val/score": 1.0}, *steps]  # a test before training has neither

    runs = [run(tmp_path / name, rows(kl)) for name, kl in (("a", 1.0), ("b", 3.0))]
    seen = {}
    monkeypatch.setattr(script, "write_curve", lambda path, *, title, lines: seen.update(lines))
    script.main([*runs, "--out", str(tmp_path / "x.svg")])
    assert seen == {
        "reward, a": [(1, 0.5), (2, 1.0)],
        "reward, b": [(1, 0.5), (2, 1.0)],
        "KL, nats a response": [(1, 2.0), (2, 4.0)],
    }


def test_a_run_without_them_is_one_line(script, tmp_path, capsys):
    with pytest.raises(SystemExit) as e:
        script.main([run(tmp_path / "a", [{"step": 1, "sft/loss": 1.0}]), "--out", str(tmp_path / "x.svg")])
    assert e.value.code == 2 and "has no reward_mean" in capsys.readouterr().err


def test_a_line_stands_where_its_values_are_inside_the_picture(script, tmp_path):
    points = [(0, 0.0), (2, math.nan), (5, 0.75), (10, 1.0)]
    script.write_curve(tmp_path / "x.svg", title="a < b", lines={"reward": points, "none": []})
    root = ET.parse(tmp_path / "x.svg").getroot()
    svg = "{http://www.w3.org/2000/svg}"
    (line,) = root.findall(f"{svg}polyline")
    (x0, y0), middle, (x1, y1) = [tuple(map(float, pair.split(","))) for pair in line.get("points").split()]
    assert 0 < x0 < x1 < 720 and 420 > y0 > y1 > 0  # up is smaller in SVG
    assert middle == (round((x0 + x1) / 2, 1), round(y0 + 0.75 * (y1 - y0), 1))
    assert {"a < b", "reward", "none", "step"} <= {text.text for text in root.findall(f"{svg}text")}
