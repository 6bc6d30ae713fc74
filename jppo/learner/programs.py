"""The programs of a step as a list: what a start compiles, and what accounts of memory and forecasts of time go over.

`list_programs` calls none of them. It follows a step without responses through its stages, so that every program has
the arguments that a step gives it. A learner of shapes (`make.sketch_trained`) has the same list as a loaded one.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np

from jppo.learner import batch, packing, ppo, sharding, state, update
from jppo.learner.loss_scale import scale_of
from jppo.learner.ppo import StepLearner
from jppo.learner.trainable import Trainable
from jppo.models import placing
from jppo.types import Batch, Counts, Params, Rows, Scored, TrainState

# It runs for each micro-batch of scoring or of an update, for each optimizer step (its exchange, its end), or in the
# rollout engine. The others take little.
Stage = Literal["scoring", "gradient", "exchange", "step", "engine", "other"]


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled function of a step, and its arguments: arrays, or their shapes."""

    name: str
    stage: Stage
    function: Any  # of jax.jit
    args: tuple[Any, ...]  # in the memory where they wait; values of the host as they are
    model: str = ""  # whose work it is: 'actor', 'critic' or 'reference', or the one of another training
    rows: tuple[int, ...] | None = None  # shape [R, T]; None: it reads no rows
    beside: Any = ()  # models that are on the devices meanwhile
    scratch: Any = ()  # arrays that exist for it alone: the sums of gradients, one of its arguments
    make_scratch: Callable[[], Any] = tuple

    def lower(self) -> jax.stages.Lowered:
        lowered: jax.stages.Lowered = self.function.lower(*placing.on_device_shapes(self.args))
        return lowered

    def run(self) -> None:
        """Compiles the program, and runs it on zeros in place of shapes; an optimizer step would replace the state."""
        if self.stage == "step":
            self.lower().compile()
            return
        args = tuple(self.make_scratch() if x is self.scratch else placing.zeros_of(x) for x in self.args)
        out = jax.block_until_ready(self.function(*placing.to_device(args)))
        if self.stage == "scoring":
            placing.fetch(out)  # several hosts gather it

    def results(self) -> Any:
        return jax.eval_shape(self.function, *placing.on_device_shapes(self.args))


def list_programs(learner: StepLearner, now: TrainState, *, shuffled: int = 0) -> list[Program]:
    """Lists the programs of a PPO step; `shuffled` is the number of sequences that a shuffled epoch orders, or 0."""
    rows = [packing.empty_rows(shape, learner.plan) for shape in learner.plan.shapes]
    listed = [program for empty in rows for program in scoring_programs(learner, now, empty)]
    unscored, data = empty_batch(learner, now, rows[0])
    arguments = placing.shapes(unscored, sharding.whole_rows_sharding(learner.mesh)), now.kl_coef, now.value_norm
    listed.append(Program("advantages", "other", learner.passes.advantages, arguments))
    reference = learner.recipe.reference_for_loss(learner.reference)
    micros = [batch.scored_rows(data, empty, learner.actor.loss.reads) for empty in rows]
    listed += update_programs(learner.actor, now.policy, now.policy_opt, now, micros, reference, data=data)
    if learner.critic is not None:
        micros = [batch.scored_rows(data, empty, learner.critic.loss.reads) for empty in rows]
        listed += update_programs(learner.critic, now.value, now.value_opt, now, micros, data=data)
    if learner.recipe.adapt_kl is not None:
        listed.append(Program("kl coefficient", "other", learner.recipe.adapt_kl, (now.kl_coef, np.float32(0))))
    if shuffled:
        numbers = now.key, now.step, np.int32(0), np.int32(0), shuffled
        listed.append(Program("order", "other", state.draw_order, numbers))
    return listed


def scoring_programs(learner: StepLearner, now: TrainState, rows: Rows) -> Iterator[Program]:
    """Yields the passes without a gradient over rows of this shape."""
    passes, policy, shape = learner.passes, learner.policy(now), rows.inputs.shape
    placed = placing.shapes(rows, sharding.rows_sharding(learner.mesh))
    yield Program("log-probs", "scoring", passes.logprob, (policy, placed), "actor", shape)
    if passes.reference is not None:
        models = learner.reference, learner.recipe.policy_for_reward(policy)
        yield Program("reference", "scoring", passes.reference, (*models, placed), "reference", shape)
    if passes.value is not None:
        yield Program("values", "scoring", passes.value, (learner.value(now), placed), "critic", shape)


def update_programs(
    trainable: Trainable,
    learned: Params,
    opt: Any,
    now: TrainState,
    micros: Sequence[Scored | Rows],
    *further: Any,
    data: Batch | None = None,
) -> Iterator[Program]:
    """Yields the programs of one model's update, for a micro-batch of each shape on the host.

    `further` are the gradient's last arguments, `data` is the flat batch that `Algorithm.before` reads.
    """
    name, number, mesh = trainable.name, np.int32(0), placing.mesh_of(learned)
    carry = update.abstract_carry(learned, jax.tree.map(lambda x: placing.on_device(x.sharding), learned))
    counts = Counts(tokens=np.ones((), np.float32), sequences=np.ones((), np.float32))
    accounting = dict[str, Any](beside=(learned, trainable.base, further), scratch=carry, make_scratch=trainable.zeros)
    yield Program(f"{name} zeros", "other", trainable.zeros, (), name)
    if trainable.drops:
        yield Program(f"{name} dropout", "other", batch.draw_seeds, (now.key, now.step, number), name)
        micros = [batch.with_seeds(micro, lambda rows: np.zeros(rows.inputs.shape, np.uint32)) for micro in micros]
    if trainable.loss.before is not None:
        assert data is not None
        before_args = now.key, now.step, number, trainable.loss.before.placeholders(data)
        yield (before := Program(f"{name} before", "other", trainable.loss.before.function, before_args, name))
        scored, dtype = [micro for micro in micros if isinstance(micro, Scored)], before.results().dtype
        micros = [batch.with_array(m, "before", np.zeros(m.rows.inputs.shape, dtype)) for m in scored]
    for micro in micros:
        placed = placing.shapes(micro, sharding.rows_sharding(mesh))
        rows = placed.rows if isinstance(placed, Scored) else placed
        shape = rows.inputs.shape
        if trainable.loss.load is not None:
            load = Program(f"{name} load", "other", trainable.loss.load, (trainable.model(learned), rows), name, shape)
            yield load
            by_expert = load.results()
            counts = dataclasses.replace(counts, load=np.zeros(by_expert.shape, by_expert.dtype))
        args = learned, trainable.base, carry, placed, counts, scale_of(opt), *further
        yield Program(f"{name} gradient", "gradient", trainable.loss.accumulate, args, name, shape, **accounting)
    if trainable.exchange is not None:
        yield Program(f"{name} exchange", "exchange", trainable.exchange, (carry,), name, **accounting)
    step_args = learned, opt, carry, now.step, np.True_
    yield Program(f"{name} step", "step", trainable.apply, step_args, name, **accounting)


def empty_batch(learner: StepLearner, now: TrainState, rows: Rows) -> tuple[Batch, Batch]:
    """Returns two batches of padding alone, before and after the advantages, with any step's shapes and dtypes.

    Programs are compiled for them. Dtypes are those of the scoring passes over `rows`, a micro-batch of any shape.
    """
    passes, recipe, no_rows = learner.passes, learner.recipe, np.zeros(0, np.int32)
    algorithm = recipe.algorithm
    data = batch.flatten(
        [], [], no_rows, np.zeros(0, np.float32) if algorithm.greedy else None,
        shape=learner.shape, has_earned=recipe.earns, has_given=algorithm.given is not None,
        episode=no_rows if recipe.branches else None, parts=algorithm.parts,
        columns=dict.fromkeys(algorithm.column_names, no_rows),
    )  # fmt: skip

    def zeros(x: Any) -> Any:
        return np.zeros(learner.shape, x.dtype)

    results = {program.name: program.results() for program in scoring_programs(learner, now, rows)}
    data = ppo.add_old_logprob(recipe, data, None if recipe.bypass else jax.tree.map(zeros, results["log-probs"]))
    if "reference" in results:
        ref_logprob, exact_kl = jax.tree.map(zeros, results["reference"])
        data = data.with_arrays(ref_logprob=ref_logprob, exact_kl=exact_kl)
    elif learner.reference is None and (recipe.kl_penalty or recipe.kl_loss_type):  # by a server
        data = batch.with_reference_logprobs(data, [])
    if "values" in results:
        data = data.with_arrays(value=zeros(results["values"]))
    added, _ = jax.eval_shape(passes.advantages, data, now.kl_coef, now.value_norm)
    added.pop("mask")
    return data, data.with_arrays(**{name: np.zeros(x.shape, x.dtype) for name, x in added.items()})
