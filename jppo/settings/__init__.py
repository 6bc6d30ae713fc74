"""Settings: the table, the checks that need no device, and the command line with its one-line errors.

Only the commands (`train.py`, `sft.py` ...) and `build/` read a config; other modules get its numbers as arguments.
"""

from jppo.errors import UserError
from jppo.settings.checks import check
from jppo.settings.commandline import Parser, describe, dump, exit_on_user_error, natural, parse
from jppo.settings.rules_rollout import cuts
from jppo.settings.shipped import recipe
from jppo.settings.steps import check_within, parse_steps
from jppo.settings.table import default, reward_model_default, sft_default
from jppo.settings.table import values as by_name
from jppo.settings.texts import importance_band, loggers, rejection_rules, save_contents, stop_texts, template_arguments

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
    "exit_on_user_error",
    "importance_band",
    "loggers",
    "natural",
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
