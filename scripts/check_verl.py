"""Runs jppo.from_verl on verl's own scripts and compares with bash and with Hydra.

    python scripts/check_verl.py DIR [DIR ...] [--verbose] [--match TEXT]

A DIR is a checkout of verl, of its recipes after that, or of a fork; scripts run in copies. A script counts if, under
bash with stand-ins for its programs, it starts one trainer. Scripts that print their usage get `8`, or
`8 /tmp/checkpoints`. Prints a row for each checkout, and a table: arguments equal to those under bash, exit codes, and
the translations with exit code 0 whose settings are not those that Hydra composes from the YAML in the checkout, by the
meaning that their names had in that version. The last needs the package hydra-core.
"""

import argparse
import collections
import contextlib
import dataclasses
import math
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from jppo import from_verl, settings
from jppo.errors import UserError
from jppo.settings import table

STAND_INS = (
    "accelerate apt-get chmod conda curl deepspeed git hf huggingface-cli ifconfig ip kubectl ninja npu-smi nsys"
)
STAND_INS += (
    " numactl nvcc nvidia-smi pip pip3 pkill ps python python3 ray sbatch scontrol sleep srun ssh sudo torchrun"
)
STAND_INS += " uv wandb wget"
TOOLS = (
    "awk basename bash cat cp cut date dirname env expr find grep head hostname ls mkdir mktemp nohup readlink realpath"
)
TOOLS += " rm sed seq sh sort tail tee timeout touch tr uname wc xargs"
RECORD = """#!/bin/bash
case "${0##*/} $*" in "nvidia-smi "*query-gpu=*|"nvidia-smi -L"*) printf 'GPU\n%.0s' 1 2 3 4 5 6 7 8 ;; esac
case ${0##*/} in python*) case $1 in -c|-|"") exec PYTHON -I -S "$@" ;; esac ;; esac
printf '%s\\0' "${0##*/}" "$@" > "$(mktemp "$CALLS/XXXXXXXX")"
"""
TIME_S = 10
OTHERS = ("main_eval", "main_generation", "main_generation_server")  # no trainers
USAGES = ([], ["8"], ["8", "/tmp/checkpoints"])
DATES = re.compile(r"\d{8}_\d{4,6}|\d{6,}|\d{4}-\d\d-\d\d|\d\d([-_:.]\d\d)+")


@dataclasses.dataclass
class Result:
    """A script, what it starts under bash, and what became of it."""

    name: str
    main: str
    words: list[str]
    launcher: list[str]  # the words before the trainer, as torchrun's
    same: bool = False  # as from_verl's
    code: int = -1
    errors: str = ""
    command: str = ""
    wrong: dict[str, tuple[Any, Any]] | None = None  # settings and Hydra's; None: not composed
    starts: bool = True  # verl itself would start it: its YAML is there, and it gives the paths and numbers

    @property
    def tunes(self) -> bool:
        return "sft_trainer" in self.main

    @property
    def counts(self) -> bool:
        """Whether it is neither of a vision or audio model nor of another trainer."""
        return "not supported: another trainer" not in self.errors and "models read text" not in self.errors


def make_programs(work: pathlib.Path) -> None:
    """Makes the folder of programs that scripts find under bash."""
    (work / "bin").mkdir()
    for name in STAND_INS.split():
        (work / "bin" / name).write_text(RECORD.replace("PYTHON", os.path.realpath(sys.executable)))
        (work / "bin" / name).chmod(0o755)
    for name in TOOLS.split():
        if program := shutil.which(name):
            (work / "bin" / name).symlink_to(program)
    (work / "home").mkdir()
    (work / "home").chmod(0o777)


def under_bash(script: pathlib.Path, arguments: list[str], root: pathlib.Path, work: pathlib.Path) -> list[list[str]]:
    """Returns the commands that a script starts under bash, as an unprivileged user if this one is root."""
    calls = pathlib.Path(tempfile.mkdtemp(dir=work))
    calls.chmod(0o777)
    nobody: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    command = [shutil.which("bash") or "bash", str(script), *arguments]
    environment = {"HOME": f"{work}/home", "PATH": f"{work}/bin", "CALLS": str(calls)}
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=root, env=environment, start_new_session=True, **quiet, **nobody) as process:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TIME_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
    files = sorted(calls.iterdir(), key=lambda file: file.stat().st_mtime_ns)
    return [file.read_text(errors="replace").split("\0")[:-1] for file in files]


def trainer_of(call: list[str]) -> tuple[str, tuple[str, ...], tuple[str, ...]] | None:
    """Returns the module and the arguments of a trainer, and the words before it."""
    for i, word in enumerate(call):
        main = call[i + 1] if word == "-m" and i + 1 < len(call) else word if word.endswith(".py") else ""
        if main and not main.endswith((".distributed.run", ".distributed.launch", ".commands.launch")):
            main = main.removesuffix(".py").removeprefix("./").replace("/", ".")
            named = re.search(r"(^|[._])(main\w*|\w*_main\w*|\w*trainer\w*|launch)$", main)
            rest = call[i + (2 if word == "-m" else 1) :]
            trains = named and any(re.match(r"[+~]*[\w.@]+\.[\w.]+=", argument) for argument in rest)
            return (main, tuple(rest), tuple(call[:i])) if trains else None
    return None


def scripts_of(root: pathlib.Path, work: pathlib.Path, match: str = "") -> Iterator[Result]:
    """Yields the scripts of a checkout that start one trainer, translated."""
    for file in sorted(root.rglob("*.sh")):
        if match not in str(file.relative_to(root)):
            continue
        for arguments in USAGES:
            trainers = [trainer for call in under_bash(file, arguments, root, work) if (trainer := trainer_of(call))]
            trainers = list(dict.fromkeys(trainer for trainer in trainers if not trainer[0].endswith(OTHERS)))
            if trainers:
                break
        if len(trainers) == 1:
            main, words, launcher = trainers[0]
            result = Result(f"{root.name}/{file.relative_to(root)}", main, list(words), list(launcher))
            _translate(result, file, arguments)
            yield result


def _translate(result: Result, file: pathlib.Path, arguments: list[str]) -> None:
    try:
        script = from_verl.read_arguments([str(file), *arguments])
        words = [DATES.sub("#", word) for word in (script.main, *script.words)]
        result.same = words == [DATES.sub("#", word) for word in (result.main, *result.words)]
        output = from_verl.translate_script(script)
        result.command, result.errors = output.text, "\n".join(output.missing)
        result.code = from_verl.LEFT_OUT if output.missing else 0
    except UserError as e:
        result.code, result.errors = 2, str(e)


def homes_of(root: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the folders of a checkout that have verl in them."""
    for pattern in ("verl", "*/verl", "*/*/verl"):
        yield from (path.parent for path in sorted(root.glob(pattern)) if (path / "trainer/config").is_dir())


def composed(result: Result, root: pathlib.Path, verl: pathlib.Path) -> Any:
    """Returns what Hydra makes of the arguments under bash, over verl's YAML; an exception where it cannot."""
    import hydra
    from omegaconf import OmegaConf

    options: dict[str, str] = {}
    words, rest = list(result.words), []
    while words:
        word = words.pop(0)
        if word.startswith("--config-"):
            key, equals, value = word.partition("=")
            options[key] = value if equals else words.pop(0)
        else:
            rest.append(word)
    parts = result.main.split(".")[:-1]
    places = [
        place
        for folder in dict.fromkeys((root, verl, *homes_of(root), *sorted(root.parent.iterdir())))
        for place in (folder / "/".join(parts), folder / "/".join(parts[1:]))
    ]
    usual = {"main_dapo": "dapo_trainer", "fully_async_main": "fully_async_ppo_trainer"}
    usual |= {"sft_trainer": "sft_trainer_engine", "sft_trainer_ray": "sft_trainer_engine"}
    usual |= {"fsdp_sft_trainer": "sft_trainer"}
    name = usual.get(result.main.split(".")[-1], "ppo_trainer")
    name = "one_step_off_ppo_trainer" if "one_step_off" in result.main else name
    name = options.get("--config-name", name).strip("'\"").removesuffix(".yaml")
    homes = [place for place in places if parts and (place / "config").is_dir()]
    home = next((place for place in homes if (place / f"config/{name}.yaml").is_file()), [*homes, root][0])
    path = pathlib.Path(home, options.get("--config-path", "config").strip("'\""))
    search = f"hydra.searchpath=[file://{verl}/verl/trainer/config]"
    with hydra.initialize_config_dir(config_dir=str(path.resolve()), version_base=None):
        try:
            config = hydra.compose(config_name=name, overrides=[*rest, search])
        except Exception:  # keys of another version, or values that its grammar has quoted
            rest = [
                re.sub(r"^\+*([\w.]+=)(<.*>)?(?=.*$)", r"++\1'\2'" if "=<" in override else r"++\1", override)
                for override in rest
            ]
            config = hydra.compose(config_name=name, overrides=[*rest, search])
    OmegaConf.set_struct(config, False)
    if not result.tunes:
        _as_run(config, verl, home, result.main)
        _as_today(config, verl)
    return config


def _as_run(config: Any, verl: pathlib.Path, home: pathlib.Path, main: str) -> None:
    """Gives the keys that a trainer's code reads in place of others today's names: its batch, filter and clips."""
    from omegaconf import OmegaConf

    def code(*files: pathlib.Path) -> str:
        return re.sub(r"(?m)^\s*#.*", "", "".join(file.read_text() for file in files if file.is_file()))

    trainer, workers = verl / "verl/trainer", verl / "verl/workers"
    is_v1 = "trainer.use_v1" in code(trainer / "main_ppo.py") and main.endswith("trainer.main_ppo")
    is_v1 = is_v1 and bool(_select(config, "trainer.use_v1"))
    files = (trainer / "ppo/v1").glob("*.py") if is_v1 else [*home.glob("*.py"), trainer / "ppo/ray_trainer.py"]
    loop = code(*files)
    has_reward_loop = any((verl / "verl/experimental").rglob("reward_loop"))
    if _select(config, "algorithm.filter_groups.enable") and not re.search(r"algorithm\.(get\(.)?filter_groups", loop):
        OmegaConf.update(config, "algorithm.filter_groups.enable", False)
    keeps = is_v1 or _select(config, "algorithm.filter_groups.enable") or _select(config, "async_training")
    if (loaded := _select(config, "data.gen_batch_size")) and "gen_batch_size" in loop and not keeps:
        OmegaConf.update(config, "data.train_batch_size", loaded)
    own = code(home / f"{main.rpartition('.')[2]}.py")
    if own and "reward_model.overlong_buffer" not in own + code(trainer / "ppo/reward.py"):
        OmegaConf.update(config, "reward_model.overlong_buffer", None)
    elif "reward_model.overlong_buffer" in own and "reward_kwargs" not in own and not has_reward_loop:
        OmegaConf.update(config, "reward_model.reward_kwargs", None)
    for section, file in (("actor_rollout_ref.actor", "actor/dp_actor.py"), ("critic", "critic/dp_critic.py")):
        is_older = "self.config.grad_clip" in code(workers / file)
        engine = _select(config, f"{section}.strategy") or "fsdp"
        if is_older and "fsdp" in engine and _select(config, "trainer.use_legacy_worker_impl") != "disable":
            clip = _select(config, f"{section}.grad_clip")
            OmegaConf.update(config, f"{section}.optim.clip_grad", 1.0 if clip is None else clip)


_LATER = (  # what verl's code did before its YAML had the key
    "data.shuffle=True data.truncation=error data.filter_overlong_prompts=True trainer.val_before_train=True"
    " A.optim.weight_decay=0.01 A.optim.betas=[0.9,0.999] A.clip_ratio_c=10000.0 A.loss_agg_mode=token-mean"
    " A.policy_loss.loss_mode=vanilla A.use_kl_loss=False A.kl_loss_coef=0.001 A.kl_loss_type=low_var_kl"
    " A.fsdp_config.model_dtype=fp32 A.strategy=fsdp A.shuffle=False R.n=1"
    " R.val_kwargs.n=1 R.val_kwargs.temperature=0 R.val_kwargs.top_p=1.0 algorithm.norm_adv_by_std_in_grpo=True"
    " data.reward_fn_key=data_source critic.optim.weight_decay=0.01"
)


def _as_today(config: Any, verl: pathlib.Path) -> None:
    """Gives a config of an older verl the keys and the meanings of verl 0.9.1, from its keys and its workers."""
    from omegaconf import OmegaConf

    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    is_older = _select(config, "algorithm.use_kl_in_reward") is None
    tests = _select(config, f"{rollout}.val_kwargs")
    code = "".join(file.read_text() for file in sorted((verl / "verl/workers").rglob("fsdp_workers.py")))
    trainer, dataset, losses = (
        re.sub(r"(?m)^\s*#.*", "", file.read_text()) if (file := verl / "verl" / name).is_file() else ""
        for name in ("trainer/ppo/ray_trainer.py", "utils/dataset/rl_dataset.py", "trainer/ppo/core_algos.py")
    )
    for word in _LATER.split():
        key, _, value = word.replace("A.", f"{actor}.", 1).replace("R.", f"{rollout}.", 1).partition("=")
        if _select(config, key) is None:
            filters = "filter" not in key or "<= self.max_prompt_length" in dataset
            OmegaConf.update(config, key, OmegaConf.from_dotlist([f"x={value if filters else False}"]).x)
    groups = (f"{rollout}.n_agent", "data.n_samples", "agent_grpo.n")
    group = math.prod(int(_select(config, key) or 1) for key in groups)
    mini = int(_select(config, f"{actor}.ppo_mini_batch_size"))
    n = int(_select(config, f"{rollout}.n"))
    responses = mini * (1 if is_older and "actor.ppo_mini_batch_size *= self.config.rollout.n" not in code else n)
    batch = int(_select(config, "data.train_batch_size") or 0) * n * group  # 0 where an asynchronous trainer counts
    OmegaConf.update(config, "oracle.mini", min(responses, batch or responses))
    OmegaConf.update(config, f"{rollout}.n", n * group)
    rollouts = "".join(file.read_text() for file in sorted((verl / "verl/workers/rollout").rglob("*rollout*.py")))
    if "vf_loss = agg_loss(" in losses:  # of the squares, not of their halves
        OmegaConf.update(config, "critic.optim.clip_grad", _select(config, "critic.optim.clip_grad") / 2)
    reads = "if not do_sample" in rollouts and _select(config, f"{rollout}.mode") != "async"
    if reads and not (tests and tests.get("do_sample")):
        OmegaConf.update(config, f"{rollout}.val_kwargs.temperature", 0)
    if is_older:
        calls = re.search(r"= apply_kl_penalty\(", trainer) and not _select(config, f"{actor}.use_kl_loss")
        OmegaConf.update(config, "algorithm.use_kl_in_reward", bool(calls))
        for end in ("low", "high"):
            clip = _select(config, f"{actor}.clip_ratio_{end}")
            if clip is not None and clip >= 0:
                continue
            OmegaConf.update(config, f"{actor}.clip_ratio_{end}", _select(config, f"{actor}.clip_ratio"))


def _select(config: Any, key: str) -> Any:
    from omegaconf import OmegaConf

    try:
        return OmegaConf.select(config, key)
    except Exception:
        return None


_DTYPES = {"fp32": "float32", "bf16": "bfloat16", None: "bfloat16"}


def expected(config: Any, main: str) -> dict[str, Any]:
    """Returns jppo's settings for a composed PPO config, from verl's documentation of its keys alone."""

    def get(key: str, usual: Any = None) -> Any:
        value = _select(config, key)
        return usual if value is None else value

    def text(key: str) -> str:
        value = get(key, "")
        return ",".join(map(str, value)) if not isinstance(value, str) else value

    a, r, m, c = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model", "critic"
    engine = get(f"{a}.strategy", "fsdp")
    engine = engine if engine in ("megatron", "veomni", "torchtitan") else "fsdp_config"
    n, mini = int(get(f"{r}.n")), int(get(f"{a}.ppo_mini_batch_size"))
    longest = int(get("data.max_prompt_length")) + int(get("data.max_response_length"))
    gpus, nodes = int(get("trainer.n_gpus_per_node")), int(get("trainer.nnodes"))
    fully = get("async_training.trigger_parameter_sync_step")
    meets = int(fully or 1)
    rates = int(get("trainer.v1.separate_async.parameter_sync_step", 1)
      if get("trainer.v1.trainer_mode") == "separate_async" else meets)  # fmt: skip
    batch = mini * int(get("async_training.require_batches", 1)) if fully else int(get("data.train_batch_size"))
    sequence = int(get(f"{a}.ulysses_sequence_parallel_size", 1))
    if engine == "megatron":
        sequence = int(get(f"{a}.megatron.context_parallel_size", 1))
    if engine == "veomni":
        sequence = int(get(f"{a}.veomni.ulysses_parallel_size", sequence))
    elif engine == "fsdp_config":
        sequence = max(sequence, int(get(f"{a}.fsdp_config.ulysses_sequence_parallel_size", 1)))
    need = math.ceil(longest / sequence)
    micro = get(f"{a}.ppo_micro_batch_size_per_gpu")
    if get(f"{a}.use_dynamic_bsz"):
        tokens = max(int(get(f"{a}.ppo_max_token_len_per_gpu")), need)
    elif micro is not None:
        tokens = max(need, math.ceil(int(micro) * longest / sequence))
    else:
        tokens = None
    estimator = get("algorithm.adv_estimator")
    alone = n == 1 and estimator in ("grpo", "rloo", "opo")
    distils = get("distillation.enabled", False)
    apart = bool(get("rollout.nnodes") or get(f"{r}.nnodes"))
    correction = "algorithm.rollout_correction"
    corrects = any(get(f"{correction}.{kind}") not in (None, "none") for kind in ("rollout_is", "rollout_rs"))
    older = get("async_training.use_rollout_log_probs") and not get("async_training.compute_prox_log_prob")
    bypass = get(f"{correction}.bypass_mode", False) or older
    reinforces = bypass and get(f"{correction}.loss_type") == "reinforce"
    turn = f"{r}.multi_turn"
    size = int(get(f"{a}.fsdp_config.fsdp_size", -1))
    asynchronous = bool(fully or get("rollout.nnodes") or get("trainer.v1.trainer_mode", "sync") != "sync")
    greedy = float(get(f"{r}.val_kwargs.temperature", 0)) == 0
    steps = int(get("trainer.total_training_steps", 0) or 0)
    if fully and not steps:
        steps = int(get("rollout.total_rollout_steps", 0)) // (batch * meets)
    every = {"save_freq": get("trainer.save_freq", -1), "test_freq": get("trainer.test_freq", -1)}
    if "rollout.test_freq" in main:
        every["test_freq"] = get("rollout.test_freq")
    every = {key: int(value) for key, value in every.items() if isinstance(value, int | float)}
    experts = 1
    if engine in ("megatron", "veomni"):
        names = {"megatron": "expert_model_parallel_size", "veomni": "expert_parallel_size"}
        experts = int(get(f"{a}.{engine}.{names[engine]}", 1))
    wanted: dict[str, Any] = {
        "data.train_files": text("data.train_files"),
        "data.val_files": text("data.val_files"),
        "data.train_batch_size": batch * meets,
        "data.max_prompt_length": int(get("data.max_prompt_length")),
        "data.max_response_length": int(get("data.max_response_length")),
        "data.filter_overlong_prompts": bool(get("data.filter_overlong_prompts")),
        "data.truncation": "error" if get("data.filter_overlong_prompts") else get("data.truncation"),
        "data.shuffle": bool(get("data.shuffle")),
        "data.prompt_key": get("data.prompt_key"),
        "data.reward_fn_key": get("data.reward_fn_key"),
        "model.path": get(f"{m}.path"),
        "model.lora_rank": int(get(f"{m}.lora_rank", 0) or get(f"{m}.lora.rank", 0)),
        "model.remat": "full" if get(f"{m}.enable_gradient_checkpointing") else "none",
        "actor.lr": float(get(f"{a}.optim.lr")),
        "actor.weight_decay": float(get(f"{a}.optim.weight_decay")),
        "actor.betas": tuple(map(float, get(f"{a}.optim.betas"))),
        "actor.grad_clip": float(get(f"{a}.optim.clip_grad", 1.0)),
        "actor.lr_warmup_steps": max(-1, round(int(get(f"{a}.optim.lr_warmup_steps", -1)) / rates)) or -1,
        "actor.ppo_mini_batch_size": get("oracle.mini"),
        "actor.ppo_epochs": int(get(f"{a}.ppo_epochs")),
        "actor.shuffle": bool(get(f"{a}.shuffle")),
        "actor.clip_ratio_low": float(get(f"{a}.clip_ratio_low")),
        "actor.clip_ratio_high": float(get(f"{a}.clip_ratio_high")),
        "actor.clip_ratio_c": float(get(f"{a}.clip_ratio_c")),
        "actor.loss_mode": "gpg" if reinforces else get(f"{a}.policy_loss.loss_mode").replace("bypass_mode", "vanilla"),
        "actor.loss_agg_mode": get(f"{a}.loss_agg_mode"),
        "actor.entropy_coeff": float(get(f"{a}.entropy_coeff")),
        "actor.use_kl_loss": bool(get(f"{a}.use_kl_loss")),
        "actor.kl_loss_coef": float(get(f"{a}.kl_loss_coef")),
        "actor.kl_loss_type": get(f"{a}.kl_loss_type"),
        "actor.param_offload": bool(get(f"{a}.{engine}.param_offload")),
        "ref.param_offload": bool(get(f"actor_rollout_ref.ref.{engine}.param_offload")),
        "rollout.name": {"hf": "inprocess"}.get(get(f"{r}.name"), get(f"{r}.name").removesuffix("_async")),
        "rollout.n": n,
        "rollout.temperature": float(get(f"{r}.temperature")),
        "rollout.top_p": float(get(f"{r}.top_p")),
        "rollout.top_k": int(get(f"{r}.top_k")) if int(get(f"{r}.top_k")) > 0 else -1,
        "rollout.tensor_model_parallel_size": int(get(f"{r}.tensor_model_parallel_size")),
        "rollout.gpu_memory_utilization": float(get(f"{r}.gpu_memory_utilization")),
        "rollout.enforce_eager": bool(get(f"{r}.enforce_eager")),
        "rollout.max_num_seqs": int(get(f"{r}.max_num_seqs")),
        "rollout.dtype": get(f"{r}.dtype"),
        "rollout.val_kwargs.temperature": float(get(f"{r}.val_kwargs.temperature")),
        "rollout.val_kwargs.n": int(get(f"{r}.val_kwargs.n")),
        "rollout.mode": "async" if asynchronous else "sync",
        "algorithm.adv_estimator": "reinforce_no_baseline" if alone else estimator,
        "algorithm.gamma": float(get("algorithm.gamma")),
        "algorithm.lam": float(get("algorithm.lam")),
        "algorithm.norm_adv_by_std_in_grpo": bool(get("algorithm.norm_adv_by_std_in_grpo")),
        "algorithm.use_kl_in_reward": bool(get("algorithm.use_kl_in_reward")),
        "algorithm.kl_penalty": get("algorithm.kl_penalty"),
        "algorithm.kl_coef": float(get("algorithm.kl_ctrl.kl_coef")),
        "algorithm.old_logprob": "bypass" if bypass else "correction" if corrects else "decoupled",
        "algorithm.filter_groups": bool(get("algorithm.filter_groups.enable", False)) and not fully,
        "trainer.total_epochs": int(get("rollout.total_epochs") or get("trainer.total_epochs")),
        "trainer.total_training_steps": steps or -1,
        "trainer.val_before_train": bool(get("trainer.val_before_train")),
        "trainer.project_name": get("trainer.project_name"),
        "mesh.sequence": sequence,
        "mesh.tensor": int(get(f"{a}.megatron.tensor_model_parallel_size", 1)) if engine == "megatron" else 1,
        "mesh.expert": math.gcd(experts, max(1, gpus * nodes // sequence
          // (int(get(f"{a}.megatron.tensor_model_parallel_size", 1)) if engine == "megatron" else 1))),
    }  # fmt: skip
    wanted |= {f"trainer.{key}": value if value > 0 else -1 for key, value in every.items()}
    if engine == "veomni":
        wanted["actor.lr_warmup_steps"] = -1  # it reads the ratio alone
    schedules = ("warmup_style", "lr_scheduler_type", "lr_decay_style", "decay_type")
    wanted["actor.lr_scheduler_type"] = next(value for schedule in schedules if (value := get(f"{a}.optim.{schedule}")))
    if tokens:
        wanted["actor.max_tokens_per_device"] = tokens
    if engine == "fsdp_config":
        wanted["actor.optimizer_offload"] = bool(get(f"{a}.fsdp_config.optimizer_offload"))
        wanted["model.param_dtype"] = _DTYPES.get(
            get(f"{a}.fsdp_config.model_dtype"), get(f"{a}.fsdp_config.model_dtype")
        )
        wanted["mesh.fsdp"] = -1 if size < 0 or size >= gpus * nodes else max(1, size // sequence)
        wanted["mesh.data"] = 1 if wanted["mesh.fsdp"] == -1 else -1
    if get(f"{turn}.enable") and get(f"{turn}.tool_config_path"):
        wanted["rollout.multi_turn.tool_config_path"] = get(f"{turn}.tool_config_path")
        wanted["rollout.multi_turn.max_assistant_turns"] = int(get(f"{turn}.max_assistant_turns", -1))
    path = get("custom_reward_function.path") or get("reward.custom_reward_function.path")
    name = get("custom_reward_function.name") or get("reward.custom_reward_function.name", "compute_score")
    wanted["reward.function"] = f"{path}:{name}" if path else ""
    managers = (get("reward_model.reward_manager"), get("reward_manager.name"), get("reward.reward_manager.name"))
    places = ("reward.reward_kwargs", "reward_model.reward_kwargs", "reward_model")
    buffers = [
        (buffer, int(get(f"{place}.max_resp_len") or get("data.max_response_length")))
        for place in places
        for name in ("overlong_buffer_cfg", "overlong_buffer")
        if (buffer := get(f"{place}.{name}")) and buffer.enable and "dapo" in managers
    ]
    wanted["reward.overlong_buffer_tokens"] = 0
    for buffer, end in buffers[:1]:
        # The reward falls by penalty_factor in len tokens, before and behind max_resp_len.
        tokens = int(get("data.max_response_length")) - (end - int(buffer.len))
        score = "function_score" if path else "rm_score" if get("reward_model.enable") else "rule_score"
        wanted["reward.overlong_buffer_tokens"] = tokens
        wanted["reward.weights"] = f"{score}=1,length_score={buffer.penalty_factor * tokens / buffer.len:g}"
    if wanted["model.lora_rank"] and not wanted["actor.param_offload"]:
        del wanted["ref.param_offload"]  # the reference is the policy's own base
    if "trainer.default_local_dir" in main and get("trainer.default_local_dir"):
        wanted["trainer.run_dir"] = get("trainer.default_local_dir")
    if "trainer.experiment_name" in main:
        wanted["trainer.experiment_name"] = get("trainer.experiment_name")
    if not apart:
        wanted["trainer.nnodes"] = nodes
    if not apart and wanted["rollout.name"] != "inprocess":
        wanted["rollout.servers"] = max(1, gpus // int(get(f"{r}.tensor_model_parallel_size")))
    if not greedy:
        wanted["rollout.val_kwargs.top_p"] = float(get(f"{r}.val_kwargs.top_p"))
    if corrects and (reinforces or not bypass):
        wanted["algorithm.rollout_is"] = get(f"{correction}.rollout_is") or "none"
    if estimator == "gae":
        wanted |= {
            "critic.grad_clip": float(get(f"{c}.optim.clip_grad", 1.0)),
            "critic.lr": float(get(f"{c}.optim.lr")),
            "critic.weight_decay": float(get(f"{c}.optim.weight_decay")),
            "critic.ppo_epochs": int(get(f"{c}.ppo_epochs")),
            "critic.cliprange_value": float(get(f"{c}.cliprange_value")),
            "trainer.critic_warmup": max(0, int(get("trainer.critic_warmup")) - 1),
        }
    if distils:
        for key in ("algorithm.adv_estimator", "algorithm.gamma", "algorithm.use_kl_in_reward", "algorithm.kl_coef",
          "actor.use_kl_loss", "actor.kl_loss_coef", "actor.kl_loss_type"):  # fmt: skip
            del wanted[key]
        wanted["ref.path"] = get("distillation.teacher_models.teacher_model.model_path")
    return wanted


def expected_tuning(config: Any, words: str, launcher: str) -> dict[str, Any]:
    """Returns jppo's settings for a composed fine-tuning config, from verl's two trainers and their YAML."""

    def get(key: str, usual: Any = None) -> Any:
        value = _select(config, key)
        return usual if value is None else value

    older = get("model.partial_pretrain") is not None  # fsdp_sft_trainer
    kind = "fsdp" if older else get("engine._target_").rpartition(".")[2].removesuffix("EngineConfig").lower()
    names = {  # of each engine: sequence, tensor, expert
      "fsdp": ("ulysses_sequence_parallel_size", "", ""),
      "veomni": ("ulysses_parallel_size", "", "expert_parallel_size"),
      "mcore": ("context_parallel_size", "tensor_model_parallel_size", "expert_model_parallel_size"),
      "torchtitan": ("context_parallel_size", "tensor_parallel_size", "expert_parallel_size"),
      "automodel": ("cp_size", "tp_size", "ep_size"),
    }[kind]  # fmt: skip
    sequence, tensor, expert = (int(get(f"engine.{name}", 1)) if name else 1 for name in names)
    if older:
        sequence = int(get("ulysses_sequence_parallel_size", 1))
    processes = re.search(r" --nproc[-_]per[-_]node[ =](\d+) ", f" {launcher} ")
    devices = int(processes[1]) if processes else int(get("trainer.n_gpus_per_node"))
    longest, lr = int(get("data.max_length")), float(get("optim.lr"))
    need = math.ceil(longest / sequence)
    micro = get("data.micro_batch_size_per_gpu")  # older ones have a number for all GPUs
    tokens = math.ceil(int(micro or 1) * longest / sequence)
    if get("data.use_dynamic_bsz"):
        tokens = int(get("data.max_token_len_per_gpu"))
    size = int(get("engine.fsdp_size", -1))
    if kind == "torchtitan":
        size = int(get("engine.data_parallel_shard_size", 1)) * sequence
    shards = -1 if size < 0 or size >= devices else max(1, size // sequence)
    steps = int(get("optim.lr_warmup_steps", -1))
    ratio = float(get("optim.lr_warmup_steps_ratio", get("optim.warmup_steps_ratio", 0.0)))
    schedules = ("lr_scheduler", "warmup_style", "lr_scheduler_type", "lr_decay_style", "decay_type")
    of_lr = [get(f"optim.{name}", 0.0) / lr for name in ("min_lr", "lr_min", "lr_warmup_init", "lr_start")]
    chats = not older or bool(get("data.multiturn.enable"))
    kept = get("trainer.max_ckpt_to_keep")
    files = get("data.train_files")
    remat = get("engine.activation_checkpointing", False) if kind == "automodel" else get(
      "model.enable_gradient_checkpointing")  # fmt: skip
    modules = get("model.target_modules")
    modules = modules if isinstance(modules, str) else ",".join(modules or ())
    fixed = get("data.pad_mode") == "left_right"  # both lengths are read
    wanted = {
        "data.train_files": files if isinstance(files, str) else ",".join(files),
        "data.train_batch_size": int(get("data.train_batch_size")),
        "data.max_prompt_length": int(get("data.max_prompt_length")) if fixed else longest // 2,
        "data.max_response_length": int(get("data.max_response_length")) if fixed else longest - longest // 2,
        "data.learn_turns": "all" if chats else "last",
        "data.custom_cls": get("data.custom_cls.path", ""),
        "data.shuffle": True,  # both have a DistributedSampler with shuffle=True
        "model.path": get("model.partial_pretrain") if older else get("model.path"),
        "model.lora_rank": int(get("model.lora_rank", 0) or get("model.lora.rank", 0)),
        "model.remat": "full" if remat else "none",
        "model.compute_dtype": get("engine.dtype", "bfloat16"),
        "optim.lr": lr,
        "optim.betas": tuple(map(float, get("optim.betas"))),
        "optim.weight_decay": float(get("optim.weight_decay")),
        "optim.grad_clip": float(get("optim.clip_grad")),
        "optim.lr_warmup_steps": steps if steps > 0 and not older else -1,
        "optim.lr_warmup_steps_ratio": ratio if steps <= 0 or older else 0.0,
        "optim.lr_scheduler_type": next(
            (value for schedule in schedules if (value := get(f"optim.{schedule}"))), "cosine"
        ),
        "optim.min_lr_ratio": float(get("optim.min_lr_ratio", 0.0) or get("optim.min_lr_factor", 0.0))
        or max(of_lr[:2]),
        "optim.init_lr_ratio": float(get("optim.init_lr_ratio", 0.0)) or max(of_lr[2:]),
        "optim.max_tokens_per_device": max(tokens, need),
        "optim.optimizer": "adamw",
        "optim.optimizer_offload": bool(get("engine.optimizer_offload") or get("engine.offload_policy")),
        "mesh.sequence": sequence,
        "mesh.tensor": tensor,
        "mesh.expert": math.gcd(expert, max(1, devices // (sequence * tensor))),
        "mesh.fsdp": shards,
        "mesh.data": 1 if shards == -1 else -1,
        "trainer.total_epochs": int(get("trainer.total_epochs")),
        "trainer.total_training_steps": int(get("trainer.total_training_steps", -1)),
        "trainer.project_name": get("trainer.project_name"),
        "trainer.experiment_name": get("trainer.experiment_name"),
        "trainer.seed": int(get("trainer.seed", 1)),
        "trainer.resume_mode": get("trainer.resume_mode", "auto"),
        "trainer.save_freq": get("trainer.save_freq", -1),
    }
    if "trainer.default_local_dir" in words:
        wanted["trainer.run_dir"] = get("trainer.default_local_dir")
    if chats:
        wanted["data.messages_key"] = get("data.multiturn.messages_key" if older else "data.messages_key", "messages")
    else:
        wanted["data.prompt_role"] = "user"
        for name in ("prompt", "response"):
            column, entries = get(f"data.{name}_key"), get(f"data.{name}_dict_keys", ())
            wanted[f"data.{name}_key"] = ".".join([column if isinstance(column, str) else ",".join(column), *entries])
    if wanted["model.lora_rank"]:
        wanted["model.lora_alpha"] = int(get("model.lora_alpha"))
        wanted["model.target_modules"] = modules
    if kept is not None:
        wanted["trainer.max_ckpt_to_keep"] = int(kept)
    dtype = get("model.fsdp_config.model_dtype", "fp32") if older else get("engine.model_dtype", "fp32")
    wanted["model.param_dtype"] = _DTYPES.get(dtype, dtype)
    if micro is None:
        del wanted["optim.max_tokens_per_device"]
    return wanted


def judge(result: Result, root: pathlib.Path, verl: pathlib.Path) -> None:
    """Compares the settings of a translation with Hydra's."""
    values, config = settings_of(result), composed(result, root, verl)
    words = " ".join(result.words)
    asked = expected_tuning(config, words, " ".join(result.launcher)) if result.tunes else expected(config, words)
    result.wrong = {key: (values[key], value) for key, value in asked.items() if not _equal(values[key], value)}


def starts(result: Result, root: pathlib.Path, verl: pathlib.Path) -> bool:
    """Whether verl could start the script of a refused translation: its config composes, without empty values."""
    try:
        config = composed(result, root, verl)
    except ImportError:
        return True
    except Exception:
        return False
    model = "model" if result.tunes else "actor_rollout_ref.model"
    needs = [f"{model}.path", "data.train_files", "data.val_files", "trainer.n_gpus_per_node", "trainer.nnodes"]
    asked = {word.partition("=")[0].lstrip("+"): word.partition("=")[2] for word in result.words}
    if any(key in asked and asked[key].strip("'\"[] ") == "" for key in needs):
        return False
    adapter = _select(config, f"{model}.lora_adapter_path")
    return not (adapter and str(adapter).startswith("/") and not pathlib.Path(adapter).exists())


def settings_of(result: Result) -> dict[str, Any]:
    """Returns the settings of a translation."""
    default = settings.sft_default() if result.tunes else settings.default()
    command = result.command.partition("\n#")[0].replace("\\\n", " ")
    return table.by_name(settings.parse(shlex.split(command)[3:], "", default)[0])


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, float) and isinstance(ours, (int, float)):
        return math.isclose(ours, theirs, rel_tol=1e-9)
    return DATES.sub("#", str(ours)) == DATES.sub("#", str(theirs))


def rows(results: list[Result]) -> Iterator[tuple[str, str]]:
    """Yields the table."""

    def of(test: Callable[[Result], Any], among: list[Result]) -> str:
        return f"{sum(bool(test(result)) for result in among)} of {len(among)}"

    zero = [result for result in results if result.code == 0]
    judged = [result for result in zero if result.wrong is not None]
    tuning = [result for result in results if result.tunes]
    plain = [result for result in results if result.counts and not result.tunes]
    yield "arguments equal to those under bash", of(lambda result: result.same, results)
    for code, name in ((0, "the script's run"), (3, "settings left out"), (2, "refused")):
        yield f"exit code {code}, {name}", of(lambda result, code=code: result.code == code, results)
    yield "exit code 0 although Hydra's settings differ", of(lambda result: result.wrong, judged)
    yield (
        "the same, of fine-tuning alone",
        of(lambda result: result.wrong, [result for result in judged if result.tunes]),
    )
    yield "exit code 0 that Hydra could not compose", str(len(zero) - len(judged))
    all_plain = [result for result in results if result.counts]
    name = "exit code 0 or 3, without vision and other trainers"
    yield name, of(lambda result: result.code != 2, all_plain)
    yield (
        f"{name}, that verl itself could start",
        of(lambda result: result.code != 2, [o for o in all_plain if o.starts]),
    )
    right = [result for result in plain if result.code == 0 and result.wrong == {}]
    yield "exit code 0 and Hydra's settings, without vision and other trainers", f"{len(right)} of {len(plain)}"
    yield "fine-tuning translated", of(lambda result: result.code in (0, 3), tuning)
    yield "fine-tuning with exit code 0", of(lambda result: result.code == 0, tuning)


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+", type=pathlib.Path)
    parser.add_argument("--verbose", action="store_true", help="prints what is left out, refused or wrong")
    parser.add_argument("--match", default="", help="text in the paths of the scripts that run")
    given = parser.parse_args(argv)
    results, composes = [], True
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder).resolve()
        work.chmod(0o755)
        make_programs(work)
        os.environ["HOME"] = f"{work}/home"
        copies = []
        for checkout in given.checkouts:
            copies.append(work / checkout.resolve().name)
            shutil.copytree(checkout, copies[-1], symlinks=True, ignore=shutil.ignore_patterns(".git"))
            subprocess.run(["chmod", "-R", "a+rwX", str(copies[-1])], check=True)
            (copies[-1] / ".git").mkdir()  # the mark of a checkout
        verl = next((home for copy in copies for home in homes_of(copy)), None)
        for root in copies:
            os.chdir(root)
            own = next(homes_of(root), verl)
            for result in scripts_of(root, work, given.match):
                results.append(result)
                if result.code == 0 and own and composes:
                    try:
                        judge(result, root, own)
                    except ImportError as e:
                        composes = False
                        print(f"{e}: install hydra-core to compare with Hydra", file=sys.stderr)
                    except Exception as e:  # Hydra refuses some scripts
                        result.errors += f"Hydra: {(str(e) or type(e).__name__).splitlines()[0]}"
                if result.code == 2 and result.counts and own and composes:
                    result.starts = starts(result, root, own)
                if given.verbose:
                    print(result.code, result.name, result.wrong or result.errors.strip()[:2000], flush=True)
        os.chdir("/")
    left = collections.Counter(result.code for result in results)
    print(f"{len(results)} scripts start one trainer; exit codes {dict(left)}\n")
    for root in given.checkouts:
        own_results = [result for result in results if result.name.startswith(f"{root.resolve().name}/")]
        counts = [sum(result.code == code for result in own_results) for code in (0, 3, 2)]
        wrong = sum(bool(result.wrong) for result in own_results)
        print(f"| {root.resolve().name} | {len(own_results)} | {' | '.join(map(str, counts))} | {wrong} |")
    for name, value in rows(results):
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
