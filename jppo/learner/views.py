"""The views of an algorithm's functions: each array that one may read, under the name of the read.

A read is recorded once, on shapes (`record`), so that a run computes what is read and nothing else.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

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
    """Arrays of a step, for a function that reads some of them: its attributes, whose annotations list them."""

    def __init__(self, take: Callable[[str], Array]):
        """`take` returns an array by its name, and raises KeyError for one that was not recorded as read."""
        self._take = take

    if not TYPE_CHECKING:  # which knows the attributes that are annotated

        def __getattr__(self, name: str) -> Any:
            if name not in get_type_hints(type(self)):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return self._take(name)


class EpisodeView(View):
    """What an outcome may read: arrays [N], an entry for each episode."""

    score: Array  # f32, less the KL in the reward; 0 without a score
    length: Array  # f32, of the trained tokens; of all sampled ones where none is trained on
    group: Array  # i32, below N, equal for the episodes of a prompt
    given: Array  # bool, whether the response was given and not sampled

    def part(self, name: str) -> Array:
        """The part of the reward of this name, f32, without the KL."""
        return self._take(f"{PART}{name}")

    def column(self, name: str) -> Array:
        """The number that `Algorithm.columns` has for the episode's prompt, f32."""
        return self._take(f"{COLUMN}{name}")


class TokenView(View):
    """What an advantage may read: arrays [B, L], and [B] where it says so; B are responses, and branches of agents."""

    outcome: Array  # [B] f32, of the response's episode
    reward: Array  # f32, of the token: -β KL and the amounts earned at it; the last token has the rest of the score
    kl_reward: Array  # f32, -β KL alone: the score is a metric only
    value: Array  # f32, the critic's of the state before the token
    greedy: Array  # [B] f32, the score of a greedy response to the same prompt
    old_logprob: Array  # f32, of the old policy
    entropy: Array  # f32, of the old policy
    weight: Array  # f32, importance weight of the mismatch with the engine; 1 without a correction
    turn_ends: Array  # bool, the last tokens of the policy's turns, before tokens are rejected
    group: Array  # [B] i32, equal for the responses to a prompt
    given: Array  # [B] bool, whether the response was given and not sampled
    mask: Array  # bool, the trained tokens

    def statistic(self, name: str) -> Array:
        """The statistic of the old policy's logits of this name, f32."""
        return self._take(f"{STATISTIC}{name}")

    def column(self, name: str) -> Array:
        """The number that `Algorithm.columns` has for the response's prompt, [B] f32."""
        return self._take(f"{COLUMN}{name}")


class TermView(View):
    """What every loss may read: arrays [R, T] of a micro-batch, in the layout of its rows."""

    mask: Array  # bool, the tokens that the term is summed over
    segment: Array  # i32, the number of the response in its row


class PolicyView(View):
    """What a function of the current policy may read."""

    logprob: Array  # f32, of the current policy
    old_logprob: Array  # f32, of the old policy
    advantage: Array  # f32


class LossView(PolicyView, TermView):
    """What a term of the policy's loss may read. The current policy's arrays have a gradient."""

    entropy: Array  # f32, of the current policy
    kl: Array  # f32, to the reference, as `actor.kl_loss_type` names it
    ref_logprob: Array  # f32, of the reference
    given: Array  # bool, tokens of responses that `Algorithm.given` gave
    positive: Array  # f32, on tokens of responses with a score above 0: 1 / their number in the mini-batch; else 0
    before: Array  # the result of `Algorithm.before`
    router: RouterSums  # over the micro-batch's trained tokens; a model without experts drops terms that read it
    load: Array  # [layers, E] f32, tokens of each expert in the mini-batch
    tokens: Array  # [] f32, the number of the mini-batch's trained tokens

    def statistic(self, name: str) -> Array:
        """The statistic of the current policy's logits of this name, f32."""
        return self._take(f"{STATISTIC}{name}")


class ValueView(TermView):
    """What a term of the critic's loss may read."""

    value: Array  # f32, the current one on the scale of the returns, with a gradient
    logits: Array  # [R, T, bins] f32, of a critic with a histogram, with a gradient
    old_value: Array  # f32, before the update
    returns: Array  # f32


class BeforeView(PolicyView):
    """What a function of a whole mini-batch may read before its gradient: arrays [B, L], 0 outside the mini-batch.

    `logprob` costs one more pass.
    """

    key: Array  # of jax.random, the mini-batch's own
    mask: Array  # bool, the trained tokens of the mini-batch

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
