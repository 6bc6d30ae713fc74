"""Runs that are broken off go on to the bit, with real processes and kills: faults.py."""

import dataclasses
import importlib.util

import pytest

from jppo import settings, train
from jppo.learner import ppo
from jppo.learner.trainable import Trainable
from jppo.rewards.make import needed_columns
from jppo.runlog.checkpoint import Checkpoints
from jppo.samples.queue import SampleQueue
from tests import faults, make

FAULTS = ("broken_inside", "stopped_by_signals", "cut_checkpoint", "power_cut", "two_owners", "nan_parameters")
FAULTS += ("nan_gradient", "stuck_stage", "full_disk")
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make setup")


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The task, run for six steps with the engine in the process."""
    folder = tmp_path_factory.mktemp("faults") / "lab"
    changes = faults.make_task(folder) | {"rollout.name": "inprocess"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # of all runs: they must agree to the bit
        faults.to_the_end(changes, folder / "undisturbed")
        yield faults.Lab(folder, changes, faults.outcome(folder / "undisturbed"), seconds=10.0)


def test_the_settings_weigh_every_part_of_the_reward(tmp_path):
    config = settings.recipe("quickstart", str(tmp_path))
    c = make.typed(make.changed(config, faults.SETTINGS | {"reward.model.path": "judge"}))
    assert needed_columns(c) == ()  # not those of rules: the reward is a function


PATCHES = {"BETWEEN_UPDATES": (Trainable, "learn"), "NAN_GRADIENT": (ppo, "learn"), "IN_A_SAVE": (Checkpoints, "save")}
PATCHES |= dict.fromkeys(("IN_GENERATION", "STUCK_STAGE"), (SampleQueue, "take"))


@pytest.mark.parametrize("patch", PATCHES)
def test_a_driver_breaks_what_it_names(tmp_path, monkeypatch, patch):
    owner, name = PATCHES[patch]
    whole, trained = getattr(owner, name), []
    monkeypatch.setattr(owner, name, whole)  # so that it is as before at the end
    monkeypatch.setattr(train, "main", trained.append)
    exec(faults.DRIVER.format(mark=str(tmp_path / "mark"), patch=getattr(faults, patch)), {})
    assert getattr(owner, name) is not whole and len(trained) == 1


@pytest.mark.slow
def test_the_run_has_what_makes_it_hard(lab):
    """A critic, a coefficient that moves, scores that are normalised: else going on to the bit would be easy."""
    lines = lab.expected["metrics"]
    assert [line["step"] for line in lines] == list(range(7))
    coefficients = [line["actor/reward_kl_penalty_coeff"] for line in lines[1:]]
    assert len(set(coefficients)) == 6
    assert all(line["critic/grad_norm"] > 0 and line["actor/grad_norm"] > 0 for line in lines[1:])
    assert all(line["reward/rm_score/rm_raw/mean"] != line["reward/rm_score/mean"] for line in lines[1:])
    assert "model.safetensors" in lab.expected["files"]


@pytest.mark.slow
def test_a_difference_is_seen(lab):
    changed = {"metrics": [dict(line) for line in lab.expected["metrics"]], "files": dict(lab.expected["files"])}
    assert faults.difference(changed, lab.expected) == ""
    changed["metrics"][3]["actor/pg_loss"] += 1e-7
    assert faults.difference(changed, lab.expected).startswith("step 3: actor/pg_loss is")
    changed["metrics"].pop(3)
    assert "steps of metrics.jsonl" in faults.difference(changed, lab.expected)
    other = lab.expected | {"files": lab.expected["files"] | {"model.safetensors": "0"}}
    assert faults.difference(other, lab.expected) == "model.safetensors differs"


@pytest.mark.slow
def test_killed_after_three_steps_it_goes_on_to_the_bit(lab):
    (row,) = faults.killed_after_three(lab)
    assert row.kept, row.happened
    assert "resuming from the checkpoint of step 3" in row.happened


@pytest.mark.slow
def test_killed_between_the_updates_of_actor_and_critic(lab):
    (row,) = faults.broken_inside(lab, {"kill -9 between actor and critic update": faults.BETWEEN_UPDATES})
    assert row.kept, row.happened


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_is_lost(lab, fault, tmp_path):
    rows = list(getattr(faults, fault)(dataclasses.replace(lab, folder=tmp_path)))
    assert rows and all(row.kept for row in rows), rows


@pytest.mark.slow
def test_killed_at_any_moment(lab, tmp_path):
    rows = list(faults.killed_at_random(dataclasses.replace(lab, folder=tmp_path), moments=3, seed=0))
    assert len(rows) == 3 and all(row.kept for row in rows), rows


@needs_vllm
@pytest.mark.vllm
@pytest.mark.slow
def test_with_a_vllm_too(lab):
    rows = list(faults.with_vllm(lab))
    assert {row.fault for row in rows} == {"kill -9 after step 3, vLLM", "kill -9 of vLLM with rollout.max_restarts=0"}
    assert all(row.kept for row in rows), rows
