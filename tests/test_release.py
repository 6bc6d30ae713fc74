"""What goes out: the list of commands, versions and licence, and a wheel that knows its configs anywhere."""

import importlib
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
from jppo.settings import commandline, configfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Started by jppo itself, in processes of their own, or by make.
WORKERS = {
    "jppo.data.template_worker",
    "jppo.rollout.servers.launch",
    "jppo.rollout.sglang.guarded",
    "jppo.agent.gateway.forks",
    "jppo.rewards.pool_worker",
    "jppo.rewards.model.convert_worker",
    "jppo.rewards.model.torch_worker",
    "jppo.preflight.parity_worker",
    "jppo.forecast.compilers",
}
PYTHON = (sys.executable, "-m")


def runnable():
    """Every module of jppo that is a program."""
    found = set()
    for path in (ROOT / "jppo").rglob("*.py"):
        if re.search(r'^if __name__ == "__main__":$', path.read_text(encoding="utf-8"), re.M):
            found.add(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__"))
    return found


def test_every_program_is_a_listed_command_or_a_worker():
    assert runnable() == {"jppo", *listing.COMMANDS, *WORKERS}
    assert not WORKERS & set(listing.COMMANDS)


@pytest.mark.parametrize("command", listing.COMMANDS)
def test_a_command_says_what_it_does(command, monkeypatch, capsys):
    package = (ROOT / command.replace(".", "/")).is_dir()
    module = importlib.import_module(f"{command}.__main__" if package else command)
    monkeypatch.setattr(sys, "argv", [command, "--help"])
    code = 0
    try:
        module.main()
    except SystemExit as e:
        code = e.code
    said = capsys.readouterr().out
    assert code in (None, 0) and f"python -m {command}" in said and "--" in said


def test_jppo_lists_them():
    done = subprocess.run([*PYTHON, "jppo"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.findall(r"^  python -m (\S+)  +\S", done.stdout, re.M) == list(listing.COMMANDS)
    assert jppo.__version__ in done.stdout


def test_jppo_takes_no_more(capsys):
    listing.main(["--version"])
    assert capsys.readouterr().out == f"{jppo.__version__}\n"
    with pytest.raises(SystemExit) as done:
        listing.main(["train"])
    assert done.value.code == 2 and capsys.readouterr().err.startswith("error: 'train' is not understood")


def test_versions_and_licence_are_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    first = re.search(r"^## \[(\d[^]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)[1]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "jppo.__version__"}
    assert jppo.__version__ == cited["version"] == first
    assert cited["license"] == project["project"]["license"] == "Apache-2.0"
    assert cited["cff-version"] == "1.2.0" and {"message", "title", "authors"} <= set(cited)  # what the format requires
    licence = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in licence and "END OF TERMS AND CONDITIONS" in licence


def test_every_config_of_the_checkout_is_found_by_its_name():
    of_checkout = {path.stem: path for path in (ROOT / "configs").glob("*.py")}
    assert set(configfile.shipped_names()) == set(of_checkout) and len(of_checkout) > 3
    for name, path in of_checkout.items():
        found = pathlib.Path(configfile.locate(f"--config=jppo://{name}").removeprefix("--config="))
        assert found.samefile(path)


def test_a_shipped_config_takes_its_argument_and_overrides():
    words = ["--config=jppo://quickstart:some/run", "--config.actor.lr=0.0"]
    config, _ = commandline.parse(words, "", settings.default())
    assert (config.trainer.run_dir, config.actor.lr) == ("some/run", 0.0)


@pytest.mark.parametrize("word", ["--config=jppo://nothing", "--config=jppo://", "--config=jppo://../configs/gsm8k"])
def test_an_unknown_name_is_told_the_known_ones(word):
    with pytest.raises(settings.UserError, match=r"jppo has no config .*; it has .*gsm8k.*quickstart"):
        commandline.parse([word], "", settings.default())


def test_only_the_config_is_looked_up():
    assert configfile.locate("--config.model.path=jppo://gsm8k") == "--config.model.path=jppo://gsm8k"
    assert configfile.locate("--config=configs/gsm8k.py") == "--config=configs/gsm8k.py"


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """What a wheel of this checkout holds, in a folder of its own."""
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip("setuptools is older than the build needs")
    top = tmp_path_factory.mktemp("wheel")
    source = top / "source"
    source.mkdir()
    for name in ("jppo", "configs"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [*PYTHON, "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", top / "out", source]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PIP_NO_INDEX": "1"})
    assert done.returncode == 0, done.stderr
    (wheel,) = (top / "out").glob("*.whl")
    assert wheel.name.startswith(f"jppo-{jppo.__version__}-")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(top / "site")
    return top / "site"


@pytest.mark.slow
def test_the_wheel_holds_all_that_is_no_test(unpacked):
    def files(folder):
        walked = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        return {str(path.relative_to(folder)) for path in walked}

    wanted = files(ROOT / "jppo") | {f"configs/{name}" for name in files(ROOT / "configs")}
    assert files(unpacked / "jppo") == wanted
    (about,) = unpacked.glob("*.dist-info")
    metadata = (about / "METADATA").read_text()
    assert f"\nVersion: {jppo.__version__}\n" in metadata and "\nLicense-Expression: Apache-2.0\n" in metadata
    assert (about / "licenses/LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, said",
    [
        (["jppo.train", "--help"], "--config.actor.lr=1e-06"),
        (["jppo.sweep", "--config=jppo://quickstart", "--print"], "run_dir=runs/sweep-quickstart/actor.lr=0.0001"),
        (["jppo"], "python -m jppo.train"),
    ],
)
def test_an_installed_jppo_finds_its_configs_anywhere(unpacked, tmp_path, words, said):
    env = os.environ | {"PYTHONPATH": str(unpacked)}
    done = subprocess.run([*PYTHON, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


@pytest.mark.slow
def test_a_run_by_a_shipped_config_gets_as_far_as_its_model(unpacked, tmp_path):
    env = os.environ | {"PYTHONPATH": str(unpacked)}
    command = [*PYTHON, "jppo.train", "--config=jppo://quickstart:here"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "here/sft/hf" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_calculator_of_an_installed_jppo_is_there(unpacked, tmp_path):
    code = (
        "from jppo.settings import commandline, default; import pathlib;"
        "c, _ = commandline.parse(['--config=jppo://agent_calculator'], '', default());"
        "print(pathlib.Path(c.rollout.multi_turn.tool_config_path).read_text())"
    )
    env = os.environ | {"PYTHONPATH": str(unpacked)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (ROOT / "configs/agent_calculator.yaml").read_text().strip()
