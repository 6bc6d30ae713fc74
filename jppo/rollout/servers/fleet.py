"""All servers of a run as one: requests go to any of them (`member.py`), and all have equal weights (`delivery.py`).

A failed request is repeated with its own seed, so nothing is lost or counted twice. A failed server is repaired
(`repair.py`). Everything runs on one event loop in its own thread, also between training steps: a server that dies then
is restarted while the trainer learns. `ServerEngine` is the start of such servers, or the attachment to running ones;
the `client.py` of each kind calls it.
"""

import asyncio
import dataclasses
import functools
import itertools
import pathlib
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from jppo import traces
from jppo.errors import UserError
from jppo.event_loop import LoopThread, cancel_tasks
from jppo.process import allow_files
from jppo.rollout import protocol
from jppo.rollout.protocol import Answer, Done, Kept, RolloutError, Served, Talk
from jppo.rollout.servers import guard
from jppo.rollout.servers.api import Completion, ServerApi
from jppo.rollout.servers.delivery import Delivery, Publisher, ServedWeights, needs_token
from jppo.rollout.servers.endpoint import TRIES, Busy, Endpoint, LeaseTaken, ServerFault, attached_key, retry_pause_s
from jppo.rollout.servers.member import Member, RequestDropped, Router, Server, ServerSettings, stop_all
from jppo.rollout.servers.repair import LOOKUP_S, Lookup, Membership, Repairs
from jppo.rollout.servers.replies import max_answer_bytes, reading
from jppo.types import Prompt, Sampling, Trajectory

THREADS = 32  # of calls to servers that come and go


class Fleet(Served):
    """The servers of a run, as the engine that it samples with."""

    def __init__(
        self,
        members: Sequence[Member],
        api: ServerApi,
        publisher: Publisher,
        settings: ServerSettings,
        *,
        decode: Callable[[list[int]], str] = str,
        talk: Talk | None = None,
        joining: tuple[Lookup, Callable[[str, bool], Member]] | None = None,
    ):
        """`decode` returns the text of tokens, also for stop texts across a weight update; `talk` None means one turn.

        `joining` looks up the addresses of servers that come and go, and inspects the server at one.
        """
        allow_files()
        self.version: int | None = None
        self.repeated_requests = 0
        self._reported_counts = (0, 0)
        self._api, self.publisher, self._settings, self._decode = api, publisher, settings, decode
        self._talk = talk or protocol.one_turn(decode)
        self._router = Router(members)
        threads = 2 * len(members) + 1 if joining is None else THREADS
        self._waiting = ThreadPoolExecutor(threads, thread_name_prefix="jppo-repair")  # may wait for a delivery
        self._thread = LoopThread("jppo-fleet")
        self._thread.loop.set_default_executor(self._waiting)
        self.weights = ServedWeights(self._router, api, self._thread, on_broken=self._repair_broken, threads=threads)
        self._repairs = Repairs(self._router, api, self.weights, settings, elastic=joining is not None)
        self._thread.submit(self._repairs.watch())
        if joining is not None:
            self._thread.submit(Membership(*joining, self._router, self._repairs, settings).watch())

    @property
    def members(self) -> Sequence[Member]:
        return self._router.members

    @property
    def restarts(self) -> int:
        """Returns how many times a server was restarted or waited for."""
        return self._repairs.restarts

    def load(self, tensors: Iterable[tuple[str, np.ndarray]], *, version: int, mode: str = "wait") -> None:
        self._deliver(self.publisher.whole(tensors, version), mode)

    def load_adapter(self, save: Callable[[pathlib.Path], object], *, version: int, mode: str = "wait") -> None:
        self._deliver(self.publisher.adapter(save, version), mode)

    def _deliver(self, delivery: Delivery, mode: str) -> None:
        try:
            self.weights.deliver(delivery, mode=mode)
        except RolloutError:
            self.publisher.refused()
            raise
        self.version = delivery.version

    def start(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        done: Done | None = None,
        only: Collection[int] | None = None,
    ) -> Future[list[Trajectory]]:
        """Like `Sampler.start`; does not block."""
        return self._thread.submit(protocol.converse(self.ask, self._talk, prompts, sampling, done, only))

    def probe(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Trajectory]:
        """Samples answers to as many prompts per server as are given, without tools or environments.

        Samples of the next steps that wait for a server do not delay it.
        """
        ask = functools.partial(self.ask, urgent=True)
        count, one_turn = len(prompts) * len(self.members), protocol.one_turn(lambda _: "")
        probe_prompts = list(itertools.islice(itertools.cycle(prompts), count))  # an idle fleet takes turns
        return self._thread.submit(protocol.converse(ask, one_turn, probe_prompts, sampling, None)).result()

    def sleep(self) -> None:
        if self._settings.sleep_level:
            self.weights.sleep(self._settings.sleep_level)

    def metrics(self) -> dict[str, float]:
        """Returns the number of working servers; since the last call, restarts, repeated requests and sent bytes."""
        counts, reported_counts = (self.restarts, self.repeated_requests), self._reported_counts
        self._reported_counts = counts
        return {
            "rollout/servers": float(sum(member.up for member in self.members)),
            "rollout/restarts": float(counts[0] - reported_counts[0]),
            "rollout/asked_again": float(counts[1] - reported_counts[1]),
            **self.publisher.metrics(),
        }

    def close(self) -> None:
        """Stops the servers that were started here and frees the weights' files; may be called twice."""
        if not self._repairs.closed:
            self._repairs.closed = True
            self.weights.may_start.set()
            self._stop()
        self.publisher.close()

    def _stop(self) -> None:
        """Ends servers, leases, tasks, threads and the event loop."""
        started = {member.endpoint: member.server for member in self.members if member.server is not None}
        attached = ({member.endpoint for member in self.members} | self.weights.paused) - started.keys()
        stop_all(list(started.values()))
        self.weights.close(wait=bool(attached))  # a publish that broke off may still be at the attached servers
        self._waiting.shutdown(wait=bool(attached), cancel_futures=True)
        self._thread.close(cancel_tasks())
        with ThreadPoolExecutor(max(len(attached), 1)) as pool:
            list(pool.map(self._repairs.leave, attached))

    # Methods on the loop.

    async def ask(
        self, ids: Sequence[int], *, sampling: Sampling, seed: int, near: Hashable, urgent: bool = False
    ) -> Answer:
        """Returns one answer from any server; see `protocol.Ask`. Urgent requests do not wait for others to end."""
        needed = len(ids) + sampling.max_tokens
        longest = min((member.facts.max_model_len for member in self.members), default=needed)
        if needed > longest:
            raise UserError(
                f"a prompt of {len(ids)} tokens and max_tokens={sampling.max_tokens} must fit the server's"
                f" max_model_len={longest}; start it with more, or request less"
            )
        tokens: list[int] = []
        logprob: list[float] = []
        version: list[int] = []
        experts: np.ndarray | None = None
        kept: Kept | None = [] if sampling.kept else None
        failures, broken = 0, False
        while True:
            max_new_tokens = sampling.max_tokens - len(tokens)
            if tokens and protocol.may_end_in_stop(tokens, self._decode, sampling.stop):  # the server lacks its start
                max_new_tokens = min(max_new_tokens, max(map(len, sampling.stop)))
            rest = dataclasses.replace(sampling, max_tokens=max_new_tokens)
            part_seed = seed if not tokens else protocol.sample_seed(seed, 0, len(tokens))
            updates = self.weights.updates
            try:
                part = await self._ask_one([*ids, *tokens], rest, part_seed, near, broken=broken, urgent=urgent)
                continued = bool(tokens)
                tokens, logprob = tokens + part.tokens, logprob + part.logprob
                version += map(int, part.version)
                experts = protocol.join_experts(experts, part.experts)
                kept = None if kept is None else kept + (part.kept or [])
                end = protocol.cut_at(tokens, self._decode, sampling.stop, new=len(part.tokens)) if continued else None
                if end is not None:
                    experts = None if experts is None else experts[: len(ids) + end - 1]
                    kept = None if kept is None else kept[:end]
                    return Answer(tokens[:end], logprob[:end], version[:end], "stop", part.server, experts, kept)
                if part.finish == "stop":
                    return Answer(tokens, logprob, version, "stop", part.server, experts, kept)
                if len(tokens) == sampling.max_tokens:
                    return Answer(tokens, logprob, version, "length", part.server, experts, kept)
                if part.finish == "abort" and self.weights.updates == updates and not self._router.holds_requests:
                    raise ServerFault("a response ended with 'abort' without an update: did another client pause it?")
            except RequestDropped:
                self.repeated_requests += 1
            except ServerFault as e:
                failures += 1
                self.repeated_requests += 1
                broken |= not isinstance(e, Busy)
                if failures == TRIES:
                    raise RolloutError(f"a request failed {TRIES} times; the last time: {e}") from e
                if e.after_s is not None:
                    await asyncio.sleep(retry_pause_s(e.after_s, failures - 1, self._settings.request_timeout_s))

    async def _ask_one(
        self, ids: Sequence[int], sampling: Sampling, seed: int, near: Hashable, *, broken: bool, urgent: bool
    ) -> Completion:
        """Sends one request to one server; returns its answer, perhaps an interrupted one, or raises ServerFault."""
        with traces.span("queue"):
            member = await self._router.take(near, urgent=urgent)
        try:
            oldest = self.weights.version
            route, body = self._api.request(ids, sampling, seed, self.weights.model or member.facts.model)
            with traces.span("generate", server=member.endpoint.url):
                is_sampling = functools.partial(
                    self._api.working, member.endpoint.with_timeout(self._settings.health_timeout_s)
                )
                answer = await member.ask(route, body, is_sampling, max_bytes=max_answer_bytes(sampling))
            with reading(f"the server at {member.endpoint.url}", answer):
                part = self._api.parse_reply(answer, sampling)
                self.weights.require(part.version, oldest, member.endpoint.url)
                read_tokens = len(ids) + len(part.tokens) - 1
                if sampling.experts and part.tokens and (part.experts is None or len(part.experts) != read_tokens):
                    count = "none" if part.experts is None else len(part.experts)
                    raise ValueError(f"it has the experts of {count} tokens in place of {read_tokens}")
                if sampling.kept:
                    protocol.require_kept(part.tokens, part.kept, sampling.kept, "it")
            return dataclasses.replace(part, server=member.endpoint.url)
        except ServerFault as e:
            if not isinstance(e, RequestDropped | Busy):
                self._repairs.report_failure(member, e, broken=broken)
            raise
        finally:
            self._router.release(member)

    # Methods in any thread.

    def _repair_broken(self, member: Member, fault: ServerFault) -> None:
        report = functools.partial(self._repairs.report_failure, member, fault, broken=True)
        self._thread.loop.call_soon_threadsafe(report)


@dataclasses.dataclass(eq=False)
class ServerEngine:
    """Servers that are starting, or addresses of running ones; `ready` waits for them and returns the sampler."""

    servers: Sequence[Server]
    urls: Sequence[str] | Lookup
    publisher: Publisher
    make_api: Callable[[Sequence[int]], ServerApi]
    settings: ServerSettings
    _fleet: Fleet | None = None

    def __post_init__(self) -> None:
        """Starts the servers."""
        for server in self.servers:
            server.start()

    def ready(
        self, *, eos_token_ids: Sequence[int], decode: Callable[[list[int]], str], talk: Talk | None = None
    ) -> Fleet:
        """Waits for the servers, checks each, and returns the fleet; `talk` None means one turn."""
        for started in self.servers:
            started.wait_ready()
        api, timeout_s = self.make_api(eos_token_ids), self.settings.request_timeout_s
        attach = functools.partial(self._attach, attached_key(), api)
        joining, members = None, list[Member]()
        if callable(self.urls):
            joining = (self.urls, attach)
            members = self._wait_for_members(*joining)
        else:
            for url in self.urls:
                _add_member(members, attach(url))
        for s in self.servers:
            endpoint = Endpoint(s.url, timeout_s=timeout_s, explain=s.excerpt, key=s.key)
            members.append(self._member(s, endpoint, api))
        self._fleet = Fleet(members, api, self.publisher, self.settings, decode=decode, talk=talk, joining=joining)
        return self._fleet

    def _member(self, server: Server | None, endpoint: Endpoint, api: ServerApi) -> Member:
        """Inspects a server and returns it as a member; UserError if it is unsuitable."""
        try:
            return Member(endpoint, server, api.inspect(endpoint), self.settings.connections)
        except RolloutError as e:
            raise UserError(f"{e}; {api.advice}") from e

    def _attach(self, key: guard.Key, api: ServerApi, url: str, of_this_run: bool = False) -> Member:
        """Attaches to the running server at `url`; one of this run may be paused."""
        endpoint = Endpoint(url, timeout_s=self.settings.request_timeout_s, explain=str)
        if needs_token(endpoint.with_timeout(self.settings.health_timeout_s), api):
            endpoint.set_address(url, key.leased())
        _require_awake(endpoint.with_timeout(self.settings.health_timeout_s), api, of_this_run=of_this_run)
        return self._member(None, endpoint, api)

    def _wait_for_members(self, lookup: Lookup, attach: Callable[[str], Member]) -> list[Member]:
        """Waits for the first servers of a look-up; others join later."""
        deadline = time.monotonic() + self.settings.start_timeout_s
        while True:
            members, last_fault = list[Member](), "it names none"
            try:
                for url in lookup():
                    try:
                        _add_member(members, attach(url))
                    except (RolloutError, UserError) as e:
                        last_fault = str(e)
            except (OSError, ValueError) as e:
                last_fault = str(e)
            if members:
                return members
            if time.monotonic() > deadline:
                limit = f"within rollout.start_timeout_s={self.settings.start_timeout_s:g}"
                raise UserError(f"no server of rollout.urls answered {limit}; {last_fault}")
            time.sleep(LOOKUP_S)

    def close(self) -> None:
        """Stops the servers that were started here; may be called twice."""
        if self._fleet is not None:
            self._fleet.close()
            return
        stop_all(self.servers)
        self.publisher.close()


def _add_member(members: list[Member], member: Member) -> None:
    member.require_distinct(members)
    members.append(member)


def _require_awake(endpoint: Endpoint, api: ServerApi, *, of_this_run: bool) -> None:
    """Raises UserError if another trainer has the server, or if it is paused and not by this run."""
    deadline = time.monotonic() + guard.LEASE_S + 2 * guard.TICK_S  # of a trainer that was killed just now
    while True:
        try:
            paused = api.paused(endpoint)
            break
        except LeaseTaken as e:
            if time.monotonic() > deadline:
                raise UserError(str(e)) from e
            time.sleep(guard.TICK_S)
        except RolloutError as e:
            raise UserError(f"{e}; {api.advice}") from e
    if paused and not of_this_run:
        raise UserError(
            f"the server at {endpoint.url} is paused: requests would wait for ever; if no other trainer"
            f' uses it, resume it with `curl -X POST -H "Authorization: Bearer ${guard.TOKEN}"'
            f" {endpoint.url}{api.resume_route}`"
        )
