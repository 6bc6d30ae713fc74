"""Parts by name: jppo's own, user-defined ones by path or module, and those of installed packages."""

import collections
import importlib.metadata

import pytest

from jppo.errors import UserError
from jppo.registry import Registry, resolve

FILE = """
FIVE = 5
class Made:
    def __init__(self, gamma=0.0):
        self.gamma = gamma
def made(c, depth=3):
    return Made(c["gamma"] + depth)
def strange():
    return Made()
def failing(c):
    raise ValueError("no\\nluck")
def other(c):
    return 3
"""


@pytest.fixture
def parts(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    return Registry("things", {"counter": collections.Counter, "length": len}, returns=f"{file}:Made"), file


def test_own_parts_are_found_by_name(parts):
    registry, _ = parts
    assert list(registry) == ["counter", "length"] and "counter" in registry and "deque" not in registry
    assert registry.find("counter", "a.b") is collections.Counter and registry["length"] is len
    with pytest.raises(KeyError):
        registry["deque"]


def test_own_parts_may_be_the_dict_of_a_module_imported_when_used():
    registry = Registry("things", "os:no_such_dict")
    with pytest.raises(AttributeError, match="no_such_dict"):
        "x" in registry  # noqa: B015
    assert "PATH" in Registry("things", "os:environ")


def test_a_file_runs_once_until_it_changes(tmp_path):
    file, runs = tmp_path / "part.py", tmp_path / "runs"
    text = f"open({str(runs)!r}, 'a').write('x')\ndef part(): return 1\n"
    file.write_text(text)
    assert resolve(f"{file}:part", "a.b") is resolve(f"{file}:part", "c.d") and runs.read_text() == "x"
    file.write_text(text.replace("return 1", "return 22"))
    assert resolve(f"{file}:part", "a.b")() == 22 and runs.read_text() == "xx"


def test_a_part_of_an_installed_module(parts):
    registry, _ = parts
    assert registry.find("os.path:join", "a.b").__name__ == "join"


def test_entry_points_of_installed_packages_are_names(parts, monkeypatch):
    point = importlib.metadata.EntryPoint("joined", "os.path:join", "jppo.things")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point] if group == "jppo.things" else [])
    registry, _ = parts
    assert list(registry) == ["counter", "length", "joined"]
    assert registry.find("joined", "a.b").__name__ == "join"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("lenght", "a.b='lenght' is not known; it is one of 'counter', 'length', or PATH.py:NAME, or MODULE:NAME; did"),
        ("{}:mad", "defines no 'mad'; it has Made, made, strange, failing, other; did you mean 'made'?"),
        ("{}:FIVE", "'FIVE' is of type int; it must be a function or a class"),
        ("{}x:made", "must be PATH.py:NAME or MODULE:NAME"),
        ("/none/a.py:made", "no file /none/a.py"),
        ("no_such_module:made", "the module no_such_module cannot be imported (ModuleNotFoundError"),
    ],
)
def test_a_part_that_cannot_be_found_is_one_line(parts, spec, said):
    registry, file = parts
    with pytest.raises(UserError) as e:
        registry.find(spec.format(file), "a.b")
    assert said in str(e.value) and "\n" not in str(e.value) and str(e.value).startswith("a.b=")


def test_a_part_gets_the_settings(parts):
    registry, file = parts
    assert registry.make(f"{file}:made", "a.b", {"gamma": 0.5}).gamma == 3.5
    assert registry.make(f"{file}:made", "a.b", {"gamma": 0.5}, 1).gamma == 1.5


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("strange", r"raises TypeError: strange\(\) takes 0 positional arguments but 1 was given when called with"),
        ("failing", "raises ValueError: no when called with the settings; correct it"),
        ("other", r"returns int; it must return a .*mine\.py\.Made"),
    ],
)
def test_a_part_that_cannot_be_made_is_one_line(parts, name, said):
    registry, file = parts
    with pytest.raises(UserError, match=said) as e:
        registry.make(f"{file}:{name}", "a.b", {"gamma": 0.5})
    assert "\n" not in str(e.value)
