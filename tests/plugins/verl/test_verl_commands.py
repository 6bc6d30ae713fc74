"""Commands of verl's pages and scripts: each passes jppo's checks, or is refused for its reason."""

import pathlib
import re
import shlex

import pytest

from jppo import from_verl, settings
from jppo.errors import UserError
from jppo.settings import table

FILE = pathlib.Path(__file__).parent / "verl_commands.sh"
START, *BLOCKS = re.split(r"(?m)^### (.*)\n", FILE.read_text())
COMMANDS = dict(zip(BLOCKS[::2], BLOCKS[1::2], strict=True))
USED_UP = ("unknown", "missing")


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(FILE.parents[3])


def expected(block: str) -> tuple[set[str], str, dict[str, str]]:
    """The keys that are not supported, the beginning of the refusal, and settings."""
    lines = [line.removeprefix("## ") for line in block.splitlines() if line.startswith("## ")]
    kinds = {"not supported": "", "refused": ""} | dict(line.split(": ", 1) for line in lines if ": " in line[:16])
    named = dict(line.split("=", 1) for line in lines if not line.startswith(tuple(kinds)))
    return set(kinds["not supported"].split()), kinds["refused"], named


def test_there_are_enough_of_them():
    assert len(COMMANDS) >= 60


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_translated_or_refused(name, tmp_path, environment):
    lacking, refused, named = expected(COMMANDS[name])
    script = tmp_path / "run.sh"
    script.write_text(START + COMMANDS[name])
    try:
        command, found = from_verl.translated_command(from_verl.read_arguments([str(script)]), "0.9.1")
    except UserError as e:
        assert refused and str(e).removeprefix("jppo refuses the settings: ").startswith(refused), str(e)
        return
    assert not refused
    lost = {line.text.lstrip("+").partition("=")[0] for line in found.lines if line.kind in USED_UP}
    assert lost == lacking and [line for line in found.lines if line.kind == "unknown"] == []
    _, _, module, *words = shlex.split(command.replace("\\\n", ""))
    default = settings.sft_default() if module == "jppo.sft" else settings.default()
    config, _ = settings.parse(words, "", default)
    assert {setting: str(table.by_name(config)[setting]) for setting in named} == named
