"""Derived sizes, programs and memory of a PPO run: for its dry run, the doctor, and after memory ran out.

Model configs and data are read as a run reads them; no weight is read, no server started.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import jax

from jppo import settings
from jppo.errors import UserError
from jppo.learner import packing
from jppo.learner.auto_packing import with_packing
from jppo.preflight import memory, memory_budget, programs
from jppo.preflight.memory_budget import MemoryBudget
from jppo.preflight.programs import Estimate, Inspect, Work
from jppo.rollout.make import describe_servers, with_servers
from jppo.run.agreement import sampling_warnings
from jppo.run.inputs import Inputs, describe_decoding
from jppo.run.make import make_epochs, plan_of_run
from jppo.settings import Settings

Sizes = tuple[list[str], Estimate, list[MemoryBudget]]  # of a run, as lines of the report, and against this machine


def work_of_step(c: Settings, inputs: Inputs, mesh: Any) -> Work:
    """Returns the work of a PPO step with all responses at full length: packed rows, updates, sampled tokens."""
    plan, per_step = plan_of_run(c, mesh, inputs), c.sequences_of_step
    samples = programs.full_length(inputs.train.prompts, per_step, c.data.max_response_length, samples=c.rollout.n)
    models = dict(zip(("actor", "critic"), make_epochs(c), strict=True))
    if inputs.critic is None:
        del models["critic"]
    scoring_shapes = packing.micro_batch_shapes(samples, plan)
    updates = {
        name: programs.count_descents(samples, plan, epochs=model.count, size=model.mini_batch_size)
        for name, model in models.items()
    }
    return Work(
        scoring=len(scoring_shapes),
        entries=sum(map(math.prod, scoring_shapes)),
        updates=updates,
        sampled=per_step * c.data.max_response_length,
    )


def derive_sizes(
    c: Settings, inputs: Inputs, mesh: Any, inspect: Inspect | None = None
) -> tuple[list[str], Work, Estimate]:
    """Returns a PPO run's sizes as lines, the work of a step, and the estimate of its memory."""
    c, packing_note = with_packing(c, inputs, mesh)
    plan, per_step = plan_of_run(c, mesh, inputs), c.sequences_of_step
    step = work_of_step(c, inputs, mesh)
    estimate = memory.estimate_memory(c, inputs, mesh, entries=step.entries, inspect=inspect)
    lines = [
        f"prompts          {len(inputs.train.prompts):,} to train on, {len(inputs.val.prompts):,} to test on",
        f"steps            {inputs.total_steps:,}, each of {c.data.train_batch_size:,} prompts x {c.rollout.n} ="
        f" {per_step:,} samples",
    ]
    for name, u in step.updates.items():
        lines.append(
            f"{name:<16} {u.epochs} epoch(s) x {u.mini_batches} mini-batches of {u.sequences:,} ="
            f" {u.epochs * u.mini_batches} optimizer steps a step; up to {u.micro_batches} micro-batches each"
        )
    lines += [
        *(f"weights          {text}" for text in [describe_decoding(inputs.policy)] if text),
        *(f"servers          {text}" for text in [describe_servers(c, mesh)] if text),
        f"sampling         {describe_sampling(c)}",
        *(f"                 warning: {alert.found}; {alert.remedy}" for alert in sampling_warnings(c)),
        f"rows             {describe_shapes(plan)}",
        *(f"                 {text}" for text in [packing_note] if text),
        f"                 {step.scoring} micro-batches a scoring pass, where all responses are as long as they may be",
        f"to compile       {estimate.programs} programs for {len(plan.shapes)} shape(s)",
    ]
    return lines, step, estimate


def describe_shapes(plan: packing.Plan) -> str:
    """Formats the row shapes and their packing."""
    shared = " (shared rows)" if plan.prices is None else " (a prompt once for its samples)"
    return f"{', '.join(f'{r}x{t}' for r, t in plan.shapes)}{shared if plan.share_rows else ''}"


def look_up_sizes(c: Settings, inputs: Inputs, mesh: Any, inspect: Inspect | None = None) -> Sizes:
    """Returns the sizes of a PPO run on this machine as lines, its estimate and the budgets of its memory."""
    lines, _, estimate = derive_sizes(c, inputs, mesh, inspect)
    host = memory_budget.host_parts(c, inputs, mesh)
    return lines, estimate, memory_budget.machine_budgets(estimate, mesh, host=host)


def fits(c: Settings, inputs: Inputs, mesh: Any) -> bool:
    """Whether a PPO run fits this machine."""
    return has_verdicts(look_up_sizes(c, inputs, mesh), "OK", "WARN")


def resolve_auto(c: Settings, mesh: Any, fits: Callable[[Settings], bool]) -> tuple[Settings, list[str]]:
    """Returns the config with `auto` settings resolved to the first that fit, and a line on the choice."""
    c = with_servers(c, mesh)
    if not c.memory_chooses:
        return c, []
    changes = memory_budget.first_fitting(c, fits)
    choice = ", ".join(f"{name}={value}" for name, value in changes.items())
    return settings.changed(c, changes), [f"chosen by memory {choice}"]


def choose(c: Settings, inputs: Inputs, mesh: Any) -> tuple[Settings, list[str]]:
    """Resolves `auto` settings to the first that fit this machine, as `resolve_auto`."""
    return resolve_auto(c, mesh, functools.partial(fits, inputs=inputs, mesh=mesh))


def size_up(chosen: tuple[Settings, list[str]], inputs: Inputs, mesh: Any, inspect: Inspect | None = None) -> Sizes:
    """Returns the sizes of a PPO run as lines, its memory and this machine's budgets; `chosen` is of `choose`."""
    c, choice = chosen
    lines, estimate, budgets = look_up_sizes(c, inputs, mesh, inspect)
    return [*lines, *choice], estimate, budgets


def describe_sampling(c: Settings) -> str:
    """Describes the sampling of training responses and what ends them."""
    r = c.rollout
    cuts = ", ".join([f"temperature {r.temperature:g}", *(f"{name} {x:g}" for name, x in settings.cuts(r).items())])
    texts = " or ".join(map(repr, r.stop_texts))
    ends = [*([] if r.ignore_eos else ["an end token"]), *([texts] if texts else [])]
    return f"{cuts}; a response ends with {' or '.join([*ends, f'{c.data.max_response_length:,} tokens'])}"


def has_verdicts(sizes: Sizes, *verdicts: str) -> bool:
    """Whether all programs compile, and all budgets of `look_up_sizes` have one of these verdicts."""
    _, estimate, budgets = sizes
    return not estimate.refused and all(budget.verdict in verdicts for budget in budgets)


def first_smaller(
    c: Settings, inputs: Inputs, mesh: Any, tries: list[dict[str, Any]], below: int
) -> dict[str, Any] | None:
    """Returns the first changes with which a run needs less than `below` bytes and fits; None where none do."""
    for changes in tries:
        with contextlib.suppress(UserError, jax.errors.JaxRuntimeError, MemoryError):
            sizes = look_up_sizes(settings.changed(c, changes), inputs, mesh)
            if sizes[1].peak < below and has_verdicts(sizes, "OK", "WARN"):
                return changes
    return None
