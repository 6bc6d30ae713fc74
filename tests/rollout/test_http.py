import asyncio
import contextlib
import gc
import ssl

import pytest

from jppo.rollout.servers import endpoint

TLS = ssl.create_default_context()
OK = b"HTTP/1.1 200 OK\r\n"


def asked(answer, *, path="/v1/x", body=b"{}", headers=None):
    """Status, headers, content, and what a server that gives this answer was sent."""
    heard = []

    async def run():
        over = asyncio.Event()

        async def serve(reader, writer):
            head = await reader.readuntil(b"\r\n\r\n")
            heard.append(head + await reader.readexactly(len(body)))
            with contextlib.suppress(OSError):  # who has seen enough may be gone
                for piece in answer if isinstance(answer, list) else [answer]:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.01)
                writer.close()
                await writer.wait_closed()
            over.set()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            try:
                return await endpoint.post(f"http://127.0.0.1:{port}{path}", body, tls=TLS, headers=headers or {})
            finally:
                await over.wait()

    found = asyncio.run(asyncio.wait_for(run(), 120))
    return *found, heard[0]


@pytest.mark.parametrize(
    "answer, status, content",
    [
        (OK + b"Content-Length: 5\r\n\r\nhello", 200, b"hello"),
        (OK + b"content-length:0\r\n\r\n", 200, b""),
        ([b"HTTP/1.1 ", b"404 Not Fo", b"und\r\nContent-Le", b"ngth: 3\r\n", b"\r\nn", b"o!"], 404, b"no!"),
        (b"HTTP/1.0 503\r\n\r\nuntil the end", 503, b"until the end"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nA;x=y\r\n, 10 bytes\r\n0\r\nT: 1\r\n\r\n", 200,
         b"hello, 10 bytes"),
        ([OK + b"Content-Length: 200000\r\n\r\n", b"x" * 150000, b"x" * 50000], 200, b"x" * 200000),
    ],
)  # fmt: skip
def test_an_answer_is_read_whole(answer, status, content):
    found = asked(answer)
    assert (found[0], found[2]) == (status, content)


def test_what_is_sent():
    sent = asked(
        OK + b"Content-Length: 0\r\n\r\n", path="/a b?c=d", body=b"[1]", headers={"Authorization": "Bearer x"}
    )[3].decode()
    head, _, body = sent.partition("\r\n\r\n")
    first, *fields = head.split("\r\n")
    assert first == "POST /a%20b?c=d HTTP/1.1" and body == "[1]"
    named = dict(field.split(": ", 1) for field in fields)
    assert named["Host"].startswith("127.0.0.1:") and named["Content-Length"] == "3"
    assert named["Authorization"] == "Bearer x"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-",
        OK + b"Content-Length: 5\r\n\r\nhell",
        OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhel",
        OK + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
        OK + b"Content-Length: many\r\n\r\n",
        b"SSH-2.0-OpenSSH_9\r\n",
        b"HTTP/1.1 fine\r\n\r\n",
    ],
)
def test_half_an_answer_is_none(answer):
    with pytest.raises((endpoint.Broken, OSError)):
        asked(answer)


def test_nobody_there_is_an_oserror():
    with pytest.raises(OSError):
        asyncio.run(endpoint.post("http://127.0.0.1:1/", b"", tls=TLS, headers={}))


@pytest.mark.filterwarnings("error")
def test_a_request_that_is_given_up_leaves_nothing_open():
    async def run():
        hung = asyncio.Event()

        async def serve(reader, writer):
            with contextlib.suppress(ConnectionResetError):
                await reader.read()
            writer.close()
            hung.set()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await endpoint.post(f"http://127.0.0.1:{port}/", b"{}", tls=TLS, headers={})
            assert await asyncio.wait_for(hung.wait(), 60)  # the server saw its end

    asyncio.run(run())
    gc.collect()
