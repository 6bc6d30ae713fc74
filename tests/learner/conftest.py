"""A small random model, ragged trajectories with tool output, and one whole PPO update over them."""

import dataclasses
import functools
import os
import types

os.environ.setdefault("OMP_NUM_THREADS", "1")

import jax
import numpy as np
import optax
import pytest

from jppo.algorithms import advantage, losses, masked
from jppo.learner import batch, catalogue, episodes, estimators, optim, packing, ppo, sharding, state, update
from jppo.learner.algorithm import Algorithm
from jppo.learner.trainable import Trainable
from jppo.models import config_reader, modules, sequence_parallel
from jppo.models.attention import make_plain
from jppo.models.decoder import Decoder, attention_settings, init_params
from jppo.types import Reward
from tests.make import trajectory

LONGEST = 24  # tokens of a trajectory


def hf_config():
    """A small qwen2, every axis of which a mesh of 2 x 2 x 2 divides; weights large, so that all matter."""
    return dict(
        model_type="qwen2", architectures=["Qwen2ForCausalLM"], vocab_size=32, hidden_size=16, intermediate_size=24,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        rope_theta=10000.0, rms_norm_eps=1e-6, hidden_act="silu", tie_word_embeddings=False, initializer_range=0.3,
    )  # fmt: skip


def experts_config(count):
    """The same width as a mixture of so many experts, whose first layer is dense."""
    return hf_config() | dict(
        model_type="qwen2_moe", architectures=["Qwen2MoeForCausalLM"], num_experts=count, num_experts_per_tok=2,
        moe_intermediate_size=16, shared_expert_intermediate_size=8, norm_topk_prob=True, mlp_only_layers=[0],
    )  # fmt: skip


REPLAYED = (2, 2)  # layers and active experts of `experts_config`


def draw_experts(tokens, sampled):
    """Experts of a response whose tool output was not read, as from an engine: two of five in every layer."""
    rng = np.random.default_rng(tokens)
    out = np.argsort(rng.random((len(tokens), REPLAYED[0], 5)))[:, :, : REPLAYED[1]].astype(np.int16)
    out[np.flatnonzero(~sampled & (np.arange(len(tokens)) > sampled.argmax()))] = -1
    out[-1] = -1
    return out


def draw(count, seed=0):
    """Ragged trajectories, a prompt and sampled tokens with tool output between some; and scores [B]."""
    rng = np.random.default_rng(seed)
    out = []
    for i in range(count):
        prompt, rest = int(rng.integers(1, 9)), int(rng.integers(1, LONGEST - 8))
        n = prompt + rest
        sampled = np.arange(n) >= prompt
        if i % 3 == 0 and rest > 4:
            sampled[prompt + 2 : prompt + 4] = False  # tool output
        if i % 6 == 0:
            sampled[-1] = False  # the tool has the last word
        sampled[prompt] = True
        out.append(trajectory(rng.integers(0, 32, n), sampled, str(i), logprob=rng.normal(-3, 1, n)))
    return out, rng.normal(size=count).astype(np.float32)


SETTINGS = types.SimpleNamespace(
    temperature=0.8, gamma=0.98, lam=0.9, clip_ratio=0.1, clip_c=1.5, entropy_coeff=0.01, kl_loss_coef=0.05,
    cliprange_value=0.1,
)  # fmt: skip


def recipe(estimator="gae", **changes):
    """A recipe in which every term counts."""
    s = SETTINGS
    gae = functools.partial(advantage.gae, gamma=s.gamma, lam=s.lam)
    made = {
        "gae": Algorithm(lambda view: gae(view.reward, view.value, view.mask), transforms=(masked.whiten,)),
        "decoupled": estimators.gae(gamma=s.gamma, lam=s.lam, lam_alpha=0.3, critic_lam=1.0),
        "grpo": Algorithm(outcome=lambda view: advantage.grpo(view.score, view.group, norm_adv_by_std=True)),
    }
    clip = dict(clip_low=s.clip_ratio, clip_high=s.clip_ratio, clip_c=s.clip_c)
    loss = catalogue.surrogate(functools.partial(losses.clipped, **clip))
    settings = dict(kl_penalty="kl", kl_loss_type="low_var_kl", bypass=False, correction=None, loss=loss)
    settings |= dict(value_range=None) | changes
    actor = dict(
        entropy_coeff=s.entropy_coeff, use_kl_loss=settings["kl_loss_type"] is not None, kl_loss_coef=s.kl_loss_coef,
        kl_loss_max_clamp=None, positive_lm_coef=0.0, router_z_loss_coef=0.0, router_aux_loss_coef=0.0,
    )  # fmt: skip
    actor |= {name: settings.pop(name) for name in actor.keys() & settings.keys()}
    bins = dict(value_bins=settings["value_range"] and 8, value_range=settings["value_range"])
    critic = types.SimpleNamespace(cliprange_value=s.cliprange_value, **bins)
    loss = settings.pop("loss")
    terms = *loss.terms, *catalogue.regularisers(types.SimpleNamespace(**actor))
    more = dict(terms=terms, value_terms=catalogue.value_terms(critic), before=loss.before, statistics=loss.statistics)
    return ppo.Recipe(algorithm=dataclasses.replace(made[estimator], **more), **settings)


SCORING = dict(temperature=SETTINGS.temperature, chunk_tokens=64)
KL_COEF = 0.2
VALUE_NORM = np.float32([0.5, 0.3, 1.7])  # after some steps: weight, mean and variance of the returns
ADAMW = optim.make_optimizer(functools.partial(optax.adamw, b1=0.9, b2=0.99, weight_decay=0.1), grad_clip=0.5)


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """A tenth of the time goes to running these small models: XLA need not try hard."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@functools.cache
def host_weights(cfg, head, seed):
    """The same random weights for every mesh."""
    return jax.device_get(init_params(cfg, jax.random.key(seed), head=head, param_dtype=np.float32))


@dataclasses.dataclass
class Learner:
    """The learner on a mesh, with the same weights on every mesh."""

    mesh_shape: tuple[int, ...] = (1, 1, 1, 1)  # data, fsdp, tensor, sequence; what is left out is 1
    recipe: ppo.Recipe = dataclasses.field(default_factory=recipe)
    sequences: int = 16  # of a step, two samples a prompt
    padding: int = 0  # rows of the batch behind them, at least
    remat: str = "none"
    shared: tuple[int, int] | None = None  # prompts: the longest, and the longest response
    experts: int = 0  # of a mixture; 0: a dense model
    replay: bool = False
    kept: int = 0  # the most kept tokens that are replayed
    dtype: str = "float32"  # of products

    def __post_init__(self):
        self.hf = experts_config(self.experts) if self.experts else hf_config()
        self.kl_coef, self.adamw = KL_COEF, ADAMW
        self.cfg = config_reader.parse_config(self.hf, path="config.json")
        self.mesh = sharding.mesh_of_shape(self.mesh_shape)
        plain = make_plain(**attention_settings(self.cfg), shared=self.shared)
        decoder = Decoder(
            self.cfg,
            constrain=sharding.constrain_to_rows(self.mesh),
            attend=sequence_parallel.exchange_positions(plain, self.mesh),
            lookup=modules.make_lookup(self.mesh),
            dtype=self.dtype,
            remat=self.remat,
            mesh=self.mesh,
        )
        model = (decoder, self.cfg)
        bins = 1 if self.recipe.value_range is None else 8
        critic_cfg = dataclasses.replace(self.cfg, value_bins=bins, value_head_std=0.2)
        critic = (decoder, critic_cfg) if self.recipe.algorithm.critic else None
        self.passes = ppo.make_passes(ppo.Models(model, critic, model), self.recipe, **SCORING, mesh=self.mesh)
        self.what = {
            name: state.model_weights(cfg, self.mesh, head=head, param_dtype=np.float32)
            for name, cfg, head in (("actor", self.cfg, "lm"), ("critic", critic_cfg, "value"))
        }

        self.zeros = {name: update.make_zeros(w.shapes, w.shardings) for name, w in self.what.items()}
        self.exchange = {name: update.make_exchange(w.shardings) for name, w in self.what.items()}
        self.applies = {}

    def weights(self, name, seed):
        return jax.device_put(host_weights(self.what[name].cfg, self.what[name].head, seed), self.what[name].shardings)

    @property
    def shape(self):
        """Of the flat batch."""
        devices = sharding.whole_row_multiple(self.mesh)
        return -(-(self.sequences + self.padding) // devices) * devices, LONGEST

    def plan(self, kind, tokens_per_micro, sequences):
        plan = packing.make_plan(
            kind, max_length=LONGEST, row_lengths=2, max_tokens_per_row=2 * LONGEST, tokens_per_micro=tokens_per_micro,
            sequences=sequences, row_multiple=sharding.row_multiple(self.mesh),
            length_multiple=sharding.length_multiple(self.mesh), shared=self.shared or (0, 0),
        )  # fmt: skip
        return dataclasses.replace(plan, experts=REPLAYED if self.replay else None, kept=self.kept)

    def make_trainable(self, name, params, *, lr, tx):
        what = self.what[name]
        opt, places = state.init_optimizer(tx, what, params)
        if (name, lr, tx) not in self.applies:
            schedule = optim.make_schedule("constant", lr=lr, warmup_steps=0, total_steps=1, min_lr_ratio=0.0)
            self.applies[name, lr, tx] = update.make_apply(tx, schedule, shardings=(what.shardings, places))
        how = Trainable(
            name, getattr(self.passes, name), self.applies[name, lr, tx], self.zeros[name], self.exchange[name]
        )
        return how, opt

    def score(self, trajectories, scores, *, plan, policy, reference, value, unusable=()):
        """The stages between rollout and update, as `train.py` calls them."""
        rewards = [Reward(x, {}, None, unusable="said so" if i in unusable else None) for i, x in enumerate(scores)]
        group = episodes.comparison_groups(np.isnan(scores), 2)
        data = batch.flatten(trajectories, rewards, group, shape=self.shape)
        micros = batch.pack_micros(data, trajectories, plan=plan, mesh=self.mesh)
        data = ppo.with_old_logprob(self.passes, self.recipe, data, micros, policy)
        data = ppo.with_reference(self.passes, self.recipe, data, micros, policy, reference)
        data = ppo.with_values(self.passes, data, micros, value)
        place = sharding.replicated(self.mesh)
        norm = None if self.recipe.value_norm_decay is None else jax.device_put(VALUE_NORM, place)
        return ppo.with_advantages(self.passes, data, jax.device_put(np.float32(KL_COEF), place), self.mesh, norm)

    def minis(self, flat, trajectories, *, plan, mini, name="actor", epochs=1, order=None):
        order = np.arange(len(trajectories)) if order is None else order
        for _ in range(epochs):
            how = dict(order=order, mini_batch_size=mini, plan=plan, mesh=self.mesh)
            how |= dict(reads=getattr(self.passes, name).reads)
            yield from batch.mini_batches(flat, trajectories, **how)

    def update(
        self, trajectories, scores, *, kind="none", tokens_per_micro=10**6, mini=8, epochs=2, lr=0.1, tx=ADAMW,
        order=None, unusable=(),
    ):  # fmt: skip
        """Parameters, metrics and the scored batch after one PPO step of both models."""
        policy, reference = self.weights("actor", 0), self.weights("actor", 1)
        value = self.weights("critic", 2) if self.recipe.algorithm.critic else None
        plan = self.plan(kind, tokens_per_micro, mini)
        models = dict(policy=policy, reference=reference, value=value)
        flat, found = self.score(trajectories, scores, plan=plan, **models, unusable=unusable)
        out = {}
        for name, params, further in (("actor", policy, (reference,)), ("critic", value, ())):
            if params is None:
                continue
            how, opt = self.make_trainable(name, params, lr=lr, tx=tx)
            minis = self.minis(flat, trajectories, plan=plan, mini=mini, name=name, epochs=epochs, order=order)
            params, _, metrics = how.learn(params, opt, np.int32(0), minis, *further, key=jax.random.key(0))
            found = metrics | found
            out[name] = jax.device_get(params)
        return out, found, flat


@pytest.fixture(scope="session")
def learner():
    """mesh shape, name of an estimator -> a learner, made once."""
    made = {}

    def make(mesh_shape=(1, 1, 1, 1), estimator="gae"):
        if (mesh_shape, estimator) not in made:
            made[mesh_shape, estimator] = Learner(mesh_shape, recipe(estimator))
        return made[mesh_shape, estimator]

    return make


@pytest.fixture(scope="session")
def drawn():
    """count, seed -> trajectories and their scores."""
    return draw


@pytest.fixture(scope="session")
def drawn_experts():
    """tokens, sampled -> experts."""
    return draw_experts


@pytest.fixture(scope="session")
def new_learner():
    """The maker of learners that share nothing with other tests."""
    return Learner


@pytest.fixture(scope="session")
def make_recipe():
    """The maker of recipes."""
    return recipe


@pytest.fixture(scope="session")
def settings():
    """The numbers of every recipe."""
    return SETTINGS
