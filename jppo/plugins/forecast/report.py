"""The report of a dry run: sizes, programs, exchanges, memory, and on a described machine the forecast of a step.

Model configs and data are read as a run reads them; no weight is read, no server started.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jppo import process
from jppo.errors import escaped
from jppo.learner.make import sketch_trained
from jppo.plugins.forecast import schedule
from jppo.plugins.forecast.account import Account, inspect, rates
from jppo.plugins.forecast.budgets import described_budgets, estimate_fits, require_room
from jppo.plugins.forecast.machines import GIB
from jppo.plugins.forecast.outlook import NOTE, Executions, Outlook, count_executions, make_outlook
from jppo.plugins.forecast.servers import ServerWork, server_rates, server_work
from jppo.preflight import memory, memory_budget, preview
from jppo.preflight.memory_budget import MemoryBudget
from jppo.preflight.programs import Compilation, Estimate, global_size
from jppo.preflight.request import HERE, DryRun
from jppo.rollout.make import published_dtype, share_gpu
from jppo.run.inputs import Inputs, read_inputs
from jppo.settings import Settings, Training

C = TypeVar("C", bound=Training)


def report_here(request: DryRun, lines: Sequence[str], estimate: Estimate, budgets: Sequence[MemoryBudget]) -> str:
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
        return report_here(request, *preview.size_up(preview.choose(c, inputs, mesh), inputs, mesh, inspect))
    machine = request.machine

    def estimate_other(other: Settings) -> Estimate:
        return preview.derive_sizes(other, inputs, mesh)[2]

    c, choice = preview.resolve_auto(c, mesh, lambda other: estimate_fits(other, machine, estimate_other(other)))
    lines, step, estimate = preview.derive_sizes(c, inputs, mesh, inspect)
    executions, servers = count_executions(step, estimate), find_server_work(c, inputs, mesh)
    return report_estimate(c, request, mesh, [*lines, *choice], estimate, executions, estimate_other, servers)


def find_server_work(c: Settings, inputs: Inputs, mesh: Any) -> ServerWork | None:
    """Returns a step's work with the servers of a run: of the whole policy, or of its adapters."""
    published = memory.engine_bytes(inputs.policy, published_dtype(c))
    if inputs.adapters is not None and c.rollout.lora_sync == "adapter":
        sketch = sketch_trained(c, mesh, inputs.policy, head="lm", adapters=inputs.adapters)
        published = global_size(sketch.learned)
    return server_work(c, mesh, published, memory.engine_bytes(inputs.policy, c.rollout.dtype))


def report_estimate(
    c: C,
    request: DryRun,
    mesh: Any,
    lines: Sequence[str],
    estimated: Estimate,
    executions: Executions,
    estimate: Callable[[C], Estimate],
    servers: ServerWork | None = None,
) -> str:
    """Returns the report on a run without servers here, or on any run on a described machine.

    Prints the report before raising UserError if the described machine is too small.
    """
    machine = request.machine
    if machine is None:
        return report_here(request, lines, estimated, memory_budget.machine_budgets(estimated, mesh, host={}))
    outlook = make_outlook(estimated, machine, mesh, executions, request.rollout_tokens_per_s, servers)
    request.write(report_dict(estimated, outlook))
    budgets = described_budgets(c, machine, estimated)
    text = format_report([f"machine          {machine}", *lines], estimated, budgets, outlook)
    if not estimate_fits(c, machine, estimated):
        print(escaped(text), end="", flush=True)
        require_room(c, machine, estimated, estimate)
    return text


def format_report(
    lines: Sequence[str],
    estimate: Estimate,
    budgets: Sequence[MemoryBudget],
    outlook: Outlook | None = None,
) -> str:
    """Formats the report: sizes, programs, exchanges, memory, and the forecast of a step."""
    blocks = [[*lines], program_lines(estimate, outlook), exchange_lines(estimate)]
    blocks += map(memory_budget.budget_lines, budgets)
    blocks += [step_lines(outlook)] if outlook is not None else []
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def program_lines(estimate: Estimate, outlook: Outlook | None) -> list[str]:
    """Formats the programs: compile time, attention kernel, peak memory, FLOP, bytes; on a machine the forecast."""
    predictions = {} if outlook is None else {id(moment): prediction for moment, prediction in outlook.programs}
    permanent = sum(estimate.parts.values())
    header = ["program", "compiled", "peak GiB", "temp. GiB", "TFLOP", "HBM GB", "sent GiB"]
    header += ["seconds", "bound by", "MFU at most"] if outlook is not None else []
    rows = [[*header, "kernels"]]
    for moment in estimate.moments:
        compiled, predicted = moment.compiled, predictions.get(id(moment))
        if compiled.error is not None:
            rows.append([moment.name, "refused"] + [""] * (len(header) - 2) + [compiled.error[:120]])
            continue
        account: Account = compiled.work
        sent_bytes = sum(collective.total for collective in account.collectives)
        cells = [moment.name, f"{compiled.seconds:.1f} s", _gib(permanent + moment.needs), _gib(moment.temporaries)]
        cells += [f"{account.total_flops / 1e12:,.3g}", f"{account.hbm / 1e9:,.3g}", _gib(sent_bytes)]
        if outlook is not None:
            mfu = "" if predicted is None or predicted.mfu is None else f"{predicted.mfu:.0%}"
            cells += ["", "", ""] if predicted is None else [_seconds(predicted.seconds), predicted.bound, mfu]
        kernels = ", ".join(f"{name.removeprefix('__')} x{times}" for name, times in account.kernels.items())
        rows.append([*cells, kernels or "-"])
    title = "programs, of one device" + ("" if outlook is None else f" of {outlook.machine.name}; {NOTE}")
    return [title, *_align_columns(rows)]


def exchange_lines(estimate: Estimate) -> list[str]:
    """Formats each program's collectives by kind and mesh axes, and the partitioner's warnings."""
    lines = []
    for moment in estimate.moments:
        if moment.compiled.error is not None:
            continue
        account: Account = moment.compiled.work
        rows = [
            [f"    {kind}", "+".join(axes), f"{times:,} times", f"{_gib(size)} GiB"]
            for kind, axes, times, size in schedule.totals(account.collectives)
            if size >= GIB // 1000
        ]
        warnings = [f"    warning: the partitioner gathers whole: {operation}" for operation in account.warnings]
        loops = account.unknown_loops
        warnings += [f"    {len(loops)} loop(s) of unknown length count once"] if loops else []
        if rows or warnings:
            lines += [f"  {moment.name}", *_align_columns(rows), *warnings]
    return ["exchanges between devices, loops multiplied out", *lines] if lines else []


def step_lines(outlook: Outlook) -> list[str]:
    """Formats a step's forecast and the assumed rates."""
    lines = [f"a step with all responses as long as they may be; {NOTE}"]
    rows = [
        [f"  {name}", f"{outlook.executions.by_program[name]:,} times", f"{_seconds(seconds)} s"]
        for name, seconds in outlook.stages().items()
    ]
    rows += [[f"  {name}", "servers", f"{_seconds(seconds)} s"] for name, seconds in outlook.with_servers().items()]
    if outlook.rollout is not None:
        rows.append(["  rollout", f"{outlook.executions.sampled:,} tokens", f"{_seconds(outlook.rollout)} s"])
    rows.append(["  together", "", f"{_seconds(outlook.step)} s"])
    lines += _align_columns(rows)
    if outlook.rollout is None and outlook.executions.sampled:
        lines.append("  without the rollout; --rollout_tokens_per_s=N adds it")
    assumed = rates(outlook.machine) + server_rates(outlook.servers)
    return [*lines, "", "assumed rates, of one device", *(f"  {line}" for line in assumed)]


def report_dict(estimate: Estimate, outlook: Outlook | None) -> dict[str, Any]:
    """Returns the dry run's report as JSON types."""
    predictions = {} if outlook is None else {id(moment): prediction for moment, prediction in outlook.programs}
    permanent = sum(estimate.parts.values())
    programs = []
    for moment in estimate.moments:
        row: dict[str, Any] = dict(name=moment.name, peak=permanent + moment.needs, temporaries=moment.temporaries)
        row["account"] = _account_dict(moment.compiled)
        row |= {"forecast": predictions[id(moment)].as_dict()} if id(moment) in predictions else {}
        programs.append(row)
    report: dict[str, Any] = dict(
        parts=estimate.parts, peak=estimate.peak, worst=estimate.worst.name, programs=programs
    )
    if outlook is not None:
        report |= dict(machine=outlook.machine.name, note=NOTE, step_s=outlook.step, stages_s=outlook.stages())
        report |= dict(rollout_s=outlook.rollout, servers_s=outlook.with_servers())
        report |= dict(rates=rates(outlook.machine) + server_rates(outlook.servers))
    return report


def _account_dict(compiled: Compilation) -> dict[str, Any]:
    """Returns the memory and the work of a program as JSON types."""
    names = ("error", "arguments", "temporaries", "results", "code")
    memory = {"compile_s": compiled.seconds} | {name: getattr(compiled, name) for name in names}
    return memory | (compiled.work or Account()).as_dict()


def _gib(count: float) -> str:
    return f"{count / GIB:,.1f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.3g}"


def _align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligns rows: the first column to the left, the others to the right, the last of five or more to the left."""
    if not rows:
        return []
    widths = [max(len(row[i]) if i < len(row) else 0 for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        for i, cell in enumerate(row[1:], 1):
            is_last = i == len(widths) - 1 and len(widths) > 4
            cells.append(cell if is_last else cell.rjust(widths[i]))
        lines.append("  ".join(cells).rstrip())
    indent = "" if rows[0][0].startswith(" ") else "  "
    return [indent + line for line in lines]
