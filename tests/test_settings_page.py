"""Every setting has a meaning, and docs/configuration.md and --help show the table."""

import re

from jppo import settings
from jppo.settings import table
from jppo.settings.table import TABLE
from tests.make import ROOT, script

DEFAULTS = (settings.dpo_default(), settings.reward_model_default(), settings.sft_default(), settings.default())
SETTINGS = {name: value for one in DEFAULTS for name, value in table.by_name(one).items()}


def test_every_setting_has_a_meaning_and_the_tables_defaults_are_the_configs():
    assert set(TABLE) == set(SETTINGS) and len(SETTINGS) > 200
    assert {name: setting.default for name, setting in TABLE.items()} == SETTINGS
    assert not [name for name, setting in TABLE.items() if len(setting.meaning) < 5]


def test_the_page_has_every_setting_with_its_default_and_choices():
    text = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    made = script("scripts/settings_page.py").page()
    assert made.rstrip("\n") == text.rstrip("\n"), "python scripts/settings_page.py > docs/configuration.md"
    lines = re.sub(r"\n  (?=\S)", " ", text).splitlines()
    shown = dict(re.findall(r"^- \*\*`([\w.]+)`\*\* (.*)$", "\n".join(lines), re.M))
    as_in_actor = " ".join(line for line in lines if line.startswith("- As in `actor`"))
    same = dict(re.findall(r"`([\w.]+)` (\(`[^`]*`\))", as_in_actor))
    assert {*shown, *same} == set(SETTINGS) and not {*shown} & {*same}
    for name, value in SETTINGS.items():
        assert f"`{value!r}`)" in {**shown, **same}[name], name
        if name in same:
            assert TABLE[name].choices == TABLE[f"actor.{name.partition('.')[2]}"].choices
        for choice in TABLE[name].choices:
            assert name in same or f"`{choice}`" in shown[name] or f"`{choice!r}`" in shown[name], name
    for name, said in {
        "algorithm.gamma": "(in [0, 1], `1.0`)", "rollout.top_p": "(in (0, 1], `1.0`)",
        "trainer.save_freq": "(≥1 or -1, ", "rollout.health_timeout_s": "(>0, seconds, `60.0`)",
        "data.row_lengths": "(in [1, 256] or -1, `-1`)", "model.remat": "`none`: all are kept",
        "rollout.max_staleness": "Needs `rollout.mode=async`",
    }.items():  # fmt: skip
        assert said in shown[name]


def test_help_says_what_every_setting_means():
    for defaults in DEFAULTS:
        lines = settings.help_text(defaults).splitlines()
        assert len(lines) == len(table.by_name(defaults))
        assert all(re.fullmatch(r"  --config\.[\w.]+=.*\S  +\S.{3,}", line) for line in lines)
