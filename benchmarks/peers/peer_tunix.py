"""tunix: the log-probs, the losses and the train steps of its PPO, on batches that are given.

Called are `tunix.rl.common.compute_per_token_logps` for log-probs, and for an update the compiled train step of
`tunix.rl.trainer.Trainer` with the losses that its PPOLearner takes (`ppo_policy_loss_fn`, `ppo_value_loss_fn`), all
on padded rows, the head on every position, as tunix has it. What samples and grades is not called. Of a mini-batch that
is cut, its MultiSteps takes the mean of the micro-batches' means.
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tunix
from flax import nnx
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen2 import params as qwen2_params
from tunix.rl import algo_core, common
from tunix.rl.ppo.ppo_learner import PPOConfig, TrainExample
from tunix.rl.trainer import Trainer
from tunix.rl.utils import create_critic_model
from tunix.sft.peft_trainer import TrainingConfig
from worker import Parts, Stage, Work, best_of, serve, timed

MICRO_BATCHES = (8, 32)
PAD, END = 0, -1  # no token of the batch is either


def make_actor(work: Work) -> nnx.Module:
    """The policy."""
    described = json.loads((pathlib.Path(work.model) / "config.json").read_text())
    config = qwen2.ModelConfig(
        num_layers=described["num_hidden_layers"],
        vocab_size=described["vocab_size"],
        embed_dim=described["hidden_size"],
        hidden_dim=described["intermediate_size"],
        num_heads=described["num_attention_heads"],
        num_kv_heads=described["num_key_value_heads"],
        head_dim=described["hidden_size"] // described["num_attention_heads"],
        rope_theta=int(described["rope_theta"]),
        norm_eps=described["rms_norm_eps"],
        use_tied_embedding=described["tie_word_embeddings"],
        dtype=jnp.dtype(work.dtype),
        param_dtype=jnp.float32,
    )
    return qwen2_params.create_model_from_safe_tensors(work.model, config, mesh(), dtype=jnp.float32)


def make_critic(actor: nnx.Module) -> nnx.Module:
    """The critic, as tunix makes it: it replaces the policy's head, so the head must be untied."""
    actor.config.use_tied_embedding = False
    actor.lm_head = nnx.Linear(actor.config.embed_dim, 1, use_bias=False, rngs=nnx.Rngs(0))
    critic = create_critic_model(actor)
    del actor.lm_head
    return critic


@functools.cache
def mesh() -> jax.sharding.Mesh:
    """One device, under the names of tunix's axes."""
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((1, 1), ("fsdp", "tp"), devices=jax.devices()[:1], axis_types=auto)


def make_step(model: nnx.Module, work: Work, micro: int, loss, further: dict):
    """The compiled train step of tunix's trainer."""
    hyperparameters, (b1, b2) = work.how, work.how["betas"]
    adamw = optax.adamw(hyperparameters["lr"], b1=b1, b2=b2, weight_decay=hyperparameters["weight_decay"])
    pieces = work.mini_batch // micro
    config = TrainingConfig(eval_every_n_steps=10**9, gradient_accumulation_steps=pieces if pieces > 1 else None)
    chain = optax.chain(optax.clip_by_global_norm(hyperparameters["grad_clip"]), adamw)
    trainer = Trainer(model, chain, config, custom_checkpoint_metadata_fn=dict)
    trainer.with_loss_fn(loss, has_aux=True)
    trainer.with_gen_model_input_fn(lambda x: {"train_example": x, "pad_id": PAD, "eos_id": END} | further)
    return trainer.jit_train_and_eval_step(cache_nnx_graph=True)[0]


def begin(work: Work) -> tuple[dict, dict[str, Stage]]:
    """Prepares both models and compiles all programs."""
    jax.set_mesh(mesh())
    P, hyperparameters = work.prompt, work.how
    actor = make_actor(work)
    critic = make_critic(make_actor(work))
    prompts, responses, mask = work.tokens[:, :P], work.tokens[:, P:], work.mask
    old = np.zeros(mask.shape, np.float32)

    def score(micro: int, *, whole: bool = True) -> np.ndarray:
        graph, state = nnx.split(actor)
        starts = range(0, len(mask) if whole else work.mini_batch, micro)
        pairs = [(prompts[start : start + micro], responses[start : start + micro]) for start in starts]
        ids = dict(pad_id=PAD, eos_id=END)
        return np.concatenate(
            jax.device_get([common.compute_per_token_logps(graph, state, *map(jnp.asarray, p), **ids) for p in pairs])
        )

    def mean(x: np.ndarray) -> float:
        return float(x[mask].mean(dtype=np.float64))

    def example(at: slice) -> TrainExample:
        fields = dict(
            prompt_ids=prompts[at],
            prompt_mask=prompts[at] != PAD,
            completion_ids=responses[at],
            completion_mask=mask[at],
            advantages=work.advantage[at],
            old_per_token_logps=old[at],
            returns=work.returns[at],
            old_values=work.value[at],
        )
        return TrainExample(ref_per_token_logps=None, **{name: jnp.asarray(x) for name, x in fields.items()})

    def descend(step, micro: int, *, whole: bool = True) -> float:
        starts = range(0, len(mask) if whole else work.mini_batch, micro)
        losses = [step(example(slice(start, start + micro)))[0] for start in starts]
        return float(np.mean(jax.block_until_ready(losses)))

    first = score(MICRO_BATCHES[0])
    old[:] = first
    config = PPOConfig(epsilon=hyperparameters["clip_ratio"], epsilon_c=hyperparameters["clip_ratio_c"], beta=0.0)
    parts = {
        "actor": (actor, algo_core.ppo_policy_loss_fn, {"algo_config": config}),
        "critic": (critic, algo_core.ppo_value_loss_fn, {"clip_range_value": hyperparameters["cliprange_value"]}),
    }
    score(MICRO_BATCHES[-1])
    chosen = {"logprobs": best_of(MICRO_BATCHES, lambda n: score(n, whole=False))}
    steps = {}
    for part, (model, loss, further) in parts.items():
        able = {n: make_step(model, work, n, loss, further) for n in MICRO_BATCHES}
        for n, step in able.items():
            descend(step, n, whole=False)  # compiles
        chosen[part] = best_of(MICRO_BATCHES, lambda n, able=able: descend(able[n], n, whole=False))
        steps[part] = able[chosen[part]]

    def scored() -> tuple[Parts, float]:
        seconds, check = timed(lambda: mean(score(chosen["logprobs"])))
        return {"logprobs": seconds}, check

    def updated() -> tuple[Parts, float]:
        taken = {part: timed(functools.partial(descend, step, chosen[part])) for part, step in steps.items()}
        return {part: seconds for part, (seconds, _) in taken.items()}, taken["actor"][1]

    report = {
        "versions": {"tunix": getattr(tunix, "__version__", "?"), "jax": jax.__version__},
        "micro_batches": chosen,
        "logp": mean(first),
    }
    return report, {"logprobs": scored, "update": updated}


if __name__ == "__main__":
    serve(begin)
