"""The account of the trainer's own engine against the arrays that it allocates, at its largest cache."""

import dataclasses
import json
import pathlib

import jax
import pytest

from jppo import settings
from jppo.learner.make import make_mesh
from jppo.preflight import memory
from jppo.preflight.programs import account, size
from jppo.rollout import inprocess
from jppo.rollout.make import inprocess_settings
from jppo.run.inputs import read_inputs
from jppo.run.make import make_learner
from tests.make import typed

SHAPE = {"num_hidden_layers": 3, "max_position_embeddings": 2048}


@pytest.fixture
def engine_run(small_run):
    """A run whose engine has a model of three layers."""
    file = pathlib.Path(small_run.model.path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | SHAPE))
    return settings.changed(typed(small_run), {"rollout.name": "inprocess", "rollout.dtype": "bfloat16"})


def policy_of(c):
    learner, now = make_learner(c, read_inputs(c), make_mesh(c))
    return learner.policy(now)


def bytes_beside(before):
    """Bytes on the first device of all arrays but `before`."""
    seen, device = {id(x) for x in before}, jax.devices()[0]
    return size([x for x in jax.live_arrays() if id(x) not in seen and device in x.sharding.device_set])


def test_the_account_is_what_the_engine_holds_at_its_largest_cache(engine_run, monkeypatch):
    """XLA counts a pointer of 8 bytes for each result, too."""
    monkeypatch.setattr(inprocess, "_FEWEST_SLOTS", 3)
    c, policy = engine_run, policy_of(engine_run)
    sampler = inprocess.InprocessEngine(inprocess_settings(c, make_mesh(c))).ready(eos_token_ids=(), decode=str)
    assert sampler.settings.slot_counts == [4, 7, 13]
    before, held, programs = jax.live_arrays(), {}, sampler._programs

    def watched(name, run):
        def call(*args):
            out = run(*args)
            held[name] = max(held.get(name, 0), bytes_beside(before))
            return out

        return call

    names = {"place": "place prompts", "grow": "grow the cache", "advance": "decode, a token"}
    watching = {field: watched(name, getattr(programs, field)) for field, name in names.items()}
    sampler._programs = dataclasses.replace(programs, **watching)
    sampler.hold(policy, version=0)
    moments = [account(one) for one in memory.engine_programs(c, make_mesh(c), policy) if one.name in held]
    counted = {one.name: one.temporaries - one.compiled.temporaries for one in moments}
    assert counted == {name: pytest.approx(count, abs=8 * 12) for name, count in held.items()}


def test_a_prompt_longer_than_the_first_cache_lowers(engine_run):
    c = settings.changed(engine_run, {"data.max_prompt_length": 1024, "data.max_response_length": 400})
    engine = inprocess_settings(c, make_mesh(c))
    assert engine.slot_counts == [712, 1423] and engine.prompt_shapes[-1][1] == 1024
    for program in memory.engine_programs(c, make_mesh(c), policy_of(c)):
        program.lower()
