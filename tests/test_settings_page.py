"""Every setting has a meaning, and docs/configuration.md and --help show the table."""

import pathlib
import re
import subprocess
import sys

from jppo import settings
from jppo.settings import table
from jppo.settings.table import TABLE

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/configuration.md"
DEFAULTS = (settings.dpo_default(), settings.reward_model_default(), settings.sft_default(), settings.default())
SETTINGS = {name: value for one in DEFAULTS for name, value in table.values(one).items()}


def items() -> dict[str, str]:
    """The page's items by the setting that each is about, unwrapped."""
    page = re.sub(r"\n  (?=\S)", " ", PAGE.read_text(encoding="utf-8"))
    return dict(re.findall(r"^- \*\*`([\w.]+)`\*\* (.*)$", page, re.M))


def test_every_setting_has_a_meaning_and_the_tables_defaults_are_the_configs():
    assert set(TABLE) == set(SETTINGS) and len(SETTINGS) > 200
    assert {name: setting.default for name, setting in TABLE.items()} == SETTINGS
    assert not [name for name, setting in TABLE.items() if len(setting.meaning) < 5]


def test_the_page_is_what_the_script_prints():
    done = subprocess.run(
        [sys.executable, "scripts/settings_page.py"], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert done.stdout == PAGE.read_text(encoding="utf-8"), "python scripts/settings_page.py > docs/configuration.md"


def test_the_page_has_every_setting_with_its_default_and_choices():
    shown = items()
    assert set(shown) == set(SETTINGS)
    for name, value in SETTINGS.items():
        assert f"`{value!r}`)" in shown[name], name
        for choice in TABLE[name].choices:
            assert f"`{choice}`" in shown[name] or f"`{choice!r}`" in shown[name], name
    assert "At least 0.0 and at most 1" in shown["algorithm.gamma"] and "Above 0" in shown["rollout.top_p"]
    assert (
        "At least 1, or -1" in shown["trainer.save_freq"]
        and "(float, seconds, `60.0`)" in shown["rollout.health_timeout_s"]
    )
    assert "Only with `rollout.mode=async`" in shown["rollout.max_staleness"]
    assert "actor_rollout_ref.actor.optim.lr" in shown["actor.lr"]


def test_help_says_what_every_setting_means():
    for defaults in DEFAULTS:
        lines = settings.describe(defaults).splitlines()
        assert len(lines) == len(table.values(defaults))
        assert all(re.fullmatch(r"  --config\.[\w.]+=.*\S  +\S.{3,}", line) for line in lines)
