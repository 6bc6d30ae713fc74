"""Tests on held-out prompts: sampling, grading, statistics; used by training and `evaluate.py`."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jppo import statistics
from jppo.distributed.hosts import ALONE, Hosts
from jppo.errors import escaped
from jppo.rewards.parts import Grading, RewardSum, sample_of
from jppo.rollout.protocol import Sampler
from jppo.run.sample_log import sample_rows
from jppo.runlog import trajectories as of_hosts
from jppo.samples.make import val_sampling
from jppo.types import Prompt, Reward, Sampling, Trajectory

if TYPE_CHECKING:
    from jppo.run.start import Run


@dataclasses.dataclass(frozen=True)
class TestResult:
    """The result of a test: n consecutive responses per prompt, with their rewards."""

    prompts: Sequence[Prompt]
    n: int
    trajectories: list[Trajectory]
    rewards: list[Reward]


def run_test(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    reward_sum: RewardSum,
    *,
    sampling: Sampling,
    version: int,
    batch_size: int = -1,
    watch: Callable[[], None] = lambda: None,
    hosts: Hosts = ALONE,
) -> TestResult:
    """Samples and grades `sampling.n` responses per prompt, `batch_size` prompts at once (-1: all), over all hosts.

    `watch` is called after each response, from any thread.
    """

    def sample(block: Sequence[Prompt], seeded: Sampling) -> tuple[list[Trajectory], Grading]:
        """Samples this host's responses; returns them and their grading, which begins with each response."""
        grading = reward_sum.begin()

        def grade(number: int, t: Trajectory) -> None:
            grading.submit(number, sample_of(block[number // sampling.n], t))
            watch()

        if hosts.count == 1:
            return sampler.generate(block, seeded, version=version, done=grade), grading
        share = hosts.share(len(block))
        numbers = range(share.start * sampling.n, share.stop * sampling.n)
        future = sampler.start(block, seeded, done=grade, only=numbers)  # seeded by its index among all hosts' prompts
        try:
            return future.result(), grading
        except BaseException:
            future.cancel()
            raise

    size = max(1, len(prompts)) if batch_size == -1 else batch_size
    trajectories, rewards = [], []
    for first in range(0, len(prompts), size):
        seeded = dataclasses.replace(sampling, seed=sampling.seed + first)  # batches must not reuse seeds
        responses, grading = hosts.together(functools.partial(sample, prompts[first : first + size], seeded))
        trajectories += of_hosts.of_all(hosts, responses)
        rewards += of_hosts.rewards_of_all(hosts, grading.collect)
    return TestResult(prompts, sampling.n, trajectories, rewards)


def summaries(tested: TestResult) -> dict[str, dict[str, statistics.MeanSe]]:
    """Returns statistics over all prompts, under '', and per data source; ungraded responses are left out."""
    of_source: dict[str, list[statistics.Samples]] = {"": []}
    for i, prompt in enumerate(tested.prompts):
        graded = [r for r in tested.rewards[i * tested.n : (i + 1) * tested.n] if r.error is None]
        samples = statistics.Samples([r.score for r in graded], [r.answer for r in graded])
        of_source[""].append(samples)
        of_source.setdefault(prompt.data_source, []).append(samples)
    return {source: statistics.summarise(of_source[source], tested.n) for source in sorted(of_source)}


def metrics(tested: TestResult) -> dict[str, float]:
    """Returns the metrics `val/...`: of all prompts, and per data source if there are several."""
    by_name: dict[str, float] = {}
    by_source = summaries(tested)
    for source, summary in by_source.items():
        for statistic, (mean, se, prompt_count) in summary.items():
            errors = [se] if prompt_count > 1 else []  # unknown for a single prompt
            if not source:
                by_name |= {f"val/{statistic}": mean} | {f"val/{statistic}_se": se for se in errors}
            elif len(by_source) > 2:
                by_name |= {f"val/{source}/{statistic}": mean} | {f"val/{source}/{statistic}_se": se for se in errors}
    by_name["val/reward_errors"] = float(sum(r.error is not None for r in tested.rewards))
    by_name["val/response_length/mean"] = float(np.mean([t.sampled.sum() for t in tested.trajectories]))
    by_name["val/truncated"] = float(np.mean([t.finish == "length" for t in tested.trajectories]))
    return by_name


def rows(tested: TestResult) -> list[dict[str, Any]]:
    prompts = [prompt for prompt in tested.prompts for _ in range(tested.n)]
    return sample_rows(prompts, tested.trajectories, tested.rewards)


def first_responses(tested: TestResult, count: int) -> list[dict[str, Any]]:
    """Returns the rows of the first response to each of the first `count` prompts, the same in every test."""
    return rows(tested)[:: tested.n][:count]


def format_row(row: dict[str, Any]) -> str:
    """Formats a row for the console."""
    mark = row["error"].partition("\n")[0] if row["score"] is None else f"score {row['score']:g}"
    truth = f"; truth {row['ground_truth']}" if row["ground_truth"] else ""
    return escaped(f"  {_short(row['prompt'])} → {_short(row['response'])}   ({mark}{truth})")


def _short(text: str | list[dict[str, str]], limit: int = 60) -> str:
    line = " ".join((text if isinstance(text, str) else text[-1]["content"]).split())
    return line if len(line) <= limit else "…" + line[-limit:]


def validate(run: "Run", version: int) -> dict[str, float]:
    """Returns validation metrics; samples go to the run folder, a few to the console and the loggers."""
    c = run.c
    prompts = run.inputs.val.prompts
    tested = run_test(
        run.sampler,
        prompts,
        run.reward_sum.testing(),
        sampling=val_sampling(c),
        version=version,
        batch_size=c.data.val_batch_size,
        watch=run.timer.part("responses", len(run.hosts.share(len(prompts))) * val_sampling(c).n),
        hosts=run.hosts,
    )
    run.logger.samples(f"test_{version}", rows(tested))
    shown = first_responses(tested, c.trainer.log_val_generations)
    for row in shown:
        run.logger.note(format_row(row))
    run.logger.generations(version, shown)
    return metrics(tested)
