"""The notebooks in colab/: what they are as files, and that those for a CPU run from the first cell to the last."""

import ast
import importlib.util
import json
import os
import pathlib
import re

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = ROOT / "colab"
WITH_VLLM = "flax_weights_to_vllm"
ON_CPU = ("quickstart", "bring_your_own_reward", "look_inside_ppo", "your_own_loop", WITH_VLLM)
NAMES = (*ON_CPU, "gsm8k_ppo")
MOST = 100_000  # bytes of the outputs of one


def read(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def python(cell):
    """A code cell without the lines that are IPython's own."""
    if cell.source.startswith("%%"):
        return cell.source.partition("\n")[2]
    return re.sub(r"^(\s*)[%!].*$", r"\1pass", cell.source, flags=re.M)


FIRST = re.compile(r'SOURCE = "git\+\S+"\n')


@pytest.mark.parametrize("name", NAMES)
def test_the_first_cell_installs_jppo_and_no_path_is_relative(name):
    cells = [cell.source for cell in read(name).cells if cell.cell_type == "code"]
    assert FIRST.search(cells[0]) and "%pip install" in cells[0] and "{SOURCE}" in cells[0]
    assert not [cell for cell in cells if '".."' in cell or "sys.path" in cell]


def code(name):
    return [ast.parse(python(cell)) for cell in read(name).cells if cell.cell_type == "code"]


def test_the_folder_has_no_others():
    assert sorted(p.name for p in FOLDER.iterdir() if p.is_file()) == sorted(f"{name}.ipynb" for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_file_is_a_notebook_of_no_machine(name):
    text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    nbformat.validate(json.loads(text))
    assert not re.findall(r"/(?:tmp|work|home|root|usr|mnt)/", text)
    assert max(map(len, (line for cell in read(name).cells for line in cell.source.splitlines()))) <= 120


@pytest.mark.parametrize("name", ON_CPU)
def test_outputs_are_there_small_and_without_errors(name):
    cells = [cell for cell in read(name).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert len(json.dumps(outputs)) < MOST
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    pictures = [set(o.data) for o in outputs if o.output_type == "display_data"]
    assert pictures and all("image/png" in kinds for kinds in pictures)


def test_what_was_not_run_says_so():
    notebook = read("gsm8k_ppo")
    assert "has not been run on a GPU yet" in notebook.cells[0].source
    assert not [cell for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_defines_nothing_that_jppo_has(name):
    theirs = {
        node.name
        for path in (ROOT / "jppo").rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    assert "gae" in theirs
    own = {n.name for tree in code(name) for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    assert not own & (theirs - {"compute_score"})
    modules = {n.module for tree in code(name) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert name == "gsm8k_ppo" or any(module.startswith("jppo") for module in modules)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ON_CPU)
def test_it_runs_to_its_end(name, tmp_path):
    if name == WITH_VLLM and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: make setup")
    notebook = read(name)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}  # one device, as a reader has
    env |= {"JPPO_NOTEBOOK_SHORT": "1", "PYTHONPATH": str(ROOT)}
    client = NotebookClient(notebook, timeout=540, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=env)  # raises what a cell raises
    assert [o for cell in notebook.cells for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
    ended = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))
    expected = {"quickstart": "accuracy", "bring_your_own_reward": "after step   3"}
    expected["look_inside_ppo"] = "in the direction of their advantage"
    expected["your_own_loop"] = "PPO: 3 steps, metrics differ by at most"
    expected[WITH_VLLM] = "updates, each sampled from by vLLM"
    assert expected[name] in ended
