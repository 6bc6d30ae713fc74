"""The views of an algorithm's functions: each array that one may read, under the name of the read.

A read is recorded once, on shapes (`record`), so that a run computes what is read and nothing else.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jppo.models.heads import Vocabulary
from jppo.models.router import RouterSums
from jppo.types import Array

PART, COLUMN = "part of the reward: ", "column of the memory: "
STATISTIC = "statistic of the logits: "
SHARE = "number of tokens: "

# (logits [C, V] f32 at the temperature, targets [C], vocabulary, which may be sharded) -> [C] f32
Statistic = Callable[[jax.Array, jax.Array, Vocabulary], jax.Array]


class View:
    """Arrays of a step by name, for a function that reads some of them."""

    def __init__(self, take: Callable[[str], Array]):
        """`take` returns an array by its name, and raises KeyError for one that was not recorded as read."""
        self._take = take


class EpisodeView(View):
    """What an outcome may read: arrays [N], an entry for each episode."""

    @property
    def score(self) -> Array:
        """The score less the KL in the reward, f32; 0 without a score."""
        return self._take("score")

    @property
    def length(self) -> Array:
        """The trained tokens, f32; all sampled ones where none is trained on."""
        return self._take("length")

    @property
    def group(self) -> Array:
        """The number of each episode's group, equal for the episodes of a prompt, i32, below N."""
        return self._take("group")

    @property
    def given(self) -> Array:
        """Whether the response was given and not sampled, bool."""
        return self._take("given")

    def part(self, name: str) -> Array:
        """The part of the reward of this name, f32, without the KL."""
        return self._take(f"{PART}{name}")

    def column(self, name: str) -> Array:
        """The number that `Algorithm.columns` has for the episode's prompt, f32."""
        return self._take(f"{COLUMN}{name}")


class TokenView(View):
    """What an advantage may read: arrays [B, L], and [B] where it says so; B are responses, and branches of agents."""

    @property
    def outcome(self) -> Array:
        """The outcome of the response's episode, [B] f32."""
        return self._take("outcome")

    @property
    def reward(self) -> Array:
        """The token's reward, f32: -β KL and the amounts earned at it; the last token has the rest of the score."""
        return self._take("reward")

    @property
    def kl_reward(self) -> Array:
        """-β KL alone, f32: the score is a metric only."""
        return self._take("kl_reward")

    @property
    def value(self) -> Array:
        """The critic's value of the state before the token, f32."""
        return self._take("value")

    @property
    def greedy(self) -> Array:
        """The score of a greedy response to the same prompt, [B] f32."""
        return self._take("greedy")

    @property
    def old_logprob(self) -> Array:
        """The old policy's log-prob, f32."""
        return self._take("old_logprob")

    @property
    def entropy(self) -> Array:
        """The old policy's entropy, f32."""
        return self._take("entropy")

    @property
    def weight(self) -> Array:
        """The importance weight of the mismatch with the engine, f32; 1 without a correction."""
        return self._take("weight")

    def statistic(self, name: str) -> Array:
        """The statistic of the old policy's logits of this name, f32."""
        return self._take(f"{STATISTIC}{name}")

    @property
    def turn_ends(self) -> Array:
        """The last tokens of the policy's turns, bool, before tokens are rejected."""
        return self._take("turn_ends")

    @property
    def group(self) -> Array:
        """The number of each response's group, equal for the responses to a prompt, [B] i32."""
        return self._take("group")

    @property
    def given(self) -> Array:
        """Whether the response was given and not sampled, [B] bool."""
        return self._take("given")

    @property
    def mask(self) -> Array:
        """The trained tokens, bool."""
        return self._take("mask")

    def column(self, name: str) -> Array:
        """The number that `Algorithm.columns` has for the response's prompt, [B] f32."""
        return self._take(f"{COLUMN}{name}")


class TermView(View):
    """What every loss may read: arrays [R, T] of a micro-batch, in the layout of its rows."""

    @property
    def mask(self) -> Array:
        """The tokens that the term is summed over, bool."""
        return self._take("mask")

    @property
    def segment(self) -> Array:
        """The number of the response in its row, i32."""
        return self._take("segment")


class PolicyView(View):
    """What a function of the current policy may read."""

    @property
    def logprob(self) -> Array:
        """The current policy's log-prob, f32."""
        return self._take("logprob")

    @property
    def old_logprob(self) -> Array:
        """The old policy's log-prob, f32."""
        return self._take("old_logprob")

    @property
    def advantage(self) -> Array:
        """The advantage, f32."""
        return self._take("advantage")


class LossView(PolicyView, TermView):
    """What a term of the policy's loss may read. The current policy's arrays have a gradient."""

    @property
    def entropy(self) -> Array:
        """The current policy's entropy, f32."""
        return self._take("entropy")

    def statistic(self, name: str) -> Array:
        """The statistic of the current policy's logits of this name, f32."""
        return self._take(f"{STATISTIC}{name}")

    @property
    def kl(self) -> Array:
        """The KL to the reference that `actor.kl_loss_type` names, f32."""
        return self._take("kl")

    @property
    def ref_logprob(self) -> Array:
        """The reference's log-prob, f32."""
        return self._take("ref_logprob")

    @property
    def given(self) -> Array:
        """The tokens of responses that `Algorithm.given` gave, bool."""
        return self._take("given")

    @property
    def positive(self) -> Array:
        """On tokens of responses with a score above 0, 1 / the number of these in the mini-batch; else 0. f32."""
        return self._take("positive")

    @property
    def before(self) -> Array:
        """The result of `Algorithm.before`."""
        return self._take("before")

    @property
    def router(self) -> RouterSums:
        """The routers' sums over the micro-batch's trained tokens; a model without experts drops terms that read it."""
        return self._take("router")  # type: ignore[return-value]

    @property
    def load(self) -> Array:
        """The tokens of each expert in the mini-batch, [layers, E] f32."""
        return self._take("load")

    @property
    def tokens(self) -> Array:
        """The number of the mini-batch's trained tokens, [] f32."""
        return self._take("tokens")


class ValueView(TermView):
    """What a term of the critic's loss may read."""

    @property
    def value(self) -> Array:
        """The current value, f32, on the scale of the returns, with a gradient."""
        return self._take("value")

    @property
    def logits(self) -> Array:
        """The logits of a critic with a histogram, [R, T, bins] f32, with a gradient."""
        return self._take("logits")

    @property
    def old_value(self) -> Array:
        """The value before the update, f32."""
        return self._take("old_value")

    @property
    def returns(self) -> Array:
        """The returns, f32."""
        return self._take("returns")


class BeforeView(PolicyView):
    """What a function of a whole mini-batch may read before its gradient: arrays [B, L], 0 outside the mini-batch.

    `logprob` costs one more pass.
    """

    @property
    def key(self) -> Array:
        """A key of the mini-batch's own, of jax.random."""
        return self._take("key")

    @property
    def mask(self) -> Array:
        """The trained tokens of the mini-batch, bool."""
        return self._take("mask")

    def count(self, share: float) -> Array:
        """The number of tokens that are this share of the trained ones, rounded down, at least 1: [] i32."""
        return self._take(f"{SHARE}{share}")


V = TypeVar("V", bound=View)
SHAPE = N, L = 2, 3  # of the arrays on which reads are recorded
# The reads that are [N], and the dtypes that are not f32; other reads are [N, L].
BY_EPISODE = ("score", "length", "outcome", "greedy", "group", "given")
DTYPES = {"group": np.int32, "segment": np.int32, "mask": np.bool_, "turn_ends": np.bool_, "given": np.bool_}


def _placeholder(name: str) -> Any:
    """Returns a small stand-in for the array that a view has under this name."""
    if name == "key":
        return jax.random.key(0)
    if name == "router":
        by_expert, by_layer = jnp.ones((L, N)), jnp.ones(L)
        return RouterSums(load=by_expert, prob=by_expert, z=by_layer, entropy=by_layer)
    shape: tuple[int, ...] = (N,) if name in BY_EPISODE or name.startswith((PART, COLUMN)) else (N, L)
    shape = {"load": (L, N), "logits": (N, L, N), "tokens": ()}.get(name, shape)
    dtype = DTYPES.get(name, np.float32)
    return jnp.ones((), np.int32) if name.startswith(SHARE) else jnp.zeros(shape, dtype)


def record(call: Callable[[Callable[[str], Any]], Any], shapes: Mapping[str, Any]) -> tuple[tuple[str, ...], Any]:
    """Traces `call(take)`, where take(name) reads an array; returns the names read and the result's shape."""
    names: dict[str, None] = {}

    def take(name: str) -> Any:
        names[name] = None
        return jnp.zeros(shapes[name].shape, shapes[name].dtype) if name in shapes else _placeholder(name)

    result = jax.eval_shape(lambda: call(take))
    return tuple(names), result


def names_of(reads: tuple[str, ...], kind: str) -> tuple[str, ...]:
    """Returns the names of one kind, such as PART, among the reads."""
    return tuple(name.removeprefix(kind) for name in reads if name.startswith(kind))


def view(kind: type[V], reads: tuple[str, ...], arrays: Mapping[str, Any]) -> V:
    """Returns the view of the arrays that were recorded as read."""
    return kind({name: x for name, x in arrays.items() if name in reads}.__getitem__)
