"""Commands that pages, notebooks and docstrings tell users to type are understood by the programs that they name.

Each program runs until its arguments are parsed and its settings checked. Where a page has a name for a config of the
reader, as FILE or config.py, one of jppo takes its place; variables have the values of their block.
"""

import argparse
import ast
import contextlib
import importlib.util
import json
import os
import pathlib
import re
import runpy
import shlex
import shutil
import subprocess
import sys

import pytest

from jppo import settings
from jppo.__main__ import command_of
from jppo.settings import plan, table
from tests.make import ROOT, write_lines

PAGES = [*ROOT.glob("*.md"), ROOT / "benchmarks/README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("colab/*.ipynb")]
FOLDERS = ("jppo", "configs", "examples", "scripts", "benchmarks")
SOURCES = [path for folder in FOLDERS for path in (ROOT / folder).glob("**/*.py")]
FILES = sorted(path for path in (*PAGES, *SOURCES) if path.name != "CHANGELOG.md" and ".envs" not in path.parts)
CONFIG = "--config=jppo://gsm8k"
READERS = {"...", *(f"--config={name}" for name in ("FILE", "CONFIG", "config.py", "configs/NAME.py", "jppo://NAME"))}


class Understood(BaseException):
    """A program takes its arguments; no `except Exception` ends this."""


def shell_lines(text: str) -> list[str]:
    """The lines of a block of shell, continued lines joined, with the values of its variables."""
    values, lines = {}, []
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if assigned := re.fullmatch(r'(\w+)="([^"]*)"', line):
            values[assigned[1]] = assigned[2]
        lines.append(re.sub(r"\$\{?(\w+)\}?", lambda name: values.get(name[1], name[0]), line))
    return lines


def blocks(path: pathlib.Path) -> list[str]:
    """The lines of a file's blocks of code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        values = {"{RECIPE}": "small_card", "{DTYPES}": "--config.rollout.dtype=float16"}  # of gsm8k_ppo, on a T4
        lines = [line[1:] for cell in cells for line in cell.splitlines() if line.startswith("!")]
        return [re.sub(r"\{[A-Z]+\}", lambda name: values[name[0]], line) for line in lines]
    if path.suffix == ".py":
        lines = shell_lines(ast.get_docstring(ast.parse(text)) or "")
        return [line.strip() for line in lines if line.startswith("    ") or line.startswith("python ")]
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.S | re.M)
    return [line for kind, code in found if kind in ("", "sh", "bash") for line in shell_lines(code)]


def quoted(path: pathlib.Path) -> list[str]:
    """What stands between backticks and has arguments."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    return re.findall(r"`([^`\n]+ -[^`\n]+|--config\.[^`\n]+=[^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))


def commands(path: pathlib.Path) -> list[tuple[str, tuple[str, ...]]]:
    """Programs of jppo, as a module or a file, with the arguments that the file gives them."""
    found = programs(blocks(path))
    if path.suffix != ".ipynb":
        found += [command for command in programs(quoted(path)) if command[1]]
    return [command for command in dict.fromkeys(found) if not any(map(placeholder, command[1]))]


def programs(lines: list[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Programs of jppo that lines of shell run, with their arguments."""
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):  # prose with one quote
            found += map(program, parts(shlex.split(line, comments=True)))
    return [command for command in found if command is not None]


def placeholder(word: str) -> bool:
    """Whether a word shows the form of arguments."""
    return (
        word.startswith("[") or "SECTION.NAME" in word or bool(re.fullmatch(r"--config\.[\w.]+=(|\.\.\.|[A-Z])", word))
    )


def parts(words: list[str]) -> list[list[str]]:
    """The commands of a line without their redirections."""
    out: list[list[str]] = [[]]
    for word in words:
        if word in ("&&", "||", "|", "do", "then") or word.endswith(";"):
            out[-1] += [word[:-1]] if word.endswith(";") else []
            out.append([])
        else:
            out[-1].append(word)
    return [part[: next((i for i, word in enumerate(part) if re.match(r"\d?[<>]", word)), len(part))] for part in out]


def program(words: list[str]) -> tuple[str, tuple[str, ...]] | None:
    """The program of jppo that a command runs, after variables and launchers, and its arguments."""
    if words and all(re.match(r"--config\.[\w.]+=", word) for word in words):
        return "jppo.train", (CONFIG, *words)
    for i, word in enumerate(words):
        name, *rest = words[i + 1 :] or [""]
        if re.fullmatch(r"(\S*/)?python3?", word) and name == "-m":
            name, *rest = rest
            named = command_of(name) is not None or re.match(r"(jppo\.)?examples\.|jppo$", name)
            return (name, tuple(rest)) if named else None
        if re.fullmatch(r"(\S*/)?python3?", word) and re.match(r"(scripts|benchmarks|examples)/", name):
            return name, tuple(rest)
        if word == "jppo" and i == 0 and command_of(name) is not None:
            return command_of(name), tuple(rest)
        if word == "scripts/train.sh" and i == 0:
            return word, tuple(words[1:])
    return None


@pytest.fixture
def understand(monkeypatch, capsys):
    """Runs a program until its arguments are understood; fails with the error that a user would read."""

    def ending(function):
        def ended(*given, **options):
            function(*given, **options)
            raise Understood

        return ended

    def parse_known(*given, **options):
        args, rest = parse_known_args(*given, **options)
        if "jppo.tinker" in sys.argv[0]:
            known = table.by_name(settings.default())
            assert all(word.startswith("--") and word[2:].split("=")[0] in known for word in rest), rest
            raise Understood
        if "jppo.serve" in sys.argv[0] and "model" in args:  # the rest is vLLM's
            raise Understood
        return args, rest

    parse_known_args = argparse.ArgumentParser.parse_known_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", ending(argparse.ArgumentParser.parse_args))
    monkeypatch.setattr(settings, "typed", ending(settings.typed))
    monkeypatch.setattr(plan, "plan", ending(plan.plan))
    monkeypatch.chdir(ROOT)

    def run(name, arguments):
        words = [CONFIG if word in READERS else word for word in arguments]
        monkeypatch.setattr(sys, "argv", [name, *words])
        if name.endswith(".py"):
            monkeypatch.syspath_prepend(ROOT / name.rpartition("/")[0])
        try:
            (runpy.run_path if name.endswith(".py") else runpy.run_module)(name, run_name="__main__")
            ended = 0
        except Understood:
            return
        except SystemExit as e:
            ended = e.code
        if ended:
            pytest.fail(f"{shlex.join([name, *words])}\n{capsys.readouterr().err}", pytrace=False)

    return run


def runs_here(name: str, arguments: tuple[str, ...]) -> bool:
    """Whether a program gets to its arguments here: it takes some, and its packages and the reader's file are here."""
    if name.endswith(".py") and "ArgumentParser" not in (ROOT / name).read_text(encoding="utf-8"):
        assert not arguments, name
        return False
    if name == "examples.verifiers_env":  # tests/plugins/agents/test_verifiers.py installs the package
        return importlib.util.find_spec("verifiers") is not None
    if name == "jppo.from_verl" and any(word.endswith((".sh", "/words")) for word in arguments):
        return False  # tests/plugins/verl/test_from_verl.py has such files
    if name == "jppo.critic_fit":  # tests/plugins/critic_fit/ has a run's folder
        return False
    written = r"=(mine/\w+|optimizers)\.py:"  # by tests/test_extending.py and test_page_code.py
    return not any(re.search(written, word) for word in arguments)


WITH_COMMANDS = [path for path in FILES if commands(path)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of runpy: the module is imported already
@pytest.mark.parametrize("path", WITH_COMMANDS, ids=[str(path.relative_to(ROOT)) for path in WITH_COMMANDS])
def test_its_commands_are_understood(path, understand, tmp_path):
    for name, arguments in commands(path):
        if name == "scripts/train.sh":
            run_train_sh(tmp_path, arguments)
        elif runs_here(name, arguments):
            understand(name, arguments)


def run_train_sh(folder, arguments):
    """Prints the command of scripts/train.sh in a folder with the reader's files, and reads it."""
    for name in ("train.jsonl", "test.jsonl"):
        write_lines(folder / name, [{"prompt": "1+1=", "ground_truth": "2", "data_source": "arithmetic"}])
    (folder / "reward.py").write_text("def compute_score(*given): return 1.0\n")
    (folder / "DIR").mkdir(exist_ok=True)
    (folder / "DIR/config.json").write_text("{}")
    command = [ROOT / "scripts/train.sh", "--print_only", *arguments]
    env = {"HOME": str(folder), "PATH": os.environ["PATH"], "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if "--help" not in arguments:
        words = shlex.split(done.stdout)
        config, _ = settings.parse(words[words.index("jppo.train") + 1 :], "", settings.default())
        settings.check(config)


MAKE = {line for path in FILES for line in blocks(path) + quoted(path) if re.match(r"make [a-z]", line)}
MAKE |= {f"make {target}" for target in re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M)}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_the_commands_of_make_are_understood(understand):
    lines = {shlex.join(shlex.split(line.split("&&")[0].split(";")[0], comments=True)) for line in MAKE}
    assert {"make quickstart", "make smollm2 TASK=instructions", "make test"} <= lines
    found = set()
    # `make test` hands its own options and depth to the commands below it.
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    for line in sorted(lines):
        if "$" not in line and "(" not in line:
            done = subprocess.run([*shlex.split(line), "-n"], cwd=ROOT, env=env, capture_output=True, text=True)
            assert done.returncode == 0, f"{line}: {done.stderr}"
            found |= set(programs(shell_lines(done.stdout)))
    assert len(found) > 10
    for command in sorted(found):
        understand(*command)
