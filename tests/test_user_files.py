"""Users' files as modules: equal names, names of the standard library, files of their folder."""

import json
import os
import pickle
import sys

import pytest

from jppo import user_files
from jppo.errors import UserError
from jppo.registry import resolve
from jppo.rewards.pool import Pool


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    """Modules and folders of a test end with it."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in sys.modules.keys() - before:
        if name.startswith("user_") or name == "a_sibling":
            del sys.modules[name]


def test_files_with_one_name_are_different_modules(tmp_path):
    for folder in ("one", "run.2"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "part.py").write_text(f"class Part:\n    folder = {folder!r}\n")
    parts = [resolve(f"{tmp_path}/{folder}/part.py:Part", "a.b") for folder in ("one", "run.2")]
    assert [part.folder for part in parts] == ["one", "run.2"]
    for part in parts:
        assert sys.modules[part.__module__].Part is part and pickle.loads(pickle.dumps(part)) is part


def test_a_file_is_one_module_for_every_setting(tmp_path, monkeypatch):
    (tmp_path / "part.py").write_text("class Part: pass\n")
    (tmp_path / "link.py").symlink_to(tmp_path / "part.py")
    part = resolve(f"{tmp_path}/part.py:Part", "a.b")
    monkeypatch.chdir(tmp_path)
    assert part is resolve("part.py:Part", "c.d") is resolve(f"./../{tmp_path.name}/link.py:Part", "e.f")


@pytest.mark.parametrize("stem", ["json", "math", "v1.2", "my-part", "jax", "test", "__main__", "jppo"])
def test_any_name_of_a_file_will_do(tmp_path, stem):
    (tmp_path / f"{stem}.py").write_text("import json, math\nclass Part:\n    x = json.dumps(math.floor(1.5))\n")
    part = resolve(f"{tmp_path}/{stem}.py:Part", "a.b")
    assert part.x == "1" and pickle.loads(pickle.dumps(part)) is part
    assert sys.modules["json"] is json


def test_a_file_imports_those_of_its_folder(tmp_path):
    (tmp_path / "a_sibling.py").write_text("x = 3\n")
    (tmp_path / "part.py").write_text("import a_sibling\ndef part(): return a_sibling.x\n")
    assert resolve(f"{tmp_path}/part.py:part", "a.b")() == 3


def test_files_change_within_a_second(tmp_path):
    file = tmp_path / "part.py"
    for number in range(3):
        file.write_text(f"def part(): return {number}\n")
        os.utime(file, ns=(10**18 + number, 10**18 + number))
        assert resolve(f"{file}:part", "a.b")() == number
    assert not (tmp_path / "__pycache__").exists()


def test_a_file_that_raises_runs_anew(tmp_path):
    file = tmp_path / "part.py"
    file.write_text("raise ValueError('no')\n")
    for _ in range(2):
        with pytest.raises(UserError, match=r"part\.py cannot be run \(ValueError: no"):
            resolve(f"{file}:part", "a.b")


def test_a_file_that_loads_itself_gets_its_module_as_it_is(tmp_path):
    file = tmp_path / "part.py"
    file.write_text(
        "from jppo.registry import resolve\ndef part(): return 1\nsame = resolve(f'{__file__}:part', 'a.b')\n"
    )
    assert resolve(f"{file}:same", "a.b") is resolve(f"{file}:part", "a.b")


def test_a_worker_starts_in_a_folder_with_a_file_json_py(tmp_path, monkeypatch):
    """It is none of Python's."""
    (tmp_path / "json.py").write_text("raise ValueError\n")
    monkeypatch.chdir(tmp_path)
    function = tmp_path / "reward.py"
    function.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 2.0\n")
    sample = {"data_source": "", "text": "", "truth": "", "extra": None, "turns": 1}
    pool = Pool(1, timeout_s=30.0, memory_bytes=2**33)
    try:
        target = ("function", str(function), "compute_score", function.read_text())
        reward = pool.submit(target, sample).result()
    finally:
        pool.close()
    assert (reward.score, reward.error) == (2.0, None)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("def f(): x = 1\nclass C: y = 2\nz = w = 3", "f C z w"),
        ("import os.path, json as j\nfrom sys import path as p", "os j p"),
        ("if 1:\n    try:\n        import a\n    except ImportError:\n        a = None", "a"),
        ("for b in (): pass\nwith open() as c: d = 1", "b c d"),
        ("def f():\n    global g\n    g = 1\nf()", "f g"),
        ("x: int\n(y := 1)\nprint(z)", "x y"),
        ("", ""),
        ("from os import *", None),
        ("globals()['f'] = 1", None),
        ("def __getattr__(name): return 1", None),
        ("def f(): exec('g = 1', vars())", None),
    ],
)  # fmt: skip
def test_the_names_of_a_file_are_known_without_a_run(text, names):
    found = user_files.names_in(text, "part.py")
    assert (found if found is None else set(found)) == (names if names is None else set(names.split()))
    if names is not None:
        with pytest.raises(SyntaxError):
            user_files.names_in(text + "\ndef f(:", "part.py")
