"""Keeps the servers of a run: a broken one is restarted and gets the current weights; others join and leave.

An attached server that breaks is waited for; the others continue. Servers join and leave by look-ups in a file or of a
DNS name; a joining one gets the current weights before its first request.
"""

import asyncio
import contextlib
import functools
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from jppo.errors import UserError
from jppo.rollout.protocol import RolloutError
from jppo.rollout.servers.delivery import ServedWeights, ServerApi, WeightsGone
from jppo.rollout.servers.endpoint import Endpoint, ServerFault
from jppo.rollout.servers.guard import TOKEN
from jppo.rollout.servers.member import Member, Router, ServerLimits

PROBE_S = 2.0  # between two health checks
POLL_S = 0.5


class Repairs:
    """The repairs of a fleet; methods run on its event loop, with its thread pool as the loop's executor."""

    def __init__(
        self,
        router: Router,
        api: ServerApi,
        weights: ServedWeights,
        limits: ServerLimits,
        *,
        start_timeout_s: float,
    ):
        self.restarts = 0
        self.closed = False
        self.elastic = False  # a broken server leaves, and joins when its address is looked up again
        self._router = router
        self._api = api
        self._weights = weights
        self._limits = limits
        self._start_timeout_s = start_timeout_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._probed: dict[Endpoint, asyncio.Task[None]] = {}

    async def watch(self) -> None:
        """Checks the servers' health until cancelled; this also renews the leases of attached ones."""
        while True:
            await asyncio.sleep(PROBE_S)
            probes = dict.fromkeys(self._weights.paused, self._renew)
            probes |= {
                member.endpoint: functools.partial(self._probe, member)
                for member in self._router.members
                if member.up and not member.mending
            }
            for endpoint in probes.keys() - self._probed.keys():  # one that hangs delays no other
                self._probed[endpoint] = asyncio.get_running_loop().create_task(probes[endpoint](endpoint))
                self._probed[endpoint].add_done_callback(functools.partial(self._probed_once, endpoint))

    def _probed_once(self, endpoint: Endpoint, _: asyncio.Task[None]) -> None:
        del self._probed[endpoint]

    def suspect(self, member: Member, fault: ServerFault, *, sure: bool) -> None:
        """Schedules a check of a failed server; `sure`: it is broken without a check."""
        if not member.mending and not self.closed:
            member.mending = True
            task = asyncio.get_running_loop().create_task(self._mend(member, fault, sure=sure))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def admit(self, member: Member) -> None:
        """Adds a server that has got the current weights; ServerFault if it breaks off."""
        await asyncio.to_thread(self._add, member)
        self._router.wake_all()

    async def drop(self, member: Member) -> None:
        """Removes a server; its requests are asked elsewhere."""
        member.up = member.blank = False
        member.give_up()
        self._weights.paused.discard(member.endpoint)  # its lease ends
        await asyncio.to_thread(self._remove, member)

    def leave(self, endpoint: Endpoint) -> None:
        """Leaves an attached server to others at the end of the run: not paused, and without a lease."""
        paused, endpoint = endpoint in self._weights.paused, endpoint.within(self._limits.health_timeout_s)
        try:
            if paused:
                self._api.resume(endpoint)
            endpoint.leave()
        except RolloutError as e:
            if paused:
                say(f"{e}; it stays paused until its lease ends, without {TOKEN} for ever")

    async def _renew(self, endpoint: Endpoint) -> None:
        with contextlib.suppress(RolloutError):  # whoever has paused it notices
            await endpoint.within(self._limits.health_timeout_s).look("/health")

    async def _probe(self, member: Member, endpoint: Endpoint) -> None:
        try:
            if member.server is not None and not member.server.alive():
                raise ServerFault(f"the server at {member.endpoint.url} has ended; {member.server.why()}")
            await endpoint.within(self._limits.health_timeout_s).look("/health")
        except ServerFault as e:
            self.suspect(member, e, sure=True)
        except Exception as e:  # as in `_mend`
            self._router.fail(e)

    async def _mend(self, member: Member, fault: RolloutError, *, sure: bool) -> None:
        try:
            # A second failure, as after a lost reply in an update: this task must repair it.
            if not sure and not await asyncio.to_thread(self._broken, member) and member.up:
                return
            if self.elastic:
                say(f"{fault}; it leaves")
                await self.drop(member)
                return
            member.up = member.blank = False
            member.give_up()
            while not self.closed:
                if self.restarts >= self._limits.max_restarts:
                    reason = f"it is not restarted: rollout.max_restarts={self._limits.max_restarts}"
                    self._router.fail(RolloutError(f"{fault}; {reason}"))
                    return
                when = "" if self._weights.may_start.is_set() else " with the next publish"
                say(f"{fault}; it is {'waited for' if member.server is None else f'restarted{when}'}")
                self.restarts += 1
                began = time.monotonic()
                try:
                    await asyncio.to_thread(self._revive, member)
                    say(f"the server at {member.endpoint.url} is back after {time.monotonic() - began:.1f} s")
                    if member.up:  # otherwise a publish has failed at it since: nobody else repairs it now
                        return
                except WeightsGone as e:
                    self._wait_blank(member, e)
                    return
                except RolloutError as e:
                    fault = e
                    if member.server is None:
                        self._give_up(member, e)
                        return
        except Exception as e:  # an error of settings or code: no other task waits for this one
            self._router.fail(e)
        finally:
            member.mending = False
            self._router.wake_all()

    def _give_up(self, member: Member, why: RolloutError) -> None:
        """Removes an attached server that does not come back; the others continue."""
        if self._others(member):
            say(f"{why}; the other servers continue")
        else:
            self._router.fail(RolloutError(f"{why}; it was the last server"))

    def _wait_blank(self, member: Member, why: WeightsGone) -> None:
        """Leaves a restarted server without weights until the next publish."""
        if why.another_comes or self._others(member):
            say(f"the server at {member.endpoint.url} waits for the next publish: {why}")
        else:
            self._router.fail(RolloutError(f"{why}; {member.endpoint.url} was this host's last server"))

    def _others(self, member: Member) -> bool:
        return any(other.up or other.mending for other in self._router.members if other is not member)

    # In the pool's threads.

    def _broken(self, member: Member) -> bool:
        """Whether a failed server is really broken."""
        if member.server is not None and not member.server.alive():
            return True
        endpoint = member.endpoint.within(self._limits.health_timeout_s)
        try:
            with self._weights.lock:  # no update is in progress
                return self._api.paused(endpoint) or self._api.version(endpoint) != self._weights.version
        except RolloutError:
            return True

    def _revive(self, member: Member) -> None:
        """Restarts the server, or waits for an attached one, and delivers the current weights."""
        if member.server is None:
            self._wait_for(member)
        else:
            self._weights.may_start.wait()  # until the trainer has freed the memory of the GPU that they share
            member.server.restart()
            member.server.wait_ready()
            member.endpoint.move(member.server.url, member.server.key)
            member.about = self._api.inspect(member.endpoint)
        self._weights.catch_up(member)

    def _add(self, member: Member) -> None:
        def join() -> None:
            self._router.members = (*self._router.members, member)

        try:
            self._weights.catch_up(member, join)
        except WeightsGone as e:  # it joins without weights if the next ones are on their way
            if not e.another_comes:
                raise
            with self._weights.lock:
                join()

    def _remove(self, member: Member) -> None:
        with self._weights.lock:
            self._router.members = tuple(other for other in self._router.members if other is not member)

    def _wait_for(self, member: Member) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        member.endpoint.lease()
        while not self.closed:
            try:
                member.endpoint.within(self._limits.health_timeout_s).see("/health")
                member.about = self._api.inspect(member.endpoint)
                return
            except RolloutError as e:
                if time.monotonic() > deadline:
                    fault = f"did not come back within rollout.start_timeout_s={self._start_timeout_s:g}"
                    raise RolloutError(f"the server at {member.endpoint.url} {fault}; {e}") from e
            time.sleep(POLL_S)
        raise RolloutError(f"the server at {member.endpoint.url} is not waited for: the run has ended")


def say(line: str) -> None:
    """Reports an event of the servers on stderr."""
    print(f"rollout: {line}", file=sys.stderr, flush=True)


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
        last_up = time.monotonic()
        while True:
            await asyncio.sleep(LOOKUP_S)
            await self.follow()
            if any(member.up or member.blank for member in self._router.members):
                last_up = time.monotonic()
            elif time.monotonic() - last_up > self._start_timeout_s:
                why = "; ".join(self._told.values()) or "it names none"
                fault = f"no server of rollout.urls works since rollout.start_timeout_s={self._start_timeout_s:g}"
                self._router.fail(RolloutError(f"{fault}; {why}"))

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
            member.require_apart(self._router.members)
            length = member.about.max_model_len
            shortest = min((other.about.max_model_len for other in self._router.members), default=0)
            if length < shortest:  # the fleet refuses longer requests than its shortest server takes
                fault = f"has max_model_len={length}, and the others {shortest} or more"
                raise RolloutError(f"the server at {url} {fault}")
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


def address_lookup(where: Path | tuple[str, int]) -> Lookup:
    """Makes the look-up of the present addresses in a file, or of a DNS name and a port."""
    return functools.partial(_in_file, where) if isinstance(where, Path) else functools.partial(_by_name, *where)


def _in_file(path: Path) -> list[str]:
    lines = (line.partition("#")[0].strip().rstrip("/") for line in path.read_text(encoding="utf-8").splitlines())
    urls = list(dict.fromkeys(filter(None, lines)))
    if not urls:  # also while a file is written in place
        raise ValueError(f"{path} names no server; write an address on each line")
    for url in urls:
        if "@" in url:
            raise ValueError(f"{path}: one with a password is no address; the servers' token is JPPO_SERVER_TOKEN's")
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{path}: {url!r} is no address; write it like http://127.0.0.1:8000")
    return urls


def _by_name(name: str, port: int) -> list[str]:
    addresses = {str(at[4][0]) for at in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)}
    return [f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}" for host in sorted(addresses)]
