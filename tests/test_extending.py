"""docs/extending.md, followed to the letter in a copy of jppo: its changes fit, its tests pass, and so do the docs'."""

import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from tests.make import ROOT

PAGE = ROOT / "docs/extending.md"
ACCEPTED = """
import sys
from jppo import settings
for words in sys.argv[1:]:
    settings.check(settings.parse(["--config=jppo://gsm8k", *words.split()], "", settings.default())[0])
"""
MADE = ("runs", "site", "build", "dist", "data")  # what a checkout may hold besides


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of the page."""

    section: str
    kind: str  # diff, python, sh or '': commands
    file: str  # that was named last before it
    text: str


def blocks() -> list[Block]:
    found = []
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        file = ""
        for said, kind, text in re.findall(r"(.*?)^```(\w*)\n(.*?)^```$", section, re.S | re.M):
            named = re.findall(r"`((?:jppo|tests|docs|mine)/[\w/]+\.\w+|README\.md)`", said)
            file = named[-1] if named else file
            found.append(Block(section.splitlines()[0], kind, file, text))
    return found


def changed(before: str, diff: str) -> str:
    """The text with a block's changes; the lines that they go between must be there once."""
    lines = diff.splitlines()
    old = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "+")
    new = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "-")
    place = re.compile(f"^{re.escape(old)}", re.M)
    assert old.strip() and len(place.findall(before)) == 1, f"this must be there once, and is not:\n{old}"
    return place.sub(lambda _: new, before)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """jppo with all six additions, and the commands of the page."""
    folder = tmp_path_factory.mktemp("copy")
    for path in ROOT.iterdir():
        if path.is_dir() and path.name[0] != "." and path.name not in MADE:
            ignored = shutil.ignore_patterns("__pycache__", ".envs")
            shutil.copytree(path, folder / path.name, symlinks=True, ignore=ignored)
        elif path.is_file():
            shutil.copy(path, folder)
    commands = []
    for block in blocks():
        place = folder / block.file
        if block.kind == "diff":
            place.write_text(changed(place.read_text(encoding="utf-8"), block.text), encoding="utf-8")
        elif block.kind == "python":
            assert not place.exists(), place
            place.parent.mkdir(exist_ok=True)
            place.write_text(block.text, encoding="utf-8")
        elif block.kind == "":
            commands += block.text.splitlines()
    return folder, commands


def test_what_the_page_says_works(copy):
    folder, commands = copy
    tests = [word for command in commands for word in command.removeprefix("python -m pytest ").split()
             if command.startswith("python -m pytest ")]  # fmt: skip
    assert len(tests) == len(commands) == 5
    said = run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests], folder)
    assert " passed" in said and "skipped" not in said
    families = "from jppo.models import families; print(families.FAMILIES['seed_oss'].qkv_bias)"
    assert run([sys.executable, "-c", families], folder) == "True\n"
    given = re.findall(r"`(--config\.[^`]+)`", PAGE.read_text(encoding="utf-8"))
    assert "--config.algorithm.adv_estimator=mine/sign.py:sign --config.rollout.n=4" in given
    run([sys.executable, "-c", ACCEPTED, *given], folder)


def test_what_is_added_is_as_tidy_as_the_rest(copy):
    folder, _ = copy
    added = sorted({block.file for block in blocks() if block.file.endswith(".py")})
    assert "All checks passed!" in run([sys.executable, "-m", "ruff", "check", "--no-cache", *added], folder)
    assert "already formatted" in run([sys.executable, "-m", "ruff", "format", "--no-cache", "--check", *added], folder)


@pytest.mark.parametrize(
    "diff", ["+    pass\n", " def nowhere():\n+    pass\n", " import a\n+import b\n"], ids=["anywhere", "gone", "twice"]
)
def test_a_change_without_one_place_is_told(diff):
    with pytest.raises(AssertionError, match="must be there once"):
        changed("x\nimport a\nimport a\n", diff)


def run(command: list[str], folder: pathlib.Path) -> str:
    env = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
