"""README.md and docs/ match the code: links, paths, commands, settings, choices, metrics, the tree."""

import asyncio
import importlib.util
import pathlib
import re
import sys

import numpy as np
import pytest

from jppo import evaluate, settings, statistics
from jppo.agent import tools
from jppo.data.sources import read_sources
from jppo.rewards import graders, pool_tasks
from jppo.rewards.judge import client, prompts
from jppo.rewards.judge.part import JudgePart
from jppo.runlog import diagnosis, healthy_ranges, logger
from jppo.runlog.timers import STAGES
from jppo.settings import table, texts
from jppo.settings.table import TABLE
from jppo.types import Prompt

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCS = (
    "README.md",
    "docs/architecture.md",
    "docs/algorithms.md",
    "docs/distillation.md",
    "docs/learning.md",
    "docs/data.md",
    "docs/rollout.md",
    "docs/rewards.md",
    "docs/agents.md",
    "docs/evaluation.md",
    "docs/serving.md",
    "docs/security.md",
    "docs/monitoring.md",
    "docs/rollout.md",
    "docs/scaling.md",
    "docs/verl.md",
    "docs/quickstart.md",
    "docs/configuration.md",
    "docs/troubleshooting.md",
    "docs/checkpoints.md",
    "docs/metrics.md",
    "docs/extending.md",
    "docs/examples/tinystories.md",
    "benchmarks/README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
)
ABOUT_VERL = ("docs/verl.md", "docs/configuration.md")  # they name verl's settings
SOURCES = sorted((ROOT / "jppo").rglob("*.py"))


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def quoted(name: str) -> list[str]:
    """What stands between backticks, and the lines of code blocks without their comments."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text(name), re.S | re.M)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    return lines + re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text(name), flags=re.S))


@pytest.mark.parametrize("name", DOCS)
def test_links_lead_somewhere(name):
    for target in re.findall(r"\]\(([^)]+)\)", re.sub(r"^```.*?^```", "", text(name), flags=re.S | re.M)):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        assert file.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.M)
            assert anchor in [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles], target


@pytest.mark.parametrize("name", DOCS)
def test_paths_exist(name):
    words = {word for said in quoted(name) for word in re.findall(r"[\w./-]+", said)}
    paths = {word for word in words if re.match(r"(jppo|configs|scripts|tests|docs|benchmarks)/", word)}
    assert paths or name not in DOCS[:2]
    made = re.findall(r"`([\w/]+\.py)`[^`]*```python\n", text(name))  # by who follows the page
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not set(missing) - set(made)


@pytest.mark.parametrize("name", DOCS)
def test_commands_exist(name):
    said = "\n".join(quoted(name))
    targets = set(re.findall(r"^([a-z][\w-]*):", text("Makefile"), re.M))
    assert set(re.findall(r"\bmake ([a-z][\w-]*)", said)) <= targets
    for module in re.findall(r"python -m (jppo[\w.]*)", said):
        place = ROOT / module.replace(".", "/")
        assert place.with_suffix(".py").is_file() or (place / "__main__.py").is_file(), module


@pytest.mark.parametrize("name", [name for name in DOCS if name not in ABOUT_VERL])
def test_settings_exist(name):
    known = {
        n
        for c in (settings.default(), settings.sft_default(), settings.reward_model_default())
        for n in table.values(c)
    }
    known |= {setting.rsplit(".", 1)[0] for setting in known if setting.count(".") > 1}  # a section within one
    sections = {setting.split(".")[0] for setting in known}
    words = "\n".join(quoted(name))
    for section, leaf in re.findall(r"(?<![\w/.])(?:--config\.)?(\w+)\.(\w+)", words):
        if section in sections and leaf not in ("py", "jsonl", "parquet", "log", "md"):
            assert f"{section}.{leaf}" in known


# Settings that choose mathematics.
ALGORITHMIC = (
    "algorithm.adv_estimator",
    "algorithm.kl_penalty",
    "algorithm.kl_ctrl_type",
    "algorithm.old_logprob",
    "algorithm.rollout_is",
    "actor.loss_mode",
    "actor.loss_agg_mode",
    "actor.kl_loss_type",
    "actor.lr_scheduler_type",
    "critic.loss_agg_mode",
)


@pytest.mark.parametrize(
    "choices", [*(TABLE[name].choices for name in ALGORITHMIC), texts.REJECTION_RULES], ids=[*ALGORITHMIC, "rules"]
)
def test_algorithms_name_every_choice(choices):
    assert set(choices) <= set(quoted("docs/algorithms.md"))


def test_functions_of_the_algorithms_exist():
    found = re.findall(
        r"`(advantage|correct|correction|estimate|heads|kl|losses|masked|ppo|score|update)\.(\w+)`",
        text("docs/algorithms.md"),
    )
    assert found
    for module, function in found:
        file = next(path for path in SOURCES if path.stem == module)
        assert re.search(rf"^def {function}\(", file.read_text(encoding="utf-8"), re.M), f"{module}.{function}"


def test_the_tree_is_current():
    """If it fails: python scripts/tree.py."""
    spec = importlib.util.spec_from_file_location("tree", ROOT / "scripts/tree.py")
    tree = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tree)
    assert tree.page() == text("docs/architecture.md") and "  train.py " in tree.page()


def test_the_stages_of_a_step_are_the_timers():
    step = re.search(r"## A step\n(.*?)\n## ", text("docs/architecture.md"), re.S)[1]
    assert re.findall(r"^\| `(\w+)` \|", step, re.M) == [stage for stage in STAGES if stage != "step"]


# Names that are made at run time: as the code has them, and as they are explained.
DYNAMIC = {
    "val/{statistic}_se": "val/<statistic>_se",
    "val/{source}/{statistic}": "val/<data_source>/<statistic>",
    "val/{source}/{statistic}_se": "val/<data_source>/<statistic>_se",
    "reward/{name}/mean": "reward/<part>/mean",
    "train/{source}/score": "train/<data_source>/score",
    "timing_s/{stage}": "timing_s/<stage>",
}


def metrics_of_a_test() -> set[str]:
    """What a test counts over several responses to a prompt."""
    found = statistics.summarise([statistics.Samples([1.0, 0.0], ["a", "b"])], 2)
    return {"val/" + re.sub(r"@\d+", "@<k>", name) for name in found}


class NoClient:
    """A judge client that is never called."""

    async def close(self) -> None:
        pass


def judge_metrics() -> set[str]:
    """What a judge counts."""
    rubric = prompts.make_rubric("math", system_prompt="", scoring_prompt="", max_score=10.0)
    part = JudgePart(NoClient(), rubric, concurrency=1, retries=0)
    try:
        return set(part.metrics())
    finally:
        part.close()


def test_every_metric_is_explained_and_every_explained_one_is_written():
    table = re.search(r"## The table\n(.*?)\n## ", text("docs/metrics.md"), re.S)[1]
    explained = {name for row in re.findall(r"^\|(.*?)\|", table, re.M) for name in re.findall(r"`(.+?)`", row)}
    code = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
    kinds = r"agent|actor|critic|train|training|val|reward|judge|rollout|rollout_corr|trainer|perf|sft|rm|dpo"
    kinds += r"|response_length|prompt_length|ref"
    name = rf"(?:{kinds})/[\w/]+"
    written = set(re.findall(rf'"({name})"(?::|\] = )', code))
    source = text("jppo/runlog/rollout_metrics.py")
    described, rest = re.search(
        r"\ndef sample_metrics\(.*?\n    return \{\n(.*?)\n    \}(.*?)\n\n", source, re.S
    ).groups()
    assert rest == " | part_means(rewards)"  # whose names are dynamic
    distributions = set(re.findall(r'distribution\("(critic/.+?)"', code))
    written |= {f"{one}/{s}" for one in distributions for s in ("mean", "max", "min", "std")}
    written |= set(re.findall(r'^ +"(.+?)": ', described, re.M))  # plain names, too
    made = re.search(r"return params, opt, \{(.*)\}", text("jppo/learner/update.py"))[1]  # under the model's name
    written |= {
        f"{model}/{key}" for model in ("actor", "critic", "sft", "rm", "dpo") for key in re.findall(r'"(\w+)": ', made)
    }
    of_pairs = re.findall(r'^        "(\w+)": ', text("jppo/learner/preference.py"), re.M)
    of_pairs += [f"val_{name}" for name in re.findall(r'"(\w+)": 0\.0', text("jppo/run/pairs.py"))]
    written |= {f"{model}/{name}" for model in ("rm", "dpo") for name in of_pairs}
    written |= metrics_of_a_test()
    assert {"reward_mean", "trainer/bad_steps", "rollout_corr/kl", "sft/skipped", "reward/rm_cut"} <= written
    assert set(re.findall(rf'f"((?:{kinds}|timing_s)/[^" ]*\{{[^" ]*)"', code)) == {
        *DYNAMIC, "judge/{name}", "val/{statistic}",
    }  # fmt: skip
    assert explained == written | judge_metrics() | set(DYNAMIC.values())
    assert set(re.findall(rf'"({name})"', code)) - distributions <= written  # what is read, as by the console


@pytest.mark.parametrize(
    "names",
    [
        set(graders.GRADERS),
        set(client.PROVIDERS),
        {key for provider in client.PROVIDERS.values() for key in provider.keys},
        {provider.base_url.rstrip("/") for provider in client.PROVIDERS.values()},
        set(prompts.PRESETS),
        set(TABLE["reward.judge.api_type"].choices) - {""},
        set(TABLE["reward.judge.preset"].choices) - {""},
        set(TABLE["reward.model.engine"].choices),
        set(re.findall(r'"(\w+_score)"', text("jppo/rewards/make.py"))) | {"rule_score"},
    ],
    ids=["rules", "providers", "keys", "addresses", "prompts", "judges", "presets", "engines", "parts"],
)
def test_rewards_name_every_choice(names):
    assert len(names) > 2
    assert names <= {said.rstrip("/") for said in quoted("docs/rewards.md")}


def test_every_setting_of_rewards_and_data_is_explained():
    def named(*pages: str) -> set[str]:
        return {word for page in pages for said in quoted(page) for word in re.findall(r"[\w.]+\w", said)}

    every = (settings.default(), settings.sft_default(), settings.reward_model_default())
    known = {name for c in every for name in table.values(c)}
    of_rewards = {name for name in known if name.startswith(("reward.", "loss."))}
    of_data = {name for name in known if name.startswith("data.")}
    assert len(of_rewards) > 30 and len(of_data) > 15
    assert not of_rewards - named("docs/rewards.md")
    assert not of_data - named("docs/data.md", "docs/architecture.md")


def test_every_setting_and_short_name_of_a_test_is_explained():
    said = {word for part in quoted("docs/evaluation.md") for word in re.findall(r"[\w.]+\w|n\b", part)}
    known = table.values(settings.default())
    of_tests = {name for name in known if "val_" in name or name == "trainer.test_freq"} - {"data.val_files"}
    assert len(of_tests) > 8 and not of_tests - said
    assert not {setting for setting, _ in evaluate.SHORT.values()} - said
    assert {f"--{name}" for name in (*evaluate.SHORT, "out")} <= set(quoted("docs/evaluation.md"))


def test_every_warning_and_every_range_is_explained():
    page = text("docs/monitoring.md")
    table = page[page.index("## Warnings") :]
    rows = re.findall(r"^\| `(\w+)` \| .+ \|\n\| \| (.+) \|$", table, re.M)
    assert {name: remedy.replace("`", "") for name, remedy in rows} == {n: r for n, (_, r) in diagnosis.RULES.items()}
    for name, r in healthy_ranges.RANGES.items():
        assert f"| `{name}` | {r.low:g} to {r.high:g} |" in text("docs/metrics.md")


def test_monitoring_names_every_logger():
    assert set(texts.LOGGERS) <= set(quoted("docs/monitoring.md"))
    assert set(texts.LOGGERS) == {"console", "jsonl", "tensorboard", *logger.REMOTE}


def test_every_setting_and_tool_of_agents_is_explained():
    said = {word for part in quoted("docs/agents.md") for word in re.findall(r"[\w.]+\w", part)}
    kinds = (".multi_turn.", "rollout.agent")
    of_agents = {name for name in table.values(settings.default()) if any(kind in name for kind in kinds)}
    assert len(of_agents) > 10 and not of_agents - said
    assert set(tools.TOOLS) | set(TABLE["rollout.multi_turn.format"].choices) <= said


def test_the_classes_of_agents_that_are_shown_work():
    shown = {}
    for source in re.findall(r"```\n(class .*?)```", text("docs/agents.md"), re.S):
        exec(source, shown)
    prompt = Prompt("p", "s", "q", np.array([1]), "2", {})
    context, weather = tools.Context(prompt, {"temperature": 20}, {}), shown["Weather"](unit="celsius")
    assert asyncio.run(weather({"place": "Rome"}, context)) == "Rome: 20 celsius, question 1"
    said = [{"role": "assistant", "content": "please"}]
    assert asyncio.run(shown["Polite"]().respond(said, context)) == ("thank you", True, 1.0)
    world = shown["Countdown"]()
    assert world.reset(prompt) == "2 left" and world.step("go") == ("1 left", 1.0, False)
    assert world.step("no") == ("0 left", 0.0, True)


def test_every_setting_of_memory_is_explained():
    said = {word for part in quoted("docs/scaling.md") for word in re.findall(r"[\w.]+\w", part)}
    leaves = ("_offload", ".master_dtype", ".moments_dtype")
    known = {**table.values(settings.default()), **table.values(settings.sft_default())}
    of_memory = {name for name in known if name.endswith(leaves)}
    assert len(of_memory) > 8 and not of_memory - said


def test_data_name_every_way_to_cut():
    assert set(TABLE["data.truncation"].choices) <= set(quoted("docs/data.md"))


def test_the_functions_that_are_shown_score(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", list(sys.path))  # which grows by the folder of the file
    shown = re.findall(r"```\n(def compute_score.*?)```", text("docs/rewards.md"), re.S)
    sample = {"data_source": "mine", "text": " four ", "truth": "four", "extra": {}, "turns": 1}
    found = [pool_tasks.prepare(("function", str(tmp_path / "mine.py"), "compute_score", source)) for source in shown]
    assert [function.batch for function in found] == [False, True, False]
    for function in found:
        right, wrong = function.call([sample, {**sample, "truth": "five"}])
        assert (right["score"], wrong["score"], right["error"]) == (1.0, 0.0, None)
    (steps,) = found[-1].call([{**sample, "text": "2+2=4\n\n\n\nfour"}])
    assert steps["score"] == 1.1 and steps["earned"] == ("characters", ((5, 0.1), (13, 0.0)))


def test_the_class_that_is_shown_gives_rows(tmp_path):
    file = tmp_path / "sums.py"
    file.write_text(re.search(r"```\n(class Sums.*?)```", text("docs/data.md"), re.S)[1], encoding="utf-8")
    (source,) = read_sources("3", "data.train_files", custom_cls=f"{file}:Sums", tokenizer=None)
    columns = [row.columns for row in source.rows]
    assert columns[2] == {"prompt": "2+2=", "ground_truth": "4", "data_source": "exact"} and len(columns) == 3


@pytest.mark.parametrize("name", DOCS)
def test_lines_can_be_read(name):
    assert all(len(line) <= 160 for line in text(name).splitlines())
