"""The Tinker server: the official client's loops learn on it, and the wire, the keys and the order of requests."""

import contextlib
import json
import os
import pathlib
import socket
import struct
import subprocess
import sys
import threading
import time

import httpx
import numpy as np
import pytest

import jppo
from examples import arithmetic
from jppo import tinker as tinker_command
from jppo.errors import BadRequest
from jppo.plugins.tinker import futures, requests, sessions
from jppo.plugins.tinker.requests import FLOAT32, INT64, MESSAGES
from tests import make

KEY, OTHER = "tml-" + "a" * 32, "tml-" + "b" * 32
SHAPE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
ROOT = pathlib.Path(__file__).resolve().parents[3]


# Bytes of tinker 0.38.0: a request for the gradient of PPO, and a gradient's and a sample's results.
ASKED = """
0a09733a747261696e3a3010ac021a740a0c0a0a0a08030000002c010000121d0a0a616476616e7461676573120f0a080000000000000040
1801220102121b0a086c6f6770726f6273120f0a0800000000000000bf180122010212280a0d7461726765745f746f6b656e7312170a102c
0100000000000007000000000000001802220102220370706f2a1d0a12636c69705f6c6f775f7468726573686f6c6411cdccccccccccec3f
3a1f0a12636c69705f6c6f775f7468726573686f6c64120909cdccccccccccec3f
"""
GRADIENT = """
0a0b41727261795265636f7264123a12360a086c6f6770726f6273122a0a0c000080bf000000c0000000bf12180000000000000000080000
00000000000c00000000000000180118021a130a086c6f73733a73756d110000000000000c40
"""
SAMPLE = "0a1608011208050000002c0100001a08000080bf000080be"


def test_binary_messages_are_the_clients():
    asked = bytes.fromhex(ASKED.replace("\n", ""))
    message = requests.read_message(asked)
    found = requests.read_gradient(message)
    assert (message.model_id, message.seq_id) == ("s:train:0", 300)
    assert (found.loss, found.forward_only) == ("ppo", False)
    assert found.options == {"clip_low_threshold": 0.9}
    (datum,) = found.data
    assert datum.tokens.tolist() == [3, 300]
    assert {name: x.tolist() for name, x in datum.inputs.items()} == {
        "target_tokens": [300, 7],
        "logprobs": [0.0, -0.5],
        "advantages": [0.0, 2.0],
    }
    rows = [np.array([-1.0, -2.0]), np.array([-0.5])]
    assert requests.gradient_message(rows, {"loss:sum": 3.5}) == bytes.fromhex(GRADIENT.replace("\n", ""))
    assert requests.samples_message([(np.array([5, 300]), np.array([-1.0, -0.25]), True)]) == bytes.fromhex(SAMPLE)
    for cut in range(1, len(asked)):
        with contextlib.suppress(BadRequest):  # a shorter message may be whole
            requests.read_gradient(requests.read_message(asked[:cut]))


@pytest.mark.parametrize(
    "name", ["a/weights", "a/weights/b/c", "a/states/b", "../weights/b", "a/weights/..", "a/weights/", "/weights/b"]
)
def test_a_checkpoint_lies_in_the_folder_of_its_key(tmp_path, name):
    one, other = (requests.checkpoint_folder(tmp_path, owner, "s:1/weights/b") for owner in ("x", "y"))
    assert one.parent.parent.parent.parent == tmp_path and one.parts[-3:] == ("s-1", "weights", "b") and one != other
    with pytest.raises(BadRequest, match=r"must be tinker://MODEL/weights/NAME"):
        requests.checkpoint_folder(tmp_path, "x", name)


def write_model(path):
    arithmetic.write_model(path)
    (path / "config.json").write_text(json.dumps(arithmetic.MODEL | SHAPE))
    make.write_weights(path)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """A server in this process, and its address."""
    folder = tmp_path_factory.mktemp("tinker")
    write_model(folder / "model")
    data = dict(max_prompt_length=16, max_response_length=8, row_lengths=1)
    engine = dict(name="inprocess", kv_cache_memory_bytes=2**20)
    with jppo.open(str(folder / "model"), lora=4, engine=engine, data=data, actor=dict(ppo_mini_batch_size=4)) as m:
        made = sessions.Service(m, "small", 4, folder=folder / "states", expiry_s=300, max_sessions=100)
        server, address = tinker_command.start_server(made, (KEY, OTHER), "127.0.0.1", 0)
        worker = threading.Thread(target=made.work)
        worker.start()
        yield made, f"{address}/api/v1/"
        made.stop()
        worker.join()
        server.loop.call_soon_threadsafe(server.close)


def test_a_client_learns_what_the_server_trains_and_samples(service):
    def get(path):
        return httpx.get(service[1] + path, headers={"X-API-Key": KEY}, timeout=60)

    small = dict(model_name="small", max_context_length=16 + 8, trainable=True, sampleable=True)
    assert get("get_server_capabilities").json() == {"supported_models": [small]}
    assert get("healthz").json() == {"status": "ok"} and get("nothing").status_code == 404


def test_no_more_sessions_than_the_server_allows(service, post, monkeypatch):
    monkeypatch.setattr(service[0], "_max_sessions", len(service[0]._sessions) + 1)
    assert post("create_session", {}).status_code == 200
    refused = post("create_session", {})
    assert refused.status_code == 400 and "at most --sessions=" in refused.text


@pytest.fixture
def post(service, monkeypatch):
    monkeypatch.setattr(sessions, "POLL_S", 0.3)

    def send(path, body, key=KEY):
        how = dict(content=body) if isinstance(body, bytes) else dict(json=body)
        return httpx.post(service[1] + path, headers={"X-API-Key": key}, timeout=60, **how)

    return send


@pytest.fixture
def model(post):
    """A new model of a new session."""
    session = post("create_session", {}).json()["session_id"]
    lora = dict(rank=4, seed=0)
    asked = post("create_model", dict(session_id=session, model_seq_id=0, base_model="small", lora_config=lora)).json()
    return session, result(post, asked)["model_id"]


def result(post, asked):
    """Waits for the result of a future."""
    until = time.monotonic() + 120
    while (found := post("retrieve_future", dict(request_id=asked["request_id"]))).status_code == 408:
        assert time.monotonic() < until
    return found.json() if found.headers["content-type"] == "application/json" else found.content


def array(x, dtype, number, **shape):
    return dict(dense=np.array(x, dtype).tobytes(), dtype=number, **shape)


def asking(model_id, number, tokens, loss, arrays, **more):
    """The bytes of a request for a gradient of one example."""
    chunk = dict(encoded_text=dict(tokens=np.array(tokens, "<i4").tobytes()))
    datum = dict(chunks=[chunk], inputs=[dict(key=name, value=x) for name, x in arrays.items()])
    fields = dict(model_id=model_id, seq_id=number, data=[datum], loss=loss, **more)
    return MESSAGES["ForwardBackwardRequest"](**fields).SerializeToString()


def gradient(model_id, number, forward_only=False):
    targets = dict(target_tokens=array([4, 5], "<i8", INT64))
    return asking(model_id, number, [3, 4], "cross_entropy", targets, forward_only=forward_only)


def step(model_id, number):
    return dict(model_id=model_id, seq_id=number, adam_params=dict(learning_rate=0.1))


def test_what_a_session_holds_is_bounded(service, post, model, monkeypatch):
    session, id = model
    for place, name, most in ((sessions, "_MOST_MODELS", 3), (futures, "_MOST_SAMPLERS", 3)):
        monkeypatch.setattr(place, name, most)
    begin = dict(session_id=session, base_model="small", lora_config=dict(rank=4))
    made = [post("create_model", begin | dict(model_seq_id=i)) for i in (1, 2, 3)]
    assert [one.status_code for one in made] == [200, 200, 400] and "has 3 models, the most" in made[2].text
    again = post("create_model", begin | dict(model_seq_id=2))
    assert again.json() == made[1].json()

    asked = dict(prompt=dict(chunks=[dict(tokens=[3])]), sampling_params=dict(max_tokens=1))
    names = []
    for number in range(4):  # the first one is used, so that the second one is forgotten
        sampler = dict(session_id=session, sampling_session_seq_id=number, base_model="small")
        names.append(post("create_sampling_session", sampler).json()["sampling_session_id"])
        assert post("asample", asked | dict(sampling_session_id=names[0], seq_id=number)).status_code == 200
    assert "not known" in post("asample", asked | dict(sampling_session_id=names[1], seq_id=9)).json()["detail"]
    assert len(service[0]._sessions[session].samplers) == 3

    until = time.monotonic() + 60
    while (unfinished := service[0]._sessions[session].unfinished) and time.monotonic() < until:
        time.sleep(0.05)
    assert unfinished == service[0]._sessions[session].unfinished_bytes == 0
    monkeypatch.setattr(futures, "_MOST_UNFINISHED", 3)
    late = [post("optim_step", step(id, number)).status_code for number in (9, 8, 7, 6)]  # before 1: none can run
    assert late == [200, 200, 200, 429]
    assert post("optim_step", step(id, 9)).status_code == 200  # it was accepted before
    monkeypatch.setattr(futures, "_MOST_UNFINISHED", 9)
    monkeypatch.setattr(futures, "_MOST_WAITING", service[0]._sessions[session].unfinished_bytes + 100)
    assert post("optim_step", step(id, 5) | dict(type="x" * 100)).status_code == 429
    assert post("optim_step", step(id, 5)).status_code == 200
    monkeypatch.setattr(futures, "_MOST_WAITING", 0)
    assert post("optim_step", step(id, 2)).status_code == 429
    first = post("optim_step", step(id, 1)).json()  # all others wait for it
    assert "without a gradient" in result(post, first)["error"]


def test_as_many_requests_wait_for_an_earlier_one_as_a_refusal_says(post, model, monkeypatch):
    """The first has number 1: 2, 3 and 4 wait for it."""
    monkeypatch.setattr(sessions, "_MOST_EARLY", 3)
    made = [post("optim_step", step(model[1], number)) for number in (4, 3, 2, 5)]
    assert [one.status_code for one in made] == [200, 200, 200, 429]
    assert "seq_id=5: the next is 1, and at most 3 later ones wait" in made[-1].text
    assert "without a gradient" in result(post, post("optim_step", step(model[1], 1)).json())["error"]


def test_requests_of_a_model_run_in_order_and_once(post, model):
    id = model[1]
    late = post("optim_step", step(id, 2)).json()
    last = post("forward_backward", gradient(id, 3, forward_only=True)).json()
    assert post("retrieve_future", dict(request_id=late["request_id"])).status_code == 408
    first = post("forward_backward", gradient(id, 1)).json()
    assert post("forward_backward", gradient(id, 1)).json() == first
    before, after = result(post, first), result(post, last)
    assert b"loss:sum" in before and before != after
    assert "actor/grad_norm:mean" in result(post, late)["metrics"]
    assert post("optim_step", step(id, 2)).json() == late
    again = post("forward_backward", gradient(id, 4, forward_only=True)).json()
    assert result(post, again) == after  # the repeats did nothing
    empty = result(post, post("optim_step", step(id, 5)).json())
    assert empty["category"] == "user" and "without a gradient" in empty["error"]


def test_a_refused_request_takes_its_number(post, model):
    """The client counts it, and sends the next one by the next number: too many parts, two targets, no checkpoint."""
    id = model[1]
    parts = {1: (b"\x1a\x00" * 10**6, "1000000 "), 2: (b"\x1a\xc0\x84\x3d" + b"\x0a\x00" * 500_000, "500001 ")}
    for number, (more, text) in parts.items():
        head = MESSAGES["ForwardBackwardRequest"](model_id=id, seq_id=number).SerializeToString()
        found = result(post, post("forward_backward", head + more).json())
        assert text + "examples and arrays or more" in found["error"]
    square = dict(target_tokens=array(np.zeros(4), "<i8", INT64, shape=[2, 2]))
    wrong = asking(id, 3, [3, 4], "cross_entropy", square)
    lost = dict(model_id=id, seq_id=4, path="tinker://none/weights/none", optimizer=False)
    for path, body, text in (("forward_backward", wrong, "shape [2, 2]"), ("load_weights", lost, "no checkpoint")):
        assert text in result(post, post(path, body).json())["error"]
    assert b"loss:sum" in result(post, post("forward_backward", gradient(id, 5)).json())


def test_a_checkpoint_can_be_loaded_by_the_next_request(post, model):
    id = model[1]
    late = dict(model_id=id, seq_id=2, path=f"tinker://{id}/weights/next", optimizer=True)
    loaded = post("load_weights", late).json()
    result(post, post("save_weights", dict(model_id=id, seq_id=1, path="next")).json())
    assert result(post, loaded)["type"] == "load_weights"


def of_token(model_id, old_logprob, advantage, loss):
    """A request with a target of one token, sampled with that log-prob."""
    arrays = dict(target_tokens=array([4], "<i8", INT64), logprobs=array([old_logprob], "<f4", FLOAT32))
    arrays |= dict(advantages=array([advantage], "<f4", FLOAT32))
    return asking(model_id, 1, [3], loss, arrays)


@pytest.mark.parametrize("old_logprob, advantage, loss", [(-30.0, 1.0, -1.2), (0.0, -1.0, 0.8), (-30.0, -1.0, None)])
def test_ppo_is_clipped_as_the_api_says(post, model, old_logprob, advantage, loss):
    """By 0.8 and 1.2 unless the request has others, and not a second time where the ratio is large."""
    body = of_token(model[1], old_logprob, advantage, "ppo")
    raw = result(post, post("forward_backward", body).json())
    at = raw.index(b"loss:sum") + len(b"loss:sum") + 1  # after the tag of a double
    (found,) = struct.unpack("<d", raw[at : at + 8])
    assert found > 1e6 if loss is None else found == pytest.approx(loss)


@pytest.mark.parametrize("given, name", [((), "the/model"), (("--name=small",), "small")])
def test_clients_name_the_model_or_its_name(monkeypatch, given, name):
    monkeypatch.setenv(tinker_command.KEYS, KEY)
    monkeypatch.setattr(tinker_command, "open_model", lambda *_, **__: contextlib.nullcontext())
    named = []

    def service(model, name, *_, **__):
        named.append(name)
        raise EOFError  # before it serves

    monkeypatch.setattr(tinker_command, "Service", service)
    with pytest.raises(EOFError):
        tinker_command.main(["the/model", "--port=0", *given])
    assert named == [name]


def test_an_address_that_is_not_free_is_refused_before_the_model_is_loaded(monkeypatch, capsys):
    monkeypatch.setenv(tinker_command.KEYS, KEY)
    monkeypatch.setattr(tinker_command, "open_model", pytest.fail)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port, why in ((70000, "must be 0 to 65535"), (taken.getsockname()[1], "in use")):
            with pytest.raises(SystemExit) as e:
                tinker_command.main(["the/model", f"--port={port}"])
            assert e.value.code == 2 and why in capsys.readouterr().err


def test_results_are_json_where_a_gradient_is_not_finite(post, model):
    """NaN is none of RFC 8259's numbers; the ratio overflows at a log-prob of -1e5 in float32."""
    id = model[1]
    body = of_token(id, -1e5, 1.0, "importance_sampling")
    result(post, post("forward_backward", body).json())
    asked = post("optim_step", step(id, 2)).json()
    result(post, asked)
    raw = post("retrieve_future", dict(request_id=asked["request_id"])).text
    found = json.loads(raw, parse_constant=pytest.fail)
    assert found["metrics"]["actor/skipped:mean"] == 1.0 and "actor/grad_norm:mean" not in found["metrics"]


def test_a_checkpoint_is_replaced_where_asked_only(post, model):
    _, id = model
    save, load = dict(model_id=id, path="one"), dict(model_id=id, optimizer=True)
    path = result(post, post("save_weights", save | dict(seq_id=1)).json())["path"]
    assert "exists; take another name" in result(post, post("save_weights", save | dict(seq_id=2)).json())["error"]
    result(post, post("forward_backward", gradient(id, 3)).json())
    result(post, post("optim_step", step(id, 4)).json())
    assert result(post, post("save_weights", save | dict(seq_id=5, overwrite=True)).json())["path"] == path
    assert result(post, post("load_weights", load | dict(seq_id=6, path=path)).json())["path"] == path


def test_a_key_reaches_its_sessions_only(post, model):
    session, id = model
    assert post("create_session", {}, key="tml-" + "c" * 32).status_code == 401
    saved = result(post, post("save_weights", dict(model_id=id, seq_id=1, path="one")).json())["path"]
    sampler = post("create_sampling_session", dict(session_id=session, sampling_session_seq_id=0, base_model="small"))
    sampler = sampler.json()["sampling_session_id"]
    prompt = dict(chunks=[dict(tokens=[3, 4])])
    asked = dict(sampling_session_id=sampler, seq_id=0, prompt=prompt, sampling_params=dict(max_tokens=2))
    future = post("asample", asked).json()
    own = post("create_session", {}, key=OTHER).json()["session_id"]
    for path, body in {
        "session_heartbeat": dict(session_id=session),
        "create_model": dict(session_id=session, model_seq_id=1, base_model="small", lora_config=dict(rank=4)),
        "get_info": dict(model_id=id),
        "forward_backward": gradient(id, 2),
        "optim_step": step(id, 2),
        "retrieve_future": dict(request_id=future["request_id"]),
        "asample": asked | dict(seq_id=1),
        "load_weights": dict(session_id=own, model_seq_id=0, path=saved, optimizer=True),
        "create_sampling_session": dict(session_id=session, sampling_session_seq_id=1, base_model="small"),
    }.items():
        assert post(path, body, key=OTHER).status_code == 404, path
    assert b"\x12" in result(post, future)


def test_a_prompt_is_scored_by_its_samplers_weights(post, model):
    """Against `forward` of the model, before and after it has learned; the first token has none, and `last_n` some."""
    session, id = model
    sampler = dict(session_id=session, sampling_session_seq_id=0, base_model="small")
    sampler = post("create_sampling_session", sampler).json()["sampling_session_id"]

    def scores(number, tokens, **more):
        asked = dict(sampling_session_id=sampler, seq_id=number, sampling_params=dict(max_tokens=1), **more)
        asked |= dict(prompt=dict(chunks=[dict(tokens=tokens)]), prompt_logprobs=True)
        future = post("asample", asked).json()
        found = MESSAGES["SampleResponse"].FromString(result(post, future))
        assert len(future["sample_sequence_ids"]) == len(found.sequences)  # as the client requires
        return np.frombuffer(found.prompt_logprobs, "<f4"), found.sequences

    def forward(number):
        raw = result(post, post("forward_backward", gradient(id, number, forward_only=True)).json())
        (column,) = MESSAGES["ForwardBackwardOutput"].FromString(raw).record.columns
        return np.frombuffer(column.value.data, "<f4")

    before, (first, sequences) = forward(1), scores(0, [3, 4, 5])
    assert len(sequences) == 1 and np.isnan(first[0])
    np.testing.assert_allclose(first[1:], before, rtol=1e-5)
    result(post, post("forward_backward", gradient(id, 2)).json())
    result(post, post("optim_step", step(id, 3)).json())
    assert np.abs(forward(4) - before).max() > 1e-3
    again, _ = scores(1, [3, 4, 5], prompt_logprobs_last_n=1)
    assert np.isnan(again[:2]).all() and again[2] == first[2]
    long, sequences = scores(2, [3, 4, 5] * 7)  # longer than max_prompt_length: only scored
    assert len(long) == 21 and not sequences and np.isfinite(long[1:]).all()
    np.testing.assert_allclose(long[1:3], before, rtol=1e-5)
    alone, sequences = scores(3, [3])
    assert np.isnan(alone).all() and len(alone) == len(sequences) == 1


def test_samples_stop_at_tokens(post, model):
    sampler = dict(session_id=model[0], sampling_session_seq_id=0, base_model="small")
    sampler = post("create_sampling_session", sampler).json()["sampling_session_id"]
    asked = dict(sampling_session_id=sampler, seq_id=0, num_samples=16, prompt=dict(chunks=[dict(tokens=[3, 4])]))
    stop = {4, 5, 7, 9}
    how = dict(max_tokens=8, stop=sorted(stop), seed=1)
    raw = result(post, post("asample", asked | dict(sampling_params=how)).json())
    rows = [np.frombuffer(one.tokens, "<i4").tolist() for one in MESSAGES["SampleResponse"].FromString(raw).sequences]
    ends = {row[-1] for row in rows if len(row) < 8}
    assert ends & stop and ends <= {1, *stop}
    assert not any(stop & {*row[:-1]} for row in rows)


def test_only_samples_asked_alike_are_drawn_together(post, model, monkeypatch):
    """The worker waits with the first request until the others are there. Requests with a seed are drawn alone."""
    drawn, arrived, answer = [], threading.Event(), sessions.answer_samples

    def record(base, jobs):
        arrived.wait(60)
        drawn.append([int(job.id.rpartition(":")[2]) for job in jobs])
        answer(base, jobs)

    monkeypatch.setattr(sessions, "answer_samples", record)
    sampler = dict(session_id=model[0], sampling_session_seq_id=0, base_model="small")
    sampler = post("create_sampling_session", sampler).json()["sampling_session_id"]
    asked = []
    for how in ({}, {"max_tokens": 2}, {}, {"max_tokens": 2, "seed": 1}, {"max_tokens": 2}, {"temperature": 0.5}, {}):
        body = dict(sampling_session_id=sampler, seq_id=len(asked), prompt=dict(chunks=[dict(tokens=[3, 4])]))
        asked.append(post("asample", body | dict(sampling_params=dict(max_tokens=1) | how)).json())
    arrived.set()
    for one in asked:
        result(post, one)
    assert drawn in ([[0], [1, 4], [2, 6], [3], [5]], [[0, 2, 6], [1, 4], [3], [5]])


def test_a_sampler_in_use_does_not_expire(post, model):
    names = []
    asked = dict(prompt=dict(chunks=[dict(tokens=[3])]), sampling_params=dict(max_tokens=1))
    for number in range(sessions.UNNAMED + 2):
        made = dict(model_id=model[1], seq_id=number + 1, sampling_session_seq_id=number)
        names.append(result(post, post("save_weights_for_sampler", made).json())["sampling_session_id"])
        assert post("asample", asked | dict(sampling_session_id=names[0], seq_id=number)).status_code == 200
    expired = post("asample", asked | dict(sampling_session_id=names[1], seq_id=0))
    assert expired.status_code == 404 and "expired" in expired.json()["detail"]


def test_only_the_last_weights_of_a_name_are_kept(service, post, model):
    session, id = model
    names = []
    for number in range(3):
        saved = post("save_weights_for_sampler", dict(model_id=id, seq_id=number + 1, path="policy")).json()
        sampler = dict(session_id=session, sampling_session_seq_id=number, model_path=result(post, saved)["path"])
        names.append(post("create_sampling_session", sampler).json()["sampling_session_id"])
    samplers = service[0]._sessions[session].samplers
    assert [samplers[name] is None for name in names] == [True, True, False]
    asked = dict(prompt=dict(chunks=[dict(tokens=[3])]), sampling_params=dict(max_tokens=1), seq_id=0)
    expired = post("asample", asked | dict(sampling_session_id=names[1]))
    assert expired.status_code == 404 and "one of each name" in expired.json()["detail"]


def test_a_request_that_fails_leaves_the_results_of_its_group(service, post, model, monkeypatch):
    write, written = futures.samples_message, []

    def fail_third(*given):
        written.append(given)
        if len(written) == 3:
            raise ValueError
        return write(*given)

    session, _ = model
    sampler = dict(session_id=session, sampling_session_seq_id=0, base_model="small")
    sampler = post("create_sampling_session", sampler).json()["sampling_session_id"]
    asked = dict(
        sampling_session_id=sampler, prompt=dict(chunks=[dict(tokens=[3])]), sampling_params=dict(max_tokens=1)
    )
    monkeypatch.setattr(futures, "samples_message", fail_third)
    arrived, answer = threading.Event(), sessions.answer_samples

    def wait(base, jobs):
        arrived.wait(60)
        answer(base, jobs)

    monkeypatch.setattr(sessions, "answer_samples", wait)
    made = [post("asample", asked | dict(seq_id=number)).json() for number in range(3)]
    arrived.set()
    assert [type(result(post, one)) for one in made] == [bytes, bytes, dict]
    assert service[0]._sessions[session].unfinished == 0


def test_a_session_ends_when_its_client_closes_it(service, post, model):
    session, id = model
    asked = post("forward_backward", gradient(id, 1)).json()
    assert post(f"sessions/{session}/finish", {}, key=OTHER).status_code == 404
    assert post(f"sessions/{session}/finish", dict(reason=dict(type="success"))).status_code == 200
    until = time.monotonic() + 60
    while session in service[0]._sessions and time.monotonic() < until:
        time.sleep(0.1)
    assert post("retrieve_future", dict(request_id=asked["request_id"])).status_code == 404


def test_a_session_that_died_expires_with_its_gradient(service, post, model):
    session, id = model
    result(post, post("forward_backward", gradient(id, 1)).json())
    held = service[0]._sessions[session].models[id].model
    assert held.policy.accumulated == 1
    service[0]._sessions[session].last_seen -= 301
    until = time.monotonic() + 30
    while session in service[0]._sessions and time.monotonic() < until:
        time.sleep(0.1)
    found = post("optim_step", step(id, 2))
    assert found.status_code == 404 and "expired" in found.json()["detail"]
    assert held.policy.accumulated == 0


def test_wrong_requests_get_one_line(post, model):
    session, id = model
    lora = dict(rank=4, train_unembed=True)
    begin = dict(session_id=session, model_seq_id=1, base_model="small", lora_config=lora)
    sampler = dict(session_id=session, sampling_session_seq_id=0, base_model="small")
    sampler = post("create_sampling_session", sampler).json()["sampling_session_id"]
    prompt = dict(chunks=[dict(tokens=[3, 4])])
    sample = dict(sampling_session_id=sampler, seq_id=0, prompt=prompt, sampling_params=dict(max_tokens=2))
    for path, body, text in (
        ("create_model", begin | dict(lora_config=dict(rank=8)), "rank=8"),
        ("create_model", begin | dict(lora_config=lora | dict(train_mlp=False)), "train_mlp=False"),
        ("create_model", begin | dict(optimizer_config=dict(type="dimuon")), "'dimuon'"),
        ("create_model", begin | dict(lora_config=lora | dict(new=1)), "new=1"),
        ("asample", sample | dict(topk_prompt_logprobs=2), "topk_prompt_logprobs=2"),
        ("asample", sample | dict(prompt_logprobs_last_n=1), "prompt_logprobs_last_n (without prompt_logprobs)=1"),
        ("asample", sample | dict(prompt_logprobs=True, prompt_logprobs_last_n=2), "must be 1 to 1"),
        ("asample", sample | dict(prompt=dict(chunks=[dict(tokens=[3] * 17)])), "17 tokens; it must have 1 to"),
        ("asample", sample | dict(prompt_logprobs=True, prompt=dict(chunks=[dict(tokens=[3] * 25)])), "1 to 16"),
        # A response was asked for, too, and there is no room for it.
        ("asample", sample | dict(prompt_logprobs=True, prompt=dict(chunks=[dict(tokens=[3] * 20)])), "1 to 16"),
        ("asample", sample | dict(sampling_params=dict(max_tokens=99)), "max_tokens=99"),
        ("asample", sample | dict(sampling_params=dict(stop=[10**6])), "stop='1000000'"),
        ("asample", sample | dict(prompt=dict(chunks=[dict(tokens=[10**6])])), "token outside"),
        ("asample", sample | dict(sampling_params=dict(temperature=None)), "temperature='None'"),
        ("optim_step", dict(model_id=id, seq_id=True), "seq_id='True'"),
        ("optim_step", b"[", "not valid JSON"),
        ("forward_backward", b"\x0a\xff", "no protobuf message"),
        ("forward_backward", b"\x10" + b"\xff" * 10 + b"\x01", "no protobuf message"),
        ("forward_backward", b"\x4b" * 10**5, "no protobuf message"),  # groups in groups
        ("forward_backward", b"\x0a\x02\xff\xfe", "no protobuf message"),  # a text that is not UTF-8
        ("optim_step", b" " * (2**22 + 1), "at most 4194304"),
        ("nothing", {}, "nothing"),
    ):
        found = post(path, body)
        detail = found.json()["detail"]
        assert 400 <= found.status_code < 500 and text in detail and "\n" not in detail, (path, detail)
    failed = dict(model_id=id, seq_id=1, path="../../one")
    assert "must be a name" in result(post, post("save_weights", failed).json())["error"]
    # The client sends NaN as null.
    failed = dict(model_id=id, seq_id=2, adam_params=dict(learning_rate=None))
    assert "learning_rate='None'" in result(post, post("optim_step", failed).json())["error"]


def test_strange_values_in_every_field_are_refused_with_a_line(service, post, model, capfd):
    """Each path of the API, with one field of a valid request replaced; none is a fault of the server."""
    session, id = model
    sampler = dict(session_id=session, sampling_session_seq_id=0, base_model="small")
    sampler = post("create_sampling_session", sampler).json()["sampling_session_id"]
    how = dict(max_tokens=1, temperature=1.0, top_k=3, top_p=0.5, seed=1, stop=["a"])
    valid = {
        "create_model": dict(session_id=session, model_seq_id=0, base_model="small", lora_config=dict(rank=4, seed=1)),
        "load_weights": dict(session_id=session, model_seq_id=0, path="tinker://a/weights/b", optimizer=True),
        "create_sampling_session": dict(session_id=session, sampling_session_seq_id=0, model_path="tinker://a/b/c"),
        "asample": dict(sampling_session_id=sampler, seq_id=0, prompt=dict(chunks=[dict(tokens=[3])])),
        "session_heartbeat": dict(session_id=session),
        "get_info": dict(model_id=id),
        "retrieve_future": dict(request_id=f"{id}:0"),
        "optim_step": dict(model_id=id, seq_id=-1, adam_params={}),
    }
    valid["asample"] |= dict(sampling_params=how)
    checkpoints = [f"tinker://{name}" for name in ("a/weights/" + "a" * 300, "a" * 300 + "/weights/b", "a/weights/a\0")]
    deep = json.loads("[" * 500 + "]" * 500)
    strange = (10**400, -(2**70), 1e308, "\ud800", "a" * 300, "a/../b", *checkpoints, [], {}, [[]], deep)
    raw, marker = ("1e400", "NaN", "9" * 5000), "MARKER"
    with httpx.Client(headers={"X-API-Key": KEY}, timeout=60) as client:

        def replaced(value, new):
            """All copies of a JSON value with one leaf replaced."""
            yield new
            if isinstance(value, dict | list):
                for key in value if isinstance(value, dict) else range(len(value)):
                    for one in replaced(value[key], new):
                        copy = value.copy()
                        copy[key] = one
                        yield copy

        for path, body in valid.items():
            texts = [json.dumps(one) for new in strange for one in replaced(body, new)]
            texts += [json.dumps(one).replace(f'"{marker}"', x) for x in raw for one in replaced(body, marker)]
            for text in texts:
                found = client.post(service[1] + path, content=text)
                assert found.status_code < 500, (path, text[:200], found.text)
                assert found.status_code == 200 or "\n" not in found.json()["detail"]
    assert "Traceback" not in capfd.readouterr().err


@contextlib.contextmanager
def served(folder, model, *arguments):
    """Runs the command in a folder; yields its address."""
    arguments += ("--port=0", "--folder=states", "--data.row_lengths=1", "--rollout.name=inprocess")
    env = os.environ | {"JPPO_TINKER_KEYS": f"{KEY}\n{OTHER}", "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    env["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "jppo.tinker", model, *arguments]
    with subprocess.Popen(command, env=env, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        try:
            line = next(one for one in server.stdout if "http://" in one)
            yield line.split(" is at ")[1].strip()
        finally:
            server.terminate()
            assert server.wait(60) == 0


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """A Python with the official client."""
    return make.python_with(tmp_path_factory.mktemp("tinker"), "tinker==0.38.0")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [4, 0])
def test_loops_of_the_official_client_learn(tmp_path, client, rank):
    write_model(tmp_path / "model")
    settings = ["--data.max_prompt_length=16", "--data.max_response_length=8", "--actor.ppo_mini_batch_size=4"]
    with served(tmp_path, "model", f"--lora={rank}", "--rollout.kv_cache_memory_bytes=4194304", *settings) as url:
        env = os.environ | {"TINKER_BASE_URL": url, "TINKER_API_KEY": KEY, "OTHER_KEY": OTHER, "TINKER_TELEMETRY": "0"}
        command = [client, str(ROOT / "tests/plugins/tinker/tinker_client.py"), "model", str(rank)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["info"] is (rank > 0)
    assert found["after"] < 0.7 * found["losses"][0]
    assert found["untouched"][0] == found["untouched"][1]
    np.testing.assert_allclose([found["loaded"], found["from_state"]], found["after"], rtol=1e-5)
    for loss in ("importance_sampling", "ppo", "cispo"):
        assert np.mean(found[loss][-3:]) > np.mean(found[loss][:3]) + 0.1, (loss, found[loss])
    assert 1 <= len(found["greedy"]) <= 4
    assert found["scores"][0] is None
    np.testing.assert_allclose(found["scores"][1:], found["forward"], rtol=1e-4)
    wanted = dict(rank="trains", base="is not served", loss="'gspo'", topk="topk_prompt_logprobs=1")
    wanted |= dict(sampler="another key", state="no checkpoint of this key")
    for name, text in wanted.items():
        assert text in (found["refused"][name] or ""), (name, found["refused"][name])
