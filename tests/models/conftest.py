"""Small random checkpoints made by transformers, and the models they hold."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest

SHAPES = {
    # head_dim is not hidden/heads, three query heads a kv head, an odd vocabulary
    "qwen2-tied": dict(
        model_type="qwen2",
        tie_word_embeddings=True,
        hidden_size=40,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=10,
        vocab_size=97,
        rope_theta=1e6,
    ),
    "qwen2-untied": dict(
        model_type="qwen2",
        tie_word_embeddings=False,
        hidden_size=48,
        intermediate_size=33,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=61,
        rope_theta=1e4,
    ),
    "llama-biased": dict(
        model_type="llama",
        tie_word_embeddings=False,
        hidden_size=36,
        intermediate_size=50,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=14,
        vocab_size=71,
        attention_bias=True,
        mlp_bias=True,
        rope_theta=5e5,
        rms_norm_eps=1e-5,
    ),
    "llama-tied": dict(
        model_type="llama",
        tie_word_embeddings=True,
        hidden_size=32,
        intermediate_size=44,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=50,
        rope_theta=1e4,
    ),
}


def config_of(name):
    """The config.json of one of the shapes, as transformers 4 would write it."""
    return dict(
        SHAPES[name],
        architectures=["Qwen2ForCausalLM" if name.startswith("qwen2") else "LlamaForCausalLM"],
        hidden_act="silu",
        max_position_embeddings=128,
        initializer_range=0.02,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def torch_model(name, *, kind="AutoModelForCausalLM", seed=0):
    """A transformers model of that shape with weights large enough that a fault in any of them shows."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    extra = {"num_labels": 1} if "Sequence" in kind else {}
    settings = {k: v for k, v in (config_of(name) | extra).items() if k not in ("model_type", "architectures")}
    theta = settings.pop("rope_theta")
    config = transformers.AutoConfig.for_model(
        SHAPES[name]["model_type"], **settings, rope_parameters={"rope_type": "default", "rope_theta": theta}
    )
    model = getattr(transformers, kind).from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, p in model.named_parameters():
            draw = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.3 * draw if "norm" in key else 0.15 * draw)
    return model.eval()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """name, kind -> the directory of a random checkpoint and its torch model, made once."""
    made = {}

    def make(name, kind="AutoModelForCausalLM"):
        if (name, kind) not in made:
            model = torch_model(name, kind=kind)
            directory = tmp_path_factory.mktemp(f"{name}-{kind}")
            model.save_pretrained(directory)
            made[name, kind] = directory, model
        return made[name, kind]

    return make


@pytest.fixture
def hf_config():
    """name -> the parsed config.json of a random checkpoint."""
    return config_of


@pytest.fixture
def rng():
    return np.random.default_rng(0)
