"""Keeps the servers of a run: a broken one is restarted and gets the current weights; others join and leave.

An attached server that breaks is waited for; the others continue. Servers join and leave by look-ups in a file or of a
DNS name; a joining one gets the current weights before its first request.
"""

import asyncio
import contextlib
import dataclasses
import functools
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from jppo.errors import UserError
from jppo.rollout.protocol import RolloutError
from jppo.rollout.servers.api import ServerApi
from jppo.rollout.servers.delivery import ServedWeights, WeightsGone
from jppo.rollout.servers.endpoint import Busy, Endpoint, ServerFault
from jppo.rollout.servers.guard import TOKEN
from jppo.rollout.servers.member import Member, Router, ServerSettings, State

PROBE_S = 2.0  # between two health checks
POLL_S = 0.5


class Repairs:
    """The repairs of a fleet; methods run on its event loop, with its thread pool as the loop's executor."""

    def __init__(
        self, router: Router, api: ServerApi, weights: ServedWeights, settings: ServerSettings, *, elastic: bool
    ):
        """`elastic`: a broken server leaves, and joins when its address is looked up again."""
        self.restarts, self.closed = 0, False
        self._router, self._api, self._weights, self._settings, self._elastic = router, api, weights, settings, elastic
        self._tasks: set[asyncio.Task[None]] = set()
        self._probe_tasks: dict[Endpoint, asyncio.Task[None]] = {}

    async def watch(self) -> None:
        """Checks the health of servers that are up until cancelled; the request also renews an attached one's lease."""
        while True:
            await asyncio.sleep(PROBE_S)
            probes = dict.fromkeys(self._weights.paused, self._renew)  # unchecked ones: only the lease
            probes |= {
                member.endpoint: functools.partial(self._probe, member)
                for member in self._router.members
                if member.up and not member.in_repair
            }
            self._probe_tasks = {at: task for at, task in self._probe_tasks.items() if not task.done()}
            for endpoint in probes.keys() - self._probe_tasks.keys():  # one that hangs delays no other
                self._probe_tasks[endpoint] = asyncio.get_running_loop().create_task(probes[endpoint](endpoint))

    def report_failure(self, member: Member, fault: ServerFault, *, broken: bool) -> None:
        """Schedules a check of a failed server; `broken`: it is broken without a check."""
        if not member.in_repair and not self.closed:
            member.in_repair = True
            task = asyncio.get_running_loop().create_task(self._repair(member, fault, broken=broken))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def admit(self, member: Member) -> None:
        """Adds a server that has got the current weights; ServerFault if it breaks off."""
        await asyncio.to_thread(self._add, member)
        self._router.wake_all()

    async def drop(self, member: Member) -> None:
        """Removes a server; its requests are asked elsewhere."""
        member.state = State.BROKEN
        member.cancel_requests()
        self._weights.paused.discard(member.endpoint)  # its lease ends
        await asyncio.to_thread(self._remove, member)

    def leave(self, endpoint: Endpoint) -> None:
        """Leaves an attached server to others at the end of the run: not paused, and without a lease."""
        is_paused, endpoint = endpoint in self._weights.paused, endpoint.with_timeout(self._settings.health_timeout_s)
        try:
            if is_paused:
                self._api.resume(endpoint)
            endpoint.end_lease()
        except RolloutError as e:
            if is_paused:
                say(f"{e}; it stays paused until its lease ends, without {TOKEN} for ever")

    async def _renew(self, endpoint: Endpoint) -> None:
        """Renews the lease of a server that this run has paused."""
        with contextlib.suppress(RolloutError):  # the publish that paused it notices a failure
            await endpoint.with_timeout(self._settings.health_timeout_s).check_async("/health")

    async def _probe(self, member: Member, endpoint: Endpoint) -> None:
        """Checks once whether a server is healthy; one that is not is repaired, and a bug here ends the run."""
        try:
            if member.server is not None and not member.server.alive():
                raise ServerFault(f"the server at {member.endpoint.url} has ended; {member.server.excerpt()}")
            await endpoint.with_timeout(self._settings.health_timeout_s).check_async("/health")
        except Busy:
            return
        except ServerFault as e:
            self.report_failure(member, e, broken=True)
        except Exception as e:  # as in `_repair`
            self._router.fail(e)

    async def _repair(self, member: Member, fault: RolloutError, *, broken: bool) -> None:
        """Restarts a broken server, waits for an attached one, or lets it leave, until one of these has worked."""
        try:
            # A second failure, as after a lost reply in an update: this task must repair it.
            if not broken and not await asyncio.to_thread(self._is_broken, member) and member.up:
                return
            if self._elastic:
                say(f"{fault}; it leaves")
                await self.drop(member)
                return
            member.state = State.BROKEN
            member.cancel_requests()
            while not self.closed:
                if self.restarts >= self._settings.max_restarts:
                    reason = f"it is not restarted: rollout.max_restarts={self._settings.max_restarts}"
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
                    self._wait_for_publish(member, e)
                    return
                except RolloutError as e:
                    fault = e
                    if member.server is None:
                        self._give_up(member, e)
                        return
        except Exception as e:  # an error of settings or code: no other task waits for this one
            self._router.fail(e)
        finally:
            member.in_repair = False
            self._router.wake_all()

    def _give_up(self, member: Member, fault: RolloutError) -> None:
        """Removes an attached server that does not come back; the others continue."""
        if self._has_other_servers(member):
            say(f"{fault}; the other servers continue")
        else:
            self._router.fail(RolloutError(f"{fault}; it was the last server"))

    def _wait_for_publish(self, member: Member, fault: WeightsGone) -> None:
        """Leaves a restarted server without weights until the next publish."""
        if fault.another_comes or self._has_other_servers(member):
            say(f"the server at {member.endpoint.url} waits for the next publish: {fault}")
        else:
            self._router.fail(RolloutError(f"{fault}; {member.endpoint.url} was this host's last server"))

    def _has_other_servers(self, member: Member) -> bool:
        return any(other.up or other.in_repair for other in self._router.members if other is not member)

    # In the pool's threads.

    def _is_broken(self, member: Member) -> bool:
        """Whether a failed server is really broken."""
        if member.server is not None and not member.server.alive():
            return True
        endpoint = member.endpoint.with_timeout(self._settings.health_timeout_s)
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
            member.endpoint.set_address(member.server.url, member.server.key)
            member.facts = self._api.inspect(member.endpoint)
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
        """Waits until an attached server answers again, and inspects it; RolloutError if it is late."""
        deadline = time.monotonic() + self._settings.start_timeout_s
        member.endpoint.begin_lease()
        while not self.closed:
            try:
                member.endpoint.with_timeout(self._settings.health_timeout_s).check("/health")
                member.facts = self._api.inspect(member.endpoint)
                return
            except RolloutError as e:
                if time.monotonic() > deadline:
                    fault = f"did not come back within rollout.start_timeout_s={self._settings.start_timeout_s:g}"
                    raise RolloutError(f"the server at {member.endpoint.url} {fault}; {e}") from e
            time.sleep(POLL_S)
        raise RolloutError(f"the server at {member.endpoint.url} is not waited for: the run has ended")


def say(line: str) -> None:
    print(f"rollout: {line}", file=sys.stderr, flush=True)


LOOKUP_S = 2.0  # between two look-ups
Lookup = Callable[[], list[str]]  # OSError or ValueError while the addresses cannot be known


@dataclasses.dataclass(eq=False)
class Membership:
    """The look-ups of a fleet; methods run on its event loop, with its thread pool as the loop's executor."""

    lookup: Lookup
    inspect: Callable[[str, bool], Member]  # the server at an address; a server of this run may be paused
    router: Router
    repairs: Repairs
    settings: ServerSettings
    _reported_faults: dict[str, str] = dataclasses.field(default_factory=dict)  # by address, each reported once
    _joining: dict[str, asyncio.Task[None]] = dataclasses.field(default_factory=dict)  # by address
    _missing: set[str] = dataclasses.field(default_factory=set)  # addresses that the last look-up did not name

    def __post_init__(self) -> None:
        """Notes the servers that a publish that broke off may have paused."""
        self._known_urls = {member.endpoint.url for member in self.router.members}

    async def watch(self) -> None:
        """Lets servers join and leave by the look-up, until cancelled."""
        last_up = time.monotonic()
        while True:
            await asyncio.sleep(LOOKUP_S)
            await self.follow()
            if any(member.works for member in self.router.members):
                last_up = time.monotonic()
            elif time.monotonic() - last_up > self.settings.start_timeout_s:
                why = "; ".join(self._reported_faults.values()) or "it names none"
                fault = (
                    f"no server of rollout.urls works since rollout.start_timeout_s={self.settings.start_timeout_s:g}"
                )
                self.router.fail(RolloutError(f"{fault}; {why}"))

    async def follow(self) -> None:
        """Looks up the addresses once; lets servers leave, and lets new ones begin to join."""
        try:
            urls = await asyncio.to_thread(self.lookup)
        except (OSError, ValueError) as e:  # the present servers stay
            self._report("", f"rollout.urls cannot be looked up: {e}")
            return
        self._reported_faults.pop("", None)
        present = {member.endpoint.url: member for member in self.router.members}
        missing = present.keys() - set(urls)
        leaving, self._missing = (missing & self._missing, missing)  # one look-up may read a half-written file
        for url in leaving:
            say(f"the server at {url} leaves")
            await self.repairs.drop(present[url])
        for url in set(urls) - present.keys() - self._joining.keys():
            self._joining[url] = asyncio.get_running_loop().create_task(self._join(url))

    async def _join(self, url: str) -> None:
        """Inspects the server at an address and adds it to the fleet; reports a fault once."""
        began = time.monotonic()
        try:
            member = await asyncio.to_thread(self.inspect, url, url in self._known_urls)
            member.require_distinct(self.router.members)
            length = member.facts.max_model_len
            shortest = min((other.facts.max_model_len for other in self.router.members), default=0)
            if length < shortest:  # the fleet refuses longer requests than its shortest server takes
                fault = f"has max_model_len={length}, and the others {shortest} or more"
                raise RolloutError(f"the server at {url} {fault}")
            self._known_urls.add(url)
            await self.repairs.admit(member)
        except (RolloutError, UserError) as e:
            self._report(url, f"{e.__cause__ or e}; it joins when it answers")  # without the command that starts one
            return
        except Exception as e:  # no other task waits for this one
            self.router.fail(e)
            return
        finally:
            self._joining.pop(url)
        self._reported_faults.pop(url, None)
        say(f"the server at {url} joins after {time.monotonic() - began:.1f} s")

    def _report(self, url: str, fault: str) -> None:
        """Reports a fault of an address unless it was the last one reported of it."""
        if self._reported_faults.get(url) != fault:
            self._reported_faults[url] = fault
            say(fault)


def address_lookup(place: Path | tuple[str, int]) -> Lookup:
    """Makes the look-up of the present addresses in a file, or of a DNS name and a port."""
    return functools.partial(_read_file, place) if isinstance(place, Path) else functools.partial(_resolve_name, *place)


def _read_file(path: Path) -> list[str]:
    """Returns the server addresses in a file, one in each line; ValueError if one is invalid."""
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


def _resolve_name(name: str, port: int) -> list[str]:
    addresses = {str(info[4][0]) for info in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)}
    return [f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}" for host in sorted(addresses)]
