"""The FLOP of a pass, counted product by product; what batches, windows and adapters add up to."""

import numpy as np
import pytest

from jppo.learner import cost
from jppo.models import config_reader, freeze, lora

SHAPE = {
    "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 10, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip
QWEN = config_reader.parse_config(SHAPE | {"model_type": "qwen2", "rope_theta": 1e4, "hidden_act": "silu"}, path="here")
SLIDING = config_reader.parse_config(
    SHAPE | {"model_type": "mistral", "sliding_window": 3, "head_dim": 4, "rope_theta": 1e4, "hidden_act": "silu"},
    path="here",
)


def counted(cfg, length, head_tokens):
    """The same by looking at each product of one sequence: 2 m n k of [m, k] by [k, n], and pairs one by one."""
    D, H, K, A, F, V = 8, 2, 1, 4, 12, 10
    products = [(length, H * A, D), *2 * [(length, K * A, D)], (length, D, H * A), *3 * [(length, F, D)]]
    layer = sum(2 * m * n * k for m, n, k in products)
    total = 2 * head_tokens * V * D
    for kind in cfg.layer_kinds:
        window = cfg.kinds[kind].window
        seen = [(q, k) for q in range(length) for k in range(q + 1) if window is None or q - k < window]
        total += layer + len(seen) * H * 2 * (2 * A)
    return total


@pytest.mark.parametrize("cfg", [QWEN, SLIDING], ids=["causal", "window"])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 9])
def test_a_forward_pass_is_the_sum_of_its_products(cfg, length):
    assert cost.forward(cfg, [length], head_tokens=1) == counted(cfg, length, 1)


def test_a_token_costs_its_active_experts_and_the_router():
    config = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=7, shared_expert_intermediate_size=3)
    mixture = SHAPE | config | {"model_type": "qwen2_moe", "mlp_only_layers": [1]}
    # The MLP's 3 products of 8 by 12 give way in one layer: 2 experts of 3 of 8 by 7, a shared one of 3 of 8 by 3, the
    # router's of 8 by 5 and the shared one's gate, 8 by 1.
    saved = 2 * 4 * (3 * 8 * 12 - (2 * 3 * 8 * 7 + 3 * 8 * 3 + 8 * 5 + 8))
    found = cost.forward(config_reader.parse_config(mixture, path="here"), [4], head_tokens=1)
    assert found == cost.forward(QWEN, [4], head_tokens=1) - saved


def test_the_price_of_a_token_by_hand():
    """Of 2 FLOP each: 480 weights of both layers and 80 of the head; for a key, 8 numbers in 2 heads of both layers."""
    assert cost.price(QWEN, 0, 3.0) == 1.0
    assert cost.price(QWEN, 13, 3.0) == pytest.approx(1 + 3.0 * 13 * 64 / 2080)


def test_latent_attention_costs_its_projections_and_pairs_of_two_sizes():
    config = dict(
        model_type="deepseek_v3", num_key_value_heads=2, q_lora_rank=3, kv_lora_rank=5, qk_nope_head_dim=4,
        qk_rope_head_dim=2, v_head_dim=7, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=6,
        n_shared_experts=1, first_k_dense_replace=2, n_group=1, topk_group=1,
    )  # fmt: skip
    latent = config_reader.parse_config(SHAPE | config, path="here")
    # Queries by 8 to 3 to 2 heads of 6, latents and the rotary key by 8 to 5 + 2, keys and values by 5 to 2 heads of
    # 4 + 7, the output by 2 heads of 7 to 8; 9 tokens see 45 keys.
    kernels = 8 * 3 + 3 * 12 + 8 * 7 + 5 * 22 + 14 * 8
    expected = 2 * (2 * 9 * (kernels + 3 * 8 * 12) + 2 * 45 * 2 * (6 + 7)) + 2 * 10 * 8
    assert cost.forward(latent, [9], head_tokens=1) == expected
    sparse = config_reader.parse_config(
        SHAPE | config | {"first_k_dense_replace": 1, "n_shared_experts": 3}, path="here"
    )
    saved = 2 * 9 * (3 * 8 * 12 - 3 * 8 * (2 * 6 + 3 * 6) - 8 * 4)
    assert cost.forward(sparse, [9], head_tokens=1) == expected - saved


def test_every_layer_of_delta_nets_costs_the_same():
    shape = dict(model_type="qwen3_5_text", linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=3)
    shape |= dict(linear_value_head_dim=5, linear_conv_kernel_dim=4)
    one, three = (
        config_reader.parse_config(
            SHAPE | shape | {"num_hidden_layers": n, "layer_types": ["linear_attention"] * n}, path="here"
        )
        for n in (1, 3)
    )
    head = 2 * 10 * 8
    # By 8: q and k of 3, v and the gate of 10, decay and rate of 2 heads; 3 products of 2 heads of 3 by 5.
    assert cost.forward(one, [1], head_tokens=1) - head == 2 * (
        8 * (3 + 3 + 10 + 10 + 2 + 2) + 10 * 8 + 3 * 2 * 15 + 3 * 8 * 12
    )
    assert cost.forward(three, [1], head_tokens=1) - head == 3 * (cost.forward(one, [1], head_tokens=1) - head)


def test_a_window_saves_and_sequences_add_up():
    assert cost.attention(SLIDING, [9]) < cost.attention(QWEN, [9])
    assert cost.attention(SLIDING, [3]) == cost.attention(QWEN, [3])
    both = cost.forward(QWEN, [4, 9], head_tokens=5)
    assert both == cost.forward(QWEN, [4], head_tokens=2) + cost.forward(QWEN, [9], head_tokens=3)
    assert cost.forward(QWEN, np.asarray([4, 9]), head_tokens=5) == both


def test_an_update_of_all_weights_is_three_forward_passes_and_one_of_adapters_less():
    how = lora.Lora(2, 16.0, ("q_proj", "down_proj"))
    # A and B of q: 8*2 + 2*8, of down: 12*2 + 2*8; 2 layers, 4 tokens, a product and a sum.
    beside = 2 * 2 * 4 * (32 + 40)
    plain = cost.forward(QWEN, [4], head_tokens=3)
    assert cost.forward(QWEN, [4], head_tokens=3, adapters=how) == plain + beside
    assert cost.update(QWEN, [4], head_tokens=3) == 3 * plain
    kernels = plain - cost.attention(QWEN, [4])
    assert (
        cost.update(QWEN, [4], head_tokens=3, adapters=how) == 2 * kernels + 3 * cost.attention(QWEN, [4]) + 3 * beside
    )


def test_adapters_of_experts_are_merged_so_that_their_kernels_have_gradients():
    config = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=7, norm_topk_prob=True, head_dim=4)
    mixture = config_reader.parse_config(
        SHAPE | config | {"model_type": "qwen3_moe", "mlp_only_layers": [1]}, path="here"
    )
    how = lora.Lora(2, 16.0, ("q_proj", "down_proj"))
    # Beside the kernels: A and B of q in both layers, 8*2 + 2*8, and of the dense layer's down, 12*2 + 2*8.
    beside = 2 * 4 * (2 * 32 + 40)
    plain = cost.forward(mixture, [4], head_tokens=3)
    assert cost.forward(mixture, [4], head_tokens=3, adapters=how) == plain + beside
    merged = 2 * 4 * 2 * 7 * 8  # the active experts' down in one layer
    expected = 2 * plain + cost.attention(mixture, [4]) + merged + 3 * beside
    assert cost.update(mixture, [4], head_tokens=3, adapters=how) == expected


def test_frozen_matrices_save_the_products_of_their_own_gradients():
    """Of 9 tokens in two layers: attention's 8 by 8 twice and 8 by 4 twice; of 5 tokens the head's 8 by 10."""
    whole = cost.update(QWEN, [9], head_tokens=5)
    for patterns, saved in (("*.self_attn.*", 2 * 9 * 2 * (2 * 64 + 2 * 32)), ("lm_head.*", 2 * 5 * 80), ("*norm*", 0)):
        frozen = freeze.find_frozen(QWEN, patterns, "actor.freeze", head="lm")
        assert cost.update(QWEN, [9], head_tokens=5, frozen=frozen) == whole - saved
    config = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=7, shared_expert_intermediate_size=3)
    cfg = config_reader.parse_config(SHAPE | config | {"model_type": "qwen2_moe"}, path="here")
    frozen = freeze.find_frozen(cfg, "*.mlp.experts.*", "actor.freeze", head="lm")  # two of five are a token's
    assert cost.update(cfg, [9], head_tokens=5) - cost.update(cfg, [9], head_tokens=5, frozen=frozen) == (
        2 * 9 * 2 * 2 * 3 * 8 * 7
    )
