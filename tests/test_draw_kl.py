"""scripts/draw_kl.py on the metrics of runs."""

import importlib.util
import json
import pathlib

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


def test_rewards_of_each_run_and_the_mean_kl(script, tmp_path):
    def rows(kl):
        steps = [{"step": i, "reward_mean": i / 2, "actor/reward_kl_penalty_seq": kl * i} for i in (1, 2)]
        return [{"step": 0, "val/score": 1.0}, *steps]  # a test before training has neither

    runs = [run(tmp_path / name, rows(kl)) for name, kl in (("a", 1.0), ("b", 3.0))]
    seen = {}
    script.write_curve = lambda path, *, title, lines, dots: seen.update(lines)
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
