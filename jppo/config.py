"""Settings: every default, the checks that need no device, and the command-line edge that turns faults into one line.

`default()` is the one place of a default. A file in `configs/` starts from it and sets what differs. Nothing below the
commands (`train.py`, `sft.py` ...) sees a config: they read it and pass scalars on.
"""

import difflib
import json
import pathlib
import sys
from collections.abc import Callable

import ml_collections
from absl import app, flags
from ml_collections import config_dict, config_flags

ADV_ESTIMATORS = ("gae",)
KL_PENALTIES = ("kl", "k1", "low_var_kl", "k3")
LOSS_AGG_MODES = ("token-mean",)
LR_SCHEDULES = ("constant", "cosine")
PACKINGS = ("auto", "segments", "buckets", "none")
DTYPES = ("float32", "bfloat16")


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
            logprob_chunk_tokens=1024,  # log-probs are computed for so many tokens at a time
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
            packing="auto",  # segments on GPU and TPU, buckets on CPU
            row_lengths=4,  # buckets: how many lengths of row, each one more shape to compile
            max_tokens_per_row=4096,  # segments: the length of a row
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
            loss_agg_mode="token-mean",
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
            top_p=1.0,
            top_k=-1,
            dtype="float32",
            enforce_eager=True,
            max_num_seqs=256,
            gpu_memory_utilization=0.4,  # on a GPU
            kv_cache_memory_bytes=268435456,  # on a CPU
            omp_threads=1,  # on a CPU
            start_timeout_s=300.0,
            request_timeout_s=600.0,
            publish_dir="",  # '': shared memory where there is any
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
