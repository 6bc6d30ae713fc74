"""What several tests make: settings, files, trajectories, rows and scripts; and how they read a run or a refusal."""

import functools
import importlib.util
import json
import pathlib
import subprocess
import sys
import sysconfig
import time

import jax
import ml_collections
import numpy as np
import pytest

from jppo import settings
from jppo.models import decoder, heads, hf, hf_write, kernels, params
from jppo.rewards.parts import Sample
from jppo.runlog.logger import read_metrics
from jppo.settings import table
from jppo.settings.setting import Section
from jppo.types import Prompt, Trajectory

ROOT = pathlib.Path(__file__).resolve().parents[1]


def abstract_params(cfg, *, head, param_dtype):
    """The table's parameters as shapes and dtypes."""
    return params.tree(params.table(cfg, head=head), lambda entry: kernels.stored_form(entry, param_dtype, "none"))


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
            named = getattr(type(section), frame.f_code.co_name, None)
            return isinstance(named, (property, functools.cached_property))
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

    return {name for name in table.by_name(config) if key(name) not in seen}


def changed(config, changes, **more):
    """A checked copy of the config with other settings: `changes` by their names, `more` with __ for the dot."""
    c = config.copy_and_resolve_references()
    c.update_from_flattened_dict(changes | {name.replace("__", "."): value for name, value in more.items()})
    settings.check(c)
    return c


def write_weights(directory, seed=5):
    """Writes random weights beside a config.json, drawn by its initializer_range."""
    _, cfg = hf.read_config(str(directory))
    params = decoder.init_params(cfg, jax.random.key(seed), head="lm", param_dtype="float32")
    hf_write.save_model(directory, params, cfg, source=str(directory), dtype="float32")


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


def write_lines(path, rows):
    """Writes a file of JSON lines and returns its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_lines(path):
    """The rows of a file of JSON lines."""
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


def trajectory(tokens, sampled, uid="a", *, logprob=0.0, version=0, text="", finish="stop", turns=1, **more):
    """A trajectory whose log-probs and versions, numbers or arrays, are those of its sampled tokens."""
    tokens, sampled = np.asarray(tokens, np.int32), np.asarray(sampled, bool)
    logprob = np.where(sampled, logprob, 0.0).astype(np.float32)
    version = np.where(sampled, version, -1).astype(np.int32)
    return Trajectory(uid, tokens, sampled, logprob, version, text, finish, turns, **more)


def whole(tokens):
    """One segment a row: segment and position of tokens [R, T]."""
    return np.ones_like(tokens), np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)


def logits(cfg, values, tokens, *place, **how):
    """Logits of tokens [R, T], each row one segment unless `place` says otherwise; `values` may be variables."""
    variables = values if "params" in values else {"params": values}

    @jax.jit
    def run(variables):
        hidden = decoder.Decoder(cfg, **how).apply(variables, tokens, *(place or whole(tokens)))
        return heads.logits_of((hidden, decoder.head_kernel(variables["params"], cfg), cfg))

    return np.asarray(run(variables))


def assert_close(ours, theirs, rel=1e-4):
    """Of the largest number."""
    assert np.abs(ours - theirs).max() <= rel * np.abs(theirs).max()


def untimed(run, *more):
    """The metrics of a run's folder but for time, and those whose names begin as `more` do."""
    left_out = ("timing_s/", "perf/", *more)
    return [{k: v for k, v in line.items() if not k.startswith(left_out)} for line in read_metrics(pathlib.Path(run))]


def weights(run):
    """The bytes of the model that a run has left."""
    return (pathlib.Path(run) / "hf/model.safetensors").read_bytes()


def script(path):
    """A new module of a program in scripts/, benchmarks/ or configs/, which finds its neighbours."""
    path = ROOT / path
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    if path.parent.name == "scripts":  # whose dataclasses and processes look it up by its name
        sys.modules[path.stem] = module
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)
        spec.loader.exec_module(module)
    return module


def one_line(capsys, main, *words, code=2):
    """Runs a command that must end by this code with one line on stderr, and returns the line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, words)))
    error = capsys.readouterr().err
    assert ended.value.code == code and error.count("\n") == 1 and error.endswith("\n"), error
    return error


def until(condition, what="the condition", seconds=30.0):
    """Waits for a condition."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.05)


def python_with(folder, *packages):
    """An interpreter with these packages, and with this one's after them: some of their needs are other releases."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python, site = folder / "bin/python", next(folder.glob("lib/python*/site-packages"))
    (site / "after.pth").write_text(sysconfig.get_paths()["purelib"])  # first: what fits is not installed again
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    return python
