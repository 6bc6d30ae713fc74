"""Options of a user's algorithm: names, types and defaults are its function's, on every way by which settings come."""

import dataclasses
import json

import pytest

from jppo import settings, sft, train, user_files
from jppo.errors import UserError
from jppo.settings import parts, plan
from tests.make import ROOT, one_line

FILE = """
from __future__ import annotations
from jppo.learner.algorithm import Algorithm

SEEN = []

def mine(scale: float, gamma=0.5, steps: int = 3, soft: bool = False, kind="mean", most: float | None = None):
    SEEN.append((scale, gamma, steps, soft, kind, most))
    return Algorithm(outcome=lambda view: view.score * scale)

def without():
    return Algorithm()

def untyped(x):
    return Algorithm()

def listed(x=(1, 2)):
    return Algorithm()

def unread(x: Nothing = 1):
    return Algorithm()

def misfit(x: int = 0.5):
    return Algorithm()

def broken(gamma=1.0):
    return Algorithm(outcome=lambda view: view.scores)

def raising(gamma=1.0):
    raise ValueError(f"gamma is {gamma}")

def other(gamma=1.0):
    return gamma
"""
KINDS = {"scale": float, "gamma": float, "steps": int, "soft": bool, "kind": str, "most": float}
VALUES = [True, 3, 2.5, "text", None, [1.0], {"a": 1}, float("nan"), 10**400]


@pytest.fixture
def file(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path / "mine.py"


def words(*options, extension=""):
    named = [f"--config.algorithm.options.{option}" for option in options]
    return [f"--config={ROOT}/configs/quickstart.py", f"--config.algorithm.extension={extension}", *named]


def parsed(*options, extension=""):
    return settings.typed(settings.parse(words(*options, extension=extension), "", settings.default())[0])


def test_a_command_lines_options_have_the_types_of_the_function(file):
    c = parsed("scale=2", "soft=true", "kind=3", "most=1e-3", extension=f"{file}:mine")
    expected = {"scale": 2.0, "gamma": 0.5, "steps": 3, "soft": True, "kind": "3", "most": 1e-3}
    assert c.algorithm.options == expected and hash(c) == hash(dataclasses.replace(c))
    assert all(type(c.algorithm.options[name]) is kind for name, kind in KINDS.items())
    assert json.loads(settings.dump(c))["algorithm"]["options"] == expected
    assert settings.by_name(c)["algorithm.options.gamma"] == 0.5
    assert settings.check(c) is None, "typed settings are right again"


@pytest.mark.parametrize("line", ["scale, c.algorithm.options.gamma = 1, 0.25", "update(scale=1, gamma=0.25)", ""])
def test_a_config_files_options_and_the_command_lines_before_them(file, tmp_path, line):
    options = f"c.algorithm.options.{line}" if line else "c.algorithm.options = dict(scale=1, gamma=0.25)"
    config = tmp_path / "config.py"
    config.write_text(
        "from jppo import settings\ndef get_config():\n    c = settings.recipe('quickstart')\n"
        f"    c.algorithm.extension = '{file}:mine'\n    {options}\n    return c\n"
    )
    given = [f"--config={config}", "--config.algorithm.options.scale=2.5"]
    c = settings.typed(settings.parse(given, "", settings.default())[0])
    assert (c.algorithm.options["scale"], c.algorithm.options["gamma"]) == (2.5, 0.25)


def test_a_sweeps_options(file, tmp_path):
    config = tmp_path / "config.py"
    config.write_text(
        "from jppo import settings\ndef get_config():\n    c = settings.recipe('quickstart')\n"
        f"    c.algorithm.extension = '{file}:mine'\n    return c\n"
        "def sweep(add):\n    for scale in (1, 2.5):\n        add(**{'algorithm.options.scale': scale})\n"
        "    add(**{'algorithm.options.scale': 1.0, 'algorithm.options.kind': 'sum'})\n"
    )
    runs, _ = plan.plan([f"--config={config}"], tmp_path / "out")
    assert [run.values["algorithm.options.scale"] for run in runs] == [1.0, 2.5, 1.0]
    assert plan.find_differing(runs) == ["algorithm.options.scale", "algorithm.options.kind"]
    config.write_text(config.read_text().replace("'algorithm.options.kind': 'sum'", "'algorithm.options.kid': 'sum'"))
    with pytest.raises(UserError, match=r"sweep, run .* has no option 'kid'; .*; did you mean 'kind'"):
        plan.plan([f"--config={config}"], tmp_path / "out")


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_every_value_of_another_type_is_one_line(config, file, name, value):
    config.algorithm.extension = f"{file}:mine"
    config.algorithm.options.update({"scale": 1.0} | {name: value})
    kind = KINDS[name]
    fits = type(value) is kind or (kind is float and value == 3) or (value is None and name == "most")
    fits = fits and value == value
    if fits:
        assert settings.typed(config).algorithm.options[name] == value
        return
    with pytest.raises(
        UserError, match=rf"algorithm\.options\.{name}.*=.* (must be an? {kind.__name__}|no option)"
    ) as e:
        settings.check(config)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("name", ["gama", "Gamma", "n", "steps_", "extension", "x" * 50])
def test_every_other_name_is_one_line_with_the_right_ones(capsys, file, name):
    given = words("scale=1", f"{name}=1", extension=f"{file}:mine")
    line = one_line(capsys, train.main, *given, "--dry_run")
    has = "scale (float), gamma (float), steps (int), soft (bool), kind (str), most (float)"
    assert (
        f"algorithm.options.{name}='1': algorithm.extension='{file}:mine' has no option {name!r}; it has {has}" in line
    )
    assert ("did you mean 'gamma'?" in line) == (name in ("gama", "Gamma"))


@pytest.mark.parametrize(
    ("options", "name", "said"),
    [
        ((), "mine", "algorithm.options.scale is missing: algorithm.extension='{}:mine' has no default"),
        (("scale=one",), "mine", "algorithm.options.scale='one' must be a float"),
        (("scale=1", "steps=1.5"), "mine", "algorithm.options.steps='1.5' must be an int, as the default 3 is"),
        (("gamma=1",), "", "algorithm.options.gamma is read only with algorithm.extension set"),
        (("gamma",), "mine", "is not understood; options of algorithm.extension are given as --config."),
        (("a.b=1",), "mine", "is not understood; options of algorithm.extension are given as --config."),
        (("gamma=1",), "without", "has no option 'gamma'; it has none"),
        (("x=1",), "untyped", "its option 'x' has no type of an option; annotate it as a float, int, bool or str"),
        ((), "listed", "its option 'x' has no type of an option"),
        ((), "unread", "its signature cannot be read (NameError: name 'Nothing' is not defined)"),
        ((), "misfit", "the default 0.5 of its option 'x' is no int"),
        ((), "broken", "a function of it, traced by JAX, raises AttributeError: 'EpisodeView' object has no attribute"),
        ((), "raising", "raises ValueError: gamma is 1.0 when called with the options"),
        ((), "other", "returns float; it must return a jppo.learner.algorithm.Algorithm"),
        ((), "mein", "defines no 'mein'"),
    ],
)  # fmt: skip
def test_an_option_or_an_extension_that_cannot_be_is_one_line_at_the_start(capsys, file, options, name, said):
    extension = f"{file}:{name}" if name else ""
    line = one_line(capsys, train.main, *words(*options, extension=extension), "--dry_run")
    assert line.startswith("error: ") and said.format(file) in line
    assert not name or f"algorithm.extension='{extension}'" in line or "algorithm.options." in line


@pytest.mark.parametrize("spec", ["gae", "mine.py", "nowhere.py:mine"])
def test_a_place_that_is_none_is_one_line(capsys, spec):
    assert f"algorithm.extension={spec!r}" in one_line(capsys, train.main, *words(extension=spec))


def test_every_fault_of_the_options_is_listed(config, file):
    config.algorithm.extension = f"{file}:mine"
    config.algorithm.options.update(gama=1.0, steps="many")
    with pytest.raises(UserError) as e:
        settings.check(config)
    assert [fault.partition(" ")[0] for fault in e.value.faults] == [
        *("algorithm.options.gama=1.0:", "algorithm.options.steps='many'", "algorithm.options.scale")
    ]


def test_other_commands_have_no_options(capsys):
    given = [f"--config={ROOT}/configs/quickstart_sft.py", "--config.algorithm.options.gamma=1"]
    assert "there is no setting 'algorithm'" in one_line(capsys, sft.main, *given)
    line = one_line(capsys, train.main, f"--config={ROOT}/configs/quickstart.py", "--config.algorithm.options=1")
    assert "--config.algorithm.options is a section; name a setting of it" in line


def test_the_function_gets_all_options(file, config):
    config.algorithm.extension = f"{file}:mine"
    config.algorithm.options.update(scale=1, most=2.0)
    assert parts.estimator(settings.typed(config)).scored
    assert set(user_files.load(file).SEEN) == {(1.0, 0.5, 3, False, "mean", 2.0)}
