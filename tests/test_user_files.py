"""Users' files as modules: equal names, names of the standard library, siblings, and pickle in other processes."""

import json
import os
import pickle
import subprocess
import sys

import pytest

from jppo import user_files
from jppo.registry import resolve
from jppo.rewards.pool import Pool

PART = """
import json
import helper
from tools import numbers

RUNS = []
RUNS.append(1)

class Part:
    folder = {folder!r}

def asked():
    import helper as late
    return helper.FOLDER, late.FOLDER, helper.of_part(), numbers.FOLDER, json.dumps([1])
"""


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Two folders with files of the same names, which import each other; one's name has a dot."""
    for name in ("one", "run.2"):
        folder = tmp_path / name
        (folder / "tools").mkdir(parents=True)
        (folder / "part.py").write_text(PART.format(folder=name))
        (folder / "helper.py").write_text(f"FOLDER = {name!r}\nimport part\ndef of_part(): return part.Part.folder\n")
        (folder / "json.py").write_text(f"import json\ndef text(): return json.dumps({name!r})\n")
        (folder / "tools/numbers.py").write_text("import helper\nfrom .names import *\nFOLDER = helper.FOLDER + NAME\n")
        (folder / "tools/names.py").write_text("NAME = '!'\n")
    for known in ("_plain", "_loaded", "_sources", "_packages"):
        monkeypatch.setattr(user_files, known, type(getattr(user_files, known))())
    before = set(sys.modules)
    yield tmp_path / "one", tmp_path / "run.2"
    for name in sys.modules.keys() - before:
        if name.partition(".")[0] in ("part", "helper", "tools"):
            del sys.modules[name]


def test_files_with_one_name_are_different_modules(folders):
    for folder in folders:
        part, name = resolve(f"{folder}/part.py:Part", "a.b"), folder.name
        assert part.folder == name and sys.modules[part.__module__].Part is part
        assert resolve(f"{folder}/part.py:asked", "a.b")() == (name, name, name, f"{name}!", "[1]")
    first, second = (resolve(f"{folder}/part.py:Part", "a.b") for folder in folders)
    assert (first.folder, second.folder) == ("one", "run.2")
    assert not {"part", "helper", "tools"} & sys.modules.keys()


def test_a_file_is_one_module_for_every_setting_and_every_file_that_imports_it(folders, monkeypatch):
    folder, _ = folders
    (folder / "link.py").symlink_to(folder / "part.py")
    part = resolve(f"{folder}/part.py:Part", "a.b")
    assert resolve(f"{folder}/helper.py:of_part", "c.d").__globals__["part"].Part is part
    assert resolve(f"{folder}/link.py:Part", "e.f") is part
    monkeypatch.chdir(folder)
    assert resolve("part.py:Part", "g.h") is part is resolve("./../one/part.py:Part", "i.j")
    assert sys.modules[part.__module__].RUNS == [1]


def test_a_file_that_python_finds_is_the_module_of_its_plain_name(folders, monkeypatch):
    folder, other = folders
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    assert resolve(f"{folder}/part.py:Part", "a.b") is resolve("part:Part", "c.d")
    assert resolve("part:Part", "c.d").__module__ == "part"
    assert resolve(f"{other}/part.py:Part", "a.b").folder == "run.2"
    assert resolve(f"{other}/part.py:asked", "a.b")()[:3] == ("run.2", "run.2", "run.2")


@pytest.mark.parametrize("stem", ["json", "math", "v1.2", "my-part", "jax", "test", "__main__", "jppo"])
def test_any_name_of_a_file_will_do(tmp_path, stem):
    (tmp_path / f"{stem}.py").write_text("import json, math\nclass Part:\n    x = json.dumps(math.floor(1.5))\n")
    part = resolve(f"{tmp_path}/{stem}.py:Part", "a.b")
    assert part.x == "1" and pickle.loads(pickle.dumps(part)) is part
    assert sys.modules["json"] is json


def test_a_library_finds_the_files_of_the_folder_by_plain_names(folders):
    text = "import importlib\ndef part(): return importlib.import_module('helper')\n"
    helper = user_files.load(folders[0] / "by_name.py", text).part()
    assert helper.FOLDER == "one" and helper.of_part is resolve(f"{folders[0]}/helper.py:of_part", "c.d")


def test_the_package_jppo_is_no_sibling(tmp_path):
    (tmp_path / "jppo").mkdir()
    (tmp_path / "jppo/__init__.py").write_text("raise ValueError('another jppo')\n")
    (tmp_path / "part.py").write_text("from jppo.registry import resolve as part\n")
    assert resolve(f"{tmp_path}/part.py:part", "a.b") is resolve


def test_files_change_within_a_second(tmp_path):
    file = tmp_path / "part.py"
    for number in range(3):
        file.write_text(f"def part(): return {number}\n")
        os.utime(file, ns=(10**18 + number, 10**18 + number))
        assert resolve(f"{file}:part", "a.b")() == number
    assert not (tmp_path / "__pycache__").exists()


def test_objects_of_users_files_reach_a_worker(folders, monkeypatch):
    """It starts in a folder with a file json.py, which is none of Python's."""
    monkeypatch.chdir(folders[0])
    function = folders[0] / "reward.py"
    function.write_text(
        "import part\ndef compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(type(extra_info[0]) is part.Part and type(extra_info[1]).folder == 'run.2')\n"
    )
    extra = [resolve(f"{folder}/part.py:Part", "a.b")() for folder in folders]
    sample = {"data_source": "", "text": "", "truth": "", "extra": extra, "turns": 1}
    pool = Pool(1, timeout_s=30.0, memory_bytes=2**33)
    try:
        target = ("function", str(function), "compute_score", function.read_text())
        reward = pool.submit(target, sample).result()
    finally:
        pool.close()
    assert (reward.score, reward.error) == (1.0, None)


def test_functions_of_users_files_reach_a_spawned_process(folders):
    program = folders[0] / "program.py"
    program.write_text(
        "import multiprocessing\nfrom jppo.registry import resolve\n"
        "if __name__ == '__main__':\n"
        f"    asked = [resolve(f'{{folder}}/part.py:asked', 'a.b') for folder in {list(map(str, folders))}]\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print([pool.apply(function)[0] for function in asked])\n"
    )
    ran = subprocess.run([sys.executable, "-P", program], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "['one', 'run.2']\n", ran.stderr


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
