"""The verbs of a step take values and no settings: a step runs where `jppo.settings` cannot be imported."""

import os
import subprocess
import sys

from tests.make import ROOT

STEP = """
import sys


class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[:2] == ["jppo", "settings"] or name == "ml_collections":
            raise ImportError(f"{name} is blocked")


sys.meta_path.insert(0, Blocked())

import dataclasses
import functools

import jax
import numpy as np
import optax

from jppo.algorithms import advantage, losses, masked
from jppo.learner import batch, episodes, optim, packing, ppo, sharding, state, update
from jppo.learner.algorithm import Algorithm, Term
from jppo.learner.trainable import Trainable
from jppo.models import attention, cache, config_reader
from jppo.models.decoder import Decoder, init_params
from jppo.rewards.parts import Part, RewardSum, graded, parse_weights, sample_of
from jppo.rollout.inprocess import InprocessEngine, InprocessSettings
from jppo.rollout.publish import PublishSettings, publish_policy
from jppo.runlog.timers import Timers
from jppo.types import Prompt, Reward, Sampling

jax.config.update("jax_disable_most_optimizations", True)

PROMPT, RESPONSE, N = 4, 6, 4
described = dict(
    model_type="qwen2", vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, hidden_act="silu",
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, rope_theta=1e4, rms_norm_eps=1e-6,
    tie_word_embeddings=False, initializer_range=0.3,
)
cfg, mesh = config_reader.parse_config(described, path="config.json"), sharding.mesh_of_shape((1, 1, 1))
decoder = Decoder(cfg)
gae = functools.partial(advantage.gae, gamma=1.0, lam=0.9)


def clipped(view):
    arrays = view.logprob, view.old_logprob, view.advantage, view.mask, view.segment
    return losses.clipped(*arrays, clip_low=0.2, clip_high=0.2, clip_c=3.0)[0]


def squared(view):
    return losses.clipped_value(view.value, view.old_value, view.returns, cliprange_value=0.2)[0]


algorithm = Algorithm(
    lambda view: gae(view.reward, view.value, view.mask), transforms=(masked.whiten,),
    terms=(Term(clipped, "actor/pg_loss"),), value_terms=(Term(squared, "critic/vf_loss"),),
)
recipe = ppo.Recipe(algorithm=algorithm, kl_penalty=None, kl_loss_type=None, bypass=False, correction=None)
models = ppo.Models((decoder, cfg), (decoder, cfg), None)
passes = ppo.make_passes(models, recipe, temperature=1.0, chunk_tokens=64, mesh=mesh)
tx = optim.make_optimizer(functools.partial(optax.adamw, b1=0.9, b2=0.99, weight_decay=0.0), grad_clip=1.0)
schedule = optim.make_schedule("constant", lr=1e-2, warmup_steps=0, total_steps=1, min_lr_ratio=0.0)


def trained(name, head, loss, seed):
    layout = state.model_weights(cfg, mesh, head=head, param_dtype=np.float32)
    values = jax.device_put(init_params(cfg, jax.random.key(seed), head=head, param_dtype=np.float32), layout.shardings)
    opt, places = state.init_optimizer(tx, layout, values)
    how = Trainable(
        name, loss, update.make_apply(tx, schedule, shardings=(layout.shardings, places)),
        update.make_zeros(layout.shapes, layout.shardings), update.make_exchange(layout.shardings),
    )
    return how, values, opt


actor, policy, policy_opt = trained("actor", "lm", passes.actor, 0)
critic, value, value_opt = trained("critic", "value", passes.critic, 1)
plan = packing.make_plan(
    "segments", max_length=PROMPT + RESPONSE, row_lengths=1, max_tokens_per_row=32, tokens_per_micro=64,
    sequences=2 * N, row_multiple=1,
)
epochs = ppo.Epochs(2, N, shuffle=True, most_sequences=2 * N, warmup=0, in_warmup=0)
learner = ppo.StepLearner(
    mesh=mesh, cfg=cfg, plan=plan, shape=(2 * N, RESPONSE), recipe=recipe, passes=passes, actor=actor, critic=critic,
    reference=None, actor_epochs=epochs, critic_epochs=epochs,
)
now = state.begin_state(policy, policy_opt, value, value_opt, seed=0)


class Oddness(Part):
    def submit(self, sample):
        return graded(Reward(float(np.mean(np.asarray(sample.tokens) % 2)), {}, None))


def decode(ids):
    return " ".join(map(str, ids))


engine = InprocessEngine(InprocessSettings(
    cfg=cfg, rows=2 * N, row_multiple=1, max_prompt_length=PROMPT, max_model_len=PROMPT + RESPONSE, dtype="float32",
    by_row=sharding.whole_rows_sharding(mesh), of_cache=sharding.cache_sharding(mesh, cache.cache_heads(cfg)),
    cut=False,
))
sampler = engine.ready(eos_token_ids=(0,), decode=decode)
publishing = PublishSettings(dtype="float32", on_device=False, adapters=None, base="", on_update="wait")
prompts = [Prompt(decode(ids), "odd", decode(ids), np.asarray(ids, np.int32), "", {}) for ids in ([5, 7, 9], [2, 4])]
reward, timer = RewardSum({"odd": Oddness()}, parse_weights("odd=1", ["odd"]), score_on_error=None), Timers()
sampling = Sampling(1.0, 1.0, -1, 0.0, N, RESPONSE, (), False, seed=3)
scores = []
for step in range(8):
    publish_policy(publishing, learner, sampler, now)
    drawn = sampler.generate(prompts, dataclasses.replace(sampling, seed=step), version=step)
    asked = [prompt for prompt in prompts for _ in range(N)]
    rewards = reward.grade(sample_of(prompt, t) for prompt, t in zip(asked, drawn, strict=True))
    made = episodes.make_episodes(prompts, drawn, rewards, None, compares=recipe.algorithm.compares)
    data = batch.flatten(made.trajectories, made.rewards, made.group, shape=learner.shape)
    micros = batch.pack_micros(data, drawn, plan=plan, mesh=mesh)
    data = ppo.score_batch(learner, now, data, micros, timer)
    data, metrics = ppo.with_advantages(passes, data, now.kl_coef, mesh)
    assert metrics["rollout/logp_gap_max"] < 1e-4, metrics
    now, more = ppo.learn(learner, now, data, drawn, timer)
    now = state.next_step(now, 0.0, bad=False, learned=True)
    scores.append(float(np.mean([r.score for r in rewards])))
    assert more["actor/grad_norm"] > 0 and more["critic/grad_norm"] > 0
assert not [name for name in sys.modules if name.startswith("jppo.settings")]
print(np.mean(scores[:2]), np.mean(scores[-2:]))
"""


def test_a_training_by_the_verbs_runs_without_the_settings(tmp_path):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    told = subprocess.run([sys.executable, "-c", STEP], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr[-3000:]
    before, after = map(float, told.stdout.split())
    assert after > before + 0.1, "the policy learns to write odd tokens"
