"""Settings: every default, the checks that need no device, and the command-line edge that turns faults into one line.

`default()` is the one place of a default. A file in `configs/` starts from it and sets what differs. Nothing below the
commands (`train.py`, `sft.py` ...) sees a config: they read it and pass scalars on.
"""

import functools
import json
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_flags

CHOICES = {
    "model.init": ("pretrained", "random"),
    "model.compute_dtype": ("float32", "bfloat16"),
    "model.param_dtype": ("float32", "bfloat16"),
    "model.remat": ("none", "dots", "full"),
    "data.packing": ("auto", "segments", "buckets", "none"),
    "algorithm.adv_estimator": ("gae",),
    "algorithm.kl_penalty": ("kl", "k1", "low_var_kl", "k3"),
    "actor.kl_loss_type": ("kl", "k1", "low_var_kl", "k3"),
    "actor.lr_scheduler_type": ("constant", "cosine"),
    "optim.lr_scheduler_type": ("constant", "cosine"),
    "critic.lr_scheduler_type": ("constant", "cosine"),
    "rollout.name": ("vllm",),
    "rollout.dtype": ("float32", "bfloat16", "float16"),
}
# Lower bounds; a setting that is not here may be any number of its type.
AT_LEAST = {
    "model.logprob_chunk_bytes": 1,
    "data.train_batch_size": 1,
    "data.max_prompt_length": 1,
    "data.max_response_length": 1,
    "data.row_lengths": 1,
    "algorithm.gamma": 0.0,
    "algorithm.lam": 0.0,
    "algorithm.kl_coef": 0.0,
    "actor.lr": 0.0,
    "actor.ppo_mini_batch_size": 1,
    "actor.ppo_epochs": 1,
    "actor.clip_ratio": 0.0,
    "actor.kl_loss_coef": 0.0,
    "actor.lr_warmup_steps": 0,
    "actor.weight_decay": 0.0,
    "optim.lr": 0.0,
    "critic.lr": 0.0,
    "critic.ppo_epochs": 1,
    "critic.cliprange_value": 0.0,
    "optim.lr_warmup_steps": 0,
    "critic.lr_warmup_steps": 0,
    "optim.weight_decay": 0.0,
    "critic.weight_decay": 0.0,
    "rollout.n": 1,
    "rollout.servers": 1,
    "rollout.port": 0,
    "rollout.max_num_seqs": 1,
    "rollout.omp_threads": 1,
    "rollout.logp_tolerance": 0.0,
    "trainer.total_epochs": 1,
    "trainer.max_ckpt_to_keep": 1,
    "trainer.seed": 0,
    "trainer.log_val_generations": 0,
    "actor.min_lr_ratio": 0.0,
    "critic.min_lr_ratio": 0.0,
    "optim.min_lr_ratio": 0.0,
}
ABOVE_ZERO = (
    "actor.grad_clip",
    "critic.grad_clip",
    "optim.grad_clip",
    "rollout.temperature",
    "rollout.start_timeout_s",
    "rollout.request_timeout_s",
    "rollout.gpu_memory_utilization",
    "rollout.kv_cache_memory_bytes",
)
OFF_OR_POSITIVE = (  # -1 is off
    "data.val_max_samples",
    "trainer.total_training_steps",
    "trainer.save_freq",
    "trainer.test_freq",
)
AT_MOST_ONE = (
    "algorithm.gamma",
    "algorithm.lam",
    "rollout.gpu_memory_utilization",
    "actor.min_lr_ratio",
    "critic.min_lr_ratio",
    "optim.min_lr_ratio",
)
OPTIM = ("grad_clip", "betas", "weight_decay", "lr_scheduler_type", "lr_warmup_steps", "min_lr_ratio")
SHAPE_SETTINGS = (
    "max_prompt_length",
    "max_response_length",
    "packing",
    "row_lengths",
    "max_tokens_per_row",
)


class UserError(Exception):
    """Something that the user can mend: one line of value, rule and remedy. Commands print it and exit with 2."""


def default() -> ml_collections.ConfigDict:
    """All settings of PPO training with their defaults; verl's names where they mean what verl's mean."""
    c = ml_collections.ConfigDict
    optim = dict(
        grad_clip=1.0,
        betas=(0.9, 0.999),
        weight_decay=0.01,
        lr_scheduler_type="constant",
        lr_warmup_steps=0,
        min_lr_ratio=0.0,
    )
    config = c()
    config.model = c(
        dict(
            path="",  # an HF directory, or a hub name
            init="pretrained",  # or 'random': only config.json and the tokenizer are read
            compute_dtype="float32",
            param_dtype="float32",
            scan_layers=True,  # False compiles slower and runs faster on CPU
            remat="none",  # none, dots, full
            logprob_chunk_bytes=2**29,  # log-probs are computed chunk by chunk: the logits of one
        )
    )
    config.data = c(
        dict(
            train_files="",  # parquet or jsonl, several separated by commas
            val_files="",
            train_batch_size=256,  # prompts a step
            val_max_samples=-1,  # -1: all
            max_prompt_length=1024,
            max_response_length=512,
            filter_overlong_prompts=True,  # False: an over-long prompt is an error
            shuffle=True,
            packing="auto",  # buckets; or segments, which pays with a fused attention only; or none
            row_lengths=4,  # buckets: how many lengths of row, each one more shape to compile
            max_tokens_per_row=-1,  # segments: the length of a row; -1: of the longest prompt and response
        )
    )
    config.algorithm = c(
        dict(
            adv_estimator="gae",
            gamma=1.0,
            lam=1.0,
            use_kl_in_reward=False,
            kl_penalty="kl",
            kl_coef=0.001,
        )
    )
    config.actor = c(
        dict(
            lr=1e-6,
            ppo_mini_batch_size=64,  # sequences
            ppo_epochs=1,
            clip_ratio=0.2,
            entropy_coeff=0.0,
            use_kl_loss=False,
            kl_loss_coef=0.001,
            kl_loss_type="low_var_kl",
            max_tokens_per_device=16384,  # of a micro-batch
            **optim,
        )
    )
    config.critic = c(dict(path="", lr=1e-5, cliprange_value=0.5, ppo_epochs=1, **optim))  # path '': the policy's
    config.rollout = c(
        dict(
            name="vllm",
            python="",  # the interpreter that has vLLM; '' is the trainer's own
            urls="",  # attach to running servers, separated by commas, and start none
            servers=1,
            port=0,  # of the first server, the others follow; 0 takes free ones
            n=1,
            temperature=1.0,
            dtype="float32",
            enforce_eager=True,
            max_num_seqs=256,
            gpu_memory_utilization=0.4,  # on a GPU
            kv_cache_memory_bytes=268435456,  # on a CPU
            omp_threads=1,  # on a CPU
            start_timeout_s=300.0,
            request_timeout_s=600.0,
            publish_dir="",  # '': nameless shared memory; a folder that both see when the server is in a container
            logp_tolerance=1e-3,  # largest |trainer - sampler| log-prob before step 1
        )
    )
    config.reward = c(dict(grader=""))  # '': chosen by each row's data_source
    config.trainer = c(
        dict(
            run_dir="runs/run",
            seed=1,
            total_epochs=1,
            total_training_steps=-1,  # -1: by epochs
            save_freq=-1,  # steps; -1 saves at the end only
            test_freq=-1,
            val_before_train=True,
            log_val_generations=8,  # samples shown in the console at each test
            resume_mode="auto",  # auto, disable, or a checkpoint's path
            max_ckpt_to_keep=2,
        )
    )
    config.mesh = c(dict(data=-1, fsdp=1, tensor=1))  # -1 takes the devices that are left
    return config.lock()


def sft_default() -> ml_collections.ConfigDict:
    """All settings of supervised fine-tuning; sections and names as for PPO, with one optimizer in `optim`."""
    ppo = default()
    c = ml_collections.ConfigDict
    config = c(dict(model=ppo.model, mesh=ppo.mesh))
    config.data = c({k: ppo.data[k] for k in (*SHAPE_SETTINGS, "train_files", "train_batch_size", "shuffle")})
    optim = ("lr", *OPTIM, "max_tokens_per_device")
    config.optim = c({k: ppo.actor[k] for k in optim})
    config.trainer = c({k: ppo.trainer[k] for k in ("run_dir", "seed", "total_epochs", "total_training_steps")})
    return config.lock()


def check(config: ml_collections.ConfigDict) -> None:
    """UserError at the first setting, or pair of settings, that cannot be; touches no file and no device."""
    for name, allowed in CHOICES.items():
        if _has(config, name) and (value := _get(config, name)) not in allowed:
            raise UserError(f"{name}={value!r} is not known; it is one of {', '.join(map(repr, allowed))}")
    for name, least in AT_LEAST.items():
        if _has(config, name) and not (value := _get(config, name)) >= least:
            raise UserError(f"{name}={value} must be at least {least}")
    for name in ABOVE_ZERO:
        if _has(config, name) and not (value := _get(config, name)) > 0:
            raise UserError(f"{name}={value} must be above 0")
    for name in OFF_OR_POSITIVE:
        if _has(config, name) and (value := _get(config, name)) != -1 and value < 1:
            raise UserError(f"{name}={value} must be 1 or more, or -1")
    for name in ("actor.betas", "critic.betas", "optim.betas"):
        if _has(config, name):
            value = _get(config, name)
            if len(value) != 2 or not all(isinstance(b, float) and 0 <= b < 1 for b in value):
                raise UserError(f"{name}={value} must be two numbers in [0, 1), such as (0.9, 0.999)")
    for name in AT_MOST_ONE:
        if _has(config, name) and (value := _get(config, name)) > 1:
            raise UserError(f"{name}={value} must be at most 1")
    for name in ("model.path", "data.train_files", "data.val_files", "trainer.run_dir"):
        if _has(config, name) and not _get(config, name):
            raise UserError(f"{name} is empty; give a path, as in --config.{name}=PATH")
    if "rollout" in config:
        if (last := config.rollout.port + config.rollout.servers - 1) > 65535:
            raise UserError(f"rollout.port={config.rollout.port}: the last server has port {last}, ports end at 65535")
        _check_mini_batch(config)
    _check_lengths(config)


def _check_mini_batch(config: ml_collections.ConfigDict) -> None:
    batch, mini = config.data.train_batch_size * config.rollout.n, config.actor.ppo_mini_batch_size
    if batch % mini:
        fitting = max(d for d in range(1, min(mini, batch) + 1) if batch % d == 0)
        raise UserError(
            f"actor.ppo_mini_batch_size={mini} must divide data.train_batch_size*rollout.n={batch}; try {fitting}"
        )


def _check_lengths(config: ml_collections.ConfigDict) -> None:
    section = "actor" if "actor" in config else "optim"
    longest = config.data.max_prompt_length + config.data.max_response_length
    micro, row = f"{section}.max_tokens_per_device", "data.max_tokens_per_row"
    for name in (row, micro):
        if (value := _get(config, name)) < longest and not (name == row and value == -1):
            raise UserError(
                f"{name}={value} must hold a prompt and a response, data.max_prompt_length"
                f"+data.max_response_length={longest}; try {longest}"
            )
    if _get(config, micro) < _get(config, row):
        raise UserError(f"{micro}={_get(config, micro)} must hold a row, {row}={_get(config, row)}; raise the one")


def _has(config: ml_collections.ConfigDict, name: str) -> bool:
    section, leaf = name.split(".")
    return section in config and leaf in config[section]


def _get(config: ml_collections.ConfigDict, name: str) -> Any:
    section, leaf = name.split(".")
    return config[section][leaf]


def dump(config: ml_collections.ConfigDict) -> str:
    """The resolved settings as JSON."""
    return json.dumps(config.to_dict(), indent=2) + "\n"


def parse(
    argv: list[str], about: str, defaults: ml_collections.ConfigDict
) -> tuple[ml_collections.ConfigDict, dict[str, bool]]:
    """The config named by --config with its overrides, and the switches; a fault is a UserError of one line."""
    values = flags.FlagValues()
    config_flags.DEFINE_config_file(
        "config", None, "a file with get_config()", flag_values=values, sys_argv=["jppo", *argv]
    )
    flags.DEFINE_bool("dry_run", False, "print the resolved settings and stop", flag_values=values)
    if "--help" in argv or "-h" in argv:
        print(f"{about}\nSettings and their defaults:\n{describe(defaults)}")
        sys.exit(0)
    named = [a.split("=", 1)[1] for a in argv if a.startswith("--config=")]
    if len(named) != 1 or not named[0]:
        raise UserError(f"--config is given {len(named)} times; name one file, as in --config=configs/quickstart.py")
    if not pathlib.Path(named[0].split(":")[0]).is_file():
        raise UserError(f"--config={named[0]}: no such file; the project's own are in configs/")
    try:
        rest = values(["jppo", *argv])[1:]
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as e:
        raise UserError(_explain(e, defaults)) from e
    if rest:
        raise UserError(f"{rest[0]!r} is not understood; settings are given as --config.SECTION.NAME=VALUE")
    return values["config"].value, {"dry_run": bool(values["dry_run"].value)}


def _explain(error: Exception, defaults: ml_collections.ConfigDict) -> str:
    """absl's and ml_collections' complaints in one line of value, rule and remedy."""
    text = " ".join(str(error.args[0] if error.args else error).replace('"', "'").split())
    unknown = re.search(r"(\w+)\W+(?:n)?Did you mean '(\w+)'", text)
    if unknown:
        return f"there is no setting {unknown[1]!r}; did you mean {unknown[2]!r}?"
    if isinstance(error, AttributeError | KeyError):
        name = re.sub(r"\W", "", text)
        return f"there is no setting {name!r}; python -m jppo.train --help lists them all"
    typed = re.match(r"flag (--config\.(\w+\.\w+)=.*?): ", text)
    if typed:
        return f"{typed[1]} must be of type {type(_get(defaults, typed[2])).__name__}, as the default is"
    return text


def exit_on_user_error(main: Callable[..., None]) -> Callable[..., None]:
    """Ends a command with exit code 2 and one line where the user can mend what is wrong."""

    @functools.wraps(main)
    def command(*args: Any, **kwargs: Any) -> None:
        try:
            main(*args, **kwargs)
        except UserError as e:
            print(f"error: {e}", file=sys.stderr)
            sys.exit(2)

    return command


def describe(config: ml_collections.ConfigDict) -> str:
    """All settings with their values, one a line, for --help."""
    lines = [f"  --config.{s}.{k}={v!r}" for s, section in config.items() for k, v in section.items()]
    return "\n".join(lines)
