"""Small random checkpoints made by transformers, and the models they hold."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest


def _shape(model_type, sizes, heads, *groups, tied=False, **fields):
    """A config.json: hidden size, MLP, layers and vocabulary; heads, key/value heads and head_dim; and its fields."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
    sizes = {name: size for name, size in zip(names, sizes, strict=True) if size is not None}
    sizes |= dict(zip(("num_attention_heads", "num_key_value_heads", "head_dim"), heads, strict=False))
    out = dict(model_type=model_type, tie_word_embeddings=tied, **sizes, **fields)
    for group in groups:
        out |= group
    return out


SHAPES = {
    # head_dim is not hidden/heads, three query heads a kv head, an odd vocabulary
    "qwen2-tied": _shape("qwen2", (40, 56, 3, 97), (6, 2, 10), tied=True, rope_theta=1e6),
    "qwen2-untied": _shape("qwen2", (48, 33, 2, 61), (4, 4), rope_theta=1e4),
    "llama-biased": _shape(
        "llama", (36, 50, 2, 71), (4, 1, 14), attention_bias=True, mlp_bias=True, rope_theta=5e5, rms_norm_eps=1e-5
    ),
    "llama-tied": _shape("llama", (32, 44, 4, 50), (2, 2), tied=True, rope_theta=1e4),
    # some frequencies stretched, some not, some between
    "llama-llama3": _shape(
        *("llama", (36, 40, 2, 45), (3, 3, 24)),
        dict(rope_theta=5e5),
        rope_scaling=dict(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
        tied=True,
    ),
    "llama-linear": _shape(
        "llama", (28, 36, 2, 43), (2, 1), rope_theta=1e4, rope_scaling=dict(type="linear", factor=2.5)
    ),
    # some frequencies kept, some divided, some between
    "llama-yarn": _shape(
        *("llama", (44, 38, 2, 49), (4, 2, 26)),
        dict(rope_theta=1e4),
        rope_scaling=dict(
            rope_type="yarn", factor=6.0, original_max_position_embeddings=24, beta_fast=4.0, beta_slow=0.5
        ),
    ),
    # the window counts from the second layer on
    "qwen2-sliding": _shape(
        *("qwen2", (36, 52, 3, 59), (6, 3)),
        dict(rope_theta=1e5, use_sliding_window=True, sliding_window=5, max_window_layers=1),
        tied=True,
    ),
    "qwen3-tied": _shape("qwen3", (40, 46, 3, 83), (4, 2, 22), tied=True, rope_theta=1e6),
    "qwen3-biased": _shape("qwen3", (30, 70, 2, 41), (5, 1, 8), attention_bias=True, rope_theta=1e4),
    "mistral-sliding": _shape("mistral", (40, 58, 3, 67), (4, 2, 14), sliding_window=7, rope_theta=1e4),
    "mistral-full": _shape("mistral", (42, 38, 2, 47), (3, 3), sliding_window=None, rope_theta=1e6),
    "gemma-wide": _shape(
        "gemma", (36, 50, 2, 73), (4, 1, 18), tied=True, hidden_act="gelu", hidden_activation=None, rope_theta=1e4
    ),
    "gemma-even": _shape(
        "gemma", (32, 31, 3, 52), (2, 2, 10), tied=True, hidden_act="gelu_pytorch_tanh", rope_theta=1e4
    ),
    # caps that bend what they cap; an odd number of layers that slide in turn
    "gemma2-capped": _shape(
        *("gemma2", (36, 44, 3, 69), (4, 2, 12)),
        dict(hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=20, sliding_window=6),
        dict(attn_logit_softcapping=2.0, final_logit_softcapping=3.0, rope_theta=1e4),
        tied=True,
    ),
    "gemma2-free": _shape(
        *("gemma2", (28, 60, 2, 55), (2, 1, 16)),
        dict(hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=9, sliding_window=64),
        dict(attn_logit_softcapping=None, final_logit_softcapping=None, rope_theta=1e4),
        tied=True,
    ),
    # seven layers: one sees all, with frequencies of its own
    "gemma3-long": _shape(
        *("gemma3_text", (32, 42, 7, 77), (4, 2, 14)),
        dict(hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=14, sliding_window=5, rope_theta=1e6),
        dict(rope_local_base_freq=1e4, rope_scaling=dict(rope_type="linear", factor=8.0)),
        tied=True,
    ),
    "gemma3-mixed": _shape(
        *("gemma3_text", (30, 34, 3, 48), (3, 1, 20)),
        dict(hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=30, sliding_window=4),
        dict(layer_types=["full_attention", "sliding_attention", "full_attention"], final_logit_softcapping=4.0),
        dict(rope_theta=1e5, rope_local_base_freq=2e3),
        tied=True,
    ),
    # fused projections
    "phi3-grouped": _shape("phi3", (40, 54, 3, 73), (4, 2), sliding_window=6, rope_theta=2.5e5, rms_norm_eps=1e-5),
    # part of each head is turned
    "phi3-partial": _shape(
        *("phi3", (48, 35, 2, 51), (3, 3)),
        dict(partial_rotary_factor=0.75, original_max_position_embeddings=64, rope_theta=1e4),
        rope_scaling=dict(
            type="longrope", short_factor=[1.0, 1.1, 1.5, 2.0, 2.5, 3.0], long_factor=[1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
        ),
        tied=True,
    ),
    # norms after attention and MLP only; queries and keys are normed over all heads
    "olmo2-grouped": _shape("olmo2", (36, 50, 3, 57), (6, 2), rope_theta=5e5),
    "olmo2-biased": _shape(
        "olmo2", (28, 30, 2, 63), (2, 2), tied=True, attention_bias=True, rms_norm_eps=1e-6, rope_theta=1e4
    ),
    # yarn in the layers that see all
    "olmo3-long": _shape(
        *("olmo3", (40, 42, 5, 71), (4, 4)),
        dict(sliding_window=6, rope_theta=5e5),
        rope_scaling=dict(
            rope_type="yarn",
            factor=8.0,
            original_max_position_embeddings=16,
            attention_factor=1.2079441541679836,
            beta_fast=32,
            beta_slow=1,
        ),
    ),
    "olmo3-mixed": _shape(
        *("olmo3", (30, 34, 3, 48), (3, 1)),
        dict(sliding_window=4, layer_types=["full_attention", "sliding_attention", "full_attention"], rope_theta=1e4),
        tied=True,
    ),
    # one of four layers has no positions
    "smollm3-tied": _shape("smollm3", (36, 46, 5, 83), (6, 2), tied=True, rope_theta=5e6, pretraining_tp=2),
    "smollm3-biased": _shape(
        *("smollm3", (42, 33, 3, 45), (3, 3)),
        dict(attention_bias=True, mlp_bias=True, no_rope_layers=[0, 1, 0], rope_theta=1e4),
        dict(rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)),
    ),
    "granite-scaled": _shape(
        *("granite", (40, 60, 3, 91), (4, 2)),
        dict(embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.078125, logits_scaling=8.0),
        dict(rope_theta=1e7),
        tied=True,
    ),
    "granite-biased": _shape(
        *("granite", (30, 28, 2, 53), (3, 1)),
        dict(attention_bias=True, mlp_bias=True, logits_scaling=3, residual_multiplier=1.7, rope_theta=1e4),
    ),
    # a shared expert; the first and every third layer are dense
    "qwen2-moe-mixed": _shape(
        *("qwen2_moe", (36, 50, 5, 63), (6, 3)),
        dict(rope_theta=1e4, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=22),
        dict(shared_expert_intermediate_size=30, norm_topk_prob=False, decoder_sparse_step=1, mlp_only_layers=[0, 3]),
    ),
    "qwen2-moe-tied": _shape(
        *("qwen2_moe", (28, 40, 2, 47), (2, 2)),
        dict(rope_theta=1e6, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=18),
        dict(shared_expert_intermediate_size=10, norm_topk_prob=True, qkv_bias=False),
        tied=True,
    ),
    "qwen3-moe-normed": _shape(
        *("qwen3_moe", (40, 46, 3, 83), (4, 2, 22)),
        dict(rope_theta=1e6, num_experts=9, num_experts_per_tok=4, moe_intermediate_size=14, norm_topk_prob=True),
    ),
    # every second layer is sparse
    "qwen3-moe-stepped": _shape(
        *("qwen3_moe", (30, 34, 4, 41), (5, 1, 8)),
        dict(attention_bias=True, rope_theta=1e4, num_experts=3, num_experts_per_tok=1, moe_intermediate_size=26),
        dict(norm_topk_prob=False, decoder_sparse_step=2),
        tied=True,
    ),
    "mixtral-full": _shape(
        *("mixtral", (42, 38, 2, 47), (3, 3)),
        dict(sliding_window=None, rope_theta=1e6, num_local_experts=6, num_experts_per_tok=2, rms_norm_eps=1e-5),
    ),
    "mixtral-sliding": _shape(
        *("mixtral", (40, 58, 3, 67), (4, 2, 14)),
        dict(sliding_window=7, rope_theta=1e4, num_local_experts=3, num_experts_per_tok=3),
        tied=True,
    ),
    # queries and keys are normed over all heads
    "olmoe-grouped": _shape(
        "olmoe", (36, 20, 2, 57), (6, 2), rope_theta=1e4, num_experts=10, num_experts_per_tok=4, norm_topk_prob=False
    ),
    "olmoe-tied": _shape(
        *("olmoe", (24, 14, 3, 53), (2, 2)),
        dict(attention_bias=True, rope_theta=1e4, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True),
        dict(rms_norm_eps=1e-5),
        tied=True,
    ),
    # limits and sinks that have an effect
    "gpt-oss-clamped": _shape(
        *("gpt_oss", (40, 22, 3, 63), (6, 2, 10)),
        dict(sliding_window=5, num_local_experts=5, num_experts_per_tok=2, swiglu_limit=0.8),
        dict(rope_parameters=dict(rope_type="default", rope_theta=1e4)),
    ),
    "gpt-oss-unbiased": _shape(
        *("gpt_oss", (28, 18, 2, 47), (3, 3, 14)),
        dict(sliding_window=9, num_local_experts=7, num_experts_per_tok=3, swiglu_alpha=1.1, attention_bias=False),
        dict(layer_types=["full_attention", "sliding_attention"]),
        dict(rope_parameters=dict(rope_type="default", rope_theta=1e5)),
        tied=True,
    ),
    # two gated delta nets before each layer of attention; a projection each for their q k v, z, b and a
    # rms_norm_eps: outputs near 0, such as of first tokens, are not blown up by the norm of a gated delta net
    "qwen3.5-periods": _shape(
        *("qwen3_5_text", (36, 50, 6, 63), (6, 2, 24)),
        dict(rms_norm_eps=1e-3, full_attention_interval=3, linear_num_key_heads=2, linear_num_value_heads=6),
        dict(linear_key_head_dim=10, linear_value_head_dim=14),
        rope_parameters=dict(rope_type="default", rope_theta=1e6, partial_rotary_factor=0.25, mrope_section=[1, 1, 1]),
        tied=True,
    ),
    # no pattern, and another convolution
    "qwen3.5-runs": _shape(
        *("qwen3_5_text", (28, 34, 5, 47), (3, 3, 16)),
        dict(rms_norm_eps=1e-3, attention_bias=True, linear_num_key_heads=3, linear_num_value_heads=3),
        dict(linear_key_head_dim=7, linear_value_head_dim=5, linear_conv_kernel_dim=3),
        dict(
            layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention", "linear_attention"]
        ),
        dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)),
    ),
    "qwen3.5-moe": _shape(
        *("qwen3_5_moe_text", (32, None, 4, 53), (4, 1, 8)),
        dict(full_attention_interval=2, linear_num_key_heads=1, linear_num_value_heads=3, linear_key_head_dim=12),
        dict(linear_value_head_dim=9, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=18),
        dict(shared_expert_intermediate_size=10),
    ),
    "qwen3.5-moe-tied": _shape(
        *("qwen3_5_moe_text", (26, None, 3, 45), (2, 2, 24)),
        dict(linear_num_key_heads=3, linear_num_value_heads=3, linear_key_head_dim=5, linear_value_head_dim=8),
        dict(linear_conv_kernel_dim=2, num_experts=4, num_experts_per_tok=1, moe_intermediate_size=12),
        dict(shared_expert_intermediate_size=16, layer_types=["linear_attention", "full_attention", "full_attention"]),
        tied=True,
    ),
    # their q k v z and b a are two projections
    "qwen3-next-periods": _shape(
        *("qwen3_next", (30, 34, 4, 61), (4, 2, 16)),
        dict(full_attention_interval=2, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6),
        dict(linear_value_head_dim=11, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=14),
        dict(shared_expert_intermediate_size=12, norm_topk_prob=True, rope_theta=1e5, partial_rotary_factor=0.25),
    ),
    "qwen3-next-dense": _shape(
        *("qwen3_next", (26, 38, 5, 43), (2, 1, 8)),
        dict(linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=9, linear_value_head_dim=6),
        dict(num_experts=7, num_experts_per_tok=3, moe_intermediate_size=16, shared_expert_intermediate_size=8),
        dict(norm_topk_prob=False, mlp_only_layers=[1], rope_theta=1e4),
        tied=True,
    ),
    # queries from the hidden state; scores raised for a longer context; transformers' version 2 needs even strides
    "deepseek2-lite": _shape(
        *("deepseek_v2", (36, 50, 3, 63), (6,)),
        dict(q_lora_rank=None, kv_lora_rank=20, qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=11),
        dict(n_routed_experts=5, num_experts_per_tok=2, moe_intermediate_size=22, n_shared_experts=2),
        dict(first_k_dense_replace=1, topk_method="greedy", rope_theta=1e4),
        rope_scaling=dict(
            rope_type="yarn",
            factor=8.0,
            original_max_position_embeddings=16,
            beta_fast=4.0,
            beta_slow=0.5,
            mscale=0.707,
            mscale_all_dim=0.9,
        ),
    ),
    "deepseek2-grouped": _shape(
        *("deepseek_v2", (30, 34, 2, 47), (3,)),
        dict(attention_bias=True, q_lora_rank=14, kv_lora_rank=10, qk_nope_head_dim=8, qk_rope_head_dim=10),
        dict(v_head_dim=26, n_routed_experts=12, num_experts_per_tok=3, moe_intermediate_size=14, n_shared_experts=1),
        dict(topk_method="group_limited_greedy", n_group=4, topk_group=2, routed_scaling_factor=2.5, rms_norm_eps=1e-4),
        dict(rope_theta=1e5),
        tied=True,
    ),
    # two dense layers, groups, yarn with the scale on the scores
    "deepseek3-grouped": _shape(
        *("deepseek_v3", (40, 46, 4, 83), (4, 4)),
        dict(q_lora_rank=18, kv_lora_rank=22, qk_nope_head_dim=13, qk_rope_head_dim=8, v_head_dim=15),
        dict(n_routed_experts=15, num_experts_per_tok=4, moe_intermediate_size=18, n_shared_experts=1),
        dict(first_k_dense_replace=2, n_group=5, topk_group=3, rope_theta=1e4),
        rope_scaling=dict(
            rope_type="yarn",
            factor=16.0,
            original_max_position_embeddings=8,
            beta_fast=32.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
        ),
    ),
    "deepseek3-halves": _shape(
        *("deepseek_v3", (28, 40, 2, 53), (2, 2)),
        dict(attention_bias=True, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=14),
        dict(v_head_dim=7, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=26, n_shared_experts=3),
        dict(first_k_dense_replace=0, n_group=1, topk_group=1, norm_topk_prob=False, routed_scaling_factor=0.6),
        dict(rope_interleave=False, rope_theta=1e6),
        tied=True,
    ),
    # embeddings in every layer; the last three layers share keys and values, and have wide MLPs
    "gemma4-shared": _shape(
        *("gemma4_text", (28, 22, 7, 59), (4, 2, 10)),
        dict(global_head_dim=18, vocab_size_per_layer_input=59, hidden_size_per_layer_input=6, num_kv_shared_layers=3),
        dict(use_double_wide_mlp=True, sliding_window=5),
        dict(
            layer_types=[
                "sliding_attention",
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "sliding_attention",
                "sliding_attention",
                "full_attention",
            ]
        ),
        dict(final_logit_softcapping=20.0, hidden_activation="gelu_pytorch_tanh", rms_norm_eps=1e-5),
        tied=True,
    ),
    # keys that are values, fewer in layers without a window; experts beside an MLP
    "gemma4-experts": _shape(
        *("gemma4_text", (30, 26, 6, 47), (6, 3, 12)),
        dict(global_head_dim=20, num_global_key_value_heads=2, attention_k_eq_v=True, attention_bias=True),
        dict(hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=7, top_k_experts=3),
        dict(moe_intermediate_size=18, sliding_window=4),
        dict(
            layer_types=[
                "sliding_attention",
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "sliding_attention",
                "full_attention",
            ]
        ),
        rope_parameters=dict(
            full_attention=dict(rope_type="proportional", partial_rotary_factor=0.5, rope_theta=5e4, factor=2.0),
            sliding_attention=dict(rope_type="default", rope_theta=2e3),
        ),
    ),
}


def _by_family():
    """All shapes; after the first of a model type they are slow."""
    seen = set()
    for name, shape in SHAPES.items():
        yield pytest.param(name, marks=pytest.mark.slow) if shape["model_type"] in seen else name
        seen.add(shape["model_type"])


BY_FAMILY = tuple(_by_family())


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
            # Norms of some families add it themselves.
            centred = config.model_type.startswith(("gemma", "qwen3_5", "qwen3_next")) and "linear_attn" not in key
            centred &= config.model_type != "gemma4_text"
            offset = 0.0 if centred else 1.0
            p.copy_(offset + 0.3 * draw if "norm" in key else 0.15 * draw)
        for key, buffer in model.named_buffers():
            if key.endswith("layer_scalar"):
                buffer.copy_(1.0 + 0.2 * torch.randn(buffer.shape, generator=generator))
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
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
