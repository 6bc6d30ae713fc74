"""Manages all servers of a run: routing, failures, restarts, and equal weights on all.

Requests with a common prefix go to the same server, unless another has less work. A failed request is repeated with its
own seed, so nothing is lost or counted twice. A failed server is checked. If it is broken, it is restarted and gets the
current weights, while the others continue.

Everything runs on one event loop in its own thread, also between training steps: a server that dies then is restarted
while the trainer learns.
"""

import asyncio
import collections
import dataclasses
import functools
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from jppo.rollout.protocol import Answer, RolloutError, sample_seed
from jppo.rollout.servers.endpoint import Endpoint, ServerFault
from jppo.rollout.servers.kind import Delivery, Dialect, Part
from jppo.rollout.servers.member import Cut, Member
from jppo.rollout.servers.process import stop_all
from jppo.rollout.stop_texts import begun, cut_at
from jppo.settings import UserError
from jppo.types import Sampling

T = TypeVar("T")
SLACK = 32  # more requests in flight than on another server are accepted for a shared prefix
TRIES = 5  # of one request, before the run ends
PROBE_S = 2.0  # between two health checks
POLL_S = 0.5


class Fleet:
    """The servers of a run."""

    def __init__(
        self,
        members: Sequence[Member],
        dialect: Dialect,
        *,
        max_restarts: int,
        health_timeout_s: float,
        start_timeout_s: float,
        decode: Callable[[list[int]], str] = str,
    ):
        """`decode` returns the text of tokens, for stop texts across a weight update."""
        self.members = members
        self.version: int | None = None
        self.restarts = 0
        self.asked_again = 0
        self._dialect = dialect
        self._max_restarts = max_restarts
        self._health_timeout_s = health_timeout_s
        self._start_timeout_s = start_timeout_s
        self._decode = decode
        self._delivered: tuple[Delivery, ...] = ()
        self._updates = 0
        self._updating = False  # new requests wait here, not at the servers
        self._weights = threading.RLock()  # held while weights are delivered
        self._fatal: Exception | None = None
        self._closed = False
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pool = ThreadPoolExecutor(2 * len(members) + 1, thread_name_prefix="jppo-fleet")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="jppo-fleet", daemon=True)
        self._thread.start()
        self._soon(self._watch)

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs `work`, which may call `ask`, on the fleet's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def ask(self, ids: Sequence[int], *, sampling: Sampling, seed: int, near: Hashable) -> Answer:
        """Returns one answer from any server; see `sampler.Ask`."""
        longest = min(member.max_model_len for member in self.members)
        if len(ids) + sampling.max_tokens > longest:
            raise UserError(
                f"a prompt of {len(ids)} tokens and max_tokens={sampling.max_tokens} must fit the server's"
                f" max_model_len={longest}; start it with more, or request less"
            )
        tokens: list[int] = []
        logprob: list[float] = []
        version: list[int] = []
        failures = 0
        while True:
            left = sampling.max_tokens - len(tokens)
            if tokens and begun(tokens, self._decode, sampling.stop):  # the server misses its beginning
                left = min(left, max(map(len, sampling.stop)))
            rest = dataclasses.replace(sampling, max_tokens=left)
            own = seed if not tokens else sample_seed(seed, 0, len(tokens))
            updates = self._updates
            try:
                part = await self._ask_one([*ids, *tokens], rest, own, near, sure=failures > 0)
                cut = bool(tokens)
                tokens, logprob = tokens + part.tokens, logprob + part.logprob
                version += map(int, part.version)
                end = cut_at(tokens, self._decode, sampling.stop, new=len(part.tokens)) if cut else None
                if end is not None:
                    return Answer(tokens[:end], logprob[:end], version[:end], "stop", part.server)
                if part.finish == "stop":
                    return Answer(tokens, logprob, version, "stop", part.server)
                if len(tokens) == sampling.max_tokens:
                    return Answer(tokens, logprob, version, "length", part.server)
                if part.finish == "abort" and self._updates == updates and not self._updating:
                    raise ServerFault("a response ended with 'abort' without an update: did another client pause it?")
            except Cut:
                self.asked_again += 1
            except ServerFault as e:
                failures += 1
                self.asked_again += 1
                if failures == TRIES:
                    raise RolloutError(f"a request failed {TRIES} times; the last time: {e}") from e

    def deliver(self, delivery: Delivery, *, mode: str = "wait") -> None:
        """Delivers weights to every server; RolloutError if a working server refuses them.

        Servers that break meanwhile are restarted and get them then.
        """
        self._require_one()
        with self._weights:
            taking = [member for member in self.members if member.up]
            taking = self._each(taking, delivery.offer)
            self._updating = True
            try:
                taking = self._wake_up(taking, "weights")
                if mode == "wait":
                    self.start(self._drained(taking)).result()
                taking = self._each(taking, lambda endpoint: self._dialect.pause(endpoint, mode))
                taking = self._wake_up(self._each(taking, delivery.take), "kv_cache")
                for member in taking:
                    member.asleep = False
                self._delivered = (delivery,) if delivery.whole else (*self._delivered[:1], delivery)
                self.version = delivery.version
                self._updates += 1
                self._each(taking, self._dialect.resume)
            finally:
                self._updating = False
                self._loop.call_soon_threadsafe(self._go_on)

    def sleep(self, level: int) -> None:
        """Frees the servers' device memory until the next whole delivery; no request may be in flight."""
        with self._weights:
            self._updating = True
            resting = self._each(
                [member for member in self.members if member.up],
                lambda endpoint: self._dialect.sleep(endpoint, level),
            )
            for member in resting:
                member.asleep = True

    def close(self) -> None:
        """Stops the servers that were started here; may be called twice."""
        if self._closed:
            return
        self._closed = True
        stop_all([member.server for member in self.members if member.server is not None])
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    # Methods on the loop.

    async def _ask_one(self, ids: Sequence[int], sampling: Sampling, seed: int, near: Hashable, *, sure: bool) -> Part:
        member = await self._place(near)
        try:
            oldest = self.version
            route, body = self._dialect.request(ids, sampling, seed, self._model(member))
            part = self._dialect.part(await member.ask(route, body), sampling)
            self._require_versions(part, oldest, member)
            return dataclasses.replace(part, server=member.endpoint.url)
        except ServerFault as e:
            self._suspect(member, e, sure=sure)
            raise
        finally:
            member.under_way -= 1
            self._wake(1)

    async def _place(self, near: Hashable) -> Member:
        """Returns a server with room; counts the request."""
        while True:
            if self._fatal is not None:
                raise self._fatal
            fit = [member for member in self.members if member.up and not member.mending]
            if fit and not self._updating:
                least = min(fit, key=lambda member: member.under_way)
                home = self.members[hash(near) % len(self.members)]
                chosen = home if home in fit and home.under_way <= least.under_way + SLACK else least
                if chosen.under_way < chosen.connections:
                    chosen.under_way += 1
                    return chosen
            turn: asyncio.Future[None] = self._loop.create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    self._wake(1)  # its waiter has gone
                raise

    async def _drained(self, members: Sequence[Member]) -> None:
        """Returns when no request is in flight at the members."""
        while any(member.under_way for member in members):
            await asyncio.sleep(POLL_S / 10)

    def _go_on(self) -> None:
        """Ends an update."""
        for member in self.members:
            member.resumed()
        self._wake(len(self._waiting))

    def _wake(self, count: int) -> None:
        while count and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                count -= 1

    def _model(self, member: Member) -> str:
        given = self._delivered[-1].model if self._delivered else None
        return member.model if given is None else given

    def _require_versions(self, part: Part, oldest: int | None, member: Member) -> None:
        known = {str(v) for v in range(oldest or 0, (self.version or 0) + 1)}
        if strange := sorted(set(part.version) - known):
            raise ServerFault(
                f"the server at {member.endpoint.url} sampled by the weights {', '.join(strange)}, not by version"
                f" {self.version}: another trainer uses it, or it was restarted"
            )

    def _suspect(self, member: Member, fault: ServerFault, *, sure: bool) -> None:
        """Schedules a check of a failed server; `sure`: it is broken without a check."""
        if not member.mending and not self._closed:
            member.mending = True
            task = self._loop.create_task(self._mend(member, fault, sure=sure))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _mend(self, member: Member, fault: RolloutError, *, sure: bool) -> None:
        try:
            # A second failure, as after a lost reply in an update: this task must repair it.
            if not sure and not await self._in_pool(self._broken, member) and member.up:
                return
            member.up = False
            member.give_up()
            while not self._closed:
                if self.restarts >= self._max_restarts:
                    said = f"it is not restarted: rollout.max_restarts={self._max_restarts}"
                    self._fail(RolloutError(f"{fault}; {said}"))
                    return
                self._say(f"{fault}; it is {'waited for' if member.server is None else 'restarted'}")
                self.restarts += 1
                began = time.monotonic()
                try:
                    await self._in_pool(self._revive, member)
                    self._say(f"the server at {member.endpoint.url} is back after {time.monotonic() - began:.1f} s")
                    return
                except RolloutError as e:
                    fault = e
                    if member.server is None:
                        self._give_up(member, e)
                        return
        except Exception as e:  # an error of settings or code: no other task waits for this one
            self._fail(e)
        finally:
            member.mending = False
            self._wake(len(self._waiting))

    def _give_up(self, member: Member, why: RolloutError) -> None:
        """Removes an attached server that does not come back; the others continue."""
        if not any(other.up or other.mending for other in self.members if other is not member):
            self._fail(RolloutError(f"{why}; it was the last server"))
        else:
            self._say(f"{why}; the other servers continue")

    def _fail(self, why: Exception) -> None:
        self._fatal = self._fatal or why
        for member in self.members:
            member.give_up()

    async def _watch(self) -> None:
        """Checks the servers' health while the fleet lives."""
        while True:
            await asyncio.sleep(PROBE_S)
            await asyncio.gather(*(self._probe(member) for member in self.members if member.up and not member.mending))

    async def _probe(self, member: Member) -> None:
        try:
            if member.server is not None and not member.server.alive():
                raise ServerFault(f"the server at {member.endpoint.url} has ended; {member.server.why()}")
            await member.endpoint.within(self._health_timeout_s).look("/health")
        except ServerFault as e:
            self._suspect(member, e, sure=True)
        except Exception as e:  # as in `_mend`
            self._fail(e)
            self._wake(len(self._waiting))

    async def _in_pool(self, do: Callable[..., T], *args: Any) -> T:
        return await self._loop.run_in_executor(self._pool, do, *args)

    async def _end(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Methods in any thread.

    def _soon(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._loop.call_soon_threadsafe(lambda: self._tasks.add(self._loop.create_task(work())))

    def _broken(self, member: Member) -> bool:
        """Whether a failed server is really broken."""
        if member.server is not None and not member.server.alive():
            return True
        endpoint = member.endpoint.within(self._health_timeout_s)
        try:
            with self._weights:  # no update is in progress
                return self._dialect.paused(endpoint) or self._dialect.version(endpoint) != self.version
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
        with self._weights:
            member.asleep = False
            for delivery in self._delivered:
                delivery.offer(member.endpoint)
                self._dialect.pause(member.endpoint, "abort")
                delivery.take(member.endpoint)
                self._dialect.resume(member.endpoint)
            member.up = True

    def _wait_for(self, member: Member) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        while not self._closed:
            try:
                member.endpoint.within(self._health_timeout_s).see("/health")
                member.model, member.max_model_len = self._dialect.inspect(member.endpoint)
                return
            except RolloutError as e:
                if time.monotonic() > deadline:
                    said = f"did not come back within rollout.start_timeout_s={self._start_timeout_s:g}"
                    raise RolloutError(f"the server at {member.endpoint.url} {said}; {e}") from e
            time.sleep(POLL_S)

    def _require_one(self) -> None:
        """Returns when a server works."""
        while not any(member.up for member in self.members):
            if self._fatal is not None:
                raise self._fatal
            time.sleep(POLL_S / 10)
        if self._fatal is not None:
            raise self._fatal

    def _wake_up(self, members: Sequence[Member], what: str) -> list[Member]:
        asleep = [member for member in members if member.asleep]
        awake = [member for member in members if not member.asleep]
        return [*awake, *self._each(asleep, lambda endpoint: self._dialect.wake_up(endpoint, what))]

    def _each(self, members: Sequence[Member], do: Callable[[Endpoint], None]) -> list[Member]:
        """Calls `do` on all members concurrently; broken ones are sent to repair and left out of the result.

        A member that was replaced in between was not called: it gets the weights when it is repaired.
        """
        futures = {self._pool.submit(do, member.endpoint): member for member in members if member.up}
        good, refused = [], []
        for future, member in futures.items():
            try:
                future.result()
                good.append(member)
            except ServerFault as e:
                member.up = False
                self._loop.call_soon_threadsafe(functools.partial(self._suspect, member, e, sure=True))
            except RolloutError as e:
                if member.up:
                    refused.append(e)
        if refused:
            raise refused[0]
        return good

    def _say(self, line: str) -> None:
        print(f"rollout: {line}", file=sys.stderr, flush=True)
