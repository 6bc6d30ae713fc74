"""Runs that are broken off go on to the bit: the pieces of scripts/check_faults.py, with real processes and kills."""

import importlib.util

import pytest

from jppo import settings, train
from jppo.learner import ppo
from jppo.learner.trainable import Trainable
from jppo.rewards.make import needed_columns
from jppo.runlog.checkpoint import Checkpoints
from jppo.samples.queue import SampleQueue
from tests import make

FAULTS = ("broken_inside", "stopped_by_signals", "cut_checkpoint", "power_cut", "two_owners", "nan_parameters")
FAULTS += ("nan_gradient", "stuck_stage")
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make setup")


@pytest.fixture(scope="module")
def script():
    return make.script("scripts/check_faults.py")


@pytest.fixture(scope="module")
def lab(script, tmp_path_factory):
    """The task, run for six steps with the engine in the process."""
    folder = tmp_path_factory.mktemp("faults") / "lab"
    changes = script.make_task(folder) | {"rollout.name": "inprocess"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # of all runs: they must agree to the bit
        script.to_the_end(changes, folder / "undisturbed")
        yield script.Lab(folder, changes, script.outcome(folder / "undisturbed"), seconds=10.0)


@pytest.mark.parametrize("more", ["", "SETTINGS", "AGENT"])
def test_the_settings_weigh_every_part_of_the_reward(script, tmp_path, more):
    """Of this script's runs and of those of scripts/check_rollouts.py."""
    added = getattr(make.script("scripts/check_rollouts.py"), more) if more else {}
    config = settings.recipe("quickstart", str(tmp_path))
    c = make.typed(make.changed(config, script.SETTINGS | {"reward.model.path": "judge"} | added))
    assert needed_columns(c) == ()  # not those of rules: the reward is a function


PATCHES = {"BETWEEN_UPDATES": (Trainable, "learn"), "NAN_GRADIENT": (ppo, "learn"), "IN_A_SAVE": (Checkpoints, "save")}
PATCHES |= dict.fromkeys(("IN_GENERATION", "STUCK_STAGE"), (SampleQueue, "take"))


@pytest.mark.parametrize("patch", PATCHES)
def test_a_driver_breaks_what_it_names(script, tmp_path, monkeypatch, patch):
    owner, name = PATCHES[patch]
    whole, trained = getattr(owner, name), []
    monkeypatch.setattr(owner, name, whole)  # so that it is as before at the end
    monkeypatch.setattr(train, "main", trained.append)
    exec(script.DRIVER.format(mark=str(tmp_path / "mark"), patch=getattr(script, patch)), {})
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
def test_a_difference_is_seen(script, lab):
    changed = {"metrics": [dict(line) for line in lab.expected["metrics"]], "files": dict(lab.expected["files"])}
    assert script.difference(changed, lab.expected) == ""
    changed["metrics"][3]["actor/pg_loss"] += 1e-7
    assert script.difference(changed, lab.expected).startswith("step 3: actor/pg_loss is")
    changed["metrics"].pop(3)
    assert "steps of metrics.jsonl" in script.difference(changed, lab.expected)
    other = lab.expected | {"files": lab.expected["files"] | {"model.safetensors": "0"}}
    assert script.difference(other, lab.expected) == "model.safetensors differs"


@pytest.mark.slow
def test_killed_after_three_steps_it_goes_on_to_the_bit(script, lab):
    (row,) = script.killed_after_three(lab)
    assert row.kept, row.happened
    assert "resuming from the checkpoint of step 3" in row.happened


@pytest.mark.slow
def test_killed_between_the_updates_of_actor_and_critic(script, lab):
    (row,) = script.broken_inside(lab, {"kill -9 between actor and critic update": script.BETWEEN_UPDATES})
    assert row.kept, row.happened


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_is_lost(script, lab, fault, tmp_path):
    rows = list(getattr(script, fault)(script.dataclasses.replace(lab, folder=tmp_path)))
    assert rows and all(row.kept for row in rows), rows


@needs_vllm
@pytest.mark.vllm
@pytest.mark.slow
def test_with_a_vllm_too(script, lab):
    rows = list(script.with_vllm(lab))
    assert {row.fault for row in rows} == {"kill -9 after step 3, vLLM", "kill -9 of vLLM with rollout.max_restarts=0"}
    assert all(row.kept for row in rows), rows
