"""What `fleet.py` must know of a kind of server: how it is spoken to, and how weights are handed to it."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from jppo.rollout.endpoint import Endpoint
from jppo.structs import Sampling


@dataclasses.dataclass(frozen=True)
class Part:
    """What a server answers to one request; `finish` may be 'abort': an update of the weights cut it."""

    tokens: list[int]
    logprob: list[float]
    version: list[str]  # of each token, as the server names the weights
    finish: str
    server: str = ""


class Dialect(Protocol):
    """How one kind of server is spoken to. What it does not answer as agreed is a ServerFault."""

    @property
    def how(self) -> str:
        """How to start one that is fit for training."""
        ...

    @property
    def wake(self) -> str:
        """The route that ends a pause, as `curl -X POST` asks for it."""
        ...

    def request(self, ids: Sequence[int], sampling: Sampling, seed: int, model: str) -> tuple[str, dict[str, Any]]:
        """The route and the body that ask for one answer."""
        ...

    def part(self, reply: Any, sampling: Sampling) -> Part:
        """What the reply to a request with this `sampling` says."""
        ...

    def inspect(self, endpoint: Endpoint) -> tuple[str, int]:
        """The served model's name and length; UserError if the server is not fit for training."""
        ...

    def paused(self, endpoint: Endpoint) -> bool:
        """Whether requests would wait."""
        ...

    def version(self, endpoint: Endpoint) -> int | None:
        """The weights that it has; None: none of ours."""
        ...

    def pause(self, endpoint: Endpoint, mode: str) -> None:
        """Lets no token be sampled; `mode` says what becomes of those under way: wait, abort or keep."""
        ...

    def resume(self, endpoint: Endpoint) -> None:
        """The end of a pause; caches of the old weights are gone."""
        ...

    def lie_down(self, endpoint: Endpoint, level: int) -> None:
        """Gives its device's memory back; nothing is under way. Level 1 keeps the weights elsewhere, 2 does not."""
        ...

    def get_up(self, endpoint: Endpoint, what: str) -> None:
        """Takes the memory of 'weights' or of the 'kv_cache' again."""
        ...


class Delivery(Protocol):
    """Weights on their way to the servers; can be handed over as often as needed."""

    @property
    def version(self) -> int:
        """What they are named."""
        ...

    @property
    def model(self) -> str | None:
        """What requests ask for when they are there; None: the server's own name."""
        ...

    @property
    def whole(self) -> bool:
        """Whether they are the whole model; else something beside what was delivered before."""
        ...

    def offer(self, endpoint: Endpoint) -> None:
        """Shows them to a server, which changes nothing yet; RolloutError if it refuses."""
        ...

    def take(self, endpoint: Endpoint) -> None:
        """Makes them what it samples from."""
        ...
