"""Memory that XLA does not get: the run ends with one line and a checkpoint."""

import dataclasses
import json
import pathlib
import types

import jax
import jax.numpy as jnp
import pytest

from jppo import train
from jppo.learner.trainable import Trainable
from jppo.preflight import preview
from jppo.run import out_of_memory
from jppo.run.out_of_memory import OutOfMemory
from jppo.settings import changed
from tests.make import typed


@pytest.fixture
def greedy(monkeypatch):
    """Every update asks for more than any machine has."""

    def learn(*_, **__):
        jnp.zeros(1 << 44, jnp.float32).block_until_ready()

    monkeypatch.setattr(Trainable, "learn", learn)


@pytest.mark.parametrize("room", ["small", "taken"])
def test_an_update_without_room_names_its_stage_and_what_helps(small_run, greedy, quick_compilation, monkeypatch, room):
    sizes, now = preview.look_up_sizes, typed(small_run).model.remat

    def look(c, inputs, mesh):
        lines, found, places = sizes(c, inputs, mesh)
        if room == "small" and c.model.remat == now:
            places = [dataclasses.replace(place, has=1) for place in places]
        return lines, found, places

    monkeypatch.setattr(preview, "look_up_sizes", look)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu" if room == "small" else "gpu")
    with pytest.raises(OutOfMemory) as e:
        train.train(small_run)
    helps = {
        "small": "--config.model.remat=full fits by the account of --dry_run",
        "taken": "--dry_run estimates that the run fits: end other programs on the device, or reduce its memory with"
        " --config.model.remat=full",
    }
    assert str(e.value) == f"update_actor: memory of cpu has no room for 65536.00 GiB; {helps[room]}"
    assert (pathlib.Path(small_run.trainer.run_dir) / "checkpoints/0").is_dir()


@pytest.mark.parametrize("on_cpu", [True, False])
def test_on_a_gpu_where_the_run_fits_others_may_hold_its_memory(small_run, monkeypatch, on_cpu):
    sizes = [], types.SimpleNamespace(peak=1, refused=()), [types.SimpleNamespace(verdict="OK")]
    monkeypatch.setattr(preview, "look_up_sizes", lambda *_: sizes)
    monkeypatch.setattr(preview, "first_smaller", lambda *_, **__: None)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu" if on_cpu else "gpu")
    advice = out_of_memory._advise(typed(small_run), hosts=1)
    assert (advice == "--dry_run estimates that the run fits: end other programs on the device") != on_cpu


@pytest.mark.parametrize("chosen", [None, {"model.remat": "dots", "actor.max_tokens_per_device": 64}])
def test_what_memory_chose_is_reduced(small_run, monkeypatch, chosen):
    run = pathlib.Path(small_run.trainer.run_dir)
    run.mkdir(parents=True)
    if chosen is not None:
        (run / "auto.json").write_text(json.dumps({"chosen": chosen}))
    c, seen = changed(typed(small_run), {"model.remat": "auto", "actor.max_tokens_per_device": -1}), []
    monkeypatch.setattr(preview, "look_up_sizes", lambda c, *_: seen.append(c) or 1 / 0)  # a fault hides no error
    assert "--config.model.remat=" in out_of_memory._advise(c, hosts=1)
    (resolved,) = seen
    assert not resolved.memory_chooses and (chosen is None or resolved.model.remat == "dots")


def test_where_nothing_can_be_compiled_the_first_change_is_said(small_run, greedy, monkeypatch):
    monkeypatch.setattr(preview, "first_smaller", lambda *_, **__: None)
    with pytest.raises(OutOfMemory, match=r"try --config\.model\.remat=full, spread the models by mesh\.fsdp"):
        train.train(small_run)


def test_other_errors_of_xla_stay_as_they_are(small_run):
    with pytest.raises(Exception, match="dot_general"), out_of_memory.memory_explained(typed(small_run)):
        jnp.dot(jnp.zeros((2, 3)), jnp.zeros((2, 3)))
