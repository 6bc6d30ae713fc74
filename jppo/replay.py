"""Recomputes a recorded step: python -m jppo.replay RUN_DIR [--step=N] [--sample=I] [--with=FILE.py:NAME]

    python -m jppo.replay runs/quickstart --step=3

A run records the steps of trainer.replay_steps. The command grades their samples again, computes the step from them
with the run's settings, and names the first number that differs. --config.SECTION.NAME=VALUE changes a recorded
setting. Exit code 0: nothing differs; 1: something does.
"""

import argparse
import dataclasses
import math
import sys

import rich.console

from jppo import settings
from jppo.errors import UserError, expanded
from jppo.plugins.replay import compare, recompute, tables
from jppo.plugins.replay.bundle import Bundle, find_bundle, read_bundle
from jppo.run.make import wants_critic
from jppo.settings import Critic, Settings, parts
from jppo.settings.options import Options

# Largest relative difference of a machine with other rounding, by compute dtype (docs/replay.md).
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.1}


# Settings of the samples, which are recorded, and of the schedule's length, which the run knew from its data.
RECORDED = (
    *(f"data.{name}" for name in ("train_batch_size", "max_prompt_length", "max_response_length")),
    *("rollout.n", "rollout.agent_branches", "trainer.total_training_steps", "trainer.total_epochs"),
)


def _tolerance(text: str) -> float:
    """Parses a finite number of 0 or more."""
    if not 0 <= (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be 0 or more, and finite")
    return value


def _parser() -> settings.Parser:
    parser = settings.Parser("jppo.replay", __doc__, allow_abbrev=False)
    parser.add_argument("run_dir", type=expanded, metavar="RUN_DIR", help="the folder of the run")
    parser.add_argument("--step", type=settings.natural, help="a recorded step; needless if there is one only")
    parser.add_argument("--sample", type=settings.natural, help="prints this sample of the step by token")
    parser.add_argument("--with", dest="other", metavar="FILE.py:NAME", help="another algorithm on the same samples")
    parser.add_argument("--tolerance", type=_tolerance, help="relative; default 0 on the CPU that recorded")
    return parser


def choose_tolerance(replay: recompute.Replay, bundle: Bundle, given: float | None) -> tuple[float, str]:
    """Returns the tolerance and a line on it: 0 where the CPU, the devices and the versions are the recorded ones."""
    differing = [name for name in bundle.machine if replay.machine.get(name) != bundle.machine[name]]
    platform = replay.learner.mesh.devices.flat[0].platform
    same = not differing and platform == "cpu"
    tolerance = (0.0 if same else TOLERANCES[replay.c.model.compute_dtype]) if given is None else given
    where = f"recorded on {bundle.machine['processor']}, {bundle.machine['devices']}"
    here = f"; other here: {', '.join(differing)}" if differing else "; the same here"
    rule = f"differences up to {tolerance:g} count as equal" if tolerance else "every number must be equal"
    return tolerance, f"{where}{here}: {rule}"


def other_settings(c: Settings, spec: str) -> Settings:
    """Returns the settings with another algorithm: FILE.py:NAME, or a name of algorithm.adv_estimator."""
    named = {"algorithm.extension": spec} if ":" in spec else {"algorithm.adv_estimator": spec}
    changes = {"algorithm.extension": "", "algorithm.options": Options()} | named
    other = settings.without_unread(settings.changed(c, changes), ())
    if not wants_critic(other):
        without = {"trainer.critic_warmup": 0, "algorithm.lam_alpha": None}
        other = dataclasses.replace(settings.changed(other, without), critic=Critic())
    settings.check(other)
    return settings.changed(other, {"algorithm.options": parts.options(other)})


def replay_step(argv: list[str], console: rich.console.Console) -> bool:
    """Replays a step and prints the tables; returns whether something differs."""
    overrides = [word for word in argv if word.startswith("--config.")]
    args = _parser().parse_args([word for word in argv if word not in overrides])
    if recorded := [word for word in overrides if word.removeprefix("--config.").split("=")[0] in RECORDED]:
        raise UserError(f"{recorded[0]}: the samples and the schedule of the step are recorded; leave it out")
    bundle = read_bundle(find_bundle(args.run_dir, args.step))
    count = len(bundle.samples.sequences)
    if args.sample is not None and args.sample >= count:
        raise UserError(f"--sample={args.sample}: the step has {count} sequences, from 0 to {count - 1}")
    config, _ = settings.parse(overrides, __doc__ or "", recompute.settings_of(bundle), needs_file=False)
    c = settings.typed(config)
    other_c = None if args.other is None else other_settings(c, args.other)
    replay = recompute.open_replay(bundle, c)
    tolerance, line = choose_tolerance(replay, bundle, args.tolerance)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    say(f"step {bundle.number} of {args.run_dir}, {line}")
    if (config_difference := compare.compare_configs(bundle.computed.models, replay.models)) is not None:
        say(f"{describe(config_difference)}; the weights may not fit, so nothing is recomputed")
        return True
    rewards, note = recompute.grade(replay)
    step = recompute.run_step(replay, recompute.read_state(replay), rewards)
    results, differences = compare.compare(bundle.computed, step.computed, tolerance)
    console.print(tables.stage_table(results, note))
    if note:
        say(note)
    if args.sample is not None:
        console.print(tables.sample_table(replay, step, args.sample))
    if other_c is not None:
        other = recompute.open_replay(bundle, other_c)
        other_step = recompute.run_step(other, recompute.read_state(other), rewards)
        for table in tables.algorithm_tables(step, other_step, args.other):
            console.print(table)
        if line := tables.describe_nonfinite(other_step, args.other):
            say(line)
    say(describe(differences[0]) if differences else "nothing differs")
    return bool(differences)


def describe(d: compare.Difference) -> str:
    return f"first difference: {d.stage}: {d.place}: recorded {d.recorded}, recomputed {d.recomputed}"


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """Replays a step; ends with code 1 if something differs."""
    console = rich.console.Console()
    console = console if console.is_terminal else rich.console.Console(width=160)
    if replay_step(sys.argv[1:] if argv is None else argv, console):
        sys.exit(1)


if __name__ == "__main__":
    main()
