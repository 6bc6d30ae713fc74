"""Exports a trained model: python -m jppo.export runs/quickstart --out adder

    python -m jppo.export RUN_DIR|CHECKPOINT --out DIR [--best] [--step N] [--merge_lora] [--dtype bfloat16]

RUN_DIR is a run folder, whose newest checkpoint is exported, or RUN_DIR/checkpoints/STEP. DIR is a Hugging Face
directory for transformers, vLLM and python -m jppo.chat, with a model card; for a LoRA run it has only the adapters,
for peft, unless they are merged. A running training is not disturbed: only its files are read.
"""

import argparse
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import huggingface_hub
import jax
from huggingface_hub import constants
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of its HTTP library, whichever that is

from jppo import __version__
from jppo.errors import UserError, escaped, expanded
from jppo.models import hf_write
from jppo.run import trained_model
from jppo.run.trained_model import TrainedPolicy
from jppo.runlog.durable_files import read_jsonl
from jppo.runlog.logger import FILE
from jppo.settings import Parser, exit_on_user_error
from jppo.settings.options import PREFIX

DTYPES = ("float32", "bfloat16", "float16")
HUB_FILES = {".gitattributes"}  # of a repository: created by the hub itself


def export(args: argparse.Namespace) -> list[str]:
    """Reads a trained model, writes it with its card, and uploads it; returns the lines to print."""
    if args.push:
        require_hub(args.push)
    require_free(args.out)
    place = trained_model.find_checkpoint(args.path, step=args.step, best=args.best)
    run = trained_model.run_of(place)
    if trained_model.is_checkpoint(place):
        policy = trained_model.policy_of_checkpoint(place, base=args.base, merge=args.merge_lora, dtype=args.dtype)
    elif args.base:
        raise UserError(f"--base={args.base} is for a checkpoint, and {place} is a model; leave it out")
    else:
        policy = trained_model.policy_of_folder(place, merge=args.merge_lora, dtype=args.dtype)
    if policy.kind == "adapter" and args.dtype:
        raise UserError(f"--dtype={args.dtype}: adapters are float32; add --merge_lora to get a whole model in another")
    try:
        with hf_write.in_place_of(args.out) as tmp:
            policy.write(tmp / "model")
            for file in sorted((tmp / "model").iterdir()):
                file.rename(tmp / file.name)
            (tmp / "model").rmdir()
            notes = write_card(tmp, policy, run, name=args.out.absolute().name)
    except OSError as e:
        raise UserError(
            f"--out={args.out} cannot be written: {e.strerror or e}; use another folder, or make room"
        ) from e
    lines = [f"from              {place}", f"{policy.kind:<17} {args.out}, {policy.dtype}"]
    lines += [f"the card lacks    {note}" for note in notes]
    if args.push:
        lines.append(f"pushed to         {push(args.out, args.push)}")
    return lines


def write_card(out: pathlib.Path, policy: TrainedPolicy, run: pathlib.Path | None, *, name: str) -> list[str]:
    """Writes the model card with the scores up to the step; returns the missing parts of the card, and why."""
    notes: list[str] = [] if policy.settings else ["settings: no readable config.json"]
    if run is None:
        notes.append("scores: the checkpoint is not in a run folder")
    rows = [] if run is None else read_jsonl(run / FILE, notes, "no scores")
    lines = [m for m in rows if isinstance(m.get("step"), int) and (policy.step is None or m["step"] <= policy.step)]
    (out / "README.md").write_text(card(policy, lines, name=name), encoding="utf-8")
    return notes


def require_free(out: pathlib.Path) -> None:
    """UserError if a file or a folder with content is at `out`, which would be overwritten."""
    try:
        exists = out.exists() and (not out.is_dir() or any(out.iterdir()))
    except OSError as e:
        raise UserError(f"--out={out} cannot be read: {e.strerror}; use another folder") from e
    if exists:
        problem = "is not empty" if out.is_dir() else "is a file"
        raise UserError(f"--out={out} {problem}, and is not overwritten; use a new folder, or remove it")


def require_hub(name: str) -> None:
    """UserError if an upload is impossible: invalid name, no network allowed, no login."""
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
        raise UserError(f"--push={name}: use OWNER/NAME, the hub's form of repository names")
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"--push={name}: HF_HUB_OFFLINE is set; unset it, or omit --push")
    if huggingface_hub.get_token() is None:
        raise UserError(f"--push={name}: there is no login; run hf auth login, or set HF_TOKEN")


def push(folder: pathlib.Path, name: str) -> str:
    """Uploads `folder` to an empty repository, creating it if necessary; returns its address."""
    hub = huggingface_hub.HfApi()
    try:
        hub.create_repo(name, private=True, exist_ok=True)
        files = sorted(set(hub.list_repo_files(name)) - HUB_FILES)
        if files:
            raise UserError(
                f"--push={name}: it already holds {files[0]} and {len(files) - 1} more; use another, or empty it"
            )
        hub.upload_folder(folder_path=folder, repo_id=name, commit_message="Exported by jppo")
    except (HTTPError, OSError, ValueError) as e:
        reason = str(e).strip().partition("\n")[0]
        raise UserError(f"--push={name}: {constants.ENDPOINT} refused it ({reason}); the files are in {folder}") from e
    return f"{constants.ENDPOINT}/{name}"


def export_arguments(argv: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = Parser("jppo.export", __doc__)
    parser.add_argument("path", type=expanded, metavar="RUN_DIR|CHECKPOINT", help="the source")
    parser.add_argument("--out", type=expanded, required=True, metavar="DIR", help="a folder that is not there yet")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step, not the newest")
    parser.add_argument("--best", action="store_true", help="the checkpoint in checkpoints/best.json")
    parser.add_argument("--merge_lora", action="store_true", help="a whole model in place of its adapters")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: as in training)")
    parser.add_argument("--base", metavar="DIR", help="the new place of the run's model.path, if it was moved")
    parser.add_argument("--push", metavar="OWNER/NAME", help="also upload to the Hugging Face hub")
    args = parser.parse_args(argv)
    if args.best and args.step is not None:
        raise UserError(f"--best and --step={args.step} each select a checkpoint; use one of them")
    return args


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """Exports the model of a run or a checkpoint and prints where it is."""
    args = export_arguments(sys.argv[1:] if argv is None else argv)
    jax.config.update("jax_platforms", "cpu")  # nothing is computed, and a training may use the accelerator
    for line in export(args):
        print(escaped(line))


# Settings listed in a card; empty and disabled ones are left out.
OF_PPO = (
    "algorithm.adv_estimator",
    "algorithm.extension",
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
    "data.prompt_role",
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
MAYBE_PATHS = ("reward.function", "algorithm.adv_estimator", "algorithm.extension", "actor.loss_mode")
OFF: tuple[Any, ...] = (None, "", False, [], ())

Lines = Sequence[Mapping[str, Any]]


def card(policy: TrainedPolicy, lines: Lines, *, name: str) -> str:
    """Returns a model card in Markdown; `lines` are of metrics.jsonl up to the policy's step."""
    settings = policy.settings
    by_ppo = not any(setting.startswith("optim.") for setting in settings)
    method, tag = "supervised fine-tuning", "sft"
    if by_ppo:
        method, tag = "PPO", "reinforcement-learning"
    elif "dpo.beta" in settings:
        method, tag = "DPO", "dpo"
    base = str(settings.get("model.path", ""))
    is_adapter = policy.kind == "adapter"
    contents = "LoRA adapters, to be loaded with their base" if is_adapter else f"Weights in {policy.dtype}"
    last_step = policy.step if policy.step is not None else lines[-1]["step"] if lines else None
    step_text = "" if last_step is None else f" after step {last_step}"
    parts = [
        _front_matter(base, tag, is_adapter=is_adapter),
        f"# {name}",
        f"{contents}, trained by {method} with jppo{step_text}.",
        _facts(base, policy),
    ]
    if scores := _score_table(lines):
        parts += ["## Scores", scores]
    if rows := _setting_table(settings, OF_PPO if by_ppo else OF_SFT):
        parts += ["## Settings", rows]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(base: str, tag: str, *, is_adapter: bool) -> str:
    """Returns the card's first lines, the metadata that the hub reads."""
    hub_name = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", base) and not pathlib.Path(base).is_dir()
    lines = [
        "---",
        f"library_name: {'peft' if is_adapter else 'transformers'}",
        "pipeline_tag: text-generation",
        *([f"base_model: {base}"] if hub_name else []),
        f"tags: [jppo, {tag}]",
        "---",
    ]
    return "\n".join(lines)


def _facts(base: str, policy: TrainedPolicy) -> str:
    """Returns base model, data and versions as a Markdown list."""
    train_files, val_files = (policy.settings.get(f"data.{name}") or "" for name in ("train_files", "val_files"))
    facts = {
        "base model": _public(base),
        "training data": _public_names(train_files),
        "test data": _public_names(val_files),
        "trained by": ", ".join(f"{package} {version}" for package, version in policy.versions.items()),
        "exported by": f"jppo {__version__}",
    }
    return "\n".join(f"- {about}: {_escape_markdown(value)}" for about, value in facts.items() if value)


def _public_names(names: str) -> str:
    return ", ".join(_public(name.strip()) for name in names.split(",") if name.strip())


def _public(path: str) -> str:
    """Returns a path for publication: the last part of a local one."""
    return pathlib.PurePath(path).name if path.startswith(("/", "~")) else path


def _score_table(lines: Lines) -> str:
    """Returns the metrics of the first and last test as a Markdown table; '' without a test."""
    tests = [line for line in lines if line.get("val/score") is not None]
    if not tests:
        return ""
    first, last = tests[0], tests[-1]
    names = [name for name in last if re.fullmatch(r"val/(.+/)?(score|(pass|maj|best|mean)@\d+)", name)]
    rows = [f"| `{name}` | {_format_number(first.get(name))} | {_format_number(last.get(name))} |" for name in names]
    heading = f"| test | after step {first['step']} | after step {last['step']} |"
    return "\n".join([heading, "|---|---:|---:|", *rows])


def _format_number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _setting_table(settings: Mapping[str, Any], names: Sequence[str]) -> str:
    """Returns these settings and user-defined options, unless they are off, as a Markdown table; '' without any."""
    rows = []
    for name in (*names, *(name for name in settings if name.startswith(PREFIX)), *OF_BOTH):
        value = settings.get(name)
        if any(value is disabled or (value == disabled and type(value) is type(disabled)) for disabled in OFF):
            continue
        if name in ONLY_WITH and not settings.get(ONLY_WITH[name]):
            continue
        if name in ONLY_GAE and not _may_have_critic(settings):
            continue
        rows.append(f"| `{name}` | {_escape_markdown(_public_names(str(value)) if name in MAYBE_PATHS else value)} |")
    return "\n".join(["| setting | value |", "|---|---|", *rows]) if rows else ""


def _may_have_critic(settings: Mapping[str, Any]) -> bool:
    estimator = settings.get("algorithm.adv_estimator")
    return estimator == "gae" or ":" in f"{estimator}{settings.get('algorithm.extension')}"  # a user-defined one may


def _escape_markdown(value: Any) -> str:
    """Escapes a value for a table or list: one line, no Markdown."""
    return re.sub(r"([|`*_<\[\]])", r"\\\1", " ".join(str(value).split()))


if __name__ == "__main__":
    main()
