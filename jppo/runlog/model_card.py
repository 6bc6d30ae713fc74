"""The model card of an export, README.md: base model, data, settings, scores. Pure."""

import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

# Settings listed in a card; empty and disabled ones are left out.
OF_PPO = (
    "algorithm.adv_estimator",
    "algorithm.gamma",
    "algorithm.lam",
    "algorithm.use_kl_in_reward",
    "algorithm.kl_coef",
    "algorithm.kl_ctrl_type",
    "actor.lr",
    "actor.lr_scheduler_type",
    "actor.loss_mode",
    "actor.loss_agg_mode",
    "actor.clip_ratio",
    "actor.ppo_mini_batch_size",
    "actor.ppo_epochs",
    "actor.entropy_coeff",
    "actor.use_kl_loss",
    "actor.kl_loss_coef",
    "critic.lr",
    "rollout.n",
    "rollout.temperature",
    "rollout.top_p",
    "reward.grader",
    "reward.function",
)
OF_SFT = ("dpo.loss_type", "dpo.beta", "optim.lr", "optim.lr_scheduler_type", "optim.betas", "optim.weight_decay")
OF_BOTH = (
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "data.mix",
    "data.system_prompt",
    "model.init",
    "model.lora_rank",
    "model.lora_alpha",
    "model.target_modules",
    "trainer.seed",
)
ONLY_WITH = {  # settings that matter only if another one is on
    "algorithm.kl_coef": "algorithm.use_kl_in_reward",
    "algorithm.kl_ctrl_type": "algorithm.use_kl_in_reward",
    "actor.kl_loss_coef": "actor.use_kl_loss",
    "model.lora_rank": "model.lora_rank",
    "model.lora_alpha": "model.lora_rank",
    "model.target_modules": "model.lora_rank",
}
ONLY_GAE = ("algorithm.gamma", "algorithm.lam", "critic.lr")  # say something where there is a critic
MAYBE_PATHS = ("reward.function", "algorithm.adv_estimator", "actor.loss_mode")
OFF: tuple[Any, ...] = (None, "", False, [], ())

Lines = Sequence[Mapping[str, Any]]


def card(
    *,
    name: str,
    kind: str,
    dtype: str,
    step: int | None,
    settings: Mapping[str, Any],
    versions: Mapping[str, str],
    lines: Lines,
    exported_by: str,
) -> str:
    """Returns the card as Markdown; `kind` is 'model' or 'adapter', `lines` are of metrics.jsonl up to the step."""
    by_ppo = not any(setting.startswith("optim.") for setting in settings)
    by_dpo = "dpo.beta" in settings
    how, tag = (
        ("PPO", "reinforcement-learning") if by_ppo else ("DPO", "dpo") if by_dpo else ("supervised fine-tuning", "sft")
    )
    base = str(settings.get("model.path", ""))
    what = "LoRA adapters, to be loaded with their base" if kind == "adapter" else f"weights in {dtype}"
    reached = step if step is not None else lines[-1]["step"] if lines else None
    after = "" if reached is None else f" after step {reached}"
    parts = [
        _front(base, kind, tag),
        f"# {name}",
        f"{what[0].upper()}{what[1:]}, trained by {how} with jppo{after}.",
        _facts(base, settings, versions, exported_by),
    ]
    if scores := _scores(lines):
        parts += ["## Scores", scores]
    if rows := _settings(settings, OF_PPO if by_ppo else OF_SFT):
        parts += ["## Settings", rows]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front(base: str, kind: str, tag: str) -> str:
    """Returns the metadata that the hub reads."""
    hub_name = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", base) and not pathlib.Path(base).is_dir()
    lines = [
        "---",
        f"library_name: {'peft' if kind == 'adapter' else 'transformers'}",
        "pipeline_tag: text-generation",
        *([f"base_model: {base}"] if hub_name else []),
        f"tags: [jppo, {tag}]",
        "---",
    ]
    return "\n".join(lines)


def _facts(base: str, settings: Mapping[str, Any], versions: Mapping[str, str], exported_by: str) -> str:
    files = {about: _files(str(settings.get(f"data.{key}") or "")) for about, key in _DATA.items()}
    trained_by = ", ".join(f"{package} {version}" for package, version in versions.items())
    facts = {"base model": _shown(base)} | files | {"trained by": trained_by, "exported by": f"jppo {exported_by}"}
    return "\n".join(f"- {about}: {_plain(value)}" for about, value in facts.items() if value)


_DATA = {"training data": "train_files", "test data": "val_files"}


def _files(names: str) -> str:
    return ", ".join(_shown(name.strip()) for name in names.split(",") if name.strip())


def _shown(path: str) -> str:
    """Returns a path for publication: the last part of a local one."""
    return pathlib.PurePath(path).name if path.startswith(("/", "~")) else path


def _scores(lines: Lines) -> str:
    """Returns the metrics of the first and last test."""
    tested = [line for line in lines if line.get("val/score") is not None]
    if not tested:
        return ""
    first, last = tested[0], tested[-1]
    names = [n for n in last if re.fullmatch(r"val/(.+/)?(score|(pass|maj|best|mean)@\d+)", n)]
    rows = [f"| `{n}` | {_number(first.get(n))} | {_number(last.get(n))} |" for n in names]
    head = f"| test | after step {first['step']} | after step {last['step']} |"
    return "\n".join([head, "|---|---:|---:|", *rows])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _settings(settings: Mapping[str, Any], names: Sequence[str]) -> str:
    rows = []
    for name in (*names, *OF_BOTH):
        value = settings.get(name)
        if any(value is off or (value == off and type(value) is type(off)) for off in OFF):
            continue
        if name in ONLY_WITH and not settings.get(ONLY_WITH[name]):
            continue
        if name in ONLY_GAE and not _may_have_critic(settings.get("algorithm.adv_estimator")):
            continue
        rows.append(f"| `{name}` | {_plain(_files(str(value)) if name in MAYBE_PATHS else value)} |")
    return "\n".join(["| setting | value |", "|---|---|", *rows]) if rows else ""


def _may_have_critic(estimator: str | None) -> bool:
    return estimator == "gae" or ":" in str(estimator)  # a user-defined one may


def _plain(value: Any) -> str:
    """Escapes a value for a table or list: one line, no Markdown."""
    return re.sub(r"([|`*_<\[\]])", r"\\\1", " ".join(str(value).split()))
