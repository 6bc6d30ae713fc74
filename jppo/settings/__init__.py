"""Settings: the table of typed sections, the checks that need no device, the command line with its one-line errors.

Configs, sweeps and the command line change a ConfigDict, `default()`. A command gives it to `typed` once; everything
else reads the frozen sections that it returns. Start with `table.py`.
"""

from jppo.errors import UserError, UserErrors
from jppo.settings.checks import check, typed
from jppo.settings.configfile import Parser, cpu_dtype, describe, exit_on_user_error, natural, parse, recipe
from jppo.settings.rules_rollout import cuts, has_branches
from jppo.settings.table import (
    Common,
    FineTuning,
    Paired,
    PairTraining,
    PreferenceTuning,
    Settings,
    Supervised,
    as_dict,
    by_name,
    changed,
    config_of,
    default,
    dpo_default,
    dump,
    optimizers,
    reward_model_default,
    sft_default,
    value,
)
from jppo.settings.table_rollout import Rollout, ValKwargs
from jppo.settings.table_run import Judge, RewardModel
from jppo.settings.table_training import Critic, Mesh, Model, Optimizer
from jppo.settings.texts import (
    check_within,
    due,
    importance_band,
    loggers,
    parse_steps,
    rejection_rules,
    save_contents,
    stop_texts,
    template_arguments,
)

__all__ = [
    "Common",
    "Critic",
    "FineTuning",
    "Judge",
    "Mesh",
    "Model",
    "Optimizer",
    "PairTraining",
    "Paired",
    "Parser",
    "PreferenceTuning",
    "RewardModel",
    "Rollout",
    "Settings",
    "Supervised",
    "UserError",
    "UserErrors",
    "ValKwargs",
    "as_dict",
    "by_name",
    "changed",
    "check",
    "check_within",
    "config_of",
    "cpu_dtype",
    "cuts",
    "default",
    "describe",
    "dpo_default",
    "due",
    "dump",
    "exit_on_user_error",
    "has_branches",
    "importance_band",
    "loggers",
    "natural",
    "optimizers",
    "parse",
    "parse_steps",
    "recipe",
    "rejection_rules",
    "reward_model_default",
    "save_contents",
    "sft_default",
    "stop_texts",
    "template_arguments",
    "typed",
    "value",
]
