"""jppo compared with torch, TRL and tunix: log-probs and updates of the same models on the same batch.

    make bench-peers                                                # makes the peers' environments first
    python benchmarks/contest.py --shapes S --dtypes float32 --peers torch,trl

Every contestant is a process of its own, in an environment of its own (`benchmarks/peers/`): jppo and each peer, in
each precision, what uses torch with the default allocator and, where that is found, with jemalloc. All get one model,
written by jppo's exporter, and one ragged batch; before anything is measured their mean log-probs must agree with
jppo's to 1e-4 in float32. Then they run in turn, --repeats rounds of every stage, one at a time. A ratio is the median
over the rounds of the peer's seconds by jppo's in the same round. Tokens are real ones, never padding. All of it runs
on the processor, also where there is an accelerator.
Writes OUT/<date>-<machine>-peers.json and prints tables.
"""

import argparse
import contextlib
import ctypes.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from machine import ROOT, begin, names_of, title, write
from work import (
    LONGEST,
    MINI_BATCH,
    PROMPT,
    SHAPES,
    base_config,
    hf_config,
    make_batch,
    response_lengths,
    stage_flops,
    write_model,
)

from jppo import settings
from jppo.errors import UserError
from jppo.models import config_reader, decoder, hf_write

PEERS = ROOT / "benchmarks" / "peers"
KNOWN = ("torch", "trl", "tunix")
OF_TORCH = ("torch", "trl")  # that may have another allocator
CLOSE = 1e-4  # how far mean log-probs may be apart in float32
LEARNING_RATE = 1e-6
Contestant = dict[str, Any]


def find_jemalloc(envs: pathlib.Path) -> str | None:
    """Returns the machine's jemalloc, or the one that the set-up installed next to the environments."""
    if library := ctypes.util.find_library("jemalloc"):
        return library
    return next((str(path) for path in sorted(envs.glob("jemalloc/**/libjemalloc.so*"))), None)


def contestants(
    peers: Sequence[str], dtypes: Sequence[str], envs: pathlib.Path, jemalloc: str | None
) -> dict[str, Contestant]:
    """Returns peer, precision, allocator and interpreter of each contestant."""
    entered: dict[str, Contestant] = {}
    more = {"default": {}} | ({"jemalloc": {"LD_PRELOAD": jemalloc}} if jemalloc else {})
    for peer in ("jppo", *peers):
        python = pathlib.Path(sys.executable) if peer == "jppo" else envs / peer / "bin" / "python"
        if not python.exists():
            raise UserError(f"--peers: {peer} has no environment at {python.parents[1]}: make bench-peers makes it")
        for dtype in dtypes:
            for allocator, env in more.items() if peer in OF_TORCH else [("default", {})]:
                name = f"{peer} {dtype}{'' if allocator == 'default' else f' {allocator}'}"
                who = {"peer": peer, "dtype": dtype, "allocator": allocator}
                entered[name] = who | {"python": str(python), "env": env}
    return entered


def write_work(folder: pathlib.Path, shape: str, changes: Sequence[str]) -> dict[str, Any]:
    """Writes model, batch and numbers of one shape; returns their description."""
    described = hf_config(*SHAPES[shape])
    cfg = config_reader.parse_config(described, path=f"shape {shape}")
    source = folder / "source"
    source.mkdir()
    write_model(source, described)
    params = jax.jit(lambda key: decoder.init_params(cfg, key, head="lm", param_dtype="float32"))(jax.random.key(0))
    hf_write.save_model(folder / "model", params, cfg, source=source, dtype="float32")
    responses = response_lengths()
    tokens = np.zeros((len(responses), PROMPT + LONGEST), np.int32)
    for row, trajectory in zip(tokens, make_batch(cfg, responses), strict=True):
        row[: len(trajectory.tokens)] = trajectory.tokens
    rng = np.random.default_rng(2)
    drawn = {name: rng.normal(size=(len(tokens), LONGEST)).astype(np.float32) for name in ("advantage", "returns")}
    value = np.zeros((len(tokens), LONGEST), np.float32)
    np.savez(folder / "batch.npz", tokens=tokens, responses=responses, value=value, **drawn)
    c = base_config("", "float32")
    own = [f"{part}.lr={LEARNING_RATE}" for part in ("actor", "critic")]
    own += ["actor.calculate_entropy=False", *changes]
    hyperparameters = {
        name: c.actor[name] for name in ("clip_ratio", "clip_ratio_c", "grad_clip", "betas", "weight_decay")
    }
    hyperparameters |= {"lr": LEARNING_RATE, "cliprange_value": c.critic.cliprange_value, "jppo": own}
    (folder / "work.json").write_text(json.dumps({"prompt": PROMPT, "mini_batch": MINI_BATCH, "how": hyperparameters}))
    return {"tokens": int(sum(PROMPT + n for n in responses)), "flops": stage_flops(cfg, responses)}


class Ended(Exception):
    """A worker process has ended."""


class Worker:
    """A contestant's process, controlled by lines on its standard input."""

    def __init__(self, who: Contestant, folder: pathlib.Path):
        ours = () if who["peer"] == "jppo" else ("PYTHONPATH", "GLIBC_TUNABLES")
        env = {k: v for k, v in os.environ.items() if k not in ours} | {"JAX_PLATFORMS": "cpu"} | who["env"]
        command = [who["python"], str(PEERS / f"peer_{who['peer']}.py"), str(folder), "--dtype", who["dtype"]]
        self.said = tempfile.TemporaryFile("w+")  # noqa: SIM115
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.said, text=True)
        self.process = subprocess.Popen(command, env=env, **pipes)

    def answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            self.said.seek(0)
            raise Ended(f"{self.said.read().strip()[-2000:]}\nexit code {code}".strip())
        return json.loads(line)

    def go(self, stage: str) -> dict[str, Any]:
        with contextlib.suppress(BrokenPipeError):  # the worker has ended: `answer` raises its last words
            self.process.stdin.write(f"go {stage}\n")
            self.process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.said.close()


@contextlib.contextmanager
def workers(
    entered: dict[str, Contestant], folder: pathlib.Path
) -> Iterator[tuple[dict[str, Worker], dict[str, Any], dict[str, str]]]:
    """Starts the contestants one after the other; returns their reports, and why others are left out."""
    with contextlib.ExitStack() as stack:
        able, reports, left_out = {}, {}, {}
        for name, who in entered.items():
            worker = Worker(who, folder)
            stack.callback(worker.close)
            try:
                reports[name] = worker.answer()
            except Ended as e:
                if who["peer"] == "jppo":
                    raise
                left_out[name] = "; ".join(str(e).splitlines()[-2:])
                continue
            able[name] = worker
            print(f"{name} is ready", file=sys.stderr)
        yield able, reports, left_out


def agree(entered: dict[str, Contestant], reports: dict[str, Any]) -> None:
    """Raises if a float32 contestant's mean log-prob differs from the first's."""
    first = next(name for name in reports if entered[name]["dtype"] == "float32")
    for name, x in reports.items():
        apart = abs(x["logp"] - reports[first]["logp"])
        if entered[name]["dtype"] == "float32" and not apart <= CLOSE:
            raise RuntimeError(f"the mean log-prob of {name} is {apart:.1e} from that of {first}: it is other work")


def measure(shape: str, entered: dict[str, Contestant], *, changes: Sequence[str], repeats: int) -> Any:
    """Measures all contestants on one shape, in turn."""
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        out = write_work(folder, shape, changes)
        with workers(entered, folder) as (able, reports, left_out):
            if any(entered[name]["dtype"] == "float32" for name in reports):
                agree(entered, reports)
            told = ("peer", "dtype", "allocator")
            results: dict[str, Any] = {
                name: {k: entered[name][k] for k in told} | {"said": reports[name], "seconds": {}, "checks": {}}
                for name in able
            }
            for number in range(repeats):
                for stage in ("logprobs", "update"):
                    for name in able:
                        note(results[name], stage, able[name].go(stage))
                print(f"shape {shape}: round {number + 1} of {repeats}", file=sys.stderr)
    return out | {"contestants": results, "left_out": left_out}


def note(result: dict[str, Any], stage: str, answer: dict[str, Any]) -> None:
    """Adds one answer; an update of both models is the sum of its parts."""
    parts = answer["seconds"]
    if set(parts) == {"actor", "critic"}:
        parts |= {"update": parts["actor"] + parts["critic"]}
    for part, seconds in parts.items():
        result["seconds"].setdefault(part, []).append(seconds)
    result["checks"].setdefault(stage, []).append(answer["check"])


def ratios(measured: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns jppo's speed relative to the nearest peer, by precision ('best': each in its faster one) and stage."""
    everyone = measured["contestants"]

    def over(mine: Contestant, theirs: Contestant, stage: str) -> float:
        pairs = zip(theirs["seconds"][stage], mine["seconds"][stage], strict=True)
        return statistics.median(a / b for a, b in pairs)

    speeds: dict[str, dict[str, dict[str, Any]]] = {}
    for dtype in (*dict.fromkeys(x["dtype"] for x in everyone.values()), "best"):
        for stage in ("logprobs", "actor", "critic", "update"):
            runs = {n: x for n, x in everyone.items() if stage in x["seconds"] and dtype in (x["dtype"], "best")}
            own = {n: x for n, x in runs.items() if x["peer"] == "jppo"}
            others = {n: x for n, x in runs.items() if x["peer"] != "jppo"}
            if not own or not others:
                continue
            mine = min(own, key=lambda n: statistics.median(own[n]["seconds"][stage]))
            against = {n: over(own[mine], x, stage) for n, x in others.items()}
            nearest = min(against, key=against.__getitem__)
            speeds.setdefault(dtype, {})[stage] = {"jppo": mine, "peer": nearest, "ratio": against[nearest]}
    return speeds


def table(result: dict[str, Any]) -> str:
    """The result as markdown."""
    lines = [
        f"{title(result['machine'])}; commit {result['commit']}; {result['date']}; load average before"
        f" {result['load_average']:.1f}",
        "",
        "| shape | contestant | stage | tokens/s | GFLOP/s | seconds |",
        "|---|---|---|---:|---:|---:|",
    ]
    for shape, measured in result["shapes"].items():
        for name, x in measured["contestants"].items():
            for stage, seconds in x["seconds"].items():
                took = statistics.median(seconds)
                rates = f"{measured['tokens'] / took:,.0f} | {measured['flops'][stage] / took / 1e9:,.0f}"
                lines.append(f"| {shape} | {name} | {stage} | {rates} | {took:.3f} |")
    lines += ["", "| shape | stage | jppo | nearest peer | ratio |", "|---|---|---|---|---:|"]
    for shape, measured in result["shapes"].items():
        for dtype, stages in ratios(measured).items():
            for stage, x in stages.items():
                names = f"{x['jppo']}{' (its best)' if dtype == 'best' else ''} | {x['peer']}"
                lines.append(f"| {shape} | {stage} | {names} | {x['ratio']:.2f} |")
    for shape, measured in result["shapes"].items():
        lines += ["", *(f"Left out at {shape}: {name}: {why}" for name, why in measured["left_out"].items())]
    return "\n".join(lines).rstrip()


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="S,M", help=f"of the model, of {', '.join(SHAPES)}")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="of the products, separated by commas")
    parser.add_argument("--peers", default=",".join(KNOWN), help="separated by commas")
    parser.add_argument("--repeats", type=int, default=5, help="of each stage")
    parser.add_argument("--envs", type=pathlib.Path, default=PEERS / ".envs", help="where the peers' environments are")
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="SECTION.NAME=VALUE")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args(argv)
    shapes = names_of(args.shapes, SHAPES, "--shapes")
    dtypes = names_of(args.dtypes, ("float32", "bfloat16"), "--dtypes")
    peers = names_of(args.peers, KNOWN, "--peers")
    if args.repeats < 1:
        raise UserError(f"--repeats={args.repeats} must be 1 or more")
    jax.config.update("jax_platforms", "cpu")
    begun = begin()
    jemalloc = find_jemalloc(args.envs)
    entered = contestants(peers, dtypes, args.envs, jemalloc)
    result: dict[str, Any] = {
        **begun,
        "jemalloc": jemalloc is not None,
        "changes": args.changes,
        "shapes": {shape: measure(shape, entered, changes=args.changes, repeats=args.repeats) for shape in shapes},
    }
    write(result, table, args.out, "peers")


if __name__ == "__main__":
    main()
