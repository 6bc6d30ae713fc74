"""What an algorithm is: pure functions of the arrays of a step, each of which reads one view of them.

The reads are recorded once, on shapes, so that a run computes what is read and nothing else: a critic is built where
values are read, a greedy response sampled where its score is. A function may be a closure, a partial, or built from
others; jppo's own, in `estimators.py`, are written with the same means as a user's.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jppo.algorithms import masked
from jppo.types import Array, Prompt, StepData

PART, COLUMN = "part of the reward: ", "column of the memory: "
Memory = Any  # a pytree of numpy arrays, dicts, lists, numbers and texts


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
        """Equal for the episodes of a prompt, i32, below N."""
        return self._take("group")

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
    def energy(self) -> Array:
        """(1 - 2 π + Σ_a π(a)²) ρ² of the old policy and the importance weight, f32 (`advantage.energy`)."""
        return self._take("energy")

    @property
    def turn_ends(self) -> Array:
        """The last tokens of the policy's turns, bool, before tokens are rejected."""
        return self._take("turn_ends")

    @property
    def group(self) -> Array:
        """Equal for the responses to a prompt, [B] i32."""
        return self._take("group")

    @property
    def mask(self) -> Array:
        """The trained tokens, bool."""
        return self._take("mask")

    def column(self, name: str) -> Array:
        """The number that `Algorithm.columns` has for the response's prompt, [B] f32."""
        return self._take(f"{COLUMN}{name}")


V = TypeVar("V", bound=View)
N, L = 2, 3  # of the shapes on which reads are recorded
BY_TOKEN = ("reward", "kl_reward", "value", "energy", "mask", "turn_ends")  # [B, L]; the others are [N]
DTYPES = {"group": np.int32, "mask": np.bool_, "turn_ends": np.bool_}  # the others are f32


def spread_outcome(view: TokenView) -> Array:
    """Gives each trained token its episode's outcome."""
    return masked.at_kept(view.outcome, view.mask)


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """How a policy learns: `algorithm.adv_estimator` names one, `algorithm.extension` another that goes before it.

    What is None is left out. The first functions are of arrays, and are traced by JAX. The last five run on the host:
    on all hosts of a run with equal arguments, `listen` on the first alone.
    """

    # The advantage of each token [B, L], or the pair of it and of the returns that a critic learns, else the same. Left
    # out beside an `outcome`, it spreads that.
    advantage: Callable[[TokenView], Array | tuple[Array, Array]] | None = None
    outcome: Callable[[EpisodeView], Array] | None = None  # of each episode, [N]; unless `advantage` reads it, unused
    # Of the advantage, and the mask; not of the returns. Left out beside an `advantage` or `outcome`, there are none.
    transforms: tuple[Callable[[Array, Array], Array], ...] | None = None

    # The memory is in every checkpoint, exactly. Each call gets a copy of it; a tuple comes back as a list.
    init: Callable[[Sequence[Prompt]], Memory] | None = None  # of all prompts to train on; left out, it begins as None
    # The places of the next N prompts, all different; the generator follows from the seed and the position in the data.
    # Asynchronous training calls it ahead, dynamic sampling for each gen batch. Left out, the data's own order.
    prompts: Callable[[Memory, np.random.Generator, int], Sequence[int]] | None = None
    # The columns of the views by name: of the places of prompts, a number for each.
    columns: Callable[[Memory, np.ndarray], Mapping[str, np.ndarray]] | None = None
    update: Callable[[Memory, StepData], Memory] | None = None  # before the step's update of the weights
    listen: Callable[[StepData], Mapping[str, float]] | None = None  # metrics, logged with the step's

    def __post_init__(self) -> None:
        """Completes the three functions of the estimate where one of them is given."""
        if self.advantage is None and self.outcome is not None:
            object.__setattr__(self, "advantage", spread_outcome)
        if self.transforms is None and self.advantage is not None:
            object.__setattr__(self, "transforms", ())

    def over(self, base: "Algorithm") -> "Algorithm":
        """Returns it with what it leaves out from `base`."""
        fields = [field.name for field in dataclasses.fields(self)]
        left_out = {name: getattr(base, name) for name in fields if getattr(self, name) is None}
        return dataclasses.replace(self, **left_out)

    @functools.cached_property
    def reads(self) -> tuple[str, ...]:
        """The names of what the functions read, in the order of the first reads."""
        seen: dict[str, None] = {}

        def take(name: str) -> Array:
            seen[name] = None
            return jnp.zeros((N, L) if name in BY_TOKEN else (N,), DTYPES.get(name, np.float32))

        def run() -> tuple[Any, Any]:
            if self.advantage is None:
                raise ValueError("an outcome is missing, and so is an advantage; give one of them")
            advantage = self.advantage(TokenView(take))
            if "outcome" not in seen:
                return None, advantage
            if self.outcome is None:
                raise ValueError("its advantage reads the outcome, and it has none")
            return self.outcome(EpisodeView(take)), advantage

        outcome, advantage = jax.eval_shape(run)
        by_token = advantage if isinstance(advantage, tuple) else (advantage,)
        if self.columns is None and any(name.startswith(COLUMN) for name in seen):
            raise ValueError("it reads a column of its memory, and has no function `columns`")
        if (outcome is not None and outcome.shape != (N,)) or any(x.shape != (N, L) for x in by_token):
            raise ValueError("an outcome is [N], a number for each episode, and an advantage [B, L], for each token")
        return tuple(seen)

    def view(self, kind: type[V], arrays: Mapping[str, Array]) -> V:
        """Returns the view of the arrays that were recorded as read."""
        return kind({name: x for name, x in arrays.items() if name in self.reads}.__getitem__)

    @property
    def critic(self) -> bool:
        """Whether it reads values."""
        return "value" in self.reads

    @property
    def greedy(self) -> bool:
        """Whether each prompt also gets a greedy response, which is graded."""
        return "greedy" in self.reads

    @property
    def energy(self) -> bool:
        """Whether it reads the old policy's probabilities of all tokens."""
        return "energy" in self.reads

    @property
    def by_turn(self) -> bool:
        """Whether it discounts from turn to turn."""
        return "turn_ends" in self.reads

    @property
    def compares(self) -> bool:
        """Whether a prompt's samples are compared with each other."""
        return "group" in self.reads

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the reward that it reads in place of the score."""
        return tuple(name.removeprefix(PART) for name in self.reads if name.startswith(PART))

    @property
    def column_names(self) -> tuple[str, ...]:
        """The columns of the memory that it reads."""
        return tuple(name.removeprefix(COLUMN) for name in self.reads if name.startswith(COLUMN))

    @property
    def remembers(self) -> bool:
        """Whether it has functions of a memory."""
        return any(part is not None for part in (self.init, self.prompts, self.columns, self.update))

    @property
    def scored(self) -> bool:
        """Whether it reads the score; else it is a metric only."""
        return not {"score", "reward", "greedy"}.isdisjoint(self.reads) or bool(self.parts)
