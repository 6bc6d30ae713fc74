"""Every setting of every command, once: typed sections, --help, docs/configuration.md and sweeps read this table.

`default()` makes the ConfigDict that configs, the command line and sweeps change. `typed` checks it once and returns
frozen sections, which the rest of jppo reads.
"""

import dataclasses
import functools
import json
import typing
from collections.abc import Container
from typing import Any, TypeVar

import ml_collections
from ml_collections import config_dict

from jppo.settings.options import Options
from jppo.settings.setting import Section, Setting, settings_by_name
from jppo.settings.table_run import RewardSection, Rollout, Run, TestedRun, Trainer, TrainingRun
from jppo.settings.table_training import (
    Actor,
    Algorithm,
    Critic,
    Data,
    Demonstrations,
    Dpo,
    Loss,
    Mesh,
    Model,
    Optim,
    Optimizer,
    Prompts,
    Ref,
    Sequences,
    TestedData,
    TrainingData,
    Trunk,
)


@dataclasses.dataclass(frozen=True)
class Common(Section):
    """The sections that every learner has."""

    model: Trunk = dataclasses.field(default_factory=Trunk)
    data: Sequences = dataclasses.field(default_factory=Sequences)
    trainer: Run = dataclasses.field(default_factory=Run)
    mesh: Mesh = dataclasses.field(default_factory=Mesh)


@dataclasses.dataclass(frozen=True)
class Training(Common):
    """The sections that every training command has."""

    data: TrainingData = dataclasses.field(default_factory=TrainingData)
    trainer: TrainingRun = dataclasses.field(default_factory=TrainingRun)

    @property
    def sequences_of_step(self) -> int:
        """Returns the sequences that a step trains on."""
        return self.data.train_batch_size


@dataclasses.dataclass(frozen=True)
class Loop(Common):
    """The settings of a learner with an engine, without those of what is learned: a user's loop has the rest."""

    model: Model = dataclasses.field(default_factory=Model)
    data: Prompts = dataclasses.field(default_factory=Prompts)
    actor: Actor = dataclasses.field(default_factory=Actor)
    critic: Critic = dataclasses.field(default_factory=Critic)
    ref: Ref = dataclasses.field(default_factory=Ref)
    rollout: Rollout = dataclasses.field(default_factory=Rollout)

    @property
    def sequences_of_step(self) -> int:
        """Returns the sequences that a step usually samples."""
        return self.actor.ppo_mini_batch_size * self.rollout.n

    @property
    def users_algorithm(self) -> tuple[str, Options]:
        """Returns the name of a user's algorithm, or '', and its options."""
        return "", Options()


@dataclasses.dataclass(frozen=True)
class Settings(Loop, Training):
    """The settings of PPO training."""

    data: Data = dataclasses.field(default_factory=Data)
    algorithm: Algorithm = dataclasses.field(default_factory=Algorithm)
    reward: RewardSection = dataclasses.field(default_factory=RewardSection)
    trainer: Trainer = dataclasses.field(default_factory=Trainer)

    @property
    def sequences_of_step(self) -> int:
        """Returns the sampled trajectories of a step."""
        return self.data.train_batch_size * self.rollout.n

    @property
    def memory_chooses(self) -> bool:
        """Whether a setting is left to what fits the memory."""
        return self.model.remat == "auto" or self.actor.max_tokens_per_device == -1

    @property
    def users_algorithm(self) -> tuple[str, Options]:
        """Returns the name of a user's algorithm, or '', and its options."""
        return self.algorithm.extension, self.algorithm.options


@dataclasses.dataclass(frozen=True)
class Supervised(Training):
    """The settings that fine-tuning and reward models share."""

    optim: Optim = dataclasses.field(default_factory=Optim)


@dataclasses.dataclass(frozen=True)
class FineTuning(Supervised):
    """The settings of supervised fine-tuning."""

    model: Model = dataclasses.field(default_factory=Model)
    data: Demonstrations = dataclasses.field(default_factory=Demonstrations)


@dataclasses.dataclass(frozen=True)
class Paired(Supervised):
    """The settings that reward models and DPO share."""

    data: TestedData = dataclasses.field(default_factory=TestedData)
    trainer: TestedRun = dataclasses.field(default_factory=TestedRun)


@dataclasses.dataclass(frozen=True)
class PreferenceTuning(Paired):
    """The settings of DPO."""

    model: Model = dataclasses.field(default_factory=Model)
    dpo: Dpo = dataclasses.field(default_factory=Dpo)


@dataclasses.dataclass(frozen=True)
class PairTraining(Paired):
    """The settings of reward model training."""

    loss: Loss = dataclasses.field(default_factory=Loss)


Table = dict[str, Setting]  # by dotted name
S = TypeVar("S", bound=Section)
C = TypeVar("C", bound=Common)

PPO: Table = dict(settings_by_name(Settings))
SFT: Table = dict(settings_by_name(FineTuning))
REWARD_MODEL: Table = dict(settings_by_name(PairTraining))
DPO: Table = dict(settings_by_name(PreferenceTuning))
TABLE: Table = PPO | SFT | REWARD_MODEL | DPO


def config_of(kind: type[Common]) -> ml_collections.ConfigDict:
    """Returns the settings of a command with their defaults, as configs, command lines and sweeps change them."""
    config = ml_collections.ConfigDict()
    for name, setting in settings_by_name(kind):
        *sections, leaf = name.split(".")
        node = config
        for section in sections:
            if section not in node:
                node[section] = ml_collections.ConfigDict()
            node = node[section]
        node[leaf] = config_dict.placeholder(setting.type) if setting.optional else setting.default
    config.lock()
    if issubclass(kind, Settings):
        with config.algorithm.unlocked():
            config.algorithm.options = ml_collections.ConfigDict(type_safe=False)
        config.algorithm.options.unlock()  # whose names follow from algorithm.extension
    return config


def default() -> ml_collections.ConfigDict:
    """Returns all settings of PPO training with their defaults; names are verl's where the meaning is verl's."""
    return config_of(Settings)


def sft_default() -> ml_collections.ConfigDict:
    """Returns all settings of supervised fine-tuning; sections and names as for PPO, with one optimizer in `optim`."""
    return config_of(FineTuning)


def reward_model_default() -> ml_collections.ConfigDict:
    """Returns all settings of reward model training: fine-tuning, held-out pairs and the pair loss."""
    return config_of(PairTraining)


def dpo_default() -> ml_collections.ConfigDict:
    """Returns all settings of DPO: fine-tuning, held-out pairs and the pair loss."""
    return config_of(PreferenceTuning)


def kind_of(config: Container[str]) -> type[Common]:
    """Returns the type of the settings that a config of any training command has, also as dicts."""
    for section, kind in (("rollout", Settings), ("loss", PairTraining), ("dpo", PreferenceTuning)):
        if section in config:
            return kind
    return FineTuning


def training_command(config: Container[str]) -> str:
    """Returns the training command that a config is of."""
    names = {Settings: "train", FineTuning: "sft", PairTraining: "reward_model", PreferenceTuning: "dpo"}
    return f"jppo.{names[kind_of(config)]}"


def sections(config: ml_collections.ConfigDict, kind: type[S]) -> S:
    """Returns a config as frozen sections, without a check of its values."""
    hints, values = typing.get_type_hints(kind), dict[str, Any]()
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if hint is Options:
            values[field.name] = Options(config.to_dict().get(field.name, {}))
            continue
        value = config[field.name]
        if isinstance(value, ml_collections.ConfigDict):
            value = sections(value, hint)
        elif type(value) is int and float in (hint, *typing.get_args(hint)):
            value = float(value)
        values[field.name] = value
    return kind(**values)


def optimizers(config: Common) -> dict[str, Optimizer]:
    """Returns the sections with an optimizer by name."""
    if isinstance(config, Loop):
        return {"actor": config.actor, "critic": config.critic}
    return {"optim": config.optim} if isinstance(config, Supervised) else {}


def value_of(config: Section, name: str) -> Any:
    """Returns the value of a setting by its dotted name."""
    return functools.reduce(getattr, name.split("."), config)


def changed(config: C, changes: dict[str, Any]) -> C:
    """Returns the settings with changes by dotted name."""
    for name, new in changes.items():
        config = _changed(config, name.split("."), new)
    return config


def _changed(section: S, path: list[str], new: Any) -> S:
    first, *rest = path
    return dataclasses.replace(section, **{first: _changed(getattr(section, first), rest, new) if rest else new})


def as_dict(config: ml_collections.ConfigDict | Section) -> dict[str, Any]:
    """Returns settings as nested dicts."""
    nested: dict[str, Any] = (
        config.to_dict() if isinstance(config, ml_collections.ConfigDict) else dataclasses.asdict(config)
    )
    return nested


def dump(config: ml_collections.ConfigDict | Section) -> str:
    return json.dumps(as_dict(config), indent=2) + "\n"


def by_name(config: ml_collections.ConfigDict | Section | dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns every setting's value by its dotted name, from settings or the contents of a config.json."""
    values: dict[str, Any] = {}
    for name, value in (config if isinstance(config, dict) else as_dict(config)).items():
        if isinstance(value, dict):
            values |= by_name(value, f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = value
    return values
