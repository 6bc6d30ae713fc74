"""python -m jppo.serve: the address is in the file while the server answers; a real one is in test_real_vllm.py."""

import contextlib
import fcntl
import importlib.util
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap
import urllib.request

import pytest

from jppo import serve
from jppo.errors import UserError
from jppo.rollout.servers import guard
from tests.make import one_line, until

SERVER = textwrap.dedent("""
    import hashlib, hmac, http.server, os, sys, time
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            key = self.headers["Authorization"] == "Bearer " + os.environ["JPPO_SERVER_TOKEN"]
            self.send_response(200 if key and self.path == "/health" else 401)
            said = b"jppo server " + self.headers["X-Jppo-Challenge"].encode()
            proof = hmac.new(os.environ["JPPO_SERVER_TOKEN"].encode(), said, hashlib.sha256)
            self.send_header("X-Jppo-Proof", proof.hexdigest())
            self.end_headers()
    time.sleep(0.5)
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
""")
RUN = "import os, pathlib, sys; from jppo import serve; sys.exit(serve.run_server([sys.executable, '-c', *sys.argv[3:]], dict(os.environ), address='http://me:1', local=sys.argv[2], file=pathlib.Path(sys.argv[1])))"  # noqa: E501


@pytest.fixture
def start(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    file, started = tmp_path / "servers.txt", []

    def make(program=SERVER):
        command = [sys.executable, "-c", RUN, str(file), f"http://127.0.0.1:{port}", program, str(port)]
        started.append(subprocess.Popen(command, env={**os.environ, guard.TOKEN: "secret"}))
        return started[-1], file

    yield make
    for one in started:
        one.kill()


def test_a_server_is_listed_while_it_answers(start):
    process, file = start()
    file.write_text("http://other:1\n")
    until(lambda: file.read_text() == "http://other:1\nhttp://me:1\n")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) != 0 and file.read_text() == "http://other:1\n"


def test_a_server_that_ends_at_once_is_never_listed(start):
    process, file = start("raise SystemExit(3)")
    assert process.wait(60) == 3 and not file.exists()


STUBBORN = """
import subprocess, sys, time
subprocess.Popen(["sh", "-c", "trap '' TERM; echo $$ > id.new; mv id.new id; exec sleep 60"])
time.sleep(60)
"""


def test_no_process_is_left_while_another_holds_the_file(start, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    process, file = start(STUBBORN)
    until((tmp_path / "id").exists)
    ignores_signals = pathlib.Path("/proc", (tmp_path / "id").read_text().strip(), "cmdline")
    file.write_text("http://other:1\nhttp://me:1\n")
    with file.with_name(".servers.txt.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process.send_signal(signal.SIGTERM)
        until(lambda: not ignores_signals.exists() or not ignores_signals.read_text())  # ended, or a zombie
        process.send_signal(signal.SIGTERM)  # once more, when there is nothing left to end
        assert "me" in file.read_text()
    assert process.wait(60) == 256 - signal.SIGTERM and file.read_text() == "http://other:1\n"


@pytest.mark.parametrize("name", ["nowhere/servers.txt", "folder", "binary"])
def test_a_list_that_cannot_be_written_is_refused_before_the_start(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=f"--listed={tmp_path / name}: .*; name a text file in a folder"):
        how = dict(address="http://me:1", local="http://me:1", file=tmp_path / name)
        serve.run_server(["/no/program"], {guard.TOKEN: "x"}, **how)


def test_the_server_is_asked_where_it_listens():
    for host, at in (("0.0.0.0", "127.0.0.1"), ("::", "127.0.0.1"), ("10.0.0.2", "10.0.0.2"), ("::1", "[::1]")):
        assert serve.own_address(host, 8000) == f"http://{at}:8000"


@pytest.mark.parametrize(
    ("words", "token", "said"),
    [
        (["--config.rollout.port=8000"], "", "JPPO_SERVER_TOKEN is not set; set it to one random value"),
        ([], "secret", "rollout.port=0: set rollout.name=vllm and rollout.port"),
        (["--config.rollout.port=8000", "--config.rollout.name=inprocess"], "secret", "rollout.name='inprocess'"),
        (["--host"], "secret", "expected one argument"),
    ],
)
def test_bad_input_is_one_line(words, token, said, monkeypatch, capsys):
    monkeypatch.setenv(guard.TOKEN, token)
    assert said in one_line(capsys, serve.main, "--config=configs/quickstart.py:x", *words)


def test_options_without_a_model_name_the_way_to_give_one(capsys):
    assert "name the model first, as in jppo serve DIR" in one_line(capsys, serve.main, "--port=8000", "model")


FP8 = (
    "--config.rollout.dtype=bfloat16",
    "--config.algorithm.old_logprob=correction",
    "--config.algorithm.rollout_is=token",
)


@pytest.mark.parametrize(
    ("words", "heads", "said"),
    [
        ([], 4, "this model has heads of 8 "),
        ([*FP8, "--config.rollout.quantization=fp8_per_tensor"], 1, "quantises by fp8_per_channel only"),
    ],
)
def test_what_vllm_on_a_cpu_cannot_serve_is_refused_before_the_start(words, heads, said, tmp_path, monkeypatch, capsys):
    config = dict(model_type="qwen2", hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=8)
    config |= dict(num_attention_heads=heads, num_key_value_heads=1, max_position_embeddings=64, rms_norm_eps=1e-6)
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True, "hidden_act": "silu"}))
    monkeypatch.setenv(guard.TOKEN, "secret")
    monkeypatch.setattr(serve.arguments, "check_vllm", lambda *_: "cpu")
    words = [
        "--config=configs/quickstart.py:x",
        f"--config.model.path={tmp_path}",
        "--config.rollout.port=8000",
        *words,
    ]
    assert said in one_line(capsys, serve.main, *words)


def test_the_model_of_a_run_is_served_by_one_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    build = {"": "gpu", sys.executable: "cpu"}
    monkeypatch.setattr(serve.arguments, "check_vllm", lambda python, setting: build[python])
    for folder in ("runs/a/hf", "model", "runs/b/checkpoints"):
        (tmp_path / folder).mkdir(parents=True)
    for folder in ("runs/a", "runs/a/hf", "model"):  # that of a run has its settings
        (tmp_path / folder / "config.json").write_text("{}")
    start = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    address = ["--host", "127.0.0.1"]
    assert serve.model_command(["runs/a", "--port", "9"]) == [
        *start, "runs/a/hf", "--served-model-name", "runs/a", *address, "--port", "9"
    ]  # fmt: skip
    on_cpu = serve.model_command(["model", f"--python={sys.executable}", "--served-model-name=x"])
    assert (
        on_cpu[:8] == [*start, "model", "--served-model-name", "model", "--host"]
        and on_cpu[-1] == "--served-model-name=x"
    )
    assert "--no-enable-chunked-prefill" in on_cpu and "--kv-cache-memory-bytes" in on_cpu
    said = one_line(capsys, serve.main, "runs/b")
    assert "runs/b is a run without a final model; python -m jppo.export runs/b --out MODEL writes one" in said
    assert "a model is served without a config" in one_line(capsys, serve.main, "model", "--config=x.py")


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make setup")
def test_a_real_server_answers_seeded_requests(shared, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/hf").symlink_to((shared / "models/tinystories-656k-hd64").resolve())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jppo.serve", str(tmp_path / "run"), "--port", str(port)]
    body = {"model": str(tmp_path / "run"), "prompt": "Once", "max_tokens": 4, "temperature": 1.0}

    def ask(route, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}{route}", data, {"Content-Type": "application/json"})
        with contextlib.suppress(OSError), urllib.request.urlopen(request) as reply:
            return reply.read()

    process = subprocess.Popen(command)
    try:
        until(lambda: ask("/v1/models") is not None or process.poll() is not None, "the server", 600)
        texts = [json.loads(ask("/v1/completions", body | {"seed": seed}))["choices"][0]["text"] for seed in (1, 2, 1)]
        assert texts[0] == texts[2] and all(texts)
    finally:
        process.terminate()
        process.wait(60)
