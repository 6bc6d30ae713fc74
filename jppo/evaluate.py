"""Tests a model: python -m jppo.evaluate --model=DIR --data=FILE[,FILE] [--n=8 --temperature=0.6] [--out=DIR]

    python -m jppo.evaluate --model=runs/quickstart/hf --data=runs/quickstart/data/test.jsonl --max_response_length=4

vLLM answers the prompts of the files with a Hugging Face directory of a supported family, or a hub name, and the
graders of their data sources score the answers. The command prints a table, and writes settings, samples and a summary
to --out. Other settings are as in training, from --config=FILE and --config.SECTION.NAME=VALUE; --dry_run prints them
and stops.
"""

import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import rich.box
import rich.console
import rich.table

from jppo import child_process, settings, statistics
from jppo.errors import UserError, expanded, one_line
from jppo.learner.make import open_mesh
from jppo.models import hf
from jppo.rewards.make import make_reward_sum
from jppo.rollout.make import open_engine, share_gpu, with_servers
from jppo.rollout.protocol import RolloutError
from jppo.rollout.publish import publish_checkpoint
from jppo.run import validation
from jppo.run.inputs import Inputs, engine_arguments, read_test
from jppo.run.validation import TestResult
from jppo.runlog import durable_files
from jppo.runlog.console import Display
from jppo.runlog.durable_files import own
from jppo.runlog.logger import write_samples_file
from jppo.runlog.timers import Timers
from jppo.samples.make import val_sampling
from jppo.settings import Settings

# Short option: the setting and its help text.
SHORT = {
    "model": ("model.path", "a run, a Hugging Face directory, or a hub name"),
    "data": ("data.val_files", "files of prompts, separated by commas"),
    "n": ("rollout.val_kwargs.n", "responses per prompt"),
    "temperature": ("rollout.val_kwargs.temperature", "0.0 is greedy"),
    "top_p": ("rollout.val_kwargs.top_p", ""),
    "top_k": ("rollout.val_kwargs.top_k", "-1 is off"),
    "min_p": ("rollout.val_kwargs.min_p", "fraction of the highest probability; 0.0 is off"),
    "max_prompt_length": ("data.max_prompt_length", "tokens; longer prompts are left out and counted"),
    "max_response_length": ("data.max_response_length", "tokens"),
    "limit": ("data.val_max_samples", "number of prompts; -1: all"),
    "grader": ("reward.grader", "one rule for all prompts; ignores data_source"),
    "function": ("reward.function", "a custom function FILE.py:NAME in place of the rules"),
    "seed": ("trainer.seed", ""),
    "engine": ("rollout.name", ""),
    "dtype": ("rollout.dtype", "of the engine: float32, bfloat16 or float16"),
}
OUT = "runs/evaluate"
KINDS = ("pass", "maj", "best", "worst")  # columns of the table with several responses per prompt

Summaries = Mapping[str, Mapping[str, statistics.MeanSe]]


def _evaluate(c: Settings, console: rich.console.Console) -> bool:
    """Tests the model, prints the table and writes the files; False if nothing could be graded."""
    start, out = time.monotonic(), expanded(c.trainer.run_dir)
    if console.is_terminal:
        console.print(f"reading {c.model.path} and {c.data.val_files}", markup=False, highlight=False, soft_wrap=True)
    share_gpu(c)
    inputs = read_test(c)
    sampling = val_sampling(c)
    with contextlib.ExitStack() as stack:
        stack.enter_context(own(out, "--out"))
        if inputs.agent is not None:
            stack.callback(inputs.agent.close)
        mesh = open_mesh(c)
        c = with_servers(c, mesh)
        reward_sum = make_reward_sum(c, mesh, **inputs.reward_arguments())
        stack.callback(reward_sum.close)
        engine = open_engine(c, out)
        stack.callback(engine.close)
        durable_files.write_text(out / "config.json", settings.dump(c))
        console.print(introduce(c, inputs), markup=False, highlight=False, soft_wrap=True)
        stack.enter_context(Display(timer := Timers()))
        with timer("start"):
            timer.part("waiting for the sampler")
            sampler = engine.ready(**engine_arguments(inputs))
            timer.part("the first publish")
            dtypes = dict(param_dtype=c.model.param_dtype, engine_dtype=c.rollout.dtype)
            publish_checkpoint(c.model.path, sampler, inputs.policy, mesh, **dtypes)
            reward_sum.ready()
        stack.enter_context(timer("testing"))
        tested = validation.run_test(
            sampler,
            inputs.val.prompts,
            reward_sum.testing(),
            sampling=sampling,
            version=0,
            batch_size=c.data.val_batch_size,
            watch=timer.part("responses", len(inputs.val.prompts) * sampling.n),
        )
        rows = write_samples_file(out, "test", validation.rows(tested))
        summary = json_summary(c, inputs, tested) | {"seconds": round(time.monotonic() - start, 1)}
        durable_files.write_text(out / "summary.json", json.dumps(summary, indent=2, allow_nan=False) + "\n")
        for row in validation.first_responses(tested, c.trainer.log_val_generations):
            console.print(validation.format_row(row), markup=False, highlight=False, soft_wrap=True)
        console.print(score_table(validation.summaries(tested), sampling.n))
        for line in notes(summary):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print(f"samples {rows}, summary {out / 'summary.json'}", markup=False, highlight=False, soft_wrap=True)
    return summary["metrics"]["val/score"] is not None


def introduce(c: Settings, inputs: Inputs) -> str:
    """Describes the test in one line, for the console."""
    sampling, val = c.rollout.val_kwargs, inputs.val
    sampled = "greedily" if sampling.temperature == 0.0 else f"at temperature {sampling.temperature:g}"
    return (
        f"{c.model.path}: {len(val.prompts)} prompts of {c.data.val_files}, {sampling.n} responses each, {sampled}"
        f" ({val.overlong} over-long prompts left out, {val.truncated} cut; data.max_prompt_length="
        f"{c.data.max_prompt_length})"
    )


def json_summary(c: Settings, inputs: Inputs, tested: TestResult) -> dict[str, Any]:
    """Returns the content of summary.json; missing numbers are null."""
    metrics = validation.metrics(tested)
    return {
        "model": c.model.path,
        "data": c.data.val_files,
        "sampling": settings.as_dict(c.rollout.val_kwargs)
        | {"stop": c.rollout.stop, "ignore_eos": c.rollout.ignore_eos}
        | {"max_tokens": c.data.max_response_length, "seed": c.trainer.seed},
        "prompts": len(inputs.val.prompts),
        "overlong": inputs.val.overlong,
        "truncated": inputs.val.truncated,
        "first_error": next((r.error for r in tested.rewards if r.error is not None), None),
        "metrics": {name: value if math.isfinite(value) else None for name, value in metrics.items()},
    }


def score_table(summaries: Summaries, n: int) -> rich.table.Table:
    """Returns a table with a row per source, and per k with several responses: mean ± standard error."""
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, header_style="bold")
    ks = [1, *statistics.ladder(n)]
    kinds = [kind for kind in KINDS if any(f"{kind}@{n}" in summary for summary in summaries.values())] if n > 1 else []
    for heading in ("source", "prompts", "score", *(["k"] if kinds else []), *(f"{kind}@k" for kind in kinds)):
        table.add_column(heading, justify="left" if heading == "source" else "right", no_wrap=True)
    has_sources = len(summaries) > 2
    for source in sorted(summaries) if has_sources else [name for name in summaries if name]:
        estimates = summaries[source]
        for k in ks if kinds else ks[:1]:
            score = estimates["score"]
            source_cells = [rich.markup.escape(source or "all"), str(score.prompts), _format_estimate(score)]
            cells = [_format_estimate(estimates.get(f"{kind}@{k}")) for kind in kinds]
            table.add_row(*(source_cells if k == 1 else [""] * 3), *([str(k), *cells] if kinds else []))
    return table


def _format_estimate(estimate: statistics.MeanSe | None) -> str:
    """Formats a mean and its standard error; '' where there is no estimate, 'none' for a NaN."""
    if estimate is None or math.isnan(estimate.mean):
        return "" if estimate is None else "none"
    return f"{estimate.mean:.4f}" + ("" if math.isnan(estimate.se) else f" ± {estimate.se:.4f}")


def notes(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yields notes on responses that could not be graded or were truncated."""
    metrics = summary["metrics"]
    if errors := int(metrics["val/reward_errors"]):
        first = summary["first_error"].partition("\n")[0]
        yield f"{errors} responses could not be graded and are left out; the first error: {first}"
    if metrics["val/truncated"]:
        yield f"{metrics['val/truncated']:.1%} of the responses were truncated at data.max_response_length"


def read_settings(argv: list[str]) -> tuple[Settings, bool]:
    """Reads the command line; returns the checked settings, and whether to print them only."""
    parser = settings.Parser("jppo.evaluate", __doc__, allow_abbrev=False)
    for name, (setting, about) in SHORT.items():
        parser.add_argument(f"--{name}", metavar="", help=f"{setting}{about and f': {about}'}")
    parser.add_argument("--out", metavar="", default=OUT, help=f"output folder (default {OUT})")
    arguments, rest = parser.parse_known_args(argv)
    arguments.model = arguments.model and hf.final_model(arguments.model)
    if any(word.startswith("--config.trainer.run_dir") for word in rest):
        raise UserError("--config.trainer.run_dir is the folder of a training; --out=DIR is the one of an evaluation")
    overrides = [
        f"--config.{setting}={value}"
        for name, (setting, _) in SHORT.items()
        if (value := getattr(arguments, name)) is not None
    ]
    config, switches = settings.parse([*rest, *overrides], __doc__, settings.default(), needs_file=False)
    with config.unlocked():
        config.trainer.run_dir = arguments.out  # not the config's run_dir, which holds a training run
        config.rollout.lora_sync = "merge"  # the weights of a directory are whole
        config.rollout.routing_replay = config.rollout.mask_replay = False  # nothing learns
        config.rollout.mask_replay_tokens = settings.default().rollout.mask_replay_tokens
    for name in ("model", "data"):
        setting = SHORT[name][0]
        section, _, leaf = setting.partition(".")
        if not config[section][leaf]:
            raise UserError(f"--{name} is missing; it sets {setting}, {SHORT[name][1]}")
    return settings.typed(config, Settings, training=False), switches["dry_run"]


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """Tests a model, prints the scores and writes samples and a summary."""
    c, only_print = read_settings(sys.argv[1:] if argv is None else argv)
    if only_print:
        print(settings.dump(c), end="")
        return
    child_process.unwind_on_signals()
    console = rich.console.Console()
    console = console if console.is_terminal else rich.console.Console(width=160)
    try:
        graded = _evaluate(c, console)
    except RolloutError as e:
        print(one_line(e), file=sys.stderr)
        sys.exit(1)
    if not graded:
        print("error: no response could be graded; see the reason above", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
