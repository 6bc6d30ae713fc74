"""Addresses of running servers in a setting: a list, or the place where they are looked up."""

import pathlib
import urllib.parse

from jppo.errors import UserError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
Named = tuple[str, int]  # a DNS name and a port


def listed(urls: str) -> list[str]:
    """Splits a list."""
    return [url.strip() for url in urls.split(",") if url.strip()]


def place(urls: str) -> pathlib.Path | Named | None:
    """Returns the file of `file:PATH` or the name of `dns://NAME:PORT`; None for a list, UserError if malformed."""
    try:
        at = urllib.parse.urlsplit(urls.strip())
        if at.scheme == "file" and at.path and not at.netloc and not at.query:
            return pathlib.Path(at.path)
        if at.scheme == "dns" and at.hostname and at.port and at.netloc == urls.strip()[len("dns://") :]:
            return at.hostname, at.port
    except ValueError:  # of a port
        at = urllib.parse.urlsplit("")
    if urls.strip().startswith(("file:", "dns:")):
        raise UserError(f"rollout.urls={urls!r} must be file:PATH, with an address on each line, or dns://NAME:PORT")
    return None


def remote(urls: str) -> list[str]:
    """Returns the addresses that are not this machine's; also `file:PATH`, whose addresses are not read."""
    return [url for url in listed(urls) if urllib.parse.urlsplit(url).hostname not in LOOPBACK]


def is_address(url: str) -> bool:
    """Whether `url` is a server's address."""
    try:
        at = urllib.parse.urlsplit(url)
        return at.scheme in ("http", "https") and at.hostname is not None and (at.port or 1) > 0
    except ValueError:
        return False
