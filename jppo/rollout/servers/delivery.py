"""The publish: all of a run's servers get the same weights, or none does.

    for each offer: every server gets a part of the weights and checks it; one refusal ends it, with no server changed
    pause -> take: every server loads the weights and sets their version -> resume

A delivery is one version of the weights on its way to the servers, an offer one step of it that changes nothing yet.

A publish begins in `Fleet.load`. The `ServerApi` (`api.py`) pauses servers. A `Publisher` makes a `Delivery`
of the trainer's tensors: `vllm/publish.py`, and those of plugins. A server that breaks off is left to `repair.py`; a
repaired server and one that joins get the current weights by `catch_up`.
"""

import asyncio
import contextlib
import dataclasses
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np

from jppo.errors import UserError
from jppo.event_loop import LoopThread
from jppo.rollout.protocol import RolloutError
from jppo.rollout.servers.api import ServerApi
from jppo.rollout.servers.endpoint import Endpoint, ServerFault
from jppo.rollout.servers.member import Member, Router, State

POLL_S = 0.05
Step = Callable[[Endpoint], None]
Offers = Generator[Step, None, None]  # steps of a delivery; closed where it ends early


class WeightsGone(RolloutError):
    """The trainer no longer has the delivered weights.

    `another_comes`: it is changing them, and delivers the next ones before it waits for samples.
    """

    def __init__(self, why: str, *, another_comes: bool):
        super().__init__(why)
        self.another_comes = another_comes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delivery:
    """Weights for the servers; can be delivered as often as needed."""

    version: int
    model: str | None = None  # its name in requests; None: the server's own
    whole: bool = True  # the whole model; otherwise an addition to the previous delivery
    exclusive: bool = False  # no other delivery may be under way meanwhile

    def offers(self) -> Offers:
        """Yields the steps in which servers get and check them without a change; RolloutError if one refuses.

        Each step is made on all servers before the next. WeightsGone if they cannot be delivered any more.
        """
        yield from ()

    def take(self, endpoint: Endpoint) -> None:
        """Makes a server sample from them."""
        raise NotImplementedError


class Publisher(Protocol):
    """Makes deliveries, and holds what servers read for them."""

    def whole(self, tensors: Iterable[tuple[str, np.ndarray]], version: int) -> Delivery:
        """Makes the delivery of a whole policy."""

    def adapter(self, save: Callable[[pathlib.Path], object], version: int) -> Delivery:
        """Makes the delivery of adapters for the last whole policy."""

    def refused(self) -> None:
        """Abandons the last delivery."""
        return

    def metrics(self) -> dict[str, float]:
        """Returns counters of the deliveries since the last call."""
        return {}

    def close(self) -> None:
        """Frees the files."""


class ServedWeights:
    """The weights of a fleet's servers: which they are, and their delivery. Methods may block."""

    def __init__(
        self,
        router: Router,
        api: ServerApi,
        thread: LoopThread,
        *,
        on_broken: Callable[[Member, ServerFault], None],
        threads: int,
    ):
        """`on_broken` is told of a server that breaks off."""
        self.version: int | None = None
        self.updates = 0
        self.lock = threading.RLock()  # held while weights are delivered
        self.paused: set[Endpoint] = set()  # by this run
        self.may_start = threading.Event()  # clear from a sleep to the next delivery: the trainer has their memory
        self.may_start.set()
        self._deliveries: tuple[Delivery, ...] = ()  # a whole model, then the latest addition
        self._router, self._api, self._thread, self._on_broken = router, api, thread, on_broken
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="jppo-fleet")

    @property
    def model(self) -> str | None:
        """Returns the name of the model in requests; None: the server's own."""
        return self._deliveries[-1].model if self._deliveries else None

    def require(self, versions: Sequence[str], oldest: int | None, url: str) -> None:
        """Raises ServerFault unless the weights that sampled an answer are this run's, published since the `oldest`.

        `versions` are those of the answer's tokens; `oldest` None stands for the run's first.
        """
        known_versions = {str(v) for v in range(oldest or 0, (self.version or 0) + 1)}
        if unknown_versions := sorted(set(versions) - known_versions):
            raise ServerFault(
                f"the server at {url} sampled by the weights {', '.join(unknown_versions)}, not by version"
                f" {self.version}: another trainer uses it, or it was restarted"
            )

    def deliver(self, delivery: Delivery, *, mode: str = "wait") -> None:
        """Delivers weights to every server; RolloutError if a working server refuses them.

        Servers that break meanwhile are restarted and get them then.
        """
        asleep = not self.may_start.is_set()
        self.may_start.set()
        self._await_members(all_of_them=asleep)
        with self.lock:
            taking = [member for member in self._router.members if member.works]
            with contextlib.closing(delivery.offers()) as offers:
                for offer in offers:
                    taking = self._run_on_each(taking, offer)
                    if not taking:  # all are being repaired
                        break
            self._router.holds_requests = True
            try:
                taking = self._wake_up(taking, "weights")
                if mode == "wait":
                    self._thread.submit(_wait_until_idle(taking)).result()
                taking = self._run_on_each(taking, lambda endpoint: self.pause(endpoint, mode))
                taking = self._wake_up(self._run_on_each(taking, delivery.take), "kv_cache")
                for member in taking:
                    if member.works:  # not given up meanwhile
                        member.asleep, member.state = False, State.UP
                base_deliveries = () if delivery.whole else self._deliveries[:1]
                self._deliveries, self.version = (*base_deliveries, delivery), delivery.version
                self.updates += 1
                self._run_on_each(taking, self.resume)
            finally:
                self._router.holds_requests = False
                self._thread.loop.call_soon_threadsafe(self._end_update)

    def catch_up(self, member: Member, on_current: Callable[[], None] = lambda: None) -> None:
        """Delivers the current weights to one server, and calls `on_current` while they are still the current ones.

        No lock is held while the server loads, which may take minutes: a publish does not wait for it. If there was
        one meanwhile, the server gets the newer weights too, and the next publish waits for that.
        """
        member.asleep = False
        try:
            deliveries = self._deliveries
            if not any(delivery.exclusive for delivery in deliveries):
                self._deliver_to(member, deliveries)
            with self.lock:
                if self._deliveries is not deliveries or any(delivery.exclusive for delivery in deliveries):
                    self._deliver_to(member, self._deliveries)
                member.state = State.UP
                on_current()
        except WeightsGone:
            member.state = State.WITHOUT_WEIGHTS
            raise

    def pause(self, endpoint: Endpoint, mode: str) -> None:
        """Pauses a server; it counts as paused until it has resumed, also if it breaks off."""
        self.paused.add(endpoint)
        self._api.pause(endpoint, mode)

    def resume(self, endpoint: Endpoint) -> None:
        self._api.resume(endpoint)
        self.paused.discard(endpoint)

    def sleep(self, level: int) -> None:
        """Frees the servers' device memory until the next whole delivery; no request may be in flight.

        Waits for servers that are being restarted. One that breaks later is restarted at that delivery.
        """
        self._await_members(all_of_them=True)
        self.may_start.clear()
        with self.lock:
            self._router.holds_requests = True
            working = [member for member in self._router.members if member.up]
            for member in self._run_on_each(working, lambda endpoint: self._api.sleep(endpoint, level)):
                member.asleep = True

    def close(self, *, wait: bool) -> None:
        """Begins no further call; `wait` for those under way."""
        self._pool.shutdown(wait=wait, cancel_futures=True)

    def _deliver_to(self, member: Member, deliveries: Sequence[Delivery]) -> None:
        """Delivers weights to one server; a refusal counts only if they are still the current ones."""
        endpoint = member.endpoint
        try:
            for delivery in deliveries:
                with contextlib.closing(delivery.offers()) as offers:
                    for offer in offers:
                        offer(endpoint)
                self.pause(endpoint, "abort")
                delivery.take(endpoint)
                self.resume(endpoint)
        except RolloutError:
            if self._deliveries is deliveries:  # otherwise they may have been replaced while they were read
                raise

    def _await_members(self, *, all_of_them: bool) -> None:
        """Returns when a server works, and of `all_of_them` none is being restarted here."""
        while self._router.fatal is None:
            members = self._router.members
            starting = all_of_them and any(member.in_repair and member.server is not None for member in members)
            if not starting and any(member.works for member in members):
                return
            time.sleep(POLL_S)
        raise self._router.fatal

    def _wake_up(self, members: Sequence[Member], tag: str) -> list[Member]:
        """Has sleeping members allocate the memory of `tag` again; returns those that work."""
        asleep = [member for member in members if member.asleep]
        awake = [member for member in members if not member.asleep]
        return [*awake, *self._run_on_each(asleep, lambda endpoint: self._api.wake_up(endpoint, tag))]

    def _run_on_each(self, members: Sequence[Member], step: Step) -> list[Member]:
        """Calls `step` on all members concurrently; broken ones are sent to repair and left out of the result.

        A member that was replaced in between was not called: it gets the weights when it is repaired.
        """
        futures = {self._pool.submit(step, member.endpoint): member for member in members if member.works}
        succeeded, refusals = [], []
        for future, member in futures.items():
            try:
                future.result()
                succeeded.append(member)
            except ServerFault as e:
                member.state = State.BROKEN
                self._on_broken(member, e)
            except RolloutError as e:
                if member.works:
                    refusals.append(e)
        if refusals:
            raise refusals[0]
        return succeeded

    def _end_update(self) -> None:
        """Lets requests continue after an update; called on the event loop."""
        for member in self._router.members:
            member.reset_timeout()
        self._router.wake_all()


async def _wait_until_idle(members: Sequence[Member]) -> None:
    while any(member.in_flight for member in members):
        await asyncio.sleep(POLL_S)


def needs_token(endpoint: Endpoint, api: ServerApi) -> bool:
    """Whether the server requires a token; otherwise warns, and it gets none."""
    try:
        guarded = endpoint.requires_key()
    except RolloutError as e:
        raise UserError(f"{e}; {api.advice}") from e
    if not guarded:
        warning = "answers without a token: anyone who reaches it can replace the weights that the run samples from"
        print(f"rollout: warning: the server at {endpoint.url} {warning}; {api.advice}", file=sys.stderr, flush=True)
    return guarded
