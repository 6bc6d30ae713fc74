"""Multi-turn rollouts from `rollout.multi_turn`: tools, interaction partner, chat template and turn loop."""

import dataclasses
from typing import Any

from ml_collections import ConfigDict

from jppo.agent import partners, turn_tokens
from jppo.agent.calls import PARSERS, Schema
from jppo.agent.conversation import Turns, make_talk
from jppo.agent.tools import Limits, Toolbox, read_tools
from jppo.agent.user_code import UserCodeRunner
from jppo.build.sandbox import sandbox_of
from jppo.data.tokenizer import decode, spell
from jppo.rollout.protocol import Talk
from jppo.settings import template_arguments


@dataclasses.dataclass(frozen=True)
class Agent:
    """The components of a multi-turn rollout next to the policy."""

    talk: Talk
    schemas: list[Schema]  # rendered by the chat template
    toolbox: Toolbox
    user_code: UserCodeRunner

    def close(self) -> None:
        """Stops tools and partners; idempotent."""
        self.toolbox.close()
        self.user_code.close()


def make_agent(c: ConfigDict, tokenizer: Any, ends: tuple[int, ...]) -> Agent | None:
    """Makes and checks the agent of a run; None for single-turn rollouts."""
    m = c.rollout.multi_turn
    if not m.enable:
        return None
    user_code = UserCodeRunner()
    limits = Limits(
        parallel=m.max_parallel_calls,
        characters=m.max_tool_response_length,
        side=m.tool_response_truncate_side,
        timeout_s=m.tool_timeout_s,
    )
    toolbox = Toolbox(read_tools(m.tool_config_path, allow_code=m.allow_code, sandbox=sandbox_of(c)), limits, user_code)
    begin = None
    if m.interaction:
        begin = partners.make_interaction(m.interaction, user_code=user_code, timeout_s=m.tool_timeout_s)
    if m.environment:
        begin = partners.make_environment(m.environment, user_code=user_code, timeout_s=m.tool_timeout_s)
    if m.format == "plain":
        between, told = turn_tokens.plain(tokenizer), []
    else:
        roles = [*(["tool"] if toolbox.schemas else []), *(["user"] if begin is not None else [])]
        arguments = template_arguments(c.data.apply_chat_template_kwargs)
        between = turn_tokens.templated(tokenizer, toolbox.schemas, roles=roles, name=m.format, arguments=arguments)
        told = toolbox.schemas

    talk = make_talk(
        between,
        PARSERS[m.format],
        toolbox,
        begin,
        turns=Turns(assistant=m.max_assistant_turns, user=m.max_user_turns),
        decode=lambda ids: decode(tokenizer, ids),
        spell=lambda ids: spell(tokenizer, ids),
        ends=ends,
    )
    return Agent(talk, told, toolbox, user_code)
