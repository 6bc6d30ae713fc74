"""Small random checkpoints made by transformers, and the models they hold."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest

# fmt: off
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size",
         "num_attention_heads", "num_key_value_heads", "head_dim")
KINDS = {"f": "full_attention", "s": "sliding_attention", "l": "linear_attention"}
YARN = dict(rope_type="yarn", beta_fast=4.0, beta_slow=0.5)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
GELU = dict(hidden_activation="gelu_pytorch_tanh")
FAMILIES = {  # what the shapes of a model type have in common
    "gemma2": GELU | dict(rope_theta=1e4), "gemma3_text": GELU, "olmoe": dict(rope_theta=1e4),
    "qwen3_5_text": dict(rms_norm_eps=1e-3),  # outputs near 0, such as of first tokens, are not blown up by a norm
}


def _shape(model_type, sizes, *, layers="", tied=False, **fields):
    """A config.json: its SIZES, 0 for none; the kinds of its layers; and other fields."""
    named = {name: int(size) for name, size in zip(SIZES, sizes.split(), strict=False) if size != "0"}
    kinds = dict(layer_types=[KINDS[letter] for letter in layers]) if layers else {}
    return dict(model_type=model_type, tie_word_embeddings=tied) | named | FAMILIES.get(model_type, {}) | kinds | fields


def _rope(theta, kind="default", **fields):
    return dict(rope_type=kind, rope_theta=theta) | fields


def _experts(count, active, width, **fields):
    return dict(num_experts=count, num_experts_per_tok=active, moe_intermediate_size=width) | fields


def _delta(key_heads, value_heads, key_dim, value_dim, **fields):
    """A gated delta net's sizes."""
    return dict(linear_num_key_heads=key_heads, linear_num_value_heads=value_heads, linear_key_head_dim=key_dim,
                linear_value_head_dim=value_dim) | fields


def _latent(query, key_value, plain, turned, value, **fields):
    """The ranks and head sizes of latent attention."""
    return dict(q_lora_rank=query, kv_lora_rank=key_value, qk_nope_head_dim=plain, qk_rope_head_dim=turned,
                v_head_dim=value) | fields


def _routed(count, active, width, shared, **fields):
    return dict(n_routed_experts=count, num_experts_per_tok=active, moe_intermediate_size=width,
                n_shared_experts=shared) | fields


SHAPES = {
    # head_dim is not hidden/heads, three query heads a kv head, an odd vocabulary
    "qwen2-tied": _shape("qwen2", "40 56 3 97  6 2 10", tied=True, rope_theta=1e6),
    "qwen2-untied": _shape("qwen2", "48 33 2 61  4 4", rope_theta=1e4),
    "llama-blocks": _shape("llama", "64 96 2 71 2 1 32", rope_theta=1e4),  # inputs in blocks of 32
    "llama-biased": _shape("llama", "36 50 2 71  4 1 14", attention_bias=True, mlp_bias=True, rope_theta=5e5,
                           rms_norm_eps=1e-5),
    "llama-tied": _shape("llama", "32 44 4 50  2 2", tied=True, rope_theta=1e4),
    # some frequencies stretched, some not, some between
    "llama-llama3": _shape("llama", "36 40 2 45  3 3 24", tied=True, rope_theta=5e5,
                           rope_scaling=LLAMA3 | dict(original_max_position_embeddings=32)),
    "llama-linear": _shape("llama", "28 36 2 43  2 1", rope_theta=1e4, rope_scaling=dict(type="linear", factor=2.5)),
    # some frequencies kept, some divided, some between
    "llama-yarn": _shape("llama", "44 38 2 49  4 2 26", rope_theta=1e4,
                         rope_scaling=YARN | dict(factor=6.0, original_max_position_embeddings=24)),
    # the window counts from the second layer on
    "qwen2-sliding": _shape("qwen2", "36 52 3 59  6 3", tied=True, rope_theta=1e5, use_sliding_window=True,
                            sliding_window=5, max_window_layers=1),
    "qwen3-tied": _shape("qwen3", "40 46 3 83  4 2 22", tied=True, rope_theta=1e6),
    "qwen3-biased": _shape("qwen3", "30 70 2 41  5 1 8", attention_bias=True, rope_theta=1e4),
    "mistral-sliding": _shape("mistral", "40 58 3 67  4 2 14", sliding_window=7, rope_theta=1e4),
    "mistral-full": _shape("mistral", "42 38 2 47  3 3", sliding_window=None, rope_theta=1e6),
    "gemma-wide": _shape("gemma", "36 50 2 73  4 1 18", tied=True, hidden_act="gelu", hidden_activation=None,
                         rope_theta=1e4),
    "gemma-even": _shape("gemma", "32 31 3 52  2 2 10", tied=True, hidden_act="gelu_pytorch_tanh", rope_theta=1e4),
    # caps that bend what they cap; an odd number of layers that slide in turn
    "gemma2-capped": _shape("gemma2", "36 44 3 69  4 2 12", tied=True, query_pre_attn_scalar=20, sliding_window=6,
                            attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "gemma2-free": _shape("gemma2", "28 60 2 55  2 1 16", tied=True, query_pre_attn_scalar=9, sliding_window=64,
                          attn_logit_softcapping=None, final_logit_softcapping=None),
    # seven layers: one sees all, with frequencies of its own
    "gemma3-long": _shape("gemma3_text", "32 42 7 77  4 2 14", tied=True, query_pre_attn_scalar=14, sliding_window=5,
                          rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=dict(rope_type="linear", factor=8.0)),
    "gemma3-mixed": _shape("gemma3_text", "30 34 3 48  3 1 20", tied=True, query_pre_attn_scalar=30, layers="fsf",
                           sliding_window=4, final_logit_softcapping=4.0, rope_theta=1e5, rope_local_base_freq=2e3),
    # fused projections
    "phi3-grouped": _shape("phi3", "40 54 3 73  4 2", sliding_window=6, rope_theta=2.5e5, rms_norm_eps=1e-5),
    # part of each head is turned
    "phi3-partial": _shape("phi3", "48 35 2 51  3 3", tied=True, partial_rotary_factor=0.75, rope_theta=1e4,
                           original_max_position_embeddings=64, rope_scaling=dict(
                               type="longrope", short_factor=[1.0, 1.1, 1.5, 2.0, 2.5, 3.0],
                               long_factor=[1.0, 2.0, 4.0, 8.0, 16.0, 32.0])),
    # norms after attention and MLP only; queries and keys are normed over all heads
    "olmo2-grouped": _shape("olmo2", "36 50 3 57  6 2", rope_theta=5e5),
    "olmo2-biased": _shape("olmo2", "28 30 2 63  2 2", tied=True, attention_bias=True, rms_norm_eps=1e-6,
                           rope_theta=1e4),
    # yarn in the layers that see all
    "olmo3-long": _shape("olmo3", "40 42 5 71  4 4", sliding_window=6, rope_theta=5e5, rope_scaling=YARN | dict(
        factor=8.0, original_max_position_embeddings=16, attention_factor=1.2079441541679836, beta_fast=32,
        beta_slow=1)),
    "olmo3-mixed": _shape("olmo3", "30 34 3 48  3 1", tied=True, sliding_window=4, layers="fsf", rope_theta=1e4),
    # one of four layers has no positions
    "smollm3-tied": _shape("smollm3", "36 46 5 83  6 2", tied=True, rope_theta=5e6, pretraining_tp=2),
    "smollm3-biased": _shape("smollm3", "42 33 3 45  3 3", attention_bias=True, mlp_bias=True,
                             no_rope_layers=[0, 1, 0], rope_theta=1e4, rope_scaling=dict(
                                 rope_type="yarn", factor=4.0, original_max_position_embeddings=32)),
    "granite-scaled": _shape("granite", "40 60 3 91  4 2", tied=True, embedding_multiplier=12.0, logits_scaling=8.0,
                             residual_multiplier=0.22, attention_multiplier=0.078125, rope_theta=1e7),
    "granite-biased": _shape("granite", "30 28 2 53  3 1", attention_bias=True, mlp_bias=True, logits_scaling=3,
                             residual_multiplier=1.7, rope_theta=1e4),
    # a shared expert; the first and every third layer are dense
    "qwen2-moe-mixed": _shape("qwen2_moe", "36 50 5 63  6 3", rope_theta=1e4, decoder_sparse_step=1,
                              mlp_only_layers=[0, 3], norm_topk_prob=False, **_experts(5, 2, 22),
                              shared_expert_intermediate_size=30),
    "qwen2-moe-tied": _shape("qwen2_moe", "28 40 2 47  2 2", tied=True, rope_theta=1e6, qkv_bias=False,
                             norm_topk_prob=True, **_experts(7, 3, 18), shared_expert_intermediate_size=10),
    "qwen3-moe-normed": _shape("qwen3_moe", "40 46 3 83  4 2 22", rope_theta=1e6, norm_topk_prob=True,
                               **_experts(9, 4, 14)),
    # every second layer is sparse
    "qwen3-moe-stepped": _shape("qwen3_moe", "30 34 4 41  5 1 8", tied=True, attention_bias=True, rope_theta=1e4,
                                norm_topk_prob=False, decoder_sparse_step=2, **_experts(3, 1, 26)),
    "mixtral-full": _shape("mixtral", "42 38 2 47  3 3", sliding_window=None, rope_theta=1e6, num_local_experts=6,
                           num_experts_per_tok=2, rms_norm_eps=1e-5),
    "mixtral-sliding": _shape("mixtral", "40 58 3 67  4 2 14", tied=True, sliding_window=7, rope_theta=1e4,
                              num_local_experts=3, num_experts_per_tok=3),
    # queries and keys are normed over all heads
    "olmoe-grouped": _shape("olmoe", "36 20 2 57  6 2", num_experts=10, num_experts_per_tok=4, norm_topk_prob=False),
    "olmoe-tied": _shape("olmoe", "24 14 3 53  2 2", tied=True, attention_bias=True, num_experts=4,
                         num_experts_per_tok=2, norm_topk_prob=True, rms_norm_eps=1e-5),
    # limits and sinks that have an effect
    "gpt-oss-clamped": _shape("gpt_oss", "40 22 3 63  6 2 10", sliding_window=5, num_local_experts=5,
                              num_experts_per_tok=2, swiglu_limit=0.8, rope_parameters=_rope(1e4)),
    "gpt-oss-unbiased": _shape("gpt_oss", "28 18 2 47  3 3 14", tied=True, sliding_window=9, num_local_experts=7,
                               num_experts_per_tok=3, swiglu_alpha=1.1, attention_bias=False, layers="fs",
                               rope_parameters=_rope(1e5)),
    # two gated delta nets before each layer of attention; a projection each for their q k v, z, b and a
    "qwen3.5-periods": _shape("qwen3_5_text", "36 50 6 63  6 2 24", tied=True, full_attention_interval=3,
                              **_delta(2, 6, 10, 14), rope_parameters=_rope(
                                  1e6, partial_rotary_factor=0.25, mrope_section=[1, 1, 1])),
    # no pattern, and another convolution
    "qwen3.5-runs": _shape("qwen3_5_text", "28 34 5 47  3 3 16", attention_bias=True, layers="fllfl",
                           **_delta(3, 3, 7, 5, linear_conv_kernel_dim=3),
                           rope_parameters=_rope(1e4, partial_rotary_factor=0.5)),
    "qwen3.5-moe": _shape("qwen3_5_moe_text", "32 0 4 53  4 1 8", full_attention_interval=2, **_delta(1, 3, 12, 9),
                          **_experts(6, 3, 18), shared_expert_intermediate_size=10),
    "qwen3.5-moe-tied": _shape("qwen3_5_moe_text", "26 0 3 45  2 2 24", tied=True, layers="lff",
                               **_delta(3, 3, 5, 8, linear_conv_kernel_dim=2), **_experts(4, 1, 12),
                               shared_expert_intermediate_size=16),
    # their q k v z and b a are two projections
    "qwen3-next-periods": _shape("qwen3_next", "30 34 4 61  4 2 16", full_attention_interval=2, **_delta(2, 4, 6, 11),
                                 **_experts(5, 2, 14), shared_expert_intermediate_size=12, norm_topk_prob=True,
                                 rope_theta=1e5, partial_rotary_factor=0.25),
    "qwen3-next-dense": _shape("qwen3_next", "26 38 5 43  2 1 8", tied=True, **_delta(1, 2, 9, 6),
                               **_experts(7, 3, 16), shared_expert_intermediate_size=8, norm_topk_prob=False,
                               mlp_only_layers=[1], rope_theta=1e4),
    # queries from the hidden state; scores raised for a longer context; transformers' version 2 needs even strides
    "deepseek2-lite": _shape("deepseek_v2", "36 50 3 63  6", **_latent(None, 20, 10, 6, 11), first_k_dense_replace=1,
                             topk_method="greedy", **_routed(5, 2, 22, 2), rope_theta=1e4, rope_scaling=YARN | dict(
                                 factor=8.0, original_max_position_embeddings=16, mscale=0.707, mscale_all_dim=0.9)),
    "deepseek2-grouped": _shape("deepseek_v2", "30 34 2 47  3", tied=True, attention_bias=True, rms_norm_eps=1e-4,
                                **_latent(14, 10, 8, 10, 26), **_routed(12, 3, 14, 1), n_group=4, topk_group=2,
                                topk_method="group_limited_greedy", routed_scaling_factor=2.5, rope_theta=1e5),
    # two dense layers, groups, yarn with the scale on the scores
    "deepseek3-grouped": _shape("deepseek_v3", "40 46 4 83  4 4", **_latent(18, 22, 13, 8, 15), **_routed(15, 4, 18, 1),
                                first_k_dense_replace=2, n_group=5, topk_group=3, rope_theta=1e4,
                                rope_scaling=YARN | dict(
                                    factor=16.0, original_max_position_embeddings=8, beta_fast=32.0, beta_slow=1.0,
                                    mscale=1.0, mscale_all_dim=1.0)),
    "deepseek3-halves": _shape("deepseek_v3", "28 40 2 53  2 2", tied=True, attention_bias=True,
                               **_latent(None, 16, 12, 14, 7), **_routed(4, 2, 26, 3), first_k_dense_replace=0,
                               n_group=1, topk_group=1, norm_topk_prob=False, routed_scaling_factor=0.6,
                               rope_interleave=False, rope_theta=1e6),
    # embeddings in every layer; the last three layers share keys and values, and have wide MLPs
    "gemma4-shared": _shape("gemma4_text", "28 22 7 59  4 2 10", **GELU, tied=True, layers="ssfsssf",
                            global_head_dim=18, vocab_size_per_layer_input=59, hidden_size_per_layer_input=6,
                            num_kv_shared_layers=3, use_double_wide_mlp=True, sliding_window=5,
                            final_logit_softcapping=20.0, rms_norm_eps=1e-5),
    # keys that are values, fewer in layers without a window; experts beside an MLP
    "gemma4-experts": _shape("gemma4_text", "30 26 6 47  6 3 12", layers="ssfssf", global_head_dim=20,
                             num_global_key_value_heads=2, attention_k_eq_v=True, attention_bias=True,
                             hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=7, top_k_experts=3,
                             moe_intermediate_size=18, sliding_window=4, rope_parameters=dict(
                                 full_attention=_rope(5e4, "proportional", partial_rotary_factor=0.5, factor=2.0),
                                 sliding_attention=_rope(2e3))),
}
# fmt: on


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
