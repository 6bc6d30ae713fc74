"""Replies of a server that answers with anything: each is a fault in one line, never a sample and never a traceback."""

import asyncio
import base64
import contextlib
import dataclasses
import gzip
import io
import itertools
import json
import math
import socket
import threading

import numpy as np
import pytest

from jppo.plugins.sglang.client import Sglang
from jppo.rollout.protocol import RolloutError, greedy
from jppo.rollout.servers import endpoint, http_client, replies
from jppo.rollout.servers.endpoint import Busy, Endpoint, ServerFault
from jppo.rollout.servers.member import ServerSettings
from jppo.rollout.vllm.client import Vllm
from jppo.rollout.vllm.publish import call_workers, require_ok

VOCAB, END = 32, 2
SAMPLING = dataclasses.replace(greedy(4), temperature=1.0)
OK = b"HTTP/1.1 200 OK\r\n"


class Hostile:
    """Answers every request with the same bytes, or with an endless sequence of them, and closes."""

    def __init__(self, answer):
        self.answer = answer
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.recv(65536)
                for piece in [self.answer] if isinstance(self.answer, bytes) else self.answer():
                    connection.sendall(piece)


@pytest.fixture
def hostile():
    """A maker of endpoints of hostile servers."""
    servers = []

    def make(answer):
        servers.append(Hostile(answer))
        return Endpoint(servers[-1].url, timeout_s=5.0, explain=str)

    yield make
    for server in servers:
        server.socket.close()


def content(body, *, head=OK, fields=b""):
    return head + fields + b"Content-Length: %d\r\n\r\n" % len(body) + body


ENDLESS = {
    "endless_header": lambda: itertools.chain([OK], itertools.repeat(b"X-More: of it\r\n" * 100)),
    "endless_line": lambda: itertools.chain([OK], itertools.repeat(b"x" * 10000)),
    "endless_content": lambda: itertools.chain([OK + b"\r\n"], itertools.repeat(b" " * 10000)),
    "endless_chunks": lambda: itertools.chain(
        [OK + b"Transfer-Encoding: chunked\r\n\r\n"], itertools.repeat(b"400\r\n" + b" " * 1024 + b"\r\n")
    ),
    "endless_trailer": lambda: itertools.chain(
        [OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n"], itertools.repeat(b"X-More: of it\r\n" * 100)
    ),
}
REPLIES = {
    "nothing": b"",
    "no_content": content(b""),
    "not_unicode": content(b'{"id": "\xff\xfe"}'),
    "half_a_character": content('{"id": "é"}'.encode()[:-3]),
    "deep": content(b"[" * 100_000 + b"]" * 100_000),
    "digits": content(b"9" * 10_000),
    "not_json": content(b"<html>\n<body>\x1b[31mlogin\n"),
    "compressed": content(gzip.compress(b" " * 10**6), fields=b"Content-Encoding: gzip\r\n"),
    "redirect": content(b"", head=b"HTTP/1.1 302 Found\r\n", fields=b"Location: http://127.0.0.1:9/\r\n"),
    "created": content(b"{}", head=b"HTTP/1.1 201 Created\r\n"),
    "partial": content(b"{}", head=b"HTTP/1.1 206 Partial\r\n"),
    "continue": content(b"{}", head=b"HTTP/1.1 100 Continue\r\n"),
    "strange_status": content(b"{}", head=b"HTTP/1.1 -200 OK\r\n"),
    "no_status": b"HTTP/1.1\r\n\r\n",
    "lines_in_an_error": content(b"one\r\ntwo\x1b[2J\nthree", head=b"HTTP/1.1 500 Error\r\n"),
    "no_retry_time": content(
        b"", head=b"HTTP/1.1 503 X\r\n", fields=b"Retry-After: Mon, 01 Jan 0001 00:00:00 -9999\r\n"
    ),
    "too_long": OK + b"Content-Length: 1000000000000000000\r\n\r\n{}",
    "negative_length": OK + b"Content-Length: -2\r\n\r\n{}",
    "length_of_digits": OK + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n{}",
    "early_close": OK + b"Content-Length: 100\r\n\r\n{}",
    "early_close_in_a_chunk": OK + b"Transfer-Encoding: chunked\r\n\r\n64\r\n{}",
    "no_last_chunk": OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n",
    "chunks_of_garbage": OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "negative_chunk": OK + b"Transfer-Encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n",
    "chunk_longer_than_its_size": OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}  \r\n0\r\n\r\n",
    "another_protocol": b"SSH-2.0-OpenSSH_9.6\r\n",
    "binary": bytes(range(256)) * 10,
} | ENDLESS


@pytest.mark.parametrize("name", REPLIES)
def test_a_reply_that_is_no_json_is_a_fault_in_one_line(hostile, name, monkeypatch):
    monkeypatch.setattr(http_client, "MOST_CONTENT", 1 << 20)
    one = hostile(REPLIES[name])
    for ask in (
        lambda: one.get("/v1/models"),
        lambda: one.post("/pause", {}),
        lambda: one.get_field("/model_info", "weight_version", str),
        lambda: asyncio.run(one.ask("/generate", {"a": 1})),
        lambda: call_workers(one, "jppo_info"),
    ):
        with pytest.raises(ServerFault) as e:
            ask()
        assert str(e.value).isprintable() and len(str(e.value)) < 700 and one.url in str(e.value)


def test_an_answer_of_a_hundred_megabytes_is_a_fault_before_it_is_read(hostile):
    whole = json.dumps(vllm_answer()).encode()
    longest = replies.max_answer_bytes(SAMPLING)
    assert longest < 2e6 and replies.max_answer_bytes(dataclasses.replace(SAMPLING, kept=2)) is None
    for fields in (b"Content-Length: %d\r\n\r\n" % 10**8, b"\r\n"):
        one = hostile(lambda fields=fields: itertools.chain([OK + fields], [b" " * 10**6] * 100, [whole]))
        with pytest.raises(ServerFault, match=f"(exceeds |not within 0..){longest}"):
            asyncio.run(one.ask("/generate", {}, max_bytes=longest))
    one = hostile(content(b" " * (longest - len(whole)) + whole))
    assert asyncio.run(one.ask("/generate", {}, max_bytes=longest)) == vllm_answer()


@pytest.mark.parametrize(
    "answer",
    [
        *(1, None, [], "text", {}, {"results": []}, {"results": {}}, {"results": [None]}, {"results": [1]}),
        *({"results": ["ok"]}, {"results": [{}]}, {"results": [{"ok": "true"}]}, {"results": [{"ok": 1}]}),
        json.loads("[" * 900 + "]" * 900),
        {"results": [json.loads('{"a":' * 900 + "1" + "}" * 900)]},
        {"results": [{"ok": True}, {"ok": None}]},
    ],
)
def test_what_no_worker_answers_is_a_fault(hostile, answer):
    one = hostile(content(json.dumps(answer).encode()))
    with pytest.raises(ServerFault) as e:
        require_ok(one, 1, "jppo_load")
    assert str(e.value).isprintable() and len(str(e.value)) < 700


def test_a_refusal_is_said_in_one_line(hostile):
    for error in ("one\ntwo\x1b[2J \ud800", None, {"why": ["x"] * 1000}):
        one = hostile(content(json.dumps({"results": [{"ok": False, "error": error}]}).encode()))
        with pytest.raises(RolloutError, match="refused version 1 of the weights: ") as e:
            require_ok(one, 1, "jppo_load")
        assert not isinstance(e.value, ServerFault) and str(e.value).isprintable()


def vllm_answer(tokens=(5, 6, END), logprobs=(-0.5, -1.0, -0.25), finish="stop", spans=None, **more):
    spans = [{"version": "7", "start": 0, "end": len(tokens)}] if spans is None else spans
    choice = {
        "token_ids": list(tokens),
        "logprobs": {"content": [{"logprob": x} for x in logprobs]},
        "finish_reason": finish,
        "weight_versions": spans,
    }
    return {"choices": [choice | more]}


def sglang_answer(tokens=(5, 6, END), logprobs=(-0.5, -1.0, -0.25), finish="stop", **more):
    entries = [[x, token, None] for x, token in zip(logprobs, tokens, strict=True)]
    reason = {"type": finish} | ({"matched": tokens[-1]} if finish == "stop" else {})
    meta = {"finish_reason": reason, "output_token_logprobs": entries, "weight_version": "7"}
    return {"meta_info": meta | more}


SETTINGS = ServerSettings(max_model_len=64, vocab_size=VOCAB)
APIS = {"vllm": Vllm([END], SETTINGS, "how"), "sglang": Sglang([END], VOCAB, "how")}


def read(api, answer, sampling=SAMPLING):
    with replies.reading("the server", answer):
        return APIS[api].parse_reply(answer, sampling)


def test_good_answers():
    for api, made in (("vllm", vllm_answer), ("sglang", sglang_answer)):
        part = read(api, made())
        found = (part.tokens, part.logprob, part.version, part.finish)
        assert found == ([5, 6, END], [-0.5, -1.0, -0.25], ["7"] * 3, "stop")
        assert read(api, made((0, VOCAB - 1), (0, -9000.5), "length")).finish == "length"
        assert read(api, made((5,), (1e-6,), "abort")).finish == "abort", "a rounding above 0"
        assert read(api, made((5, END), (-1.0, -1.0), "length")).finish == "stop"
        free = dataclasses.replace(SAMPLING, ignore_eos=True)
        assert read(api, made((END, END), (-1.0, -1.0), "length"), free).finish == "length"
    two = [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 1}]
    two += [{"version": "9", "start": 1, "end": 3}]
    assert read("vllm", vllm_answer(spans=two)).version == ["7", "9", "9"]
    assert read("vllm", vllm_answer((), (), "abort")).tokens == []


CHOICE = vllm_answer()["choices"][0]
OF_BOTH = [
    *(dict(tokens=(5, bad, END)) for bad in (VOCAB, 999999, -1, -5, "7", 7.0, True, None, [7], {}, 10**30, math.nan)),
    *(
        dict(logprobs=(-0.5, bad, -0.25))
        for bad in (3.5, 0.01, math.nan, math.inf, -math.inf, -9999.0, "-1", True, None, [-1.0], 10**400, -(10**400))
    ),
    *(dict(finish=bad) for bad in ("tool_calls", "STOP", None, 1, ["stop"], {})),
    dict(tokens=(), logprobs=(), finish="length"),
    dict(tokens=(5,) * 5, logprobs=(-1.0,) * 5, finish="length"),  # of four
    dict(tokens=(5, END, 6), finish="length"),  # tokens after the end
    dict(tokens=(END, END, END)),
]


@pytest.mark.parametrize("api, made", [("vllm", vllm_answer), ("sglang", sglang_answer)])
@pytest.mark.parametrize("wrong", OF_BOTH, ids=str)
def test_an_answer_that_cannot_be_is_a_fault(api, made, wrong):
    with pytest.raises(ServerFault, match="the server answered unexpectedly: ") as e:
        read(api, made(**wrong))
    assert str(e.value).isprintable() and len(str(e.value)) < 700


SPANS = [
    *(None, 1, "spans", {}, [], [None], [[0, 3, "7"]], [{}], [{"start": 0, "end": 3}]),
    [{"version": 7, "start": 0, "end": 3}],
    [{"version": True, "start": 0, "end": 3}],
    [{"version": "7", "start": 0, "end": 2}],
    [{"version": "7", "start": 0, "end": 4}],
    [{"version": "7", "start": 1, "end": 3}],
    [{"version": "7", "start": 0, "end": 10**15}],
    [{"version": "7", "start": 0.0, "end": 3}],
    [{"version": "7", "start": False, "end": 3}],
    [{"version": "7", "start": "0", "end": 3}],
    [{"version": "7", "start": -1, "end": 3}],
    [{"version": "7", "start": 0, "end": 2}, {"version": "8", "start": 1, "end": 2}],  # 3 versions of 3 tokens
    [{"version": "7", "start": 0, "end": 2}, {"version": "8", "start": 2, "end": 1}],
    [{"version": "7", "start": 1, "end": 3}, {"version": "8", "start": 0, "end": 1}],
    [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 2, "end": 3}],
]


@pytest.mark.parametrize(
    "answer",
    [
        *({}, [], None, 1, "text", {"choices": None}, {"choices": []}, {"choices": {}}, {"choices": [None]}),
        {"choices": vllm_answer()["choices"] * 2},
        json.loads('{"choices":' + "[" * 900 + "]" * 900 + "}"),
        *({"choices": [CHOICE | {name: None}]} for name in CHOICE),
        *({"choices": [{k: x for k, x in CHOICE.items() if k != name}]} for name in CHOICE),
        *(vllm_answer(logprobs=x) for x in ((), (-1.0,) * 2, (-1.0,) * 4)),
        *(vllm_answer(token_ids=x) for x in ("5", 5, {"5": 6}, [[5, 6, END]])),
        vllm_answer(finish="stop", tokens=(5, 6, 7)),  # at no end token
        *(vllm_answer(weight_versions=spans) for spans in SPANS),
    ],
    ids=lambda answer: str(answer)[:60] if len(json.dumps(answer)) < 1500 else "deep",
)
def test_an_answer_that_is_not_vllms_is_a_fault(answer):
    with pytest.raises(ServerFault, match="the server answered unexpectedly: ") as e:
        read("vllm", answer)
    assert str(e.value).isprintable() and len(str(e.value)) < 700


@pytest.mark.parametrize(
    "answer",
    [
        *({}, [], None, {"meta_info": None}, {"meta_info": []}, sglang_answer(finish_reason=None)),
        *(sglang_answer(weight_version=x) for x in (7, None, True)),
        *(sglang_answer(output_token_logprobs=x) for x in (None, 1, [1], [[]], [[-1.0]], "ab", {"a": 1})),
        sglang_answer(finish_reason={"type": "stop", "matched": None}),
        sglang_answer() | {"text": 1},
    ],
    ids=str,
)
def test_an_answer_that_is_not_sglangs_is_a_fault(answer):
    with pytest.raises(ServerFault, match="the server answered unexpectedly: ") as e:
        read("sglang", answer)
    assert str(e.value).isprintable()


def encoded(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return base64.b64encode(file.getvalue()).decode()


GOOD = np.zeros((4, 2, 3), np.uint8)
HUGE = (
    b"\x93NUMPY\x01\x00v\x00{'descr': '|u1', 'fortran_order': False, 'shape': (100000000000, 2, 3), }".ljust(127)
    + b"\n"
)


def test_experts_are_those_of_the_model():
    api = Vllm([END], dataclasses.replace(SETTINGS, experts=(2, 3, 8)), "how")
    sampling = dataclasses.replace(SAMPLING, experts=True)
    for good in (GOOD, np.asfortranarray(GOOD + np.arange(3, dtype=np.uint8)), GOOD.astype(np.int64) + 7):
        found = api.parse_reply(vllm_answer(routed_experts=encoded(good)), sampling).experts
        assert found.dtype == np.int16 and np.array_equal(found, good)
    bad = [GOOD.astype(np.float32), GOOD[:, :1], GOOD[..., :2], GOOD[0], GOOD + 8, GOOD.astype(np.int32) - 1]
    bad += [np.array(["a"]), np.array([{}], object), GOOD.astype(complex)]
    texts = [*map(encoded, bad), encoded(GOOD)[:-8], encoded(GOOD)[:8], "", "é", "*", 1, [], "UEsDBA=="]
    texts += [base64.b64encode(file).decode() for file in (HUGE, b"\x93NUMPY\x01\x00\x04\x00('''")]
    for text in texts:
        answer = vllm_answer(routed_experts=text)
        with pytest.raises(ServerFault) as e, replies.reading("the server", answer):
            api.parse_reply(answer, sampling)
        assert str(e.value).isprintable() and len(str(e.value)) < 1000


@pytest.mark.parametrize(
    "mask",
    [
        [[5], [6], [VOCAB]],
        [[5], [6], [-1]],
        [[5], [6], [2.0]],
        [[5], [6], ["2"]],
        [[5], [6], [True]],
        [[5], [6], [[2]]],
        [[5], [6], 2],
        5,
        "567",
        {"a": 1},
    ],
)
def test_kept_tokens_are_tokens(mask):
    with pytest.raises(ServerFault, match="the server answered unexpectedly: "):
        read("vllm", vllm_answer(sampling_mask=mask), dataclasses.replace(SAMPLING, kept=4))


@pytest.mark.parametrize(
    "named, number",
    [
        ("7", 7),
        ("0", 0),
        ("default", None),
        (None, None),
        (7, None),
        ("-1", None),
        ("9" * 5000, None),
        ("٣", None),
        ("", None),
        (True, None),
    ],
)
def test_versions_by_name(named, number):
    assert replies.version(named) == number


@pytest.mark.parametrize(
    "given",
    [
        "nan",
        "inf",
        "-1",
        "²",
        "9" * 400,
        "Mon, 01 Jan 99999 00:00:00 GMT",
        "x" * 1000,
        "Mon, 01 Jan 0001 00:00:00 +99999999",
        "Thu, 01 Jan 1970 00:00:00 -0000",
    ],
)
def test_a_time_to_wait_is_a_number_that_is_not_below_0(given):
    after = endpoint._retry_after_s(http_client.Reply(503, {"retry-after": given}, b""))
    assert after >= 0 and endpoint.retry_pause_s(after, 0, 10.0) <= 10.0


def test_a_probe_asks_a_busy_server_once_and_a_check_five_times(hostile, monkeypatch):
    monkeypatch.setattr(endpoint, "AGAIN_S", 0.001)
    asked = []
    busy = hostile(lambda: asked.append(1) or [content(b"", head=b"HTTP/1.1 429 X\r\n")])
    with pytest.raises(Busy):
        asyncio.run(busy.check_async("/health"))
    assert len(asked) == 1
    with pytest.raises(Busy):
        busy.check("/health")
    assert len(asked) == 1 + 5
