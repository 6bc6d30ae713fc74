"""Reward parts from the settings: which exist, their weights, where they run."""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax

from jppo import plugins
from jppo.data.tokenizer import decode
from jppo.distributed.hosts import ALONE, Hosts, own_folder
from jppo.errors import UserError, expanded
from jppo.learner import sharding
from jppo.registry import did_you_mean
from jppo.rewards import graders
from jppo.rewards.parts import (
    AGENT,
    ENVIRONMENT,
    INTERACTION,
    SCORE,
    TOOLS,
    TURNS,
    ConversationPart,
    Part,
    PartWeights,
    RewardSum,
    Sample,
    parse_weights,
)
from jppo.rewards.pool import Pool
from jppo.settings import Settings
from jppo.settings.parts import estimate_setting, estimator
from jppo.settings.texts import entries
from jppo.types import Prompt

_RULES, _FUNCTION = "rule_score", "function_score"


def make_reward_sum(
    c: Settings,
    mesh: jax.sharding.Mesh,
    hosts: Hosts = ALONE,
    *,
    tokenizer: Any,
    sources: Sequence[str],
    tool_rewards: bool = False,
) -> RewardSum:
    """Makes the run's reward from the settings: parts, their processes and weights; UserError if one lacks something.

    Each host grades its own samples on its own part of the mesh.
    """
    mesh = sharding.own_part(mesh)
    r, log = c.reward, own_folder(hosts, expanded(c.trainer.run_dir))
    names, weights, parts_of_source = plan_parts(c, sources, tool_rewards)

    @functools.cache
    def pool() -> Pool:  # one for all parts, closed with any of them
        log.mkdir(parents=True, exist_ok=True)
        return Pool(r.workers, timeout_s=r.timeout_s, memory_bytes=r.memory_bytes, log=log / "reward.log")

    def rules() -> Part:
        return graders.RulePart(
            _sources_with_rules(parts_of_source),
            override=r.grader,
            allow_code=r.allow_code,
            sandbox=r.sandbox_choice,
            tests_in=r.code.tests,
            pool=pool(),
        )

    def judge() -> Part:
        part: Part = plugins.load("judge.make").make_judge(r.judge)
        return part

    def model() -> Part:
        part: Part = plugins.load("reward_models.make").make_reward_model(r.model, tokenizer, mesh, log)
        return part

    makers: dict[str, Callable[[], Part]] = {
        _RULES: rules,
        _FUNCTION: lambda: graders.FunctionPart(r.function, pool=pool(), decode=functools.partial(decode, tokenizer)),
        "judge_score": judge,
        "rm_score": model,
        "length_score": lambda: graders.OverlongPart(
            max_response_length=c.data.max_response_length, buffer_tokens=r.overlong_buffer_tokens
        ),
        "format_score": lambda: graders.FormatPart(r.format_regex, pool=pool()),
        **dict.fromkeys(TURNS, ConversationPart),
        TOOLS: lambda: ConversationPart(tools=True),
    }
    needed_names = [name for name in names if any(name in parts for parts in parts_of_source.values())]
    built_parts: dict[str, Part] = {}
    try:
        for name in needed_names:
            built_parts[name] = makers[name]()
    except BaseException:
        RewardSum(built_parts, weights, score_on_error=None).close()
        raise
    return RewardSum(built_parts, weights, score_on_error=r.score_on_error)


def require_parts(c: Settings, sources: Sequence[str], *, trained: Collection[str], tool_rewards: bool = False) -> None:
    """Raises a UserError for a part or a rule that settings name and the run lacks; starts nothing.

    `trained`: the sources of the training rows.
    """
    _, _, parts_of_source = plan_parts(c, sources, tool_rewards)
    graded_sources = _sources_with_rules(parts_of_source)
    graders.graders_for(graded_sources, override=c.reward.grader, allow_code=c.reward.allow_code)
    if any(_FUNCTION in weighted for weighted in parts_of_source.values()):
        graders.require_function(c.reward.function)
    values = {"judge_score": ("judge_raw",), "rm_score": ("steps" if c.reward.model.step_aggregation else "rm_raw",)}
    for source in sorted(trained):
        for setting, name in _estimator_parts(c):
            part, slash, value = name.partition("/")
            value_names = values.get(part, ())
            parts = parts_of_source[source]
            if part not in parts or (slash and part not in (_RULES, _FUNCTION) and value not in value_names):
                raise _unknown_part(setting, name, source, [*parts, *(f"{part}/{known}" for known in value_names)])
    metric = c.algorithm.filter_groups_metric
    part_names = dict.fromkeys([SCORE, *(part for source in trained for part in parts_of_source[source])])
    if c.algorithm.filter_groups and trained and metric.partition("/")[0] not in part_names:
        raise UserError(
            f"algorithm.filter_groups_metric={metric!r} is no part of this run's reward; it is one of"
            f" {', '.join(map(repr, part_names))}{did_you_mean(metric, part_names)}"
        )


def require_values(c: Settings, reward_sum: RewardSum, prompts: Sequence[Prompt]) -> None:
    """Raises a UserError for a value PART/NAME that the estimator reads and a rule or a function does not return.

    They score an empty response to the first prompt of each source.
    """
    first_prompts = {prompt.data_source: prompt for prompt in reversed(prompts)}
    for setting, name in _estimator_parts(c):
        part, slash, value = name.partition("/")
        if not slash or part not in (_RULES, _FUNCTION):
            continue
        for source, prompt in sorted(first_prompts.items()):
            future = reward_sum.parts[part].submit(Sample(prompt, "", 0, "stop"))
            reward_sum.parts[part].flush()
            reward = future.result()
            if reward.error is None and value not in reward.parts:
                raise _unknown_part(setting, name, source, [part, *(f"{part}/{known}" for known in reward.parts)])


def _estimator_parts(c: Settings) -> Iterator[tuple[str, str]]:
    """Yields (setting, part) for the parts of the reward that the estimator reads in place of the score."""
    a = c.algorithm
    for name in estimator(c).parts:
        by_keys = name in entries(a.gdpo_reward_keys)
        yield f"algorithm.gdpo_reward_keys={a.gdpo_reward_keys!r}" if by_keys else estimate_setting(c), name


def _unknown_part(setting: str, name: str, source: str, names: Sequence[str]) -> UserError:
    """Returns the error for a setting that names a part or value which the source's reward lacks."""
    return UserError(
        f"{setting}: {name!r} is no part of a reward, whose parts are {', '.join(names)} for data_source={source!r};"
        f" name those{did_you_mean(name, names)}"
    )


def plan_parts(
    c: Settings, sources: Sequence[str], tool_rewards: bool
) -> tuple[list[str], PartWeights, dict[str, dict[str, float]]]:
    """Returns the configured parts, their weights, and the weighted parts of each source."""
    names = _configured_parts(c, tool_rewards)
    weights = parse_weights(c.reward.weights, names, optional=[_RULES])
    return names, weights, _used_parts(weights, c.reward.weights, sources)


def _sources_with_rules(parts_of_source: Mapping[str, Mapping[str, float]]) -> list[str]:
    return [source for source, parts in parts_of_source.items() if _RULES in parts]


def _configured_parts(c: Settings, tool_rewards: bool) -> list[str]:
    """Returns the names of the parts that the settings ask for."""
    r, talk, agent = c.reward, c.rollout.multi_turn, c.rollout.agent
    has_own_reward = talk.environment or (agent and c.rollout.agent_reward != "graders")
    configured = {
        _RULES: not r.function and (bool(r.grader) or not has_own_reward),  # these replace the rules
        _FUNCTION: bool(r.function),
        "judge_score": bool(r.judge.api_type),
        "rm_score": bool(r.model.path),
        "length_score": r.overlong_buffer_tokens > 0,
        "format_score": bool(r.format_regex),
        ENVIRONMENT: bool(talk.environment),
        AGENT: bool(agent),
        INTERACTION: bool(talk.interaction),
        TOOLS: tool_rewards,
    }
    return [name for name, is_configured in configured.items() if is_configured]


def make_refusal(c: Settings) -> Callable[[str, str], str]:
    """Makes the function (data source, ground truth) that returns why a row cannot be graded, or ''."""
    weights = parse_weights(c.reward.weights, _configured_parts(c, tool_rewards=True), optional=[_RULES, TOOLS])

    def reason_to_refuse(source: str, ground_truth: str) -> str:
        if _RULES not in weights.of(source):
            return ""
        return graders.refusal(source, ground_truth, override=c.reward.grader, tests_in=c.reward.code.tests)

    return reason_to_refuse


def needed_columns(c: Settings, tool_rewards: bool = False) -> tuple[str, ...]:
    """Returns the columns besides the prompt that the reward reads: ground_truth, data_source, both or none."""
    names = _configured_parts(c, tool_rewards)
    weights = parse_weights(c.reward.weights, names, optional=[_RULES])
    computed_parts = {part for part, weight in weights.general.items() if weight is not None}
    computed_parts |= {part for (_, part), weight in weights.of_source.items() if weight is not None}
    by_rules, by_judge = _RULES in computed_parts, "judge_score" in computed_parts
    if by_judge:
        by_judge = plugins.load("judge.make").asks_for_truth(c.reward.judge)
    return ("ground_truth",) * (by_rules or by_judge) + ("data_source",) * (by_rules and not c.reward.grader)


def _used_parts(weights: PartWeights, setting: str, sources: Sequence[str]) -> dict[str, dict[str, float]]:
    """Returns the weighted parts by source; UserError for weights of unknown sources and for sources without a part."""
    parts_of_source = {source: weights.of(source) for source in sources}
    for source, part in weights.of_source:
        if source not in parts_of_source:
            raise UserError(
                f"reward.weights={setting!r}: no row has data_source={source!r}, for which it weighs {part}; the"
                f" sources are {', '.join(parts_of_source)}"
            )
    for source, parts in parts_of_source.items():
        if not parts:
            raise UserError(f"reward.weights={setting!r} leaves data_source={source!r} without any part; give it one")
    return parts_of_source
