"""Stand-ins for a vLLM server, for what a real one does not do on demand; test_real_vllm.py has that one."""

import contextlib
import http.server
import json
import threading

import pytest

from jppo.rollout.servers.member import ServerSettings


class FakeServer:
    """Answers as vLLM would, or as told by `answers[route]`: (status, JSON); hangs where there is none."""

    def __init__(self):
        self.asked: list[str] = []
        self.bodies: list[dict] = []
        self.answers: dict[str, tuple[int, object]] = {
            "/v1/models": (200, {"data": [{"id": "policy"}]}),
            "/is_paused": (200, {"is_paused": False}),
            "/health": (200, None),
            "/weight_info": (200, {"weight_version": "default"}),
            "/openapi.json": (200, {"paths": {"/inference/v1/generate": {}}}),
            "/pause?mode=wait": (200, {}),
            "/pause?mode=abort": (200, {}),
            "/resume": (200, {}),
            "/update_weight_version": (200, {}),
            "jppo_info": (200, {"results": [dict(INFO)]}),
            "jppo_check": (200, {"results": [{"ok": True, "error": None}]}),
            "jppo_load": (200, {"results": [{"ok": True, "error": None}]}),
            "jppo_working": (200, {"results": [{"requests": 0, "most": 8}]}),
        }
        self.hang = threading.Event()
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.reply({})

            def do_POST(self):
                self.reply(json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"null"))

            def reply(self, body):
                route = body["method"] if self.path == "/collective_rpc" else self.path
                fake.asked.append(route)
                fake.bodies.append(body)
                if route not in fake.answers:
                    fake.hang.wait()
                    return
                status, answer = fake.answers[route]
                try:
                    answer = answer(body) if callable(answer) else answer
                    headers = {}
                    if isinstance(answer, tuple):  # status and headers, perhaps with an answer
                        status, headers, answer = (*answer, {"error": "refused"})[:3]
                    data = json.dumps(answer).encode()
                except ConnectionAbortedError:  # an answer that breaks off before it begins
                    return
                with contextlib.suppress(BrokenPipeError):  # the client gave up, as it should after a failure
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, *args):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self):
        self.hang.set()
        self._server.shutdown()
        self._server.server_close()


INFO = {
    "version": None,
    "logprobs_mode": "processed_logprobs",
    "max_model_len": 64,
    "chunked_prefill": False,
    "device": "cpu",
    "dtype": "float32",
    "experts": False,
    "kept": False,
}


@pytest.fixture(scope="session")
def settings():
    """A maker of ServerSettings for tiny models; `changes` by name."""
    values = {
        "max_model_len": 64,
        "vocab_size": 1000,
        "max_num_seqs": 8,
        "cache_on_cpu": 1 << 27,
        "omp_threads": 1,
        "start_timeout_s": 60.0,
    }
    return lambda **changes: ServerSettings(**(values | changes))


@pytest.fixture
def fakes():
    """Two fake servers."""
    servers = [FakeServer(), FakeServer()]
    yield servers
    for server in servers:
        server.close()
