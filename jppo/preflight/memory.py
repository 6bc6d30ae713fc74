"""Memory estimate of a run before any weight is read: by part and device, and on the host.

Parameters, optimizers and gradient sums follow from the parameter table and the mesh. Temporaries are XLA's own
account: each pass is compiled for the largest row shape, on abstract arguments. The peak is the largest of a few
moments: a gradient, an optimizer step, or a scoring pass.
"""

import itertools
import math
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jppo.learner import cost, model_configs, packing, ppo, sharding, state, update
from jppo.learner.make import Trained, make_recipe_and_passes, make_scheduled_apply, shares_trunk
from jppo.learner.recipe import optimizer_of, plan_of_run
from jppo.models import hf_write, router
from jppo.models.config import ModelConfig, pad_vocab
from jppo.models.lora import Base, Lora, join
from jppo.models.params import Head
from jppo.preflight.programs import Estimate, ProgramMemory, account, global_size, size
from jppo.preflight.servers import server_memory
from jppo.rollout.inprocess import TURNS, InprocessSettings, choice_of, filling, make_empty, make_programs
from jppo.rollout.make import inprocess_settings
from jppo.rollout.protocol import greedy
from jppo.settings import Common, Optimizer, Settings, Supervised, optimizers
from jppo.types import Counts, Params, Rows, Scored

MANY = 1.1  # a row shape with this many times the tokens of the longest rows is compiled, too


def sampled_share(c: Common) -> float:
    """Returns the share of sampled tokens in the longest sequences."""
    return float(c.data.max_response_length / (c.data.longest_row))


def useful(
    c: Common, cfg: ModelConfig, shape: Sequence[int], adapters: Lora | None, *, head: bool, count: Any = cost.update
) -> int:
    """Counts the useful FLOP over rows full of the longest sequences: of a gradient, or of what `count` counts."""
    entries, length = math.prod(shape), min(c.data.longest_row, shape[1])
    read = int(entries * sampled_share(c)) if head else 0
    flop: int = count(cfg, [length] * max(1, entries // length), head_tokens=read, adapters=adapters)
    return flop


def sketch(c: Common, mesh: Any, cfg: ModelConfig, *, head: Head, adapters: Lora | None) -> Trained:
    """Does `load_trained` with shapes in place of arrays."""
    all_of_it = state.model_weights(cfg, mesh, head=head, param_dtype=c.model.param_dtype, adapters=adapters)
    values = state.abstract(all_of_it)
    if adapters is None:
        return Trained(all_of_it, values, None)
    layout = state.adapters(cfg, mesh, adapters, head=head)
    stays = {name: part for name, part in values.items() if head == "lm" or name != "score"}
    return Trained(layout, state.abstract(layout), Base(stays, adapters.scale))


def abstract_rows(shape: tuple[int, ...], mesh: Any, plan: packing.Plan | None = None) -> Rows:
    """Makes abstract rows of that shape; `plan` as in `packing.empty_rows`."""
    place = sharding.rows_sharding(mesh)
    rows: Rows = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        packing.empty_rows((shape[0], shape[1]), plan),
    )
    return rows


def largest_shapes(plan: packing.Plan) -> list[tuple[int, int]]:
    """Returns the row shapes that may need most: with most token pairs, and with far more tokens."""
    by_pairs = max(plan.shapes, key=lambda shape: shape[0] * shape[1] ** 2)
    by_tokens = max(plan.shapes, key=math.prod)
    return [by_pairs, *([by_tokens] if math.prod(by_tokens) > MANY * math.prod(by_pairs) else [])]


def update_moments(
    name: str,
    accumulate: Any,
    section: Optimizer,
    trained: Trained,
    micros: Sequence[Any],
    *further: Any,
    brought: int = 0,
    useful: Sequence[int] = (),
    masked: float = 1.0,
    load: Any = None,
) -> tuple[Any, list[ProgramMemory]]:
    """Returns a model's optimizer state and its update's moments; `micros` are abstract micro-batches.

    `brought` bytes are copied from the host for the whole update; the optimizer comes for its step. `useful` are the
    model's FLOP for each micro-batch. `load` is the abstract load of experts, if the loss needs it.
    """
    tx = optimizer_of(section, name, trained.layout)
    opt, places = state.abstract_optimizer(tx, trained.layout)
    number: Any = jax.ShapeDtypeStruct((), jnp.float32)
    carry = update.abstract_carry(trained.layout.shapes, trained.layout.shardings)
    gradients, learned, moments = size(carry), trained.learned, []
    for micro, flop in itertools.zip_longest(micros, useful, fillvalue=0):
        given = learned, trained.base, carry, micro, Counts(tokens=number, sequences=number, load=load), *further
        options = dict(brought=brought, useful=flop, entries=math.prod(jax.tree.leaves(micro)[0].shape))
        moments.append(account(f"{name} gradient", gradients, accumulate, *given, masked=masked, **options))
    if (exchange := update.make_exchange(trained.layout.shardings)) is not None:
        moments.append(account(f"{name} exchange", gradients, exchange, carry, brought=brought))
    apply = make_scheduled_apply(section, tx, trained.layout, places, 1)
    numbers = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.bool_)  # step, learns
    here = brought + (size(opt) if section.optimizer_offload else 0)
    moments.append(account(f"{name} step", gradients, apply, learned, opt, carry, *numbers, brought=here))
    return opt, moments


def estimate_memory(c: Settings, inputs: model_configs.ModelConfigs, mesh: Any, *, entries: int) -> Estimate:
    """Estimates the memory of a PPO run whose step has `entries` row entries in all, padding included."""

    def fit(cfg: ModelConfig) -> ModelConfig:
        return pad_vocab(cfg, mesh.shape["tensor"])

    recipe, passes = make_recipe_and_passes(c, inputs, mesh)
    policy = sketch(c, mesh, fit(inputs.policy), head="lm", adapters=inputs.adapters)
    critic = None
    if inputs.critic is not None:
        critic = sketch(c, mesh, fit(inputs.critic), head="value", adapters=inputs.critic_adapters)
    reference, own_reference = _reference(c, inputs, mesh, policy)
    plan = plan_of_run(c, mesh, inputs.policy, inputs.total_steps)
    shapes = largest_shapes(plan)
    rows = [abstract_rows(shape, mesh, plan) for shape in shapes]
    scored = [_scored(recipe, batch, critic is not None) for batch in rows]
    models: dict[str, Any] = dict(policy=policy, critic=critic, reference=reference)
    own = dict(shared_trunk=shares_trunk(c, inputs), own_reference=own_reference)
    coming = model_configs.brought(c, recipe, size, **models, **own)
    moments = list(_scoring(c, inputs, recipe, passes, policy, reference, critic, rows, coming))
    if c.rollout.name == "inprocess":
        moments += own_engine(c, mesh, brought=coming.logprob)
    judge = recipe.in_loss(reference)
    share = sampled_share(c)
    flop = [useful(c, inputs.policy, shape, inputs.adapters, head=True) for shape in shapes]
    policy_opt, updates = update_moments(
        "actor", passes.actor, c.actor, policy, scored, judge, brought=coming.actor, useful=flop, masked=share,
        load=None if passes.router_load is None else _load(inputs.policy, mesh),
    )  # fmt: skip
    moments += updates
    parts = {"policy": size((policy.learned, policy.base)), "policy's optimizer": size(policy_opt)}
    if critic is not None and inputs.critic is not None:
        flop = [useful(c, inputs.critic, shape, inputs.critic_adapters, head=False) for shape in shapes]
        critic_opt, updates = update_moments(
            "critic", passes.critic, c.critic, critic, scored, brought=coming.critic, useful=flop
        )
        moments += updates
        base = None if shares_trunk(c, inputs) else critic.base
        parts |= {"critic": size((critic.learned, base)), "critic's optimizer": size(critic_opt)}
    if own_reference:
        parts["reference"] = size(reference)
    host = {name: parts.pop(name) for name in model_configs.offloaded_parts(c) if name in parts}
    # The rows of scoring, and two micro-batches of an update: one in use, one being transferred.
    parts["batch"] = (size(rows[0]) // math.prod(rows[0].inputs.shape) + 1) * entries + 2 * max(map(size, scored))
    server = server_memory(c, inputs.policy, served(inputs.policy, c.rollout.dtype), mesh)
    return Estimate(parts, tuple(moments), host, server)


def of_one_model(
    c: Supervised,
    mesh: Any,
    trained: Trained,
    opt: Any,
    moments: Sequence[ProgramMemory],
    packed: Sequence[Rows],
    further: Mapping[str, int] = types.MappingProxyType({}),
) -> Estimate:
    """Estimates a run that trains one model; `packed` is its largest batch, `further` are other bytes that it keeps."""
    optimizer = {"its optimizer": size(opt)}
    there, away = (optimizer, {}) if not c.optim.optimizer_offload else ({}, optimizer)
    model = size((trained.learned, trained.base))
    batch = 2 * max(size(abstract_rows(rows.inputs.shape, mesh)) for rows in packed)
    return Estimate({"model": model, **further, **there, "batch": batch}, tuple(moments), away)


def stored_models(c: Settings, inputs: model_configs.ModelConfigs, mesh: Any) -> int:
    """Returns the bytes of a checkpoint: trained weights and optimizers."""
    policy = stored_model(c, mesh, inputs.policy, inputs.adapters, "lm", "actor")
    if inputs.critic is None:
        return policy
    return policy + stored_model(c, mesh, inputs.critic, inputs.critic_adapters, "value", "critic")


def stored_model(c: Common, mesh: Any, cfg: ModelConfig, adapters: Lora | None, head: Head, optimizer: str) -> int:
    """Returns the bytes of one model in a checkpoint; `optimizer` is its section of the settings."""
    trained = sketch(c, mesh, pad_vocab(cfg, mesh.shape["tensor"]), head=head, adapters=adapters)
    opt, _ = state.abstract_optimizer(optimizer_of(optimizers(c)[optimizer], optimizer, trained.layout), trained.layout)
    return global_size((trained.learned, opt))


def _reference(
    c: Settings, inputs: model_configs.ModelConfigs, mesh: Any, policy: Trained
) -> tuple[Params | None, bool]:
    """Returns the abstract reference, and whether it takes further memory: with LoRA it is the policy's base."""
    if inputs.reference is None:
        return None, False
    if c.ref.path == "policy" and policy.base is not None:
        return policy.base.params, False
    cfg = pad_vocab(inputs.reference, mesh.shape["tensor"])
    return sketch(c, mesh, cfg, head="lm", adapters=None).learned, True


def _load(cfg: ModelConfig, mesh: Any) -> Any:
    """Returns the abstract load of the experts of a model."""
    return jax.ShapeDtypeStruct(router.load_shape(cfg), jnp.float32, sharding=sharding.replicated(mesh))


def _scored(recipe: ppo.Recipe, rows: Rows, with_critic: bool) -> Scored:
    """Makes a micro-batch of an update, with the recipe's fields."""
    inputs: Any = rows.inputs
    f32: Any = jax.ShapeDtypeStruct(inputs.shape, jnp.float32, sharding=inputs.sharding)
    weighed = recipe.correction is not None and recipe.correction.level is not None and not recipe.bypass
    chosen: Any = jax.ShapeDtypeStruct(inputs.shape, jnp.bool_, sharding=inputs.sharding)
    return Scored(
        rows=rows,
        old_logprob=f32,
        ref_logprob=f32 if recipe.kl_loss_type is not None else None,
        value=f32 if with_critic else None,
        weight=f32 if weighed else None,
        advantage=f32,
        returns=f32,
        positive=f32 if recipe.positive_lm_coef > 0 else None,
        selected=chosen if recipe.selection is not None else None,
    )


def _scoring(
    c: Settings,
    inputs: model_configs.ModelConfigs,
    recipe: ppo.Recipe,
    passes: ppo.Passes,
    policy: Trained,
    reference: Params | None,
    critic: Trained | None,
    rows: Sequence[Rows],
    coming: model_configs.Brought,
) -> Iterator[ProgramMemory]:
    """Accounts for the passes without gradients."""
    actor = join(policy.learned, policy.base)
    for batch in rows:
        shape, share = batch.inputs.shape, sampled_share(c)
        entries = math.prod(shape)
        flop = useful(c, inputs.policy, shape, inputs.adapters, head=True, count=cost.forward)
        options = dict[str, Any](brought=coming.logprob, useful=flop, masked=share, entries=entries)
        yield account("log-probs", 0, passes.logprob, actor, batch, **options)
        if passes.reference is not None and inputs.reference is not None:
            policy_too = recipe.in_reward(actor)
            again = 0 if policy_too is None else flop
            flop = useful(c, inputs.reference, shape, None, head=True, count=cost.forward)
            options |= dict(brought=coming.reference, useful=flop + again)
            yield account("reference", 0, passes.reference, reference, policy_too, batch, **options)
        if passes.value is not None and critic is not None and inputs.critic is not None:
            judge = join(critic.learned, critic.base)
            flop = useful(c, inputs.critic, shape, inputs.critic_adapters, head=False, count=cost.forward)
            yield account("values", 0, passes.value, judge, batch, brought=coming.values, useful=flop, entries=entries)


def served(cfg: ModelConfig, dtype: str) -> int:
    """Returns the bytes of the policy's tensors in a server or in a published file."""
    return sum(math.prod(shape) for shape in hf_write.hf_shapes(cfg).values()) * int(jnp.dtype(dtype).itemsize)


def own_engine(c: Settings, mesh: Any, *, brought: int) -> list[ProgramMemory]:
    """Accounts for the in-process rollout engine: prefill of the largest prompts and decode, with cache and weights."""
    s = inprocess_settings(c, mesh)
    programs = make_programs(s, (0,), turns=TURNS)
    model = _prepared(s, programs, sharding.own_part(mesh), c.model.param_dtype)
    slots = _slots(s)
    held = size((model, slots))
    choice = jax.tree.map(_shape, choice_of(greedy(1)))
    rows = jax.ShapeDtypeStruct((), "int32")
    prompt_shape = max(s.prompt_shapes, key=math.prod)
    prompts = jax.tree.map(_shape, filling(s.rows, prompt_shape))
    advance = programs.advance_cut if s.cut else programs.advance
    moments = [
        account("prefill", 0, programs.fill, model, slots, *prompts, brought=brought),
        account("decode, a token", 0, advance, model, slots, choice, rows, brought=brought),
    ]
    return [moment.beside(held) for moment in moments]


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _slots(s: InprocessSettings) -> Any:
    """Returns the active rows' shapes."""
    empty, places = make_empty(s)
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), jax.eval_shape(empty), places
    )


def _prepared(s: InprocessSettings, programs: Any, mesh: Any, param_dtype: str) -> Any:
    """Returns the shapes of the engine's weights, sharded by XLA."""
    weights = state.abstract(state.model_weights(s.cfg, mesh, head="lm", param_dtype=param_dtype))
    done = programs.prepare.lower(weights).compile()
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), done.out_info, done.output_shardings
    )
