"""The recording of steps for `jppo replay`: the hook of `ppo_step`, behind which the plugin `replay` writes bundles."""

import dataclasses
from collections.abc import Callable

from jppo import plugins, settings
from jppo.distributed.hosts import Hosts
from jppo.errors import UserError
from jppo.learner.ppo import StepLearner
from jppo.settings import Settings


@dataclasses.dataclass(frozen=True)
class Recording:
    """A step that may be recorded."""

    learner: StepLearner  # takes the updates, and reports each to the recording
    end: Callable[..., object] = lambda *_: None  # (state after the updates, their metrics)


Recorder = Callable[..., Recording]  # (run, state, samples, rewards, baseline, batch), before the updates


def make_recorder(c: Settings, hosts: Hosts, total_steps: int) -> Recorder:
    """Makes the recorder of the steps that `trainer.replay_steps` names."""
    name, text = "trainer.replay_steps", c.trainer.replay_steps
    steps = settings.parse_steps(text, name)
    settings.check_within(steps, total_steps, f"{name}={text!r}")
    if not steps:
        return lambda run, *_: Recording(run.learner)
    if hosts.count > 1:
        raise UserError(f"{name}={text!r} is for one host, and this run has {hosts.count}; leave it empty")
    numbers = {step for part in steps for step in part}
    recorder: Recorder = plugins.load("replay.record").make_recorder(numbers)
    return recorder
