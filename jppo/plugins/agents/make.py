"""Multi-turn rollouts: the turn loop of `rollout.multi_turn` with its tools, or the gateway of `rollout.agent`."""

import functools
import json
from typing import Any

from jppo.data.tokenizer import character_limit, make_decoders, pieces
from jppo.plugins.agents import conversation, turn_tokens
from jppo.plugins.agents.calls import PARSERS, Schema
from jppo.plugins.agents.conversation import Turns, make_talk
from jppo.plugins.agents.gateway.episode import Language, Rules
from jppo.plugins.agents.gateway.gateway import Gateway
from jppo.plugins.agents.tools import Toolbox, ToolLimits, UserCodeRunner, read_tools
from jppo.rollout.protocol import Agent, Talk
from jppo.settings import Settings, template_arguments


def make_agent(c: Settings, tokenizer: Any, ends: tuple[int, ...]) -> Agent:
    """Makes and checks the agent of a run with conversations."""
    m = c.rollout.multi_turn
    user_code = UserCodeRunner()
    limits = ToolLimits(
        parallel=m.max_parallel_calls,
        characters=m.max_tool_response_length,
        side=m.tool_response_truncate_side,
        timeout_s=m.tool_timeout_s,
    )
    options: dict[str, Any] = dict(allow_code=m.allow_code, timeout_s=m.tool_timeout_s, sandbox=c.reward.sandbox_choice)
    toolbox = Toolbox(read_tools(m.tool_config_path, **options), limits, user_code)
    gateway = make_gateway(c, tokenizer, ends) if c.rollout.agent else None
    talk, schemas = (gateway.talk, []) if gateway else _make_turn_loop(c, tokenizer, ends, toolbox, user_code)

    def close() -> None:
        if gateway is not None:
            gateway.close()
        toolbox.close()
        user_code.close()

    return Agent(talk, schemas, rewards=toolbox.may_reward, runs_programs=toolbox.runs_programs, close=close)


def _make_turn_loop(
    c: Settings, tokenizer: Any, ends: tuple[int, ...], toolbox: Toolbox, user_code: UserCodeRunner
) -> tuple[Talk, list[Schema]]:
    """Makes the turn loop of `rollout.multi_turn`; returns it and the schemas of its tools."""
    m = c.rollout.multi_turn
    begin = None
    if m.interaction:
        begin = conversation.make_interaction(m.interaction, user_code=user_code, timeout_s=m.tool_timeout_s)
    if m.environment:
        begin = conversation.make_environment(m.environment, user_code=user_code, timeout_s=m.tool_timeout_s)
    schemas = [] if m.format == "plain" else toolbox.schemas
    roles = [*(["tool"] if schemas else []), *(["user"] if begin is not None else [])]
    options: dict[str, Any] = dict(setting="rollout.multi_turn.format", parallel=m.max_parallel_calls)
    chat = _make_chat(c, tokenizer, m.format, schemas, roles=roles, **options)
    decode, spell = make_decoders(tokenizer)
    talk = make_talk(
        chat,
        PARSERS[m.format],
        toolbox,
        begin,
        turns=Turns(assistant=m.max_assistant_turns, user=m.max_user_turns),
        decode=decode,
        spell=spell,
        ends=ends,
        branches=c.rollout.agent_branches,
    )
    return talk, schemas


def _make_chat(c: Settings, tokenizer: Any, format: str, schemas: list[Schema], **options: Any) -> turn_tokens.Chat:
    """Makes the chat of a format of tool calls: the plain one, or by the chat template."""
    if format == "plain":
        return turn_tokens.plain_chat(tokenizer)
    options |= dict(parse=PARSERS[format], arguments=template_arguments(c.data.apply_chat_template_kwargs))
    return turn_tokens.template_chat(tokenizer, schemas, name=format, history=c.rollout.history, **options)


def make_gateway(c: Settings, tokenizer: Any, ends: tuple[int, ...]) -> Gateway:
    """Makes and checks the gateway of `rollout.agent`; starts nothing."""
    r, name = c.rollout, c.rollout.agent_format

    @functools.lru_cache(maxsize=64)
    def chat(schemas: str) -> turn_tokens.Chat:
        tools = json.loads(schemas)
        roles = ["user", *(["tool"] if tools else [])]
        return _make_chat(c, tokenizer, name, tools, roles=roles, setting="rollout.agent_format", parallel=2)

    chat("[]")  # checks the template
    decode, spell = make_decoders(tokenizer)
    language = Language(
        chat=chat,
        parse=PARSERS[name],
        format=name,
        decode=decode,
        spell=spell,
        pieces=lambda ids: pieces(tokenizer, ids),
        ends=ends,
        longest=character_limit(tokenizer, c.data.longest_row),
    )
    rules = Rules(
        max_prompt_length=c.data.max_prompt_length,
        branches=r.agent_branches,
        reward=r.agent_reward,
        timeout_s=r.agent_timeout_s,
    )
    return Gateway(r.agent, language, rules, concurrency=r.agent_concurrency)
