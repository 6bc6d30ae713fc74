"""Dry-run reports: derived sizes, programs and memory of a run, also for the doctor, and after memory ran out.

Model configs and data are read as a run reads them; no weight is read, no server started. Where device memory ran out
during a run, one line says where, how much was asked for, and changes that fit: compiled ones, as by `--dry_run`, where
one host runs PPO; otherwise those to try first. If the run should fit an accelerator, other programs may hold it.
"""

import contextlib
import dataclasses
import functools
import json
import math
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax

from jppo import process, settings
from jppo.errors import RunEnded, UserError, escaped
from jppo.forecast import compilers, machines
from jppo.forecast.machines import GIB, Machine
from jppo.learner import packing, sharding
from jppo.learner.make import make_epochs, make_mesh, plan_of_run, sequences_of_step, sketch_trained
from jppo.preflight import memory, memory_budget
from jppo.preflight.programs import (
    Estimate,
    Executions,
    Outlook,
    Work,
    count_descents,
    exchange_lines,
    full_length,
    global_size,
    make_outlook,
    program_lines,
    report_dict,
    step_lines,
)
from jppo.preflight.servers import server_work
from jppo.rollout.make import describe_servers, published_dtype, share_gpu, with_servers
from jppo.run.inputs import Inputs, describe_decoding, read_inputs
from jppo.runlog.diagnosis import Alert
from jppo.runlog.timers import IN_STAGE
from jppo.settings import Common, Settings

C = TypeVar("C", bound=Common)


@dataclasses.dataclass(frozen=True)
class DryRun:
    """The options of `--dry_run`."""

    machine: Machine | None = None  # None: this one
    json: str = ""  # path of the JSON report; '' writes none
    rollout_tokens_per_s: float = 0.0

    def mesh(self, c: Common) -> Any:
        """Makes the config's mesh, of this machine's devices or of the described one's."""
        mesh = make_mesh(c, None if self.machine is None else compilers.devices_of(self.machine))
        process.prepare_process(sharding.platform(mesh), c.trainer.compile_cache, c.model.compute_dtype)
        return mesh

    def write(self, report: dict[str, Any]) -> None:
        """Writes the JSON file, if one is requested."""
        if self.json:
            path = pathlib.Path(self.json)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(report, indent=1) + "\n")
            except OSError as e:
                raise UserError(f"--json={self.json}: cannot be written: {e.strerror}; name another file") from e


HERE = DryRun()  # this machine


def read_request(switches: dict[str, Any], command: str, argv: Sequence[str]) -> DryRun:
    """Reads the command line's request; for a described machine, reruns the command where its compiler is installed."""
    name, rate = switches.get("machine"), switches.get("rollout_tokens_per_s", 0.0)
    if (name is not None or switches.get("json") or rate) and not switches.get("dry_run"):
        flag = "machine" if name is not None else "json" if switches.get("json") else "rollout_tokens_per_s"
        raise UserError(f"--{flag} belongs to --dry_run, which trains nothing; add --dry_run")
    if rate < 0 or (rate and not name):
        raise UserError(
            f"--rollout_tokens_per_s={rate:g} must be above 0 and is for a described machine; add --machine"
        )
    machine = None if name is None else machines.parse_machine(name)  # a script's empty variable is no machine
    if machine is not None and not compilers.is_present(machine):
        compilers.rerun(machine, command, argv)
    return DryRun(machine, switches.get("json", ""), rate)


def work_of_step(c: Settings, inputs: Inputs, mesh: Any) -> Work:
    """Returns the work of a PPO step with all responses at full length: packed rows, updates, sampled tokens."""
    plan, per_step = plan_of_run(c, mesh, inputs.policy, inputs.total_steps), sequences_of_step(c)
    samples = full_length(inputs.train.prompts, per_step, c.data.max_response_length, samples=c.rollout.n)
    models = dict(zip(("actor", "critic"), make_epochs(c), strict=True))
    if inputs.critic is None:
        del models["critic"]
    scoring_shapes = packing.micro_batch_shapes(samples, plan)
    published = memory.engine_bytes(inputs.policy, published_dtype(c))
    if inputs.adapters is not None and c.rollout.lora_sync == "adapter":
        published = global_size(sketch_trained(c, mesh, inputs.policy, "", head="lm", adapters=inputs.adapters).learned)
    return Work(
        scoring=len(scoring_shapes),
        entries=sum(map(math.prod, scoring_shapes)),
        updates={
            name: count_descents(samples, plan, epochs=e.count, size=e.mini_batch_size) for name, e in models.items()
        },
        sampled=per_step * c.data.max_response_length,
        servers=server_work(c, mesh, published, memory.engine_bytes(inputs.policy, c.rollout.dtype)),
    )


def derive_sizes(c: Settings, inputs: Inputs, mesh: Any) -> tuple[list[str], Work, Estimate]:
    """Returns a PPO run's sizes as lines, the work of a step, and the estimate of its memory."""
    plan, per_step = plan_of_run(c, mesh, inputs.policy, inputs.total_steps), sequences_of_step(c)
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


def look_up_sizes(
    c: Settings, inputs: Inputs, mesh: Any
) -> tuple[list[str], Estimate, list[memory_budget.MemoryBudget]]:
    """Returns the sizes of a PPO run on this machine as lines, its estimate and the budgets of its memory."""
    lines, _, estimate = derive_sizes(c, inputs, mesh)
    host = memory_budget.host_parts(c, inputs, mesh)
    return lines, estimate, memory_budget.machine_budgets(estimate, mesh, host=host)


def _estimate_run(c: Settings, inputs: Inputs, mesh: Any) -> Estimate:
    return memory.estimate_memory(c, inputs, mesh, entries=work_of_step(c, inputs, mesh).entries)


def fits(c: Settings, inputs: Inputs, mesh: Any, machine: Machine | None = None) -> bool:
    """Whether a PPO run fits this machine, or a described one."""
    if machine is not None:
        return memory_budget.estimate_fits(c, machine, _estimate_run(c, inputs, mesh))
    return _has_verdicts(look_up_sizes(c, inputs, mesh), "OK", "WARN")


def resolve_auto(c: Settings, inputs: Inputs, mesh: Any, machine: Machine | None = None) -> tuple[Settings, list[str]]:
    """Returns the config with `auto` settings resolved for this or a described machine, and a line on the choice."""
    c = with_servers(c, mesh)
    if not memory_budget.memory_chooses(c):
        return c, []
    changes = memory_budget.first_fitting(c, functools.partial(fits, inputs=inputs, mesh=mesh, machine=machine))
    choice = ", ".join(f"{name}={value}" for name, value in changes.items())
    return settings.changed(c, changes), [f"chosen by memory {choice}"]


def format_report(
    lines: Sequence[str],
    estimate: Estimate,
    budgets: Sequence[memory_budget.MemoryBudget],
    outlook: Outlook | None = None,
) -> str:
    """Formats the report: sizes, programs, exchanges, memory, and the forecast of a step."""
    blocks = [
        list(lines),
        program_lines(estimate, outlook),
        exchange_lines(estimate),
        *map(memory_budget.budget_lines, budgets),
    ]
    blocks += [step_lines(outlook)] if outlook is not None else []
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def size_up(c: Settings, inputs: Inputs, mesh: Any) -> tuple[list[str], Estimate, list[memory_budget.MemoryBudget]]:
    """Returns a PPO run's sizes as lines, its memory and this machine's budgets, after resolving `auto` settings."""
    c, choice = resolve_auto(c, inputs, mesh)
    lines, estimate, budgets = look_up_sizes(c, inputs, mesh)
    return [*lines, *choice], estimate, budgets


def report_here(
    request: DryRun, lines: Sequence[str], estimate: Estimate, budgets: Sequence[memory_budget.MemoryBudget]
) -> str:
    """Formats the report for this machine; writes the file of --json."""
    request.write(report_dict(estimate, None))
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
    lines += choice
    estimate_other = functools.partial(_estimate_run, inputs=inputs, mesh=mesh)
    return report_estimate(c, request, mesh, lines, estimate, step.executions(estimate), estimate_other)


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
    outlook = make_outlook(estimated, machine, mesh, executions, request.rollout_tokens_per_s)
    request.write(report_dict(estimated, outlook))
    text = format_report(
        [f"machine          {machine}", *lines],
        estimated,
        memory_budget.described_budgets(c, machine, estimated),
        outlook,
    )
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


def sampling_warnings(c: Settings, step: int = 0) -> list[Alert]:
    """Returns warnings on the sampling settings, before the run does anything.

    A filtered distribution is renormalised at every token; the trainer's log-probs are of the full one without mask
    replay. Importance weights correct exactly this.
    """
    alerts = []
    cuts = ", ".join(f"rollout.{name}={value:g}" for name, value in settings.cuts(c.rollout).items())
    is_weighted = c.algorithm.old_logprob == "correction" and c.algorithm.rollout_is != "none"
    if cuts and not (c.rollout.mask_replay or is_weighted):
        message = f"{cuts}: responses are drawn from a part of the policy, and learned from as if from the whole of it"
        remedy = "set rollout.mask_replay=True, or algorithm.old_logprob=correction with algorithm.rollout_is=token, or"
        alerts.append(Alert(step, "sampling_cut", message, f"{remedy} leave the cut to rollout.val_kwargs"))
    # In process, only the trainer can change the weights.
    if c.algorithm.old_logprob == "bypass" and c.rollout.max_kl_jump and c.rollout.name != "inprocess":
        message = (
            f"rollout.max_kl_jump={c.rollout.max_kl_jump:g}: servers whose weights are changed in mid-run go unnoticed,"
        )
        remedy = "set algorithm.old_logprob=decoupled, or rollout.max_kl_jump=0 where nobody else reaches the servers"
        reason = "as algorithm.old_logprob=bypass computes no log-probs to compare theirs with"
        alerts.append(Alert(step, "mismatch_unchecked", f"{message} {reason}", remedy))
    return alerts


_SIGN = re.compile(r"RESOURCE_EXHAUSTED|[Oo]ut of memory|OUT_OF_MEMORY")
_COUNT = re.compile(r"allocat\w* (?P<count>[\d.]+) ?(?P<unit>bytes|[KMGT]iB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class OutOfMemory(RunEnded):
    """A device or the host had no room for an array."""


@contextlib.contextmanager
def memory_explained(c: Common, *, hosts: int = 1) -> Iterator[None]:
    """Replaces XLA's error for lack of memory by OutOfMemory, with the stage and changes that fit."""
    try:
        yield
    except jax.errors.JaxRuntimeError as e:
        if not _SIGN.search(str(e)):
            raise
        notes = [note for note in getattr(e, "__notes__", ()) if note.startswith(IN_STAGE)]
        stage = notes[0].removeprefix(IN_STAGE) if notes else "the run"
        count = _COUNT.search(str(e))
        requested = f" for {float(count['count']) * _UNITS[count['unit']] / GIB:.2f} GiB" if count else ""
        kind = jax.devices()[0].device_kind
        raise OutOfMemory(f"{stage}: memory of {kind} has no room{requested}; {_advise(c, hosts)}") from e


def _advise(c: Common, hosts: int) -> str:
    """Returns an error's remedy for lack of memory: changes that fit, or those to try first."""
    tries = list(memory_budget.remedies(c))
    if isinstance(c, Settings) and hosts == 1:
        print("out of memory: compiling the run with settings that need less", file=sys.stderr, flush=True)
        with contextlib.suppress(UserError, jax.errors.JaxRuntimeError, MemoryError):
            inputs, mesh = read_inputs(c), make_mesh(c)
            c = with_servers(c, mesh)
            sizes = look_up_sizes(c, inputs, mesh)
            changes = _smaller(c, inputs, mesh, tries, below=sizes[1].peak)
            smaller = "" if changes is None else memory_budget.as_arguments(changes)
            if _has_verdicts(sizes, "OK") and not _on_cpu():
                smaller = f", or reduce its memory with {smaller}" if smaller else ""
                return f"--dry_run estimates that the run fits: end other programs on the device{smaller}"
            if smaller:
                return f"{smaller} fits by the account of --dry_run"
    advice = f"try {memory_budget.as_arguments(tries[0])}, " if tries else ""
    return f"{advice}spread the models by mesh.fsdp, train adapters by model.lora_rank, or take a larger machine"


def _smaller(c: Settings, inputs: Inputs, mesh: Any, tries: list[dict[str, Any]], below: int) -> dict[str, Any] | None:
    """Returns the first changes with which the run fits and needs less than `below` bytes; None without any."""
    for changes in tries:
        with contextlib.suppress(UserError, jax.errors.JaxRuntimeError, MemoryError):
            sizes = look_up_sizes(settings.changed(c, changes), inputs, mesh)
            if sizes[1].peak < below and _has_verdicts(sizes, "OK", "WARN"):
                return changes
    return None


def _has_verdicts(sizes: tuple[list[str], Estimate, list[memory_budget.MemoryBudget]], *verdicts: str) -> bool:
    """Whether all programs compile, and all budgets of `look_up_sizes` have one of these verdicts."""
    _, estimate, budgets = sizes
    return not estimate.refused and all(budget.verdict in verdicts for budget in budgets)


def _on_cpu() -> bool:
    """There the budget leaves out what other programs hold."""
    return jax.default_backend() == "cpu"
