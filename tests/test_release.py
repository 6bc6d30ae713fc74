"""What goes out: commands and their --help, versions and licence, and a wheel that knows its configs anywhere."""

import argparse
import csv
import importlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest
import yaml

import jppo
from jppo import __main__ as listing
from jppo import settings
from jppo.errors import UserError
from jppo.settings import configfile
from tests.make import ROOT, one_line

# Started by jppo itself, in processes of their own, or by make.
WORKERS = {
    "jppo.data.template_worker",
    "jppo.rollout.servers.launch",
    "jppo.plugins.sglang.guarded",
    "jppo.plugins.agents.gateway.forks",
    "jppo.rewards.pool_worker",
    "jppo.plugins.reward_models.convert_worker",
    "jppo.plugins.reward_models.torch_worker",
    "jppo.preflight.parity_worker",
    "jppo.plugins.forecast.compilers",
    "jppo.plugins.prove.tasks",
}
PYTHON = (sys.executable, "-m")


def test_every_program_is_a_listed_command_or_a_worker(capsys):
    found = set()
    for path in (ROOT / "jppo").rglob("*.py"):
        if re.search(r'^if __name__ == "__main__":$', path.read_text(encoding="utf-8"), re.M):
            found.add(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__"))
    assert found == {"jppo", *listing.COMMANDS, *WORKERS} and not WORKERS & set(listing.COMMANDS)
    done = subprocess.run([*PYTHON, "jppo"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [f"jppo.{name}" for name in re.findall(r"^  jppo (\S+)  +\S", done.stdout, re.M)] == list(listing.COMMANDS)
    listing.main(["--version"])
    assert capsys.readouterr().out == f"{jppo.__version__}\n"
    said = "error: 'trian' is no command; `jppo` lists them; did you mean 'train'?\n"
    assert one_line(capsys, listing.main, "trian") == said


def test_jppo_name_is_the_command_of_the_name(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", sys.argv)
    for name in ("eval", "evaluate", "jppo.evaluate"):
        assert listing.command_of(name) == "jppo.evaluate"
    assert listing.command_of("reward-model") == "jppo.reward_model"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"jppo": f"{listing.__name__}:{listing.main.__name__}"}
    assert "no file none.jsonl" in one_line(capsys, listing.main, "data.check", "none.jsonl")
    done = subprocess.run([*PYTHON, "jppo", "report", "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "python -m jppo.report" in done.stdout  # a package, whose __main__ is the command


@pytest.mark.parametrize("command", listing.COMMANDS)
def test_help_has_an_example_and_describes_each_option(command, monkeypatch, capsys):
    parsers, made = [], argparse.ArgumentParser.__init__

    def noted(self, *args, **kwargs):
        parsers.append(self)
        made(self, *args, **kwargs)

    monkeypatch.setattr(argparse.ArgumentParser, "__init__", noted)
    monkeypatch.setattr(sys, "argv", [command, "--help"])
    package = (ROOT / command.replace(".", "/")).is_dir()
    try:
        importlib.import_module(f"{command}.__main__" if package else command).main()
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
        assert parser.description and len(parser._actions) > 1
        assert not [action.option_strings or action.dest for action in parser._actions if not action.help]


START_EACH = """
import pathlib, runpy, sys
paths, (_, folder, others, *files) = list(sys.path), sys.argv
ours = {*others.split(","), *(pathlib.Path(file).stem for file in files)}
for file in files:
    for name in [name for name in sys.modules if name.split(".")[0] in ours]:
        del sys.modules[name]
    sys.path[:], sys.argv = [folder, *paths[1:]], [file, "--help"]
    try:
        runpy.run_path(file, run_name="__main__")
    except SystemExit as e:
        assert not e.code, file
"""


def test_scripts_start_from_any_folder(tmp_path):
    """One after the other in one process, which knows of this checkout jppo alone: the rest each adds to the path."""
    (tmp_path / "jppo").symlink_to(ROOT / "jppo")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    names = [path for path in sorted((ROOT / "scripts").glob("*.py")) if "argparse" in path.read_text()]
    ours = ",".join(path.stem for path in ROOT.iterdir() if path.is_dir())
    command = [sys.executable, "-c", START_EACH, ROOT / "scripts", ours, *names]
    done = subprocess.run(command, cwd="/", env=env, capture_output=True, text=True)
    assert len(names) >= 8 and (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("usage: ") >= len(names)


def test_versions_and_licence_are_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    first = re.search(r"^## \[(\d[^]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)[1]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "jppo.__version__"}
    assert jppo.__version__ == cited["version"] == first
    assert cited["license"] == project["project"]["license"] == "Apache-2.0"
    assert cited["cff-version"] == "1.2.0" and {"message", "title", "authors"} <= set(cited)  # what the format requires


def test_every_config_of_the_checkout_is_found_by_its_name():
    of_checkout = {path.stem: path for path in (ROOT / "configs").glob("*.py")}
    assert set(configfile.shipped_names()) == set(of_checkout) and len(of_checkout) > 3
    for name, path in of_checkout.items():
        found = pathlib.Path(configfile.locate(f"--config=jppo://{name}").removeprefix("--config="))
        assert found.samefile(path)
    for word in ("--config.model.path=jppo://gsm8k", "--config=configs/gsm8k.py"):
        assert configfile.locate(word) == word
    words = ["--config=jppo://quickstart:some/run", "--config.actor.lr=0.0"]
    config, _ = configfile.parse(words, "", settings.default())
    assert (config.trainer.run_dir, config.actor.lr) == ("some/run", 0.0)
    for name in ("nothing", "", "../configs/gsm8k"):
        with pytest.raises(UserError, match=r"jppo has no config .*; it has .*gsm8k.*quickstart"):
            configfile.parse([f"--config=jppo://{name}"], "", settings.default())


def build_wheel(source, top):
    """Builds the wheel of a source folder, unpacks it into top/site, and returns it."""
    command = [*PYTHON, "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", top / "out", source]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PIP_NO_INDEX": "1"})
    assert done.returncode == 0, done.stderr
    (wheel,) = (top / "out").glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(top / "site")
    return wheel


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """What a wheel of this checkout holds, in a folder of its own."""
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip("setuptools is older than the build needs")
    top = tmp_path_factory.mktemp("wheel")
    source = top / "source"
    source.mkdir()
    for name in ("jppo", "configs", "examples"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    wheel = build_wheel(source, top)
    assert wheel.name.startswith(f"jppo-{jppo.__version__}-")
    return top / "site"


@pytest.mark.slow
def test_the_wheel_holds_all_that_is_no_test(unpacked):
    def files(folder):
        walked = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        return {str(path.relative_to(folder)) for path in walked}

    wanted = files(ROOT / "jppo")
    wanted |= {f"{folder}/{name}" for folder in ("configs", "examples") for name in files(ROOT / folder)}
    assert files(unpacked / "jppo") == wanted
    (about,) = unpacked.glob("*.dist-info")
    metadata = (about / "METADATA").read_text()
    assert f"\nVersion: {jppo.__version__}\n" in metadata and "\nLicense-Expression: Apache-2.0\n" in metadata
    assert (about / "licenses/LICENSE").read_text() == (ROOT / "LICENSE").read_text()


TOOLS = (
    "from jppo.settings import configfile, default; import pathlib;"
    "c, _ = configfile.parse(['--config=jppo://agent_calculator'], '', default());"
    "print(pathlib.Path(c.rollout.multi_turn.tool_config_path).read_text())"
)

OPENED = """
import sys

import jppo
from jppo.examples import arithmetic

sys.argv[1:] = ["--out", "data"]
arithmetic.main()
lengths = dict(max_prompt_length=8, max_response_length=4)
with jppo.open("data/model", engine="inprocess", data=lengths, model=dict(init="random")) as m:
    print(m.logprobs(m.batch(m.sample(["1+1="], n=2))).shape)
"""
VERL = ["-m", "jppo.from_verl", "verl.sh"]


@pytest.mark.slow
def test_the_quickstart_starts_from_an_empty_folder(unpacked, tmp_path):
    env = os.environ | {"PYTHONPATH": str(unpacked), "JAX_PLATFORMS": "cpu"}
    few = ["--config.trainer.total_training_steps=1", "--config.rollout.name=inprocess", "--dry_run"]
    for words in (
        ["-m", "jppo.examples.arithmetic", "--out", "runs/quickstart/data"],
        ["-m", "jppo", "sft", "--config=jppo://quickstart_sft", *few[:1]],
        ["-m", "jppo", "train", "--config=jppo://quickstart", *few],
    ):
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, done.stderr
    assert "FAIL" not in done.stdout and '"run_dir": "runs/quickstart"' in done.stdout


@pytest.mark.slow
def test_an_installed_package_of_a_user_adds_a_logger(unpacked, tmp_path):
    shutil.copytree(ROOT / "examples/csv_logger", tmp_path / "source", ignore=shutil.ignore_patterns("__pycache__"))
    build_wheel(tmp_path / "source", tmp_path)
    path = os.pathsep.join(map(str, (unpacked, tmp_path / "site")))
    env = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    sft = ["-m", "jppo", "sft", "--config=jppo://quickstart_sft", "--config.trainer.logger=jsonl,csv"]
    for words in (
        ["-m", "jppo.examples.arithmetic", "--out", "runs/quickstart/data"],
        [*sft, "--config.trainer.total_training_steps=2"],
        [*sft, "--config.trainer.total_training_steps=3"],  # resumes
    ):
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, done.stderr
    run = tmp_path / "runs/quickstart/sft"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    with (run / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    losses = {int(row["step"]): float(row["value"]) for row in rows if row["name"] == "sft/loss"}
    assert losses == {line["step"]: line["sft/loss"] for line in lines if "sft/loss" in line} and len(losses) == 3
    assert {int(row["step"]) for row in rows} == {line["step"] for line in lines}


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, code, said",
    [
        (["-m", "jppo.train", "--help"], 0, "--config.actor.lr=1e-06"),
        (["-m", "jppo.sweep", "--config=jppo://quickstart", "--print"], 0, "run_dir=runs/sweep-quickstart/actor.lr="),
        (["-m", "jppo"], 0, "jppo train"),
        (["-m", "jppo", "prove", "gae", "--tasks=rlhf"], 2, "--stories_model=None must be the directory"),
        (["-m", "jppo.examples.multiplication", "--help"], 0, "--out"),
        (["-m", "jppo.train", "--config=jppo://quickstart:here"], 2, "here/sft/hf"),
        (VERL, 0, "--config=jppo://gsm8k \\\n    --config.actor.clip_ratio_high=0.2"),
        (["-c", OPENED], 0, "(2, 4)"),
        (["-c", TOOLS], 0, (ROOT / "configs/agent_calculator.yaml").read_text().strip()),
    ],
)
def test_an_installed_jppo_finds_its_configs_anywhere(unpacked, tmp_path, words, code, said):
    overrides = "algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=True"
    (tmp_path / "verl.sh").write_text(f"python3 -m verl.trainer.main_ppo {overrides}\n")
    env = os.environ | {"PYTHONPATH": str(unpacked)}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr
    assert said in (done.stderr if code else done.stdout) and (not code or done.stderr.count("\n") == 1)
