"""What an algorithm is: pure functions of the arrays of a step, each of which reads one view of them.

The reads are recorded once, on shapes, so that a run computes what is read and nothing else: a critic is built where
values are read, a greedy response sampled where its score is. A function may be a closure, a partial, or built from
others; jppo's own, in `estimators.py`, are written with the same means as a user's.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jppo.algorithms import losses, masked
from jppo.learner.views import (
    COLUMN,
    PART,
    STATISTIC,
    BeforeView,
    EpisodeView,
    L,
    LossView,
    N,
    Statistic,
    TokenView,
    ValueView,
    View,
    names_of,
    record,
)
from jppo.models.heads import WHOLE_VOCABULARY
from jppo.types import Array, Prompt, StepData

Memory = Any  # a pytree of numpy arrays, dicts, lists, numbers and texts


def spread_outcome(view: TokenView) -> Array:
    """Gives each trained token its episode's outcome."""
    return masked.at_kept(view.outcome, view.mask)


@dataclasses.dataclass(frozen=True)
class Term:
    """A term of a loss."""

    # Returns a number for each token [R, T], which the aggregation weights and adds, or one number for the micro-batch,
    # []. May return a pair of this and of metrics by name, [R, T], whose means over the tokens are logged.
    loss: Callable[[Any], Array | tuple[Array, Mapping[str, Array]]]
    metric: str = ""  # the name under which it is logged, without its coefficient; '': it is not
    coefficient: float = 1.0
    aggregation: str | None = None  # as `actor.loss_agg_mode`, and that if it is None; of a critic's term, the critic's
    corrected: bool = True  # `algorithm.old_logprob` weights and rejects its tokens; False: a regulariser
    by_sequence: bool = False  # its numbers are of whole sequences, and so are their importance weights

    def __post_init__(self) -> None:
        """Raises ValueError for a coefficient or an aggregation that cannot be."""
        if isinstance(self.coefficient, bool) or not isinstance(self.coefficient, int | float):
            raise ValueError(f"a Term with coefficient={self.coefficient!r}; it must be a number")
        if self.aggregation not in (None, *losses.AGGREGATIONS):
            raise ValueError(
                f"a Term with aggregation={self.aggregation!r}; it is one of {', '.join(losses.AGGREGATIONS)}, or None"
            )


@dataclasses.dataclass(frozen=True, eq=False)  # of functions, which are equal to themselves alone
class Algorithm:
    """How a policy learns.

    `algorithm.extension` names a user's. A field that keeps its default is taken from `algorithm.adv_estimator`, for
    advantages, or from `actor.loss_mode`, for the loss. JAX traces the functions of arrays, down to `statistics`. The
    others run on the host: on every host of a run with equal arguments, `listen` on the first alone.
    """

    # The advantage of each token [B, L], or the pair of it and of the returns that a critic learns, else the same. Left
    # out beside an `outcome`, it spreads that.
    advantage: Callable[[TokenView], Array | tuple[Array, Array]] | None = None
    outcome: Callable[[EpisodeView], Array] | None = None  # of each episode, [N]; unless `advantage` reads it, unused
    # Functions of (advantage, mask) that change the advantage, not the returns. Left out beside an `advantage` or an
    # `outcome`, there are none.
    transforms: tuple[Callable[[Array, Array], Array], ...] | None = None
    # The policy's loss is their sum; each reads a LossView. They replace the terms of `actor.loss_mode`. Terms of other
    # settings, such as the entropy bonus, are added.
    terms: tuple[Term, ...] = ()
    more_terms: tuple[Term, ...] = ()  # added to `terms`, or to the terms of `actor.loss_mode`
    value_terms: tuple[Term, ...] = ()  # the critic's loss is their sum; each reads a ValueView
    # Runs over a whole mini-batch, however that is cut, before its gradient; terms may read its result [B, L].
    before: Callable[[BeforeView], Array] | None = None
    statistics: Mapping[str, Statistic] = dataclasses.field(default_factory=dict)  # that views read by name

    # Texts of responses that take the last places of a prompt's `rollout.n` samples, in place of sampled ones.
    given: Callable[[Prompt], Sequence[str]] | None = None
    # The memory is in every checkpoint, exactly. Each call gets a copy of it; a tuple comes back as a list.
    init: Callable[[Sequence[Prompt]], Memory] | None = None  # of all prompts to train on; left out, it begins as None
    # The places of the next N prompts, all different; the generator follows from the seed and the position in the data.
    # Asynchronous training calls it ahead, dynamic sampling for each gen batch. Left out, the data's own order.
    prompts: Callable[[Memory, np.random.Generator, int], Sequence[int]] | None = None
    # Returns arrays by name, a number for each prompt at the given places; views read them as `column(name)`.
    columns: Callable[[Memory, np.ndarray], Mapping[str, np.ndarray]] | None = None
    update: Callable[[Memory, StepData], Memory] | None = None  # before the step's update of the weights
    # Returns metrics to log with the step's. It gets the memory that `update` has returned.
    listen: Callable[[Memory, StepData], Mapping[str, float]] | None = None

    def __post_init__(self) -> None:
        """Completes the three functions of the estimate where one of them is given."""
        if self.advantage is None and self.outcome is not None:
            object.__setattr__(self, "advantage", spread_outcome)
        if self.transforms is None and self.advantage is not None:
            object.__setattr__(self, "transforms", ())

    def over(self, base: "Algorithm") -> "Algorithm":
        """Returns this algorithm laid over `base`, which fills in every field that has its default here.

        So `terms=()` takes those of `base`, but `transforms=()`, which is not its default, takes none. Statistics are
        joined, and where there are terms `more_terms` are appended to them.
        """
        left_out = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) == f.default]  # not statistics
        filled_in = {name: getattr(base, name) for name in left_out}
        merged = dataclasses.replace(self, statistics={**base.statistics, **self.statistics}, **filled_in)
        if not merged.terms:
            return merged
        return dataclasses.replace(merged, terms=(*merged.terms, *merged.more_terms), more_terms=())

    @functools.cached_property
    def reads(self) -> tuple[str, ...]:
        """The names of what outcome and advantage read, in the order of the first reads; () of a loss alone."""
        if (estimate := self.advantage) is None:
            return ()

        def trace_estimate(take: Callable[[str], Any]) -> tuple[Any, Any]:
            token_names = dict[str, None]()

            def record_read(name: str) -> Any:
                token_names[name] = None
                return take(name)

            advantage = estimate(TokenView(record_read))
            if "outcome" not in token_names:
                return None, advantage
            if self.outcome is None:
                raise ValueError("its advantage reads the outcome, and it has none")
            return self.outcome(EpisodeView(take)), advantage

        names, (outcome, advantage) = record(trace_estimate, {})
        by_token = advantage if isinstance(advantage, tuple) else (advantage,)
        self._require_parts(names)
        if self.columns is None and names_of(names, COLUMN):
            raise ValueError("it reads a column of its memory, and has no function `columns`")
        if (outcome is not None and outcome.shape != (N,)) or any(x.shape != (N, L) for x in by_token):
            raise ValueError("an outcome is [N], a number for each episode, and an advantage [B, L], for each token")
        return names

    @functools.cached_property
    def loss_reads(self) -> tuple[str, ...]:
        """The names of what the terms of the policy's loss read."""
        return self._list_reads(self.terms, LossView)

    @functools.cached_property
    def metrics(self) -> tuple[str, ...]:
        """The names of the metrics of all terms; raises ValueError where two have one."""
        names = list[str]()
        for terms, kind in ((self.terms, LossView), (self.value_terms, ValueView)):
            names += [term.metric for term in terms if term.metric]
            names += [n for result in self._trace_terms(terms, kind)[1] if isinstance(result, tuple) for n in result[1]]
        if len(names) > len(set(names)):
            raise ValueError(f"two terms have one metric: {', '.join(names)}")
        return tuple(names)

    @functools.cached_property
    def value_reads(self) -> tuple[str, ...]:
        return self._list_reads(self.value_terms, ValueView)

    @functools.cached_property
    def before_reads(self) -> tuple[str, ...]:
        return self._traced_before[0]

    @functools.cached_property
    def _traced_before(self) -> tuple[tuple[str, ...], Any]:
        """The names of what `before` reads, and the shape of its result; (), None without a `before`."""
        if self.before is None:
            return (), None
        function = self.before
        names, result = record(lambda take: function(BeforeView(take)), {})
        if getattr(result, "shape", None) != (N, L):
            raise ValueError("`before` returns [B, L], a number for each token")
        return names, result

    def _trace_terms(self, terms: tuple[Term, ...], kind: type[View]) -> tuple[tuple[str, ...], list[Any]]:
        """Traces terms on shapes; returns the names that they read of a `kind` of view, and their results."""
        shapes = {"given": jax.ShapeDtypeStruct((N, L), np.bool_)}
        shapes |= {} if self.before is None else {"before": self._traced_before[1]}
        return record(lambda take: [term.loss(kind(take)) for term in terms], shapes)

    def _list_reads(self, terms: tuple[Term, ...], kind: type[View]) -> tuple[str, ...]:
        """Returns the names that terms read of a `kind` of view; raises ValueError for results of a wrong shape."""
        names, results = self._trace_terms(terms, kind)
        for result in results:
            numbers, metrics = result if isinstance(result, tuple) else (result, {})
            if getattr(numbers, "shape", None) not in ((N, L), ()) or any(x.shape != (N, L) for x in metrics.values()):
                raise ValueError("a term is [R, T], a number for each token, or one number, and its metrics are [R, T]")
        if "before" in names and self.before is None:
            raise ValueError("a term reads `before`, and the algorithm has none")
        self._require_parts(names)
        return names

    def without_routers(self) -> "Algorithm":
        """Returns the algorithm without the terms that read a model's routers, for a model without experts."""
        terms = tuple(term for term in self.terms if {"router", "load"}.isdisjoint(self._list_reads((term,), LossView)))
        return self if terms == self.terms else dataclasses.replace(self, terms=terms)

    def statistics_of(self, reads: tuple[str, ...]) -> list[tuple[str, Statistic]]:
        """Returns the statistics of the logits among the reads, with their names."""
        return [(name, self.statistics[name]) for name in names_of(reads, STATISTIC)]

    def _require_parts(self, reads: tuple[str, ...]) -> None:
        """Raises ValueError for a part that the algorithm lacks, or a statistic that does not return [C] f32."""
        if "given" in reads and self.given is None:
            raise ValueError("a function of it reads which responses are given, and its field `given` is None")
        for name in names_of(reads, STATISTIC):
            if name not in self.statistics:
                known = ", ".join(self.statistics) or "none"
                raise ValueError(f"it reads the statistic {name!r}, and has {known}")
            logits, targets = jax.ShapeDtypeStruct((N, L), np.float32), jax.ShapeDtypeStruct((N,), np.int32)
            result = jax.eval_shape(lambda *args, f=self.statistics[name]: f(*args, WHOLE_VOCABULARY), logits, targets)
            if getattr(result, "shape", None) != (N,) or result.dtype != np.float32:
                raise ValueError(
                    f"the statistic {name!r} returns {getattr(result, 'dtype', '?')}{getattr(result, 'shape', '')} of"
                    f" logits [C, V] and targets [C]; it must return [C] f32"
                )

    @property
    def critic(self) -> bool:
        """Whether it reads values."""
        return "value" in self.reads

    @property
    def greedy(self) -> bool:
        """Whether each prompt also gets a greedy response, which is graded."""
        return "greedy" in self.reads

    @property
    def old_logits(self) -> bool:
        """Whether its advantage reads statistics of the old policy's logits."""
        return "entropy" in self.reads or bool(names_of(self.reads, STATISTIC))

    @property
    def ratio(self) -> bool:
        """Whether its loss reads the old policy."""
        return "old_logprob" in self.loss_reads

    @property
    def aggregation(self) -> str | None:
        """The aggregation that its loss requires; None for any."""
        return next((term.aggregation for term in self.terms if term.corrected), None)

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
        """The names of the parts of the reward that it reads in place of the score."""
        return names_of(self.reads, PART)

    @property
    def column_names(self) -> tuple[str, ...]:
        """The columns of the memory that it reads."""
        return names_of(self.reads, COLUMN)

    @property
    def remembers(self) -> bool:
        """Whether one of its functions reads or changes a memory from step to step."""
        return any(part is not None for part in (self.init, self.prompts, self.columns, self.update))

    @property
    def scored(self) -> bool:
        """Whether it reads the score; else it is a metric only."""
        return not {"score", "reward", "greedy"}.isdisjoint(self.reads) or bool(self.parts)
