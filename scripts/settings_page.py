"""Prints docs/configuration.md, all settings as Markdown: python scripts/settings_page.py > docs/configuration.md

Names, types and defaults are those of jppo/config/defaults.py, meanings its comments; what a value may be is in
jppo/config/checks.py, verl's names in jppo/verl/names.py.
"""

import textwrap
from typing import Any

import ml_collections

from jppo import config
from jppo.config import checks, commandline
from jppo.config.meanings import meanings
from jppo.verl.names import TABLE

WIDTH = 120
SECTIONS = {
    "model": ("the policy, and what all models compute in", "[architecture](architecture.md#models)"),
    "data": ("prompts, their lengths, rows", "[data](data.md)"),
    "algorithm": ("advantages, the KL in the reward, old log-probs", "[algorithms](algorithms.md)"),
    "actor": ("the policy's loss and optimizer", "[algorithms](algorithms.md), [memory](scaling.md#memory)"),
    "critic": ("the critic, which `gae` alone has", "[algorithms](algorithms.md)"),
    "ref": ("the frozen reference of a KL", "[algorithms](algorithms.md)"),
    "rollout": ("sampling, servers, publishing", "[rollout](rollout.md), [agents](agents.md), [tests](evaluation.md)"),
    "reward": ("what a response is worth", "[rewards](rewards.md)"),
    "trainer": ("the run: its folder, length, tests, checkpoints, hosts", "[checkpoints](checkpoints.md)"),
    "mesh": ("how devices share the work", "[scaling](scaling.md#meshes)"),
}
HEAD = """\
# Configuration

Every setting of `jppo.train`, `jppo.sft` and `jppo.reward_model`: type, default, meaning, what it may be, and verl's
name where it has one. A file in `configs/` sets some of them, the command line the rest:

```
python -m jppo.train --config=configs/gsm8k.py --config.actor.lr=5e-7 --config.rollout.n=4
python -m jppo.train --config=configs/gsm8k.py --config.mesh.fsdp=4 --dry_run
```

`python -m jppo.train --help` prints the same list. An unknown name, a value of another type or one that is out of
bounds is an error of one line before anything starts. A default of None follows another setting. This page is printed
by `scripts/settings_page.py`, from the code.
"""
TAIL = """
## Of fine-tuning

`python -m jppo.sft` has these settings of the sections above, with the same meanings and defaults, and one optimizer,
`optim`, in place of `actor` and `critic`:
"""
PAIRS = """
## Of reward models

`python -m jppo.reward_model` has the settings of fine-tuning but {without};
`data.val_files` and `trainer.test_freq` as `jppo.train` has them; and

"""


def page() -> str:
    """The page."""
    ppo, sft = commandline.settings(config.default()), commandline.settings(config.sft_default())
    verls = names_of_verl()
    parts = [HEAD]
    for section, (about, where) in SECTIONS.items():
        parts.append(f"\n## {section}\n\n{about[0].upper()}{about[1:]}; see {where}.\n\n")
        parts += [item(name, ppo[name], verls) for name in meanings() if name in ppo and name.split(".")[0] == section]
    parts.append(TAIL)
    same = [name for name in meanings() if name in sft and name in ppo]
    for section in dict.fromkeys(name.split(".")[0] for name in same):
        said = ", ".join(f"`{name}`" for name in same if name.split(".")[0] == section)
        parts.append(f"\n{wrapped(said, '- ')}")
    parts += [
        "\n\n### its own\n\n",
        *(item(name, sft[name], {}) for name in meanings() if name in sft and name not in ppo),
    ]
    pairs = commandline.settings(config.reward_model_default())
    without = " and ".join(f"`{name}`" for name in sft if name not in pairs)
    parts.append(PAIRS.format(without=without))
    parts += [item(name, pairs[name], {}) for name in meanings() if name in pairs and name not in {*sft, *ppo}]
    return "".join(parts)


def item(name: str, value: Any, verls: dict[str, str]) -> str:
    """One setting."""
    about = [meanings()[name], bounds(name)]
    if name in verls:
        about.append("verl: the same" if verls[name] == name else f"verl: `{verls[name]}`")
    said = ". ".join(part for part in about if part)
    return wrapped(f"**`{name}`** ({of_type(name)}, `{value!r}`) {said}.", "- ") + "\n"


def of_type(name: str) -> str:
    """The type that a value must have."""
    every = (config.default(), config.sft_default(), config.reward_model_default())
    node = next(one for one in every if name in commandline.settings(one))
    *sections, leaf = name.split(".")
    for section in sections:
        node = node[section]
    assert isinstance(node, ml_collections.ConfigDict)
    return node.get_type(leaf).__name__


def bounds(name: str) -> str:
    """What a value may be."""
    if (choices := checks.CHOICES.get(name)) is not None:
        return f"One of {', '.join(f'`{choice!r}`' if choice in ('', None) else f'`{choice}`' for choice in choices)}"
    most = " and at most 1" if name in checks.AT_MOST_ONE else ""
    if name in checks.AT_LEAST:
        return f"At least {checks.AT_LEAST[name]}{most}"
    if name in checks.ABOVE_ZERO:
        return f"Above 0{most}"
    return "1 or more, or -1" if name in checks.OFF_OR_POSITIVE else most.removeprefix(" and ").capitalize()


def names_of_verl() -> dict[str, str]:
    """The first of verl's names for each setting."""
    found: dict[str, str] = {}
    for row in TABLE:
        if row.kind == "same" and "*" not in row.key:
            found.setdefault(row.setting, row.key)
    return found


def wrapped(text: str, mark: str) -> str:
    """A list's item in lines that can be read."""
    return textwrap.fill(
        text, WIDTH, initial_indent=mark, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


if __name__ == "__main__":
    print(page(), end="")
