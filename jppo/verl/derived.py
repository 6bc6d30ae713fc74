"""jppo's settings that follow from several of verl's keys, and verl's keys that follow from a jppo config."""

from collections.abc import Callable, Mapping
from typing import Any

from jppo.verl.lookup import MICRO, Look, longest, off_or, on_each, reward_model
from jppo.verl.name import key_of


def _room(look: Look) -> int | None:
    """Returns a default that holds the longest sequence if no micro-batch size is set, where verl refuses to run."""
    said = look("A.use_dynamic_bsz") or any(look(key) for key in MICRO)
    return None if said else max(16384, on_each(look, 1))


def _weights(look: Look) -> str | None:
    factor = off_or(look("OVERLONG.penalty_factor"), 1.0)
    own = {"rm_score": 1.0} if reward_model(look) else {}
    if look("FUNCTION.path"):
        own = {"function_score": 1.0}
    if look("OVERLONG.enable") and look("OVERLONG.len"):
        own = {**(own or {"rule_score": 1.0}), "length_score": float(factor)}
    return ",".join(f"{part}={weight:g}" for part, weight in own.items()) or None


def _all_read(look: Look) -> int | None:
    return longest(look) if reward_model(look) and not look("RM.max_length") else None


# Settings that follow from several keys, and why; None: jppo's own default. The keys are those that decide, for an
# override on top of a jppo config.
FOLLOWING: dict[str, tuple[Callable[[Look], Any], str, str]] = {
    "actor.max_tokens_per_device": (_room, "", "nothing is said of micro-batches"),
    "mesh.data": (lambda look: 1 if look("A.fsdp_config.fsdp_size") == -1 else -1, "A.fsdp_config.fsdp_size",
      "fsdp_size=-1 has the model in as many parts as there are devices"),
    "reward.weights": (_weights, "RM.enable FUNCTION.path OVERLONG.enable",
      "verl's reward model scores alone, the overlong penalty is taken off by its factor"),
    "reward.sandbox": (lambda look: "container" if look("BOX.url") else None, "BOX.url",
      "reward.sandbox_fusion.url names a service"),
    "model.lora_alpha": (lambda look: 32 if look("M.lora.rank") else None, "M.lora.rank",
      "32 is the default of Megatron's adapters"),
    "reward.model.max_length": (_all_read, "RM.enable", "verl's reward model reads all of prompt and response"),
    "rollout.logp_tolerance": (lambda look: 0.5 if look("R.dtype") != "float32" else None, "R.dtype",
      "two engines in less than float32 round differently"),
    "trainer.run_dir": (
      lambda look: None if look("trainer.default_local_dir") else f"runs/{look('trainer.experiment_name')}",
      "trainer.experiment_name", "a folder by the experiment's name"),
}  # fmt: skip

# For overrides on top of a jppo config: conversions that leave a value as it is, and keys without such a setting.
UNCHANGED = (
    "as_is", "dtype", "drawn", "engine", "in_turns", "off", "overlong", "top_k", "train_dtype", "warmup_steps",
    "with_model",
)  # fmt: skip
OF_CONFIG: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], Any]] = {
    key_of("A.use_dynamic_bsz"): lambda _, values: not any(key_of(key) in values for key in MICRO),
    key_of("RM.enable"): lambda config, _: bool(config["reward.model.path"]),
    key_of("OVERLONG.enable"): lambda config, _: config["reward.overlong_buffer_tokens"] > 0,
    key_of("FUNCTION.path"): lambda config, _: config["reward.function"].partition(":")[0],
}
