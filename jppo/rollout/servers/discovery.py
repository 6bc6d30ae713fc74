"""Looks up the addresses of running servers that come and go, in a file or by a DNS name."""

import functools
import socket
from collections.abc import Callable
from pathlib import Path

Lookup = Callable[[], list[str]]  # OSError or ValueError while the addresses cannot be known


def make_lookup(where: Path | tuple[str, int]) -> Lookup:
    """Makes the look-up of the present addresses in a file, or of a DNS name and a port."""
    return functools.partial(_in_file, where) if isinstance(where, Path) else functools.partial(_by_name, *where)


def _in_file(path: Path) -> list[str]:
    lines = (line.partition("#")[0].strip().rstrip("/") for line in path.read_text(encoding="utf-8").splitlines())
    urls = list(dict.fromkeys(filter(None, lines)))
    if not urls:  # also while a file is written in place
        raise ValueError(f"{path} names no server; write an address on each line")
    for url in urls:
        if not url.startswith(("http://", "https://")) or "@" in url:
            raise ValueError(f"{path}: {url!r} is no address; write it like http://127.0.0.1:8000")
    return urls


def _by_name(name: str, port: int) -> list[str]:
    found = {str(at[4][0]) for at in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)}
    return [f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}" for host in sorted(found)]
