"""Checks the health of a run's servers; a broken one is restarted and gets the current weights.

An attached server is waited for instead. The other servers continue.
"""

import asyncio
import contextlib
import dataclasses
import functools
import sys
import threading
import time
from collections.abc import Callable, Sequence

from jppo.rollout.protocol import RolloutError
from jppo.rollout.servers.endpoint import Endpoint, ServerFault
from jppo.rollout.servers.guard import TOKEN
from jppo.rollout.servers.member import Member, ServerLimits
from jppo.rollout.servers.router import Router
from jppo.rollout.servers.server_api import Delivery, ServerApi, WeightsGone

PROBE_S = 2.0  # between two health checks
POLL_S = 0.5


@dataclasses.dataclass
class Delivered:
    """The servers' current weights."""

    version: int | None = None
    deliveries: tuple[Delivery, ...] = ()  # a whole model, then the latest addition
    lock: threading.RLock = dataclasses.field(default_factory=threading.RLock)  # held while weights are delivered
    paused: set[Endpoint] = dataclasses.field(default_factory=set)  # by this run

    @property
    def model(self) -> str | None:
        """Returns the name of the model in requests; None: the server's own."""
        return self.deliveries[-1].model if self.deliveries else None

    def require(self, versions: Sequence[str], oldest: int | None, url: str) -> None:
        """ServerFault if the server at `url` sampled by other weights than those since the `oldest`."""
        known = {str(v) for v in range(oldest or 0, (self.version or 0) + 1)}
        if strange := sorted(set(versions) - known):
            raise ServerFault(
                f"the server at {url} sampled by the weights {', '.join(strange)}, not by version {self.version}:"
                " another trainer uses it, or it was restarted"
            )


class Repairs:
    """The repairs of a fleet; methods run on its event loop, with its thread pool as the loop's executor."""

    def __init__(
        self, router: Router, dialect: ServerApi, delivered: Delivered, limits: ServerLimits, *, start_timeout_s: float
    ):
        self.restarts = 0
        self.closed = False
        self.elastic = False  # a broken server leaves, and joins when its address is looked up again
        self._router = router
        self._dialect = dialect
        self._delivered = delivered
        self._limits = limits
        self._start_timeout_s = start_timeout_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._probed: dict[Endpoint, asyncio.Task[None]] = {}

    async def watch(self) -> None:
        """Checks the servers' health until cancelled; this also renews the leases of attached ones."""
        while True:
            await asyncio.sleep(PROBE_S)
            probes = dict.fromkeys(self._delivered.paused, self._renew)
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
        self._delivered.paused.discard(member.endpoint)  # its lease ends
        await asyncio.to_thread(self._remove, member)

    def pause(self, endpoint: Endpoint, mode: str) -> None:
        """Pauses a server; it counts as paused until it has resumed, also if it breaks off."""
        self._delivered.paused.add(endpoint)
        self._dialect.pause(endpoint, mode)

    def resume(self, endpoint: Endpoint) -> None:
        """Ends a pause."""
        self._dialect.resume(endpoint)
        self._delivered.paused.discard(endpoint)

    def leave(self, endpoint: Endpoint) -> None:
        """Leaves an attached server to others at the end of the run: not paused, and without a lease."""
        paused, endpoint = endpoint in self._delivered.paused, endpoint.within(self._limits.health_timeout_s)
        try:
            if paused:
                self._dialect.resume(endpoint)
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
                    said = f"it is not restarted: rollout.max_restarts={self._limits.max_restarts}"
                    self._router.fail(RolloutError(f"{fault}; {said}"))
                    return
                say(f"{fault}; it is {'waited for' if member.server is None else 'restarted'}")
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
            with self._delivered.lock:  # no update is in progress
                return self._dialect.paused(endpoint) or self._dialect.version(endpoint) != self._delivered.version
        except RolloutError:
            return True

    def _revive(self, member: Member) -> None:
        """Restarts the server, or waits for an attached one, and delivers the current weights."""
        if member.server is None:
            self._wait_for(member)
        else:
            member.server.restart()
            member.server.wait_ready()
            member.endpoint.move(member.server.url, member.server.key)
            member.model, member.max_model_len = self._dialect.inspect(member.endpoint)
        self._catch_up(member, lambda: None)

    def _catch_up(self, member: Member, then: Callable[[], None]) -> None:
        """Delivers the current weights, and calls `then` while they are still the current ones.

        No lock is held while the server loads, which may take minutes: a publish does not wait for it. If there was
        one meanwhile, the server gets the newer weights too, and the next publish waits for that.
        """
        member.asleep = False
        try:
            given = self._delivered.deliveries
            if not any(delivery.alone for delivery in given):
                self._bring(member, given)
            with self._delivered.lock:
                if self._delivered.deliveries is not given or any(delivery.alone for delivery in given):
                    self._bring(member, self._delivered.deliveries)
                member.up = True
                then()
        except WeightsGone:
            member.up, member.blank = False, True
            raise

    def _bring(self, member: Member, deliveries: Sequence[Delivery]) -> None:
        try:
            for delivery in deliveries:
                self._deliver(member.endpoint, delivery)
        except RolloutError:
            if self._delivered.deliveries is deliveries:  # otherwise they may have been replaced while they were read
                raise

    def _deliver(self, endpoint: Endpoint, delivery: Delivery) -> None:
        with contextlib.closing(delivery.offers()) as offers:
            for offer in offers:
                offer(endpoint)
        self.pause(endpoint, "abort")
        delivery.take(endpoint)
        self.resume(endpoint)

    def _add(self, member: Member) -> None:
        def join() -> None:
            self._router.members = (*self._router.members, member)

        try:
            self._catch_up(member, join)
        except WeightsGone as e:  # it joins without weights if the next ones are on their way
            if not e.another_comes:
                raise
            with self._delivered.lock:
                join()

    def _remove(self, member: Member) -> None:
        with self._delivered.lock:
            self._router.members = tuple(other for other in self._router.members if other is not member)

    def _wait_for(self, member: Member) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        member.endpoint.lease()
        while not self.closed:
            try:
                member.endpoint.within(self._limits.health_timeout_s).see("/health")
                member.model, member.max_model_len = self._dialect.inspect(member.endpoint)
                return
            except RolloutError as e:
                if time.monotonic() > deadline:
                    said = f"did not come back within rollout.start_timeout_s={self._start_timeout_s:g}"
                    raise RolloutError(f"the server at {member.endpoint.url} {said}; {e}") from e
            time.sleep(POLL_S)
        raise RolloutError(f"the server at {member.endpoint.url} is not waited for: the run has ended")


def say(line: str) -> None:
    """Reports an event of the servers on stderr."""
    print(f"rollout: {line}", file=sys.stderr, flush=True)
