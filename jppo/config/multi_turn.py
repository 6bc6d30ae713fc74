"""What the settings of conversations may be together."""

import ml_collections

from jppo.config.defaults import default
from jppo.errors import UserError

_OF_TOOLS = ("max_parallel_calls", "max_tool_response_length", "tool_response_truncate_side", "allow_code")


def check_multi_turn(m: ml_collections.ConfigDict) -> None:
    """UserError where nobody would answer the policy, two would, or a setting is read by nobody."""
    name, usual = "rollout.multi_turn", default().rollout.multi_turn
    unread, why = [], ""
    if not m.enable:
        unread, why = [leaf for leaf in m if leaf != "enable"], f"{name}.enable is False"
    elif not m.tool_config_path:
        unread, why = list(_OF_TOOLS), f"{name}.tool_config_path is empty"
    for leaf in unread:
        if m[leaf] != usual[leaf]:
            raise UserError(
                f"{name}.{leaf}={m[leaf]!r} is read by nobody: {why}; mend that, or leave it at {usual[leaf]!r}"
            )
    if m.interaction and m.environment:
        raise UserError(
            f"{name}.interaction={m.interaction!r} and {name}.environment={m.environment!r} would both answer the"
            " policy; leave one empty"
        )
    if m.enable and not (m.tool_config_path or m.interaction or m.environment):
        raise UserError(
            f"{name}.enable=True, and nobody answers the policy; set one of {name}.tool_config_path, interaction,"
            " environment"
        )
