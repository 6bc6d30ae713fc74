"""MXFP4 checkpoints: the numbers of transformers' own dequantisation, loaded, exported without it, and refused."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jppo.errors import UserError
from jppo.models import hf, hf_write, tensorfile
from jppo.preflight import models_and_data
from tests.models.conftest import config_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CONFIG = config_of("gpt-oss-clamped") | dict(
    hidden_size=64, intermediate_size=32, quantization_config={"quant_method": "mxfp4"}
)  # fmt: skip
EXPERTS = CONFIG["num_local_experts"]


def theirs(blocks, scales):
    """transformers' [E, I, O] in bfloat16."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    found = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
    return found.view(torch.uint16).numpy().view(jnp.bfloat16)


def test_every_byte_at_every_scale_is_transformers_to_the_bit():
    blocks = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16), (1, 256, 16, 16)).copy()
    scales = np.broadcast_to(np.arange(256, dtype=np.uint8)[None, :, None], (1, 256, 16)).copy()
    found, expected = tensorfile.decode_mxfp4(blocks, scales), theirs(blocks, scales)
    assert found.shape == (1, 512, 256) and found.dtype == jnp.bfloat16
    assert np.array_equal(found.view(np.uint16), expected.view(np.uint16))


@pytest.fixture
def packed(tmp_path, rng):
    """A directory with packed experts, and its plain tensors."""
    settings = {key: value for key, value in CONFIG.items() if key not in ("model_type", "quantization_config")}
    model = transformers.AutoModelForCausalLM.from_config(transformers.GptOssConfig(**settings))
    plain = {name: p.detach().numpy() for name, p in model.state_dict().items()}
    stored = dict(plain)
    for name in [name for name in plain if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        E, I, O = stored.pop(name).shape
        blocks = rng.integers(0, 256, (E, O, I // 32, 16)).astype(np.uint8)
        scales = rng.integers(118, 127, (E, O, I // 32)).astype(np.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = theirs(blocks, scales).astype(np.float32)
    folder = tmp_path / "packed"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    safetensors.numpy.save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, stored, plain


def test_it_is_read_as_bfloat16_and_exported_without_its_packing(packed, tmp_path):
    folder, _, plain = packed
    _, cfg = hf.read_config(folder)
    assert cfg.quantization == "mxfp4"
    values = hf.load_params(folder, cfg, head="lm", param_dtype=jnp.float32)
    for name, tensor in hf_write.hf_tensors(values, cfg):
        np.testing.assert_array_equal(tensor, plain[name], err_msg=name)
    assert {name: x.dtype.name for name, x in hf.stored_tensors(folder, cfg) if name.endswith("down_proj")} == {
        f"model.layers.{i}.mlp.experts.down_proj": "bfloat16" for i in range(3)
    }
    out = hf_write.save_model(tmp_path / "out", values, cfg, source=folder, dtype=jnp.bfloat16)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    again, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    for name, p in again.state_dict().items():
        assert torch.equal(p, torch.from_numpy(plain[name].copy()).to(torch.bfloat16)), name


@pytest.mark.slow
def test_the_doctor_compares_it_with_transformers(packed):
    folder, _, _ = packed
    ids = np.arange(3, 15)
    found = models_and_data.transformers_logprobs("", str(folder), ids)
    np.testing.assert_allclose(
        found, models_and_data.own_logprobs(str(folder), hf.read_config(folder)[1], ids), atol=1e-4
    )


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda scales: None, "gate_up_proj_blocks has no model.layers.0.mlp.experts.gate_up_proj_scales"),
        (lambda scales: scales[:, :-1], r"gate_up_proj_blocks is U8\[5, 64, 2, 16\], its scales U8\[5, 63, 2\]"),
        (lambda scales: scales.astype(np.float32), r"its scales F32\[5, 64, 2\]; MXFP4 is U8"),
        (lambda scales: scales[:3], r"its scales U8\[3, 64, 2\]"),
    ],
)
def test_a_tensor_that_is_no_mxfp4_is_refused_by_name(packed, change, said):
    folder, stored, _ = packed
    name = "model.layers.0.mlp.experts.gate_up_proj_scales"
    changed = change(stored.pop(name))
    rest = stored if changed is None else stored | {name: np.ascontiguousarray(changed)}
    safetensors.numpy.save_file(rest, folder / "model.safetensors", metadata={"format": "pt"})
    _, cfg = hf.read_config(folder)
    with pytest.raises(UserError, match=said) as e:
        hf.check_weights(folder, cfg, head="lm")
    assert "\n" not in str(e.value)


def test_too_few_bytes_are_refused(packed):
    folder, _, _ = packed
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data.replace(b'"shape":[5,64,2,16]', b'"shape":[5,64,4,16]', 1))
    with pytest.raises(UserError, match="which is not U8 of shape"):
        tensorfile.slots(folder)
