"""Records steps of a run: bundles of what a step read, and of what it computed."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from jppo import settings
from jppo.errors import UserError
from jppo.learner.ppo import StepLearner
from jppo.learner.trainable import Trainable
from jppo.plugins.replay import bundle
from jppo.plugins.replay.bundle import Computed, Samples
from jppo.run.recording import Recorder, Recording
from jppo.runlog.checkpoint_arrays import checksum_of_all
from jppo.samples.queue import StepSamples
from jppo.types import Batch, Reward, TrainState

if TYPE_CHECKING:
    from jppo.run.start import Run

# (model's name, gradient and loss of a mini-batch, weights and statistics after the optimizer step)
Observer = Callable[[str, Any, Any, dict[str, Any]], None]


def observed(learner: StepLearner, observe: Observer) -> StepLearner:
    """Returns a learner that calls `observe` after each optimizer step."""

    def with_observer(trainable: Trainable) -> Trainable:
        def apply(params: Any, opt: Any, carry: Any, step: Any, learns: Any) -> Any:
            results = trainable.apply(params, opt, carry, step, learns)
            observe(trainable.name, carry, results[0], results[2])
            return results

        return dataclasses.replace(trainable, apply=cast(Any, apply))

    critic = None if learner.critic is None else with_observer(learner.critic)
    return dataclasses.replace(learner, actor=with_observer(learner.actor), critic=critic)


def update_row(name: str, carry: Any, params: Any, stats: dict[str, Any]) -> dict[str, Any]:
    """Returns the numbers of an optimizer step."""
    row = {"model": name, "loss": float(carry[1])} | {key: float(x) for key, x in stats.items()}
    return row | {"checksum of the weights": str(checksum_of_all(params))}


def make_recorder(spec: str, hosts: int, total_steps: int) -> Recorder:
    """Makes the recorder of steps such as '3,5-7'. A step that cannot be written is noted, and the run continues."""
    name = f"trainer.replay_steps={spec!r}"
    steps = settings.parse_steps(spec, "trainer.replay_steps")
    settings.check_within(steps, total_steps, name)
    if hosts > 1:
        raise UserError(f"{name} is for one host, and this run has {hosts}; leave it empty")

    def record(
        run: "Run",
        now: TrainState,
        samples: StepSamples,
        rewards: list[Reward],
        baseline: list[Reward] | None,
        data: Batch,
    ) -> Recording:
        """Writes what the step read, if it is one of the steps; `data` has its advantages."""
        number = int(now.step) + 1
        if not any(number in part for part in steps):
            return Recording(run.learner)
        graded = Samples(samples.prompts, samples.trajectories, rewards, baseline)
        folder, rows = run.folder / "replay" / f"step_{number}", list[dict[str, Any]]()

        def end(after: TrainState, metrics: dict[str, float]) -> None:
            computed = Computed(
                models=bundle.describe_models(run.inputs, run.origin["frozen"]),
                rewards=bundle.reward_arrays(rewards),
                batch=bundle.batch_arrays(data, graded.sequences),
                updates=rows,
                metrics=metrics,
                weights=bundle.weight_values(run.learner, after),
            )
            agent = run.inputs.agent
            about = {
                "number": number,
                "settings": settings.as_dict(run.c),
                "total_steps": run.inputs.total_steps,
                "sources": run.inputs.sources,
                "tool_rewards": agent is not None and agent.rewards,
                "machine": bundle.describe_machine(run.learner.mesh, run.origin["versions"]),
            }
            bundle.end_bundle(folder, about, computed)
            run.logger.note(f"step {number} is recorded in {folder}; jppo replay recomputes it")

        if not _write(run, number, lambda: bundle.begin_bundle(folder, run.learner, now, graded)):
            return Recording(run.learner)
        learner = observed(run.learner, lambda *update: rows.append(update_row(*update)))
        return Recording(learner, lambda *after: _write(run, number, lambda: end(*after)))

    return record


def _write(run: "Run", number: int, write: Callable[[], None]) -> bool:
    """Calls `write` in the stage of saves; notes a failure and returns False."""
    try:
        with run.timer("save"):
            write()
    except Exception as e:  # orbax raises anything
        run.logger.note(f"step {number} is not recorded ({type(e).__name__}: {e}); the run continues")
        return False
    return True
