"""All checks of a run, in the order of the report."""

import contextlib
import functools
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from jax.sharding import Mesh

from jppo import plugins, process, settings
from jppo.errors import expanded
from jppo.learner.make import OFFLOADABLE, offloaded_parts, open_mesh
from jppo.learner.ppo import StepLearner
from jppo.preflight import accelerators, machine, memory, memory_budget, models_and_data, preview
from jppo.preflight.finding import Check, Finding, examine
from jppo.preflight.programs import Estimate
from jppo.preflight.request import DryRun
from jppo.rollout.make import make_publish_settings, open_engine, published_dtype, share_gpu, with_servers
from jppo.rollout.publish import publish_base, publish_policy
from jppo.run import agreement
from jppo.run.inputs import Inputs, engine_arguments, read_inputs, require_reward
from jppo.run.make import list_run_programs, make_learner
from jppo.run.supervised import Task
from jppo.settings import Settings, Supervised, Training
from jppo.settings.rules_rollout import publish_via
from jppo.types import Rows, TrainState

T = TypeVar("T", bound=Task)
C = TypeVar("C", bound=Supervised)

COMPILE_S, READ_S, PUBLISH_S, FETCH_S = 900.0, 600.0, 900.0, 3600.0


class RunInputs:
    """What the checks of a run read: its inputs, mesh and memory estimate, each computed on first use."""

    def __init__(self, c: Settings):
        self.c = c

    @functools.cached_property
    def inputs(self) -> Inputs:
        return read_inputs(self.c)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The run's mesh of this machine's devices; prepares the process for it."""
        return open_mesh(self.c)

    @functools.cached_property
    def chosen(self) -> tuple[Settings, list[str]]:
        """The settings with those that memory chooses, as a run's start has them, and a line on the choice."""
        return preview.choose(self.c, self.inputs, self.mesh)

    @functools.cached_property
    def estimate(self) -> preview.Sizes:
        """The report's lines, the memory estimate, and the budget of each memory."""
        return preview.size_up(self.chosen, self.inputs, self.mesh, plugins.load("forecast.account").inspect)


def doctor(c: Settings, *, server: bool) -> Iterator[Finding]:
    """Yields the findings of `jppo.doctor` on the machine and a run; `server` also starts a server."""
    early = list(machine_findings(c))
    yield from early
    with contextlib.ExitStack() as stack:
        yield from examine(doctor_checks(c, stack, server=server), failed=failures(early))


def dry_run_of_ppo(c: Settings, request: DryRun) -> str:
    """Returns the report of `--dry_run`: a preview of the run, and the doctor's findings that need no server."""
    reports = plugins.load("forecast.report")
    if request.machine is not None:
        return str(reports.preview_run(c, request))
    run, findings = RunInputs(c), list(machine_findings(c))
    text = reports.report_here(request, *run.estimate)
    with contextlib.ExitStack() as stack:
        findings += examine(checks(run, stack, call_scorers=False), failed=failures(findings))
    return with_findings(text, findings)


def dry_run_of_one_model(
    c: C,
    request: DryRun,
    prepare: Callable[[C, DryRun], T],
    describe: Callable[[T], list[str]],
    pack_longest: Callable[[T], list[Rows]],
    *,
    noun: str,
) -> str:
    """Returns the report on fine-tuning or a training on pairs: preview and findings. Reads no weight.

    `describe` counts the examples, of the plural `noun`; `pack_longest` packs a batch of the longest ones.
    """
    process.take_little()
    task = prepare(c, request)
    packed, shapes = pack_longest(task), len(task.plan.shapes)
    estimated = memory.estimate_one_model(c, task, packed, plugins.load("forecast.account").inspect)
    twice, count = (", each read twice", 2 * shapes + 3) if task.scores is not None else ("", shapes + 2)
    lines = [
        *describe(task),
        f"steps            {task.steps:,}, each of {c.data.train_batch_size:,} {noun}, one optimizer step",
        f"rows             {preview.describe_shapes(task.plan)}",
        f"                 up to {len(packed)} micro-batches a step{twice}",
        f"to compile       {count} programs for {shapes} shape(s)",
    ]

    def estimate_other(changed: C) -> Estimate:
        other = prepare(changed, request)
        return memory.estimate_one_model(changed, other, pack_longest(other))

    once = ("step", "exchange")
    times = {moment.name: 1 if moment.stage in once else len(packed) for moment in estimated.moments}
    reports = plugins.load("forecast.report")
    executions = reports.Executions(times)
    text: str = reports.report_estimate(c, request, task.mesh, lines, estimated, executions, estimate_other)
    if request.machine is not None:
        return text

    def disk() -> Iterator[Finding]:
        stored = memory.stored_model(c, task.mesh, task.cfg, task.adapters, task.head, "optim", task.frozen)
        return room_on_disk(c, stored, memory.engine_bytes(task.cfg, c.model.param_dtype))

    findings = [*machine.check_environment(None)]
    findings += accelerator_findings(c, {"model.compute_dtype": c.model.compute_dtype}, None)
    return with_findings(text, [*findings, *examine([*folder_checks(c), Check("disk", disk)])])


def with_findings(text: str, findings: Sequence[Finding]) -> str:
    """Adds the findings that are not good to a report."""
    lines = [
        f"{finding.verdict:<4} {finding.about}: {finding.found}; {finding.remedy}"
        for finding in findings
        if finding.verdict != "OK"
    ]
    ok_count = len(findings) - len(lines)
    return "\n".join([f"{text}\nchecks of this machine, as by jppo.doctor: {ok_count} OK", *lines]) + "\n"


def machine_findings(c: Settings) -> Iterator[Finding]:
    """Checks programs, devices and protections; call it before JAX takes a device."""
    share_gpu(c)
    process.take_little()
    starts_servers = c.rollout.name != "inprocess" and not c.rollout.urls
    yield from machine.check_environment(c.rollout.python if starts_servers else None, c.rollout.name)
    dtypes = {"model.compute_dtype": c.model.compute_dtype, "rollout.dtype": c.rollout.dtype}
    yield from accelerator_findings(c, dtypes, "rollout.dtype" if starts_servers else None)
    yield machine.check_loopback()
    yield machine.check_sandbox()


def accelerator_findings(c: Training, dtypes: Mapping[str, str], refused: str | None) -> Iterator[Finding]:
    """Compares a run's dtypes and offload with the GPUs and the kernel; servers refuse bfloat16 of `refused`."""
    yield from accelerators.check_bfloat16(accelerators.gpus(), dtypes, refused)
    offloaded = [".".join(OFFLOADABLE[part]) for part in offloaded_parts(c)]
    yield from accelerators.check_wsl(accelerators.kernel_version(), offloaded)


def failures(findings: Iterable[Finding]) -> list[str]:
    return [finding.about for finding in findings if finding.verdict == "FAIL"]


def doctor_checks(c: Settings, stack: contextlib.ExitStack, *, server: bool) -> list[Check]:
    """Lists the checks of the dry run, and further ones that load weights or start a server, which `stack` stops."""
    run = RunInputs(c)
    parity = Check(
        "parity",
        lambda: models_and_data.check_parity(c),
        needs=("model files",),
        limit_s=2 * models_and_data.PARITY_LIMIT_S,
    )
    return [*checks(run, stack, call_scorers=True), parity, *(server_checks(run, stack) if server else ())]


def checks(run: RunInputs, stack: contextlib.ExitStack, *, call_scorers: bool) -> list[Check]:
    """Lists the checks that need no server; without `call_scorers`, no judge, model, agent or teacher is called."""
    c = run.c
    in_scratch, _ = with_scratch_folder(c, stack)

    def check_disk() -> Iterator[Finding]:
        export = memory.engine_bytes(run.inputs.policy, c.model.param_dtype)
        return room_on_disk(c, memory.stored_models(c, run.inputs, run.mesh), export)

    def check_publish_room() -> Iterator[Finding]:
        weights = memory.engine_bytes(run.inputs.policy, published_dtype(c))
        return machine.check_publish_room(c.rollout.publish_dir, in_dev_shm=c.rollout.name == "sglang", weights=weights)

    def check_reward() -> Iterator[Finding]:
        require_reward(c, run.inputs)
        if not call_scorers and (c.reward.judge.api_type or c.reward.model.path):
            return models_and_data.check_scorers(c)
        agent = run.inputs.agent if call_scorers or not c.rollout.agent else None
        return models_and_data.check_reward(in_scratch, run.inputs, run.mesh, agent)

    teacher = Check("teacher", lambda: models_and_data.check_reference_server(c, run.inputs), needs=("data",))
    has_servers = c.rollout.name != "inprocess"  # by a server with a port
    by_file = has_servers and publish_via(c.rollout) == "file"
    return [
        *folder_checks(c),
        *([Check("server ports", lambda: machine.check_server_ports(c))] if has_servers else []),
        Check("model files", lambda: models_and_data.check_models(c), limit_s=FETCH_S),
        Check("tokenizer", lambda: models_and_data.check_tokenizer(c), needs=("model files",)),
        Check("sampling", lambda: models_and_data.check_sampling(c)),
        Check("data", lambda: models_and_data.check_data(c, run.inputs), needs=("tokenizer",), limit_s=READ_S),
        Check("reward", check_reward, needs=("data",), limit_s=READ_S),
        *([teacher] if call_scorers and c.ref.url else []),
        Check("memory", lambda: machine.check_memory(run.estimate[2]), needs=("data",), limit_s=COMPILE_S),
        *([Check("publish room", check_publish_room, needs=("data",))] if by_file else []),
        Check("disk", check_disk, needs=("data",)),
    ]


def folder_checks(c: Training) -> list[Check]:
    """Lists the checks of the clock and the run folder, for every training command."""
    run = expanded(c.trainer.run_dir)
    return [
        Check("clock", lambda: machine.check_clock(time.time(), newest=machine.package_time())),
        Check("run folder", lambda: machine.check_folder(c)),
        Check("permission", lambda: machine.check_writable("permission", run)),
    ]


def room_on_disk(c: Training, checkpoint: int, export: int) -> Iterator[Finding]:
    """Compares the disk of the run folder with the bytes of a checkpoint and of the exported model."""
    run = expanded(c.trainer.run_dir)
    return machine.check_disk(run, checkpoint=checkpoint, keep=c.trainer.max_ckpt_to_keep, export=export)


def with_scratch_folder(c: Settings, stack: contextlib.ExitStack) -> tuple[Settings, pathlib.Path]:
    """Returns the settings with a temporary run folder, and that folder; the run's own stays unchanged."""
    scratch = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jppo-doctor-")))
    return settings.changed(c, {"trainer.run_dir": str(scratch)}), scratch


def check_programs(run: RunInputs, trainer: StepLearner, state: TrainState) -> Finding:
    """Compiles every program of a step and runs it on zeros."""
    start, programs = time.monotonic(), list_run_programs(run.chosen[0], trainer, state)
    for program in programs:
        program.run()
    accounts = [moment.compiled.work for moment in run.estimate[1].moments]
    kernels = {name for account in accounts if account is not None for name in account.kernels}
    summary = f"{len(programs)} compiled and run on empty rows in {time.monotonic() - start:.0f} s"
    names = ", ".join(sorted(name.removeprefix("__") for name in kernels)) or "none, attention is XLA's"
    return Finding("programs", "OK", f"{summary}; custom kernels: {names}")


def server_checks(run: RunInputs, stack: contextlib.ExitStack) -> list[Check]:
    """Lists the checks that need a server: its start, a publish, equal log-probs, and the run's programs."""
    c, scratch = with_scratch_folder(run.c, stack)

    @functools.cache
    def get_sampler() -> Any:
        """Starts the servers once, on first use, and returns the engine's sampler."""
        engine = open_engine(with_servers(c, run.mesh), scratch)
        stack.callback(engine.close)
        if run.inputs.agent is not None:
            stack.callback(run.inputs.agent.close)
        server = engine.ready(**engine_arguments(run.inputs))
        if c.rollout.sleep_level:  # as a run's do, before the trainer's first array
            server.sleep()
        return server

    @functools.cache
    def get_learner() -> tuple[StepLearner, TrainState]:
        return make_learner(run.chosen[0], run.inputs, run.mesh)

    def check_start() -> Iterator[Finding]:
        begin = time.monotonic()
        get_sampler()
        if c.rollout.name == "inprocess":
            status = "the trainer's own"
        else:
            status = "servers of rollout.urls answer" if c.rollout.urls else "started"
        yield Finding("server", "OK", f"{status}, ready after {time.monotonic() - begin:.0f} s")

    def check_publish() -> Iterator[Finding]:
        trainer, state = get_learner()
        start = time.monotonic()
        publish_settings = make_publish_settings(c, run.inputs.adapters)
        publish_base(publish_settings, trainer, get_sampler(), 0)
        publish_policy(publish_settings, trainer, get_sampler(), state)
        size = memory.engine_bytes(run.inputs.policy, c.model.param_dtype) / memory_budget.MIB
        yield Finding("publish", "OK", f"{size:,.0f} MiB checked and loaded in {time.monotonic() - start:.1f} s")

    def check_logprobs() -> Iterator[Finding]:
        trainer, state = get_learner()
        yield Finding("log-probs", "OK", agreement.agree(c, run.inputs, trainer, state, get_sampler(), 0))

    def check_all_programs() -> Iterator[Finding]:
        trainer, state = get_learner()
        if c.rollout.sleep_level:  # as they do while a run learns
            get_sampler().sleep()
        yield check_programs(run, trainer, state)

    limit_s = c.rollout.start_timeout_s + PUBLISH_S
    return [
        Check("server", check_start, needs=("vLLM", "SGLang", "data", "server ports", "memory"), limit_s=limit_s),
        Check("publish", check_publish, needs=("server",), limit_s=PUBLISH_S),
        Check("log-probs", check_logprobs, needs=("publish",), limit_s=PUBLISH_S),
        Check("programs", check_all_programs, needs=("publish",), limit_s=COMPILE_S),
    ]
