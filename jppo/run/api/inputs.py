"""The inputs of a custom loop: the settings of `jppo.open`'s arguments, and prompts with the options of their sampling.

Settings are those of `jppo.train`, without those of its own loop. A prompt is a text, chat messages, or token ids.
"""

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jppo import settings
from jppo.data.prompts import tokenise, with_system_prompt
from jppo.data.rows import Row, checked_messages, checked_text
from jppo.errors import UserError
from jppo.registry import did_you_mean
from jppo.settings import Loop, table, template_arguments
from jppo.settings.options import PREFIX
from jppo.settings.setting import settings_by_name
from jppo.types import Prompt

TABLE = dict(settings_by_name(Loop))
# Settings of these sections that belong to jppo.train's own loop.
OF_TRAIN: tuple[str, ...] = ("model.lora_dropout", "actor.ppo_epochs", "actor.shuffle", "actor.positive_lm_coef")
OF_TRAIN += ("critic.ppo_epochs", "critic.shuffle", "critic.warmup_epochs", "critic.ppo_mini_batch_size", "critic.lam")
OF_TRAIN += ("critic.value_norm_decay", "ref.url", "rollout.mode", "rollout.max_staleness", "rollout.on_update")
OF_TRAIN += ("rollout.partial", "rollout.agent", "rollout.multi_turn", "rollout.val_kwargs", "rollout.max_kl_jump")
OF_TRAIN += ("rollout.routing_replay", "rollout.history", "rollout.agent_branches", "rollout.sleep_level")
MOST = 2**31 - 1
# Options of `sample` that are numbers: the least and the most.
RANGES: dict[str, tuple[float, float]] = {"n": (1, MOST), "max_tokens": (1, MOST), "temperature": (0.0, 100.0)}
RANGES |= {"top_p": (1e-9, 1.0), "top_k": (-1, MOST), "min_p": (0.0, 1.0), "seed": (0, 2**63 - 1)}
OPTIONS = (*RANGES, "stop", "stop_ids", "ignore_eos")
PromptLike = str | Sequence[Mapping[str, str]] | Sequence[int] | np.ndarray | Prompt


def make_settings(
    path: str,
    sections: Mapping[str, Any],
    *,
    mesh: Mapping[str, int] | None,
    lora: int | Mapping[str, Any] | None,
    critic: bool | str | Mapping[str, Any] | None,
    engine: str | Mapping[str, Any] | None,
) -> Loop:
    """Returns the checked settings of `jppo.open`'s arguments; UserError for one that a custom loop does not read."""
    config, by_name = settings.config_of(Loop), dict[str, Any]()
    by_name |= _flat(sections) | _flat({"mesh": mesh or {}}) | {"model.path": path}
    if lora is not None:
        adapters = {"rank": lora} if isinstance(lora, int) else dict(lora)
        names = {"rank": "lora_rank", "alpha": "lora_alpha", "adapter_path": "lora_adapter_path"}
        by_name |= {f"model.{names.get(name, name)}": value for name, value in adapters.items()}
    if isinstance(critic, str):
        by_name["critic.path"] = critic
    elif isinstance(critic, Mapping):
        by_name |= _flat({"critic": critic})
    if isinstance(engine, str):
        by_url = "://" in engine
        by_name |= {"rollout.urls": engine} if by_url else {"rollout.name": engine}
    elif isinstance(engine, Mapping):
        by_name |= _flat({"rollout": engine})
    elif engine is None:
        by_name.setdefault("rollout.name", "inprocess")
    for name, value in by_name.items():
        _require_loop_setting(name)
        if name.startswith("critic.") and critic in (None, False):
            raise UserError(f"{name}={value!r} is of a critic, and this model has none; open it with critic=dict(...)")
        try:
            config.update_from_flattened_dict({name: value})
        except (TypeError, ValueError) as e:
            kind = TABLE[name].type.__name__
            raise UserError(f"{name}={value!r} is of type {type(value).__name__}; give a {kind}") from e
    c: Loop = settings.typed(config, Loop)
    _require_steps(c)
    return c


def reads_reference(c: Loop, sections: Mapping[str, Any]) -> bool:
    """Whether the log-probs of a reference can be asked for: the loss has a KL, or a setting of `ref` is given."""
    return c.actor.use_kl_loss or any(name.startswith("ref.") for name in _flat(sections))


def _flat(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings by dotted names, from sections as dicts or from such names."""
    by_name = dict[str, Any]()
    for name, value in sections.items():
        if isinstance(value, Mapping):
            by_name |= {f"{name}.{leaf}": x for leaf, x in _flat(value).items()}
        else:
            by_name[name] = value
    return by_name


def _require_loop_setting(name: str) -> None:
    """Raises UserError for a setting that is unknown, or that only `jppo.train`'s own loop reads."""
    known = name in TABLE or name in table.PPO or name.startswith(PREFIX)
    if not known:
        raise UserError(
            f"jppo.open: there is no setting {name!r}; give settings by section, as in actor=dict(lr=1e-6)"
            f"{did_you_mean(name, table.PPO)}"
        )
    if name not in TABLE or any(name == one or name.startswith(f"{one}.") for one in OF_TRAIN):
        raise UserError(f"jppo.open: {name} is of the loop of jppo.train, which your loop replaces; leave it out")


def _require_steps(c: Loop) -> None:
    """Raises UserError for a schedule over all steps, whose number is not given."""
    for name, section in settings.optimizers(c).items():
        by_ratio = section.lr_warmup_steps == -1 and section.lr_warmup_steps_ratio > 0
        if (section.lr_scheduler_type != "constant" or by_ratio) and c.trainer.total_training_steps == -1:
            raise UserError(
                f"{name}.lr_scheduler_type={section.lr_scheduler_type!r} needs the number of steps; give"
                " trainer=dict(total_training_steps=N)"
            )


def require_sampling(options: Mapping[str, Any], *, limits: Mapping[str, int], vocabulary: int) -> None:
    """Raises UserError for an option of `sample` that is unknown or outside its range; `limits` lower some maxima."""
    for name, value in options.items():
        if name not in OPTIONS:
            raise UserError(f"sample({name}=...) is no option; use {', '.join(OPTIONS)}")
        if name in RANGES:
            low, high = RANGES[name][0], limits.get(name, RANGES[name][1])
            integer = isinstance(low, int)
            if not _is_number(value, integer) or not low <= value <= high:
                whole = "a whole number " if integer else ""
                raise UserError(f"{name}={value} must be {whole}from {low} to {high}; correct it")
        elif name == "ignore_eos":
            if not isinstance(value, bool):
                raise UserError(f"ignore_eos={value!r} must be True or False")
        elif not isinstance(value, list | tuple):
            raise UserError(f"{name}={value!r} must be a list; write [{value!r}]")
        else:
            for one in value:
                text = name == "stop" and isinstance(one, str) and one
                token = name == "stop_ids" and _is_number(one, True) and 0 <= one < vocabulary
                if not text and not token:
                    raise UserError(
                        f"stop={str(one)[:60]!r} is neither a text nor a token from 0 to {vocabulary - 1}; correct it"
                    )


def _is_number(value: Any, integer: bool) -> bool:
    return isinstance(value, numbers.Integral if integer else numbers.Real) and not isinstance(value, bool)


def make_prompts(c: Loop, tokenizer: Any, prompt_likes: Sequence[PromptLike], vocabulary: int) -> list[Prompt]:
    """Tokenises prompts as jppo.train does; prompts and token ids stay as they are."""
    if isinstance(prompt_likes, str) or not len(prompt_likes):
        raise UserError(f"prompts={prompt_likes!r}; give a list of texts, of chat messages or of token ids")
    prompts: list[Prompt | None] = [
        prompt if isinstance(prompt, Prompt) else _prompt_of_ids(prompt, i) for i, prompt in enumerate(prompt_likes)
    ]
    texts = [i for i, prompt in enumerate(prompts) if prompt is None]
    rows = {i: Row("prompts", i + 1, {}, "prompt") for i in texts}
    messages = [_check_messages(c, rows[i], prompt_likes[i]) for i in texts]
    arguments = template_arguments(c.data.apply_chat_template_kwargs)
    ids = tokenise(messages, [rows[i] for i in texts], tokenizer, (), arguments) if texts else []
    for i, content, tokens in zip(texts, messages, ids, strict=True):
        prompts[i] = Prompt(str(i), "unknown", content, np.asarray(tokens, np.int32), "", {})
    all_prompts = [prompt for prompt in prompts if prompt is not None]
    for i, prompt in enumerate(all_prompts):
        if not 1 <= len(prompt.ids) <= c.data.max_prompt_length:
            raise UserError(
                f"prompt {i + 1} has {len(prompt.ids)} tokens; it must have 1 to data.max_prompt_length="
                f"{c.data.max_prompt_length}: cut it, or open the model with data=dict(max_prompt_length=...)"
            )
        if min(prompt.ids) < 0 or max(prompt.ids) >= vocabulary:
            raise UserError(f"prompt {i + 1} has a token outside of 0 to {vocabulary - 1}; take the model's tokenizer")
    return all_prompts


def _prompt_of_ids(prompt: Any, number: int) -> Prompt | None:
    """Returns a prompt of token ids; None for a text or messages."""
    if isinstance(prompt, str) or (isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping)):
        return None
    ids = np.asarray(prompt)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise UserError(f"prompt {number + 1} is {prompt!r:.60}; give a text, chat messages or token ids")
    return Prompt(str(number), "unknown", "", ids.astype(np.int32), "", {})


def _check_messages(c: Loop, row: Row, prompt: Any) -> str | list[dict[str, str]]:
    """Returns a text or chat messages with the system prompt of the settings; raises UserError for other values."""
    if isinstance(prompt, str) and c.data.prompt_role:
        prompt = [{"role": c.data.prompt_role, "content": checked_text(row, "it", prompt)}]
    messages = checked_text(row, "it", prompt) if isinstance(prompt, str) else checked_messages(row, "it", list(prompt))
    return with_system_prompt(messages, c.data.system_prompt, row)
