"""A run's samples from the settings: sampling parameters, the queue with or without dynamic sampling, stale samples."""

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jppo.data.prompts import PromptSet
from jppo.data.stream import Cursor
from jppo.data.tokenizer import decode, encode_all
from jppo.distributed.hosts import ALONE, Hosts
from jppo.errors import expanded
from jppo.rewards.parts import RewardSum
from jppo.rollout.inprocess import PolicySampler
from jppo.rollout.protocol import RolloutError, respond
from jppo.samples.dynamic_sampling import DynamicSampleQueue, Filter
from jppo.samples.given import Give, answer_of, given_texts
from jppo.samples.queue import SampleQueue, StepSamples, Supply, SupplySettings, ages
from jppo.settings import Loop, Rollout, Settings, ValKwargs, parts, table
from jppo.types import Prompt, Reward, Sampling, Trajectory


def step_sampling(c: Loop, version: int, gen_batch: int = 0) -> Sampling:
    """Makes the sampling parameters of a step's gen batch; seeds differ by step and gen batch."""
    sampling = _make_sampling(c, c.rollout, [c.trainer.seed, version, gen_batch])
    kept_tokens = c.rollout.mask_replay_tokens if c.rollout.mask_replay else 0
    return dataclasses.replace(sampling, experts=c.rollout.routing_replay, kept=kept_tokens)


def val_sampling(c: Settings) -> Sampling:
    """Makes the sampling parameters of a test; all tests of a run use the same seeds, to be comparable."""
    return _make_sampling(c, c.rollout.val_kwargs, c.trainer.seed)


def _make_sampling(c: Loop, section: Rollout | ValKwargs, entropy: int | list[int]) -> Sampling:
    """Makes the sampling parameters of a section; `entropy` determines their seed."""
    return Sampling(
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        min_p=section.min_p,
        n=section.n,
        max_tokens=c.data.max_response_length,
        stop=c.rollout.stop_texts,
        ignore_eos=c.rollout.ignore_eos,
        seed=int(np.random.SeedSequence(entropy).generate_state(1)[0]),
    )


def prompts_per_batch(c: Settings) -> int:
    """Returns the number of prompts sampled together: `data.train_batch_size`, or one gen batch of dynamic sampling."""
    size: int = c.data.train_batch_size if c.data.gen_batch_size is None else c.data.gen_batch_size
    return size


def make_supply(
    c: Settings, train: PromptSet, total_steps: int, baseline: bool, sampler: PolicySampler, reward_sum: RewardSum,
    cursor: Cursor, hosts: Hosts = ALONE, *, give: Give | None = None, with_dropped: bool = False,
) -> Supply:  # fmt: skip
    """Makes the sample supply of a run, from `cursor` on; `baseline`: each prompt also gets a greedy response.

    `give` returns the responses of a prompt that take the places of samples. `with_dropped`: a step's samples have the
    groups that dynamic sampling drops.
    """
    options = SupplySettings(
        batch_size=c.data.train_batch_size,
        n=c.rollout.n,
        seed=c.trainer.seed,
        shuffle=c.data.shuffle,
        total_steps=total_steps,
        staleness=max_staleness(c),
        partial=c.rollout.partial,
        greedy=baseline,
        sampling=functools.partial(step_sampling, c),
        graders=fingerprint_graders(c),
        give=give,
    )
    a = c.algorithm
    if not a.filter_groups:
        return SampleQueue(options, train, sampler, reward_sum, cursor, hosts)
    options = dataclasses.replace(options, batch_size=prompts_per_batch(c))
    filter_settings = Filter(
        c.data.train_batch_size, c.rollout.n, a.filter_groups_metric, a.max_num_gen_batches,
        filter_truncated=a.filter_truncated, with_dropped=with_dropped,
    )  # fmt: skip

    def gen_batch(index: int, position: Cursor) -> SampleQueue:
        sampling = functools.partial(step_sampling, c, gen_batch=index)
        return SampleQueue(dataclasses.replace(options, sampling=sampling), train, sampler, reward_sum, position, hosts)

    return DynamicSampleQueue(filter_settings, gen_batch, cursor, train.order_of)


def make_texts(c: Settings) -> Callable[[Prompt], Sequence[str]] | None:
    """Makes the function that returns the texts of a prompt's given responses; None if the algorithm gives none."""
    give = parts.estimator(c).given
    return None if give is None else functools.partial(given_texts, give, n=c.rollout.n, setting=parts.host_setting(c))


def require_given(c: Settings, prompts: Sequence[Prompt]) -> None:
    """Checks the demonstrations of an algorithm with `given`, for all prompts; raises UserError for a wrong one."""
    if (texts := make_texts(c)) is not None:
        for prompt in prompts:
            texts(prompt)  # raises


def make_given(c: Settings, tokenizer: Any, end_tokens: Sequence[int]) -> Give | None:
    """Makes the function that returns a prompt's given responses as trajectories; None if the algorithm gives none."""
    texts, limit, end_token = make_texts(c), c.data.max_response_length, tokenizer.eos_token_id
    if texts is None:
        return None
    ends = () if c.rollout.ignore_eos else (end_tokens[0] if end_token is None else end_token, *end_tokens)
    read = functools.partial(decode, tokenizer)

    def give_responses(prompt: Prompt) -> list[Trajectory]:
        given = texts(prompt)
        tokenised = encode_all(tokenizer, given, max_length=limit, add_special_tokens=False) if given else []
        answers = [answer_of(ids, limit=limit, stop=c.rollout.stop_texts, ends=ends, decode=read) for ids in tokenised]
        return [respond(prompt, answer, text=read(answer.tokens)) for answer in answers]

    return give_responses


def fingerprint_graders(c: Settings) -> dict[str, Any]:
    """Returns what a reward depends on, as JSON types, to compare runs: settings and the state of files they name.

    Of a file the checksum; of a folder, such as a reward model's, the sizes and times of its files.
    """
    fingerprint = dict[str, Any]()
    for name, value in table.by_name(c.reward, "reward.").items():
        text = value if isinstance(value, str) else ""
        path = expanded(text.rpartition(":")[0] or text)
        if text and path.is_file():
            fingerprint[name] = [value, zlib.crc32(path.read_bytes())]
        elif text and path.is_dir():
            stats = {file.name: file.stat() for file in sorted(path.iterdir())}
            fingerprint[name] = [value, [[file, stat.st_size, stat.st_mtime_ns] for file, stat in stats.items()]]
        else:
            fingerprint[name] = value
    return fingerprint


def max_staleness(c: Settings) -> int:
    return c.rollout.max_staleness if c.rollout.mode == "async" else 0


def mark_stale(
    c: Settings, drawn: StepSamples, step: int, rewards: list[Reward]
) -> tuple[list[Reward], dict[str, float]]:
    """Marks the rewards of samples that are too stale as unusable and returns staleness metrics.

    With a log-prob correction, stale samples are kept: it weights them.
    """
    age, max_age = ages(drawn.trajectories, step), max_staleness(c)
    if max_age == 0:
        if age.any():
            oldest = drawn.trajectories[int(np.argmax(age))]
            raise RolloutError(
                f"prompt {oldest.uid} was sampled by the weights {step - int(age.max())}, not by version {step}"
            )
        return rewards, {}
    limit = max_age if c.algorithm.old_logprob != "correction" else math.inf
    dropped = [i for i, r in enumerate(rewards) if r.unusable is None and age[i] > limit]
    rewards, count = list(rewards), max(1, sum(not t.given for t in drawn.trajectories))
    for i in dropped:
        problem = f"sampled by weights {age[i]} updates old, more than rollout.max_staleness={max_age}"
        rewards[i] = dataclasses.replace(rewards[i], unusable=problem)
    return rewards, {
        "rollout/staleness_mean": float(age.sum()) / count,
        "rollout/staleness_max": float(age.max()),
        "rollout/stale_dropped": float(len(dropped)),
        "rollout/mixed_versions": sum(len(np.unique(t.version[t.sampled])) > 1 for t in drawn.trajectories) / count,
        "rollout/sampling_s": drawn.sampling_s,
        "rollout/hidden": max(0.0, 1.0 - drawn.waited_s / drawn.sampling_s) if drawn.sampling_s > 0 else 0.0,
    }
