"""The start of a PPO run: hosts, inputs, models, resume and publish.

`open_run` is the order of a PPO run's start; it returns the parts of the run, `Run`.
"""

import contextlib
import dataclasses
import functools
import pathlib
import uuid
import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh

from jppo import plugins, settings, traces
from jppo.distributed.hosts import Hosts, own_folder
from jppo.distributed.launchers import join_launched
from jppo.errors import UserError, expanded
from jppo.learner import make, packing
from jppo.learner.auto_packing import with_packing
from jppo.learner.make import attention_kernel, open_mesh
from jppo.learner.ppo import StepLearner
from jppo.learner.utilisation import introduce_peak
from jppo.rewards.graders import RUNS_CODE, describe_refused, grader_of
from jppo.rewards.make import make_reward_sum, require_values
from jppo.rewards.parts import RewardSum
from jppo.rollout.inprocess import PolicySampler
from jppo.rollout.make import (
    describe_servers,
    make_publish_settings,
    make_publisher,
    open_engine,
    share_gpu,
    with_servers,
)
from jppo.rollout.protocol import Agent
from jppo.rollout.publish import PolicyPublisher, publish_base
from jppo.run import resume
from jppo.run.agreement import Match, agree, sampling_warnings
from jppo.run.inputs import Inputs, describe_decoding, engine_arguments, read_inputs, require_reward
from jppo.run.loop import Opened
from jppo.run.make import list_run_programs, make_learner, prepare_programs, replayed_experts, require_models_fit
from jppo.run.recording import Recorder, make_recorder
from jppo.run.resume import Begun, data_checksums, finished
from jppo.runlog import durable_files
from jppo.runlog.checkpoint import Checkpoints
from jppo.runlog.console import Display, Doing
from jppo.runlog.diagnosis import NOT_OF_DISTILLATION
from jppo.runlog.durable_files import own
from jppo.runlog.logger import Logger, Silent
from jppo.runlog.make import make_logger, open_display, require_loggers
from jppo.runlog.timers import Laps, Profiler, Timers
from jppo.runlog.watchdog import Watch
from jppo.samples.make import make_given, make_supply
from jppo.samples.queue import Supply
from jppo.settings import Settings, table, texts

if TYPE_CHECKING:
    from jppo.rollout.vllm.client import ServedReferences

# Settings that may differ between hosts.
OWN = ("trainer.node_rank", "rollout.urls", "rollout.python", "rollout.publish_host", "rollout.devices", "rollout.port")
# Settings with different effects on each host.
NOT_SHARED = {
    "rollout.partial": "takes the responses that are there first, on each host others",
    "reward.model.normalize": "keeps the mean of the scores that it has seen, on each host others",
}


@dataclasses.dataclass(frozen=True)
class Run(Opened):
    """The parts of a run, once all of them exist."""

    c: Settings
    folder: pathlib.Path
    inputs: Inputs
    learner: StepLearner
    sampler: PolicySampler
    supply: Supply
    reward_sum: RewardSum
    publisher: PolicyPublisher
    match: Match
    reference: "ServedReferences | None"  # ref.url; None: on the mesh, or none
    origin: dict[str, Any]  # identity for checkpoints that resume it
    record: Recorder


@dataclasses.dataclass(frozen=True)
class _HostParts:
    """The parts of a run on this host that need no mesh."""

    folder: pathlib.Path  # of what it writes
    logs: pathlib.Path  # of this host
    inputs: Inputs
    timer: Timers
    profile: Profiler
    watch: Watch
    display: Display
    record: Recorder


def join_hosts(c: Settings) -> Hosts:
    """Joins all hosts of the run and waits for them."""
    t = c.trainer
    return join_launched(
        t.nnodes, t.node_rank, t.coordinator_address, join_timeout_s=t.join_timeout_s, host_timeout_s=t.host_timeout_s,
        end_timeout_s=t.stop_timeout_s,
    )  # fmt: skip


def open_run(stack: contextlib.ExitStack, hosts: Hosts, c: Settings) -> tuple[Run, Begun] | None:
    """Opens the run and its initial state; None: the same command has already finished.

    Faults of settings come first, before servers and models take minutes. `stack` closes the parts in reverse order, so
    a part is opened, or its closing registered, before those that use it.
    """
    host = _prepare_host(stack, hosts, c)
    inputs, read_only, laps = host.inputs, c.trainer.val_only, Laps(host.timer)
    with host.timer("start"):  # every second from here on belongs to a stage, or a stop would be ignored
        folder = expanded(c.trainer.run_dir)
        folder_checkpoints = Checkpoints(folder / "checkpoints", keep=c.trainer.max_ckpt_to_keep, read_only=read_only)
        checkpoints = stack.enter_context(folder_checkpoints)
        hosts.together(lambda: None)  # the checkpoint folder exists, without partial writes
        data = data_checksums(inputs.train)
        resume.require_same_settings(c, checkpoints, data)
        if finished(c, checkpoints, inputs.total_steps):  # before a device is used
            if hosts.first:
                print(resume.describe_finished(c, inputs.total_steps))
            return None
        if inputs.agent is not None:
            stack.callback(inputs.agent.close)  # the engine's conversations use it
        mesh = open_mesh(c)
        c = with_servers(c, mesh)
        require_models_fit(inputs, mesh)
        c, memory_note = _choose_by_memory(c, hosts, inputs, mesh, folder)
        c, packing_note = with_packing(c, inputs, mesh)  # all below reads this `c`
        kernel = attention_kernel(c, inputs.policy, mesh)[1]  # raises before a server starts
        reference = _open_served_reference(c, inputs, hosts)  # this, too
        if c.trainer.traces:
            stack.enter_context(traces.exporting())  # reward and engine make spans to their end
        open_rewards = functools.cache(lambda: _open_rewards(stack, hosts, c, inputs, mesh))
        if not c.reward.model.path:  # which takes memory of the GPU: then the servers start first
            open_rewards()
        engine = hosts.together(lambda: open_engine(c, host.logs, hosts))  # it loads while JAX compiles
        stack.callback(engine.close)
        open_sampler = functools.cache(lambda: hosts.together(lambda: engine.ready(**engine_arguments(inputs))))
        # Running servers answer at once; for others' start the GPU may have no room beside the trainer's arrays.
        if c.rollout.sleep_level or (c.rollout.urls and texts.lookup_place(c.rollout.urls) is None):
            with laps("servers"):
                open_sampler().sleep()
        reward_sum = open_rewards()
        with laps("models"):
            learner, begin = make_learner(c, inputs, mesh)
        with laps("checkpoint"):  # of another structure it is refused here, before programs compile
            origin = resume.run_identity(c, mesh, data=data, frozen=resume.frozen_weights(learner))
            begun = resume.resume_or_begin(c, checkpoints, learner.spare(), begin, origin)
            if begun.step is not None:
                reward_sum.load(begun.now.place.get("reward", {}))
            del begin  # a resumed run must not hold two states
        if not read_only:
            with laps("compilation"):
                prepare_programs(list_run_programs(c, learner, begun.now.state), host.timer.part)
        with laps("waiting for the sampler"):
            sampler = open_sampler()
        with laps("publish"):  # of the base first, on which adapters are published
            publisher = make_publisher(c, learner, sampler, inputs.adapters, hosts)
            publish_base(make_publish_settings(c, inputs.adapters), learner, sampler, begun.now.step, hosts)
            publisher.finish(begun.now.state)
        with laps("graders"):  # they have started meanwhile
            hosts.together(reward_sum.ready)
        logger = _open_logger(c, host, hosts, learner, begun)
        stack.enter_context(logger)
        algorithm = learner.recipe.algorithm
        supply = make_supply(
            c, inputs.train, inputs.total_steps, algorithm.greedy, sampler, reward_sum, begun.cursor, hosts,
            give=make_given(c, inputs.tokenizer, inputs.end_tokens),
            with_dropped=algorithm.update is not None or algorithm.listen is not None,
        )  # fmt: skip
        stack.callback(publisher.close)
        run = Run(
            c, inputs.total_steps, hosts, checkpoints, logger, host.timer, host.watch, host.profile, host.folder,
            inputs, learner, sampler, supply, reward_sum, publisher, Match(c), reference, origin, host.record,
        )  # fmt: skip
        _introduce_run(run, begun, (kernel, memory_note, packing_note), laps)
        return run, begun


def _open_rewards(stack: contextlib.ExitStack, hosts: Hosts, c: Settings, inputs: Inputs, mesh: Mesh) -> RewardSum:
    """Opens the reward; checks that it has the values that the estimator reads."""
    reward_sum = hosts.together(lambda: make_reward_sum(c, mesh, hosts, **inputs.reward_arguments()))
    stack.callback(reward_sum.close)
    hosts.together(lambda: require_values(c, reward_sum, inputs.train.prompts))
    return reward_sum


def _prepare_host(stack: contextlib.ExitStack, hosts: Hosts, c: Settings) -> _HostParts:
    """Opens the parts of a run on this host: reads the inputs, locks the run folder, and watches for signals."""
    folder = expanded(c.trainer.run_dir)
    require_shareable(c, hosts)
    inputs = hosts.together(lambda: _read_host_inputs(c))
    _require_alike(c, hosts, inputs)
    logs = own_folder(hosts, folder)
    timer, t = Timers(), c.trainer
    steps = settings.parse_steps(t.profile_steps, "trainer.profile_steps")
    settings.check_within(steps, inputs.total_steps, f"trainer.profile_steps={t.profile_steps!r}")
    record = make_recorder(c, hosts.count, inputs.total_steps)
    output_folder = folder / "val_only" if t.val_only else folder  # leaves the run's own files unchanged
    hosts.together(lambda: stack.enter_context(own(output_folder)) if hosts.first else None)
    watch = Watch(
        timer, stage_timeout_s=t.stage_timeout_s, stop_timeout_s=t.stop_timeout_s, stacks=logs / "stacks.txt",
        checkpoints=folder / "checkpoints", hosts=hosts, stopped=t.stop_exit_code,
    )  # fmt: skip
    stack.enter_context(watch)
    display = open_display(stack, c, timer, hosts)
    return _HostParts(output_folder, logs, inputs, timer, Profiler(logs / "profile", steps), watch, display, record)


def _choose_by_memory(
    c: Settings, hosts: Hosts, inputs: Inputs, mesh: Mesh, folder: pathlib.Path
) -> tuple[Settings, str]:
    """Returns the config with what the memory decides, if anything, and a line on it."""
    if not c.memory_chooses:
        return c, ""

    from jppo.preflight import memory_budget, preview

    if c.trainer.val_only:
        return memory_budget.first_candidate(c), ""
    fits = functools.partial(preview.fits, inputs=inputs, mesh=mesh)
    return memory_budget.settle(c, mesh, folder, fits, hosts)


def _open_served_reference(c: Settings, inputs: Inputs, hosts: Hosts) -> "ServedReferences | None":
    """Attaches to the servers of `ref.url`; None without one."""
    if not c.ref.url:
        return None
    from jppo.rollout.servers.make import open_reference

    return open_reference(c, inputs.tokenizer, hosts)


def _read_host_inputs(c: Settings) -> Inputs:
    """Reads a host's inputs before it uses a device."""
    require_loggers(c)
    share_gpu(c)
    inputs = read_inputs(c)
    require_reward(c, inputs)
    replayed_experts(c, inputs.policy)  # raises before a server starts
    resume.require_resumable(c)
    return inputs


def require_shareable(c: Settings, hosts: Hosts) -> None:
    """Raises UserError for settings that multi-host runs exclude or that differ between hosts."""
    if hosts.count == 1:
        return
    own_settings = table.by_name(c)
    for name, reason in NOT_SHARED.items():
        if own_settings[name]:
            raise UserError(f"{name}=True {reason}; leave it at False with trainer.nnodes={hosts.count}")
    if (via := own_settings["rollout.publish_via"]) in ("nccl", "ipc"):
        raise UserError(f"rollout.publish_via={via!r} is for one host, and this run has {hosts.count}; set it to tcp")
    shared = {name: repr(value) for name, value in own_settings.items() if name not in OWN}
    for rank, other in enumerate(hosts.gather(lambda: shared)):
        for name, value in shared.items():
            if (peer := other.get(name)) != value:
                raise UserError(f"{name} is {peer} on host {rank} and {value} on host {hosts.rank}; set it alike")


def _require_alike(c: Settings, hosts: Hosts, inputs: Inputs) -> None:
    """Raises UserError where hosts read different data or do not share the run folder."""
    if hosts.count == 1:
        return
    val_checksum = zlib.crc32(b"".join(p.ids.tobytes() + p.ground_truth.encode() for p in inputs.val.prompts))
    sums: dict[str, Any] = {"data.train_files": data_checksums(inputs.train), "data.val_files": val_checksum}
    for rank, other in enumerate(hosts.gather(lambda: sums)):
        for name, value in sums.items():
            if other[name] != value:
                raise UserError(f"{name}: host {rank} has read other rows than host {hosts.rank}; give all the same")
    folder = expanded(c.trainer.run_dir)
    mark_name = hosts.gather(lambda: _create_mark(folder) if hosts.first else None)[0]
    hosts_see = hosts.gather(lambda: (folder / mark_name).exists())
    hosts.together(lambda: (folder / mark_name).unlink() if hosts.first else None)
    if not all(hosts_see):
        raise UserError(
            f"trainer.run_dir={c.trainer.run_dir}: host {hosts_see.index(False)} does not see what host 0 writes there;"
            " name a folder that all hosts share, where checkpoints are written by all"
        )


def _create_mark(folder: pathlib.Path) -> str:
    """Creates an empty file, by which hosts check that they share the folder; returns its name."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = f".hosts-{uuid.uuid4().hex[:8]}"
    (folder / mark).touch()
    return mark


def _open_logger(c: Settings, host: _HostParts, hosts: Hosts, learner: StepLearner, begun: Begun) -> Logger | Silent:
    """Opens the metrics loggers after the last step that was logged."""
    logged = begun.logged
    if begun.step is not None and c.trainer.val_only:
        logged = begun.step - 1  # its line is written again
    muted_warnings = () if learner.recipe.algorithm.scored else NOT_OF_DISTILLATION
    host.display.leave_terminal()
    options = dict[str, Any](total_steps=host.inputs.total_steps, resumed_step=logged, doing=Doing(host.timer))
    return make_logger(c, host.folder, hosts, muted=muted_warnings, **options)


def _introduce_run(run: Run, begun: Begun, choices: Sequence[str | None], laps: Laps) -> None:
    """Logs what the run will do, and compares the policies of engine and trainer.

    `choices` are lines on settings that were chosen automatically.
    """
    c, inputs, logger, mesh = run.c, run.inputs, run.logger, run.learner.mesh
    step = begun.now.step
    if run.hosts.first:
        durable_files.write_text(run.folder / "config.json", settings.dump(c))
    lines = [
        introduce_sandbox(c, inputs.sources, inputs.agent),
        describe_refused((*inputs.train.refused, *inputs.val.refused)),
        *describe_sizes(inputs, mesh, run.learner.plan, begun.step),
        *begun.console_lines,
        inputs.policy.unread,
        describe_decoding(inputs.policy),
        describe_servers(c, mesh),
        make.describe_offload(c, inputs, mesh.devices.flat[0]),
        introduce_peak(mesh, c.model.compute_dtype),
        *choices,
        f"seconds of the start: {laps}",
    ]
    for line in (*filter(None, lines), *run.profile.introduce(step)):
        logger.note(line)
    for finding in sampling_warnings(c, step):
        logger.warn(finding)
    run.timer.part("comparing log-probs")
    logger.note(agree(c, inputs, run.learner, begun.now.state, run.sampler, step, run.hosts))


def describe_sizes(inputs: Inputs, mesh: Mesh, plan: packing.Plan, resumed: int | None) -> list[str]:
    """Returns lines on prompts, devices, rows and the resumed step."""
    truncated = inputs.train.truncated + inputs.val.truncated
    overlong = inputs.train.overlong + inputs.val.overlong
    return [
        f"{len(inputs.train.prompts)} prompts to train on, {len(inputs.val.prompts)} to test on"
        f" ({overlong} over-long ones left out, {truncated} cut)",
        f"{mesh.devices.size} {mesh.devices.flat[0].platform} device(s), mesh {dict(mesh.shape)},"
        f" rows of shape {', '.join(f'{r}x{t}' for r, t in plan.shapes)}",
        "a new run" if resumed is None else f"resuming from the checkpoint of step {resumed}",
    ]


def introduce_sandbox(c: Settings, sources: Iterable[str], agent: Agent | None) -> str:
    """Returns the console line on active protections; '' if the run executes no programs of the model."""
    graders = [c.reward.grader] if c.reward.grader else sources
    runs_code = not c.reward.function and any(grader_of(source) in RUNS_CODE for source in graders)
    if not runs_code and not (agent is not None and agent.runs_programs):
        return ""
    line: str = plugins.load("sandbox.choice").describe_sandbox(*c.reward.sandbox_choice)
    return line
