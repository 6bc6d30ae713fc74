"""Whole commands with broken inputs, for scripts/fuzz_inputs.py --commands.

Each case is a copy of a tiny valid setup (model, reward model, data, config files, a finished run) in which one or two
things are broken by the case's number, and a command that reads it. The command runs in a fork of this process, which
has imported jppo and no JAX backend yet: a session of its own, limited memory, killed after LIMIT_S seconds. A case is
good if the command ends with exit code 0, or with 2 (where documented, 1) and a line on stderr for each fault.
"""

import atexit
import contextlib
import dataclasses
import importlib
import json
import os
import pathlib
import random
import re
import resource
import select
import shutil
import signal
import stat
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax

from examples import arithmetic
from jppo import settings
from jppo.data.tokenizer import load_tokenizer
from jppo.errors import escaped
from jppo.settings import table

LIMIT_S = 60.0
MEMORY_BYTES = 12 * 2**30
QUICK = {
    "model.path": "model",
    "data.train_files": "prompts.jsonl",
    "data.val_files": "prompts.jsonl",
    "data.train_batch_size": 4,
    "data.max_prompt_length": 6,
    "data.max_response_length": 4,
    "data.row_lengths": 1,
    "actor.ppo_mini_batch_size": 4,
    "algorithm.use_kl_in_reward": True,
    "rollout.name": "inprocess",
    "reward.workers": 1,
    "trainer.total_training_steps": 2,
    "trainer.test_freq": -1,
    "trainer.save_freq": 1,
    "trainer.run_dir": "run",
}
OF_MODEL = ("model.path", "data.train_files", "trainer.run_dir", "trainer.save_freq")
SFT = {name: QUICK[name] for name in OF_MODEL} | {
    "data.train_files": "demos.jsonl",
    "data.train_batch_size": 4,
    "data.max_prompt_length": 6,
    "data.max_response_length": 4,
    "trainer.total_epochs": 1,
    "trainer.run_dir": "tuned",
}
PAIRS = SFT | {
    "data.train_files": "pairs.jsonl",
    "data.val_files": "pairs.jsonl",
    "model.path": "reward",
    "trainer.run_dir": "preferred",
}
KINDS = {"train": ("default", QUICK), "sft": ("sft_default", SFT), "reward_model": ("reward_model_default", PAIRS)}
# Settings that start programs which take minutes, or that send what they have elsewhere.
LEFT_OUT = re.compile(r"rollout\.(name|python|urls|servers)$|trainer\.logger$|reward\.model\.(engine|python)$")
ODD_PATHS = (
    "",
    "missing",
    "prompts.jsonl",
    "prompts.jsonl/x",
    "/proc/1/x",
    "loop",
    "dangling",
    "dangling/x",
    "n" * 300,
)
ODD_PATHS += (
    "a\nb\x1b[2J",
    "\udc80",
    "~nobody-here/x",
    "/sys/x",
    "é 中",
    " ",
    "null/x",
    "x/" * 3000,
    "locked/x",
)
NUMBERS = (0, -1, 1, 2, 3, 7, 2**31, 2**63, 10**30, 0.0, -0.5, 1e30, 1e-30, 1e308, "inf", "-inf", "nan", "1e999", "--1")
WORDS = ("", " ", "x", "None", "True", "a,b", "a=1,a=2", ",", "{}", "[1]", "\x1b[2J", "é", "\udc80", "x" * 5000, "a\nb")


@dataclasses.dataclass(frozen=True)
class Case:
    """A command with the files that it reads, which may be broken, and the exit codes that it documents."""

    words: list[str]  # module, then arguments
    files: tuple[str, ...]  # glob patterns
    codes: tuple[int, ...] = (0, 2)
    typed: str = ""  # stdin


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a command ended; `code` is None after the time limit, negative after a signal."""

    code: int | None
    stdout: str
    stderr: str
    seconds: float


# -- the setup


def make_setup(folder: pathlib.Path) -> None:
    """Everything that a case may read, all of it valid."""
    folder.mkdir()
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    shape |= {"num_key_value_heads": 1, "max_position_embeddings": 64}
    for name, more in (("model", {}), ("reward", {"architectures": ["Qwen2ForSequenceClassification"]})):
        arithmetic.write_model(folder / name)
        (folder / name / "config.json").write_text(json.dumps(arithmetic.MODEL | shape | more))
    sums = [(a, b) for a in (10, 23, 57) for b in (11, 34, 89)]
    prompts = [{"prompt": f"{a}+{b}=", "ground_truth": str(a + b), "data_source": "arithmetic"} for a, b in sums]
    rows = {
        "prompts": prompts,
        "demos": [{"prompt": row["prompt"], "response": row["ground_truth"]} for row in prompts],
        "pairs": [{"prompt": row["prompt"], "chosen": row["ground_truth"], "rejected": "1"} for row in prompts],
        "samples": [
            {"uid": row["prompt"], "prompt": row["prompt"], "response": answer, "score": score, "finish": "stop"}
            for row in prompts
            for answer, score in ((row["ground_truth"], 1.0), ("1", 0.0))
        ],
    }
    for name, records in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records))
    (folder / "gsm8k").mkdir()
    problem = json.dumps({"question": "How much is 1 + 1?", "answer": "It is 2.\n#### 2"}) + "\n"
    for split in ("train", "test"):
        (folder / f"gsm8k/{split}.jsonl").write_text(problem * 3)
    for name, (maker, given) in KINDS.items():
        lines = [f"    c.{setting} = {value!r}\n" for setting, value in given.items()]
        text = f"from jppo import settings\n\n\ndef get_config():\n    c = settings.{maker}()\n"
        if name == "train":
            lines.append(
                "    return c\n\n\ndef sweep(add):\n    add(**{'actor.lr': 1e-5})\n    add(**{'actor.lr': 1e-6})\n"
            )
        else:
            lines.append("    return c\n")
        (folder / f"{name}.py").write_text(text + "".join(lines))
    script = "set -x\npython3 -m verl.trainer.main_ppo \\\n  algorithm.adv_estimator=grpo \\\n"
    script += "  data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=64 \\\n"
    script += "  actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.rollout.n=5 $@\n"
    (folder / "verl.sh").write_text(script)


def train_setup(folder: pathlib.Path) -> None:
    """Adds a finished run of each kind to the setup, and weights to its models."""
    for kind in ("sft", "reward_model", "train"):
        words = [f"jppo.{kind}", f"--config={kind}.py"] + ["--config.model.init=random"] * (kind != "train")
        ended = run(words, folder, limit_s=600.0)
        if ended.code != 0:
            raise SystemExit(f"{' '.join(words)}: exit code {ended.code}\n{ended.stdout}\n{ended.stderr}")
        if kind != "train":  # what is random would be another model in a run that resumes
            model = {"sft": "model", "reward_model": "reward"}[kind]
            shutil.copytree(folder / folder_of(kind) / "hf", folder / model, dirs_exist_ok=True)


# -- the cases


def make_case(rng: random.Random, number: int) -> Case:
    """The command of a case; every COMMANDS entry in turn."""
    return COMMANDS[number % len(COMMANDS)](rng)


def training(kind: str, *more: str, changes: bool = True) -> Callable[[random.Random], Case]:
    """A training command, with 0 to 2 odd settings."""

    def made(rng: random.Random) -> Case:
        given = odd_settings(rng, kind) if changes and rng.random() < 0.6 else []
        if kind != "train" and "--machine" in more:
            raise ValueError("only PPO is described here")
        data = {"train": "prompts", "sft": "demos", "reward_model": "pairs"}[kind]
        files = (f"{kind}.py", f"{data}.jsonl", "reward/*" if kind == "reward_model" else "model/*")
        if "--dry_run" not in more:
            files += tuple(f"{folder_of(kind)}/**/*" for _ in range(4))
        return Case([f"jppo.{kind}", f"--config={kind}.py", *given, *more], files, codes=(0, 1, 2))

    return made


def folder_of(kind: str) -> str:
    """The run that the setup has of a training command."""
    return str(KINDS[kind][1]["trainer.run_dir"])


def evaluating(rng: random.Random) -> Case:
    short = ["--model=model", "--data=prompts.jsonl", "--config.rollout.name=inprocess", "--out=tested"]
    given = ["--config.reward.workers=1", "--config.data.max_prompt_length=6", "--config.data.max_response_length=4"]
    if rng.random() < 0.3:
        short[rng.randrange(2)] = f"--{rng.choice(('model', 'data', 'out'))}={odd_path(rng)}"
    return Case(
        ["jppo.evaluate", *short, *given, *(odd_settings(rng, "train") if rng.random() < 0.4 else [])],
        ("model/*", "model/*", "prompts.jsonl"),
        codes=(0, 1, 2),
    )


def exporting(rng: random.Random) -> Case:
    source = odd_path(rng) if rng.random() < 0.1 else rng.choice(("run", "run/checkpoints/2", "tuned", "preferred"))
    options = ["--step=1", "--best", "--merge_lora", "--dtype=bfloat16", "--base=model", f"--base={odd_path(rng)}"]
    options += [f"--step={rng.choice(NUMBERS)}", f"--dtype={rng.choice(WORDS)}", f"--out={odd_path(rng)}"]
    words = ["jppo.export", source, "--out=exported", *rng.sample(options, rng.choice((0, 0, 1, 2)))]
    folder = source.split("/")[0] if source.split("/")[0] in ("run", "tuned", "preferred") else "run"
    return Case(words, (f"{folder}/**/*", f"{folder}/config.json", "model/*"))


def chatting(rng: random.Random) -> Case:
    model = odd_path(rng) if rng.random() < 0.1 else "model"
    options = [f"--{rng.choice(('temperature', 'top_p', 'max_tokens', 'context', 'seed'))}={rng.choice(NUMBERS)}"]
    options += [f"--{rng.choice(('prompt', 'system', 'dtype'))}={rng.choice(WORDS)}", "--raw"]
    words = ["jppo.chat", model, "--max_tokens=4", "--seed=1", *rng.sample(options, rng.choice((0, 0, 1)))]
    if rng.random() < 0.7:
        words.append("--prompt=1+1=")
    return Case(words, ("model/*",), typed=rng.choice(("1+1=\n", "", "\n\n", "é\x1b[2J\n", "/reset\n1\n", "x" * 500)))


def reporting(rng: random.Random) -> Case:
    runs = [rng.choice(("run", "tuned", "run")) for _ in range(rng.choice((1, 1, 2)))]
    if rng.random() < 0.2:
        runs[0] = odd_path(rng)
    out = [f"--out={odd_path(rng)}"] if rng.random() < 0.2 else []
    return Case(["jppo.report", *runs, *out], ("run/*", "run/metrics.jsonl", "run/config.json", "run/samples/*"))


def examining(rng: random.Random) -> Case:
    given = odd_settings(rng, "train") if rng.random() < 0.5 else []
    words = ["jppo.doctor", "--config=train.py", "--no_server", *given]
    return Case(words, ("model/*", "prompts.jsonl", "train.py"), codes=(0, 1, 2))


def sweeping(rng: random.Random) -> Case:
    given = odd_settings(rng, "train") if rng.random() < 0.5 else []
    out = f"--out={odd_path(rng) if rng.random() < 0.2 else 'swept'}"
    more = [f"--jobs={rng.choice(NUMBERS)}"] if rng.random() < 0.2 else []
    return Case(["jppo.sweep", "--config=train.py", "--print", out, *given, *more], ("train.py",))


def translating(rng: random.Random) -> Case:
    keys = ("data.train_batch_size", "actor_rollout_ref.rollout.n", "trainer.nnodes", "algorithm.kl_ctrl.kl_coef")
    keys += ("trainer.logger", "actor_rollout_ref.actor.clip_ratio", "+x.y", "~z", "", "data", "é.é")
    value = rng.choice((*map(str, NUMBERS), *WORDS, "null", "['a','b']", "${x}", "$(x)", "'", '"'))
    given = [f"{rng.choice(keys)}{rng.choice(('=', '=', '', '=='))}{value}"] if rng.random() < 0.6 else []
    head = [] if rng.random() < 0.2 else [odd_path(rng) if rng.random() < 0.1 else "verl.sh"]
    return Case(["jppo.from_verl", *head, *given], ("verl.sh",), codes=(0, 2, 3))


def preparing(rng: random.Random) -> Case:
    out = f"--out={odd_path(rng) if rng.random() < 0.2 else 'made'}"
    odd = rng.choice((*NUMBERS, *WORDS))
    words, files = rng.choice(
        (
            (["jppo.data.pairs", "--samples=samples.jsonl", out], ("samples.jsonl",)),
            (["jppo.data.pairs", "--samples=samples.jsonl", out, f"--{rng.choice(('test', 'seed'))}={odd}"], ()),
            (["examples.stories", "--samples=samples.jsonl", out], ("samples.jsonl",)),
            (["examples.stories", out, f"--{rng.choice(('test', 'seed', 'word'))}={odd}"], ()),
            (["examples.arithmetic", out, "--demonstrations=1"], ()),
            (["examples.arithmetic", out, f"--{rng.choice(('seed', 'test', 'sloppy'))}={odd}"], ()),
            (["examples.multiplication", out, f"--{rng.choice(('seed', 'test', 'train'))}={odd}"], ()),
            (["jppo.data.gsm8k", "--from=gsm8k", out], ("gsm8k/*",)),
        )
    )
    return Case(words, files)


def checking(rng: random.Random) -> Case:
    words = ["jppo.data.check", "prompts.jsonl"]
    words += rng.choice(([], ["--val=prompts.jsonl"], [f"--val={odd_path(rng)}"]))
    words += rng.choice(
        ([], ["--tokenizer=model"], ["--tokenizer=model", f"--max-prompt-length={rng.choice(NUMBERS)}"])
    )
    return Case(words, ("prompts.jsonl", "prompts.jsonl", "model/*"))


def grading(rng: random.Random) -> Case:
    given = odd_settings(rng, "train") if rng.random() < 0.4 else []
    words = ["jppo.rewards.check", "--config=train.py", *given]
    return Case(words, ("model/*", "prompts.jsonl", "train.py"), codes=(0, 1, 2))


COMMANDS: tuple[Callable[[random.Random], Case], ...] = (
    *(training("train", "--dry_run"), training("sft", "--dry_run"), training("reward_model", "--dry_run")),
    *(training("train", "--config.trainer.total_training_steps=3"), training("sft", "--config.trainer.total_epochs=2")),
    *(training("reward_model", "--config.trainer.total_epochs=2"), training("train", "--dry_run")),
    *(evaluating, exporting, chatting, reporting, examining, sweeping, translating, preparing, checking, grading),
)


def odd_settings(rng: random.Random, kind: str) -> list[str]:
    """One or two overrides of the command line: of other types, out of range, misspelt, or merely unusual."""
    config = getattr(settings, KINDS[kind][0])()
    usual = table.by_name(config) | KINDS[kind][1]
    names = sorted(name for name in usual if not LEFT_OUT.search(name))
    overrides = []
    for name in rng.choices(names, k=rng.choice((1, 1, 1, 2))):
        was = usual[name]
        if name.endswith(("path", "files", "run_dir", "_dir")) and rng.random() < 0.7:
            value: Any = odd_path(rng)
        elif (choices := [*table.TABLE[name].choices]) and rng.random() < 0.6:
            value = rng.choice(choices)
        elif isinstance(was, bool):
            value = rng.choice((not was, not was, *WORDS))
        elif isinstance(was, int | float) and rng.random() < 0.8:
            value = (
                rng.choice(NUMBERS) if rng.random() < 0.5 else rng.choice((was * 2, was * 10, -was, was + 1, was // 2))
            )
        else:
            value = rng.choice((*WORDS, *NUMBERS, *ODD_PATHS))
        if rng.random() < 0.05:
            name = rng.choice((name[:-1], name.split(".")[0], f"{name}.x", name.upper(), "", "é"))
        overrides.append(f"--config.{name}={value}")
    return overrides


def odd_path(rng: random.Random) -> str:
    return rng.choice(ODD_PATHS)


# -- what is broken


def spoil(rng: random.Random, folder: pathlib.Path, patterns: Sequence[str]) -> str:
    """Breaks one file of the patterns; what was done, for the report."""
    paths = sorted({path for path in folder.glob(rng.choice(patterns)) if path.is_file()})
    if not paths:
        return "nothing"
    path = rng.choice(paths)
    damage = rng.choice((*(of_bytes,) * 4, *(of_content,) * 6, of_kind, of_kind, of_encoding))
    done = damage(rng, path)
    return f"{path.relative_to(folder)}: {done}"


def of_bytes(rng: random.Random, path: pathlib.Path) -> str:
    """Bytes that are cut, flipped, doubled, or appended."""
    data = bytearray(path.read_bytes())
    variant = rng.randrange(6)
    if variant == 0:
        data = data[: rng.randrange(len(data) + 1)]
    elif variant == 1:
        data += bytes(rng.randint(1, 100))
    elif variant == 2 and data:
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif variant == 3 and data:
        start = rng.randrange(len(data))
        data[start:start] = data[start : start + rng.randint(1, 200)]
    elif variant == 4 and data:
        start = rng.randrange(len(data))
        del data[start : start + rng.randint(1, 50)]
    else:
        data = bytearray(
            rng.choice((b"", b"[" * 100_000, b"PAR1", b"\xff\xfe", b"null", b"{}\n{}", b"\0" * 64, b"1e999"))
        )
    path.write_bytes(data)
    return f"bytes, {variant}"


def of_content(rng: random.Random, path: pathlib.Path) -> str:
    """Something odd in one place of JSON, or of a safetensors header; a setting of a config file."""
    data = path.read_bytes()
    try:
        if path.suffix == ".safetensors":
            size = struct.unpack("<Q", data[:8])[0]
            head = json.dumps(changed(rng, json.loads(data[8 : 8 + size]))).encode()
            path.write_bytes(struct.pack("<Q", len(head)) + head + data[8 + size :])
        elif path.suffix == ".jsonl":
            lines = data.splitlines()
            i = rng.randrange(len(lines))
            lines[i] = json.dumps(changed(rng, json.loads(lines[i]))).encode()
            path.write_bytes(b"\n".join(lines) + b"\n")
        elif path.suffix == ".py":
            lines = data.splitlines()
            odd = (
                "raise OSError('x')",
                "c.actor.lr = 'x'",
                "c.new = 1",
                "import nothing_here",
                "return 1",
                "return",
                "1/0",
            )
            odd += ("c.data = 7", "c.model.path = None", "x = = 1", "c.model = {}", "c = None")
            lines.insert(rng.randrange(5, len(lines)), f"    {rng.choice(odd)}".encode())
            path.write_bytes(b"\n".join(lines) + b"\n")
        else:
            path.write_text(json.dumps(changed(rng, json.loads(data))))
    except (ValueError, IndexError, struct.error, RecursionError):
        return of_bytes(rng, path)
    return "its content"


ODD_VALUES = (None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 0.0, -0.5, 1e30, float("inf"), float("nan"))
ODD_VALUES += ("", " ", "x", "0", "é\x1b[2J", "a\nb", "\ud800", "\0", "x" * 5000, "/proc/self", "../x")
ODD_VALUES += ([], [1], [None], ["x"], {}, {"a": 1}, [{"role": "user", "content": "1+1="}], [[]])


def changed(rng: random.Random, value: Any) -> Any:
    """The value with something odd, missing or more in one place of it."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        if rng.random() < 0.2:
            return {k: v for k, v in value.items() if k != key}
        if rng.random() < 0.1:
            return value | {rng.choice(("x", "", "é\x1b[2J", f"{key} ")): rng.choice(ODD_VALUES)}
        return value | {key: changed(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.7:
        i = rng.randrange(len(value))
        return [*value[:i], changed(rng, value[i]), *value[i + 1 :]]
    return rng.choice(ODD_VALUES)


def of_kind(rng: random.Random, path: pathlib.Path) -> str:
    """No file but something else of its name."""
    kind = rng.choice(("gone", "folder", "loop", "dangling", "locked", "link to null"))
    if kind == "locked":
        path.chmod(0)
        return kind
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "dangling":
        path.symlink_to("nothing-here")
    elif kind == "link to null":
        path.symlink_to(os.path.relpath(next(p for p in path.parents if (p / "null").exists()) / "null", path.parent))
    return kind


def of_encoding(rng: random.Random, path: pathlib.Path) -> str:
    """The text in another encoding or with other ends of lines."""
    encoding = rng.choice(("utf-16", "utf-8-sig", "cp1252", "crlf"))
    text = path.read_bytes().decode("latin-1")
    text = text.replace("\n", "\r\n") if encoding == "crlf" else f"{text}é"
    path.write_bytes(text.encode("latin-1" if encoding == "crlf" else encoding, errors="replace"))
    return encoding


# -- running


def run(words: Sequence[str], folder: pathlib.Path, *, typed: str = "", limit_s: float = LIMIT_S) -> Ended:
    """The command in a fork of this process, in `folder`; what is left of its processes is killed at the end."""
    before = time.monotonic()
    streams = {name: folder.parent / f"{folder.name}.{name}" for name in ("in", "out", "err")}
    streams["in"].write_text(typed)
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _be(words, folder, streams)  # does not return
    descriptor = os.pidfd_open(pid)
    over = bool(select.select([descriptor], [], [], limit_s)[0])
    os.close(descriptor)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    out, err = (streams[name].read_text(errors="replace") for name in ("out", "err"))
    return Ended(code if over else None, out, err, time.monotonic() - before)


def _be(words: Sequence[str], folder: pathlib.Path, streams: dict[str, pathlib.Path]) -> None:
    """Becomes the command, and ends as the interpreter would."""
    code = 70
    try:
        os.setsid()
        for number, (name, mode) in enumerate((("in", os.O_RDONLY), ("out", os.O_WRONLY), ("err", os.O_WRONLY))):
            os.dup2(os.open(streams[name], mode | os.O_CREAT | os.O_TRUNC * (name != "in"), 0o600), number)
        os.chdir(folder)
        os.environ |= {"HOME": str(folder), "TMPDIR": str(folder)}
        for limit, most in (
            (resource.RLIMIT_AS, MEMORY_BYTES),
            (resource.RLIMIT_FSIZE, 2**28),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(limit, (most, most))
        sys.argv = list(words)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", errors="backslashreplace")  # noqa: SIM115
        code = _ends(main_of(words[0]))
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def main_of(module: str) -> Callable[[], None]:
    """A command's main, which reads sys.argv."""
    return importlib.import_module("jppo.report.__main__" if module == "jppo.report" else module).main


def _ends(command: Callable[[], Any]) -> int:
    """The exit code of a call, as the interpreter has it."""
    try:
        command()
    except SystemExit as e:
        if isinstance(e.code, int | None):
            return e.code or 0
        print(e.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


# -- the verdict


def judge(number: int, setup: pathlib.Path, folder: pathlib.Path, *, limit_s: float = LIMIT_S) -> str:
    """'accepted', 'refused', 'stopped' (a documented exit code 1), or what is wrong and how to repeat it."""
    rng = random.Random(number)
    case = make_case(rng, number)
    shutil.copytree(setup, folder, symlinks=True)
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nothing-here/x")
    (folder / "locked").mkdir(mode=0)
    with contextlib.suppress(PermissionError):  # only root makes devices; the real one may not be at risk
        os.mknod(folder / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    odd = any(word.startswith("--config.") for word in case.words[:-1])
    times = rng.choice((0, 0, 0, 1)) if odd else rng.choice((1, 1, 1, 2))  # few at once: the first fault ends a command
    done = [spoil(rng, folder, case.files) for _ in range(times if case.files else 0)]
    ended = run(case.words, folder, typed=case.typed, limit_s=limit_s)
    wrong = fault(case, ended)
    if (folder / "null").exists() and not (folder / "null").is_char_device():
        wrong = "a device was replaced by a file"
    shutil.rmtree(folder, ignore_errors=True)
    if wrong:
        stderr = "".join(f"\n    {line[:300]}" for line in f"{ended.stderr[-4000:]}".splitlines())
        return f"{wrong} ({ended.seconds:.0f} s): {case.words!r}\n  broken: {done}\n  stderr:{stderr}"
    return {0: "accepted", 1: "stopped"}.get(ended.code or 0, "refused")


def fault(case: Case, ended: Ended) -> str:
    """What is wrong with how a command ended; '' where nothing is."""
    # transformers warns of what it finds in a model's files, before jppo refuses them.
    lines = [line for line in ended.stderr.splitlines() if line.strip() and not line.startswith("[transformers] ")]
    if ended.code is None:
        return "no end within the time limit"
    if "Traceback (most recent call last)" in ended.stderr + ended.stdout:
        return "a traceback"
    if ended.code not in case.codes:
        return f"exit code {ended.code}"
    if any(ord(c) < 32 and c not in "\n\t\r" for c in ended.stderr + ended.stdout):
        return "a control character"
    if ended.code == 2 and not (lines and all(line.startswith("error: ") for line in lines)):  # a line for each fault
        return f"{len(lines)} lines of stderr"
    return ""


def try_all(first: int, cases: int, setup: pathlib.Path | None, *, limit_s: float = LIMIT_S) -> int:
    """Runs the cases; how many are bad. A `setup` that is there is used, one that is not is made and stays."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "JAX_PLATFORMS": "cpu"}
    os.environ |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": ""}
    jax.config.update("jax_platforms", "cpu")  # JAX, which is imported, has read its part of the environment before
    jax.config.update("jax_disable_most_optimizations", True)
    for number in range(len(COMMANDS)):
        main_of(make_case(random.Random(number), number).words[0])
    counts, bad = {"accepted": 0, "refused": 0, "stopped": 0}, 0
    home = pathlib.Path(tempfile.mkdtemp())  # no TemporaryDirectory: the end of a fork would remove it
    try:
        setup = setup.resolve() if setup else home / "setup"
        os.environ |= {"JAX_COMPILATION_CACHE_DIR": f"{setup}-compiled"}  # jppo keeps programs nowhere else then
        jax.config.update("jax_compilation_cache_dir", f"{setup}-compiled")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
        if not setup.exists():
            make_setup(home / "new")
            train_setup(home / "new")
            shutil.move(home / "new", setup)
        load_tokenizer(str(setup / "model"))  # imports transformers once, not in each case
        for number in range(first, first + cases):
            verdict = judge(number, setup, home / f"case-{number}", limit_s=limit_s)
            if verdict in counts:
                counts[verdict] += 1
            else:
                bad += 1
                print(escaped(f"case {number}: {verdict}"), flush=True)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    print(f"{cases} cases: {counts}, {bad} otherwise")
    return bad
