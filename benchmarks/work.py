"""The work that is measured: models of two shapes, one ragged batch, its FLOP, and the product that sets the scale."""

import ast
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from jppo import config as settings
from jppo.config import UserError
from jppo.models import lora
from jppo.models.families import ModelConfig
from jppo.models.lora import Lora
from jppo.structs import Trajectory

PROMPT, SHORTEST, LONGEST = 64, 16, 128  # tokens of a prompt and of a response
SEQUENCES, MINI_BATCH = 64, 32

Lengths = Sequence[int] | np.ndarray  # the tokens of each response

# layers, width, width of the MLP, query heads, key/value heads, vocabulary
SHAPES = {"S": (4, 256, 704, 4, 2, 512), "M": (8, 512, 1408, 8, 2, 8192)}


def hf_config(layers: int, width: int, mlp: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    """The config.json of a tied qwen2 of that shape."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "initializer_range": 0.02,
        "eos_token_id": 0,
    }


def response_lengths() -> np.ndarray:
    """The ragged batch, always the same: [SEQUENCES] i64."""
    return np.random.default_rng(0).integers(SHORTEST, LONGEST + 1, SEQUENCES)


def make_batch(cfg: ModelConfig, responses: Lengths) -> list[Trajectory]:
    """Trajectories of random tokens."""
    rng = np.random.default_rng(1)
    return [
        Trajectory(
            uid=str(i),
            tokens=rng.integers(1, cfg.vocab_size, PROMPT + n).astype(np.int32),
            sampled=np.repeat([False, True], [PROMPT, n]),
            logprob=np.zeros(PROMPT + n, np.float32),
            version=np.repeat([-1, 0], [PROMPT, n]).astype(np.int32),
            text="",
            finish="length",
            turns=1,
        )
        for i, n in enumerate(responses)
    ]


def attention_flops(cfg: ModelConfig, responses: Lengths, *, prompt: int) -> int:
    """FLOP of the products of queries, keys and values in one forward pass: the causal half."""
    lengths = [prompt + int(response) for response in responses]
    pairs = sum(n * (n + 1) // 2 for n in lengths)  # of a query and a key that it sees: a product with k, one with v
    return 2 * cfg.num_layers * 2 * pairs * cfg.num_heads * cfg.head_dim


def forward_flops(cfg: ModelConfig, responses: Lengths, *, prompt: int, lm_head: bool) -> int:
    """FLOP of one forward pass over whole sequences: real tokens, the causal half of attention, the language
    head on the tokens of the response only; a multiplication and an addition are two."""
    D, H, K, A, F = cfg.hidden_size, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim, cfg.intermediate_size
    matrices = D * H * A + 2 * D * K * A + H * A * D + 3 * D * F  # of a layer
    generated = sum(map(int, responses))
    tokens = prompt * len(responses) + generated
    head = 2 * generated * D * cfg.vocab_size if lm_head else 0
    return 2 * cfg.num_layers * tokens * matrices + attention_flops(cfg, responses, prompt=prompt) + head


def lora_update_flops(cfg: ModelConfig, how: Lora, responses: Lengths, *, prompt: int) -> int:
    """FLOP of an update of adapters alone: the kernels that stay have a gradient in their input and none of their own.

    That is two forward passes, a third of attention, whose factors all have gradients, and three of the adapters.
    """
    tokens = prompt * len(responses) + sum(map(int, responses))
    adapters = 2 * tokens * sum(math.prod(entry.shape) for entry in lora.table(cfg, how, head="lm"))
    forward = forward_flops(cfg, responses, prompt=prompt, lm_head=True)
    return 2 * forward + attention_flops(cfg, responses, prompt=prompt) + 3 * adapters


def make_product(mesh: Any, dtype: str) -> tuple[Callable[[], Any], int]:
    """A large square matrix product over all devices, compiled, and its FLOP."""
    n = 2048 if jax.default_backend() == "cpu" else 8192
    split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    whole = NamedSharding(mesh, PartitionSpec())
    draw = jax.random.normal(jax.random.key(0), (n, n), jnp.dtype(dtype))
    a, b = jax.device_put(draw, split), jax.device_put(draw, whole)
    multiply = jax.jit(jnp.dot, out_shardings=split)
    return lambda: jax.block_until_ready(multiply(a, b)), 2 * n**3


def base_config(path: str, dtype: str) -> ConfigDict:
    """The defaults of training, for this batch and random weights of the model at `path`."""
    c = settings.default()
    c.model.path = path
    c.model.init = "random"
    c.model.compute_dtype = c.rollout.dtype = dtype
    c.data.train_files = c.data.val_files = "none: the batch is made here"
    c.data.max_prompt_length, c.data.max_response_length = PROMPT, LONGEST
    c.data.train_batch_size, c.actor.ppo_mini_batch_size = SEQUENCES, MINI_BATCH
    return c


def change(c: ConfigDict, changes: Sequence[str]) -> ConfigDict:
    """The config with the `changes`, each SECTION.NAME=VALUE, made in place and checked."""
    for said in changes:
        name, _, text = said.partition("=")
        try:
            value = ast.literal_eval(text)
        except (SyntaxError, ValueError):
            value = text
        try:
            c.update_from_flattened_dict({name: value})
        except (AttributeError, KeyError, TypeError, ValueError) as e:
            raise UserError(f"--set {said}: {e}") from e
    settings.check(c)
    return c
