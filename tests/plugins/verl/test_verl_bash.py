"""Scripts of verl's are what bash makes of them; hostile and broken ones are one line, and change nothing."""

import contextlib
import os
import pathlib
import tempfile
import time

import pytest

from jppo import from_verl
from jppo.errors import UserError
from jppo.plugins.sandbox import choice, launcher, shell
from jppo.plugins.verl.overrides import read_script
from tests.make import one_line, script

PPO = "python3 -m verl.trainer.main_ppo"
pytestmark = pytest.mark.skipif(bool(choice.lacks(choice.probe())), reason="this machine cannot confine a script")


@pytest.fixture
def words(tmp_path, monkeypatch):
    """Runs a script in a folder of its own, and returns the arguments of its trainer."""
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.chdir(place)

    def run(text: str, *arguments: str, **environment: str) -> list[str]:
        (place / "run.sh").write_text(text)
        return list(read_script("run.sh", arguments, {"HOME": "/home/me", **environment}).words)

    return run


def refusal(words, text: str, *arguments: str, **environment: str) -> str:
    with pytest.raises(UserError) as e:
        words(text, *arguments, **environment)
    return str(e.value)


@pytest.mark.parametrize(
    "script, given",
    [
        (f"if [ -n \"${{GPU:-}}\" ]; then b=16; else b=1024; fi\n{PPO} a.b=$b", ["a.b=1024"]),
        (f"case ${{M:-x}} in x) b=1 ;; *) b=2 ;; esac\n{PPO} a.b=$b", ["a.b=1"]),
        (f"E='a.b=1 c.d=2'\n{PPO} $E \"e.f=$E\"", ["a.b=1", "c.d=2", "e.f=a.b=1 c.d=2"]),
        (f"{PPO} \\\n a.b=1 \\\n\n c.d=2\n", ["a.b=1"]),
        (f"p=/x\n{PPO} \"a.b=['$p/1', '$p/2']\" c.d=[$p]", ["a.b=['/x/1', '/x/2']", "c.d=[/x]"]),
        (f"A=(a.b=1 'c.d=x y')\nA+=(e.f=2)\n{PPO} \"${{A[@]}}\" g.h=\"${{A[*]}}\"",
         ["a.b=1", "c.d=x y", "e.f=2", "g.h=a.b=1 c.d=x y e.f=2"]),
        (f"n=$(python3 - <<'EOF'\nprint(1024 * 3)\nEOF\n)\n{PPO} a.b=$n", ["a.b=3072"]),
        (f"n=$(python3 -c 'import sys; print(sys.argv[1:])' x)\n{PPO} a.b=\"$n\"", ["a.b=['x']"]),
        (f"D=${{D:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}}\n{PPO} a.b=$D", ["a.b=gpu"]),
        (f"n=$(python3 -c 'import torch; print(torch.cuda.device_count())')\n{PPO} a.b=$n", ["a.b=8"]),
        (f"n=$(nvidia-smi -L | wc -l)\n{PPO} a.b=$n", ["a.b=8"]),
        (f"f() {{ {PPO} \"$@\"; }}\nf a.b=$((2 * (3 + 1))) c.d=${{X,,}}", ["a.b=8", "c.d="]),
        (f"for i in 1 2 3; do w=\"${{w:-}}$i\"; done\n{PPO} a.b=$w", ["a.b=123"]),
        (f"nohup {PPO} a.b=1 > log.txt 2>&1 &\n", ["a.b=1"]),
        (f"exec > >(tee -a log.txt) 2>&1\n{PPO} a.b=1\n", ["a.b=1"]),
        (f"mkdir -p logs/x /mnt/y\nulimit -n 65535\n{PPO} a.b=1 > logs/x/log 2>&1\n", ["a.b=1"]),
        ("set -euo pipefail\nsudo conda activate verl\nno_such_program --x\nray start --head\n"
         f"ray job submit --no-wait -- {PPO} a.b=1 'c.d=[1, 2]'", ["a.b=1", "c.d=[1, 2]"]),
        (f"srun --nodes=1 bash -c '{PPO} a.b=$((1 + 1))'", ["a.b=2"]),
        (f"/opt/conda/bin/python3 -u -m verl.trainer.main_ppo a.b=1\n# {PPO} a.b=2", ["a.b=1"]),
        ("torchrun --nproc_per_node=8 verl/trainer/main_ppo.py a.b=1", ["a.b=1"]),
        (f"python3 -m torch.distributed.run --nproc_per_node=8 {PPO[8:]} a.b=1", ["a.b=1"]),
        ("python -m accelerate.commands.launch verl/trainer/main_ppo.py a.b=1", ["a.b=1"]),
        (f"python3 examples/data_preprocess/gsm8k.py --local_dir x\npip install x\n{PPO} a.b=1", ["a.b=1"]),
        (f"{PPO} a.b=1\n{PPO} a.b=1", ["a.b=1"]),
        (f"export R=3e-6; N=1\n{PPO} 'a.b=${{oc.env:R,1}}/${{oc.env:N,2}}' 'c.d=${{oc.env:R}}' 'e.f=${{oc.env:N}}'",
         ["a.b=3e-6/${oc.env:N,2}", "c.d=3e-6", "e.f=${oc.env:N}"]),  # N is not exported
        (f"until ray status | grep -q ready; do [ $((++i)) -lt 4 ] || break; sleep 100; done\n{PPO} a.b=1", ["a.b=1"]),
    ],
)  # fmt: skip
def test_the_arguments_are_those_under_bash(script, given, words):
    assert words(script) == given


@pytest.mark.parametrize(
    "script, name",
    [
        ("n=$(python3 -u tools/calc.py 8)", "calc.py"),
        ("n=`true && python3 calc.py`", "calc.py"),
        ("if python3 tools/calc.py --x \\\n 2>&1 | grep -q 100; then n=1; fi", "calc.py"),
        ("N=$(\n  python -m tools.args\n)", "tools.args"),
        ("n=2\nif ! python3 tools/calc.py --x > log; then n=1; fi", "calc.py"),
        ("until python -m tools.args\ndo n=1; break; done", "tools.args"),
        ("python3 tools/calc.py; n=$(date) | cat", ""),
        ("if true; then python3 tools/calc.py; fi", ""),
        ("python3 tools/calc.py 2>&1 | tee log; n=$(python3 -c 'print(1)' calc.py)", ""),
        ("python3 tools/calc.py || exit 1", ""),
    ],
)
def test_what_a_python_file_prints_or_returns_is_not_known(script, name, words):
    words(f"{script}\n{PPO} a.b=1 2>&1 | sed s/a/b/")
    notes = read_script("run.sh", [], {}).notes
    needed = "prints or returns, which does not run here; write it in the script"
    expected = [f"run.sh uses what {name} {needed}"] if name else []
    assert list(notes) == expected


def test_an_empty_variable_is_left_out_aloud(words, capsys):
    pathlib.Path("run.sh").write_text(f"{PPO} trainer.experiment_name=$NAME trainer.device=$DEVICE")
    error = one_line(capsys, from_verl.main, "run.sh", "--verl=0.9", code=3)
    assert error.startswith("left out: empty in the script: NAME") and "as in NAME=VALUE" in error
    pathlib.Path("run.sh").write_text(f"{PPO} trainer.device=$DEVICE trainer.experiment_name=${{NAME:-}}")
    from_verl.main(["run.sh", "--verl=0.9"])


def test_the_trainer_gets_the_arguments_behind_the_script(words):
    assert words(f'n=$1; shift\n{PPO} a.b=$n "$@"', "8", "c.d=1") == ["a.b=8", "c.d=1"]
    assert refusal(words, 'echo "Usage: run.sh NPROC"; exit 1').endswith("exit code 1: Usage: run.sh NPROC")


def test_variables_of_the_environment(words):
    script = f'{PPO} a.b=${{M:?set M}} c.d=${{WANDB_API_KEY:-no}} e.f="$(env | grep -c hunter)"'
    assert words(script, M="x", OTHER="hunter2", WANDB_API_KEY="hunter3") == [
        "a.b=x", "c.d=hidden-from-the-script", "e.f=0",
    ]  # fmt: skip
    assert "M: set M" in refusal(words, script)


def test_the_scripts_own_folder(words):
    pathlib.Path("sub").mkdir()
    pathlib.Path("sub/env.sh").write_text("N=7\n")
    script = 'D="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\nsource "$D/sub/env.sh"\n'
    script += f"{PPO} a.b=$N c.d=$D e.f=$(pwd) g.h=$HOME"
    here = os.getcwd()
    assert words(script) == ["a.b=7", f"c.d={here}", f"e.f={here}", "g.h=/home/me"]


HOSTILE = """
rm -rf "$HOME" victim.txt ../outside.txt /OUTSIDE; echo x > ../outside.txt; echo x > OUTSIDE; echo x > made.txt
wget http://127.0.0.1:9/; curl -O http://127.0.0.1:9/; git clone http://127.0.0.1:9/x
s=$(cat /proc/*/environ OUTSIDE ~/.netrc /etc/shadow 2>/dev/null | tr '\\0' '\\n' | grep -c -e hunter -e root: )
t=$(python3 -c 'import socket; socket.socket()' 2>&1 | grep -c PermissionError)
exec 3<>/dev/tcp/127.0.0.1/9; kill -9 -1; kill -9 $PPID
"""


def test_a_script_changes_and_sees_nothing_outside(words, tmp_path, monkeypatch):
    monkeypatch.setenv("A_SECRET", "hunter2")
    outside = tmp_path / "outside.txt"
    outside.write_text("hunter2")
    pathlib.Path("victim.txt").write_text("whole")
    assert words(HOSTILE.replace("OUTSIDE", str(outside)) + f"{PPO} a.b=$s c.d=$t") == ["a.b=0", "c.d=1"]
    assert outside.read_text() == "hunter2" and pathlib.Path("victim.txt").read_text() == "whole"
    assert sorted(path.name for path in pathlib.Path.cwd().iterdir()) == ["run.sh", "victim.txt"]


@pytest.mark.parametrize(
    "script, complaint",
    [
        ("", "starts no trainer"),
        ("echo hello\n", "starts no trainer of verl's: hello"),
        ("set -e\ncd /no/such\n" + PPO + " a.b=1", "No such file or directory"),
        (f"[ -f data.parquet ] || {{ echo 'no data' >&2; exit 4; }}\n{PPO} a.b=1", "exit code 4: no data"),
        ("if then", "syntax error"),
        (f"for s in 1 2; do {PPO} a.b=$s; done", "starts 2 trainers"),
        (f"torchrun -m verl.trainer.sft_trainer a.b=1\n{PPO} a.b=1", "starts 2 trainers"),
        (f"read -p 'go on? ' yes\n{PPO} a.b=$yes", "asks for input"),
        (f"/opt/no_such_launcher/go {PPO} a.b=1", "No such file or directory"),
    ],
)  # fmt: skip
def test_a_script_that_starts_no_single_trainer_is_one_line(script, complaint, words):
    assert complaint in (error := refusal(words, script)) and "\n" not in error


@pytest.mark.parametrize(
    "script", ("while true; do :; done", ":(){ :|:& };:", "until ray status | grep ok; do sleep 9; done")
)
def test_a_script_that_loops_ends(script, words, monkeypatch):
    monkeypatch.setattr(shell, "_RUN_S", 3.0)
    began = time.monotonic()
    refusal(words, script)
    assert time.monotonic() - began < 11


@pytest.mark.parametrize("without", ({"user"}, {"namespaces"}, {"namespaces", "user"}))
def test_weaker_protections_confine_too(without, words, tmp_path, monkeypatch):
    guards = choice.probe(frozenset(without))
    if choice.lacks(guards):
        pytest.skip("these protections are not here")
    monkeypatch.setattr(choice, "probe", lambda: guards)
    test_a_script_changes_and_sees_nothing_outside(words, tmp_path, monkeypatch)
    assert words(f"mkdir -p logs; {PPO} a.b=$PWD c.d=$HOME > logs/x") == [f"a.b={os.getcwd()}", "c.d=/home/me"]


def test_python_may_be_installed_below_tmp(words, monkeypatch):
    readable = launcher.readable_paths()
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        os.chmod(place, 0o755)
        (pathlib.Path(place) / "seen").write_text("1")
        monkeypatch.setattr(launcher, "readable_paths", lambda: [*readable, place])
        written = f"{place}-written"
        assert words(f"echo 2 > {written}\n{PPO} a.b=$(< {place}/seen) c.d=$(< {written})") == ["a.b=1", "c.d=2"]
        assert words(f"echo 3 > {place}/seen\n{PPO} a.b=$(< {place}/seen)") == ["a.b=1"]
    assert not os.path.exists(written)


def test_a_machine_that_cannot_confine_says_how_to_do_it_by_hand(words, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(choice, "lacks", lambda _: "no Landlock")
    assert "no Landlock" in (error := refusal(words, PPO)) and "stand-in" in error and "\n" not in error
    listed = tmp_path / "words"
    listed.write_bytes(b"-m\0verl.trainer.main_ppo\0data.train_files=['/a b', '/c']\0")
    assert from_verl.read_arguments([str(listed)]).words == ("data.train_files=['/a b', '/c']",)
    listed.write_text("# mine\na.b=1 \\\n  'c.d=x y'\n")
    assert from_verl.read_arguments([str(listed), "e.f=2"]).words == ("a.b=1", "c.d=x y", "e.f=2")


def test_exit_codes(words, capsys):
    pathlib.Path("run.sh").write_text(f"{PPO} algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=2 $EXTRA")
    from_verl.main(["run.sh", "--verl=0.9"])
    assert capsys.readouterr().err == ""
    with pytest.raises(SystemExit) as left:
        from_verl.main(["run.sh", "--verl=0.9", "actor_rollout_ref.rollout.quantization=fp8", "a.b=1"])
    first, second = capsys.readouterr().err.splitlines()
    assert left.value.code == 3 and "quantization=fp8" in first and "a.b=1" in second
    assert "recipe.sppo.main_sppo: not supported" in one_line(capsys, from_verl.main, _script("recipe.sppo.main_sppo"))


def _script(main: str) -> str:
    pathlib.Path("other.sh").write_text(f"python3 -m {main} a.b=1")
    return "other.sh"


def test_yaml_by_hydras_rules(words, capsys):
    pathlib.Path("conf/actor").mkdir(parents=True)
    pathlib.Path("conf/mine.yaml").write_text(
        "defaults: [ppo_trainer, other, actor@actor_rollout_ref.actor: small, _self_]\n"
        "data: {train_batch_size: 64, max_prompt_length: 100}\n"
        "trainer: {total_epochs: 3, default_local_dir: 'out/${trainer.project_name}'}\n"
    )
    pathlib.Path("conf/other.yaml").write_text("data: {train_batch_size: 32, max_response_length: 200}\n")
    pathlib.Path("conf/actor/small.yaml").write_text("ppo_mini_batch_size: 16\n")
    pathlib.Path("run.sh").write_text(
        f"{PPO} --config-path=$PWD/conf --config-name=mine data.max_prompt_length=50 '~trainer.total_epochs'"
        " actor_rollout_ref.rollout.tensor_model_parallel_size=1"
    )
    command, _ = from_verl.translated_command(from_verl.read_arguments(["run.sh"]))
    for setting in ("data.train_batch_size=64", "data.max_prompt_length=50", "data.max_response_length=200",
      "actor.ppo_mini_batch_size=16", "trainer.run_dir=out/verl_examples"):  # fmt: skip
        assert f"--config.{setting}" in command
    pathlib.Path("run.sh").write_text(f"{PPO} --config-path=$PWD/conf --config-name=absent")
    assert "absent.yaml" in one_line(capsys, from_verl.main, "run.sh")
    for option in ("--config-name", "-cn", "--config-path"):
        pathlib.Path("run.sh").write_text(f"{PPO} a.b=1 {option}")
        assert "is not followed by a name or a folder" in one_line(capsys, from_verl.main, "run.sh")


@pytest.mark.parametrize("place", ["verl/trainer/config", "trainer/config", "config"])
def test_a_config_is_read_beside_its_main_module_or_where_the_script_starts(words, place):
    """The main module is verl.trainer.main_ppo, in a checkout of verl's or of a part of it."""
    pathlib.Path(place).mkdir(parents=True)
    pathlib.Path(place, "mine.yaml").write_text("defaults: [ppo_trainer]\ndata: {train_batch_size: 512}\n")
    pathlib.Path("run.sh").write_text(f"{PPO} --config-name=mine data.max_prompt_length=50")
    command, _ = from_verl.translated_command(from_verl.read_arguments(["run.sh"]))
    assert "--config.data.train_batch_size=512" in command


@pytest.mark.parametrize(
    "given",
    [
        ["rollout.nnodes=two"],
        ["async_training.trigger_parameter_sync_step=x"],
        ["actor_rollout_ref.actor.fsdp_config.fsdp_size=null"],
        ["trainer.n_gpus_per_node=0", "actor_rollout_ref.actor.ppo_micro_batch_size=4"],
        ["data.train_batch_size=null"],
        ["actor_rollout_ref.rollout.tensor_model_parallel_size=0"],
        ["actor_rollout_ref.actor.optim.betas=[a]"],
    ],
)
def test_a_value_without_a_meaning_is_one_line_or_ignored(given, words, capsys):
    try:
        from_verl.main(given)
    except SystemExit as e:
        assert e.code in (2, 3) and capsys.readouterr().err.count("\n") == 1


def test_tools_of_verls_own_classes_are_left_out(words):
    turns = "actor_rollout_ref.rollout.multi_turn"
    given = [f"{turns}.enable=True", f"{turns}.tool_config_path=tools.yaml"]
    pathlib.Path("tools.yaml").write_text("tools: [{class_name: verl.tools.gsm8k_tool.Gsm8kTool}]")
    _, found = from_verl.translated_command(from_verl.read_arguments(given))
    assert [line.text for line in found.lines if line.kind == "missing"] == given[1:]
    pathlib.Path("tools.yaml").write_text("tools: [{class_name: mine.py:Tool}]")
    _, found = from_verl.translated_command(from_verl.read_arguments(given))
    assert not [line for line in found.lines if line.kind == "missing"]


@pytest.mark.parametrize(
    "given, settings",
    [
        (
            "trainer.nnodes=2 A.ulysses_sequence_parallel_size=4 A.fsdp_config.fsdp_size=8",
            {"mesh.fsdp": 2, "mesh.data": -1, "mesh.sequence": 4},
        ),
        ("A.fsdp_config.fsdp_size=32", {"mesh.fsdp": -1, "mesh.data": 1}),
        ("A.fsdp_config.fsdp_size=2 A.ulysses_sequence_parallel_size=4", {"mesh.fsdp": 1, "mesh.sequence": 4}),
        (
            "model_engine=megatron A.megatron.tensor_model_parallel_size=4 A.megatron.expert_model_parallel_size=8",
            {"mesh.tensor": 4, "mesh.expert": 2, "mesh.fsdp": -1},
        ),
        (
            "model_engine=veomni A.veomni.fsdp_size=4 A.veomni.ulysses_parallel_size=2 A.veomni.param_offload=True",
            {"mesh.fsdp": 2, "mesh.sequence": 2, "actor.param_offload": True},
        ),
        ("A.optim.override_optimizer_config.optimizer_cpu_offload=True", {"actor.optimizer_offload": True}),
        ("algorithm.adv_estimator=grpo_vectorized R.n=2", {"algorithm.adv_estimator": "grpo_vectorized"}),
        (
            "algorithm.rollout_correction.bypass_mode=True algorithm.rollout_correction.rollout_is=token",
            {"algorithm.old_logprob": "bypass"},
        ),
        (
            "algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_rs=null",
            {"algorithm.old_logprob": "correction", "algorithm.rollout_rs": ""},
        ),
        ("R.name=hf", {"rollout.name": "inprocess"}),
        ("trainer.v1.trainer_mode=colocate_async", {"rollout.mode": "async", "rollout.sleep_level": 0}),
    ],
)  # fmt: skip
def test_what_settings_mean(given, settings):
    from jppo.plugins.verl.name import key_of
    from jppo.plugins.verl.translate import translate

    found = translate([key_of(word) if word[1:2] == "." else word for word in given.split()])
    assert {name: found.settings[name] for name in settings} == settings
    assert found.settings.get("algorithm.rollout_is", "none") == "none" or "correction" in settings.values()
    assert not [line for line in found.lines if line.kind in ("missing", "unknown")]


def test_the_fully_asynchronous_trainer():
    from jppo.plugins.verl.translate import translate

    given = "data.train_batch_size=0 actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.rollout.n=4"
    given += " async_training.staleness_threshold=0.5 rollout.n_gpus_per_node=4 trainer.n_gpus_per_node=4"
    given += " rollout.total_rollout_steps=12800 rollout.nnodes=1 actor_rollout_ref.actor.optim.lr_warmup_steps=10"
    given += " +algorithm.filter_groups.enable=True"
    found = translate(given.split(), main="verl.experimental.fully_async_policy.fully_async_main")
    asked = {
        "data.train_batch_size": 128, "actor.ppo_mini_batch_size": 128, "rollout.mode": "async",
        "rollout.max_staleness": 1, "rollout.on_update": "abort", "rollout.devices": "4,5,6,7", "rollout.servers": 2,
        "trainer.nnodes": 1, "trainer.total_training_steps": 100, "algorithm.old_logprob": "bypass",
        "rollout.sleep_level": 0, "actor.lr_warmup_steps": 2,  # of 4 updates each
    }  # fmt: skip
    assert {name: found.settings[name] for name in asked} == asked
    for batches, prompts in (("null", 128), ("3", 3 * 128)):
        words = [*given.split(), f"async_training.require_batches={batches}"]
        more = translate(words, main="verl.experimental.fully_async_policy.fully_async_main")
        assert more.settings["data.train_batch_size"] == prompts
    assert not found.settings.get("algorithm.filter_groups") and {line.kind for line in found.lines} <= {
        "same",
        "needless",
    }


def test_a_step_of_separate_async_is_a_publish_in_verl_too():
    """By trainer_base.step of verl 0.9: an update, which moves the rate, has a parameter_sync_step-th of the batch."""
    from jppo.plugins.verl.translate import translate

    given = "trainer.v1.trainer_mode=separate_async data.train_batch_size=256 actor_rollout_ref.rollout.n=8"
    given += " actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.rollout.nnodes=1"
    given += " trainer.total_training_steps=100 trainer.save_freq=20 trainer.test_freq=10"
    given += " actor_rollout_ref.actor.optim.lr_warmup_steps=40"
    asked = {"data.train_batch_size": 256, "actor.ppo_mini_batch_size": 512, "trainer.total_training_steps": 100,
      "trainer.save_freq": 20, "trainer.test_freq": 10, "rollout.mode": "async"}  # fmt: skip
    for words, warmup in ((given, 10), (f"{given} trainer.v1.separate_async.parameter_sync_step=2", 20)):
        settings = translate(words.split()).settings
        assert {name: settings[name] for name in asked} == asked and settings["actor.lr_warmup_steps"] == warmup


@pytest.fixture
def tuned(tmp_path, capsys):
    def lines(module: str, words: str, launcher: str = "--nproc_per_node=8") -> str:
        (tmp_path / "sft.sh").write_text(f"torchrun {launcher} -m verl.trainer.{module} {words}")
        with contextlib.suppress(SystemExit):
            from_verl.main([str(tmp_path / "sft.sh")])
        return "".join(capsys.readouterr())

    return lines


def test_fine_tuning_has_the_devices_that_torchrun_is_given(tuned):
    words = "engine=automodel engine.ep_size=4"
    assert "--config.mesh.expert=4" in tuned("sft_trainer", words, "--standalone --nnodes=1 --nproc-per-node=8")
    left = "left out: trainer.nnodes=2: jppo.sft runs on one host"
    assert left in tuned("sft_trainer", words, "--nnodes 2 --nproc_per_node 8")
    assert "left out" not in tuned("sft_trainer", words)


def test_fine_tuning_reads_the_keys_that_verls_trainers_read(tuned):
    """By verl's fsdp_sft_trainer.py and its YAML, and by its Automodel engine."""
    older = tuned("fsdp_sft_trainer", "data.max_length=100 data.micro_batch_size=1")
    assert "--config.optim.max_tokens_per_device=400" in older  # micro_batch_size_per_gpu: 4
    assert "--config.model.remat=full" in tuned("sft_trainer", "trainer.seed=2")
    automodel = "engine=automodel model.use_remove_padding=True"  # activation_checkpointing: false
    assert "--config.model.remat=none" in tuned("sft_trainer", automodel)
    assert "--config.model.remat=full" in tuned("sft_trainer", f"{automodel} engine.activation_checkpointing=True")
    assert "--config.data.max_response_length=50" in tuned("sft_trainer", "++data.max_length=100")


def test_fine_tuning_that_saves_after_each_epoch(tuned):
    for key, code in (("save_freq", "left out: trainer.save_freq=after_each_epoch: give the steps"), ("test_freq", "")):
        out = tuned("sft_trainer", f"trainer.{key}=after_each_epoch")
        assert (code or "jppo.sft tests nothing") in out and ("left out" in out) == bool(code)


def test_fine_tuning_leaves_out_what_only_ppo_can(tuned):
    offload = tuned("sft_trainer", "engine.param_offload=True")
    assert "left out: engine.param_offload=True: jppo.sft has no actor.param_offload" in offload
    balance = tuned("sft_trainer", "engine=megatron +engine.override_transformer_config.moe_aux_loss_coeff=0.1")
    assert "jppo.sft has no actor.router_aux_loss_coef" in balance


def test_the_check_of_a_checkout(tmp_path, monkeypatch, capsys):
    root = tmp_path / "checkout"
    root.mkdir()
    (root / "one.sh").write_text(
        f"D=$(python3 -c 'import torch_npu' && echo npu || echo gpu)\n{PPO} a.b=$D data.seed=3"
    )
    tuning = "torchrun --nproc_per_node=$1 -m verl.trainer.sft_trainer trainer.default_local_dir=${2:?}"
    (root / "sft.sh").write_text(tuning)
    (root / "none.sh").write_text("echo nothing")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    script("scripts/check_verl.py").main([str(root)])
    out = capsys.readouterr().out
    assert "2 scripts start one trainer" in out
    assert "| arguments equal to those under bash | 2 of 2 |" in out and "| fine-tuning translated | 1 of 1 |" in out
