"""Settings that follow from memory: the order of candidates, the first that fits, what a resumed run keeps."""

import json
import pathlib

import pytest

from jppo import settings, train
from jppo.learner.make import make_mesh
from jppo.preflight import auto, preview
from jppo.run.inputs import read_inputs
from jppo.settings import UserError
from tests.make import typed
from tests.test_resume import again, untimed


def asking(config, remat="auto", tokens=-1):
    return settings.changed(typed(config), {"model.remat": remat, "actor.max_tokens_per_device": tokens})


def pairs(config):
    return [tuple(changes.values()) for changes in auto.candidates(typed(config))]


def test_candidates_recompute_as_little_as_can_be_with_large_micro_batches_first():
    c = asking(settings.default())  # rows of 1,536
    many = [24576, 12288, 6144]
    expected = [(remat, tokens) for remat in ("none", "dots", "attention", "full") for tokens in many]
    assert pairs(c) == [*expected, ("full", 3072), ("full", 1536)]
    assert pairs(asking(c, "dots", 8192)) == [("dots", 8192)]
    assert pairs(asking(c, "auto", 8192)) == [(remat, 8192) for remat in ("none", "dots", "attention", "full")]


def test_the_first_that_fits_is_chosen_and_none_is_an_error():
    config, tried = settings.default(), []
    config.model.path, config.data.train_files, config.data.val_files = "m", "d.parquet", "d.parquet"
    c = asking(config)

    def fits(other):
        tried.append((other.model.remat, other.actor.max_tokens_per_device))
        return other.model.remat == "attention" and other.actor.max_tokens_per_device <= 12288

    assert auto.first_fitting(typed(c), fits) == {"model.remat": "attention", "actor.max_tokens_per_device": 12288}
    assert tried == pairs(c)[: len(tried)] and len(tried) == 8
    with pytest.raises(UserError, match=r"model\.remat=auto .*none of 14 candidates fits.*model\.lora_rank"):
        auto.first_fitting(typed(c), lambda other: False)


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
    c, chosen = preview.settled(asking(small_run), read_inputs(typed(small_run)), make_mesh(typed(small_run)))
    assert c.model.remat == "none" and chosen == [
        f"chosen by memory model.remat=none, actor.max_tokens_per_device={c.actor.max_tokens_per_device}"
    ]


def test_fine_tuning_refuses_it():
    c = settings.sft_default()
    c.model.path, c.data.train_files, c.model.remat = "m", "d.jsonl", "auto"
    with pytest.raises(UserError, match=r"model\.remat='auto' is decided by jppo\.train alone"):
        settings.check(c)
