"""What several tests make and look at: settings, rows, samples, processes."""

import json
import pathlib

import jax
import ml_collections
import numpy as np

from jppo.models import decoder, hf, hf_write
from jppo.rewards.parts import Sample
from jppo.settings import table
from jppo.types import Prompt


def typed(config):
    """Settings as sections, unchecked, so that a test may break them; sections stay as they are."""
    return table.sections(config, table.kind_of(config)) if isinstance(config, ml_collections.ConfigDict) else config


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
