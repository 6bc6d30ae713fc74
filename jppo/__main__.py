"""Lists jppo's commands: python -m jppo"""

import sys

from jppo import __version__

COMMANDS = {
    "jppo.train": "PPO",
    "jppo.sft": "supervised fine-tuning",
    "jppo.reward_model": "a reward model from preferences",
    "jppo.evaluate": "tests a model",
    "jppo.export": "what a run has trained, as a directory for others",
    "jppo.chat": "talks to a model",
    "jppo.sweep": "several trainings, side by side",
    "jppo.plan": "the fastest settings on a machine that is not there",
    "jppo.report": "one page about one run or several",
    "jppo.doctor": "what would stop a training, of the machine or of a run",
    "jppo.from_verl": "a script of verl's as a command of jppo",
    "jppo.data.check": "a look at data",
    "jppo.data.gsm8k": "makes GSM8K's files",
    "jppo.data.math": "makes MATH's files",
    "jppo.data.dapo_math": "makes DAPO-Math-17k's file",
    "jppo.data.aime": "makes a test of AIME",
    "jppo.data.hh_rlhf": "makes pairs and prompts of HH-RLHF",
    "jppo.data.arithmetic": "makes the quickstart's task",
    "jppo.data.multiplication": "makes a task that needs its tool",
    "jppo.data.stories": "makes the story example's openings and demonstrations",
    "jppo.data.pairs": "preferences from samples that have scores",
    "jppo.rewards.check": "does the reward know right from wrong",
}


def listing() -> str:
    """Every command with a line about it."""
    width = max(map(len, COMMANDS))
    lines = [f"  python -m {name:{width}}  {about}" for name, about in COMMANDS.items()]
    return "\n".join([f"jppo {__version__}; each of these has --help:", "", *lines, ""])


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    argv = sys.argv[1:] if argv is None else argv
    if argv in ([], ["--help"], ["-h"]):
        print(listing(), end="")
    elif argv == ["--version"]:
        print(__version__)
    else:
        print(f"error: {argv[0]!r} is not understood; python -m jppo lists the commands", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
