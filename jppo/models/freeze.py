"""Frozen parameters, which keep their initial values while the others learn.

The learned parameters are a tree of their own and the frozen ones its base, as with adapters (`lora.py`). Only what is
learned has a gradient, an optimizer state and a place in checkpoints.
"""

import fnmatch

from jppo.errors import UserError
from jppo.models import params
from jppo.models.config import ModelConfig
from jppo.models.params import Head
from jppo.types import Params

Frozen = frozenset[tuple[str, ...]]  # paths of parameters
ALL_LEARN: Frozen = frozenset()


def find_frozen(model: ModelConfig, patterns: str, setting: str, *, head: Head) -> Frozen:
    """Finds the parameters that a setting freezes, by patterns of Hugging Face's names separated by commas.

    Raises UserError for a pattern without a parameter, for some layers of a parameter, and where nothing is learned.
    """
    entries, fault = params.table(model, head=head), f"{setting}={patterns!r}"
    matched: dict[tuple[str, ...], set[str]] = {entry.path: set() for entry in entries}
    for pattern in filter(None, (part.strip() for part in patterns.split(","))):
        found = {entry.path: fnmatch.filter(entry.hf_names, pattern) for entry in entries}
        if not any(found.values()):
            names = ", ".join(entry.hf_names[0] for entry in entries)
            raise UserError(f"{fault}: no parameter has a name like {pattern}; of the first layers there are {names}")
        for path, names_of_path in found.items():
            matched[path].update(names_of_path)
    for entry in entries:
        if matched[entry.path] and (rest := sorted({*entry.hf_names} - matched[entry.path])):
            raise UserError(
                f"{fault} freezes {min(matched[entry.path])} and not {rest[0]}: the layers of a parameter are one"
                " array, which is frozen as a whole; write * for the number"
            )
    if not any(not matched[entry.path] for entry in entries if not entry.buffer):
        raise UserError(f"{fault} freezes every parameter, so nothing is learned; leave some out")
    return frozenset(path for path, names in matched.items() if names)


def divide(model: ModelConfig, values: Params, frozen: Frozen, *, head: Head) -> tuple[Params, Params]:
    """Divides a model's parameters into the learned and the frozen ones."""

    def select(is_frozen: bool) -> Params:
        entries = tuple(entry for entry in params.table(model, head=head) if (entry.path in frozen) == is_frozen)
        return params.tree(entries, lambda entry: params.leaf_at(values, entry.path))

    return select(False), select(True)
