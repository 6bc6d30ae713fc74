"""Memory estimate of a run before any weight is read: by part and device, and on the host.

Parameters, optimizers and gradient sums follow from the parameter table and the mesh. Temporaries are XLA's own
account: each program of a step (`learner/programs.py`) is compiled for the largest row shape, on abstract arguments.
The peak is the largest of a few moments: a gradient, an optimizer step, or a scoring pass.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jppo.learner import cost, make, packing, sharding, state
from jppo.learner.make import offloaded_parts, optimizer_of
from jppo.learner.ppo import ModelConfigs
from jppo.learner.programs import Program, update_programs
from jppo.models import hf_write, placing
from jppo.models.cache import LayerCache, count_slots
from jppo.models.config import ModelConfig, pad_vocab
from jppo.models.freeze import ALL_LEARN, Frozen
from jppo.models.generate import Slots
from jppo.models.lora import Lora
from jppo.models.params import Head
from jppo.preflight.programs import Estimate, Inspect, ProgramMemory, account, global_size, size
from jppo.preflight.servers import server_memory
from jppo.rollout import inprocess
from jppo.rollout.make import inprocess_settings
from jppo.rollout.protocol import greedy
from jppo.run.make import list_run_programs, make_learner, shares_trunk
from jppo.run.supervised import Task
from jppo.settings import PreferenceTuning, Settings, Supervised, Training, optimizers
from jppo.types import Rows

MANY_TOKENS = 1.1  # a row shape with this many times the tokens of the longest rows is compiled, too


def sampled_share(c: Training) -> float:
    """Returns the share of sampled tokens in the longest sequences."""
    return float(c.data.max_response_length / (c.data.longest_row))


def useful_flop(
    c: Training, cfg: ModelConfig, shape: Sequence[int], head: bool, count: Any, *, adapters: Lora | None
) -> int:
    """Counts the FLOP that the model needs for rows full of the longest sequences, by `count`, as of a gradient."""
    entries, length = math.prod(shape), min(c.data.longest_row, shape[1])
    head_tokens = int(entries * sampled_share(c)) if head else 0
    flop: int = count(cfg, [length] * max(1, entries // length), head_tokens=head_tokens, adapters=adapters)
    return flop


def largest_shapes(plan: packing.Plan) -> list[tuple[int, int]]:
    """Returns the row shapes that may need most memory: with most token pairs, and with far more tokens."""
    by_pairs = max(plan.shapes, key=lambda shape: shape[0] * shape[1] ** 2)
    by_tokens = max(plan.shapes, key=math.prod)
    return [by_pairs, *([by_tokens] if math.prod(by_tokens) > MANY_TOKENS * math.prod(by_pairs) else [])]


def account_for(
    programs: Iterable[Program],
    shapes: Sequence[tuple[int, ...]],
    useful: Callable[[Program], int] = lambda _: 0,
    masked: float = 1.0,
    inspect: Inspect | None = None,
) -> list[ProgramMemory]:
    """Compiles the programs over rows of these shapes, and those without rows, and returns their memory.

    `useful` counts the FLOP that a model needs for a program's rows. `masked` is the share of a policy's rows in the
    mask.
    """
    return [
        account(
            program,
            useful=useful(program) if program.rows else 0,
            masked=1.0 if program.rows is None or program.model == "critic" else masked,
            inspect=inspect,
        )
        for program in programs
        if program.stage != "other" and (program.rows is None or program.rows in shapes)
    ]


def estimate_memory(
    c: Settings, inputs: ModelConfigs, mesh: Any, *, entries: int, inspect: Inspect | None = None
) -> Estimate:
    """Estimates the memory of a PPO run whose step has `entries` row entries in all, padding included."""
    learner, state = make_learner(c, inputs, mesh, sketch=True)
    programs, shapes = list_run_programs(c, learner, state), largest_shapes(learner.plan)

    def count_flop(program: Program) -> int:
        """Returns the FLOP that the models need for the rows of a program."""
        scores = program.stage == "scoring"

        def flop_of(
            cfg: ModelConfig | None, adapters: Lora | None, frozen: Frozen = ALL_LEARN, *, head: bool = True
        ) -> int:
            rows, counter = program.rows, functools.partial(cost.update, frozen=frozen)
            if cfg is None or rows is None:
                return 0
            return useful_flop(c, cfg, rows, head, cost.forward if scores else counter, adapters=adapters)

        policy = flop_of(inputs.policy, inputs.adapters, inputs.frozen)
        if program.model == "critic":
            return flop_of(inputs.critic, inputs.critic_adapters, inputs.critic_frozen, head=False)
        if program.model == "reference":
            also_policy = learner.recipe.policy_for_reward(learner.policy(state)) is not None
            return flop_of(inputs.reference, None) + (policy if also_policy else 0)
        return policy

    scoring = [program for program in programs if program.stage == "scoring"]
    moments = account_for(scoring, shapes, count_flop, sampled_share(c), inspect)
    if c.rollout.name == "inprocess":
        moments += account_for(engine_programs(c, mesh, learner.policy(state)), shapes, inspect=inspect)
    updating = [program for program in programs if program.stage != "scoring"]
    moments += account_for(updating, shapes, count_flop, sampled_share(c), inspect)
    base = learner.actor.base
    parts = {"policy": size((state.policy, base)), "policy's optimizer": size(state.policy_opt)}
    if learner.critic is not None:
        frozen = None if shares_trunk(c, inputs) else learner.critic.base
        parts |= {"critic": size((state.value, frozen)), "critic's optimizer": size(state.value_opt)}
    if learner.reference is not None:
        shared = {id(x) for x in jax.tree.leaves(base)}  # with the policy's frozen weights
        if own := [x for x in jax.tree.leaves(learner.reference) if id(x) not in shared]:
            parts["reference"] = size(own)
    host = {name: parts.pop(name) for name in offloaded_parts(c) if name in parts}
    # The rows of scoring, and two micro-batches of an update: one in use, one being transferred.
    rows = next(program.args[-1] for program in scoring if program.rows == shapes[0])
    micro_batches = [p.args[3] for p in updating if p.stage == "gradient" and p.model == "actor" and p.rows in shapes]
    parts["batch"] = (size(rows) // math.prod(rows.inputs.shape) + 1) * entries + 2 * max(map(size, micro_batches))
    server = server_memory(c, inputs.policy, engine_bytes(inputs.policy, c.rollout.dtype), mesh)
    return Estimate(parts, tuple(moments), host, server, len(programs))


def estimate_one_model(c: Supervised, task: Task, packed: Sequence[Rows], inspect: Inspect | None = None) -> Estimate:
    """Estimates a run that trains one model; `packed` is its largest batch."""
    mesh, shapes = task.mesh, largest_shapes(task.plan)
    trained = make.sketch_trained(c, mesh, task.cfg, head=task.head, adapters=task.adapters, frozen=task.frozen)
    trainable, opt = make.make_trainable(c.optim, task.name, task.loss, trained, 1, scaled=c.model.scales_loss)
    learned, now = trained.learned, task.begin(trained.learned, opt, seed=c.trainer.seed)
    rows, by_row = [packing.empty_rows(shape) for shape in shapes], sharding.rows_sharding(mesh)
    if task.scores is None:
        programs, masked = [*update_programs(trainable, learned, opt, now, rows)], sampled_share(c)
    else:
        scores = jax.ShapeDtypeStruct((2 * c.data.train_batch_size,), jnp.float32, sharding=sharding.replicated(mesh))
        programs, masked = [*update_programs(trainable, learned, opt, now, rows, scores)], 1.0
        for empty in rows:
            args = learned, trainable.base, placing.shapes(empty, by_row), scores
            programs.append(Program("scores", "scoring", task.scores, args, task.name, empty.inputs.shape))

    def count_flop(program: Program) -> int:
        update_flop = functools.partial(cost.update, frozen=task.frozen)
        counter = cost.forward if program.stage == "scoring" else update_flop
        return useful_flop(c, task.cfg, program.rows or (), task.head == "lm", counter, adapters=task.adapters)

    moments = account_for(programs, shapes, count_flop, masked, inspect)
    parts, host = {"model": size((learned, trainable.base))}, {"optimizer": size(opt)}
    if isinstance(c, PreferenceTuning) and c.dpo.reference == "mesh":
        parts["initial policy"] = size(learned)
    if not c.optim.optimizer_offload:
        parts, host = parts | {"its optimizer": host["optimizer"]}, {}
    batch = 2 * max(size(placing.shapes(micro, by_row)) for micro in packed)
    return Estimate(parts | {"batch": batch}, tuple(moments), host)


def stored_models(c: Settings, inputs: ModelConfigs, mesh: Any) -> int:
    """Returns the bytes of a checkpoint: trained weights and optimizers."""
    policy = stored_model(c, mesh, inputs.policy, inputs.adapters, "lm", "actor", inputs.frozen)
    if inputs.critic is None:
        return policy
    critic = stored_model(c, mesh, inputs.critic, inputs.critic_adapters, "value", "critic", inputs.critic_frozen)
    return policy + critic


def stored_model(
    c: Training, mesh: Any, cfg: ModelConfig, adapters: Lora | None, head: Head, optimizer: str, frozen: Frozen
) -> int:
    """Returns the bytes of one model in a checkpoint; `optimizer` is its section of the settings."""
    cfg = pad_vocab(cfg, mesh.shape["tensor"])
    trained = make.sketch_trained(c, mesh, cfg, head=head, adapters=adapters, frozen=frozen)
    tx = optimizer_of(optimizers(c)[optimizer], optimizer, trained.layout, scaled=c.model.scales_loss)
    opt, _ = state.init_optimizer(tx, trained.layout, trained.learned)
    return global_size((trained.learned, opt))


def engine_bytes(cfg: ModelConfig, dtype: str) -> int:
    """Returns the bytes of the policy's tensors in a server or in a published file."""
    return sum(math.prod(shape) for shape in hf_write.hf_shapes(cfg).values()) * int(jnp.dtype(dtype).itemsize)


def engine_programs(c: Settings, mesh: Any, policy: Any) -> list[Program]:
    """Lists the in-process engine's programs at the largest prompts and the largest cache, with the arrays in memory.

    The policy is beside them; weights, prompts and cache exist for these programs alone.
    """
    engine = inprocess_settings(c, mesh)
    programs = inprocess.make_programs(engine, (0,), steps=inprocess.TURNS)
    model = _weight_shapes(engine, programs, sharding.own_part(mesh), c.model.param_dtype)
    slots = _slot_shapes(engine, engine.slot_counts[-1])
    choice = jax.tree.map(_shape, inprocess.make_rule(greedy(1)))
    rows = jax.ShapeDtypeStruct((), "int32")
    prompt_shape = max(engine.prompt_shapes, key=math.prod)
    prompts, length, *targets = jax.tree.map(_shape, inprocess.empty_fill(engine.rows, prompt_shape))
    filled = jax.eval_shape(programs.prefill, model, prompts, length)
    filled = _sharded(filled, inprocess.shardings_of(engine, filled))
    place_args = slots, filled, targets[0], length, *targets[1:]
    advance = programs.advance_cut if engine.cut else programs.advance

    def program(name: str, function: Any, args: tuple[Any, ...], *there: Any) -> Program:
        return Program(name, "engine", function, args, beside=policy, scratch=(model, *there))

    listed = [
        program("prefill", programs.prefill, (model, prompts, length), slots),
        program("place prompts", programs.place, place_args, slots, filled),
        program("decode, a token", advance, (model, slots, choice, rows), slots),
    ]
    for count in engine.slot_counts[-2:-1] if count_slots(slots.cache) else []:
        args, growing = _last_growth(slots, _slot_shapes(engine, count))
        listed.append(program("grow the cache", programs.grow, args, growing, filled))
    return listed


def _last_growth(slots: Slots, before: Slots) -> tuple[tuple[Any, ...], Slots]:
    """Returns the arguments that grow the largest layer's cache, and the rows meanwhile: all others have grown."""
    sizes = [size(layer) if isinstance(layer, LayerCache) else 0 for layer in slots.cache]
    i = sizes.index(max(sizes))
    layers = (*slots.cache[:i], before.cache[i], *slots.cache[i + 1 :])
    args = (before.cache[i],), count_slots(slots.cache), slots.slot
    return args, dataclasses.replace(slots, cache=layers)


def _shape(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _sharded(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda x, by: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=by), shapes, shardings)


def _slot_shapes(s: inprocess.InprocessSettings, slots: int) -> Any:
    """Returns the shapes of the engine's active rows with a cache of `slots`."""
    empty, shardings = inprocess.make_empty(s, slots)
    return _sharded(jax.eval_shape(empty), shardings)


def _weight_shapes(s: inprocess.InprocessSettings, programs: Any, mesh: Any, param_dtype: str) -> Any:
    """Returns the shapes of the engine's weights, sharded by XLA."""
    weights = state.abstract(state.model_weights(s.cfg, mesh, head="lm", param_dtype=param_dtype))
    built = programs.prepare.lower(weights).compile()
    return _sharded(built.out_info, built.output_shardings)
