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
    # some frequencies stretched, some not, some between
    "llama-llama3": dict(
        model_type="llama",
        tie_word_embeddings=True,
        hidden_size=36,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=24,
        vocab_size=45,
        rope_theta=5e5,
        rope_scaling=dict(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "llama-linear": dict(
        model_type="llama",
        tie_word_embeddings=False,
        hidden_size=28,
        intermediate_size=36,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=43,
        rope_theta=1e4,
        rope_scaling=dict(type="linear", factor=2.5),
    ),
    # some frequencies kept, some divided, some between
    "llama-yarn": dict(
        model_type="llama",
        tie_word_embeddings=False,
        hidden_size=44,
        intermediate_size=38,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=26,
        vocab_size=49,
        rope_theta=1e4,
        rope_scaling=dict(
            rope_type="yarn", factor=6.0, original_max_position_embeddings=24, beta_fast=4.0, beta_slow=0.5
        ),
    ),
    # the window counts from the second layer on
    "qwen2-sliding": dict(
        model_type="qwen2",
        tie_word_embeddings=True,
        hidden_size=36,
        intermediate_size=52,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        vocab_size=59,
        rope_theta=1e5,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=1,
    ),
    "qwen3-tied": dict(
        model_type="qwen3",
        tie_word_embeddings=True,
        hidden_size=40,
        intermediate_size=46,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=22,
        vocab_size=83,
        rope_theta=1e6,
    ),
    "qwen3-biased": dict(
        model_type="qwen3",
        tie_word_embeddings=False,
        hidden_size=30,
        intermediate_size=70,
        num_hidden_layers=2,
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=41,
        attention_bias=True,
        rope_theta=1e4,
    ),
    "mistral-sliding": dict(
        model_type="mistral",
        tie_word_embeddings=False,
        hidden_size=40,
        intermediate_size=58,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=14,
        vocab_size=67,
        sliding_window=7,
        rope_theta=1e4,
    ),
    "mistral-full": dict(
        model_type="mistral",
        tie_word_embeddings=False,
        hidden_size=42,
        intermediate_size=38,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        vocab_size=47,
        sliding_window=None,
        rope_theta=1e6,
    ),
    "gemma-wide": dict(
        model_type="gemma",
        tie_word_embeddings=True,
        hidden_size=36,
        intermediate_size=50,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=18,
        vocab_size=73,
        hidden_act="gelu",
        hidden_activation=None,
        rope_theta=1e4,
    ),
    "gemma-even": dict(
        model_type="gemma",
        tie_word_embeddings=True,
        hidden_size=32,
        intermediate_size=31,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=10,
        vocab_size=52,
        hidden_act="gelu_pytorch_tanh",
        rope_theta=1e4,
    ),
    # caps that bend what they cap; an odd number of layers that slide in turn
    "gemma2-capped": dict(
        model_type="gemma2",
        tie_word_embeddings=True,
        hidden_size=36,
        intermediate_size=44,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        vocab_size=69,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=20,
        sliding_window=6,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        rope_theta=1e4,
    ),
    "gemma2-free": dict(
        model_type="gemma2",
        tie_word_embeddings=True,
        hidden_size=28,
        intermediate_size=60,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=55,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=9,
        sliding_window=64,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        rope_theta=1e4,
    ),
    # seven layers: one sees all, with frequencies of its own
    "gemma3-long": dict(
        model_type="gemma3_text",
        tie_word_embeddings=True,
        hidden_size=32,
        intermediate_size=42,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=14,
        vocab_size=77,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=14,
        sliding_window=5,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling=dict(rope_type="linear", factor=8.0),
    ),
    "gemma3-mixed": dict(
        model_type="gemma3_text",
        tie_word_embeddings=True,
        hidden_size=30,
        intermediate_size=34,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=20,
        vocab_size=48,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=30,
        sliding_window=4,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        final_logit_softcapping=4.0,
        rope_theta=1e5,
        rope_local_base_freq=2e3,
    ),
    # a shared expert; the first and every third layer are dense
    "qwen2-moe-mixed": dict(
        model_type="qwen2_moe",
        tie_word_embeddings=False,
        hidden_size=36,
        intermediate_size=50,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=3,
        vocab_size=63,
        rope_theta=1e4,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=22,
        shared_expert_intermediate_size=30,
        norm_topk_prob=False,
        decoder_sparse_step=1,
        mlp_only_layers=[0, 3],
    ),
    "qwen2-moe-tied": dict(
        model_type="qwen2_moe",
        tie_word_embeddings=True,
        hidden_size=28,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=47,
        rope_theta=1e6,
        num_experts=7,
        num_experts_per_tok=3,
        moe_intermediate_size=18,
        shared_expert_intermediate_size=10,
        norm_topk_prob=True,
        qkv_bias=False,
    ),
    "qwen3-moe-normed": dict(
        model_type="qwen3_moe",
        tie_word_embeddings=False,
        hidden_size=40,
        intermediate_size=46,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=22,
        vocab_size=83,
        rope_theta=1e6,
        num_experts=9,
        num_experts_per_tok=4,
        moe_intermediate_size=14,
        norm_topk_prob=True,
    ),
    # every second layer is sparse
    "qwen3-moe-stepped": dict(
        model_type="qwen3_moe",
        tie_word_embeddings=True,
        hidden_size=30,
        intermediate_size=34,
        num_hidden_layers=4,
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=41,
        attention_bias=True,
        rope_theta=1e4,
        num_experts=3,
        num_experts_per_tok=1,
        moe_intermediate_size=26,
        norm_topk_prob=False,
        decoder_sparse_step=2,
    ),
    "mixtral-full": dict(
        model_type="mixtral",
        tie_word_embeddings=False,
        hidden_size=42,
        intermediate_size=38,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        vocab_size=47,
        sliding_window=None,
        rope_theta=1e6,
        num_local_experts=6,
        num_experts_per_tok=2,
        rms_norm_eps=1e-5,
    ),
    "mixtral-sliding": dict(
        model_type="mixtral",
        tie_word_embeddings=True,
        hidden_size=40,
        intermediate_size=58,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=14,
        vocab_size=67,
        sliding_window=7,
        rope_theta=1e4,
        num_local_experts=3,
        num_experts_per_tok=3,
    ),
    # queries and keys are normed over all heads
    "olmoe-grouped": dict(
        model_type="olmoe",
        tie_word_embeddings=False,
        hidden_size=36,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        vocab_size=57,
        rope_theta=1e4,
        num_experts=10,
        num_experts_per_tok=4,
        norm_topk_prob=False,
    ),
    "olmoe-tied": dict(
        model_type="olmoe",
        tie_word_embeddings=True,
        hidden_size=24,
        intermediate_size=14,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=53,
        attention_bias=True,
        rope_theta=1e4,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        rms_norm_eps=1e-5,
    ),
}


def config_of(name):
    """The config.json of one of the shapes, as transformers 4 would write it."""
    return dict(
        dict(hidden_act="silu"),
        max_position_embeddings=128,
        initializer_range=0.02,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ) | dict(SHAPES[name])


def torch_model(name, *, kind="AutoModelForCausalLM", seed=0):
    """A transformers model of that shape with weights large enough that a fault in any of them shows."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    extra = {"num_labels": 1} if "Sequence" in kind else {}
    settings = config_of(name) | extra
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    # eager: the one form of theirs in which every family has its soft caps, and experts may have any width
    model = getattr(transformers, kind).from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, p in model.named_parameters():
            draw = torch.randn(p.shape, generator=generator)
            offset = 0.0 if config.model_type.startswith("gemma") else 1.0  # gemma's norms add it themselves
            p.copy_(offset + 0.3 * draw if "norm" in key else 0.15 * draw)
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
