"""Checks the health of a run's servers; a broken one is restarted and gets the current weights.

An attached server is waited for instead. The other servers continue.
"""

import asyncio
import contextlib
import functools
import sys
import time

from jppo.rollout.protocol import RolloutError
from jppo.rollout.servers.delivery import ServedWeights, WeightsGone
from jppo.rollout.servers.endpoint import Endpoint, ServerFault
from jppo.rollout.servers.guard import TOKEN
from jppo.rollout.servers.member import Member, ServerLimits
from jppo.rollout.servers.router import Router
from jppo.rollout.servers.server_api import ServerApi

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
                    said = f"it is not restarted: rollout.max_restarts={self._limits.max_restarts}"
                    self._router.fail(RolloutError(f"{fault}; {said}"))
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
            member.model, member.max_model_len = self._api.inspect(member.endpoint)
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
                member.model, member.max_model_len = self._api.inspect(member.endpoint)
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
