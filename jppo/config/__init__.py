"""Settings: the table, the checks that need no device, and the command line, where errors become one line.

Only the commands (`train.py`, `sft.py` ...) and `assemble/` read a config; below them numbers are passed on.
"""

from jppo.config.checks import check
from jppo.config.commandline import Parser, describe, dump, exit_on_user_error, natural, parse
from jppo.config.rules_rollout import cuts
from jppo.config.shipped import recipe
from jppo.config.steps import check_within, parse_steps
from jppo.config.table import default, reward_model_default, sft_default
from jppo.config.table import values as by_name
from jppo.config.texts import importance_band, loggers, rejection_rules, save_contents, stop_texts, template_arguments
from jppo.errors import UserError

__all__ = [
    "Parser",
    "UserError",
    "by_name",
    "check",
    "check_within",
    "cuts",
    "default",
    "describe",
    "dump",
    "escaped",
    "exit_on_user_error",
    "importance_band",
    "loggers",
    "natural",
    "one_line",
    "parse",
    "parse_steps",
    "recipe",
    "rejection_rules",
    "reward_model_default",
    "save_contents",
    "sft_default",
    "stop_texts",
    "template_arguments",
]
