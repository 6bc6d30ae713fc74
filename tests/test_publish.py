"""What a publish hands to the engine, and that it is what vLLM would have made of the trainer's own weights."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jppo import settings
from jppo.errors import UserError
from jppo.learner import sharding
from jppo.models import decoder, hf, hf_write, lora
from jppo.rollout import publish
from jppo.rollout.inprocess import InprocessSampler
from jppo.rollout.make import make_publish_settings


class Served:
    """An engine that keeps what it is given."""

    def __init__(self):
        self.loaded, self.adapters = [], []

    def load(self, tensors, *, version, mode="wait"):
        self.loaded.append(dict(tensors))

    def load_adapter(self, save, *, version, mode="wait"):
        self.adapters.append(version)


class Held(InprocessSampler):
    """The in-process engine, made without its programs."""

    def __init__(self):
        self.policy = None

    def hold(self, policy, *, version):
        self.policy = policy


def learner_of(cfg, weights):
    return types.SimpleNamespace(cfg=cfg, policy=lambda now: weights, mesh=sharding.mesh_of_shape((1, 1, 1)))


@pytest.fixture
def policy(small_run):
    _, cfg = hf.read_config(small_run.model.path)
    return cfg, decoder.init_params(cfg, jax.random.key(1), head="lm", param_dtype="float32")


@pytest.mark.parametrize(
    "ours, theirs, sent",
    [
        ("float32", "float32", "float32"),
        ("float32", "bfloat16", "bfloat16"),
        ("float32", "float16", "float16"),
        ("bfloat16", "float32", "bfloat16"),
        ("bfloat16", "float16", "float16"),  # so that its range is checked
    ],
)
def test_weights_go_out_in_the_servers_dtype_unless_it_is_wider(small_run, policy, ours, theirs, sent):
    cfg, values = policy
    small_run.model.param_dtype, small_run.rollout.dtype = ours, theirs
    values = jax.tree.map(lambda x: x.astype(ours), values)
    served, now = Served(), types.SimpleNamespace(step=3)
    publish.publish_policy(make_publish_settings(small_run, None), learner_of(cfg, values), served, now)
    assert {tensor.dtype.name for tensor in served.loaded[0].values()} == {sent}
    if ours == sent:
        for name, tensor in hf_write.hf_tensors(values, cfg):
            assert np.array_equal(served.loaded[0][name].view(np.uint8), tensor.view(np.uint8))


HARD = [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x00000001, 0x80000000, 0x00007FFF,
        0x00018000, 0x477FEFFF, 0x477FF000, 0x33000000, 0x33000001, 0x387FE000, 0x38000FFF]  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_device_rounds_as_vllm_does(policy, dtype):
    """Ties, the largest, infinities, the smallest, and many at random; torch is what vLLM casts by."""
    torch = pytest.importorskip("torch")
    cfg, values = policy
    random = np.random.default_rng(0).integers(0, 2**32, cfg.vocab_size * cfg.hidden_size, dtype=np.uint32)
    bits = np.concatenate([np.array(HARD, np.uint32), random])[: random.size].view(np.float32)
    bits = np.where(np.isnan(bits), np.float32(1.0), bits).reshape(cfg.vocab_size, cfg.hidden_size)
    values["embed"]["embedding"] = jnp.asarray(bits)
    ours = dict(hf_write.hf_tensors(values, cfg, dtype=dtype))["model.embed_tokens.weight"]
    theirs = torch.empty(bits.shape, dtype=getattr(torch, dtype)).copy_(torch.from_numpy(bits.copy()))
    assert np.array_equal(ours.view(np.uint16), theirs.view(torch.uint16).numpy())


@pytest.mark.parametrize("engine", ["server", "inprocess"])
def test_a_weight_beyond_float16_is_refused(small_run, policy, engine):
    """65504 is its largest number; a cast of more would be infinite."""
    cfg, values = policy
    small_run.rollout.dtype, small_run.rollout.name = "float16", "vllm" if engine == "server" else "inprocess"
    how, now = make_publish_settings(small_run, None), types.SimpleNamespace(step=3)
    assert how.dtype == "float16"
    sampler = Served() if engine == "server" else Held()
    kernel = values["layers"]["mlp"]["up"]["kernel"]
    values["layers"]["mlp"]["up"]["kernel"] = kernel.at[0, 1, 2].set(-65504.0)
    publish.publish_policy(how, learner_of(cfg, values), sampler, now)
    values["layers"]["mlp"]["up"]["kernel"] = kernel.at[0, 1, 2].set(-7e4)
    rule = r"has a weight of 70000, and the largest float16 is 65504; set rollout.dtype.* to bfloat16 or float32"
    with pytest.raises(UserError, match=rule) as refused:
        publish.publish_policy(how, learner_of(cfg, values), sampler, now)
    assert ("model.layers.0.mlp.up_proj.weight" if engine == "server" else "layers.mlp.up.kernel") in str(refused.value)


@pytest.mark.parametrize("engine", ["server", "inprocess"])
def test_a_stored_weight_beyond_float16_is_refused(policy, tmp_path, small_run, engine):
    cfg, values = policy
    values["layers"]["mlp"]["up"]["kernel"] = values["layers"]["mlp"]["up"]["kernel"].at[0, 1, 2].set(7e4)
    path = hf_write.save_model(tmp_path / "large", values, cfg, source=small_run.model.path, dtype="float32")
    sampler = Served() if engine == "server" else Held()
    mesh = sharding.mesh_of_shape((1, 1, 1))
    publish.publish_checkpoint(path, sampler, cfg, mesh, param_dtype="float32", engine_dtype="bfloat16")
    with pytest.raises(UserError, match=r"a weight of 70000, .* is 65504; set rollout\.dtype"):
        publish.publish_checkpoint(path, sampler, cfg, mesh, param_dtype="float32", engine_dtype="float16")


def test_beside_the_base_only_adapters_go_out(small_run, policy, monkeypatch):
    cfg, _ = policy
    small_run.rollout.lora_sync, small_run.model.lora_rank = "adapter", 2
    settings.check(small_run)
    served, now = Served(), types.SimpleNamespace(step=3, policy=None)
    monkeypatch.setattr(hf_write, "_export_tensor", None)  # no tensor is made
    how = lora.Lora(2, 4.0, lora.parse_targets("all-linear"))
    publish.publish_policy(make_publish_settings(small_run, how), learner_of(cfg, None), served, now)
    assert served.adapters == [3] and served.loaded == []


@pytest.mark.parametrize("lora_sync, sent", [("adapter", 1), ("merge", 0)])
def test_the_base_goes_out_once_where_only_adapters_follow(small_run, policy, lora_sync, sent):
    cfg, values = policy
    small_run.rollout.lora_sync = lora_sync
    how = make_publish_settings(small_run, lora.Lora(2, 4.0, lora.parse_targets("all-linear")))
    learner, served = learner_of(cfg, None), Served()
    learner.actor = types.SimpleNamespace(base=types.SimpleNamespace(params=values))
    publish.publish_base(how, learner, served, 3)
    assert len(served.loaded) == sent
    learner.actor.base = None  # whole weights are trained
    publish.publish_base(how, learner, served, 3)
    assert len(served.loaded) == sent


def test_merged_adapters_go_out_as_whole_weights(small_run, policy):
    cfg, values = policy
    small_run.model.lora_rank = 2
    served, how = Served(), lora.Lora(2, 4.0, lora.parse_targets("all-linear"))
    settings_of_publish = make_publish_settings(small_run, how)
    publish.publish_policy(settings_of_publish, learner_of(cfg, values), served, types.SimpleNamespace(step=3))
    assert served.adapters == [] and set(served.loaded[0]) == {name for name, _ in hf_write.hf_tensors(values, cfg)}


def test_an_array_keeps_nothing_of_what_was_fetched_of_it(policy):
    """A copy on the host that is kept by every parameter would be a second one of the model; a donation needs none."""
    cfg, values = policy
    before = {name: tensor.copy() for name, tensor in hf_write.hf_tensors(values, cfg)}
    leaf = values["embed"]["embedding"]
    at = leaf.unsafe_buffer_pointer() if len(leaf.devices()) == 1 else None
    moved = jax.jit(lambda x: x + 1, donate_argnums=0)(leaf)
    assert at is not None and moved.unsafe_buffer_pointer() == at and leaf.is_deleted()
    assert np.array_equal(before["model.embed_tokens.weight"] + 1, np.asarray(moved))


def test_only_so_many_tensors_are_on_their_way(policy, monkeypatch):
    cfg, values = policy
    made = []
    real = hf_write.device_tensors
    monkeypatch.setattr(
        hf_write, "device_tensors", lambda *args, **kw: (made.append(pair[0]) or pair for pair in real(*args, **kw))
    )
    monkeypatch.setattr(hf_write, "AHEAD", 0)
    for i, _ in enumerate(hf_write.hf_tensors(values, cfg)):
        assert len(made) <= i + 3
    assert len(made) == i + 1
