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

from jppo.preflight import accelerators

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


@pytest.mark.parametrize(
    "smi, device, plugin, extra",
    [
        ("550.54.15, 7.5", None, False, "cuda12"),  # Colab's T4
        ("580.65.06, 8.0", None, False, "cuda"),
        ("580.65.06, 8.0", None, True, "cuda12"),  # JAX for CUDA 12 is installed already
        ("580.65.06, 6.0", None, False, "cuda12"),  # Kaggle's P100
        ("580.65.06, 12.1", None, False, "cuda"),
        (None, "0x0063", False, "tpu"),  # v5e, of Colab and Kaggle
        (None, "0x0042", False, ""),  # Google's network card
        (None, None, False, ""),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_the_first_cell_finds_the_accelerator(name, tmp_path, monkeypatch, smi, device, plugin, extra):
    (tmp_path / "0").mkdir()
    (tmp_path / "0/vendor").write_text("0x1ae0\n" if device else "0x8086\n")
    (tmp_path / "0/device").write_text(f"{device or '0x1237'}\n")
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{smi}'\n" if smi else "#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda package: (plugin and package == "jax_cuda12_plugin") or None
    )
    first = next(cell for cell in read(name).cells if cell.cell_type == "code")
    lines = first.source.replace("/sys/bus/pci/devices", str(tmp_path)).partition("\n\n")[2]
    found = {}
    exec("import importlib.util, pathlib, re, subprocess\n" + lines.partition("\n\n")[0], found)
    assert found["EXTRA"] == extra


def test_first_cells_find_it_by_the_same_lines():
    firsts = [next(cell for cell in read(name).cells if cell.cell_type == "code").source for name in NAMES]
    assert len({source.split("\n\n")[1] for source in firsts}) == 1
    devices = ast.parse(firsts[0].split("\n\n")[1])
    (found,) = [
        ast.literal_eval(n.value) for n in devices.body if isinstance(n, ast.Assign) and n.targets[0].id == "TPUS"
    ]
    assert found == accelerators.TPUS


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
