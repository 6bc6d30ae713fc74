import contextlib
import json
import mmap
import subprocess
import sys
import types

import numpy as np
import pytest

from jppo.rollout.vllm import layout, publish

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch):
    """Its config, which test_nccl.py imports, cannot be set for a stand-in."""
    monkeypatch.delitem(sys.modules, "vllm.config", raising=False)


def test_the_servers_interpreter_needs_no_jax():
    code = (
        "import sys, jppo.rollout.vllm.worker, jppo.rollout.servers.launch;"
        "assert not {'jax', 'ml_collections', 'absl', 'httpx'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def make(tied: bool, head: bool = True):
    """A worker as vLLM would build it, but for the model; and the HF model's own tensors."""
    from jppo.rollout.vllm.worker import WeightLoader

    config = transformers.Qwen2Config(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=tied,
    )  # fmt: skip

    class Worker(WeightLoader):
        def __init__(self):
            self.model_config = type("ModelConfig", (), {"hf_config": config})
            self.loaded = []

        def get_model(self):
            return model if head else model.model  # which has no module lm_head

        def reload_weights(self, *, weights_iterator):
            self.loaded.append([(name, tensor.clone()) for name, tensor in weights_iterator])

    model = transformers.Qwen2ForCausalLM(config)
    return Worker(), {name: p.detach().numpy() for name, p in model.named_parameters()}


def load(worker, tmp_path, *, version, name="w"):
    return worker.jppo_load(version=version, path=str(tmp_path / name))


def send(worker, path, tensors, version):
    with open(path, "wb") as file:
        entries = publish.write_tensors(file.fileno(), tensors)
    return worker.jppo_check(path=str(path), version=version, entries=layout.pack_bytes(entries))


@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_is_loaded_and_a_tied_head_too(tmp_path, tied):
    worker, tensors = make(tied)
    assert ("lm_head.weight" in tensors) is not tied
    assert send(worker, tmp_path / "w", tensors.items(), 3) == {"ok": True, "error": None}
    assert worker.loaded == []
    assert load(worker, tmp_path, version=3)["ok"]
    loaded = dict(worker.loaded[0])
    assert len(loaded) == len(worker.loaded[0])
    for name, tensor in tensors.items():
        assert np.array_equal(loaded.pop(name).numpy(), tensor)
    if tied:
        assert np.array_equal(loaded.pop("lm_head.weight").numpy(), tensors["model.embed_tokens.weight"])
    assert loaded == {}


def test_a_tied_head_that_the_server_has_not_is_not_loaded(tmp_path):
    worker, tensors = make(tied=True, head=False)
    send(worker, tmp_path / "w", tensors.items(), 1)
    assert load(worker, tmp_path, version=1)["ok"]
    assert {name for name, _ in worker.loaded[0]} == set(tensors)


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral", "GptOss", "DeepseekV3"])
def test_experts_have_the_names_and_shapes_of_the_files(tmp_path, family):
    from jppo.rollout.vllm.worker import expected_tensors

    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2)
    many = {"num_local_experts": 4, "num_experts": 4, "n_routed_experts": 8, "num_experts_per_tok": 2}
    config = getattr(transformers, f"{family}Config")(**sizes, **many, head_dim=8, num_key_value_heads=2)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    size, *_ = np.frombuffer((data := (tmp_path / "model.safetensors").read_bytes())[:8], "<u8").tolist()
    header = json.loads(data[8 : 8 + size])
    assert expected_tensors(config)[0] == {
        name: tuple(e["shape"]) for name, e in header.items() if name != "__metadata__"
    }


def test_the_models_class_is_made_with_vllms_config(tmp_path, monkeypatch):
    """As the classes that vLLM serves by transformers, such as OLMo 2's, need it."""
    worker, tensors = make(True)
    worker.vllm_config, made = object(), []

    @contextlib.contextmanager
    def config_set(config):
        made.append(config)
        with monkeypatch.context() as patch:
            init = transformers.Qwen2Model.__init__
            patch.setattr(transformers.Qwen2Model, "__init__", lambda *a: made.append("model") or init(*a))
            yield

    monkeypatch.setitem(sys.modules, "vllm.config", types.SimpleNamespace(set_current_vllm_config=config_set))
    assert send(worker, tmp_path / "w", tensors.items(), 1)["ok"]
    assert made == [worker.vllm_config, "model"]


def test_experts_that_a_reload_does_not_reach_are_named(tmp_path):
    """test_real_vllm.py has experts that it reaches."""
    worker, tensors = make(True)
    worker.get_model().model.layers[1].quant_method = type("Method", (), {"moe_kernel": "packed"})()
    send(worker, tmp_path / "w", tensors.items(), 1)
    answer = load(worker, tmp_path, version=1)
    assert not answer["ok"] and answer["error"].startswith("model.layers.1 keeps its old values: vLLM cannot reload")


def test_gpt_oss_is_loaded_by_expert_and_its_sinks_after_the_rest(tmp_path):
    """By their own numbers: vLLM keeps the old ones of tensors of all experts, and of sinks, without a word."""
    from jppo.rollout.vllm.worker import WeightLoader

    config = transformers.GptOssConfig(
        vocab_size=32, hidden_size=16, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_local_experts=3, num_experts_per_tok=2,
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config)
    tensors = {name: np.asarray(p.detach()) for name, p in model.named_parameters()}
    loaded = []

    class Worker(WeightLoader):
        model_config = type("ModelConfig", (), {"hf_config": config})

        def get_model(self):
            model.load_weights = lambda weights: loaded.append(dict(weights))
            return model

        def reload_weights(self, *, weights_iterator):
            loaded.append(dict(weights_iterator))

    worker = Worker()
    assert send(worker, tmp_path / "w", tensors.items(), 1)["ok"] and load(worker, tmp_path, version=1)["ok"]
    (reloaded, sinks), experts = loaded, "model.layers.1.mlp.experts"
    for theirs, ours in (("w13_weight", "gate_up_proj"), ("w2_weight", "down_proj"), ("w13_bias", "gate_up_proj_bias")):
        for i in range(3):
            assert np.array_equal(reloaded[f"{experts}.{i}.{theirs}"], tensors[f"{experts}.{ours}"][i])
    assert not [name for name in reloaded if "proj" in name and ".mlp.experts." in name]
    assert {"lm_head.weight", "model.layers.0.mlp.router.bias"} <= set(reloaded)
    assert set(sinks) == {f"model.layers.{i}.self_attn.sinks" for i in range(2)}
    assert np.array_equal(sinks["model.layers.1.self_attn.sinks"], tensors["model.layers.1.self_attn.sinks"])


def test_bfloat16_arrives_as_bfloat16(tmp_path):
    import ml_dtypes

    worker, tensors = make(True)
    half = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()}
    send(worker, tmp_path / "w", half.items(), 1)
    load(worker, tmp_path, version=1)
    name, tensor = worker.loaded[0][0]
    assert tensor.dtype == torch.bfloat16
    assert np.array_equal(tensor.float().numpy(), half[name].astype(np.float32))


def test_the_first_publish_must_be_whole_too(tmp_path):
    worker, tensors = make(True)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    answer = send(worker, tmp_path / "w", tensors.items(), 1)
    assert not answer["ok"] and "model.layers.1.self_attn.k_proj.weight missing" in answer["error"]
    assert not load(worker, tmp_path, version=1)["ok"] and worker.loaded == []


def test_a_tied_head_sent_by_name_is_refused(tmp_path):
    worker, tensors = make(True)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    assert "lm_head.weight not in the served model" in send(worker, tmp_path / "w", tensors.items(), 1)["error"]


def test_only_what_was_checked_is_loaded_and_only_once(tmp_path):
    worker, tensors = make(True)
    send(worker, tmp_path / "w", tensors.items(), 1)
    assert "version 2 was not checked" in load(worker, tmp_path, version=2)["error"]
    assert not load(worker, tmp_path, version=1, name="another trainer's")["ok"] and not worker.loaded
    assert load(worker, tmp_path, version=1)["ok"]
    assert not load(worker, tmp_path, version=1)["ok"]


def test_a_scalar_and_an_empty_tensor_arrive(tmp_path):
    from jppo.plugins.carriers import buckets
    from jppo.rollout.vllm import worker

    tensors = {"scale": np.array(2.5, np.float32), "none": np.zeros((0, 3), np.float32)}
    entries, views = buckets.checksummed(list(tensors.items()))
    (tmp_path / "w").write_bytes(bytes(views[0]).ljust(layout.ALIGN, b"\0"))
    data = layout.map_checked(str(tmp_path / "w"), entries, {name: tensor.shape for name, tensor in tensors.items()})
    found = {name: tensor.numpy() for name, tensor in worker._named_tensors([(entries, data)], {}, ())}
    assert all(np.array_equal(found[name], tensors[name]) for name in tensors)


def test_memory_in_which_a_tensor_lies_is_not_used_again():
    from jppo.rollout.vllm import worker

    first, second = mmap.mmap(-1, 64), mmap.mmap(-1, 64)
    memory = [first, second]
    tensor = torch.frombuffer(first, dtype=torch.float32)
    del first, second
    assert worker.reuse(memory) is None and len(memory) == 2
    del tensor
    assert len(worker.reuse(memory)) == 64 and len(memory) == 1


def test_a_refused_publish_takes_the_one_before_it_away(tmp_path):
    worker, tensors = make(True)
    send(worker, tmp_path / "w", tensors.items(), 1)
    send(worker, tmp_path / "x", list(tensors.items())[1:], 2)
    assert not load(worker, tmp_path, version=1)["ok"]


BY_ROW = """
import torch
from jppo.rollout.vllm import worker
torch.manual_seed(0)
x, kernels, logits = torch.randn(2, 64, 512), torch.randn(2, 512, 32), torch.randn(64, 7)

def rows_alone():
    out = [torch.empty(2, n, 32) for n in range(1, 65)]
    products = [torch.equal(torch.bmm(x[:, :len(o[0])], kernels, out=o)[:, :1], out[0]) for o in out]
    tails = [torch.equal(logits[:n].sigmoid(), logits.sigmoid()[:n]) for n in range(1, 65)]
    assert torch.allclose(out[-1].double(), x.double() @ kernels.double(), atol=1e-3)
    assert torch.allclose(logits.sigmoid().double(), 1 / (1 + (-logits.double()).exp()), atol=1e-6)
    return all(products) and all(tails)

before, model = rows_alone(), torch.nn.Module()
worker._compute_rows_alone(model)
assert rows_alone() == before  # no latent attention
model.W_UK_T = torch.nn.Parameter(torch.zeros(1))
for _ in range(2):  # at every publish
    worker._compute_rows_alone(model)
    assert rows_alone()
"""


def test_a_token_of_latent_attention_has_the_same_bits_in_any_batch():
    """In its own process, since torch's functions are replaced in the whole process."""
    subprocess.run([sys.executable, "-W", "error", "-c", BY_ROW], check=True)
