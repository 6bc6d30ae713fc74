"""Every setting is described where it has its default, and docs/configuration.md says what the code says."""

import pathlib
import re
import subprocess
import sys

from jppo import config
from jppo.config import checks, commandline
from jppo.config.meanings import meanings

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/configuration.md"
DEFAULTS = (config.reward_model_default(), config.sft_default(), config.default())
SETTINGS = {name: value for one in DEFAULTS for name, value in commandline.settings(one).items()}


def items() -> dict[str, str]:
    """The page's items by the setting that each is about, unwrapped."""
    page = re.sub(r"\n  (?=\S)", " ", PAGE.read_text(encoding="utf-8"))
    return dict(re.findall(r"^- \*\*`([\w.]+)`\*\* (.*)$", page, re.M))


def test_every_setting_is_described():
    assert set(meanings()) == set(SETTINGS) and len(SETTINGS) > 200
    assert not [name for name, meaning in meanings().items() if len(meaning) < 5]


def test_a_description_is_that_of_its_own_setting():
    said = meanings()
    assert said["model.path"].startswith("an HF directory") and said["critic.path"].startswith("the model that the")
    assert said["rollout.n"] == "responses to a prompt" and said["rollout.val_kwargs.n"].startswith("of a test")
    assert said["actor.betas"] == said["critic.betas"] == said["optim.betas"]  # written once, for all three
    assert said["reward.model.max_length"].startswith("tokens that it reads")


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
        for choice in checks.CHOICES.get(name, ()):
            assert f"`{choice}`" in shown[name] or f"`{choice!r}`" in shown[name], name
    assert "At least 0.0 and at most 1" in shown["algorithm.gamma"] and "Above 0" in shown["rollout.top_p"]
    assert "actor_rollout_ref.actor.optim.lr" in shown["actor.lr"]


def test_help_says_what_every_setting_means():
    for defaults in DEFAULTS:
        lines = config.describe(defaults).splitlines()
        assert len(lines) == len(commandline.settings(defaults))
        assert all(re.fullmatch(r"  --config\.[\w.]+=.*\S  +\S.{3,}", line) for line in lines)
