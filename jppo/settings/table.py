"""Every setting of every command, once: defaults, checks, --help, docs/configuration.md and sweeps read this table."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import ml_collections
from ml_collections import config_dict

from jppo.settings import table_rollout, table_run, table_training
from jppo.settings.setting import Setting

Table = dict[str, Setting]  # by dotted name


def _within(section: str, settings: Iterable[Setting]) -> Iterator[tuple[str, Setting]]:
    for setting in settings:
        name = f"{section}.{setting.name}"
        yield name, dataclasses.replace(setting, name=name)


PPO: Table = {
    name: setting
    for section, settings in (
        ("model", table_training.MODEL),
        ("data", table_training.DATA),
        ("algorithm", table_training.ALGORITHM),
        ("actor", table_training.ACTOR),
        ("critic", table_training.CRITIC),
        ("ref", table_training.REF),
        ("rollout", table_rollout.ROLLOUT),
        ("rollout.multi_turn", table_rollout.MULTI_TURN),
        ("rollout.val_kwargs", table_rollout.VAL_KWARGS),
        ("reward", table_run.REWARD),
        ("reward.judge", table_run.JUDGE),
        ("reward.model", table_run.REWARD_MODEL),
        ("trainer", table_run.TRAINER),
        ("mesh", table_training.MESH),
    )
    for name, setting in _within(section, settings)
}
_SHARED = {
    "data": "max_prompt_length max_response_length packing row_lengths max_tokens_per_row train_files"
    " train_batch_size shuffle system_prompt custom_cls",
    "trainer": "run_dir compile_cache logger metrics_port metrics_host project_name experiment_name seed total_epochs"
    " total_training_steps save_freq resume_mode max_ckpt_to_keep stage_timeout_s stop_exit_code stop_timeout_s",
}
SFT: Table = {
    **{name: setting for name, setting in PPO.items() if name.split(".")[0] in ("model", "mesh")},
    **{f"{section}.{leaf}": PPO[f"{section}.{leaf}"] for section, leaves in _SHARED.items() for leaf in leaves.split()},
    **dict(_within("data", [table_training.LEARN_TURNS])),
    **dict(_within("optim", table_training.OPTIM)),
}
_NOT_OF_PAIRS = ("data.learn_turns", "model.logprob_chunk_bytes")
REWARD_MODEL: Table = {
    **{name: setting for name, setting in SFT.items() if name not in _NOT_OF_PAIRS},
    **{name: PPO[name] for name in ("data.val_files", "trainer.test_freq")},
    **dict(_within("loss", table_training.LOSS)),
}
TABLE: Table = PPO | SFT | REWARD_MODEL


def default() -> ml_collections.ConfigDict:
    """Returns all settings of PPO training with their defaults; names are verl's where the meaning is verl's."""
    return _config(PPO)


def sft_default() -> ml_collections.ConfigDict:
    """Returns all settings of supervised fine-tuning; sections and names as for PPO, with one optimizer in `optim`."""
    return _config(SFT)


def reward_model_default() -> ml_collections.ConfigDict:
    """Returns all settings of reward model training: fine-tuning, held-out pairs and the pair loss."""
    return _config(REWARD_MODEL)


def values(config: ml_collections.ConfigDict | dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns every setting's value by its dotted name, from a config or the contents of a config.json."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, ml_collections.ConfigDict | dict):
            found |= values(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _config(table: Table) -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    for name, setting in table.items():
        *sections, leaf = name.split(".")
        node = config
        for section in sections:
            if section not in node:
                node[section] = ml_collections.ConfigDict()
            node = node[section]
        node[leaf] = config_dict.placeholder(setting.type) if setting.optional else setting.default
    return config.lock()
