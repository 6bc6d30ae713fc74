"""Settings: every default, the checks that need no device, and the command-line edge that turns faults into one line.

Nothing below the commands (`train.py`, `sft.py` ...) and `assemble.py` sees a config: they read it and pass scalars on.
"""

from jppo.config.checks import check
from jppo.config.commandline import describe, dump, exit_on_user_error, parse
from jppo.config.commandline import settings as by_name
from jppo.config.defaults import default, reward_model_default, sft_default
from jppo.config.draws import cuts
from jppo.config.errors import UserError
from jppo.config.shipped import recipe
from jppo.config.steps import check_within, parse_steps
from jppo.config.texts import importance_band, loggers, rejection_rules, save_contents, stop_texts, template_arguments

__all__ = [
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
