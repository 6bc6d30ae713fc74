"""The recording of steps for `jppo replay`: the hook of `ppo_step`, behind which the plugin `replay` writes bundles."""

import dataclasses
from collections.abc import Callable

from jppo import plugins
from jppo.learner.ppo import StepLearner
from jppo.settings import Settings


@dataclasses.dataclass(frozen=True)
class Recording:
    """A step that may be recorded."""

    learner: StepLearner  # takes the updates, and reports each to the recording
    end: Callable[..., object] = lambda *_: None  # (state after the updates, their metrics)


Recorder = Callable[..., Recording]  # (run, state, samples, rewards, baseline, batch), before the updates


def make_recorder(c: Settings, hosts: int, total_steps: int) -> Recorder:
    """Makes the recorder of the steps that `trainer.replay_steps` names."""
    if not (spec := c.trainer.replay_steps.strip()):
        return lambda run, *_: Recording(run.learner)
    recorder: Recorder = plugins.load("replay.record").make_recorder(spec, hosts, total_steps)
    return recorder
