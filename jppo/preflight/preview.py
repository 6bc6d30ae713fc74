"""Dry-run reports: derived sizes, programs and memory of a run, also for the doctor, and after memory ran out.

Model configs and data are read as a run reads them; no weight is read, no server started.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from jppo import process, settings
from jppo.errors import UserError, escaped
from jppo.forecast.machines import Machine
from jppo.learner import packing
from jppo.learner.make import sketch_trained
from jppo.preflight import memory, memory_budget, programs
from jppo.preflight.memory_budget import MemoryBudget
from jppo.preflight.programs import Estimate, Executions, Outlook, Work
from jppo.preflight.request import HERE, DryRun
from jppo.preflight.servers import server_work
from jppo.rollout.make import describe_servers, published_dtype, share_gpu, with_servers
from jppo.run.agreement import sampling_warnings
from jppo.run.inputs import Inputs, describe_decoding, read_inputs
from jppo.run.make import make_epochs, plan_of_run
from jppo.settings import Settings, Training

C = TypeVar("C", bound=Training)
Sizes = tuple[list[str], Estimate, list[MemoryBudget]]  # of a run, as lines of the report, and against this machine


def work_of_step(c: Settings, inputs: Inputs, mesh: Any) -> Work:
    """Returns the work of a PPO step with all responses at full length: packed rows, updates, sampled tokens."""
    plan, per_step = plan_of_run(c, mesh, inputs.policy, inputs.total_steps), c.sequences_of_step
    samples = programs.full_length(inputs.train.prompts, per_step, c.data.max_response_length, samples=c.rollout.n)
    models = dict(zip(("actor", "critic"), make_epochs(c), strict=True))
    if inputs.critic is None:
        del models["critic"]
    scoring_shapes = packing.micro_batch_shapes(samples, plan)
    published = memory.engine_bytes(inputs.policy, published_dtype(c))
    if inputs.adapters is not None and c.rollout.lora_sync == "adapter":
        sketch = sketch_trained(c, mesh, inputs.policy, head="lm", adapters=inputs.adapters)
        published = programs.global_size(sketch.learned)
    updates = {
        name: programs.count_descents(samples, plan, epochs=model.count, size=model.mini_batch_size)
        for name, model in models.items()
    }
    return Work(
        scoring=len(scoring_shapes),
        entries=sum(map(math.prod, scoring_shapes)),
        updates=updates,
        sampled=per_step * c.data.max_response_length,
        servers=server_work(c, mesh, published, memory.engine_bytes(inputs.policy, c.rollout.dtype)),
    )


def derive_sizes(c: Settings, inputs: Inputs, mesh: Any) -> tuple[list[str], Work, Estimate]:
    """Returns a PPO run's sizes as lines, the work of a step, and the estimate of its memory."""
    plan, per_step = plan_of_run(c, mesh, inputs.policy, inputs.total_steps), c.sequences_of_step
    step = work_of_step(c, inputs, mesh)
    estimate = memory.estimate_memory(c, inputs, mesh, entries=step.entries)
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
        f"                 {step.scoring} micro-batches a scoring pass, where all responses are as long as they may be",
        f"to compile       {estimate.programs} programs for {len(plan.shapes)} shape(s)",
    ]
    return lines, step, estimate


def describe_shapes(plan: packing.Plan) -> str:
    """Formats the row shapes and their packing."""
    shared = " (shared rows)" if plan.prices is None else " (a prompt once for its samples)"
    return f"{', '.join(f'{r}x{t}' for r, t in plan.shapes)}{shared if plan.share_rows else ''}"


def look_up_sizes(c: Settings, inputs: Inputs, mesh: Any) -> Sizes:
    """Returns the sizes of a PPO run on this machine as lines, its estimate and the budgets of its memory."""
    lines, _, estimate = derive_sizes(c, inputs, mesh)
    host = memory_budget.host_parts(c, inputs, mesh)
    return lines, estimate, memory_budget.machine_budgets(estimate, mesh, host=host)


def fits(c: Settings, inputs: Inputs, mesh: Any, machine: Machine | None = None) -> bool:
    """Whether a PPO run fits this machine, or a described one."""
    if machine is not None:
        return memory_budget.estimate_fits(c, machine, derive_sizes(c, inputs, mesh)[2])
    return has_verdicts(look_up_sizes(c, inputs, mesh), "OK", "WARN")


def resolve_auto(c: Settings, inputs: Inputs, mesh: Any, machine: Machine | None = None) -> tuple[Settings, list[str]]:
    """Returns the config with `auto` settings resolved for this or a described machine, and a line on the choice."""
    c = with_servers(c, mesh)
    if not c.memory_chooses:
        return c, []
    changes = memory_budget.first_fitting(c, functools.partial(fits, inputs=inputs, mesh=mesh, machine=machine))
    choice = ", ".join(f"{name}={value}" for name, value in changes.items())
    return settings.changed(c, changes), [f"chosen by memory {choice}"]


def format_report(
    lines: Sequence[str],
    estimate: Estimate,
    budgets: Sequence[MemoryBudget],
    outlook: Outlook | None = None,
) -> str:
    """Formats the report: sizes, programs, exchanges, memory, and the forecast of a step."""
    blocks = [[*lines], programs.program_lines(estimate, outlook), programs.exchange_lines(estimate)]
    blocks += map(memory_budget.budget_lines, budgets)
    blocks += [programs.step_lines(outlook)] if outlook is not None else []
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def size_up(c: Settings, inputs: Inputs, mesh: Any) -> Sizes:
    """Returns a PPO run's sizes as lines, its memory and this machine's budgets, after resolving `auto` settings."""
    c, choice = resolve_auto(c, inputs, mesh)
    lines, estimate, budgets = look_up_sizes(c, inputs, mesh)
    return [*lines, *choice], estimate, budgets


def report_here(request: DryRun, lines: Sequence[str], estimate: Estimate, budgets: Sequence[MemoryBudget]) -> str:
    """Formats the report for this machine; writes the file of --json."""
    request.write(programs.report_dict(estimate, None))
    return format_report(lines, estimate, budgets)


def preview_run(c: Settings, request: DryRun = HERE) -> str:
    """Returns the report on a PPO run: sizes, programs, memory, and on a described machine its speed."""
    share_gpu(c)
    process.take_little()
    inputs = read_inputs(c, weights=request.machine is None)
    mesh = request.mesh(c)
    if request.machine is None:
        return report_here(request, *size_up(c, inputs, mesh))
    c, choice = resolve_auto(c, inputs, mesh, request.machine)
    lines, step, estimate = derive_sizes(c, inputs, mesh)

    def estimate_other(other: Settings) -> Estimate:
        return derive_sizes(other, inputs, mesh)[2]

    executions = step.executions(estimate)
    return report_estimate(c, request, mesh, [*lines, *choice], estimate, executions, estimate_other)


def report_estimate(
    c: C,
    request: DryRun,
    mesh: Any,
    lines: Sequence[str],
    estimated: Estimate,
    executions: Executions,
    estimate: Callable[[C], Estimate],
) -> str:
    """Returns the report on a run without servers here, or on any run on a described machine.

    Prints the report before raising UserError if the described machine is too small.
    """
    machine = request.machine
    if machine is None:
        return report_here(request, lines, estimated, memory_budget.machine_budgets(estimated, mesh, host={}))
    outlook = programs.make_outlook(estimated, machine, mesh, executions, request.rollout_tokens_per_s)
    request.write(programs.report_dict(estimated, outlook))
    budgets = memory_budget.described_budgets(c, machine, estimated)
    text = format_report([f"machine          {machine}", *lines], estimated, budgets, outlook)
    if not memory_budget.estimate_fits(c, machine, estimated):
        print(escaped(text), end="", flush=True)
        memory_budget.require_room(c, machine, estimated, estimate)
    return text


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
