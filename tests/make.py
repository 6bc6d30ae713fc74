"""What several tests make: settings as frozen sections, a record of the settings that are read, weights."""

import functools
import sys

import jax
import ml_collections

from jppo.models import decoder, hf, hf_write
from jppo.settings import table
from jppo.settings.setting import Section


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
