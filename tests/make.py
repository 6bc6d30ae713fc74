"""What several tests make and look at: settings, a record of the settings that are read, rows, samples, processes."""

import functools
import json
import pathlib
import sys

import jax
import ml_collections
import numpy as np

from jppo.models import decoder, hf, hf_write
from jppo.rewards.parts import Sample
from jppo.settings import table
from jppo.settings.setting import Section
from jppo.types import Prompt


def typed(config):
    """Settings as sections, unchecked, so that a test may break them; sections stay as they are."""
    return table.sections(config, table.kind_of(config)) if isinstance(config, ml_collections.ConfigDict) else config


class Reads(dict):
    """A section's `vars()`: parts look up in it what their parameters name, and each look-up is a read."""

    def __init__(self, values, section, seen):
        super().__init__(values)
        self._section, self._seen = section, seen

    def __getitem__(self, name):
        self._seen.add((self._section, name))
        return super().__getitem__(name)


def record_reads(monkeypatch):
    """Returns the set to which each read of a setting is added, by its section's class and its own name."""
    seen, plain = set(), object.__getattribute__

    def counts(section, frame):
        reader = frame.f_globals["__name__"]
        if reader == "jppo.settings.parts":  # makes the parts that settings name
            return True
        if reader.startswith("jppo.settings"):  # checks; a property reads for its caller
            return isinstance(getattr(type(section), frame.f_code.co_name, None), property)
        return reader != "dataclasses"  # asdict and replace read all

    def recorded(section, name):
        value = plain(section, name)
        if not counts(section, sys._getframe(1)):
            return value
        if name == "__dict__":
            return Reads(value, type(section), seen)
        seen.add((type(section), name))
        return value

    monkeypatch.setattr(Section, "__getattribute__", recorded, raising=False)
    return seen


def unread(config, seen):
    """The dotted names of the settings that `record_reads` has not seen."""
    c = typed(config)

    def key(name):
        *places, leaf = name.split(".")
        return type(functools.reduce(getattr, places, c)), leaf

    return {name for name in table.values(config) if key(name) not in seen}


def write_weights(directory, seed=5):
    """Writes random weights beside a config.json, drawn by its initializer_range."""
    _, cfg = hf.read_config(str(directory))
    params = decoder.init_params(cfg, jax.random.key(seed), head="lm", param_dtype="float32")
    hf_write.save(directory, params, cfg, source=str(directory), dtype="float32")


def write_rows(path, *rows):
    """Writes rows as JSON lines; returns the path as a setting has it."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sample(text, truth="0", *, source="mine", messages="q", **extra):
    """A response to grade."""
    return Sample(Prompt("u", source, messages, np.zeros(1, np.int32), truth, extra), text, len(text), "stop")


def bytes_as_text(ids):
    """Decodes as a tokenizer whose tokens are bytes, of which 0 is the end token."""
    return bytes(i for i in ids if i).decode(errors="replace")


def alive(pid):
    """Whether a process runs: one that has ended and waits for its parent does not."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
