"""Memory estimate of a run before any weight is read: by part and device, and on the host.

Parameters, optimizers and gradient sums follow from the parameter table and the mesh. Temporaries are XLA's own
account: each program of a step (`learner/programs.py`) is compiled for the largest row shape, on abstract arguments.
The peak is the largest of a few moments: a gradient, an optimizer step, or a scoring pass.
"""

import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jppo.learner import cost, make, packing, sharding, state
from jppo.learner.make import offloaded_parts, optimizer_of
from jppo.learner.ppo import ModelConfigs
from jppo.learner.programs import Program
from jppo.learner.trainable import CompiledLoss, Trainable
from jppo.models import hf_write, placing
from jppo.models.config import ModelConfig, pad_vocab
from jppo.models.lora import Lora
from jppo.models.params import Head
from jppo.preflight.programs import Estimate, ProgramMemory, account, global_size, size
from jppo.preflight.servers import server_memory
from jppo.rollout.inprocess import TURNS, InprocessSettings, empty_fill, make_empty, make_programs, make_rule
from jppo.rollout.make import inprocess_settings
from jppo.rollout.protocol import greedy
from jppo.settings import Common, Settings, Supervised, optimizers
from jppo.types import Rows, TrainState

MANY = 1.1  # a row shape with this many times the tokens of the longest rows is compiled, too


def sampled_share(c: Common) -> float:
    """Returns the share of sampled tokens in the longest sequences."""
    return float(c.data.max_response_length / (c.data.longest_row))


def useful(
    c: Common, cfg: ModelConfig, shape: Sequence[int], adapters: Lora | None, head: bool, count: Any = cost.update
) -> int:
    """Counts the useful FLOP over rows full of the longest sequences: of a gradient, or of what `count` counts."""
    entries, length = math.prod(shape), min(c.data.longest_row, shape[1])
    read = int(entries * sampled_share(c)) if head else 0
    flop: int = count(cfg, [length] * max(1, entries // length), head_tokens=read, adapters=adapters)
    return flop


def largest_shapes(plan: packing.Plan) -> list[tuple[int, int]]:
    """Returns the row shapes that may need most: with most token pairs, and with far more tokens."""
    by_pairs = max(plan.shapes, key=lambda shape: shape[0] * shape[1] ** 2)
    by_tokens = max(plan.shapes, key=math.prod)
    return [by_pairs, *([by_tokens] if math.prod(by_tokens) > MANY * math.prod(by_pairs) else [])]


def account_for(
    programs: Iterable[Program],
    shapes: Sequence[tuple[int, ...]],
    useful: Callable[[Program], int] = lambda _: 0,
    masked: float = 1.0,
) -> list[ProgramMemory]:
    """Accounts for the programs over rows of these shapes, and for those without rows; the `other` ones take little.

    `useful` counts the FLOP that a model needs for a program's rows. `masked` is the share of a policy's rows in the
    mask.
    """
    return [
        account(
            program,
            useful=useful(program) if program.rows else 0,
            masked=1.0 if program.rows is None or program.model == "critic" else masked,
        )
        for program in programs
        if program.stage != "other" and (program.rows is None or program.rows in shapes)
    ]


def estimate_memory(c: Settings, inputs: ModelConfigs, mesh: Any, *, entries: int) -> Estimate:
    """Estimates the memory of a PPO run whose step has `entries` row entries in all, padding included."""
    learner, now = make.make_learner(c, inputs, mesh, make.SHAPES)
    programs, shapes = make.list_run_programs(c, learner, now), largest_shapes(learner.plan)

    def needed(program: Program) -> int:
        count = cost.forward if program.stage == "scoring" else cost.update

        def of(cfg: ModelConfig | None, adapters: Lora | None, *, head: bool = True) -> int:
            return 0 if cfg is None or program.rows is None else useful(c, cfg, program.rows, adapters, head, count)

        policy = of(inputs.policy, inputs.adapters)
        if program.model == "critic":
            return of(inputs.critic, inputs.critic_adapters, head=False)
        if program.model == "reference":
            again = learner.recipe.policy_for_reward(learner.policy(now)) is not None
            return of(inputs.reference, None) + (policy if again else 0)
        return policy

    scoring = [program for program in programs if program.stage == "scoring"]
    moments = account_for(scoring, shapes, needed, sampled_share(c))
    if c.rollout.name == "inprocess":
        moments += account_for(own_engine(c, mesh, learner.policy(now)), shapes)
    updating = [program for program in programs if program.stage != "scoring"]
    moments += account_for(updating, shapes, needed, sampled_share(c))
    base = learner.actor.base
    parts = {"policy": size((now.policy, base)), "policy's optimizer": size(now.policy_opt)}
    if learner.critic is not None:
        frozen = None if make.shares_trunk(c, inputs) else learner.critic.base
        parts |= {"critic": size((now.value, frozen)), "critic's optimizer": size(now.value_opt)}
    if learner.reference is not None and (base is None or learner.reference is not base.params):
        parts["reference"] = size(learner.reference)
    host = {name: parts.pop(name) for name in offloaded_parts(c) if name in parts}
    # The rows of scoring, and two micro-batches of an update: one in use, one being transferred.
    rows = next(program.args[-1] for program in scoring if program.rows == shapes[0])
    micros = [p.args[3] for p in updating if p.stage == "gradient" and p.model == "actor" and p.rows in shapes]
    parts["batch"] = (size(rows) // math.prod(rows.inputs.shape) + 1) * entries + 2 * max(map(size, micros))
    server = server_memory(c, inputs.policy, served(inputs.policy, c.rollout.dtype), mesh)
    return Estimate(parts, tuple(moments), host, server, len(programs))


def sketch_update(
    c: Supervised, mesh: Any, cfg: ModelConfig, loss: CompiledLoss, *, name: str, head: Head, adapters: Lora | None
) -> tuple[Trainable, TrainState]:
    """Returns the update and the state of a run that trains one model, as shapes."""
    trained = make.sketch_trained(c, mesh, cfg, "", head=head, adapters=adapters)
    how, opt = make.make_trainable(c.optim, name, loss, trained, 1, make.SHAPES)
    policy, value = ((trained.learned, opt), (None, None))[:: 1 if head == "lm" else -1]
    return how, state.begin_state(*policy, *value, seed=c.trainer.seed, put=placing.shapes)


def of_one_model(
    c: Supervised,
    how: Trainable,
    now: TrainState,
    moments: Sequence[ProgramMemory],
    packed: Sequence[Rows],
    further: Mapping[str, int] = types.MappingProxyType({}),
) -> Estimate:
    """Estimates a run that trains one model; `packed` is its largest batch, `further` are other bytes that it keeps."""
    parts = {"model": size((now.policy, now.value, how.base)), **further}
    host = {"optimizer": size((now.policy_opt, now.value_opt))}
    if not c.optim.optimizer_offload:
        parts, host = parts | {"its optimizer": host["optimizer"]}, {}
    place = sharding.rows_sharding(placing.mesh_of((now.policy, now.value)))
    batch = 2 * max(size(placing.shapes(rows, place)) for rows in packed)
    return Estimate(parts | {"batch": batch}, tuple(moments), host)


def stored_models(c: Settings, inputs: ModelConfigs, mesh: Any) -> int:
    """Returns the bytes of a checkpoint: trained weights and optimizers."""
    policy = stored_model(c, mesh, inputs.policy, inputs.adapters, "lm", "actor")
    if inputs.critic is None:
        return policy
    return policy + stored_model(c, mesh, inputs.critic, inputs.critic_adapters, "value", "critic")


def stored_model(c: Common, mesh: Any, cfg: ModelConfig, adapters: Lora | None, head: Head, optimizer: str) -> int:
    """Returns the bytes of one model in a checkpoint; `optimizer` is its section of the settings."""
    trained = make.sketch_trained(c, mesh, pad_vocab(cfg, mesh.shape["tensor"]), "", head=head, adapters=adapters)
    tx = optimizer_of(optimizers(c)[optimizer], optimizer, trained.layout)
    opt, _ = state.abstract_optimizer(tx, trained.layout, trained.learned)
    return global_size((trained.learned, opt))


def served(cfg: ModelConfig, dtype: str) -> int:
    """Returns the bytes of the policy's tensors in a server or in a published file."""
    return sum(math.prod(shape) for shape in hf_write.hf_shapes(cfg).values()) * int(jnp.dtype(dtype).itemsize)


def own_engine(c: Settings, mesh: Any, policy: Any) -> list[Program]:
    """Lists the in-process engine's programs: prefill of the largest prompts and decode, with cache and weights."""
    s = inprocess_settings(c, mesh)
    programs = make_programs(s, (0,), steps=TURNS)
    model = _prepared(s, programs, sharding.own_part(mesh), c.model.param_dtype)
    slots = _slots(s)
    choice = jax.tree.map(_shape, make_rule(greedy(1)))
    rows = jax.ShapeDtypeStruct((), "int32")
    prompt_shape = max(s.prompt_shapes, key=math.prod)
    prompts = jax.tree.map(_shape, empty_fill(s.rows, prompt_shape))
    advance = programs.advance_cut if s.cut else programs.advance
    filled, decoded = (model, slots, *prompts), (model, slots, choice, rows)
    scratch = model, slots
    return [
        Program("prefill", "engine", programs.fill, filled, beside=policy, scratch=scratch),
        Program("decode, a token", "engine", advance, decoded, beside=policy, scratch=scratch),
    ]


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
