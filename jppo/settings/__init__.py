"""Settings: the table of typed sections, the checks that need no device, the command line with its one-line errors.

Configs, sweeps and the command line change a ConfigDict, `default()`. A command gives it to `typed` once; everything
else reads the frozen sections that it returns. The settings are in `table_training.py` and `table_run.py`; start with
`table.py`, which puts them together.
"""

from jppo.settings.configfile import (
    Parser,
    check,
    cpu_dtype,
    exit_on_user_error,
    help_text,
    natural,
    parse,
    recipe,
    typed,
    without_unread,
)
from jppo.settings.rules_rollout import cuts
from jppo.settings.table import (
    Common,
    FineTuning,
    Loop,
    Paired,
    PairTraining,
    PreferenceTuning,
    Settings,
    Supervised,
    Training,
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
    value_of,
)
from jppo.settings.table_run import Judge, RewardModel, Rollout, ValKwargs
from jppo.settings.table_training import Critic, Mesh, Model, Optimizer
from jppo.settings.texts import (
    check_within,
    importance_band,
    loggers,
    parse_steps,
    rejection_rules,
    save_contents,
    template_arguments,
)
