"""The HTTP front of the gateway and of the Tinker server: what is a request, and honest clients beside attacks."""

import asyncio
import contextlib
import gc
import json
import os
import socket
import subprocess
import sys
import threading
import time
from http import client

import pytest

from jppo import http_server
from jppo.errors import BadRequest
from jppo.http_server import HttpServer, json_object, json_reply

PATIENCE_S = 60  # of a client, on a busy machine too


def refusal(error):
    return json_reply({"error": str(error)}, error.status)


def test_the_collector_stays_off_where_it_was():
    gc.disable()
    try:
        assert json_object(b"{}") == {} and not gc.isenabled()
    finally:
        gc.enable()
    assert json_object(b"{}") == {} and gc.isenabled()


def admit(key):
    if key != "right":
        raise BadRequest("wrong", status=401)


@contextlib.contextmanager
def serving(answer, **most):
    """The server in a thread, with one key: it, and its port."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = HttpServer(answer, admit, refusal)
    _, port = asyncio.run_coroutine_threadsafe(server.start("127.0.0.1", 0), loop).result()
    vars(server).update(most)
    try:
        yield server, port
    finally:

        async def end():
            server.close()
            await asyncio.sleep(0.05)

        asyncio.run_coroutine_threadsafe(end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def served():
    """The port of a server that says what it read."""

    async def answer(call):
        if call.path == "/fault":
            return json_reply(1 / 0)
        if call.path == "/deep":
            return json_reply(json.loads("[" * 900 + "]" * 900) and deep(0))
        return json_reply({"read": len(call.body), "path": call.path, "method": call.method})

    def deep(n):
        return deep(n + 1)

    with serving(answer) as (_, port):
        yield port


def requested(port, connection=None):
    with contextlib.ExitStack() as ends:
        if connection is None:
            one = client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
            connection = ends.enter_context(contextlib.closing(one))
        connection.request("POST", "/v1/reward", body=b"1234", headers={"Authorization": "Bearer right"})
        return json.loads(connection.getresponse().read())["read"]


def exchanged(port, sent, replies=1):
    """(status, fields, JSON) of each reply, by the standard library's client; then whether the connection ended."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as one:
        one.sendall(sent)
        found, raw = [], one.makefile("rb")
        for _ in range(replies):
            status = int(raw.readline().split()[1])
            fields = client.parse_headers(raw)
            body = raw.read(int(fields["Content-Length"])) if "Content-Length" in fields else b""
            found.append((status, fields, json.loads(body or "null")))
        one.settimeout(0.2)
        try:
            ended = raw.read(1) == b""
        except TimeoutError:
            ended = False
    return found, ended


def head(*fields, target="/a", version="1.1"):
    lines = [f"POST {target} HTTP/{version}", "Host: x", "X-API-Key: right", *fields, "", ""]
    return "\r\n".join(lines).encode("latin-1")


TWO = "Content-Length: 2"
CHUNKED = head("Transfer-Encoding: Chunked")


@pytest.mark.parametrize(
    "sent,status,said",
    [
        (b"nonsense\r\n\r\n", 400, "must be HTTP/1.1"),
        (b"GET /\r\n\r\n", 400, "must be HTTP/1.1"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "must be HTTP/1.1"),  # TLS
        (head(TWO, version="2.0") + b"{}", 505, "must be HTTP/1.1"),
        (b"POST /a HTTP/1.1\r\nX-API-Key: right\r\n\r\n", 400, "Host"),
        (head(TWO, "Content-Length: 1") + b"{}", 400, "conflicting Content-Length"),
        (head(TWO, "Transfer-Encoding: chunked") + b"0\r\n\r\n", 400, "not both"),
        (head("Transfer-Encoding: chunked", version="1.0") + b"0\r\n\r\n", 400, "not both"),
        (head("Transfer-Encoding: gzip, chunked"), 501, "Only Transfer-Encoding: chunked"),
        (head("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"), 501, "multiple Transfer-Encoding"),
        (head("Content-Length : 2") + b"{}", 400, "illegal header line"),
        (head("X-A: a\rb"), 400, "illegal header line"),
        (head("X-A: a\0b"), 400, "illegal header line"),
        *(
            (head(f"Content-Length: {x}") + b"{}", 400, "Content-Length")
            for x in ("", "-2", "+2", "0x2", "2_0", "2, 3")
        ),
        (head("Content-Length: \u0662".encode().decode("latin-1")) + b"{}", 400, "Content-Length"),
        (head("Content-Length: " + "9" * 5000), 400, "Content-Length"),
        (head("Content-Length: 99999999"), 413, "at most 16777216"),
        (head(TWO, "Content-Encoding: gzip") + b"{}", 415, "send the body as it is"),
        (head(*["X-A: b"] * 200), 431, "at most 100 fields"),
        (head("X-A: " + "a" * 2**17), 431, "at most 65536 bytes"),
        (b"A" * 2**17 + b"\r\n\r\n", 431, "at most 65536 bytes"),
        *(
            (CHUNKED + x + b"\r\n{}\r\n0\r\n\r\n", 400, "illegal chunk header")
            for x in (b"-2", b"+2", b"0x2", b"", b"2 3")
        ),
        (CHUNKED + b"f" * 40 + b"\r\n", 400, "illegal chunk header"),
        (CHUNKED + b"1\r\n{}\r\n0\r\n\r\n", 400, "malformed chunk footer"),
        (CHUNKED + b"1;" + b"a" * 2**17 + b"\r\n", 431, "at most 65536 bytes"),
        (CHUNKED + b"0\r\n" + b"X: y\r\n" * 20_000, 431, "at most 65536 bytes"),
        (b"GET /a HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n", 401, "wrong"),
        (b"GET /a HTTP/1.1\r\nHost: x\r\nX-API-Key: \xe9\xff\r\n\r\n", 401, "wrong"),
    ],
)
def test_what_is_no_request_is_refused_with_a_line(served, capfd, sent, status, said):
    [(found, _, body)], ended = exchanged(served, sent)
    assert (
        found == status and said in body["error"] and "\n" not in body["error"] and len(body["error"]) < 300 and ended
    )
    assert requested(served) == 4 and capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "sent,replies,read,path,ends",
    [
        (head(TWO) + b"{}", 1, 2, "/a", False),
        (head(TWO, TWO) + b"{}", 1, 2, "/a", False),  # RFC 9112, 6.3: one length, said twice
        (head("Content-Length: 2, 2") + b"{}", 1, 2, "/a", False),
        (head("X-A: a\r\n b", TWO) + b"{}", 1, 2, "/a", False),  # 5.2: a space takes the place of the line break
        (head(TWO).replace(b"\r\n", b"\n") + b"{}", 1, 2, "/a", False),  # 2.2
        ((head(TWO) + b"{}") * 20, 20, 2, "/a", False),
        (head(TWO, "Connection: close") + b"{}", 1, 2, "/a", True),
        (head(TWO, version="1.0") + b"{}", 1, 2, "/a", True),
        (head(TWO, "Connection: Upgrade", "Upgrade: websocket") + b"{}", 1, 2, "/a", True),
        (head(TWO, target="http://x:1/b?c=d") + b"{}", 1, 2, "/b", False),  # 3.2.2
        (head(target="*"), 1, 0, "*", False),
        (CHUNKED + b"1;x=y\r\n{\r\n1\r\n}\r\n0\r\nTrailer: x\r\n\r\n", 1, 2, "/a", False),
        (head("x-a: " + "a" * 50_000, TWO) + b"{}", 1, 2, "/a", False),
    ],
)
def test_what_is_a_request_is_answered(served, sent, replies, read, path, ends):
    found, ended = exchanged(served, sent, replies)
    assert all((status, body["read"], body["path"]) == (200, read, path) for status, _, body in found) and ended == ends


def test_a_client_that_asks_first_is_told_to_send_its_body(served):
    asks = head(TWO, "Expect: 100-continue")
    [(first, _, _), (second, _, body)], _ = exchanged(served, asks + b"{}", 2)
    assert (first, second, body["read"]) == (100, 200, 2)
    [(status, _, _)], ended = exchanged(served, asks.replace(b"right", b"other"))
    assert status == 401 and ended


def test_a_refusal_is_read_by_a_client_that_still_sends(served):
    """A connection that is closed with unread bytes is reset, and the refusal lost."""
    for fields, status in (({"X-API-Key": "right"}, 413), ({"X-API-Key": "wrong"}, 401)):
        with contextlib.closing(client.HTTPConnection("127.0.0.1", served, timeout=PATIENCE_S)) as one:
            one.request("POST", "/a", b"x" * (http_server.MOST_BODY + 1), fields)
            assert one.getresponse().status == status


def test_a_chunked_body_has_the_bound_of_others(served):
    with socket.create_connection(("127.0.0.1", served), PATIENCE_S) as one:
        one.sendall(CHUNKED)
        for _ in range(17):
            one.sendall(b"100000\r\n" + b"x" * 2**20 + b"\r\n")
        assert b" 413 " in one.recv(100)


def test_a_fault_of_the_server_is_an_answer(served, capfd):
    """Without one, clients would repeat the request for minutes; deep nesting is no fault of the server."""
    [(status, _, body)], ended = exchanged(served, head(target="/fault"))
    assert (status, body["error"], ended) == (500, "the server failed: ZeroDivisionError; see its output", False)
    assert capfd.readouterr().err.count("Traceback") == 1
    [(status, _, body)], _ = exchanged(served, head(target="/deep"))
    assert status == 400 and "nested too deeply" in body["error"] and capfd.readouterr().err == ""


def test_a_body_is_one_json_object():
    assert json_object(b' {"a": [1e5, "\\ud800"]}') == {"a": [1e5, "\ud800"]}
    for body in (b"", b"[]", b"null", b"{", b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": "\xff"}', b"[" * 10**6):
        with pytest.raises(BadRequest, match=r"the body (is not valid JSON|must be a JSON object)") as e:
            json_object(body)
        assert len(str(e.value)) < 200
    began = time.monotonic()
    json_object(b'{"a":[' + b"[]," * 10**6 + b"[]]}")
    assert time.monotonic() - began < 2  # 2.5 s with the garbage collector


@pytest.mark.parametrize("many", [1, 4])
def test_many_small_chunks_block_nobody(served, many):
    body = CHUNKED + b"1\r\nx\r\n" * (10**5 // many) + b"0\r\n\r\n"
    found, worst = [], 0.0
    threads = [threading.Thread(target=lambda: found.append(exchanged(served, body))) for _ in range(many)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        began = time.monotonic()
        assert requested(served) == 4
        worst = max(worst, time.monotonic() - began)
    assert [one[0][2]["read"] for one, _ in found] == [10**5 // many] * many and worst < 2


SENDS = {
    "nothing": b"",
    "half a head": b"POST /a HTTP/1.1\r\nHost",
    "no key": b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n",
    "a key, no body": head("Content-Length: 9"),
    "a key, half a body": head("Content-Length: 9") + b"1234",
    "a key, half a chunk": CHUNKED + b"9\r\n12",
    "ahead": head(TWO) + b"{}" + head("Content-Length: 9"),
    "half of them": b"\r\n",
}


@pytest.mark.parametrize("sent", SENDS.values(), ids=SENDS)
def test_honest_clients_are_answered_beside_half_open_ones(sent):
    """More of them than the server has room for: the oldest make room."""

    async def answer(call):
        return json_reply({"read": len(call.body)})

    with serving(answer, most_unknown=64, most_known=100) as (server, port), contextlib.ExitStack() as held:
        kept = held.enter_context(contextlib.closing(client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)))
        for i in range(300):
            one = held.enter_context(socket.create_connection(("127.0.0.1", port), 5))
            with contextlib.suppress(OSError):
                one.sendall(sent)
            if i % 30 == 0:
                began = time.monotonic()
                assert requested(port) == requested(port, kept) == 4  # its client's next request is among the newest
                assert time.monotonic() - began < 2
        until = time.monotonic() + 5
        while server.answering and time.monotonic() < until:  # its thread may be at the end of a reply
            time.sleep(0.01)
        assert not server.answering and len(server.unknown) <= 64 and len(server.waiting) <= 100
        assert server.held <= 100 * 9


def test_unfinished_bodies_have_a_bound_all_together(monkeypatch):
    monkeypatch.setattr(http_server, "_MAX_HELD", 2**20)

    async def answer(call):
        return json_reply({"read": len(call.body)})

    with serving(answer) as (server, port), contextlib.ExitStack() as held:
        ones = [held.enter_context(socket.create_connection(("127.0.0.1", port), 5)) for _ in range(8)]
        for one in ones:
            one.sendall(head("Content-Length: 300000") + b"x" * 299_999)
            time.sleep(0.05)
        assert requested(port) == 4 and server.held <= 2**20
        ones[-1].sendall(b"x")
        assert b" 200 " in ones[-1].recv(100)
        with contextlib.suppress(ConnectionResetError):
            assert ones[0].recv(100) == b""


def test_a_client_that_sends_without_reading_is_read_no_further():
    answered = []

    async def answer(call):
        answered.append(call)
        return json_reply("x" * 2**20 if call.path == "/long" else "")

    with serving(answer) as (server, port), socket.create_connection(("127.0.0.1", port), 5) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.settimeout(1.5)
        with pytest.raises(TimeoutError):
            one.sendall((head(TWO) + b"{}") * 1000 + (head(TWO, target="/long") + b"{}") * 200_000)
        [connection] = server.waiting
        assert 1000 < len(answered) < 1020 and connection.transport.get_write_buffer_size() <= 2**21
        assert len(connection._http.trailing_data[0]) < 2 * http_server.MOST_HEAD


def asked(*sent, closes=None):
    """The replies to requests on one connection, and the paths whose work was done; what closes after 0.3 s."""
    done = []

    async def answer(call):
        await asyncio.sleep(1.5)
        done.append(call.path)
        return json_reply({"path": call.path, "key": call.key})

    async def exchange():
        server = HttpServer(answer, lambda key: None, refusal)
        reader, writer = await asyncio.open_connection(*await server.start("127.0.0.1", 0))
        writer.write(b"".join(sent))
        if closes is not None:
            await asyncio.sleep(0.3)
            closes(writer)
        found = b""
        while not (found.endswith(b"}") or reader.at_eof()):
            found += await asyncio.wait_for(reader.read(2**16), 5)
        while sent[0].startswith(b"HEAD") and not reader.at_eof():
            found += await asyncio.wait_for(reader.read(2**16), 5)
        if not found.endswith(b"}"):
            await asyncio.sleep(2)
        writer.close()
        server.close()
        return found

    return asyncio.run(exchange()), done


ASKS = b"POST /a HTTP/1.1\r\nHost: x\r\nauthorization: bearer right\r\nContent-Length: 2\r\n\r\n{}"


@pytest.mark.parametrize("closes", [lambda writer: writer.close(), lambda writer: writer.transport.abort()])
def test_the_work_of_a_client_that_has_gone_is_cancelled(closes):
    found, done = asked(ASKS)
    assert done == ["/a"] and b'"key": "right"' in found  # the scheme's name has no case
    assert asked(ASKS, closes=closes)[1] == []


def test_the_work_is_cancelled_before_the_client_asks_again(monkeypatch):
    """Clients repeat a request after half a second; on loopback, the first interim reply is reset at once."""
    monkeypatch.setattr(http_server, "_PROBE_S", 60)
    cancelled = threading.Event()

    async def answer(call):
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with serving(answer) as (server, port):
        with socket.create_connection(("127.0.0.1", port), 5) as one:
            one.sendall(head(TWO) + b"{}")
            while not server.answering:
                time.sleep(0.01)
        assert cancelled.wait(10)


def test_a_client_that_only_stops_sending_is_answered():
    found, done = asked(ASKS, closes=lambda writer: writer.write_eof())
    assert done == ["/a"] and found.startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert b"HTTP/1.1 200 OK" in found and found.endswith(b'{"path": "/a", "key": "right"}')
    found, done = asked(ASKS.replace(b"HTTP/1.1", b"HTTP/1.0"), closes=lambda writer: writer.write_eof())
    assert done == ["/a"] and found.startswith(b"HTTP/1.1 200 OK")  # 1.0 has no interim replies


def test_a_reply_to_head_ends_the_connection():
    """Its body would be read as the next reply."""
    found, done = asked(b"HEAD /a HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /b HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"Connection: close" in found and found.endswith(b"\r\n\r\n") and done == ["/a"]


FLOOD = """
import encodings.idna, os, resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
os.setgroups([]); os.setgid(65534); os.setuid(65534)
held = []
while True:
    try:
        one = socket.create_connection(("127.0.0.1", int(sys.argv[1])), 5)
        one.sendall(sys.argv[2].encode())
    except OSError:
        continue
    held = [*held[-3000:], one]
    if len(held) == 900: print("held", flush=True)
"""
HEADS = {"silent": "", "drips": "POST /v1/chat", "no key": "GET /v1/models HTTP/1.1\r\nContent-Length: 9\r\n\r\n"}


@pytest.mark.parametrize("sends", HEADS.values(), ids=HEADS)
def test_another_user_who_holds_connections_takes_neither_files_nor_the_turn_of_agents(served, sends):
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    before = len(os.listdir("/proc/self/fd"))
    with subprocess.Popen(
        [sys.executable, "-c", FLOOD, str(served), sends], stdout=subprocess.PIPE, text=True
    ) as flood:
        assert flood.stdout.readline() == "held\n"
        try:
            with contextlib.closing(client.HTTPConnection("127.0.0.1", served, timeout=PATIENCE_S)) as kept:
                for _ in range(5):
                    assert requested(served) == requested(served, kept) == 4
            # 512 connections wait. A closed one has a file for four turns of the loop, which accepts 64 in each.
            assert len(os.listdir("/proc/self/fd")) - before < 512 + 4 * 64 + 16
        finally:
            flood.kill()


def test_a_head_without_a_key_has_a_time_and_one_with_a_key_has_not(served, monkeypatch):
    monkeypatch.setattr(http_server, "HEAD_S", 0.3)
    with contextlib.closing(client.HTTPConnection("127.0.0.1", served, timeout=PATIENCE_S)) as kept:
        assert requested(served, kept) == 4
        with socket.create_connection(("127.0.0.1", served)) as slow:
            slow.settimeout(5)
            began = time.monotonic()
            with contextlib.suppress(OSError):
                for _ in range(50):
                    slow.sendall(b"G")
                    time.sleep(0.05)
            assert time.monotonic() - began < 2
        assert requested(served, kept) == 4
