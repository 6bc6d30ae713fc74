"""A stand-in for `python -m sglang.launch_server`: its HTTP interface over a bigram model, for want of a GPU here.

It is put into an interpreter of its own by `sglang_site`. The model really is read from the directory that
/update_weights_from_disk names, tokens really are drawn from it, and what SGLang does not know is an error here, also
where SGLang passes over it. Where that matters it does as SGLang's source does: a tensor that is missing stays as
it was, `ignore_eos` goes for `stop_token_ids` too, log-probs are of the distribution before the cuts, seeds count only
with --enable-deterministic-inference, a server that was started with dummy weights loads dummy ones if not told.
"""

import argparse
import asyncio
import contextlib
import http.server
import json
import os
import pathlib
import struct
import threading
import time

import numpy as np

PARAMS = {
    *("n", "sampling_seed", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "max_new_tokens", "min_new_tokens", "ignore_eos", "stop_token_ids", "stop", "no_stop_trim"),
    *("skip_special_tokens", "spaces_between_special_tokens"),
}
FIELDS = {
    "/generate": {
        *("input_ids", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "stream"),
    },
    "/update_weights_from_disk": {
        *("model_path", "load_format", "abort_all_requests", "weight_version", "is_async", "torch_empty_cache"),
        *("keep_pause", "recapture_cuda_graph", "token_step", "flush_cache"),
    },
    "/pause_generation": {"mode"},
    "/continue_generation": {"torch_empty_cache"},
    "/release_memory_occupation": {"tags"},
    "/resume_memory_occupation": {"tags"},
}
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PRINTING = threading.Lock()
TOKEN_S = float(os.environ.get("FAKE_TOKEN_S", "0"))


def options():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("model-path", "host", "served-model-name", "load-format", "dtype"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("port", "context-length", "max-running-requests", "tp-size"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--mem-fraction-static", type=float, required=True)
    for name in ("enable-deterministic-inference", "disable-cuda-graph", "enable-memory-saver"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args()


def tensors_of(path):
    data = (pathlib.Path(path) / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    head = json.loads(data[8 : 8 + length])
    assert head.pop("__metadata__") == {"format": "pt"}
    found, end = {}, 0
    for name, item in head.items():
        first, last = item["data_offsets"]
        if first != end:
            raise ValueError(f"{name}: invalid offset")  # as safetensors says where there is a gap
        end = last
        raw = data[8 + length + first : 8 + length + last]
        if item["dtype"] == "BF16":
            array = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            array = np.frombuffer(raw, {"F32": np.float32, "F16": np.float16}[item["dtype"]])
        found[name] = array.reshape(item["shape"]).astype(np.float64)
    if 8 + length + end != len(data):
        raise ValueError("metadata incomplete buffer")
    return found


class Engine:
    def __init__(self, args):
        self.args, self.version, self.model = args, "default", {}
        self.path = args.model_path
        self.changed = threading.Condition()
        self.gone = set()
        self.paused, self.running, self.aborts, self.sampled = False, 0, 0, 0.0
        file = pathlib.Path(args.model_path) / "tokenizer.json"
        vocab = json.loads(file.read_text())["model"]["vocab"] if file.is_file() else {}
        self.text = {i: text for text, i in vocab.items()}
        config = json.loads((pathlib.Path(args.model_path) / "config.json").read_text())
        ends = config.get("eos_token_id", [])
        self.eos = set(ends) if isinstance(ends, list) else {ends}

    def load(self, body):
        if body.get("load_format") in (None, "dummy"):
            rng = np.random.default_rng(0)
            new = {name: rng.normal(size=array.shape) for name, array in self.model.items()}
        else:
            new = tensors_of(body["model_path"])
        if "weights" in self.gone:
            raise ValueError("the memory of the weights was released")
        for name, array in new.items():
            if name in self.model and array.shape != self.model[name].shape:
                raise ValueError(f"{name}: size mismatch")
        with self.changed:
            self.changed.wait_for(lambda: self.paused or not self.running)
            self.model |= new
            self.path = body["model_path"]

    def logits(self, last):
        embed = self.model[EMBED]
        return self.model.get(HEAD, embed) @ embed[last]

    def generate(self, body):
        ids, how = body["input_ids"], body["sampling_params"]
        room = self.args.context_length - 1 - len(ids) - 1
        most = min(how["max_new_tokens"], room)
        with self.changed:
            self.changed.wait_for(lambda: not self.paused and not self.gone)
            self.running += 1
            aborts = self.aborts
        tokens, said, finish = [], [], None
        try:
            while finish is None:
                time.sleep(TOKEN_S)
                with self.changed:
                    self.changed.wait_for(lambda: not self.paused or self.aborts > aborts)
                    if self.aborts > aborts:
                        finish = {"type": "abort", "message": "Aborted"}
                        break
                    token, logprob = self.draw(ids + tokens, how)
                    self.sampled = time.monotonic()
                tokens.append(token)
                said.append([logprob, token, None])
                finish = self.finish(tokens, how, most)
            version = self.version
        finally:
            with self.changed:
                self.running -= 1
                self.changed.notify_all()
        if finish["type"] == "abort" and not tokens:
            return {"text": "", "meta_info": {"finish_reason": finish | {"message": "Abort before prefill"}}}
        meta = {"finish_reason": finish, "output_token_logprobs": said, "weight_version": version}
        return {"text": self.decode(tokens), "output_ids": tokens, "meta_info": meta}

    def draw(self, ids, how):
        logits = self.logits(ids[-1])
        if how["temperature"] == 0:
            token = int(np.argmax(logits))
            return token, float(logits[token] - np.log(np.exp(logits - logits.max()).sum()) - logits.max())
        logits = logits / how["temperature"]
        logp = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        order = np.argsort(-logp)
        share = np.cumsum(np.exp(logp[order])) - np.exp(logp[order])
        gone = [*order[share > how["top_p"]], *(order[how["top_k"] :] if how["top_k"] > 0 else [])]
        kept = logp.copy()
        kept[gone] = -np.inf
        kept[logp < logp.max() + np.log(max(how["min_p"], 1e-300))] = -np.inf
        seed = how["sampling_seed"] if self.args.enable_deterministic_inference else None
        rng = np.random.default_rng(None if seed is None else [seed, len(ids)])
        token = int(np.argmax(kept + rng.gumbel(size=len(kept))))
        return token, float(logp[token])

    def decode(self, tokens):
        return "".join(self.text.get(token, chr(97 + token)) for token in tokens)

    def finish(self, tokens, how, most):
        if len(tokens) >= most:
            return {"type": "length", "length": most}
        if not how["ignore_eos"] and tokens[-1] in self.eos | set(how["stop_token_ids"]):
            return {"type": "stop", "matched": tokens[-1]}
        found = next((stop for stop in how["stop"] if stop in self.decode(tokens)), None)
        return None if found is None else {"type": "stop", "matched": found}

    def pause(self, mode):
        with self.changed:
            self.paused = True
            if mode == "abort":
                self.aborts += 1
                self.changed.notify_all()
                self.changed.wait_for(lambda: not self.running)

    def resume(self):
        with self.changed:
            self.paused = False
            self.changed.notify_all()

    def release(self, tags):
        if self.running or not self.args.enable_memory_saver:
            raise ValueError("release_memory_occupation: the server is not idle, or --enable-memory-saver is off")
        self.gone |= set(tags)
        if "weights" in tags:
            self.model = {name: np.full(array.shape, np.nan) for name, array in self.model.items()}

    def healthy(self):
        asked = time.monotonic()
        while time.monotonic() < asked + 0.5:  # for SGLang's 20 seconds
            with self.changed:
                if not self.paused or self.sampled > asked:
                    return True
            time.sleep(0.05)
        return False


class App:
    """`sglang.srt.entrypoints.http_server.app`: keeps the middlewares that it is given."""

    def __init__(self):
        self.added = []

    def add_middleware(self, made):
        self.added.append(made)

    def begin(self, path, headers):
        """Status and headers of what the middlewares answer; status 0 where they pass the request on."""
        said = []

        async def send(message):
            said.append(message)

        async def inner(scope, receive, send):
            await send({"type": "http.response.start", "status": 0, "headers": []})

        for made in self.added:
            inner = made(inner)
        fields = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        asyncio.run(inner({"type": "http", "path": path, "headers": fields}, None, send))
        return said[0]["status"], said[0]["headers"]


class Handler(http.server.BaseHTTPRequestHandler):
    def parse_request(self):
        """As SGLang's app: what a middleware answers is the answer."""
        from sglang.srt.entrypoints.http_server import app

        if not super().parse_request():
            return False
        status, self.added = app.begin(self.path, self.headers)
        if status:
            self.added = [(name, value) for name, value in self.added if not name.startswith(b"content-")]
            self.answer(status, {"detail": "a middleware"})
        return not status

    def do_GET(self):
        engine, args = self.server.engine, self.server.engine.args
        generates = os.environ.get("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "1") != "0"
        if self.path == "/v1/models":
            self.answer(200, {"data": [{"id": args.served_model_name, "max_model_len": args.context_length}]})
        elif self.path == "/server_info":
            deterministic = args.enable_deterministic_inference
            self.answer(200, {"max_total_num_tokens": 10_000, "enable_deterministic_inference": deterministic})
        elif self.path == "/model_info":
            self.answer(200, {"model_path": engine.path, "weight_version": engine.version})
        elif self.path == "/health" and not generates:
            self.answer(200, None)
        elif self.path in ("/health", "/health_generate"):
            self.answer(200 if engine.healthy() else 503, None)
        else:
            self.answer(404, {"detail": "Not Found"})

    def do_POST(self):
        engine = self.server.engine
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with PRINTING:
            print(f"{self.path} {json.dumps(body)}", flush=True)
        if self.path not in FIELDS:
            return self.answer(404, {"detail": "Not Found"})
        strange = {*body} - FIELDS[self.path] | {*body.get("sampling_params", {})} - PARAMS
        if strange:
            return self.answer(422, {"detail": f"unknown: {sorted(strange)}"})
        if self.path == "/generate":
            return self.answer(200, engine.generate(body))
        if self.path == "/pause_generation":
            if body.get("mode", "abort") not in ("abort", "retract", "in_place"):
                return self.answer(422, {"detail": "mode"})
            engine.pause(body.get("mode", "abort"))
            return self.answer(200, {"message": "Generation paused successfully.", "status": "ok"})
        if self.path == "/continue_generation":
            engine.resume()
            return self.answer(200, {"message": "Generation continued successfully.", "status": "ok"})
        if self.path == "/resume_memory_occupation":
            engine.gone -= set(body["tags"])
            return self.answer(200, None)
        try:
            if self.path == "/release_memory_occupation":
                engine.release(body["tags"])
                return self.answer(200, None)
            engine.load(body)
        except (OSError, ValueError, KeyError, struct.error) as e:
            return self.answer(400, {"success": False, "message": f"Failed to update weights: {e}"})
        engine.version = body.get("weight_version") or engine.version
        self.answer(200, {"success": True, "message": "Succeeded to update model weights."})

    def answer(self, status, said):
        data = b"" if said is None else json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in self.added:
            self.send_header(name.decode(), value.decode())
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.wfile.write(data)

    def log_message(self, *args):
        pass


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128
    allow_reuse_address = True


if __name__ == "__main__":
    given = options()
    listening = Server((given.host, given.port), Handler)
    listening.engine = Engine(given)
    listening.serve_forever()
