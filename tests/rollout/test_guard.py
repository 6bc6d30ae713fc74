import asyncio
import hashlib
import hmac
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import types
import urllib.request

import pytest

from jppo.errors import UserError
from jppo.rollout.protocol import RolloutError
from jppo.rollout.servers import guard
from jppo.rollout.servers.delivery import needs_token
from jppo.rollout.servers.endpoint import Endpoint, ServerFault, attached_key
from jppo.rollout.servers.guard import Guard, Key, is_foreign, new_key
from tests.rollout import nobody

ROUTES = ("/health", "/metrics", "/openapi.json", "/v1/models", "/collective_rpc", "/pause", "/anything")

APP = """
import sys, uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route
from jppo.rollout.servers.guard import Guard

async def answer(request):
    return JSONResponse({"route": request.url.path})

metrics = Mount("/metrics", routes=[Route("/", answer)])
app = Starlette(routes=[metrics, Route("/{rest:path}", answer, methods=["GET", "POST"])])
app.add_middleware(Guard)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


@pytest.fixture(scope="module")
def guarded():
    """A server behind the guard: its address and its key."""
    pytest.importorskip("uvicorn")
    pytest.importorskip("starlette")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    key = new_key()
    process = subprocess.Popen([sys.executable, "-c", APP, str(port)], env={**os.environ, **key.environment()})
    deadline = time.monotonic() + 120
    with socket.socket() as probe:
        while probe.connect_ex(("127.0.0.1", port)):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
    yield f"http://127.0.0.1:{port}", key
    process.kill()
    process.wait()


def test_another_user_gets_no_route(guarded):
    url, key = guarded
    plain = {"Content-Type": "text/plain", "Origin": "http://evil.example"}
    wrong = {"Authorization": "Bearer " + "0" * 64}
    asked = [(method, route, how) for method in ("GET", "POST") for route in ROUTES for how in ({}, plain, wrong)]
    assert set(nobody.statuses(url, asked)) == {401}
    # and the token is what opens: the same requests with it are answered, but for a page of another place
    assert nobody.statuses(url, [("POST", "/pause", key.headers())]) == [200]
    assert nobody.statuses(url, [("POST", "/pause", key.headers() | plain)]) == [403]


def test_the_trainer_is_let_in_and_knows_its_server(guarded):
    url, key = guarded
    endpoint = Endpoint(url, timeout_s=10.0, explain=str, key=key)
    assert endpoint.get("/v1/models") == {"route": "/v1/models"} and endpoint.requires_key()
    assert asyncio.run(endpoint.ask("/generate", {})) == {"route": "/generate"}
    asyncio.run(endpoint.check_async("/health"))
    other = Endpoint(url, timeout_s=10.0, explain=str, key=Key("another"))
    for ask in (lambda: other.get("/v1/models"), lambda: asyncio.run(other.ask("/generate", {}))):
        with pytest.raises(ServerFault, match="does not prove that it has this run's JPPO_SERVER_TOKEN"):
            ask()
    with pytest.raises(RolloutError, match="with 401"):
        Endpoint(url, timeout_s=10.0, explain=str).get("/v1/models")


def test_without_a_challenge_there_is_no_proof(guarded):
    url, key = guarded
    for headers, proofs in (({"Authorization": f"Bearer {key.token}"}, 0), (key.headers(), 1)):
        with urllib.request.urlopen(urllib.request.Request(f"{url}/health", headers=headers)) as reply:
            assert len(reply.headers.get_all("X-Jppo-Proof", [])) == proofs
            assert os.uname().nodename not in reply.headers.get("X-Jppo-Process", "")


def test_a_server_without_a_guard_is_warned_of(guarded, capsys):
    url, key = guarded
    api = types.SimpleNamespace(advice="start it with jppo.serve")
    assert needs_token(Endpoint(url, timeout_s=10.0, explain=str, key=key), api)
    assert capsys.readouterr().err == ""
    unguarded = types.SimpleNamespace(url="http://h:1", requires_key=lambda: False)
    assert not needs_token(unguarded, api)
    said = capsys.readouterr().err
    assert said.startswith("rollout: warning: the server at http://h:1 answers without a token")
    assert said.endswith("; start it with jppo.serve\n")


class Impostor:
    """Listens where a server was; repeats the proof that it has seen, and keeps what it hears."""

    def __init__(self, status, proof=""):
        self.heard = []
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.head = (
            f"HTTP/1.1 {status} X\r\nX-Jppo-Proof: {proof}\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}"
        )
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            with connection:
                self.heard.append(connection.recv(65536).decode())
                connection.sendall(self.head.encode())


@pytest.mark.parametrize("status", [200, 401, 403, 404])
def test_who_took_over_the_port_of_a_server_hears_no_token(guarded, status):
    url, key = guarded
    asked = {"X-Jppo-Challenge": "seen"}
    with urllib.request.urlopen(urllib.request.Request(url, headers=key.headers() | asked)) as reply:
        proof = reply.headers["X-Jppo-Proof"]  # of an earlier challenge
    assert proof == hmac.new(key.token.encode(), b"jppo server seen", hashlib.sha256).hexdigest()
    impostor = Impostor(status, proof)
    endpoint = Endpoint(url, timeout_s=10.0, explain=str, key=key)
    endpoint.get("/v1/models")
    endpoint.with_timeout(0.001).fault("broke off")  # the server died, which another request saw
    endpoint.url = impostor.url
    for ask in (
        lambda: endpoint.get("/v1/models"),
        lambda: endpoint.post("/pause"),
        lambda: asyncio.run(endpoint.ask("/generate", {})),
        lambda: asyncio.run(endpoint.check_async("/health")),
    ):
        with pytest.raises(ServerFault, match="does not prove"):
            ask()
    impostor.socket.close()
    assert len(impostor.heard) == 4 and not any(key.token in one for one in impostor.heard)


def test_without_a_token_there_is_no_server(monkeypatch):
    monkeypatch.delenv("JPPO_SERVER_TOKEN", raising=False)
    with pytest.raises(RuntimeError, match="JPPO_SERVER_TOKEN is not set"):
        Guard(None)


def test_a_websocket_without_the_token_is_closed(monkeypatch):
    monkeypatch.setenv("JPPO_SERVER_TOKEN", "secret")
    sent = []

    async def receive():
        return {"type": "websocket.connect"}

    async def send(message):
        sent.append(message)

    asyncio.run(Guard(None)({"type": "websocket", "headers": []}, receive, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_foreign_origins():
    assert not is_foreign(None, b"127.0.0.1:8000") and not is_foreign(b"http://127.0.0.1:8000", b"127.0.0.1:8000")
    for origin in (b"http://evil.example", b"null", b"http://127.0.0.1:8001", b"", b"http://127.0.0.1:8000.evil"):
        assert is_foreign(origin, b"127.0.0.1:8000")


def test_the_token_of_servers_that_are_attached_to_is_of_the_environment(monkeypatch):
    monkeypatch.delenv("JPPO_SERVER_TOKEN", raising=False)
    assert attached_key().headers() == {} and attached_key().is_proven({}, {})
    monkeypatch.setenv("JPPO_SERVER_TOKEN", "secret\n")
    key = attached_key()
    first, second = key.headers(), key.headers()
    nonces = [headers.pop("x-jppo-challenge") for headers in (first, second)]
    assert first == second == {"Authorization": "Bearer secret"} and "secret" not in repr(key)
    assert all(re.fullmatch("[0-9a-f]{32}", nonce) for nonce in nonces) and nonces[0] != nonces[1]
    leased = key.leased().headers()
    assert leased.keys() == {"Authorization", "x-jppo-challenge", "x-jppo-trainer"}
    assert re.fullmatch(r"\S+/\d+", leased["x-jppo-trainer"])
    monkeypatch.setenv("JPPO_SERVER_TOKEN", "two\nlines")
    with pytest.raises(UserError, match="JPPO_SERVER_TOKEN contains invalid characters"):
        attached_key()


class Sampler:
    """An app that pauses and resumes; `blocked` seconds of a load stop the loop, as in one process with the engine."""

    def __init__(self):
        self.paused, self.loads, self.blocked = False, 0, 0.0

    async def __call__(self, scope, receive, send):
        path = scope["path"]
        assert (await receive())["type"] == "http.request"
        self.paused = path != "/resume" and (self.paused or path == "/pause")
        if path == "/load":
            self.loads += 1
            time.sleep(self.blocked)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


@pytest.fixture
def leased(monkeypatch):
    """An app behind the guard with leases of 50 ticks, its asker, which returns status and message, and the ticks."""
    monkeypatch.setenv(guard.TOKEN, "secret")
    monkeypatch.setattr(guard, "LEASE_S", 1.0)
    monkeypatch.setattr(guard, "TICK_S", 0.02)
    ticks = []

    async def tick(seconds):
        ticks.append(seconds)
        await asyncio.sleep(seconds)

    monkeypatch.setattr(guard, "asyncio", types.SimpleNamespace(**vars(asyncio) | {"sleep": tick}))
    sampler = Sampler()
    app = Guard(sampler)

    async def ask(path, trainer="", method="POST"):
        sent, lease = [], [(guard.TRAINER_HEADER.encode(), trainer.encode())] if trainer else []
        headers = [(b"authorization", b"Bearer secret"), *lease]

        async def receive():
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message):
            sent.append(message)

        await app({"type": "http", "method": method, "path": path, "headers": headers}, receive, send)
        return sent[0]["status"], json.loads(sent[1]["body"]).get("error", "")

    return sampler, ask, ticks


async def end_of_pause(sampler):
    async with asyncio.timeout(60):
        while sampler.paused:
            await asyncio.sleep(0.02)


def test_a_pause_ends_with_its_trainer_whose_next_load_is_refused(leased):
    sampler, ask, ticks = leased

    async def run():
        await ask("/pause", "a/1")
        await asyncio.sleep(0.6)
        await ask("/health", "a/1")
        ticks.clear()
        await end_of_pause(sampler)
        assert len(ticks) in (49, 50), "a request renews the lease, in a tick or between two"
        status, why = await ask("/load", "a/1")
        assert status == 503 and "has resumed" in why and not sampler.loads
        assert [await ask(path, "a/2") for path in ("/pause", "/load", "/resume")] == [(200, "")] * 3
        assert not sampler.paused and sampler.loads == 1

    asyncio.run(run())


def test_a_load_that_blocks_the_server_for_longer_than_the_lease_does_not_end_it(leased):
    sampler, ask, _ = leased
    sampler.blocked = 2.0

    async def run():
        await ask("/pause", "a/1")
        await ask("/load", "a/1")
        await asyncio.sleep(0)
        assert sampler.paused and await ask("/resume", "a/1") == (200, "")

    asyncio.run(run())


def test_a_second_trainer_is_refused_by_name_until_the_first_has_gone(leased):
    sampler, ask, _ = leased

    async def run():
        await ask("/pause", "a/1")
        status, why = await ask("/is_paused", "b/1")
        assert status == 409 and "in use by the trainer a; give each its own servers" in why
        assert await ask("/health") == (200, ""), "who is no trainer"
        await ask("/health", "a/end")
        assert not sampler.paused, "the end is orderly"
        assert await ask("/pause", "b/1") == (200, "")
        await end_of_pause(sampler)
        assert await ask("/pause", "c/1") == (200, ""), "b was killed"

    asyncio.run(run())
