"""The settings of a custom loop: from the arguments of `jppo.open`, by the table of `jppo.train`."""

import tempfile
from collections.abc import Mapping
from typing import Any

from jppo import settings
from jppo.errors import UserError
from jppo.registry import did_you_mean
from jppo.settings import Settings, table

UNUSED = "unused"  # where jppo.train needs a file of prompts
DATA: tuple[str, ...] = ("max_prompt_length", "max_response_length", "packing", "row_lengths", "max_tokens_per_row")
DATA += ("system_prompt", "apply_chat_template_kwargs")
TRAINER = ("seed", "run_dir", "compile_cache", "total_training_steps")
READ = {"model", "mesh", "actor", "critic", "ref", "rollout", *(f"data.{x}" for x in DATA)}
READ |= {f"trainer.{x}" for x in TRAINER}
# Settings of sections in READ that belong to jppo.train's own loop.
LOOP: tuple[str, ...] = ("model.lora_dropout", "actor.ppo_epochs", "actor.shuffle", "actor.positive_lm_coef", "ref.url")
LOOP += ("critic.ppo_epochs", "critic.shuffle", "critic.warmup_epochs", "critic.ppo_mini_batch_size", "critic.lam")
LOOP += ("critic.value_norm_decay", "rollout.mode", "rollout.max_staleness", "rollout.on_update", "rollout.partial")
LOOP += ("rollout.agent", "rollout.multi_turn", "rollout.val_kwargs", "rollout.max_kl_jump", "rollout.routing_replay")
LOOP += ("rollout.history", "rollout.agent_branches", "rollout.sleep_level")


def make_settings(
    path: str,
    *,
    mesh: Mapping[str, int] | None,
    lora: int | Mapping[str, Any] | None,
    critic: bool | str | Mapping[str, Any] | None,
    engine: str | Mapping[str, Any] | None,
    given: Mapping[str, Any],
) -> Settings:
    """Returns the checked settings; raises UserError for a setting that a custom loop does not read."""
    config, wanted = settings.default(), dict[str, Any]()
    wanted |= _flat(given) | _flat({"mesh": mesh or {}}) | {"model.path": path}
    if lora is not None:
        adapters = {"rank": lora} if isinstance(lora, int) else dict(lora)
        names = {"rank": "lora_rank", "alpha": "lora_alpha", "adapter_path": "lora_adapter_path"}
        wanted |= {f"model.{names.get(name, name)}": value for name, value in adapters.items()}
    if isinstance(critic, str):
        wanted["critic.path"] = critic
    elif isinstance(critic, Mapping):
        wanted |= _flat({"critic": critic})
    if isinstance(engine, str):
        by_url = "://" in engine
        wanted |= {"rollout.urls": engine} if by_url else {"rollout.name": engine}
    elif isinstance(engine, Mapping):
        wanted |= _flat({"rollout": engine})
    elif engine is None:
        wanted.setdefault("rollout.name", "inprocess")
    for name, value in wanted.items():
        _require_read(name)
        try:
            config.update_from_flattened_dict({name: value})
        except (TypeError, ValueError) as e:
            kind = table.TABLE[name].type.__name__
            raise UserError(f"{name}={value!r} is of type {type(value).__name__}; give a {kind}") from e
    config.data.train_files = config.data.val_files = UNUSED
    config.data.train_batch_size = config.actor.ppo_mini_batch_size  # which bounds the rows of a micro-batch
    config.algorithm.adv_estimator = "reinforce_plus_plus" if critic in (None, False) else "gae"
    if any(name.startswith("ref.") for name in wanted) and not config.actor.use_kl_loss:
        config.algorithm.use_kl_in_reward = True  # there is a reference, for the loop's own KL
    if "trainer.run_dir" not in wanted:
        config.trainer.run_dir = tempfile.mkdtemp(prefix="jppo-")  # of the servers' logs
    c: Settings = settings.typed(config, Settings)
    _require_steps(c)
    return c


def _flat(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings by dotted names, from sections as dicts or from such names."""
    found = dict[str, Any]()
    for name, value in sections.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{leaf}": x for leaf, x in _flat(value).items()}
        else:
            found[name] = value
    return found


def _require_read(name: str) -> None:
    if name not in table.PPO:
        raise UserError(
            f"jppo.open: there is no setting {name!r}; give settings by section, as in actor=dict(lr=1e-6)"
            f"{did_you_mean(name, table.PPO)}"
        )
    section = name.partition(".")[0]
    read = section in READ or name in READ
    if not read or any(name == one or name.startswith(f"{one}.") for one in LOOP):
        raise UserError(f"jppo.open: {name} is of the loop of jppo.train, which your loop replaces; leave it out")


def _require_steps(c: Settings) -> None:
    """Raises UserError for a schedule over all steps, whose number is not given."""
    for name, section in settings.optimizers(c).items():
        by_ratio = section.lr_warmup_steps == -1 and section.lr_warmup_steps_ratio > 0
        if (section.lr_scheduler_type == "cosine" or by_ratio) and c.trainer.total_training_steps == -1:
            raise UserError(
                f"{name}.lr_scheduler_type={section.lr_scheduler_type!r} needs the number of steps; give"
                " trainer=dict(total_training_steps=N)"
            )
