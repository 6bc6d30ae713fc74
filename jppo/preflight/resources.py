"""Checks of the machine: permissions, disk, memory, run folder, ports, clock."""

import json
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence

import jppo
from jppo import settings
from jppo.errors import expanded
from jppo.preflight import auto
from jppo.preflight.finding import GIB, Finding, Verdict
from jppo.preflight.memory_budget import MemoryBudget
from jppo.rollout.servers.process import check_ports
from jppo.run.resume import require_own, require_resumable
from jppo.runlog import durable_files
from jppo.runlog.checkpoint import steps_in
from jppo.runlog.make import require_loggers
from jppo.settings import Common, Settings

DAY_S = 86_400
LAST_YEAR = 2100
LOGS = GIB // 4  # metrics, samples, TensorBoard and the servers' logs
SHOWN = 3  # settings that differ
OPEN = ("rollout.servers", *auto.NAMES)  # which a run may choose
REMEDY = (
    "lower actor.max_tokens_per_device, set model.remat=full, spread the models by mesh.fsdp, train adapters by"
    " model.lora_rank, or use a larger machine"
)


def existing(folder: pathlib.Path) -> pathlib.Path:
    """Returns the folder, or its nearest existing parent."""
    return next(place for place in (folder, *folder.parents) if place.exists())


def writable(about: str, folder: pathlib.Path) -> Iterator[Finding]:
    """Creates the folder and a file in it, and removes them."""
    folder = folder.absolute()
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".jppo-doctor-") as file:
            file.write(b"written")
            file.flush()
            os.fsync(file.fileno())
    except OSError as e:
        remedy = "set trainer.run_dir to a folder that this user may write to"
        yield Finding(about, "FAIL", f"{folder} is not writable: {e.strerror}", remedy)
    else:
        yield Finding(about, "OK", f"{folder} is writable")
    finally:
        for place in made:
            if place.is_dir():
                place.rmdir()


def disk(folder: pathlib.Path, *, checkpoint: int, keep: int, export: int) -> Iterator[Finding]:
    """Compares the disk of the run folder with its checkpoints, one more than kept, and the exported model."""
    free = shutil.disk_usage(existing(folder.absolute())).free
    needs = (keep + 1) * checkpoint + export + LOGS
    said = (
        f"{free / GIB:.1f} GiB free; {keep + 1} checkpoints of {checkpoint / GIB:.2f} GiB, the model and logs take"
        f" {needs / GIB:.1f}"
    )
    remedy = "make room, use another disk for trainer.run_dir, or lower trainer.max_ckpt_to_keep"
    verdict: Verdict = "FAIL" if free < needs else "WARN" if free < 1.5 * needs else "OK"
    yield Finding("disk", verdict, said, "" if verdict == "OK" else remedy)


def shared_memory(publish_dir: str, *, named: bool, weights: int) -> Iterator[Finding]:
    """Checks the place of published weights: a folder, or unnamed memory, which counts as memory."""
    folder = publish_dir if publish_dir else "/dev/shm" if named else ""
    if not folder:
        said = f"two copies of the weights, {2 * weights / GIB:.2f} GiB, in unnamed files: part of the memory above"
        yield Finding("publish room", "OK", said)
        return
    if not os.path.isdir(folder):
        remedy = "create it, or leave rollout.publish_dir empty"
        yield Finding("publish room", "FAIL", f"{folder} is not a folder", remedy)
        return
    free = shutil.disk_usage(folder).free
    said = f"{folder} has {free / GIB:.2f} GiB free for two copies of the weights, {2 * weights / GIB:.2f}"
    enough = free >= 2 * weights
    remedy = "empty it, or give the container more (docker run --shm-size)"
    yield Finding("publish room", "OK" if enough else "FAIL", said, "" if enough else remedy)


def rooms(found: Sequence[MemoryBudget]) -> Iterator[Finding]:
    """Compares the estimate with the memory of devices and host."""
    for room in found:
        largest = sorted(room.parts.items(), key=lambda part: -part[1])[:3]
        has = "unknown room" if room.has is None else f"{room.has / GIB:.1f}"
        most = ", ".join(f"{about} {count / GIB:.2f}" for about, count in largest)
        said = f"{room.where}: {room.needs / GIB:.1f} GiB of {has}; most of it {most}"
        yield Finding("memory", room.verdict, said, "" if room.verdict == "OK" else REMEDY)


def ports(c: Settings) -> Iterator[Finding]:
    """Checks the requested ports."""
    if c.rollout.urls:
        yield Finding("server ports", "OK", "none: rollout.urls lists running servers")
        return
    count = c.rollout.least_servers
    check_ports(c.rollout.port, count)
    asked = ", ".join(str(c.rollout.port + i) for i in range(count))
    yield Finding("server ports", "OK", f"{asked} can be used" if c.rollout.port else "any that is free")


def clock(now: float, *, newest: float) -> Iterator[Finding]:
    """Checks the clock against the package's files, and that the monotonic clock advances."""
    begin = time.monotonic()
    time.sleep(0.01)
    if not time.monotonic() > begin:
        yield Finding("clock", "FAIL", "the monotonic clock does not advance", "time limits need it: fix the machine")
        return
    said = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    if now < newest - DAY_S or time.gmtime(now).tm_year > LAST_YEAR:
        remedy = "set the clock: certificates and logs depend on it"
        yield Finding("clock", "WARN", f"{said} is wrong: jppo's own files are newer or much older", remedy)
    else:
        yield Finding("clock", "OK", said)


def package_time() -> float:
    """Returns the newest modification time of the package's files."""
    folder = pathlib.Path(jppo.__file__).parent
    return max(file.stat().st_mtime for file in folder.rglob("*.py"))


def folder(c: Common) -> Iterator[Finding]:
    """Checks what a run with these settings would write, and what it would do with an earlier run of its folder."""
    require_loggers(c)
    require_resumable(c)
    run = expanded(c.trainer.run_dir)
    steps = steps_in(run / "checkpoints")
    if not steps:
        yield Finding("run folder", "OK", f"{run}: a new run")
        return
    if c.trainer.resume_mode == "disable":
        remedy = "use another trainer.run_dir to keep them"
        yield Finding("run folder", "WARN", f"{run}: trainer.resume_mode=disable removes its checkpoints", remedy)
        return
    require_own(c)
    changed = changed_settings(run / "config.json", c)
    if changed:
        more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
        said = f"{run} has a run with other settings, which resumes at step {steps[-1]}: {', '.join(changed[:SHOWN])}"
        yield Finding("run folder", "WARN", said + more, "use another trainer.run_dir, or ignore this if intended")
        return
    yield Finding("run folder", "OK", f"{run}: resumes after step {steps[-1]}")


def changed_settings(file: pathlib.Path, c: Common) -> list[str]:
    """Returns settings of a run's config.json that differ from `c`, as name=theirs."""
    theirs = settings.by_name(durable_files.read_json(file))
    if not theirs:
        return [f"{file.name} cannot be read"]
    ours = settings.by_name(json.loads(settings.dump(c)))
    names = dict.fromkeys([*ours, *theirs])
    kept = [name for name in names if name not in OPEN or ours.get(name) not in (-1, "auto")]
    return [f"{name}={theirs.get(name)}" for name in kept if theirs.get(name) != ours.get(name)]
