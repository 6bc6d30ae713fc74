"""Dry runs of translated commands for scripts/check_verl.py: a small model on virtual CPU devices of one host.

Every axis of the mesh has at most two devices, so a run has at most 16. Lengths are 1,024 or 8,192 tokens, with as many
longest sequences in a micro-batch as before, up to two. A run is forked from a process that has imported jppo and
transformers, and XLA leaves out LLVM's optimisations. A command that differs from an earlier one in names and numbers
alone has its result; equal programs are compiled once. Results and programs stay in the folder, so that a stopped check
resumes.
"""

import dataclasses
import hashlib
import json
import math
import multiprocessing
import os
import pathlib
import string
import sys
from collections.abc import Mapping
from typing import Any

import jax
import pyarrow as pa
import pyarrow.parquet as pq
from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401  # before the fork

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from examples import arithmetic
from jppo import settings, sft, train
from jppo.models import decoder, hf, hf_write
from jppo.settings import table

LIMIT_S = 900
AXES = ("data", "fsdp", "sequence", "tensor", "expert")
SHORT, LONG = 1024, 8192
TEMPLATE = (  # reads the arguments of templates that verl's scripts set
    "{% set _ = [enable_thinking, reasoning_effort, thinking] %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token if m.role == 'assistant' else '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}
SMALL |= {"num_key_value_heads": 8, "max_position_embeddings": 1 << 20, "vocab_size": 128}
MIXTURE = {"moe_intermediate_size": 32, "head_dim": 4}
# Settings, by their beginnings, and numbers that change no compiled program.
UNREAD = (
    "trainer.", "rollout.val_kwargs.", "rollout.gpu_memory_utilization", "rollout.max_num_seqs", "rollout.engine_",
    "rollout.enforce_eager", "rollout.dtype", "data.shuffle", "data.filter_overlong_prompts", "data.truncation",
    "data.val_", "data.prompt_key", "data.reward_fn_key", "data.train_batch_size", "data.gen_batch_size",
    "model.lora_alpha",
)  # fmt: skip
NUMBERS = (
    "lr", "weight_decay", "betas", "lr_warmup_steps", "lr_warmup_steps_ratio", "ppo_mini_batch_size", "clip_ratio",
    "clip_ratio_low", "clip_ratio_high", "clip_ratio_c",
)  # fmt: skip


def _write_model(folder: pathlib.Path, *, experts: int) -> None:
    arithmetic.write_model(folder, string.printable[:96], experts=experts)
    for name, more in (
        ("config.json", SMALL | (MIXTURE if experts else {})),
        ("tokenizer_config.json", {"chat_template": TEMPLATE, "model_max_length": 1 << 20}),
    ):
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | more))
    _, cfg = hf.read_config(str(folder))
    params = decoder.init_params(cfg, jax.random.key(0), head="lm", param_dtype="float32")
    hf_write.save_model(folder, params, cfg, source=str(folder), dtype="float32")


@dataclasses.dataclass(frozen=True)
class DryRun:
    """A command of a small run."""

    words: tuple[str, ...]
    devices: int
    tunes: bool
    values: dict[str, Any]  # of the command that it stands for
    key: str  # in the results


class DryRuns:
    """Dry runs whose results and compiled programs a folder keeps."""

    def __init__(self, folder: pathlib.Path, work: pathlib.Path):
        self.folder, self.work = folder, work
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "results.json"
        self.results: dict[str, str] = json.loads(self.file.read_text()) if self.file.is_file() else {}
        for experts in (0, 8):
            model = self.model(experts > 0)
            error = (
                "" if (model / "model.safetensors").is_file() else self._forked(_write_model, model, experts=experts)
            )
            if error:
                raise RuntimeError(f"the small model could not be written: {error}")

    def model(self, mixture: bool) -> pathlib.Path:
        """Returns the folder of the small model, dense or a mixture of experts."""
        return self.folder / ("mixture" if mixture else "dense")

    def plan(self, words: list[str], *, tunes: bool) -> DryRun:
        """Returns the small run of a command's settings."""
        default = settings.sft_default() if tunes else settings.default()
        values = table.by_name(settings.parse(words, "", default)[0])
        changes, devices = self._changes(values, tunes=tunes)
        kept = [word for word in words[1:] if word[2:].partition("=")[0].removeprefix("config.") not in changes]
        words = [words[0], *kept, *(f"--config.{name}={value}" for name, value in changes.items())]
        return DryRun(tuple(words), devices, tunes, values, self._key(words, devices, default))

    def _key(self, words: list[str], devices: int, default: Any) -> str:
        """Names the compiled programs and the checked settings of a command, wherever the check's copies are."""
        values = table.by_name(settings.parse(words, "", default)[0])
        told = {name: str(value) for name, value in values.items() if not name.startswith(UNREAD)}
        told = {name: value for name, value in told.items() if name.rpartition(".")[2] not in NUMBERS}
        told |= {"rollout.n": str(values.get("rollout.n", 1) > 1), "devices": str(devices)}
        return hashlib.sha256(json.dumps(told).replace(str(self.work), "").encode()).hexdigest()[:16]

    def run(self, dry_run: DryRun) -> str:
        """Returns the last line of a failed dry run, '' if it ends well; one that ended well is not repeated."""
        if self.results.get(dry_run.key) != "":
            self._write_data(dry_run)
            main = sft.main if dry_run.tunes else train.main
            self.results[dry_run.key] = self._forked(main, [*dry_run.words, "--dry_run"], devices=dry_run.devices)
            self.file.write_text(json.dumps(self.results, indent=1))
        return self.results[dry_run.key]

    def _changes(self, values: Mapping[str, Any], *, tunes: bool) -> tuple[dict[str, Any], int]:
        """Returns the settings of a small run in place of a command's, and its devices."""
        learner = "optim" if tunes else "actor"
        mesh = {axis: int(values[f"mesh.{axis}"]) for axis in AXES}
        fixed = math.prod(size for size in mesh.values() if size > 0)
        world = 2 * fixed
        if not tunes:
            width = values["rollout.tensor_model_parallel_size"]
            world = abs(values["trainer.nnodes"]) * values["rollout.servers"] * width
        small = {axis: min(size, 2) for axis, size in mesh.items()}
        devices = math.prod(size for size in small.values() if size > 0) * (2 if world > fixed else 1)
        prompt, response = values["data.max_prompt_length"], values["data.max_response_length"]
        longest = SHORT if prompt + response <= 4 * SHORT else LONG
        ratio = values[f"{learner}.max_tokens_per_device"] * mesh["sequence"] / (prompt + response)
        changes: dict[str, Any] = {f"mesh.{axis}": size for axis, size in small.items()}
        changes |= {"data.max_prompt_length": longest // 2, "data.max_response_length": longest // 2}
        tokens = min(2, max(1, round(ratio))) * longest // small["sequence"]
        mixture = mesh["expert"] > 1 or (not tunes and values["rollout.routing_replay"])
        model, rows = self.model(mixture), self.folder / "rows.parquet"
        changes |= {f"{learner}.max_tokens_per_device": tokens, "model.path": model, "data.train_files": rows}
        changes |= {"trainer.run_dir": self.folder / "run", "trainer.logger": "console,jsonl"}
        changes["trainer.compile_cache"] = self.folder / "programs"
        if tunes:
            return changes, devices
        width = min(2, values["rollout.tensor_model_parallel_size"])
        changes |= {"data.val_files": rows, "trainer.nnodes": 1}
        if values["rollout.name"] != "inprocess":
            changes |= {"rollout.tensor_model_parallel_size": width, "rollout.servers": max(1, devices // width)}
        changes |= {name: model for name in ("critic.path", "ref.path") if "/" in values[name]}
        if values["reward.overlong_buffer_tokens"]:
            changes["reward.overlong_buffer_tokens"] = longest // 8
        return changes, devices

    def _write_data(self, dry_run: DryRun) -> None:
        """Writes a batch of equal rows, in the columns that the settings name."""
        chat = [{"role": "user", "content": "What is 1 plus 1?"}, {"role": "assistant", "content": "2"}]
        values = dry_run.values
        count = values["data.train_batch_size"]
        row: dict[str, Any] = {}
        if not dry_run.tunes:
            count = max(count, int(values["data.gen_batch_size"] or 0))
            row |= {values["data.prompt_key"]: chat[:1], values["data.reward_fn_key"]: "openai/gsm8k"}
            row["reward_model"] = {"style": "rule", "ground_truth": "2"}
        elif values["data.prompt_role"]:
            for key, text in (("prompt", "What is 1 plus 1?"), ("response", "2")):
                column, _, entry = values[f"data.{key}_key"].partition(".")
                row[column] = {**row.get(column, {}), entry: text} if entry else text
        else:
            row[values["data.messages_key"]] = chat
        pq.write_table(pa.Table.from_pylist([row] * count), self.folder / "rows.parquet")

    def _forked(self, function: Any, *arguments: Any, devices: int = 1, **named: Any) -> str:
        """Calls a function in a fork of this process with so many devices; returns its last line if it fails."""
        log = self.folder / "log.txt"

        def call() -> None:
            os.environ |= {"JAX_PLATFORMS": "cpu", "TOKENIZERS_PARALLELISM": "false"}
            flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
            with log.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
                function(*arguments, **named)
                sys.stdout.flush()

        process = multiprocessing.get_context("fork").Process(target=call)
        process.start()
        process.join(LIMIT_S)
        if process.is_alive():
            process.kill()
            return f"no end in {LIMIT_S} s"
        lines = log.read_text(errors="replace").strip().splitlines() or ["?"]
        return "" if process.exitcode == 0 else lines[-1]
