"""scripts/launch/: what each process is told, with stand-ins for ssh and SLURM."""

import os
import pathlib
import subprocess

import pytest

from jppo import settings

LAUNCH = pathlib.Path(__file__).resolve().parents[1] / "scripts/launch"
TOLD = 'echo "$NODE_RANK/$NNODES $MASTER_ADDR:$MASTER_PORT $*"'
SAY = ["bash", "-c", TOLD, "_", "two words", "$HOME"]


def run(*command, cwd=None, **env):
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=60
    )
    return done.returncode, sorted(done.stdout.splitlines()), done.stderr


def test_local_starts_as_many_as_asked_for_on_one_port():
    code, said, _ = run(LAUNCH / "local.sh", 3, *SAY, PORT="1234")
    assert code == 0
    assert said == [f"{rank}/3 127.0.0.1:1234 two words $HOME" for rank in range(3)]


def test_local_ends_with_the_code_of_one_that_failed():
    assert run(LAUNCH / "local.sh", 3, "bash", "-c", "exit $((NODE_RANK * 2))")[0] == 2


def test_local_passes_a_signal_on_and_waits(tmp_path):
    waiting = f"trap 'echo asked; exit 0' TERM; touch {tmp_path}/$NODE_RANK; while true; do sleep 0.05; done"
    process = subprocess.Popen([LAUNCH / "local.sh", "2", "bash", "-c", waiting], stdout=subprocess.PIPE, text=True)
    while len(list(tmp_path.iterdir())) < 2:
        assert process.poll() is None
    process.terminate()
    assert process.communicate(timeout=120)[0].split() == ["asked", "asked"]
    assert process.returncode == 0


@pytest.fixture
def stand_ins(tmp_path):
    """A `ssh` that is a shell here, and SLURM's commands."""
    for name, text in {
        "ssh": 'host=$1; shift; echo "on $host"; cd /; exec sh -c "$*"',
        "scontrol": "echo node-a; echo node-b",
        "srun": 'while [[ $1 == --* ]]; do shift; done; for n in 0 1; do SLURM_NODEID=$n "$@" & done; wait',
    }.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def test_ssh_gives_each_host_its_number_in_the_same_folder(stand_ins):
    code, said, _ = run(LAUNCH / "ssh.sh", "me@node-a,node-b", *SAY, SSH=str(stand_ins / "ssh"))
    assert code == 0
    assert said == [
        "0/2 node-a:29500 two words $HOME",
        "1/2 node-a:29500 two words $HOME",
        "on me@node-a",
        "on node-b",
    ]
    (stand_ins / "a b").mkdir()
    _, said, _ = run(LAUNCH / "ssh.sh", "node-a", "pwd", cwd=stand_ins / "a b", SSH=str(stand_ins / "ssh"))
    assert said == [str(stand_ins / "a b"), "on node-a"]


def test_ssh_ends_with_the_code_of_a_host_that_failed(stand_ins):
    assert run(LAUNCH / "ssh.sh", "a,b", "bash", "-c", "exit 3", SSH=str(stand_ins / "ssh"))[0] == 3


def test_slurm_takes_the_nodes_of_the_job(stand_ins):
    env = {"PATH": f"{stand_ins}:{os.environ['PATH']}", "SLURM_NNODES": "2", "SLURM_JOB_ID": "20007"}
    code, said, _ = run("bash", LAUNCH / "slurm.sbatch", *SAY, SLURM_JOB_NODELIST="node-[a-b]", **env)
    assert code == 0
    assert said == [f"{rank}/2 node-a:20007 two words $HOME" for rank in range(2)]


def test_slurm_starts_a_server_on_each_node(stand_ins, tmp_path):
    env = {"PATH": f"{stand_ins}:{os.environ['PATH']}", "PYTHON": "echo", "SLURM_JOB_NODELIST": "node-[a-b]"}
    code, said, _ = run(
        "bash", LAUNCH / "slurm-servers.sbatch", tmp_path / "urls", "--config=x", SLURM_NNODES="2", **env
    )
    assert code == 0 and said == [f"-m jppo.serve --host=0.0.0.0 --listed={tmp_path}/urls --config=x"] * 2


def test_kubernetes_finds_its_servers_by_name():
    yaml = pytest.importorskip("yaml")
    service, servers, trainer = yaml.safe_load_all((LAUNCH / "kubernetes-servers.yaml").read_text())
    pod = servers["spec"]["template"]
    assert service["spec"]["clusterIP"] == "None"  # the name has all addresses
    assert service["spec"]["selector"] == servers["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    [server], [train] = (job["spec"]["template"]["spec"]["containers"] for job in (servers, trainer))
    port = server["readinessProbe"]["tcpSocket"]["port"]
    assert f"--config.rollout.port={port}" in server["args"] and "--host=0.0.0.0" in server["args"]
    assert f"--config.rollout.urls=dns://{service['metadata']['name']}:{port}" in train["args"]
    tokens = [next(e["valueFrom"] for e in c["env"] if e["name"] == "JPPO_SERVER_TOKEN") for c in (server, train)]
    assert tokens[0] == tokens[1]
    for container in (server, train):
        words = [word for word in container["args"] if word.startswith("--config")]
        c, _ = settings.parse(words, "", settings.default())
        settings.check(c)


PYTHON = """#!/bin/bash
trap "echo ended; exit 143" TERM
echo "$NODE_RANK/$NNODES $MASTER_ADDR:$MASTER_PORT $*"
while [[ $2 == jppo.serve ]]; do sleep 0.1; done
exit ${TRAINER:-0}
"""


@pytest.fixture
def sky(tmp_path):
    """Runs a task's script as SkyPilot does on a machine, with a Python that prints its arguments."""
    yaml = pytest.importorskip("yaml")
    (tmp_path / "jppo/bin").mkdir(parents=True)
    (tmp_path / "jppo/bin/python").write_text(PYTHON)
    (tmp_path / "jppo/bin/python").chmod(0o755)

    def start(name, rank, **env):
        task = yaml.safe_load((LAUNCH / name).read_text())
        script = task["run"].replace("/shared/.", f"{tmp_path}/.").replace("sleep 5", "sleep 0.1")
        addresses = [f"10.0.0.{i + 1}" for i in range(task["num_nodes"])]
        env |= {"SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NUM_NODES": str(len(addresses)), "HOME": str(tmp_path)}
        env |= {"SKYPILOT_NODE_IPS": "\n".join(addresses), "SKYPILOT_TASK_ID": "sky-1_jppo"}
        process = subprocess.Popen(["bash", "-c", script], env=os.environ | env, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    started = []
    yield start
    (tmp_path / ".sky-1_jppo.ended").touch()
    for process in started:
        process.communicate(timeout=60)


def words_of(said):
    c, _ = settings.parse([word for word in said.split() if word.startswith("--config")], "", settings.default())
    settings.check(c)
    return c


def test_skypilot_gives_each_machine_its_number(sky):
    for rank in range(2):
        process = sky("skypilot.yaml", rank, TRAINER="143")
        said = process.communicate(timeout=60)[0]
        assert process.returncode == 143 and said.startswith(f"{rank}/2 10.0.0.1:29500 -m jppo.train --config=")
        assert words_of(said).trainer.run_dir == "/shared/runs/gsm8k"


def test_skypilot_starts_servers_that_end_after_the_trainer(sky):
    servers = [sky("skypilot-servers.yaml", rank) for rank in (1, 4)]
    failed = sky("skypilot-servers.yaml", 0, TRAINER="143")
    assert failed.wait(timeout=60) == 143 and [server.poll() for server in servers] == [None, None]
    trainer = sky("skypilot-servers.yaml", 0)
    c = words_of(trainer.communicate(timeout=60)[0])
    assert trainer.returncode == 0 and c.rollout.publish_host == "10.0.0.1" and c.rollout.publish_via == "tcp"
    assert c.rollout.urls == ",".join(f"http://10.0.0.{i}:8000" for i in (2, 3, 4, 5))
    for server in servers:
        said = server.communicate(timeout=60)[0]
        assert server.returncode == 0 and said.endswith("ended\n") and "--host=0.0.0.0" in said
        assert words_of(said).rollout.port == 8000


@pytest.mark.parametrize(
    "command",
    [["local.sh"], ["local.sh", "two", "true"], ["ssh.sh", "a"], ["slurm.sbatch"], ["slurm-servers.sbatch", "x", "y"]],
)
def test_a_command_that_is_cut_short_is_one_line(command):
    code, said, error = run("bash", LAUNCH / command[0], *command[1:])
    assert (code, said) == (2, []) and error.startswith("error: ") and error.count("\n") == 1


def test_setup_prints_progress_and_returns_pips_code(tmp_path):
    (tmp_path / "python").write_text("#!/bin/sh\nsleep 2.5\nexit 3\n")
    (tmp_path / "python").chmod(0o755)
    setup = (LAUNCH.parent / "setup.sh").read_text()
    function = setup[setup.index("pip() {") : setup.index("\n}\n", setup.index("pip() {")) + 3]
    code, said, error = run("sh", "-c", f"venv={tmp_path}; python=$venv/python\n{function}pip install x", EVERY_S="1")
    assert (code, error) == (3, "") and said[0].startswith("installing, 1 s, ")


@pytest.mark.parametrize(
    "driver, capability, extra",
    [
        ("580.65.06", "9.0", "cuda"),
        ("580.65.06", "", "cuda"),
        ("580.65.06", "7.5", "cuda"),
        ("550.54.15", "8.0", "cuda12"),
        ("580.65.06", "7.0", "cuda12"),
        ("595.10", "12.1", "cuda"),
        ("470.57.02", "8.0", ""),
    ],
)
def test_setup_takes_the_cuda_that_the_gpu_runs(driver, capability, extra):
    setup = (LAUNCH.parent / "setup.sh").read_text()
    function = setup[setup.index("cuda_extra() {") : setup.index("\n}\n", setup.index("cuda_extra() {")) + 3]
    code, said, error = run("sh", "-c", f"set -eu\n{function}cuda_extra '{driver}' '{capability}'")
    assert (code, "".join(said), error) == (0, extra, "")


@pytest.mark.parametrize(
    "vendor, device, found", [("0x1ae0", "0x0063", 0), ("0x1ae0", "0x0042", 1), ("0x10de", "0x0063", 1)]
)
def test_setup_knows_a_machine_with_tpus(tmp_path, vendor, device, found):
    (tmp_path / "0000:00:05.0").mkdir()
    (tmp_path / "0000:00:05.0/vendor").write_text(vendor + "\n")
    (tmp_path / "0000:00:05.0/device").write_text(device + "\n")
    setup = (LAUNCH.parent / "setup.sh").read_text()
    function = setup[setup.index("has_tpu() {") : setup.index("\n}\n", setup.index("has_tpu() {")) + 3]
    code, *_ = run("sh", "-c", f"{function}has_tpu", PCI_DEVICES=str(tmp_path))
    assert code == found
