"""The search for the fastest settings: which candidates are tried, in which order, and what becomes of the best."""

import json
import types

import pytest

from jppo import plan, settings
from jppo.models.config import Experts, Routing
from jppo.models.families import QWEN3
from jppo.plugins.forecast import compilers, machines, search
from jppo.plugins.forecast.account import Account, Forecast
from jppo.plugins.forecast.outlook import Executions, Outlook
from jppo.preflight.programs import Compilation, Estimate, ProgramMemory
from tests.make import typed

GIB = 2**30
MACHINE = machines.parse_machine("8xH100")


@pytest.fixture
def config():
    c = settings.default()
    c.model.remat, c.rollout.name, c.mesh.fsdp, c.mesh.data = "dots", "inprocess", -1, 1
    c.data.max_prompt_length = c.data.max_response_length = 4096
    c.model.path = c.data.train_files = c.data.val_files = "somewhere"
    return c


def candidate(changes, seconds, peak, links=0.0):
    moment = ProgramMemory("actor gradient", 0, int(peak * GIB), compiled=Compilation(work=Account()))
    one = Forecast(compute=seconds, hbm=0.0, links=links)
    outlook = Outlook(MACHINE, ((moment, one),), Executions({"actor gradient": 1}))
    return search.Candidate(changes, Estimate({}, (moment,)), outlook, fits=peak <= 60)


INPUTS = types.SimpleNamespace(policy=types.SimpleNamespace(experts=None))


def searched(config, monkeypatch, cost):
    tried = []

    def attempt(c, changes, inputs, machine, devices, rate):
        tried.append(changes)
        return candidate(changes, *cost(changes))

    monkeypatch.setattr(search, "try_settings", attempt)
    monkeypatch.setattr(compilers, "devices_of", lambda machine: [])
    said = []
    return search.search(typed(config), INPUTS, MACHINE, rate=0.0, report=said.append), tried, said


def test_each_group_is_tried_on_the_best_so_far(config, monkeypatch):
    def cost(changes):
        seconds = 10.0 - 2.0 * (changes.get("mesh.tensor") == 2) - (changes.get("model.remat") == "none")
        return seconds, 90.0 if changes.get("model.remat") == "none" else 50.0  # which does not fit

    found, tried, said = searched(config, monkeypatch, cost)
    assert found[0].changes == {"mesh.data": 1, "mesh.fsdp": 4, "mesh.tensor": 2, "mesh.sequence": 1, "mesh.expert": 1}
    assert tried[0] == {} and len(said) == len(tried) == len({str(one) for one in tried})
    later = tried[next(i for i, one in enumerate(tried) if "model.remat" in one) :]
    assert all(one["mesh.tensor"] == 2 for one in later)
    assert not any("optimizer_offload" in name for one in tried for name in one)  # something fits
    assert {one["actor.max_tokens_per_device"] for one in later if "actor.max_tokens_per_device" in one} == {
        32768,
        8192,
    }
    fitting = [one.fits for one in found]
    assert fitting == sorted(fitting, reverse=True)


def test_the_fastest_mesh_is_tried_with_fewer_tokens(config, monkeypatch):
    def cost(changes):
        tensor, tokens = changes.get("mesh.tensor", 1) == 2, changes.get("actor.max_tokens_per_device", 16384)
        return (20.0, 30.0) if tensor else (10.0, tokens / 200)  # 16,384 tokens do not fit, 8,192 do

    config.model.remat = "full"
    found, _, _ = searched(config, monkeypatch, cost)
    assert found[0].fits and found[0].outlook.step == 10.0
    assert found[0].changes["actor.max_tokens_per_device"] == 8192


def test_of_two_as_fast_the_one_with_less_to_overlap_is_better():
    found = sorted([candidate({"a": 1}, 10.0, 9, links=9.0), candidate({"b": 1}, 10.01, 9)], key=lambda c: c.rank)
    assert [one.changes for one in found] == [{"b": 1}, {"a": 1}]


def test_offload_is_tried_where_nothing_fits(config, monkeypatch):
    def cost(changes):
        return 10.0, 50.0 if changes.get("critic.optimizer_offload") else 90.0

    found, tried, _ = searched(config, monkeypatch, cost)
    assert found[0].fits and found[0].changes["actor.optimizer_offload"]
    assert tried[-1] == found[0].changes  # the first that fits is the last that is tried


SIX = Experts(6, 2, 8, 0, normalized=True, sparse=(True,), names=QWEN3, routing=Routing())


@pytest.mark.parametrize(
    "machine, experts, count",
    [
        *(("8xH100", None, 9), ("4x8xH100", None, 8), ("H100", None, 1), ("v5e-4", None, 7), ("8xH100", SIX, 10)),
        *(("2xH100", None, 4), ("2xH100", SIX, 5), ("2x8xH100", None, 8)),
    ],
)
def test_meshes_have_all_devices_and_stay_within_a_host(machine, experts, count):
    found = list(search.candidate_meshes(machines.parse_machine(machine), experts))
    sizes = [tuple(one.values()) for one in found]
    assert len(sizes) == len(set(sizes)) == count
    n, each = machines.parse_machine(machine).devices, machines.parse_machine(machine).each
    assert all(a * b * c * d * e == n and c * d * e <= each for a, b, c, d, e in sizes)
    assert experts is None or {one["mesh.expert"] for one in found} == {1, 2}, "6 are not divided by 4 or 8"


def test_the_command_prints_the_table_and_the_best(config, monkeypatch, capsys, tmp_path):
    rows = [candidate({"model.remat": "full"}, 5.0, 10.0), candidate({}, 7.0, 20.0), candidate({"a": 1}, 3.0, 99.0)]
    rows.append(search.Candidate({"mesh.tensor": 8}, reason="mesh.tensor=8 must divide 28"))
    switches = {"machine": "8xH100", "json": str(tmp_path / "plan.json"), "rollout_tokens_per_s": 0.0}
    monkeypatch.setattr(settings, "parse", lambda *_, **__: (config, switches))
    monkeypatch.setattr(plan, "rerun_if_absent", lambda *_: None)
    monkeypatch.setattr(plan, "read_inputs", lambda *_, **__: None)
    monkeypatch.setattr(search, "search", lambda *_, **__: rows)
    plan.main(["--config=mine.py", "--config.model.remat", "dots", "--machine", "8xH100", "--json=plan.json"])
    out = capsys.readouterr().out.splitlines()
    assert out[2].split()[:3] == ["5", "10.0", "fits"] and "does not fit" in out[4]
    assert out[5].endswith("mesh.tensor=8: mesh.tensor=8 must divide 28")
    assert out[-1] == "best: python -m jppo.train --config=mine.py --config.model.remat=full"
    said = json.loads((tmp_path / "plan.json").read_text())
    assert [one["fits"] for one in said["candidates"]] == [True, True, False, False]
    monkeypatch.setattr(search, "search", lambda *_, **__: rows[2:])
    with pytest.raises(SystemExit) as e:
        plan.main(["--config=mine.py"])
    assert e.value.code == 2 and "none of 2 settings fits a device of 79.1 GiB" in capsys.readouterr().err
    switches["machine"] = ""
    with pytest.raises(SystemExit) as e:
        plan.main(["--config=mine.py"])
    assert e.value.code == 2 and "--machine is not given" in capsys.readouterr().err


@pytest.mark.parametrize("sequence, sizes", [(1, [16384]), (2, [16384, 4096])])
def test_fewer_tokens_are_tried_if_the_devices_that_share_a_row_hold_it(config, sequence, sizes):
    config.mesh.sequence, config.actor.max_tokens_per_device = sequence, 8192  # and rows of as many
    assert search.other_tokens(typed(config)) == [{"actor.max_tokens_per_device": n} for n in sizes]


def test_every_other_way_to_recompute_is_tried(config):
    config.model.remat = "dots"
    assert [changes["model.remat"] for changes in search.other_remats(typed(config))] == [
        "none",
        "attention",
        "full",
    ]
