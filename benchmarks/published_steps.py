"""Published training steps of others against jppo's forecasts of the same configurations:

    python benchmarks/published_steps.py                # all rows: a few minutes, TPUs the longest
    python benchmarks/published_steps.py --only=llama2_8 --json=FILE

Each row is a published run with its source. Fine-tuning with the same shape, batch, length, dtypes and mesh is
compiled by `jppo.sft --dry_run --machine=NAME`; nothing is computed. The rows `llama2_8` and `llama31_v6e` gave the
share `program` of jppo/plugins/forecast/machines.py, the others test it.
"""

import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # the checkout, for examples/
from examples import arithmetic

ROOT = pathlib.Path(__file__).resolve().parents[1]

LLAMA = dict(
    model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=4096, num_hidden_layers=32,
    num_attention_heads=32, max_position_embeddings=8192, tie_word_embeddings=False, rms_norm_eps=1e-5,
    hidden_act="silu",
)  # fmt: skip
LLAMA2 = LLAMA | dict(intermediate_size=11008, num_key_value_heads=32, vocab_size=32000)
LLAMA31 = LLAMA | dict(intermediate_size=14336, num_key_value_heads=8, vocab_size=128256)
MISTRAL = LLAMA31 | dict(vocab_size=32000)


@dataclasses.dataclass(frozen=True)
class Row:
    """A published run."""

    machine: str
    model: dict[str, Any]
    length: int  # tokens of a sequence
    batch: int  # sequences of a device in a step
    published: float  # seconds of a step
    source: str
    remat: str = "dots"
    micro: int = 1  # micro-batches of a step, where jppo's activations need them


def by_rate(flop_per_s: float, model: dict[str, Any], length: int, batch: int) -> float:
    """Returns a step's seconds from MaxText's FLOP/s of a device, which count all pairs of attention."""
    hidden, heads, layers = model["hidden_size"], model["num_attention_heads"], model["num_hidden_layers"]
    wide = hidden * hidden * (2 + 2 * model["num_key_value_heads"] / heads) + 3 * hidden * model["intermediate_size"]
    of_token = 6 * (layers * wide + hidden * model["vocab_size"]) + 12 * layers * hidden * length
    return batch * length * of_token / flop_per_s


A3 = "MaxText, src/maxtext/configs/gpu/a3/llama_2_7b"
RECIPES = "tpu-recipes, training/trillium"
ROWS = {
    "llama2_8": Row("8xH100", LLAMA2, 4096, 4, by_rate(492e12, LLAMA2, 4096, 4), f"{A3}: 492 TFLOP/s"),
    "llama2_32": Row("4x8xH100", LLAMA2, 4096, 4, by_rate(407e12, LLAMA2, 4096, 4), f"{A3}: 407 TFLOP/s"),
    "llama31_titan": Row(
        "8xH100", LLAMA31, 8192, 2, 2 * 8192 / 6667, "torchtitan, benchmarks/llama3_h100_202412: 6,667 tokens/s"
    ),
    "llama31_v6e": Row("v6e-8", LLAMA31, 8192, 3, 3.443, f"{RECIPES}/Llama3.1-8B-MaxText/v6e-8", remat="full"),
    "mistral_v6e": Row("v6e-8", MISTRAL, 8192, 6, 6.320, f"{RECIPES}/Mistral-7B-MaxText", remat="full", micro=2),
}


def forecast(row: Row, folder: pathlib.Path) -> float:
    """Compiles a row and returns the forecast of its step, seconds; whether it fits in memory is not asked."""
    arithmetic.write_model(folder / "model")
    (folder / "model/config.json").write_text(json.dumps(row.model))
    hosts = int(row.machine.split("x")[0]) if row.machine.count("x") == 2 else 1
    line = json.dumps({"prompt": "1", "response": "1" * (row.length - 4)})
    (folder / "train.jsonl").write_text(f"{line}\n" * 256)
    (folder / "config.py").write_text("from jppo import settings\nget_config = settings.sft_default\n")
    values: dict[str, Any] = {
        "model.path": folder / "model", "model.init": "random", "model.compute_dtype": "bfloat16",
        "model.remat": row.remat, "data.train_files": folder / "train.jsonl", "data.max_prompt_length": 1,
        "data.train_batch_size": 8 * hosts * row.batch, "data.max_response_length": row.length - 1,
        "data.row_lengths": 1, "optim.max_tokens_per_device": row.batch * row.length // row.micro,
        "mesh.data": hosts, "mesh.fsdp": 8,
    }  # fmt: skip
    file = folder / "said.json"
    words = [f"--config.{name}={value}" for name, value in values.items()]
    command = [sys.executable, "-m", "jppo.sft", f"--config={folder / 'config.py'}", *words]
    command += ["--dry_run", f"--machine={row.machine}", f"--json={file}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if not file.is_file():
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    return float(json.loads(file.read_text())["step_s"])


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(ROWS), help="rows, separated by commas")
    parser.add_argument("--json", default="", help="file for the figures")
    args = parser.parse_args()
    figures = {}
    print("| row | machine | published, s | forecast, s | forecast / published |\n|---|---|---:|---:|---:|")
    for name in args.only.split(","):
        row = ROWS[name]
        with tempfile.TemporaryDirectory() as folder:
            seconds = forecast(row, pathlib.Path(folder))
        figures[name] = dict(published=row.published, forecast=seconds, source=row.source)
        ratio = seconds / row.published
        print(f"| {name} | `{row.machine}` | {row.published:.2f} | {seconds:.2f} | {ratio:.2f} |", flush=True)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
