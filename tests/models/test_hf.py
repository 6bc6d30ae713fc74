"""Checkpoints in and out: the identity in bits, ties, dtypes, shards, value heads and faults by name."""

import dataclasses
import json
import shutil
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jppo.errors import UserError
from jppo.learner import sharding, state
from jppo.models import decoder, heads, hf, hf_write, params, tensorfile
from jppo.models.config import pad_vocab
from tests.make import abstract_params, whole
from tests.models.conftest import BY_FAMILY


def load(directory, head="lm", dtype=jnp.float32, key=None):
    _, cfg = hf.read_config(directory)
    return cfg, hf.load_params(directory, cfg, head=head, param_dtype=dtype, key=key)


def stored(directory):
    """All tensors of a directory, by the safetensors package."""
    out = {}
    for file in directory.glob("*.safetensors"):
        out |= safetensors.numpy.load_file(file)
    return out


def rewrite(source, target, change):
    """A copy of the checkpoint with `change(tensors)` applied."""
    shutil.copytree(source, target)
    tensors = stored(target)
    change(tensors)
    safetensors.numpy.save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def assert_same_bits(a, b):
    assert a.keys() == b.keys()
    for name, x in a.items():
        assert x.dtype == b[name].dtype and x.tobytes() == b[name].tobytes(), name


@pytest.mark.parametrize("name", BY_FAMILY)
def test_export_of_an_import_is_the_identity(checkpoint, tmp_path, name):
    directory, _ = checkpoint(name)
    cfg, values = load(directory)
    original = stored(directory)
    assert_same_bits(dict(hf_write.hf_tensors(values, cfg)), original)
    assert {k: v.shape for k, v in original.items()} == hf_write.hf_shapes(cfg)
    out = hf_write.save_model(tmp_path / "out", values, cfg, source=directory, dtype=jnp.float32)
    assert_same_bits(stored(out), original)


def test_saved_model_loads_in_transformers_without_a_complaint(checkpoint, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    directory, model = checkpoint("qwen2-tied")
    cfg, values = load(directory)
    out = hf_write.save_model(tmp_path / "deep" / "out", values, cfg, source=directory, dtype=jnp.bfloat16)
    again, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert again.dtype == torch.bfloat16
    for (name, a), b in zip(again.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b.to(torch.bfloat16)), name


def multimodal(kind):
    """A random transformers model that reads pictures, too."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    text = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1)
    text |= dict(head_dim=16, num_hidden_layers=3, max_position_embeddings=128, eos_token_id=2)
    shared = dict(num_kv_shared_layers=0, vocab_size_per_layer_input=96)
    sliding = dict(sliding_window=8, layer_types=["sliding_attention", "sliding_attention", "full_attention"])
    vision = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=28)
    make, text_only, vision_only, others = {
        "gemma3": (transformers.Gemma3Config, sliding, {"patch_size": 14}, {"image_token_index": 95}),
        "gemma4": (transformers.Gemma4Config, sliding | shared, {"head_dim": 16}, {}),
        "mistral3": (
            transformers.Mistral3Config, {"model_type": "mistral"},
            {"model_type": "pixtral", "head_dim": 16, "patch_size": 14}, {"image_token_index": 95},
        ),
        "qwen3_5": (
            transformers.Qwen3_5Config,
            dict(linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16)
            | dict(num_hidden_layers=4),
            dict(depth=1, num_heads=2, out_hidden_size=32, patch_size=4, num_position_embeddings=16),
            dict(image_token_id=95, video_token_id=94, vision_start_token_id=93, vision_end_token_id=92),
        ),
    }[kind]  # fmt: skip
    config = make(text_config=text | text_only, vision_config=vision | vision_only, **others)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "mistral3", "qwen3_5"])
def test_the_text_model_of_a_multimodal_one_is_read_and_the_rest_of_the_file_stays(tmp_path, rng, kind):
    """Logits equal those of transformers' whole model, before and after an export of changed weights."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = multimodal(kind)
    model.save_pretrained(tmp_path / "whole")
    cfg, values = load(tmp_path / "whole")
    tokens = rng.integers(3, 90, (2, 21)).astype(np.int32)

    def theirs(model):
        with torch.no_grad():
            return model(input_ids=torch.from_numpy(tokens.astype(np.int64))).logits.numpy()

    def ours(values):
        hidden = decoder.Decoder(cfg).apply({"params": values}, tokens, *whole(tokens))
        return heads.logits_of((hidden, decoder.head_kernel(values, cfg), cfg))

    expected = theirs(model)
    np.testing.assert_allclose(ours(values), expected, atol=1e-4 * np.abs(expected).max())
    same = hf_write.save_model(tmp_path / "same", values, cfg, source=tmp_path / "whole", dtype=jnp.float32)
    assert_same_bits(stored(same), stored(tmp_path / "whole"))
    changed = jax.tree.map(lambda x: x * 1.01, values)
    out = hf_write.save_model(tmp_path / "out", changed, cfg, source=tmp_path / "whole", dtype=jnp.float32)
    again, info = transformers.AutoModelForImageTextToText.from_pretrained(
        out, output_loading_info=True, attn_implementation="eager"
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    expected = theirs(again)
    np.testing.assert_allclose(ours(changed), expected, atol=1e-4 * np.abs(expected).max())
    rest = {name: x for name, x in stored(tmp_path / "whole").items() if "vis" in name or "multi_modal" in name}
    assert len(rest) > 5
    assert_same_bits(rest, {name: stored(out)[name] for name in rest})


def test_prediction_layers_are_left_out_and_a_buffer_stays_in_float32(checkpoint, tmp_path):
    directory, _ = checkpoint("deepseek3-halves")

    def add(tensors):
        tensors["model.layers.2.eh_proj.weight"] = np.ones((28, 56), np.float32)
        tensors["model.layers.2.mlp.gate.weight"] = np.ones((4, 28), np.float32)

    other = rewrite(directory, tmp_path / "other", add)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(UserError, match=r"holds model\.layers\.2\.eh_proj\.weight, .* config.json has no place for"):
        load(other)
    (other / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    cfg, values = load(other, dtype=jnp.bfloat16)
    out = hf_write.save_model(tmp_path / "out", values, cfg, source=other, dtype=jnp.bfloat16)
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 0
    original, written = stored(directory), stored(out)
    for name, tensor in original.items():
        wide = name.endswith("e_score_correction_bias")
        assert written[name].dtype == (np.float32 if wide else jnp.bfloat16)
        np.testing.assert_array_equal(written[name], tensor if wide else tensor.astype(jnp.bfloat16))


@pytest.mark.parametrize("name", ["qwen3.5-moe", "qwen2-moe-mixed"])
def test_fused_experts_and_a_prefix_are_read(checkpoint, tmp_path, name):
    """transformers keeps the names of published Qwen3.5 models, whose experts are two tensors of a layer."""
    directory, model = checkpoint(name)
    model.save_pretrained(tmp_path / "fused", save_original_format=False)

    def rename(tensors):
        assert not any(".experts.0." in key for key in tensors)
        if name.startswith("qwen3.5"):
            for key in [key for key in tensors if key.startswith("model.")]:
                tensors[key.replace("model.", "model.language_model.", 1)] = tensors.pop(key)

    cfg, values = load(rewrite(tmp_path / "fused", tmp_path / "renamed", rename))
    assert_same_bits(dict(hf_write.hf_tensors(values, cfg)), stored(directory))


@pytest.mark.parametrize(
    ("name", "extra", "unread"),
    [
        ("qwen2-untied", "model.layers.0.self_attn.rotary_emb.inv_freq", None),  # of former versions
        ("qwen3-next-periods", "mtp.fc.weight", "any multi-token prediction layers (mtp.*) are not read"),
        (
            "gemma4-shared",
            "model.layers.5.self_attn.k_proj.weight",
            "any keys and values of layers that take an earlier layer's are not read",
        ),
    ],
)
def test_tensors_that_transformers_ignores_are_not_read(checkpoint, tmp_path, name, extra, unread):
    """Published checkpoints have them."""
    directory, _ = checkpoint(name)
    original = stored(directory)
    other = rewrite(directory, tmp_path / "other", lambda tensors: tensors.update({extra: np.ones((3, 2))}))
    cfg, values = load(other)
    assert_same_bits(dict(hf_write.hf_tensors(values, cfg)), original)
    assert cfg.unread == unread


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_files_load_and_come_back(checkpoint, tmp_path, dtype):
    directory, _ = checkpoint("qwen2-untied")
    kind = np.dtype(getattr(jnp, dtype))

    def halve(tensors):
        for name, x in tensors.items():
            tensors[name] = x.astype(kind)

    half = rewrite(directory, tmp_path / "half", halve)
    original = stored(half)
    cfg, values = load(half)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(values))
    np.testing.assert_array_equal(values["lm_head"]["kernel"], original["lm_head.weight"].astype(np.float32))
    assert_same_bits(dict(hf_write.hf_tensors(values, cfg, dtype=kind)), original)
    _, kept = load(half, dtype=kind)
    assert_same_bits(dict(hf_write.hf_tensors(kept, cfg)), original)


@pytest.mark.parametrize("names", [["lm_head.weight"], ["model.embed_tokens.weight", "lm_head.weight"]])
def test_a_tied_matrix_loads_under_either_name_or_both(checkpoint, tmp_path, names):
    directory, _ = checkpoint("llama-tied")
    _, expected = load(directory)

    def rename(tensors):
        matrix = tensors.pop("model.embed_tokens.weight")
        tensors |= {name: matrix.copy() for name in names}

    other = rewrite(directory, tmp_path / "other", rename)
    for head in ("lm", "value"):
        _, values = load(other, head=head, key=jax.random.key(0))
        np.testing.assert_array_equal(values["embed"]["embedding"], expected["embed"]["embedding"])
    cfg, values = load(other)
    names = [name for name, _ in hf_write.hf_tensors(values, cfg)]
    assert names.count("model.embed_tokens.weight") == 1 and "lm_head.weight" not in names


@pytest.mark.parametrize("name", ["qwen2-tied", "qwen2-untied"])
def test_value_model_from_a_causal_one_draws_its_score(checkpoint, name):
    directory, _ = checkpoint(name)
    cfg, values = load(directory, head="value", key=jax.random.key(5))
    _, policy = load(directory)
    assert values.keys() == {"embed", "layers", "norm", "score"}
    jax.tree.map(np.testing.assert_array_equal, values["layers"], policy["layers"])
    assert values["score"]["kernel"].shape == (cfg.hidden_size, 1) and not np.any(values["score"]["kernel"])
    cfg = dataclasses.replace(cfg, value_head_std=0.02)
    how = dict(head="value", param_dtype=jnp.float32, key=jax.random.key(5))
    expected = decoder.init_head(cfg, jax.random.key(5), head="value", param_dtype=jnp.float32)
    assert np.any(expected["score"]["kernel"])
    found = hf.load_params(directory, cfg, **how)["score"]["kernel"]
    np.testing.assert_array_equal(found, expected["score"]["kernel"])
    with pytest.raises(ValueError, match="key"):
        load(directory, head="value")


def test_value_model_from_a_sequence_classifier_equals_it(checkpoint, rng):
    torch = pytest.importorskip("torch")
    directory, model = checkpoint("llama-biased", "AutoModelForSequenceClassification")
    cfg, values = load(directory, head="value")
    tokens = rng.integers(1, cfg.vocab_size, (1, 11)).astype(np.int32)
    with torch.no_grad():
        theirs = float(model(torch.from_numpy(tokens).long()).logits[0, 0])  # at the last token
    hidden = decoder.Decoder(cfg).apply({"params": values}, tokens, *whole(tokens))
    assert float(heads.values(hidden, values["score"]["kernel"])[0, -1]) == pytest.approx(theirs, rel=1e-4)
    with pytest.raises(UserError, match=r"lacks lm_head\.weight"):
        load(directory)


def test_a_histogram_from_a_sequence_classifier_draws_its_head(checkpoint):
    directory, _ = checkpoint("llama-biased", "AutoModelForSequenceClassification")
    cfg, scalar = load(directory, head="value")
    assert np.any(scalar["score"]["kernel"])
    cfg = dataclasses.replace(cfg, value_bins=4, value_head_std=cfg.hidden_size**-0.5)
    hf.check_weights(directory, cfg, head="value")
    how = dict(head="value", param_dtype=jnp.float32, key=jax.random.key(5))
    values = hf.load_params(directory, cfg, **how)
    jax.tree.map(np.testing.assert_array_equal, values["layers"], scalar["layers"])
    assert values["score"]["kernel"].shape == (cfg.hidden_size, 4)
    assert 0.5 < np.std(values["score"]["kernel"]) * cfg.hidden_size**0.5 < 1.5


def test_shards_are_written_and_read(checkpoint, tmp_path):
    directory, model = checkpoint("qwen2-untied")
    cfg, values = load(directory)
    out = hf_write.save_model(
        tmp_path / "out", values, cfg, source=directory, dtype=jnp.float32, max_shard_bytes=20_000
    )
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2 and not (out / "model.safetensors").exists()
    assert all(file.stat().st_size < 20_000 + 5_000 for file in files)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in stored(directory).values())
    assert {out / file for file in index["weight_map"].values()} == set(files)
    assert_same_bits(stored(out), stored(directory))
    _, again = load(out)
    jax.tree.map(np.testing.assert_array_equal, again, values)

    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    _, again = load(tmp_path / "theirs")
    jax.tree.map(np.testing.assert_array_equal, again, values)

    files[1].unlink()
    with pytest.raises(UserError, match=files[1].name):
        load(out)


def test_save_takes_the_tokenizer_along_and_replaces_whole(shared, tmp_path):
    source = shared / "models" / "tinystories-656k"
    cfg, values = load(source)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "stale").write_text("")
    out = hf_write.save_model(tmp_path / "out", values, cfg, source=source, dtype=jnp.bfloat16)
    held = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"}
    assert {f.name for f in out.iterdir()} == held | {"config.json", "model.safetensors"}
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and "torch_dtype" not in config
    assert [f.name for f in tmp_path.iterdir()] == ["out"]


def test_a_failed_save_leaves_what_was_there(checkpoint, tmp_path):
    directory, _ = checkpoint("llama-tied")
    cfg, values = load(directory)
    out = hf_write.save_model(tmp_path / "out", values, cfg, source=directory, dtype=jnp.float32)
    before = {f.name: f.read_bytes() for f in out.iterdir()}
    values["norm"]["scale"] = values["norm"]["scale"][:-1]
    with pytest.raises(TypeError):
        hf_write.save_model(out, values, cfg, source=directory, dtype=jnp.float32)
    assert {f.name: f.read_bytes() for f in out.iterdir()} == before
    assert [f.name for f in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("mesh_shape", [(1, 1, 8), (1, 2, 4), (8, 1, 1), (1, 2, 1, 4)])
@pytest.mark.parametrize("name", ["qwen2-untied", "gemma2-capped"])
def test_shardings_decide_the_place_and_change_no_bit(checkpoint, name, mesh_shape):
    directory, _ = checkpoint(name)
    cfg, expected = load(directory)
    mesh = sharding.mesh_of_shape(mesh_shape)
    shapes = abstract_params(cfg, head="lm", param_dtype=jnp.float32)
    axes = params.tree(params.table(cfg, head="lm"), lambda entry: entry.axes)
    places = sharding.param_shardings(mesh, axes, shapes)
    values = hf.load_params(directory, cfg, head="lm", param_dtype=jnp.float32, shardings=places)
    for x, place, plain in zip(*map(jax.tree.leaves, (values, places, expected)), strict=True):
        assert x.sharding == place
        np.testing.assert_array_equal(x, plain)


def test_no_device_has_a_whole_matrix_at_any_time(checkpoint, monkeypatch):
    """Tensors come from the file into their shards, those too that have rows for the mesh alone."""
    directory, _ = checkpoint("qwen2-untied")  # 61 tokens
    cfg = pad_vocab(hf.read_config(directory)[1], 8)
    seen, fill = [], hf._fill

    def spied(out, piece, first):
        seen.extend((x, x.addressable_shards[0].data.nbytes) for x in (out, piece))
        return fill(out, piece, first)

    monkeypatch.setattr(hf, "_fill", spied)
    what = state.model_weights(cfg, sharding.mesh_of_shape((1, 2, 2, 2)), head="lm", param_dtype=jnp.float32)
    hf.load_params(directory, cfg, head="lm", param_dtype=jnp.float32, shardings=what.shardings)
    matrices = [(x, here) for x, here in seen if 48 in x.shape and x.size > 2 * 48]  # all but norms and biases
    assert {x.shape for x, _ in matrices} >= {(64, 48), (2, 48, 4, 12), (1, 48, 4, 12), (2, 33, 48), (1, 33, 48)}
    assert all(here * (4 if 33 in x.shape else 8) == x.nbytes for x, here in matrices)  # tensor divides no 33


def test_rows_of_padding_are_zero_and_stay_out_of_the_file(checkpoint):
    directory, _ = checkpoint("qwen2-untied")  # 61 tokens
    cfg, expected = load(directory)
    wide = pad_vocab(cfg, 8)
    assert wide.padded_vocab_size == 64
    values = hf.load_params(directory, wide, head="lm", param_dtype=jnp.float32)
    for name in (("embed", "embedding"), ("lm_head", "kernel")):
        assert params.leaf_at(values, name).shape == (64, 48)
        np.testing.assert_array_equal(params.leaf_at(values, name)[:61], params.leaf_at(expected, name))
        assert (np.asarray(params.leaf_at(values, name)[61:]) == 0).all()
    assert_same_bits(dict(hf_write.hf_tensors(values, wide)), stored(directory))
    assert hf_write.hf_shapes(wide) == hf_write.hf_shapes(cfg)


def test_the_file_may_change_once_it_is_loaded(checkpoint, tmp_path):
    """Nothing that was loaded is a view of the file."""
    directory, _ = checkpoint("qwen2-tied")
    copy = rewrite(directory, tmp_path / "copy", lambda tensors: None)
    _, values = load(copy)
    before = jax.tree.map(lambda x: np.array(x), values)
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(2000)
        file.write(bytes(50_000))
    jax.tree.map(np.testing.assert_array_equal, values, before)


UP, EMBED, HEAD = "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen2-untied", lambda x: x.pop(UP), rf"lacks {UP}"),
        (
            "qwen2-untied",
            lambda x: x.update({UP.replace("1", "9"): x[UP]}),
            r"model\.safetensors holds model\.layers\.9",
        ),
        ("qwen2-untied", lambda x: x.update({UP: x[UP].T.copy()}), rf"{UP} has shape \[48, 33\].*\[33, 48\]"),
        ("qwen2-untied", lambda x: x.update({UP: x[UP].astype(np.int8)}), rf"{UP} has dtype I8"),
        ("llama-tied", lambda x: x.update({HEAD: x[EMBED] + 1}), rf"{HEAD} differs .*tie_word_embeddings"),
    ],
)
def test_wrong_tensors_are_refused_by_name(checkpoint, tmp_path, name, change, message):
    directory, _ = checkpoint(name)
    with pytest.raises(UserError, match=message):
        load(rewrite(directory, tmp_path / "other", change))


@pytest.mark.parametrize("keep", [4, 100, -1])
def test_a_cut_file_is_refused(checkpoint, tmp_path, keep):
    directory, _ = checkpoint("llama-tied")
    shutil.copytree(directory, tmp_path / "cut")
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"model\.safetensors is cut.*(header|model\.)"):
        load(tmp_path / "cut")


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 5) + b"hello")
    with pytest.raises(UserError, match="no safetensors file"):
        tensorfile.slots(tmp_path)
    with pytest.raises(UserError, match="neither"):
        tensorfile.slots(tmp_path / "missing")


MISSING = ("/no/such/model", "./runs/model", "~/nothing/here", "../no-such-model", "a/b/c", "some-org/some-model-7B")


@pytest.mark.parametrize("path", MISSING)
def test_a_missing_directory_or_hub_name_is_named(path):
    with pytest.raises(UserError) as e:
        hf.read_config(path)
    assert path in str(e.value) and "give the path" in str(e.value) and "\n" not in str(e.value)
    assert path != MISSING[-1] or "config.json" in str(e.value), "says what was sought"


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_bad_config_file_is_named(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json"):
        hf.read_config(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        [], 3, None, "x", {"w": None}, {"w": []}, {"w": {}}, {"w": {"dtype": "F32", "shape": [1]}},
        {"w": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}},
        {"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}},
        {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0]}},
        {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4.0]}},
        {"w": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}},
        {"w": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}},
        {"w": {"dtype": "F32", "shape": [2**32, 2**32], "data_offsets": [0, 0]}},
        {"w": {"dtype": 5, "shape": [1], "data_offsets": [0, 4]}},
    ],
)  # fmt: skip
def test_a_header_of_another_form_is_one_line(tmp_path, header):
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(UserError, match=r"model\.safetensors") as e:
        tensorfile.slots(tmp_path)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "index",
    ["[]", "3", "{}", '{"weight_map": []}', '{"weight_map": {"w": 3}}', '{"weight_map": {"w": "../w"}}', "[" * 99999],
)
def test_an_index_of_another_form_is_one_line(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match=r"index\.json.* weight_map") as e:
        tensorfile.slots(tmp_path)
    assert "\n" not in str(e.value)
