"""The start of servers of any kind, or the attachment to running ones; the `client.py` of each kind calls it."""

import functools
import os
import sys
import time
from collections.abc import Callable, Sequence

from jppo.rollout.protocol import RolloutError, Talk
from jppo.rollout.servers import guard
from jppo.rollout.servers.delivery import Publisher
from jppo.rollout.servers.endpoint import Endpoint, Taken
from jppo.rollout.servers.fleet import Fleet
from jppo.rollout.servers.member import Member, ServerLimits
from jppo.rollout.servers.membership import LOOKUP_S, Lookup
from jppo.rollout.servers.process import Server, stop_all
from jppo.rollout.servers.server_api import ServerApi
from jppo.settings import UserError


class Engine:
    """Servers that are starting."""

    def __init__(
        self,
        servers: Sequence[Server],
        urls: Sequence[str] | Lookup,
        publisher: Publisher,
        speak: Callable[[Sequence[int]], ServerApi],
        limits: ServerLimits,
        *,
        start_timeout_s: float,
    ):
        self.servers = servers
        self._lookup: Lookup | None = None
        self._urls: Sequence[str] = ()
        if callable(urls):
            self._lookup = urls
        else:
            self._urls = urls
        self._publisher = publisher
        self._speak = speak
        self._limits = limits
        self._start_timeout_s = start_timeout_s
        self._fleet: Fleet | None = None
        for server in servers:
            server.start()

    def ready(
        self, *, eos_token_ids: Sequence[int], decode: Callable[[list[int]], str], talk: Talk | None = None
    ) -> Fleet:
        """Waits for the servers, checks each, and returns the fleet; `talk` None means one turn."""
        for started in self.servers:
            started.wait_ready()
        api, timeout_s = self._speak(eos_token_ids), self._limits.request_timeout_s
        attach = functools.partial(self._attach, attached_key(), api)
        joining = None if self._lookup is None else (self._lookup, attach)
        if self.servers:
            own = [(s, Endpoint(s.url, timeout_s=timeout_s, why=s.why, key=s.key)) for s in self.servers]
            members = [self._member(server, endpoint, api) for server, endpoint in own]
        elif joining:
            members = self._first(*joining)
        else:
            members = [attach(url) for url in self._urls]
        self._fleet = Fleet(
            members,
            api,
            self._publisher,
            self._limits,
            start_timeout_s=self._start_timeout_s,
            decode=decode,
            talk=talk,
            joining=joining,
        )
        return self._fleet

    def _member(self, server: Server | None, endpoint: Endpoint, api: ServerApi) -> Member:
        try:
            return Member(endpoint, server, *api.inspect(endpoint), self._limits.connections)
        except RolloutError as e:
            raise UserError(f"{e}; {api.how}") from e

    def _attach(self, key: guard.Key, api: ServerApi, url: str, ours: bool = False) -> Member:
        endpoint = Endpoint(url, timeout_s=self._limits.request_timeout_s, why=str)
        if _guarded(endpoint.within(self._limits.health_timeout_s), api):
            endpoint.move(url, key.leased())
        _require_awake(endpoint.within(self._limits.health_timeout_s), api, ours=ours)
        return self._member(None, endpoint, api)

    def _first(self, lookup: Lookup, attach: Callable[[str], Member]) -> list[Member]:
        """Waits for the first servers of a look-up; others join later."""
        deadline = time.monotonic() + self._start_timeout_s
        while True:
            members, why = [], "it names none"
            try:
                for url in lookup():
                    try:
                        members.append(attach(url))
                    except (RolloutError, UserError) as e:
                        why = str(e)
            except (OSError, ValueError) as e:
                why = str(e)
            if members:
                return members
            if time.monotonic() > deadline:
                waited = f"within rollout.start_timeout_s={self._start_timeout_s:g}"
                raise UserError(f"no server of rollout.urls answered {waited}; {why}")
            time.sleep(LOOKUP_S)

    def close(self) -> None:
        """Stops the servers that were started here; may be called twice."""
        if self._fleet is not None:
            self._fleet.close()
            return
        stop_all(self.servers)
        self._publisher.close()


def attached_key() -> guard.Key:
    """Returns the key of attached servers from the environment; UserError if it is invalid."""
    token = os.environ.get(guard.TOKEN, "").strip()
    if not (token.isascii() and token.isprintable()):
        raise UserError(f"the token in {guard.TOKEN} contains invalid characters; set it again")
    return guard.Key(token)


def _guarded(endpoint: Endpoint, api: ServerApi) -> bool:
    """Whether the server wants a token; otherwise warns, and it gets none."""
    try:
        guarded = endpoint.guarded()
    except RolloutError as e:
        raise UserError(f"{e}; {api.how}") from e
    if not guarded:
        said = "answers without a token: anyone who reaches it can replace the weights that the run samples from"
        print(f"rollout: warning: the server at {endpoint.url} {said}; {api.how}", file=sys.stderr, flush=True)
    return guarded


def _require_awake(endpoint: Endpoint, api: ServerApi, *, ours: bool) -> None:
    deadline = time.monotonic() + guard.LEASE_S + 2 * guard.TICK_S  # of a trainer that was killed just now
    while True:
        try:
            paused = api.paused(endpoint)
            break
        except Taken as e:
            if time.monotonic() > deadline:
                raise UserError(str(e)) from e
            time.sleep(guard.TICK_S)
        except RolloutError as e:
            raise UserError(f"{e}; {api.how}") from e
    if paused and not ours:
        raise UserError(
            f"the server at {endpoint.url} is paused: requests would wait for ever; if no other trainer"
            f' uses it, resume it with `curl -X POST -H "Authorization: Bearer ${guard.TOKEN}"'
            f" {endpoint.url}{api.resume_route}`"
        )
