"""Programs of the in-process rollout engine (rollout.name=inprocess) on shapes: prefill and decode."""

from typing import Any

import jax

from jppo.learner import sharding, state
from jppo.preflight.program_memory import ProgramMemory, account, size
from jppo.rollout.continuous_batching import TURNS, InprocessSettings, choice_of, filling, make_empty, make_programs
from jppo.rollout.make import inprocess_settings
from jppo.rollout.protocol import greedy
from jppo.settings import Settings


def own_engine(c: Settings, mesh: Any, *, brought: int) -> list[ProgramMemory]:
    """Accounts for prefill of the largest prompts and decode, each with its cache and weights."""
    s = inprocess_settings(c, mesh)
    programs = make_programs(s, (0,), turns=TURNS)
    model = _prepared(s, programs, sharding.own_part(mesh), c.model.param_dtype)
    slots = _slots(s)
    held = size((model, slots))
    choice = jax.tree.map(_shape, choice_of(greedy(1)))
    rows = jax.ShapeDtypeStruct((), "int32")
    largest = max(s.prompt_shapes, key=lambda shape: shape[0] * shape[1])
    prompts = jax.tree.map(_shape, filling(s.rows, largest))
    advance = programs.advance_cut if s.cut else programs.advance
    found = [
        account("prefill", 0, programs.fill, model, slots, *prompts, brought=brought),
        account("decode, a token", 0, advance, model, slots, choice, rows, brought=brought),
    ]
    return [one.beside(held) for one in found]


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
    weights = state.abstract(state.weights(s.cfg, mesh, head="lm", param_dtype=param_dtype))
    done = programs.prepare.lower(weights).compile()
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), done.out_info, done.output_shardings
    )
