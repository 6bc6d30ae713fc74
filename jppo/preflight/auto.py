"""Settings chosen by device memory: `model.remat=auto`, `actor.max_tokens_per_device=-1`.

Candidates are compiled as the run would compile them, least recomputation first; the first that fits is selected.
"""

import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from jppo import settings
from jppo.distributed.hosts import ALONE, Hosts
from jppo.preflight.programs import announce
from jppo.runlog import durable_files
from jppo.settings import Settings, UserError

REMATS = ("none", "dots", "attention", "full")  # in order of recomputation
FEW, MOST = 4096, 32768  # tokens of a device's micro-batch: fewer only if nothing else fits; never more
NAMES = ("model.remat", "actor.max_tokens_per_device")


def asked(c: Settings) -> bool:
    """Whether memory chooses a setting."""
    return c.model.remat == "auto" or c.actor.max_tokens_per_device == -1


def candidates(c: Settings) -> Iterator[dict[str, Any]]:
    """Yields the settings to try, in order."""
    remats = REMATS if c.model.remat == "auto" else (c.model.remat,)
    tokens = [c.actor.max_tokens_per_device]
    if tokens == [-1]:
        longest = max(c.data.longest_row, c.data.max_tokens_per_row)
        sizes = [longest]
        while sizes[0] * 2 <= MOST:
            sizes.insert(0, sizes[0] * 2)
        tokens = sizes
    many = [size for size in tokens if size >= FEW] or tokens[:1]
    for remat in remats:
        for size in many:
            yield dict(zip(NAMES, (remat, size), strict=True))
    for size in tokens[len(many) :]:
        yield dict(zip(NAMES, (remats[-1], size), strict=True))


def as_arguments(changes: dict[str, Any]) -> str:
    """Formats settings as command-line arguments."""
    return " ".join(f"--config.{name}={value}" for name, value in changes.items())


def first(c: Settings) -> Settings:
    """Returns the config of the first candidate, for programs without gradients."""
    return settings.changed(c, next(candidates(c))) if asked(c) else c


def first_fitting(c: Settings, fits: Callable[[Settings], bool]) -> dict[str, Any]:
    """Returns the first candidate that fits; raises UserError if none does."""
    tried = 0
    for changes in candidates(c):
        other = settings.changed(c, changes)
        settings.check(other)
        tried += 1
        announce(f"trying {as_arguments(changes)}")
        if fits(other):
            return changes
    raise UserError(
        f"model.remat={c.model.remat} actor.max_tokens_per_device={c.actor.max_tokens_per_device}: none of {tried}"
        " candidates fits the memory, by the dry run's account; set actor.optimizer_offload=True, spread the models by"
        " mesh.fsdp, or train adapters by model.lora_rank"
    )


def settle(
    c: Settings, mesh: Any, run: pathlib.Path, fits: Callable[[Settings], bool], hosts: Hosts = ALONE
) -> tuple[Settings, str]:
    """Returns the config that fits the devices, and a line on it; a resumed run keeps its choice.

    The choice and the conditions that it depends on are recorded in the run folder, `auto.json`.
    """
    if not asked(c):
        return c, ""
    device = mesh.devices.flat[0].device_kind
    about: dict[str, Any] = {
        "asked": {name: settings.value_of(c, name) for name in NAMES},
        "mesh": dict(mesh.shape),
    }
    about |= {"device": device, "attempts": [*candidates(c)]}

    def decide() -> dict[str, Any]:
        path = run / "auto.json"
        kept = durable_files.read_json(path)
        if kept.get("about") == about and set(kept.get("chosen") or ()) == set(NAMES):
            return dict(kept["chosen"])
        found = first_fitting(c, fits)
        if hosts.first:
            durable_files.write_text(path, json.dumps({"chosen": found, "about": about}, indent=1) + "\n")
        return found

    changes = hosts.gather(decide)[0]
    said = ", ".join(f"{name}={value}" for name, value in changes.items())
    return settings.changed(c, changes), f"chosen by the memory of {device}: {said}"
