"""What a run would be, before it begins: what `--dry_run` says beside the settings, and the doctor looks at.

Models are read as their directories describe them, data as a run reads them; no weight is read, no server started.
"""

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
from ml_collections import ConfigDict

from jppo.assemble import memory
from jppo.assemble.engine import published_dtype, share_gpu
from jppo.assemble.forewarn import describe_sampling, forewarn
from jppo.assemble.inputs import Inputs, read_inputs
from jppo.assemble.learner import make_mesh, make_passes
from jppo.assemble.memory import Estimate
from jppo.assemble.rows import critic_mini_batch_size, plan_of_run, sequences_of_step
from jppo.learner import devices, packing, ppo
from jppo.structs import Prompt, Trajectory

MIB = 2**20
TIGHT = 0.9  # of the room: more is a warning
# What a step calls once for a batch, not once for a shape of rows.
ONCE = ("normalized", "sequences")
Verdict = Literal["OK", "WARN", "FAIL"]


@dataclasses.dataclass(frozen=True)
class Room:
    """What is needed somewhere, part by part, against what there is; in bytes."""

    where: str
    parts: dict[str, int]
    has: int | None  # None where nobody says

    @property
    def needs(self) -> int:
        """All parts together."""
        return sum(self.parts.values())

    @property
    def verdict(self) -> Verdict:
        """Whether it fits: FAIL where it does not, WARN where it does with little to spare."""
        if self.has is None or self.needs <= TIGHT * self.has:
            return "OK"
        return "WARN" if self.needs <= self.has else "FAIL"


@dataclasses.dataclass(frozen=True)
class Descents:
    """How a model learns in a step."""

    epochs: int
    mini_batches: int  # of an epoch, each an optimizer step
    sequences: int  # of a mini-batch
    micro_batches: int  # of a mini-batch, at most: with all responses as long as they may be


def full_length(prompts: Sequence[Prompt], count: int, response: int, *, samples: int = 1) -> list[Trajectory]:
    """The first `count` trajectories of an epoch, each with a response as long as it may be."""
    out = []
    for i in range(count):
        prompt = len(prompts[i // samples % len(prompts)].ids)
        empty, sampled = np.zeros(prompt + response, np.int32), np.arange(prompt + response) >= prompt
        out.append(Trajectory(str(i // samples), empty, sampled, empty.astype(np.float32), empty, "", "length", 1))
    return out


def descents(trajectories: Sequence[Trajectory], plan: packing.Plan, *, epochs: int, size: int) -> Descents:
    """The mini-batches of `size` sequences that such a step is cut into."""
    cuts = [trajectories[start : start + size] for start in range(0, len(trajectories), size)]
    most = max(len(packing.pack(cut, range(len(cut)), plan)) for cut in cuts)
    return Descents(epochs, len(cuts), size, most)


def programs(passes: ppo.Passes, recipe: ppo.Recipe, plan: packing.Plan, models: int) -> int:
    """How many programs XLA compiles for a run of so many trained models: the large ones, of passes and updates."""
    unused = {*ONCE, *(() if recipe.entropy_metric and not recipe.bypass else ("entropy",))}
    unused |= {"gap"} if recipe.bypass else set()
    by_shape = [
        f.name for f in dataclasses.fields(passes) if getattr(passes, f.name) is not None and f.name not in unused
    ]
    return len(by_shape) * len(plan.shapes) + 2 * models  # an optimizer step and an empty sum of gradients


def sizes(c: ConfigDict, inputs: Inputs, mesh: Any) -> tuple[list[str], int]:
    """The derived sizes of a PPO run as lines, and the entries of a step's rows, padding included."""
    plan, per_step = plan_of_run(c, mesh, inputs.policy), sequences_of_step(c)
    prompts = inputs.train.prompts
    step = full_length(prompts, per_step, c.data.max_response_length, samples=c.rollout.n)
    recipe, passes = make_passes(c, inputs, mesh)
    models = {"actor": (c.actor, c.actor.ppo_mini_batch_size)}
    if inputs.critic is not None:
        models["critic"] = (c.critic, critic_mini_batch_size(c))
    count = programs(passes, recipe, plan, len(models))
    lines = [
        f"prompts          {len(prompts):,} to train on, {len(inputs.val.prompts):,} to test on",
        f"steps            {inputs.total_steps:,}, each of {c.data.train_batch_size:,} prompts x {c.rollout.n} ="
        f" {per_step:,} samples",
    ]
    for name, (section, size) in models.items():
        d = descents(step, plan, epochs=section.ppo_epochs, size=size)
        lines.append(
            f"{name:<16} {d.epochs} epoch(s) x {d.mini_batches} mini-batches of {d.sequences:,} ="
            f" {d.epochs * d.mini_batches} optimizer steps a step; up to {d.micro_batches} micro-batches each"
        )
    packed = packing.pack(step, range(per_step), plan)
    lines += [
        f"sampling         {describe_sampling(c)}",
        *(f"                 warning: {one.found}; {one.remedy}" for one in forewarn(c)),
        f"rows             {shapes(plan)}",
        f"                 {len(packed)} micro-batches a scoring pass, where all responses are as long as they may be",
        f"to compile       {count} programs for {len(plan.shapes)} shape(s)",
    ]
    return lines, sum(math.prod(rows.inputs.shape) for rows in packed)


def shapes(plan: packing.Plan) -> str:
    """The shapes of rows, with how they are filled."""
    shared = " (shared rows)" if plan.prices is None else " (a prompt once for its samples)"
    return f"{', '.join(f'{r}x{t}' for r, t in plan.shapes)}{shared if plan.share_rows else ''}"


def rooms(found: Estimate, mesh: Any, *, host: dict[str, int]) -> list[Room]:
    """The devices' memory and the host's; those of a CPU are the same."""
    worst = found.worst
    parts = found.parts | {"sum of gradients": worst.gradients, f"temporaries: {worst.name}": worst.temporaries}
    parts["brought from the host for it"] = worst.brought
    parts = {about: count for about, count in parts.items() if count}
    device, taken, free = mesh.devices.flat[0], devices.resident(), memory.host_room()
    count = sum(d.process_index == device.process_index for d in mesh.devices.flat)
    program = {"the trainer's program": taken} if taken is not None else {}
    room = None if free is None or taken is None else free + taken
    host = {f"{about}, waiting": count * bytes_ for about, bytes_ in found.host.items()} | host
    if device.platform == "cpu":
        program["its compiled programs at work"] = found.runtime
        here = {about: count * bytes_ for about, bytes_ in parts.items()}
        where = "this machine" if count == 1 else f"this machine, its {count} devices together"
        return [Room(where, here | program | host, room)]
    return [
        Room(f"each of {count} {device.device_kind}", parts, memory.device_room()),
        Room("this machine", program | host, room),
    ]


def host_parts(c: ConfigDict, inputs: Inputs) -> dict[str, int]:
    """What a PPO run holds on the host beside the trainer: the published weights, and a vLLM on a CPU."""
    r, parts = c.rollout, dict[str, int]()
    if r.name == "inprocess":
        return parts
    if not r.publish_dir:  # two files in shared memory, written in turn
        parts["published weights"] = 2 * memory.served(inputs.policy, published_dtype(c))
    if r.name == "vllm" and not r.urls and jax.default_backend() == "cpu":  # SGLang's are on a GPU
        parts |= {
            "vLLM: weights": r.servers * memory.served(inputs.policy, r.dtype),
            "vLLM: cache": r.servers * r.kv_cache_memory_bytes,
            "vLLM: its program": r.servers * memory.PROGRAM,
        }
    return parts


def of_servers(c: ConfigDict, inputs: Inputs) -> Room | None:
    """The servers' share of a GPU; None where they have none."""
    limit = memory.device_room()
    share = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
    name = {"vllm": "vLLM", "sglang": "SGLang"}.get(c.rollout.name)
    if name is None or c.rollout.urls or limit is None or share is None or jax.default_backend() != "gpu":
        return None
    weights = memory.served(inputs.policy, c.rollout.dtype)
    has = int(c.rollout.gpu_memory_utilization * limit / float(share))
    return Room(f"{name}'s share of a GPU, {c.rollout.gpu_memory_utilization:.0%}", {"weights": weights}, has)


def table(room: Room) -> list[str]:
    """A room as lines, its sum and its verdict last."""
    widest = max(len(about) for about in room.parts)
    lines = [f"memory of {room.where}, MiB"]
    lines += [f"  {about:<{widest}}  {count / MIB:>10,.0f}" for about, count in room.parts.items()]
    said = "" if room.has is None else f"  of {room.has / MIB:,.0f}: {room.verdict}"
    return [*lines, f"  {'together':<{widest}}  {room.needs / MIB:>10,.0f}{said}"]


def moments(found: Estimate) -> list[str]:
    """What each program needs beside what is always there."""
    lines = ["temporaries by program, MiB on a device"]
    widest = max(len(moment.name) for moment in found.moments)
    most: dict[str, int] = {}
    for moment in found.moments:
        most[moment.name] = max(moment.temporaries, most.get(moment.name, 0))
    return lines + [f"  {name:<{widest}}  {count / MIB:>10,.0f}" for name, count in most.items()]


def look(c: ConfigDict, inputs: Inputs, mesh: Any) -> tuple[list[str], Estimate, list[Room]]:
    """Everything of a PPO run: its sizes as lines, the estimate, and what is needed where."""
    lines, entries = sizes(c, inputs, mesh)
    found = memory.estimate(c, inputs, mesh, entries=entries)
    share = of_servers(c, inputs)
    places = rooms(found, mesh, host=host_parts(c, inputs)) + ([share] if share is not None else [])
    return lines, found, places


def report(lines: Sequence[str], found: Estimate, places: Sequence[Room]) -> str:
    """All of it as text."""
    blocks = [list(lines), moments(found), *map(table, places)]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def take_little() -> None:
    """Keeps JAX from taking its share of a GPU at once, which a run under way may have."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def dry_run(c: ConfigDict) -> str:
    """What a PPO run by these settings would be."""
    share_gpu(c)
    take_little()
    inputs = read_inputs(c)
    return report(*look(c, inputs, make_mesh(c)))
