"""One setting: default, meaning, unit, choices, bounds, and the check of a single value; and sections of them.

A section is a frozen dataclass whose fields are made by `setting`:

    lr: float = setting(1e-6, "Learning rate", bounds="[0,")

Also the names that TRL, OpenRLHF and Hugging Face's trainers have for jppo's settings, for errors about unknown names.
"""

import dataclasses
import math
import re
import typing
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeVar

from jppo.errors import UserError
from jppo.registry import Registry, did_you_mean
from jppo.settings.options import Options

LARGEST = (2 - 2**-23) * 2.0**127  # float32's: the device computes in it
MOST = 2**31 - 1  # int32's: the device counts in it
MOST_BYTES = 2**63 - 1
Value = bool | int | float | str | tuple[float, ...] | None
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Setting:
    """A setting of a command. A default of None may be set to a value and follows another setting until then."""

    name: str  # dotted, as on the command line
    default: Value
    meaning: str  # a noun, the effect, special values
    unit: str = ""
    choices: Collection[str | int] = ()  # a Registry also takes PATH.py:NAME and MODULE:NAME
    bounds: str = ""  # an interval: '[0, 1)', '(0,'; of a tuple's elements; '' for any number
    off: int | None = None  # a special value outside the bounds
    kind: type | None = None  # of the value where the default is None
    only: str = ""  # the condition under which it is read: 'a.b', 'a.b=x', 'a.b!=x'; '' for always
    required: bool = False  # must not be empty
    infinite: bool = False  # may be an infinity
    form: Callable[[str], object] | None = None  # parses a text; raises UserError

    @property
    def type(self) -> type:
        """The type of a value that is not None."""
        return type(self.default) if self.kind is None else self.kind

    @property
    def optional(self) -> bool:
        """Whether None is a value."""
        return self.default is None

    def check(self, value: Value) -> None:
        """Raises a UserError of one line where the setting cannot have the value."""
        if value is None and self.optional:
            return
        items = tuple(value) if isinstance(value, tuple | list) else (value,)
        numbers = [number for number in items if isinstance(number, int | float)]
        for number in numbers:
            if not abs(number) <= LARGEST and not (self.infinite and abs(number) == math.inf):
                rule = f"a finite number, at most {LARGEST:.3g} in float32"
                raise UserError(f"{self.name}={value} must be {rule}; the default is {self.default!r}")
            largest = MOST_BYTES if self.unit == "bytes" else MOST
            if self.type is int and self.interval[1] is None and abs(number) > largest:
                raise UserError(f"{self.name}={value} must be at most {largest}; the default is {self.default!r}")
        if isinstance(self.default, tuple):
            if len(items) != len(self.default) or len(numbers) != len(items) or any(map(self._broken_rule, numbers)):
                kind = self.allowed().lower() or "numbers"
                raise UserError(f"{self.name}={value} must be {len(self.default)} {kind}, such as {self.default}")
        elif numbers and value != self.off and (rule := self._broken_rule(numbers[0])):
            special = "" if self.off is None else f", or {self.off}"
            raise UserError(f"{self.name}={value} must be {rule}{special}; the default is {self.default!r}")
        if isinstance(value, str):
            self._check_text(value)
        elif self.choices and value not in self.choices:
            raise UserError(f"{self.name}={value!r} is not known; it is one of {', '.join(map(repr, self.choices))}")

    def _check_text(self, value: str) -> None:
        own_value = OTHER_VALUES.get(self.name, {}).get(value)
        if own_value and value not in self.choices:
            raise UserError(f"{self.name}={value!r} is not known; did you mean {own_value!r}?")
        if isinstance(self.choices, Registry):
            self.choices.find(value, self.name)
        elif self.choices and value not in self.choices:
            names = [choice for choice in self.choices if isinstance(choice, str)]
            choices = ", ".join(map(repr, names))
            suggestion = did_you_mean(value, names)
            raise UserError(f"{self.name}={value!r} is not known; it is one of {choices}{suggestion}")
        if self.required and not value:
            raise UserError(f"{self.name} is empty; give a path, as in --config.{self.name}=PATH")
        if self.form is not None:
            self.form(value)

    def _broken_rule(self, number: float) -> str:
        """Returns the first rule of the bounds that the number breaks, or ''."""
        return next((rule for rule, is_kept in self._bound_rules(number) if not is_kept), "")

    def _bound_rules(self, number: float = 0) -> Iterator[tuple[str, bool]]:
        """Yields each bound as a rule for errors, and whether the number keeps it."""
        low, high = self.interval
        if low is not None and self.bounds[0] == "(":
            yield f"above {low}", number > low
        elif low is not None:
            yield f"at least {self.type(low) if self.type in (int, float) else low}", number >= low
        if high is not None:
            yield (f"below {high}", number < high) if self.bounds[-1] == ")" else (f"at most {high}", number <= high)

    @property
    def interval(self) -> tuple[int | None, int | None]:
        """Parses the lower and the upper bound; None for none."""
        if not self.bounds:
            return None, None
        match = re.fullmatch(r"[\[(]([^,]*),\s*([^\])]*)[\])]?", self.bounds)
        assert match is not None, self
        low, high = (int(bound) if bound else None for bound in match.groups())
        return low, high

    def allowed(self) -> str:
        """Returns the rule of a value as a sentence without its full stop; '' if every value of the type is allowed."""
        if self.choices:
            names = [f"`{choice!r}`" if choice == "" else f"`{choice}`" for choice in self.choices]
            custom = ", or `PATH.py:NAME`, or `MODULE:NAME`" if isinstance(self.choices, Registry) else ""
            return f"One of {', '.join(names)}{custom}"
        if isinstance(self.default, tuple):
            return f"Numbers in {self.bounds}" if self.bounds else ""
        rules = " and ".join(rule for rule, _ in self._bound_rules())
        return f"{rules[:1].upper()}{rules[1:]}{'' if self.off is None or not rules else f', or {self.off}'}"


@dataclasses.dataclass(frozen=True)
class Section:
    """A section of settings; its fields are settings or sections."""


def setting(default: T, meaning: str, **about: Any) -> T:
    """Declares a field of a section; `about` are fields of Setting."""
    entry = Setting("", default, meaning, **about)  # type: ignore[arg-type]
    field: T = dataclasses.field(default=default, metadata={"setting": entry})
    return field


def settings_by_name(section: type[Section], prefix: str = "") -> Iterator[tuple[str, Setting]]:
    """Yields the settings of a section and its sections by their dotted names."""
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        name, hint = f"{prefix}{field.name}", hints[field.name]
        if "setting" not in field.metadata:
            yield from () if hint is Options else settings_by_name(hint, f"{name}.")
            continue
        entry: Setting = field.metadata["setting"]
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)] if entry.optional else []
        yield name, dataclasses.replace(entry, name=name, kind=kinds[0] if kinds else None)


# By jppo's setting: the others' names. A name may stand at a setting of PPO and at one of the other commands.
_OTHERS = {
    "model.path": "model model_name model_name_or_path pretrain policy_model actor_model",
    "model.compute_dtype": "bf16 fp16 torch_dtype mixed_precision precision",
    "model.remat": "gradient_checkpointing",
    "model.lora_rank": "lora_r",
    "data.train_files": "data dataset dataset_name train_dataset train_data prompt_data train_file",
    "data.val_files": "eval_dataset val_data eval_data test_data",
    "data.prompt_key": "input_key",
    "data.ground_truth_key": "label_key answer_key solution_key",
    "data.train_batch_size": "batch_size rollout_batch_size generation_batch_size",
    "data.max_prompt_length": "prompt_max_len",
    "data.max_response_length": "max_completion_length response_length generate_max_len max_new_tokens max_tokens",
    "algorithm.adv_estimator": "advantage_estimator estimator algo",
    "algorithm.lam": "lambd gae_lambda",
    "algorithm.kl_coef": "init_kl_coef init_kl kl_penalty_coef",
    "algorithm.norm_adv_by_std_in_grpo": "scale_rewards",
    "algorithm.filter_groups": "dynamic_filtering",
    "actor.lr": "learning_rate lr actor_learning_rate actor_lr",
    "actor.ppo_mini_batch_size": "mini_batch_size minibatch_size num_mini_batches",
    "actor.max_tokens_per_device": "per_device_train_batch_size micro_batch_size micro_train_batch_size"
    " gradient_accumulation_steps",
    "actor.ppo_epochs": "num_ppo_epochs num_iterations max_epochs",
    "actor.clip_ratio": "epsilon cliprange clip_range eps_clip",
    "actor.clip_ratio_high": "epsilon_high eps_clip_high",
    "actor.kl_loss_coef": "beta",
    "actor.grad_clip": "max_grad_norm max_norm",
    "actor.lr_warmup_steps": "warmup_steps",
    "actor.lr_warmup_steps_ratio": "warmup_ratio lr_warmup_ratio",
    "actor.betas": "adam_beta1 adam_beta2 adam_betas",
    "actor.entropy_coeff": "entropy_coef ent_coef entropy_loss_coef",
    "critic.lr": "critic_learning_rate critic_lr value_lr",
    "critic.cliprange_value": "value_clip clip_range_vf",
    "rollout.n": "num_generations n_samples_per_prompt num_samples group_size",
    "rollout.name": "use_vllm",
    "rollout.servers": "vllm_num_engines",
    "rollout.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "rollout.tensor_model_parallel_size": "vllm_tensor_parallel_size tensor_parallel_size",
    "rollout.sleep_level": "vllm_enable_sleep colocate_all_models",
    "reward.function": "reward_funcs reward_function reward_fn remote_rm_url",
    "reward.model.path": "reward_pretrain reward_model reward_model_path",
    "mesh.fsdp": "zero_stage fsdp",
    "trainer.run_dir": "output_dir save_path ckpt_path out_dir",
    "trainer.total_epochs": "num_epochs epochs num_train_epochs num_episodes n_epochs",
    "trainer.total_training_steps": "max_steps steps num_steps total_steps",
    "trainer.save_freq": "save_steps",
    "trainer.test_freq": "eval_steps",
    "trainer.max_ckpt_to_keep": "save_total_limit max_ckpt_num",
    "trainer.logger": "report_to use_wandb",
    "trainer.experiment_name": "run_name exp_name",
    "trainer.resume_mode": "resume_from_checkpoint load_checkpoint",
    "optim.lr": "learning_rate lr",
    "optim.grad_clip": "max_grad_norm max_norm",
    "optim.lr_warmup_steps": "warmup_steps",
    "optim.lr_warmup_steps_ratio": "warmup_ratio lr_warmup_ratio",
    "optim.max_tokens_per_device": "per_device_train_batch_size micro_batch_size gradient_accumulation_steps",
    "dpo.beta": "beta",
}
OTHER_NAMES: dict[str, list[str]] = {}
for _setting, _names in _OTHERS.items():
    for _name in _names.split():
        OTHER_NAMES.setdefault(_name, []).append(_setting)

OTHER_VALUES = {
    "algorithm.adv_estimator": {
        "ppo": "gae",
        "reinforce": "reinforce_plus_plus",
        "reinforce++": "reinforce_plus_plus",
        "group_norm": "grpo",
        "dr_grpo": "grpo",
    },
    "rollout.name": {"hf": "inprocess", "transformers": "inprocess"},
}


def settings_meant(name: str, known: Collection[str]) -> list[str]:
    """Returns the settings that a user may mean by a name of another library, or by a name without its section."""
    leaf = name.rpartition(".")[2]
    others = [setting for setting in OTHER_NAMES.get(leaf, []) if setting in known]
    alike = [setting for setting in known if setting.rpartition(".")[2] == leaf]
    return others or [setting for setting in alike if setting.count(".") == min(other.count(".") for other in alike)]


def explain_unknown_setting(name: str, siblings: Iterable[str], known: Collection[str]) -> str:
    """Returns the text of an error about an unknown setting; `siblings` are names in its section, `known` all names."""
    siblings, meant = {*siblings} - {name}, settings_meant(name, known)
    near_names = [setting.rpartition(".")[2] for setting in meant if setting.rpartition(".")[2] in siblings]
    if near_names or not meant:
        suggestion = f"; did you mean {near_names[0]!r}?" if near_names else did_you_mean(name, siblings)
    else:
        suggestion = f"; did you mean {' or '.join(meant[:3])}?"
    return f"there is no setting {name!r}{suggestion or '; python -m jppo.train --help lists them all'}"
