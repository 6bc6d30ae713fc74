"""Lists jppo's commands and runs them: `jppo train ...` is `python -m jppo.train ...`."""

import runpy
import sys

from jppo import __version__
from jppo.registry import did_you_mean

COMMANDS = {
    "jppo.init": "writes a config for your data, model and machine",
    "jppo.train": "PPO, GRPO and their relatives",
    "jppo.sft": "supervised fine-tuning",
    "jppo.dpo": "trains a policy on preference pairs, without sampling",
    "jppo.reward_model": "trains a reward model from preference pairs",
    "jppo.critic_fit": "fits a critic on logged samples, for critic.path",
    "jppo.evaluate": "tests a model",
    "jppo.export": "exports a trained model as a Hugging Face directory",
    "jppo.chat": "chats with a model in the terminal",
    "jppo.sweep": "runs several trainings",
    "jppo.prove": "compares an algorithm with PPO and GRPO on small tasks",
    "jppo.plan": "finds the fastest settings for a described machine",
    "jppo.serve": "serves a trained model by vLLM, or weights of a training elsewhere",
    "jppo.tinker": "serves the Tinker API, for clients with a loop of their own",
    "jppo.report": "writes an HTML report of one run or several",
    "jppo.replay": "recomputes a recorded step and names the first number that differs",
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

SHORT = {"eval": "evaluate"}


def listing() -> str:
    """Returns every command with its description, as text."""
    names = {name.removeprefix("jppo."): about for name, about in COMMANDS.items()}
    width = max(map(len, names))
    lines = [f"  jppo {name:{width}}  {about}" for name, about in names.items()]
    heading = f"jppo {__version__}; each command has --help; `jppo NAME` is `python -m jppo.NAME`:"
    return "\n".join([heading, "", *lines, ""])


def command_of(word: str) -> str | None:
    """Returns the module of a command by its name or short form; None if there is none."""
    name = word.removeprefix("jppo.").replace("-", "_")
    module = f"jppo.{SHORT.get(name, name)}"
    return module if module in COMMANDS else None


def main(argv: list[str] | None = None) -> None:
    """Lists the commands, or runs the one that the arguments name."""
    argv = sys.argv[1:] if argv is None else argv
    words = 2 if command_of("_".join(argv[:2])) else 1  # `critic fit` is `critic_fit`
    if argv in ([], ["--help"], ["-h"]):
        print(listing(), end="")
    elif argv == ["--version"]:
        print(__version__)
    elif (module := command_of("_".join(argv[:words]))) is not None:
        sys.argv = [module, *argv[words:]]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        suggestion = did_you_mean(argv[0], [name.removeprefix("jppo.") for name in COMMANDS])
        print(f"error: {argv[0]!r} is no command; `jppo` lists them{suggestion}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
