"""The mesh and where things lie on it."""

import math
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jppo.errors import UserError
from jppo.learner import make, packing, sharding


@pytest.mark.parametrize(
    "asked,expected",
    [
        ((-1, 1, 1, 1), (8, 1, 1, 1)),
        ((1, -1, 2, 1), (1, 4, 2, 1)),
        ((2, 2, 2, 1), (2, 2, 2, 1)),
        ((1, 8, -1, 1), (1, 8, 1, 1)),
        ((-1, 1, 1, 4), (2, 1, 1, 4)),
        ((1, 2, 1, -1), (1, 2, 1, 4)),
        ((1, 2, 1, 1, -1), (1, 2, 1, 1, 4)),
    ],
)
def test_mesh_shape(asked, expected):
    assert sharding.mesh_shape(8, **dict(zip(sharding.AXES, asked, strict=False))) == (*expected, 1)[:5]


@pytest.mark.parametrize(
    "asked", [(3, 1, 1, 1), (-1, 3, 1, 1), (-1, -1, 1, 1), (0, 1, 1, 1), (-2, 1, 1, 1), (-1, 16, 1, 1), (-1, 1, 1, 0)]
)
def test_a_mesh_that_does_not_fit_is_said(asked):
    data, fsdp, tensor, sequence = asked
    said = (
        rf"mesh\.data={data} mesh\.fsdp={fsdp} mesh\.tensor={tensor} mesh\.sequence={sequence} mesh\.expert=1: .*; try"
    )
    with pytest.raises(UserError, match=said):
        sharding.mesh_shape(8, data=data, fsdp=fsdp, tensor=tensor, sequence=sequence)


@pytest.mark.parametrize(
    "asked, fitting",
    [
        ((-1, 3, 1, 1), "mesh.data=1 mesh.fsdp=8 mesh.tensor=1 mesh.sequence=1 mesh.expert=1"),
        ((1, 4, 4, 1), "mesh.data=1 mesh.fsdp=2 mesh.tensor=4 mesh.sequence=1 mesh.expert=1"),
        ((3, 1, 2, 1), "mesh.data=4 mesh.fsdp=1 mesh.tensor=2 mesh.sequence=1 mesh.expert=1"),
        ((1, 3, 3, 1), "mesh.data=-1 and 1 for the other axes"),
        ((-1, -1, 1, 1), "mesh.data=1 mesh.fsdp=-1"),
        ((-1, 2, -1, 1), "mesh.data=1 mesh.tensor=-1"),
        ((-1, 1, 1, 0), "mesh.sequence=1 mesh.data=-1"),
        ((0, 2, 1, 1), "mesh.data=-1"),
    ],
)
def test_a_mesh_that_does_not_fit_names_one_that_does(asked, fitting):
    with pytest.raises(UserError, match=f"try {fitting}$"):
        sharding.mesh_shape(8, **dict(zip(sharding.AXES, asked, strict=False)))
    others = (1, 1, 1, 1) if "other axes" in fitting else asked
    sizes = dict(zip(sharding.AXES, others, strict=False))
    named = {axis: int(size) for axis, size in re.findall(r"mesh\.(\w+)=(-?\d+)", fitting)}
    assert math.prod(sharding.mesh_shape(8, **sizes | named)) == 8


@pytest.mark.parametrize("shape", [(1, 8, 1, 1), (3, 1, 1, 1)])
def test_slices_of_tpus_share_data_alone(shape):
    devices = [SimpleNamespace(platform="tpu", slice_index=i // 4) for i in range(8)]
    with pytest.raises(UserError, match=f"mesh.data={shape[0]}: must be a multiple of the 2 slices.*try mesh.data=2"):
        sharding.mesh_of_shape(shape, devices)


def test_parameters_lie_by_the_rules_and_whole_where_an_axis_does_not_divide():
    mesh = sharding.mesh_of_shape((2, 1, 2, 1, 2))
    axes = {"kernel": ("layers", "embed", "kv_heads", None), "odd": ("vocab", "embed"), "norm": ("norm",)}
    axes["experts"] = ("experts", "embed", "mlp")
    shapes = {
        "kernel": jax.ShapeDtypeStruct((3, 16, 2, 4), np.float32),
        "odd": jax.ShapeDtypeStruct((31, 16), np.float32),
        "norm": jax.ShapeDtypeStruct((16,), np.float32),
        "experts": jax.ShapeDtypeStruct((6, 16, 8), np.float32),
    }
    places = sharding.param_shardings(mesh, axes, shapes)
    found = {name: place.spec for name, place in places.items()}
    width = ("fsdp", "expert", "sequence")
    assert found == {"kernel": P(None, width, "tensor", None), "odd": P(None, width), "norm": P(None)} | {
        "experts": P("expert", ("fsdp", "sequence"), "tensor")
    }


def test_rows_are_spread_over_data_and_fsdp():
    mesh = sharding.mesh_of_shape((2, 2, 2))
    assert sharding.row_multiple(mesh) == 4
    rows = sharding.put_rows(packing.empty_rows((8, 5)), mesh)
    assert {shard.data.shape for shard in rows.inputs.addressable_shards} == {(2, 5)}


@pytest.mark.parametrize(
    ("size", "platform", "expected"),
    [(-1, "cpu", 2**26), (-1, "cuda", 2**29), (-1, "tpu", 2**29), (2**20, "cpu", 2**20), (2**20, "cuda", 2**20)],
)
def test_a_chunk_of_logits_is_as_large_as_the_device_likes_it(size, platform, expected):
    mesh = SimpleNamespace(devices=np.asarray([SimpleNamespace(platform=platform)]))
    model, cfg = SimpleNamespace(logprob_chunk_bytes=size), SimpleNamespace(vocab_size=49_152)
    assert make.chunk_tokens(model, cfg, mesh) == expected // (4 * 49_152)
