"""Settings that follow from memory, and what a dry run is asked for."""

import functools
import json
import pathlib
from types import SimpleNamespace

import numpy as np
import pytest

from jppo import settings, train
from jppo.errors import UserError
from jppo.learner.make import make_mesh
from jppo.plugins.forecast import compilers
from jppo.preflight import memory_budget, preview, programs
from jppo.preflight.request import DryRun, read_request
from jppo.run.inputs import read_inputs
from tests.make import typed
from tests.test_resume import again, untimed

NO_GPU = not (compilers.compiler_folder("gpu") / compilers.READY).is_file()
GIB = 2**30


def test_programs_are_announced_only_where_a_command_asks_for_it(capsys):
    programs.announce("compiling one")
    with programs.programs_announced():
        programs.announce("compiling two")
    programs.announce("compiling three")
    assert capsys.readouterr() == ("", "compiling two\n")


def test_changes_come_in_order_and_add_up():
    c = settings.default()
    c.model.remat, c.actor.max_tokens_per_device = "full", 4096
    c.data.max_prompt_length, c.data.max_response_length = 512, 512
    found = list(memory_budget.remedies(typed(c)))
    assert found[0] == {"actor.max_tokens_per_device": 2048}
    assert found[1] == found[0] | {"actor.optimizer_offload": True, "critic.optimizer_offload": True}
    assert found[2] == found[1] | dict.fromkeys(
        ("actor.param_offload", "critic.param_offload", "ref.param_offload"), True
    )


@pytest.mark.parametrize(
    "sequence, row, fewest",
    [(1, -1, 32768), (4, -1, 8192), (3, -1, 10923), (4, 65536, 16384), (-1, -1, 32768)],
)
def test_devices_that_share_a_row_each_have_a_part_of_it(sequence, row, fewest):
    """The fewest tokens that are tried are the fewest that the rules allow."""
    c = with_paths(settings.default())
    c.mesh.sequence, c.data.max_tokens_per_row, c.actor.max_tokens_per_device = sequence, row, 2**18
    c.data.packing, c.data.max_prompt_length, c.data.max_response_length = "segments", 2048, 30720
    proposed = [changes.get("actor.max_tokens_per_device", 2**18) for changes in memory_budget.remedies(typed(c))]
    assert fewest <= proposed[-1] < 2 * fewest
    assert min(tokens for _, tokens in pairs(asking(c))) == fewest
    settings.check(settings.changed(typed(c), {"actor.max_tokens_per_device": fewest}))
    if sequence > 0:
        with pytest.raises(UserError, match=r"actor\.max_tokens_per_device"):
            settings.check(settings.changed(typed(c), {"actor.max_tokens_per_device": fewest - 1}))


def asking(config, remat="auto", tokens=-1):
    return settings.changed(typed(config), {"model.remat": remat, "actor.max_tokens_per_device": tokens})


def pairs(config):
    return [tuple(changes.values()) for changes in memory_budget.candidates(typed(config))]


def test_candidates_recompute_as_little_as_can_be_with_large_micro_batches_first():
    c = asking(settings.default())  # rows of 1,536
    many = [24576, 12288, 6144]
    expected = [(remat, tokens) for remat in ("none", "dots", "attention", "full") for tokens in many]
    assert pairs(c) == [*expected, ("full", 3072), ("full", 1536)]
    assert pairs(asking(c, "dots", 8192)) == [("dots", 8192)]
    assert pairs(asking(c, "auto", 8192)) == [(remat, 8192) for remat in ("none", "dots", "attention", "full")]


def test_the_first_that_fits_is_chosen_and_none_is_an_error():
    tried, c = [], asking(with_paths(settings.default()))

    def fits(other):
        tried.append((other.model.remat, other.actor.max_tokens_per_device))
        return other.model.remat == "attention" and other.actor.max_tokens_per_device <= 12288

    assert memory_budget.first_fitting(typed(c), fits) == {
        "model.remat": "attention",
        "actor.max_tokens_per_device": 12288,
    }
    assert tried == pairs(c)[: len(tried)] and len(tried) == 8
    with pytest.raises(UserError, match=r"model\.remat=auto .*none of 14 candidates fits.*model\.lora_rank"):
        memory_budget.first_fitting(typed(c), lambda other: False)


def test_a_choice_is_kept_until_its_conditions_change(config_of_a_run, tmp_path):
    device = SimpleNamespace(device_kind="cpu")
    mesh, tried = SimpleNamespace(devices=np.array([device], object), shape={"fsdp": 1}), []

    def settle(c, mesh, fits):
        tried.clear()
        return memory_budget.settle(c, mesh, tmp_path, lambda other: bool(tried.append(1)) or fits)[0]

    c = asking(config_of_a_run)
    assert settle(c, mesh, True).model.remat == "none" and len(tried) == 1
    assert settle(c, mesh, False).model.remat == "none" and not tried
    wider = SimpleNamespace(devices=mesh.devices, shape={"fsdp": 2})
    assert settle(c, wider, True).model.remat == "none" and len(tried) == 1
    (tmp_path / "auto.json").write_text("{}")
    assert settle(asking(config_of_a_run, "auto", 8192), mesh, True).actor.max_tokens_per_device == 8192
    assert len(tried) == 1


@pytest.mark.parametrize(
    "switches, said",
    [
        ({"machine": "8xH100"}, "--machine belongs to --dry_run"),
        ({"json": "x.json"}, "--json belongs to --dry_run"),
        ({"dry_run": True, "rollout_tokens_per_s": 5.0}, "is for a described machine; add --machine"),
        ({"dry_run": True, "machine": "H100", "rollout_tokens_per_s": -1.0}, "must be above 0"),
        ({"dry_run": True, "machine": "8xB300"}, "no such machine"),
        ({"dry_run": True, "machine": ""}, "no such machine"),
    ],
)
def test_what_cannot_be_is_said(switches, said):
    with pytest.raises(UserError, match=said):
        read_request(switches, "jppo.train", [])


def test_nothing_is_asked_for_by_default():
    assert read_request({}, "jppo.train", []) == DryRun()


def test_a_file_that_cannot_be_written_is_said(tmp_path):
    with pytest.raises(UserError, match="cannot be written: Is a directory; name another file"):
        DryRun(json=str(tmp_path)).write({})


def with_paths(c):
    c.model.path, c.data.train_files, c.data.val_files = "m", "d.parquet", "d.parquet"
    return c


@pytest.fixture
def config_of_a_run():
    return with_paths(settings.default())


def test_a_run_takes_what_fits_records_it_and_a_resumed_one_keeps_it(small_run, quick_compilation, monkeypatch, capsys):
    c = small_run
    c.model.remat, c.actor.max_tokens_per_device = "auto", -1
    c.trainer.total_training_steps, c.trainer.save_freq = 1, 1
    asked = []
    monkeypatch.setattr(preview, "fits", lambda other, inputs, mesh: asked.append(other.model.remat) or len(asked) > 1)
    train.train(c)
    run = pathlib.Path(c.trainer.run_dir)
    written = json.loads((run / "config.json").read_text())
    chosen = json.loads((run / "auto.json").read_text())["chosen"]
    assert written["model"]["remat"] == chosen["model.remat"]
    assert written["actor"]["max_tokens_per_device"] == chosen["actor.max_tokens_per_device"] > 0
    assert "chosen by the memory of cpu: model.remat=" in capsys.readouterr().out
    count = len(asked)
    train.train(again(c, trainer__total_training_steps=2))
    assert len(asked) == count, "a resumed run compiles no candidates"
    assert [m["step"] for m in untimed(run)] == [0, 1, 2]


def test_a_dry_run_chooses_by_this_machine(small_run):
    inputs, mesh = read_inputs(typed(small_run)), make_mesh(typed(small_run))
    fits = functools.partial(preview.fits, inputs=inputs, mesh=mesh)
    c, chosen = preview.resolve_auto(asking(small_run), mesh, fits)
    assert c.model.remat == "none" and chosen == [
        f"chosen by memory model.remat=none, actor.max_tokens_per_device={c.actor.max_tokens_per_device}"
    ]


def test_fine_tuning_refuses_it():
    c = settings.sft_default()
    c.model.path, c.data.train_files, c.model.remat = "m", "d.jsonl", "auto"
    with pytest.raises(UserError, match=r"model\.remat='auto' is decided by jppo\.train alone"):
        settings.check(c)
