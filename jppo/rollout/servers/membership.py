"""Servers that join and leave a run, by look-ups in a file or by a DNS name.

A joining server gets the current weights before its first request.
"""

import asyncio
import functools
import socket
import time
from collections.abc import Callable
from pathlib import Path

from jppo.rollout.protocol import RolloutError
from jppo.rollout.servers.member import Member
from jppo.rollout.servers.repair import Repairs, say
from jppo.rollout.servers.router import Router
from jppo.settings import UserError

LOOKUP_S = 2.0  # between two look-ups
Lookup = Callable[[], list[str]]  # OSError or ValueError while the addresses cannot be known


class Membership:
    """The look-ups of a fleet; methods run on its event loop, with its thread pool as the loop's executor."""

    def __init__(
        self,
        lookup: Lookup,
        make: Callable[[str, bool], Member],
        router: Router,
        repairs: Repairs,
        *,
        start_timeout_s: float,
    ):
        """`make` inspects the server at an address; a server of this run may be paused."""
        self._lookup = lookup
        self._make = make
        self._router = router
        self._repairs = repairs
        self._start_timeout_s = start_timeout_s
        self._ours = {member.endpoint.url for member in router.members}  # a publish that broke off may have paused them
        self._told: dict[str, str] = {}  # faults by address, each reported once
        self._joining: dict[str, asyncio.Task[None]] = {}  # by address
        self._missed: set[str] = set()  # addresses that the last look-up did not name

    async def watch(self) -> None:
        """Follows the look-up until cancelled."""
        found = time.monotonic()
        while True:
            await asyncio.sleep(LOOKUP_S)
            await self.follow()
            if any(member.up or member.blank for member in self._router.members):
                found = time.monotonic()
            elif time.monotonic() - found > self._start_timeout_s:
                why = "; ".join(self._told.values()) or "it names none"
                said = f"no server of rollout.urls works since rollout.start_timeout_s={self._start_timeout_s:g}"
                self._router.fail(RolloutError(f"{said}; {why}"))

    async def follow(self) -> None:
        """Looks up the addresses once; lets servers leave, and lets new ones begin to join."""
        try:
            urls = await asyncio.to_thread(self._lookup)
        except (OSError, ValueError) as e:  # the present servers stay
            self._tell("", f"rollout.urls cannot be looked up: {e}")
            return
        self._told.pop("", None)
        present = {member.endpoint.url: member for member in self._router.members}
        missed = present.keys() - set(urls)
        leaving, self._missed = missed & self._missed, missed  # one look-up may read a half-written file
        for url in leaving:
            say(f"the server at {url} leaves")
            await self._repairs.drop(present[url])
        for url in set(urls) - present.keys() - self._joining.keys():
            self._joining[url] = asyncio.get_running_loop().create_task(self._join(url))

    async def _join(self, url: str) -> None:
        began = time.monotonic()
        try:
            member = await asyncio.to_thread(self._make, url, url in self._ours)
            shortest = min((other.max_model_len for other in self._router.members), default=0)
            if member.max_model_len < shortest:  # the fleet refuses longer requests than its shortest server takes
                said = f"has max_model_len={member.max_model_len}, and the others {shortest} or more"
                raise RolloutError(f"the server at {url} {said}")
            self._ours.add(url)
            await self._repairs.admit(member)
        except (RolloutError, UserError) as e:
            self._tell(url, f"{e.__cause__ or e}; it joins when it answers")  # without the command that starts one
            return
        except Exception as e:  # no other task waits for this one
            self._router.fail(e)
            return
        finally:
            self._joining.pop(url)
        self._told.pop(url, None)
        say(f"the server at {url} joins after {time.monotonic() - began:.1f} s")

    def _tell(self, about: str, fault: str) -> None:
        if self._told.get(about) != fault:
            self._told[about] = fault
            say(fault)


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
