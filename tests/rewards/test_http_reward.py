"""examples/http_reward.py against an API on the loopback."""

import http.server
import json
import threading
import time
from typing import ClassVar

import httpx
import pytest

from jppo.rewards.graders import FunctionPart
from jppo.rewards.pool import Pool
from tests.make import ROOT, bytes_as_text, sample, script

WORKERS = 3


class Api(http.server.BaseHTTPRequestHandler):
    """Scores a response by its length; some responses make it fail."""

    bodies: ClassVar[list[dict]] = []
    keys: ClassVar[list[str | None]] = []
    busy = 0  # answers of 503 before the next score
    together = threading.Barrier(WORKERS)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Api.bodies.append(body)
        Api.keys.append(self.headers["Authorization"])
        status = 200
        if Api.busy:
            Api.busy, status = Api.busy - 1, 503
        elif body["response"] == "bad":
            status = 422
        elif body["response"] == "slow":
            time.sleep(0.5)
        elif body["response"].startswith("together"):
            self.together.wait(timeout=60)  # raises unless so many requests are open at once
        answer = json.dumps({"score": len(body["response"]), "words": 2}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


@pytest.fixture
def api(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Api)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("REWARD_URL", f"http://127.0.0.1:{server.server_port}/score")
    monkeypatch.setenv("REWARD_KEY", "k3y")
    Api.bodies, Api.keys, Api.busy = [], [], 0
    yield server
    server.shutdown()
    server.server_close()


def test_busy_answers_are_tried_again_and_others_are_errors(api, monkeypatch):
    example = script("examples/http_reward.py")
    monkeypatch.setattr(example, "PAUSES_S", (0.0, 0.0, None))
    Api.busy = 2
    assert example.compute_score("", "four", "4") == {"score": 4, "words": 2}
    assert Api.bodies == [{"response": "four", "ground_truth": "4"}] * 3 and Api.keys == ["Bearer k3y"] * 3
    Api.busy = 3
    with pytest.raises(httpx.HTTPStatusError, match="503"):
        example.compute_score("", "four", "4")
    with pytest.raises(httpx.HTTPStatusError, match="422"):
        example.compute_score("", "bad", "4")
    assert len(Api.bodies) == 3 + 3 + 1
    example.CLIENT.timeout = 0.1
    with pytest.raises(httpx.ReadTimeout):
        example.compute_score("", "slow", "4")
    assert len(Api.bodies) == 7 + 3


def test_as_many_requests_as_workers_run_at_once_and_a_failure_costs_its_own_sample(api):
    pool = Pool(WORKERS, timeout_s=60.0, memory_bytes=2**31)
    part = FunctionPart(f"{ROOT}/examples/http_reward.py:compute_score", pool=pool, decode=bytes_as_text)
    futures = [part.submit(sample(text)) for text in ("together 1", "together 2", "together 3", "bad")]
    rewards = [future.result() for future in futures]
    part.close()
    assert [reward.score for reward in rewards[:3]] == [10.0] * 3 and rewards[0].parts["words"] == 2.0
    assert "422" in rewards[3].error and "http_reward.py" in rewards[3].error
