"""Lists jppo's commands: python -m jppo"""

import sys

from jppo import __version__

COMMANDS = {
    "jppo.train": "PPO",
    "jppo.sft": "supervised fine-tuning",
    "jppo.dpo": "trains a policy on preference pairs, without sampling",
    "jppo.reward_model": "trains a reward model from preference pairs",
    "jppo.evaluate": "tests a model",
    "jppo.export": "exports a trained model as a Hugging Face directory",
    "jppo.chat": "chats with a model in the terminal",
    "jppo.sweep": "runs several trainings",
    "jppo.plan": "finds the fastest settings for a described machine",
    "jppo.serve": "runs a vLLM server for a training elsewhere",
    "jppo.report": "writes an HTML report of one run or several",
    "jppo.doctor": "checks the machine or a run before training",
    "jppo.from_verl": "translates a verl script to a jppo command",
    "jppo.data.check": "checks data before training",
    "jppo.data.gsm8k": "makes GSM8K's files",
    "jppo.data.math": "makes MATH's files",
    "jppo.data.dapo_math": "makes DAPO-Math-17k's file",
    "jppo.data.aime": "makes a test of AIME",
    "jppo.data.hh_rlhf": "makes pairs and prompts of HH-RLHF",
    "jppo.data.pairs": "makes preference pairs of scored samples",
    "jppo.rewards.check": "tests a reward on the data's own solutions",
}


def listing() -> str:
    """Returns every command with its description."""
    width = max(map(len, COMMANDS))
    lines = [f"  python -m {name:{width}}  {about}" for name, about in COMMANDS.items()]
    return "\n".join([f"jppo {__version__}; each of these has --help:", "", *lines, ""])


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
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
