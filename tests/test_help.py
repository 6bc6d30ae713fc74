"""--help of every command: what it does, an example that can be typed, and a word about each option."""

import argparse
import importlib
import os
import pathlib
import re
import subprocess
import sys

import pytest

from jppo import __main__ as listing

ROOT = pathlib.Path(__file__).resolve().parents[1]


def entry(command: str):
    package = (ROOT / command.replace(".", "/")).is_dir()
    return importlib.import_module(f"{command}.__main__" if package else command).main


@pytest.mark.parametrize("command", listing.COMMANDS)
def test_help_has_an_example_and_describes_each_option(command, monkeypatch, capsys):
    parsers, made = [], argparse.ArgumentParser.__init__

    def noted(self, *args, **kwargs):
        parsers.append(self)
        made(self, *args, **kwargs)

    monkeypatch.setattr(argparse.ArgumentParser, "__init__", noted)
    monkeypatch.setattr(sys, "argv", [command, "--help"])
    try:
        entry(command)()
    except SystemExit as e:
        assert e.code in (None, 0)
    said = capsys.readouterr().out
    about = re.sub(r"\Ausage:.*?\n\n", "", said, flags=re.S)
    assert len(about.split()) > 20
    examples = re.findall(rf"python -m {re.escape(command)} ([^\n`]+)", about)
    assert any(re.match(r"(--[\w.]+[= ])?[a-z][\w./=-]*", example) for example in examples), examples
    ours = [parser for parser in parsers if parser.prog.endswith(command)]
    assert ours or "--config.actor.lr" in said or "--config.optim.lr" in said or command == "jppo.from_verl"
    for parser in ours:
        assert parser.description
        assert not [action.option_strings or action.dest for action in parser._actions if not action.help]
        assert len(parser._actions) > 1


def test_scripts_start_from_any_folder(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    names = [path for path in sorted((ROOT / "scripts").glob("*.py")) if "argparse" in path.read_text()]
    started = [
        subprocess.Popen([sys.executable, path, "--help"], cwd=tmp_path, env=env, stderr=-1, stdout=-1, text=True)
        for path in names
    ]
    ended = {path.name: (one.communicate()[1], one.returncode) for path, one in zip(names, started, strict=True)}
    assert len(ended) >= 8 and ended == dict.fromkeys(ended, ("", 0))
