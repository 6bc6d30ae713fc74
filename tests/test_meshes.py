"""Meshes that do not suit a model, or a row, are refused with what would; commands know all axes."""

import dataclasses
import types

import pytest

from jppo import settings, train
from jppo.errors import UserError
from jppo.learner import sharding
from jppo.learner.make import make_mesh
from jppo.models import config_reader
from jppo.models.config import Experts, Routing
from jppo.models.families import QWEN3
from jppo.plugins.forecast.report import preview_run
from jppo.rollout.servers import make as rollout
from jppo.run.inputs import read_inputs
from jppo.run.make import plan_of_run
from tests.learner.test_state import SHAPE
from tests.make import typed

CFG = config_reader.parse_config(SHAPE, path="here")  # 4 heads, 2 of keys and values, width 128, MLP 256
SIX = Experts(6, 2, 64, 0, normalized=True, sparse=(True,) * CFG.num_layers, names=QWEN3, routing=Routing())


def mesh(fsdp=1, tensor=1, sequence=1, expert=1):
    return types.SimpleNamespace(shape=dict(data=1, fsdp=fsdp, tensor=tensor, sequence=sequence, expert=expert))


@pytest.mark.parametrize("sizes", [{}, dict(tensor=4), dict(sequence=4), dict(fsdp=32, tensor=2, sequence=2)])
def test_what_divides_fits(sizes):
    assert sharding.require_divisible(CFG, mesh(**sizes)) is None  # no UserError


@pytest.mark.parametrize(
    "sizes, changes, said",
    [
        (dict(tensor=3), {}, "mesh.tensor=3 must divide the 4 attention heads and the MLP's width of 256 of the qwen2"
         " model; 1, 2, 4 would"),
        (dict(tensor=4), dict(intermediate_size=258), "the MLP's width of 258 of the qwen2 model; 1, 2 would"),
        (dict(sequence=8), {}, "mesh.sequence=8 must divide the 4 attention heads of the qwen2 model; 1, 2, 4 would"),
        (dict(tensor=2, sequence=4), {}, "mesh.sequence=4 must divide the 2 attention heads of the qwen2 model that are"
         " left by mesh.tensor=2; 1, 2 would"),
        (dict(fsdp=3), {}, "mesh.fsdp=3 must divide the width of 128 of the qwen2 model; 1, 2, 4, 8, 16, 32, 64 would"),
        (dict(fsdp=2, sequence=4), dict(hidden_size=12), "mesh.fsdp=2 times mesh.sequence=4 must divide the width of 12"
         " of the qwen2 model; 1, 2, 3, 4, 6, 12 would"),
        (dict(fsdp=2, expert=4), dict(hidden_size=12), "mesh.fsdp=2 times mesh.expert=4 must divide the width of 12"
         " of the qwen2 model; 1, 2, 3, 4, 6, 12 would"),
        (dict(expert=4), dict(experts=SIX), "mesh.expert=4 must divide the 6 experts of the qwen2 model; 1, 2, 3, 6"
         " would"),
    ],
)  # fmt: skip
def test_what_does_not_is_refused_with_what_would(sizes, changes, said):
    with pytest.raises(UserError) as e:
        sharding.require_divisible(dataclasses.replace(CFG, **changes), mesh(**sizes))
    assert str(e.value).endswith(said) and "\n" not in str(e.value)


def test_a_run_is_refused_before_a_server_starts(small_run, monkeypatch):
    monkeypatch.setattr(rollout, "start_vllm", lambda *_, **__: pytest.fail("a server was started"))
    small_run.mesh.data, small_run.mesh.sequence = 1, 8
    for command in (train.train, preview_run):
        with pytest.raises(UserError, match=r"mesh\.sequence=8 must divide the \d attention heads"):
            command(typed(small_run))


def test_a_device_need_not_hold_what_several_share(small_run):
    longest = small_run.data.max_prompt_length + small_run.data.max_response_length
    small_run.actor.max_tokens_per_device = longest // 2 - 1
    with pytest.raises(UserError, match=f"=14; try {longest}"):
        settings.check(small_run)
    small_run.mesh.sequence = 2
    with pytest.raises(UserError, match=r"on mesh\.sequence=2 devices each; try 7"):
        settings.check(small_run)
    small_run.actor.max_tokens_per_device = longest // 2
    settings.check(small_run)


def test_rows_are_cut_evenly_and_a_device_has_its_tokens(small_run):
    c = small_run
    c.mesh.data, c.mesh.fsdp, c.mesh.sequence = 1, 2, 4
    c.actor.max_tokens_per_device = 8
    inputs = read_inputs(typed(c))
    plan = plan_of_run(typed(c), make_mesh(typed(c)), inputs)
    assert plan.shapes == [(4, 16)]  # 13 entries, rounded up; 2 rows on each two of four devices
