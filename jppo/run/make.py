"""From the settings to PPO's learner: its models, algorithm, recipe, passes, epochs and programs.

A user's loop on `jppo.open` has these without the algorithm's estimate of advantages. What other trainings need too is
in `make.py`.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import Mesh

from jppo.algorithms import kl
from jppo.errors import UserError
from jppo.learner import catalogue, estimate, make, packing, ppo, programs, sharding, state, update
from jppo.learner.algorithm import Algorithm
from jppo.learner.auto_packing import with_packing
from jppo.learner.make import Trained
from jppo.learner.ppo import Learner, ModelConfigs, StepLearner
from jppo.learner.streams import Start, fold
from jppo.models import hf, params, placing
from jppo.models.config import ModelConfig, pad_vocab
from jppo.models.lora import COLLECTION, Base
from jppo.models.params import Head
from jppo.settings import Loop, Optimizer, Settings, importance_band, parts, rejection_rules
from jppo.types import Array, Params, TrainState

COMPILERS = min(4, os.cpu_count() or 1)  # programs that compile at a time; more take more memory
VALUE_NORM = "value_norm"  # in config.json: the statistics of returns that a fitted critic's values are normalised by


def read_models_of_run(c: Settings, *, weights: bool = True) -> ModelConfigs:
    """Reads the configs of the models that a PPO run needs, and checks the headers of their `weights`."""
    with_reference = (c.algorithm.use_kl_in_reward or c.actor.use_kl_loss) and not c.ref.url
    return read_models(c, with_critic=wants_critic(c), with_reference=with_reference, weights=weights)


def read_models(c: Loop, *, with_critic: bool, with_reference: bool, weights: bool = True) -> ModelConfigs:
    """Reads the configs of the policy, and of critic and reference if wanted; checks the headers of their `weights`.

    Finds adapters and frozen parameters, too.
    """

    def read_config(setting: str, path: str, head: Head, init: str) -> ModelConfig:
        config, cfg = hf.read_config(path, longest=c.data.longest_row, setting=setting)
        if head == "value":
            if config.get(VALUE_NORM) is not None and c.critic.value_norm_decay is None:
                raise UserError(
                    f"critic.path={path}: its values are normalized, and critic.value_norm_decay=None reads them as"
                    " rewards; set it, to 0.9 for example"
                )
            cfg = dataclasses.replace(cfg, value_bins=c.critic.value_bins or 1, value_head_std=c.critic.value_head_std)
        if weights and init == "pretrained":
            hf.check_weights(path, cfg, head=head)
        return cfg

    policy = read_config("model.path", c.model.path, "lm", c.model.init)
    of_critic = "critic.path" if c.critic.path else "model.path"
    critic = read_config(of_critic, path_of_critic(c), "value", critic_init(c)) if with_critic else None
    reference = None
    if with_reference:
        reference = policy if c.ref.path == "policy" else read_config("ref.path", c.ref.path, "lm", "pretrained")
    if reference is not None and reference.vocab_size != policy.vocab_size:
        raise UserError(
            f"ref.path={c.ref.path}: a reference has the policy's vocabulary, {policy.vocab_size} tokens, and this one"
            f" has {reference.vocab_size}; use a model with that vocab_size"
        )
    return ModelConfigs(
        policy=policy,
        critic=critic,
        reference=reference,
        adapters=make.make_adapters(c),
        critic_adapters=None if critic is None else make.make_adapters(c, c.critic),
        frozen=make.find_frozen(c, "actor", policy, head="lm"),
        critic_frozen=make.find_frozen(c, "critic", critic, head="value"),
    )


def require_models_fit(inputs: ModelConfigs, mesh: Mesh) -> None:
    """Runs `require_divisible` for every model of a run, before a server starts."""
    for cfg in inputs.configs:
        sharding.require_divisible(cfg, mesh)


def path_of_critic(c: Loop) -> str:
    """Returns the path of the critic's initial weights; the policy's by default."""
    return c.critic.path if c.critic.path else c.model.path


def critic_init(c: Loop) -> str:
    """Returns how the critic starts: by `model.init` on the policy's model; a model of its own is never random."""
    return c.model.init if path_of_critic(c) == c.model.path else "pretrained"


def value_norm_of(c: Loop) -> Sequence[float]:
    """Returns the statistics that normalise the critic's first values: a fitted critic's, or those before any batch."""
    return hf.read_config(path_of_critic(c))[0].get(VALUE_NORM) or (0.0, 0.0, 0.0)


def wants_critic(c: Settings) -> bool:
    """Whether the estimator reads values."""
    return bool(parts.estimator(c).critic)


def make_algorithm(c: Settings) -> Algorithm:
    """Makes the algorithm of the settings: the extension, estimator and losses, and terms that other settings add."""
    algorithm = _with_terms_of_settings(c, parts.algorithm(c))
    parts.run_on_shapes(algorithm, "metrics", parts.loss_setting(c))  # raises where terms of the two share one
    return algorithm


def _with_terms_of_settings(c: Loop, algorithm: Algorithm) -> Algorithm:
    """Adds the regularisers of `actor` to the policy's loss, and the loss of `critic` if the algorithm has none."""
    algorithm = dataclasses.replace(algorithm, terms=(*algorithm.terms, *catalogue.regularisers(c.actor)))
    return algorithm.over(Algorithm(value_terms=catalogue.value_terms(c.critic)))


def kl_kind(name: str, setting: str) -> kl.Kind:
    """Returns the KL estimator that a setting names."""
    return name if name in kl.BY_NAME else parts.KL_ESTIMATORS.find(name, setting)


def make_correction(c: Settings) -> estimate.Correction | None:
    """Makes the correction of the log-prob mismatch, if any."""
    a = c.algorithm
    rules = rejection_rules(a.rollout_rs, a.rollout_rs_threshold)
    if a.rollout_is == "none" and not rules:
        return None
    lower, upper = importance_band(a.rollout_is_threshold)
    return estimate.Correction(
        level=None if a.rollout_is == "none" else a.rollout_is,
        lower=lower,
        upper=upper,
        normalize=a.rollout_is_batch_normalize,
        rules=rules,
    )


def make_kl_controller(c: Settings) -> Callable[[Array, Array], Array] | None:
    """Makes the `algorithm.kl_ctrl_type` update of the KL coefficient; None: the coefficient is fixed."""
    a = c.algorithm
    if a.kl_ctrl_type == "fixed":
        return None
    return jax.jit(functools.partial(kl.adaptive, steps=c.sequences_of_step, target=a.target_kl, horizon=a.horizon))


def make_recipe(c: Settings) -> ppo.Recipe:
    """Makes the recipe of a PPO run: the algorithm of the settings, and the computations around it."""
    talk = c.rollout.multi_turn
    return dataclasses.replace(
        _make_recipe(c, make_algorithm(c)),
        bypass=c.algorithm.old_logprob == "bypass",
        correction=make_correction(c),
        kl_penalty=kl_kind(c.algorithm.kl_penalty, "algorithm.kl_penalty") if c.algorithm.use_kl_in_reward else None,
        adapt_kl=make_kl_controller(c),
        value_norm_decay=c.critic.value_norm_decay,
        earns=bool(c.reward.function or c.reward.model.step_aggregation or talk.enable or c.rollout.agent),
        branches=c.rollout.has_branches,
    )


def make_loop_recipe(c: Loop) -> ppo.Recipe:
    """Makes the losses of a user's loop, and passes of log-probs, of the reference by token as for a KL in a reward."""
    return _make_recipe(c, _with_terms_of_settings(c, parts.policy_loss(c)), kl_penalty="kl")


def _make_recipe(c: Loop, algorithm: Algorithm, kl_penalty: kl.Kind | None = None) -> ppo.Recipe:
    """Makes the parts of a recipe that a PPO run and a user's loop share: losses, their means, KL and metrics."""
    a, v = c.actor, c.critic
    value_mode = a.loss_agg_mode if v.loss_agg_mode is None else v.loss_agg_mode
    scale = float(c.data.max_response_length) if a.loss_scale_factor is None else a.loss_scale_factor
    value_scale = scale if v.loss_scale_factor is None else v.loss_scale_factor
    return ppo.Recipe(
        algorithm=algorithm,
        bypass=False,
        correction=None,
        kl_penalty=kl_penalty,
        kl_loss_type=kl_kind(a.kl_loss_type, "actor.kl_loss_type") if a.use_kl_loss else None,
        kl_topk=(("topk", a.kl_topk), ("min_logp", a.kl_log_prob_min_clamp)),
        mean=functools.partial(update.aggregate, usual=algorithm.aggregation or a.loss_agg_mode, scale=scale),
        value_mean=functools.partial(update.aggregate, usual=value_mode, scale=value_scale),
        value_range=v.value_range if v.value_bins else None,
        entropy_metric=a.calculate_entropy,
    )


def plan_of_run(c: Settings, mesh: Any, inputs: ModelConfigs) -> packing.Plan:
    """Plans the row shapes of a PPO run."""
    c, _ = with_packing(c, inputs, mesh)
    sizes = tuple(epochs.mini_batch_size for epochs in make_epochs(c))
    return plan_mini_batches(c, mesh, inputs.policy, inputs.total_steps, sizes)


def plan_mini_batches(c: Loop, mesh: Any, policy: ModelConfig, steps: int, sizes: tuple[int, ...]) -> packing.Plan:
    """Plans the row shapes of `steps` whose mini-batches have these sizes."""
    plan = make.plan_rows(
        c, mesh, tokens_per_device=c.actor.max_tokens_per_device, sequences=max(sizes), steps=steps,
        policy=policy, sizes=() if c.rollout.has_branches else sizes,
    )  # fmt: skip
    return dataclasses.replace(plan, experts=replayed_experts(c, policy), kept=make.kept_tokens(c, policy))


def replayed_experts(c: Loop, policy: ModelConfig) -> tuple[int, int] | None:
    """Returns (layers, active experts of a token) if the engine's experts are replayed; UserError without experts."""
    if not c.rollout.routing_replay:
        return None
    if policy.experts is None:
        raise UserError(
            f"rollout.routing_replay=True: the {policy.family} model of model.path has no experts; set it to False"
        )
    return policy.num_layers, policy.experts.active


def make_epochs(c: Settings) -> tuple[ppo.Epochs, ppo.Epochs]:
    """Returns how actor and critic go over the batch of a step."""
    a, v = c.actor, c.critic
    size = a.ppo_mini_batch_size if v.ppo_mini_batch_size is None else v.ppo_mini_batch_size
    count = a.ppo_epochs if v.ppo_epochs is None else v.ppo_epochs
    warmup_count = count if v.warmup_epochs is None else v.warmup_epochs
    shared_options = dict(most_sequences=most_sequences(c), warmup=c.trainer.critic_warmup)
    return (
        ppo.Epochs(a.ppo_epochs, a.ppo_mini_batch_size, a.shuffle, in_warmup=0, **shared_options),
        ppo.Epochs(count, size, v.shuffle, in_warmup=warmup_count, **shared_options),
    )


def most_sequences(c: Settings) -> int:
    """Returns the most trajectories of a step, the branches of episodes included."""
    return c.sequences_of_step * (c.rollout.agent_branches if c.rollout.has_branches else 1)


def batch_shape(c: Settings, mesh: Any) -> tuple[int, int]:
    """Returns a step's flat batch [B, L]: trajectories with branches, padded for the mesh, by the longest response."""
    devices = sharding.whole_row_multiple(mesh)
    return -(-most_sequences(c) // devices) * devices, c.data.max_response_length


def make_models(c: Loop, inputs: ModelConfigs, mesh: Any) -> tuple[ppo.Models, dict[str, Any]]:
    """Makes the modules of the models, and the arguments of `score.make_logprob` for the policy."""

    def model(cfg: ModelConfig) -> ppo.Model:
        cfg = pad_vocab(cfg, mesh.shape["tensor"])
        return make.make_decoder(c, cfg, mesh), cfg

    policy = model(inputs.policy)
    critic = None if inputs.critic is None else model(inputs.critic)
    reference = None if inputs.reference is None else model(inputs.reference)
    heads = dict(temperature=c.rollout.temperature, chunk_tokens=make.chunk_tokens(c.model, policy[1], mesh), mesh=mesh)
    return ppo.Models(policy, critic, reference), heads


def make_passes(c: Loop, recipe: ppo.Recipe, inputs: ModelConfigs, mesh: Any) -> ppo.Passes:
    """Makes the passes of a recipe; loads and compiles nothing."""
    models, heads = make_models(c, inputs, mesh)
    options = sharding.compiler_options(mesh, c.model.compiler_options)
    return ppo.make_passes(models, recipe, **heads, options=options)


def shares_trunk(c: Loop, inputs: ModelConfigs) -> bool:
    """Whether critic and policy share one frozen base in memory."""
    return inputs.adapters is not None and inputs.critic_adapters is not None and path_of_critic(c) == c.model.path


def make_learner(
    c: Settings, inputs: ModelConfigs, mesh: Any, *, sketch: bool = False
) -> tuple[StepLearner, TrainState]:
    """Loads the models of a PPO run into their shards; returns the learner and the state before the first step.

    A `sketch` has shapes in place of arrays.
    """
    c, _ = with_packing(c, inputs, mesh)
    recipe, plan = make_recipe(c), plan_of_run(c, mesh, inputs)
    warmup, coefficient = c.trainer.critic_warmup, c.algorithm.kl_coef
    learner, begin = load_learner(c, inputs, mesh, recipe, plan, sketch=sketch, warmup=warmup, kl_coef=coefficient)
    actor_epochs, critic_epochs = make_epochs(c)
    step_fields = dict[str, Any](shape=batch_shape(c, mesh), actor_epochs=actor_epochs, critic_epochs=critic_epochs)
    return StepLearner(**vars(learner), **step_fields), begin


def make_loop_learner(c: Loop, inputs: ModelConfigs, mesh: Any) -> tuple[Learner, TrainState]:
    """Loads the models of a user's loop into their shards and makes the passes."""
    plan = plan_mini_batches(c, mesh, inputs.policy, inputs.total_steps, (c.actor.ppo_mini_batch_size,))
    return load_learner(c, inputs, mesh, make_loop_recipe(c), plan)


def load_learner(
    c: Loop, inputs: ModelConfigs, mesh: Any, recipe: ppo.Recipe, plan: packing.Plan, *, sketch: bool = False,
    warmup: int = 0, kl_coef: float = 0.0,
) -> tuple[Learner, TrainState]:  # fmt: skip
    """Loads the models and makes their passes; returns the learner and the state before the first step.

    `warmup`: first steps without the policy's update. A `sketch` has shapes in place of arrays and reads no weights.
    """
    passes, seed, steps = make_passes(c, recipe, inputs, mesh), c.trainer.seed, inputs.total_steps
    scaled = c.model.scales_loss
    policy, value = load_models(c, inputs, mesh, seed, sketch=sketch)
    actor, policy_opt = make.make_trainable(c.actor, "actor", passes.actor, policy, steps - warmup, scaled=scaled)
    critic = value_opt = reference = None
    if value is not None and passes.critic is not None:
        critic, value_opt = make.make_trainable(c.critic, "critic", passes.critic, value, steps, scaled=scaled)
    if inputs.reference is not None:
        cfg = pad_vocab(inputs.reference, mesh.shape["tensor"])
        reference = load_reference(c, mesh, cfg, policy, fold(jax.random.key(seed), Start.REFERENCE), sketch)
    cfg = pad_vocab(inputs.policy, mesh.shape["tensor"])
    learner = Learner(
        mesh=mesh, cfg=cfg, plan=plan, recipe=recipe, passes=passes, actor=actor, critic=critic, reference=reference
    )
    begin = state.begin_state(
        policy.learned, policy_opt, None if value is None else value.learned, value_opt, kl_coef=kl_coef, seed=seed,
        value_norm=None if recipe.value_norm_decay is None else value_norm_of(c),
    )  # fmt: skip
    return learner, begin


def load_models(
    c: Loop, inputs: ModelConfigs, mesh: Any, seed: int, *, sketch: bool = False,
    bases: tuple[Base | None, Base | None] = (None, None),
) -> tuple[Trained, Trained | None]:  # fmt: skip
    """Loads policy and critic; `bases` are their frozen weights, where these are in memory already."""
    base, critic_base = bases
    key = jax.random.key(seed)
    policy = make.load_trained(
        c, mesh, pad_vocab(inputs.policy, mesh.shape["tensor"]), c.model.path, head="lm",
        init="shapes" if sketch else c.model.init, key=fold(key, Start.POLICY), adapters=inputs.adapters,
        frozen=inputs.frozen, trunk=None if base is None else base.params,
    )  # fmt: skip
    policy = make.offload_if(policy, c.actor.param_offload, shared=base is not None)
    if inputs.critic is None:
        return policy, None
    path, trunk = path_of_critic(c), critic_base
    if shares_trunk(c, inputs):
        trunk = policy.base
    elif path != c.model.path:  # a critic's files have its head, too
        trunk = None
    critic = make.load_trained(
        c, mesh, pad_vocab(inputs.critic, mesh.shape["tensor"]), path, head="value",
        init="shapes" if sketch else critic_init(c), key=fold(key, Start.CRITIC), adapters=inputs.critic_adapters,
        frozen=inputs.critic_frozen, trunk=None if trunk is None else trunk.params,
    )  # fmt: skip
    return policy, make.offload_if(critic, c.critic.param_offload, shared=trunk is not None)


def begin_further_state(c: Loop, inputs: ModelConfigs, learner: Learner, seed: int) -> TrainState:
    """Makes the initial state of another set of trained weights, which shares a learner's programs and frozen bases."""
    base = None if inputs.adapters is None else learner.actor.base  # frozen parameters alone are no trunk to start from
    bases = base, None if learner.critic is None or inputs.critic_adapters is None else learner.critic.base
    policy, value = load_models(c, inputs, learner.mesh, seed, bases=bases)
    init_opt = functools.partial(begin_optimizer, c, inputs, learner)
    critic_state = (None, None) if value is None else (value.learned, init_opt("value", value.learned))
    return state.begin_state(policy.learned, init_opt("policy", policy.learned), *critic_state, seed=seed)


def begin_optimizer(c: Loop, inputs: ModelConfigs, learner: Learner, field: str, learned: Params) -> Any:
    """Returns the initial optimizer state of a field of the train state, `policy` or `value`, for loaded parameters."""
    head: Head
    section: Optimizer
    if field == "policy" or inputs.critic is None:
        head, cfg, adapters, section, name = "lm", learner.cfg, inputs.adapters, c.actor, "actor"
        frozen = inputs.frozen
    else:
        cfg, adapters = pad_vocab(inputs.critic, learner.mesh.shape["tensor"]), inputs.critic_adapters
        head, section, name, frozen = "value", c.critic, "critic", inputs.critic_frozen
    if adapters is None:
        layout = state.model_weights(cfg, learner.mesh, head=head, param_dtype=c.model.param_dtype, frozen=frozen)
    else:
        layout = state.adapters(cfg, learner.mesh, adapters, head=head)
    tx = make.optimizer_of(section, name, layout, scaled=c.model.scales_loss)
    opt, _ = state.init_optimizer(tx, layout, learned)
    return placing.to_host(opt) if section.optimizer_offload else opt


def list_run_programs(c: Settings, learner: StepLearner, now: TrainState) -> list[programs.Program]:
    """Lists the programs of a run's steps; learner and state may be of shapes."""
    shuffles = c.actor.shuffle or c.critic.shuffle
    return programs.list_programs(learner, now, shuffled=most_sequences(c) if shuffles else 0)


def prepare_programs(
    listed: Sequence[programs.Program], progress: Callable[[str, int], Callable[[], None]] = lambda *_: ppo.silent
) -> None:
    """Compiles the programs, so that no step does; `progress` gets a label and a total, and counts each.

    Accelerators and several processes also run them on zeros, one by one, which opens libraries and links, and needs
    the memory that a step needs.
    """
    count_one = progress("programs ready", len(listed))
    if jax.default_backend() != "cpu" or jax.process_count() > 1:
        for program in listed:
            program.run()
            count_one()
        return
    pool = ThreadPoolExecutor(COMPILERS)
    try:
        for compiled in [pool.submit(program.lower().compile) for program in listed]:
            compiled.result()
            count_one()
    finally:
        pool.shutdown(cancel_futures=True)


def load_reference(c: Loop, mesh: Any, cfg: ModelConfig, policy: Trained, key: jax.Array, sketch: bool) -> Params:
    """Makes the frozen reference of the KL: its own model, or a copy of the initial policy."""
    if c.ref.path != "policy":
        init = "shapes" if sketch else "pretrained"
        trained = make.load_trained(c, mesh, cfg, c.ref.path, head="lm", init=init, key=key, adapters=None)
        return make.offload_if(trained, c.ref.param_offload).learned
    if policy.base is None:
        return make.copy_weights(policy.learned, c.ref.param_offload)
    if COLLECTION in policy.learned:  # LoRA: the loaded base is the reference
        return policy.base.params
    return params.merge(policy.base.params, make.copy_weights(policy.learned, c.ref.param_offload))
