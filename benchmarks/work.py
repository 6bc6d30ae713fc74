"""The measured work: models of three shapes, one ragged batch, and its FLOP."""

import ast
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers
import transformers
from ml_collections import ConfigDict

from jppo import settings
from jppo.errors import UserError
from jppo.learner import batch, cost, episodes, packing, ppo, sharding
from jppo.learner.ppo import StepLearner
from jppo.models.config import ModelConfig
from jppo.models.lora import Lora
from jppo.runlog.timers import Timers
from jppo.types import Batch, Reward, Rows, TrainState, Trajectory

PROMPT, SHORTEST, LONGEST = 64, 16, 128  # tokens of a prompt and of a response
SEQUENCES, MINI_BATCH = 64, 32

Lengths = Sequence[int] | np.ndarray  # the tokens of each response

# layers, width, width of the MLP, query heads, key/value heads, vocabulary
SHAPES = {"S": (4, 256, 704, 4, 2, 512), "M": (8, 512, 1408, 8, 2, 8192)}
SHAPES |= {"135M": (30, 576, 1536, 9, 3, 49152)}  # SmolLM2-135M's


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


def make_batch(cfg: ModelConfig, responses: Lengths, *, prompt: int = PROMPT) -> list[Trajectory]:
    """Trajectories of random tokens."""
    rng = np.random.default_rng(1)
    return [
        Trajectory(
            uid=str(i),
            tokens=rng.integers(1, cfg.vocab_size, prompt + n).astype(np.int32),
            sampled=np.repeat([False, True], [prompt, n]),
            logprob=np.zeros(prompt + n, np.float32),
            version=np.repeat([-1, 0], [prompt, n]).astype(np.int32),
            text="",
            finish="length",
            turns=1,
        )
        for i, n in enumerate(responses)
    ]


def whole(responses: Lengths, *, prompt: int) -> list[int]:
    """The tokens of each sequence."""
    return [prompt + int(response) for response in responses]


def forward_flops(cfg: ModelConfig, responses: Lengths, *, prompt: int, lm_head: bool) -> int:
    """FLOP of one forward pass over whole sequences, the language head on the tokens of the response only."""
    generated = sum(map(int, responses))
    return cost.forward(cfg, whole(responses, prompt=prompt), head_tokens=generated if lm_head else 0)


def lora_update_flops(cfg: ModelConfig, adapters: Lora, responses: Lengths, *, prompt: int) -> int:
    """FLOP of an update of adapters alone."""
    return cost.update(cfg, whole(responses, prompt=prompt), head_tokens=sum(map(int, responses)), adapters=adapters)


def stage_flops(cfg: ModelConfig, responses: Lengths) -> dict[str, int]:
    """Counts the FLOP of each stage over the batch; a backward pass costs two forward passes."""
    policy, critic = (forward_flops(cfg, responses, prompt=PROMPT, lm_head=lm_head) for lm_head in (True, False))
    return {"logprobs": policy, "actor": 3 * policy, "critic": 3 * critic, "update": 3 * policy + 3 * critic}


def write_model(folder: pathlib.Path, described: dict[str, Any]) -> None:
    """Writes vLLM's model directory: config and a tokenizer of this vocabulary, no weights."""
    (folder / "config.json").write_text(json.dumps(described))
    words = {f"w{i}": i for i in range(described["vocab_size"])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="w0").save_pretrained(folder)


def base_config(path: str, dtype: str) -> ConfigDict:
    """The defaults of training, for this batch and random weights of the model at `path`."""
    c = settings.default()
    c.model.path = path
    c.model.init = "random"
    c.model.compute_dtype = c.rollout.dtype = dtype
    c.rollout.omp_threads = 1  # as in the tables of earlier runs
    c.data.train_files = c.data.val_files = "none: the batch is made here"
    c.data.max_prompt_length, c.data.max_response_length = PROMPT, LONGEST
    c.data.row_lengths = 8  # 87% of the entries are tokens, where 4 have 81
    c.data.train_batch_size, c.actor.ppo_mini_batch_size = SEQUENCES, MINI_BATCH
    return c


def change(c: ConfigDict, changes: Sequence[str]) -> ConfigDict:
    """Applies `changes`, each SECTION.NAME=VALUE, in place and checks the config."""
    for setting in changes:
        name, _, text = setting.partition("=")
        try:
            value = ast.literal_eval(text)
        except (SyntaxError, ValueError):
            value = text
        try:
            c.update_from_flattened_dict({name: value})
        except (AttributeError, KeyError, TypeError, ValueError) as e:
            raise UserError(f"--set {setting}: {e}") from e
    settings.check(c)
    return c


def make_rows(trajectories: Sequence[Trajectory], plan: packing.Plan, mesh: Any) -> list[Rows]:
    """Packs the trajectories into micro-batches on the devices."""
    return [sharding.put_rows(rows, mesh) for rows in packing.pack(trajectories, range(len(trajectories)), plan)]


def flat_batch(trajectories: Sequence[Trajectory], mesh: Any, *, samples: int = 1) -> Batch:
    """Makes the flat batch with random scores, `samples` per prompt."""
    count, devices = len(trajectories), sharding.whole_row_multiple(mesh)
    scores = np.random.default_rng(2).random(count).astype(np.float32)
    group = episodes.comparison_groups(np.zeros(count, bool), samples)
    longest = max(int(np.ptp(np.flatnonzero(t.sampled))) + 1 for t in trajectories)
    shape = -(-count // devices) * devices, longest
    return batch.flatten(trajectories, [Reward(float(x), {}, None) for x in scores], group, shape=shape)


def score(
    learner: StepLearner, now: TrainState, trajectories: Sequence[Trajectory], timer: Timers, *, samples: int = 1
) -> Batch:
    """Runs the stages of a `jppo.train` step between grading and learning."""
    data = flat_batch(trajectories, learner.mesh, samples=samples)
    micros = batch.pack_micros(data, trajectories, plan=learner.plan, mesh=learner.mesh)
    data = ppo.score_batch(learner, now, data, micros, timer)
    with timer("adv"):
        return ppo.with_advantages(learner.passes, data, now.kl_coef, learner.mesh)[0]
