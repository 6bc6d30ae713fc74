"""README.md and docs/ match the code: links, paths, commands, settings, choices, metrics, the tree."""

import asyncio
import re
import sys

import numpy as np
import pytest

from jppo import evaluate, registry, settings, statistics
from jppo.__main__ import command_of
from jppo.data.rows import read_sources
from jppo.learner import sharding
from jppo.models import families
from jppo.plugins.agents import tools
from jppo.plugins.forecast import machines
from jppo.plugins.judge import client as judge_client
from jppo.plugins.judge import judge as prompts
from jppo.plugins.judge.judge import JudgePart
from jppo.rewards import graders, pool_worker
from jppo.runlog import diagnosis
from jppo.runlog.timers import STAGES
from jppo.settings import table, texts
from jppo.settings.table import TABLE
from jppo.types import Prompt
from tests.make import ROOT, script

PAGES = [*ROOT.glob("*.md"), ROOT / "benchmarks/README.md", *ROOT.glob("docs/**/*.md")]
DOCS = sorted(str(path.relative_to(ROOT)) for path in PAGES if path.name != "CHANGELOG.md")
ABOUT_VERL = ("docs/verl.md",)  # names verl's settings
SOURCES = sorted((ROOT / "jppo").rglob("*.py"))
CODE = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
EVERY = [settings.default(), settings.sft_default(), settings.reward_model_default()]
KNOWN = {name for config in EVERY for name in table.by_name(config)}


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def quoted(name: str) -> list[str]:
    """What stands between backticks, and the lines of code blocks without their comments."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text(name), re.S | re.M)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    return lines + re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text(name), flags=re.S))


def words(*names: str) -> set[str]:
    """All names with dots in them, and single ones, of what is quoted."""
    return {word for name in names for part in quoted(name) for word in re.findall(r"[\w.]+\w|n\b", part)}


@pytest.mark.parametrize("name", DOCS)
def test_links_lead_somewhere_and_lines_can_be_read(name):
    assert all(len(line) <= 160 for line in text(name).splitlines())
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
def test_paths_commands_and_settings_exist(name):
    said = quoted(name)
    paths = {word for part in said for word in re.findall(r"[\w./-]+", part)}
    paths = {word for word in paths if re.match(r"(jppo|configs|scripts|tests|docs|benchmarks)/", word)}
    made = re.findall(r"`([\w/]+\.py)`[^`]*```python\n", text(name))  # by who follows the page
    assert not {path for path in paths if not (ROOT / path).exists()} - set(made)
    targets = set(re.findall(r"^([a-z][\w-]*):", text("Makefile"), re.M))
    assert set(re.findall(r"\bmake ([a-z][\w-]*)", "\n".join(said))) <= targets
    for module in re.findall(r"python -m (jppo[\w.]*)", "\n".join(said)):
        place = ROOT / module.replace(".", "/")
        assert place.with_suffix(".py").is_file() or (place / "__main__.py").is_file(), module
    known = (
        KNOWN | {"algorithm.options"} | {setting.rsplit(".", 1)[0] for setting in KNOWN if setting.count(".") > 1}
    )  # a section within one
    sections = {setting.split(".")[0] for setting in known}
    for section, leaf in re.findall(r"(?<![\w/.])(?:--config\.)?(\w+)\.(\w+)", "\n".join(said)):
        if section in sections and leaf not in ("py", "jsonl", "parquet", "log", "md") and name not in ABOUT_VERL:
            assert f"{section}.{leaf}" in known


def choices(*names):
    return set().union(*(TABLE[name].choices for name in names)) - {""}


# Pages name every choice of what they are about.
NAMED = [
    ("algorithms", choices("algorithm.adv_estimator", "algorithm.kl_penalty", "algorithm.kl_ctrl_type")),
    ("algorithms", choices("algorithm.old_logprob", "algorithm.rollout_is", "actor.loss_mode", "actor.loss_agg_mode")),
    ("algorithms", choices("actor.kl_loss_type", "actor.lr_scheduler_type", "critic.loss_agg_mode")),
    ("algorithms", set(texts.REJECTION_RULES)),
    ("rewards", {*graders.GRADERS, "rule_score"}),
    ("judge", {key for provider in judge_client.PROVIDERS.values() for key in provider.keys}),
    ("judge", {provider.base_url.rstrip("/") for provider in judge_client.PROVIDERS.values()}),
    ("judge", choices("reward.judge.api_type", "reward.judge.preset")),
    ("reward-models", choices("reward.model.engine")),
    ("rewards", set(re.findall(r'"(\w+_score)"', text("jppo/rewards/make.py")))),
    ("monitoring", {*texts.LOCAL_LOGGERS, *registry.REMOTE_LOGGERS}),
    ("data", choices("data.truncation")),
    ("evaluation", {f"--{name}" for name in (*evaluate.SHORT, "out")}),
    ("agents", {*tools.TOOLS, *TABLE["rollout.multi_turn.format"].choices}),
]  # fmt: skip


def test_families_and_commands_are_counted_and_named_rightly():
    assert set(re.findall(r"(\d+) (?:decoder )?families", text("README.md"))) == {str(len(families.FAMILIES))}
    pages = [*DOCS, *(f"colab/{path.name}" for path in ROOT.glob("colab/*.ipynb"))]
    assert not [name for name in pages if "huggingface-cli" in text(name)]
    used = {
        command for name in DOCS for line in quoted(name) for command in re.findall(r"(?:^|&& )jppo ([\w.]+)", line)
    }
    assert used and not {command for command in used if command_of(command) is None}


@pytest.mark.parametrize("page, names", NAMED, ids=[page for page, _ in NAMED])
def test_every_choice_is_named(page, names):
    assert len(names) > 1
    said = {said.rstrip("/") for said in quoted(f"docs/{page}.md")}
    assert names <= (words(f"docs/{page}.md") if page == "agents" else said)


@pytest.mark.parametrize(
    "pages, about, count",
    [
        (["rewards", "judge", "reward-models"], r"(reward|loss)\..*", 30),
        (["data", "architecture"], r"data\..*", 15),
        (["evaluation"], r"(?!data\.val_files).*val_.*|trainer\.test_freq", 8),
        (["agents"], r".*(\.multi_turn\.|rollout\.agent).*", 10),
        (["scaling"], r".*(_offload|\.master_dtype|\.moments_dtype)", 8),
    ],
)
def test_every_setting_is_explained(pages, about, count):
    known = KNOWN if pages != ["evaluation"] else set(table.by_name(settings.default()))
    found = {name for name in known if re.fullmatch(about, name)}
    if pages == ["evaluation"]:
        found |= {setting for setting, _ in evaluate.SHORT.values()}
    assert len(found) > count and not found - words(*(f"docs/{page}.md" for page in pages))


def test_functions_of_the_algorithms_exist():
    modules = "advantage|correction|estimate|heads|kl|losses|masked|ppo|score|update"
    found = re.findall(rf"`({modules})\.(\w+)`", text("docs/algorithms.md"))
    assert found
    for module, function in found:
        file = next(path for path in SOURCES if path.stem == module)
        assert re.search(rf"^def {function}\(", file.read_text(encoding="utf-8"), re.M), f"{module}.{function}"


def test_the_tree_and_the_stages_of_a_step_are_current():
    """If it fails: python scripts/source_tree.py."""
    page = script("scripts/source_tree.py").page()
    assert page == text("docs/architecture.md") and " user_files\n" in page
    step = re.search(r"## A step\n(.*?)\n## ", page, re.S)[1]
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
    kinds = r"agent|actor|critic|train|training|val|reward|judge|rollout|rollout_corr|trainer|perf|sft|rm|dpo"
    kinds += r"|response_length|prompt_length|ref|given"
    name = rf"(?:{kinds})/[\w/]+"
    written = set(re.findall(rf'"({name})"(?::|\] = )', CODE)) | set(re.findall(rf'\bTerm\([^"]*"({name})"', CODE))
    source = text("jppo/run/sample_log.py")
    described, rest = re.search(
        r"\ndef sample_metrics\(.*?\n    return \{\n(.*?)\n    \}(.*?)\n\n", source, re.S
    ).groups()
    assert rest == " | _part_means(rewards)"  # whose names are dynamic
    distributions = set(re.findall(r'distribution\("(critic/.+?)"', CODE))
    written |= {f"{one}/{s}" for one in distributions for s in ("mean", "max", "min", "std")}
    written |= set(re.findall(r'^ +"(.+?)": ', described, re.M))  # plain names, too
    made = re.findall(r'"(\w+)": ', re.search(r"\n        stats = \{(.*)\}", text("jppo/learner/update.py"))[1])
    made += re.findall(r'"(\w+)": ', re.search(r"stats = \{(.*)\}", text("jppo/learner/loss_scale.py"))[1])
    written |= {f"{model}/{key}" for model in ("actor", "critic", "sft", "rm", "dpo") for key in made}
    of_pairs = re.findall(r'^        "(\w+)": ', text("jppo/learner/preference.py"), re.M)
    of_pairs += [f"val_{name}" for name in re.findall(r'"(\w+)": 0\.0', text("jppo/run/pairs.py"))]
    written |= {f"{model}/{name}" for model in ("rm", "dpo") for name in of_pairs}
    tested = statistics.summarise([statistics.Samples([1.0, 0.0], ["a", "b"])], 2)
    written |= {"val/" + re.sub(r"@\d+", "@<k>", name) for name in tested}
    assert {"reward_mean", "trainer/bad_steps", "rollout_corr/kl", "sft/skipped", "reward/rm_cut"} <= written
    found = set(re.findall(rf'f"((?:{kinds}|timing_s)/[^" ]*\{{[^" ]*)"', CODE))
    assert found == {*DYNAMIC, "judge/{name}", "val/{statistic}"}
    assert explained == written | judge_metrics() | set(DYNAMIC.values())
    assert set(re.findall(rf'"({name})"', CODE)) - distributions <= written  # what is read, as by the console


def test_every_warning_and_every_range_is_explained():
    page = text("docs/monitoring.md")
    rows = re.findall(r"^\| `(\w+)` \| .+ \|\n\| \| (.+) \|$", page[page.index("## Warnings") :], re.M)
    assert {name: remedy.replace("`", "") for name, remedy in rows} == {n: r for n, (_, r) in diagnosis.RULES.items()}
    for name, r in diagnosis.RANGES.items():
        assert f"| `{name}` | {r.low:g} to {r.high:g} |" in text("docs/metrics.md")


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


def test_the_functions_that_are_shown_score(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", list(sys.path))  # which grows by the folder of the file
    shown = re.findall(r"```\n(def compute_score.*?)```", text("docs/rewards.md"), re.S)
    sample = {"data_source": "mine", "text": " four ", "truth": "four", "extra": {}, "turns": 1}
    sample |= {"prompt": "2+2", "columns": {}}
    found = [
        pool_worker.prepare_target(("function", str(tmp_path / "mine.py"), "compute_score", source)) for source in shown
    ]
    assert [function.batch for function in found] == [False, False, True, True, False]
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


@pytest.mark.parametrize("machine", ["v5e-8", "v6e-8"])
def test_each_tpu_has_a_command_whose_mesh_is_its_chips(machine):
    """Their forecasts, made with --dry_run --machine, are in docs/machines.md."""
    block = text("docs/quickstart.md").split("v5e-8, then v6e-8:\n")[1].split("\n\n")[0].replace("\\\n", " ")
    command = block.splitlines()[["v5e-8", "v6e-8"].index(machine)].split()
    assert command[:3] == ["python", "-m", "jppo.train"]
    config, _ = settings.parse(command[3:], "", settings.default())
    c = settings.typed(config)
    chips = machines.parse_machine(machine).devices
    sizes = {axis: getattr(c.mesh, axis) for axis in ("data", "fsdp", "tensor", "sequence", "expert")}
    assert sharding.mesh_shape(chips, **sizes) == (1, chips, 1, 1, 1)
    assert c.rollout.name == "inprocess" and f"| `{machine}` |" in text("docs/machines.md")
