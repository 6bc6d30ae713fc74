"""Prints docs/configuration.md, all settings as Markdown: python scripts/settings_page.py > docs/configuration.md

All of it is the table of jppo/settings/table.py.
"""

import re
import textwrap
from collections.abc import Iterable

from jppo.settings.setting import Setting
from jppo.settings.table import DPO, PPO, REWARD_MODEL, SFT

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

Every setting of `jppo.train`, `jppo.sft`, `jppo.reward_model` and `jppo.dpo`: bounds, unit, default, which shows the
type, meaning, choices. [From verl](verl.md) has verl's names. A file in `configs/` sets some, the command line others:

```
python -m jppo.train --config=configs/gsm8k.py --config.actor.lr=5e-7 --config.rollout.n=4
python -m jppo.train --config=configs/gsm8k.py --config.mesh.fsdp=4 --dry_run
```

`python -m jppo.train --help` prints the same list. A default of None follows another setting.
`scripts/settings_page.py` prints this page.
"""
TAIL = """
## Fine-tuning

`python -m jppo.sft` has these settings of the sections above, with the same meanings and defaults, and one optimizer,
`optim`, in place of `actor` and `critic`:
"""
PAIRS = """
## Reward models

`python -m jppo.reward_model` has the settings of fine-tuning but
{without};
`data.val_files` and `trainer.test_freq` as `jppo.train` has them; and

"""
DPO_HEAD = """
## DPO

`python -m jppo.dpo` has the settings of fine-tuning but
{without};
`data.val_files` and `trainer.test_freq` as `jppo.train` has them; and

"""


def page() -> str:
    """The page."""
    parts = [HEAD]
    for section, (about, where) in SECTIONS.items():
        parts.append(f"\n## {section}\n\n{about[0].upper()}{about[1:]}; see {where}.\n\n")
        parts.append(items(setting for name, setting in PPO.items() if name.split(".")[0] == section))
    parts.append(TAIL)
    same = [name for name in PPO if name in SFT]
    for section in dict.fromkeys(name.split(".")[0] for name in same):
        names = [name for name in PPO if name.split(".")[0] == section]
        listed = f"all of `{section}`" if {*names} <= {*same} else ", ".join(f"`{n}`" for n in names if n in same)
        parts.append(f"\n{wrapped(listed, '- ')}")
    parts += ["\n\n### Further settings\n\n", items(setting for name, setting in SFT.items() if name not in PPO)]
    for head, table in ((PAIRS, REWARD_MODEL), (DPO_HEAD, DPO)):
        without = ", ".join(f"`{name}`" for name in SFT if name not in table)
        parts.append(head.format(without=textwrap.fill(without, WIDTH, break_long_words=False)))
        parts.append(items(setting for name, setting in table.items() if name not in {*SFT, *PPO}))
    return "".join(parts)


def items(settings: Iterable[Setting]) -> str:
    """Returns an item for each setting; those with the meaning of an `actor` setting share one."""
    own, same = [], []
    for setting in settings:
        twin = PPO.get(f"actor.{setting.name.partition('.')[2]}")
        is_same = twin is not None and twin is not setting and twin.meaning == setting.meaning and not setting.only
        (same if is_same else own).append(setting)
    listed = ", ".join(f"`{setting.name}` (`{setting.default!r}`)" for setting in same)
    rest = wrapped(f"As in `actor`, with these defaults: {listed}.", "- ") + "\n" if same else ""
    return "".join(map(item, own)) + rest


def item(setting: Setting) -> str:
    """One setting."""
    meaning, kind = explained(setting), setting.type.__name__ if setting.default is None else ""
    about = [meaning, setting.allowed() if setting.choices and meaning == setting.meaning else "", condition(setting)]
    text = ". ".join(part for part in about if part)
    facts = ", ".join(filter(None, (f"{kind} {bounds(setting)}".strip(), setting.unit, f"`{setting.default!r}`")))
    return wrapped(f"**`{setting.name}`** ({facts}) {text}.", "- ") + "\n"


def explained(setting: Setting) -> str:
    """Returns the meaning, with its choices marked where it explains every one of them, as in `none: all are kept`."""
    choices = [repr(choice) if choice == "" else str(choice) for choice in setting.choices]
    named = [rf"(?<![\w']){re.escape(choice)}(?=:)" for choice in choices]
    if not all(re.search(name, setting.meaning) for name in named):
        return setting.meaning
    return re.sub("|".join(named), r"`\g<0>`", setting.meaning) if named else setting.meaning


def bounds(setting: Setting) -> str:
    """Returns the bounds of a number, as in `≥1`; '' for none."""
    low, high = setting.interval
    if low is None:
        return ""
    least = f"{'>' if setting.bounds[0] == '(' else '≥'}{low}"
    allowed = least if high is None else f"in {setting.bounds[0]}{low}, {high}{setting.bounds[-1]}"
    return allowed if setting.off is None else f"{allowed} or {setting.off}"


def condition(setting: Setting) -> str:
    """Returns the condition under which the setting is read; '' for always."""
    switch, is_not, wanted = setting.only.partition("!=")
    if is_not:
        return f"Not with `{switch}={wanted}`"
    switch, equals, wanted = setting.only.partition("=")
    if equals:
        return f"Needs `{setting.only}`" if wanted else f"Needs an empty `{switch}`"
    return f"Needs `{switch}`" if switch else ""


def wrapped(text: str, mark: str) -> str:
    """Wraps a list item."""
    return textwrap.fill(
        text, WIDTH, initial_indent=mark, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


if __name__ == "__main__":
    print(page(), end="")
