"""A stand-in for vLLM on a GPU, for want of one: its routes, sleep included, with the memory of a ledger.

It takes its fraction of the card at its start as vLLM does: only if so much is free, and if nobody frees memory while
it measures. Asleep it holds `ASLEEP` bytes.
"""

import hashlib
import hmac
import http.server
import json
import os
import random
import sys
import time

from tests.rollout.ledger import Ledger

GIVEN = dict(zip(sys.argv[1:], sys.argv[2:], strict=False))
ASLEEP, WEIGHTS = int(os.environ["FAKE_ASLEEP"]), int(os.environ["FAKE_WEIGHTS"])
LEDGER = Ledger(os.environ["FAKE_LEDGER"])
SHARE = int(float(GIVEN["--gpu-memory-utilization"]) * LEDGER.read()["total"])
STATE = {"version": "default", "paused": False}


def held(count, why):
    left = LEDGER.hold("server", count, why)
    if left < 0:
        sys.exit(f"torch.OutOfMemoryError: CUDA out of memory at {why}")
    return left


def start():
    free = held(ASLEEP, "start")
    if free < SHARE - ASLEEP:
        sys.exit("ValueError: Free memory on device is less than desired GPU memory utilization")
    before = held(WEIGHTS, "weights")
    time.sleep(0.3)
    if held(WEIGHTS, "profile") > before:
        sys.exit("AssertionError: Error in memory profiling")
    held(SHARE, "cache")


def generate(body):
    count = body["sampling_params"]["max_tokens"]
    draw = random.Random(body["sampling_params"]["seed"])
    tokens = [draw.randrange(2, 12) for _ in range(count)]
    content = [{"logprob": -3.0} for _ in tokens]
    versions = [{"start": 0, "end": count, "version": STATE["version"]}]
    choice = dict(token_ids=tokens, finish_reason="length", logprobs={"content": content}, weight_versions=versions)
    return {"choices": [choice]}


def answer(path, body):
    route, _, query = path.partition("?")
    asked = dict(pair.split("=") for pair in query.split("&")) if query else {}
    method = body.get("method") if route == "/collective_rpc" else None
    info = dict(logprobs_mode="processed_logprobs", device="cuda", chunked_prefill=True, dtype=GIVEN["--dtype"])
    info |= dict(max_model_len=int(GIVEN["--max-model-len"]), experts=False, kept=False)
    if route == "/sleep":
        held(ASLEEP, "sleep")
    elif route == "/wake_up":
        held(WEIGHTS + ASLEEP if asked["tags"] == "weights" else SHARE, f"wake {asked['tags']}")
    elif route in ("/pause", "/resume"):
        STATE["paused"] = route == "/pause"
    elif route == "/update_weight_version":
        STATE["version"] = body["new_version"]
    answers = {
        "/v1/models": {"data": [{"id": GIVEN["--served-model-name"]}]},
        "/openapi.json": {"paths": {"/inference/v1/generate": {}}},
        "/is_paused": {"is_paused": STATE["paused"]},
        "/weight_info": {"weight_version": STATE["version"]},
        "jppo_info": {"results": [info]},
        "jppo_check": {"results": [{"ok": True, "error": None}]},
        "jppo_load": {"results": [{"ok": True, "error": None}]},
    }
    return generate(body) if route == "/inference/v1/generate" else answers.get(method or route, {})


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.reply({})

    def do_POST(self):
        self.reply(json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}") or {})

    def reply(self, body):
        data = json.dumps(answer(self.path, body)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        if challenge := self.headers.get("X-Jppo-Challenge"):
            said = b"jppo server " + challenge.encode()
            proof = hmac.new(os.environ["JPPO_SERVER_TOKEN"].encode(), said, hashlib.sha256).hexdigest()
            self.send_header("X-Jppo-Proof", proof)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


start()
http.server.ThreadingHTTPServer(("127.0.0.1", int(GIVEN["--port"])), Handler).serve_forever()
