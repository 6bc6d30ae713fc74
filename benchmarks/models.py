"""Model passes: tokens/s, FLOP utilisation and memory; the cost of a vocabulary.

    python benchmarks/models.py                                 # shapes S and M, and Qwen2.5-0.5B
    python benchmarks/models.py --models S --dtype bfloat16 --set model.remat=full
    python benchmarks/models.py --models=                       # the vocabulary test alone

Each model has random weights and goes through the passes of training: hidden states; log-probs, without entropy; an
update of adapters and one of all weights, by the clipped loss, the optimizer's steps with it. The batch is that of
throughput.py, of which --tokens takes a part; tokens are real ones, and a large matrix product in between sets the
scale. Memory is XLA's account of the compiled programs, and the peak that the device reports, where it does. What would
not fit is left out.

The vocabulary test compiles the log-prob pass over 4,096 tokens for the trunk of Qwen2.5-0.5B with its own vocabulary
and with one of 1,024, and runs neither. Where the temporaries are 1.5 times as large or more, the exit code is 1.
Writes OUT/<date>-<machine>-models-<models>.json and prints tables.
"""

import argparse
import dataclasses
import functools
import math
import pathlib
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from machine import ROOT, begin, title, write
from ml_collections import ConfigDict
from work import (
    PROMPT,
    SHAPES,
    base_config,
    change,
    flat_batch,
    forward_flops,
    hf_config,
    lora_update_flops,
    make_batch,
    make_rows,
    response_lengths,
)

from jppo import settings
from jppo.errors import UserError
from jppo.learner import batch, packing, score, sharding, state, update
from jppo.learner.make import (
    Trained,
    chunk_tokens,
    load_trained,
    make_decoder,
    make_mesh,
    make_recipe,
    make_trainable,
    plan_rows,
)
from jppo.learner.trainable import CompiledLoss
from jppo.models import config_reader, lora
from jppo.models.config import ModelConfig, pad_vocab
from jppo.models.lora import Lora
from jppo.settings import Settings
from jppo.types import Array, Params, Rows, Trajectory

QWEN: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
}
WIDER = {  # the same family's larger models; their heads are 128 wide
    "q15": {"num_hidden_layers": 28, "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12},
    "q7": {
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}
MODELS = {name: hf_config(*shape) for name, shape in SHAPES.items()} | {"q05": QWEN}
MODELS |= {name: QWEN | more for name, more in WIDER.items()} | {"tiny": hf_config(2, 64, 128, 4, 2, 512)}
BY_DEFAULT = ("S", "M", "q05")
CPU_TOKENS = {"q05": 1024}  # tokens of the batch for a minute or two on a CPU; other models use all
CPU_SCANS = {"q05"}  # unrolled, XLA copies the weights of every layer on a CPU; the small ones are faster so
RANK = 16  # of the adapters

# The vocabulary test: tokens, the lengths of the rows they stand in, the other vocabulary, the least ratio that fails.
TOKENS, LENGTHS, SMALL, LIMIT = 4096, (128, 256, 512, 1024), 1024, 1.5

Account = dict[str, Any]  # of one compiled program, in bytes on one device


class TooLarge(Exception):
    """Something does not fit into memory."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """One model on the devices, its batch, and the matrix product of the reference rate."""

    c: Settings
    mesh: Any
    cfg: ModelConfig
    trained: Trained  # an update of all weights uses them up
    responses: np.ndarray  # tokens of each
    prompt: int  # tokens of it
    trajectories: list[Trajectory]
    plan: packing.Plan
    mini_batch: int
    rows: list[Rows]
    logprob: Any  # compiled
    multiply: Callable[[], Any]
    product_flops: int
    repeats: int


def make_config(name: str, dtype: str, changes: Sequence[str]) -> ConfigDict:
    """The defaults of training, for the model and the batch; `changes` are SECTION.NAME=VALUE."""
    c = base_config("none: the weights are random", dtype)
    c.model.scan_layers = jax.default_backend() != "cpu" or name in CPU_SCANS
    return change(c, changes)


def some(responses: np.ndarray, tokens: int | None) -> np.ndarray:
    """Returns the first sequences of the batch with at most this many tokens, at least one sequence. None: all."""
    if tokens is None:
        return responses
    return responses[: max(1, int(np.searchsorted(np.cumsum(PROMPT + responses), tokens, side="right")))]


def make_subject(name: str, c: Settings, responses: np.ndarray, *, prompt: int, repeats: int) -> Subject:
    """The model with random weights, and the batch."""
    mesh = make_mesh(c)
    cfg = pad_vocab(config_reader.parse_config(MODELS[name], path=name), mesh.shape["tensor"])
    layout = state.model_weights(cfg, mesh, head="lm", param_dtype=c.model.param_dtype)
    check_room(size(abstract(layout.shapes, layout.shardings)))
    key = jax.random.key(c.trainer.seed)
    trajectories = make_batch(cfg, responses, prompt=prompt)
    mini_batch = min(c.actor.ppo_mini_batch_size, len(trajectories))
    options = dict[str, Any](steps=10**6, policy=cfg)  # a long run: all row lengths
    plan = plan_rows(c, mesh, tokens_per_device=c.actor.max_tokens_per_device, sequences=mini_batch, **options)
    multiply, product_flops = sharding.make_product(mesh, c.model.compute_dtype)
    return Subject(
        c=c,
        mesh=mesh,
        cfg=cfg,
        trained=load_trained(c, mesh, cfg, c.model.path, head="lm", key=key, adapters=None),
        responses=responses,
        prompt=prompt,
        trajectories=trajectories,
        plan=plan,
        mini_batch=mini_batch,
        rows=make_rows(trajectories, plan, mesh),
        logprob=jax.jit(make_logprob(c, cfg, mesh)),
        multiply=multiply,
        product_flops=product_flops,
        repeats=repeats,
    )


def make_logprob(c: Settings, cfg: ModelConfig, mesh: Any) -> score.LogProb:
    """The log-prob pass of such a model, as in training; without entropy."""
    return score.make_logprob(
        make_decoder(c, cfg, mesh),
        cfg,
        temperature=c.rollout.temperature,
        chunk_tokens=chunk_tokens(c.model, cfg, mesh),
        with_entropy=False,
        mesh=mesh,
    )


def make_minis(s: Subject) -> list[batch.Mini]:
    """The mini-batches of an update: the batch with its own log-probs, and random advantages."""
    rng = np.random.default_rng(2)
    data = flat_batch(s.trajectories, s.mesh)
    packed = [(rows, np.asarray(s.logprob(s.trained.learned, rows)[0])) for rows in s.rows]
    advantage = rng.normal(size=data.mask.shape).astype(np.float32)
    data = data.with_arrays(old_logprob=batch.unpack_rows(data, packed), advantage=advantage)
    return list(
        batch.mini_batches(
            data,
            s.trajectories,
            reads=("old_logprob", "advantage"),
            order=np.arange(len(s.trajectories)),
            mini_batch_size=s.mini_batch,
            plan=s.plan,
            mesh=s.mesh,
        )
    )


def make_loss(s: Subject) -> CompiledLoss:
    """The gradient of the clipped loss, compiled."""
    recipe = make_recipe(s.c)
    logprob = score.make_logprob_kl(None, make_logprob(s.c, s.cfg, s.mesh), None)
    loss = update.make_actor_loss(logprob, recipe.algorithm, mean=recipe.mean)
    return CompiledLoss(update.make_accumulate(loss, mesh=s.mesh))


def forward(s: Subject) -> dict[str, Any]:
    """The pass to the last hidden states."""
    decoder = make_decoder(s.c, s.cfg, s.mesh)

    def hidden(params: Params, rows: Rows) -> Array:
        states: Any = decoder.apply(lora.variables(params), rows.inputs, rows.segment, rows.position)
        return states

    return _over_rows(s, jax.jit(hidden), lm_head=False)


def logprobs(s: Subject) -> dict[str, Any]:
    """The pass to the log-probs."""
    return _over_rows(s, s.logprob, lm_head=True)


def _over_rows(s: Subject, fn: Any, *, lm_head: bool) -> dict[str, Any]:
    weights = s.trained.learned
    programs = [account("pass", fn, weights, rows) for rows in _of_each_shape(s.rows).values()]
    results = sum(program["results"] for program in programs)
    check_room(results + max(program["temporaries"] for program in programs))
    flops = forward_flops(s.cfg, s.responses, prompt=s.prompt, lm_head=lm_head)
    measured = timed(s, lambda: jax.block_until_ready([fn(weights, rows) for rows in s.rows]), flops)
    return measured | memory(programs, weights=size(weights))


def updated(s: Subject, adapters: Lora | None) -> dict[str, Any]:
    """An update over the batch, of all weights or of the `adapters`: gradients and optimizer steps."""
    minis, compiled = make_minis(s), make_loss(s)
    trained, flops = s.trained, 3 * forward_flops(s.cfg, s.responses, prompt=s.prompt, lm_head=True)
    if adapters is not None:
        layout = state.adapters(s.cfg, s.mesh, adapters, head="lm")
        key = jax.random.key(s.c.trainer.seed)
        trained = Trained(layout, *state.adapt(layout, s.trained.learned, adapters, key=key))
        flops = lora_update_flops(s.cfg, adapters, s.responses, prompt=s.prompt)
    carry = update.abstract_carry(trained.layout.shapes, trained.layout.shardings)
    gradients = size(carry)
    programs = [
        account("gradient", compiled.accumulate, trained.learned, trained.base, carry, micro, minis[0].counts, None)
        for micro in _of_each_shape([micro for mini in minis for micro in mini.micros]).values()
    ]
    # The accumulator, in f32, and the optimizer's state are not there yet.
    kept = 2 * gradients * jnp.dtype(s.c.actor.moments_dtype).itemsize // 4
    if s.c.model.param_dtype != "float32" and s.c.actor.master_dtype == "float32":
        kept += gradients
    check_room(gradients + kept + max(program["results"] + program["temporaries"] for program in programs))
    trainable, opt = make_trainable(s.c.actor, "actor", compiled, trained, total_steps=1)
    step = np.zeros((), np.int32)
    programs.append(account("optimizer step", trainable.apply, trained.learned, opt, trainable.zeros(), step, np.True_))
    check_room(gradients + programs[-1]["results"] + programs[-1]["temporaries"])
    weights, optimizer = size((trained.learned, trained.base)), size(opt)
    now = [trained.learned, opt]

    def run() -> None:
        now[:] = trainable.learn(*now, step, minis, None)[:2]

    del opt
    measured = timed(s, run, flops)
    return measured | memory(programs, weights=weights, optimizer=optimizer, gradients=gradients)


def _of_each_shape(micros: Sequence[Any]) -> dict[tuple[int, ...], Any]:
    """One micro-batch of each shape."""
    return {jax.tree.leaves(micro)[0].shape: micro for micro in micros}


def timed(s: Subject, call: Callable[[], Any], flops: int) -> dict[str, Any]:
    """Returns seconds of each call, after a matrix product and a warm-up; and the peak, if it rose."""
    before = sharding.device_peak()
    seconds: list[float] = []
    products: list[float] = []
    for _ in range(1 + s.repeats):
        for fn, into in ((s.multiply, products), (call, seconds)):
            start = time.perf_counter()
            fn()
            into.append(time.perf_counter() - start)
    after = sharding.device_peak()
    median, rate = statistics.median(seconds[1:]), s.product_flops / statistics.median(products[1:])
    tokens = sum(len(t.tokens) for t in s.trajectories)
    return {
        "tokens": tokens,
        "seconds": seconds[1:],
        "tokens_per_s": tokens / median,
        "flops": flops,
        "flops_per_s": flops / median,
        "matmul_flops_per_s": rate,
        "utilisation": flops / median / rate,
        "device_peak": after if after is not None and before is not None and after > before else None,
    }


def abstract(shapes: Any, places: Any) -> Any:
    """Returns the abstract arrays for compilation."""
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, places)


def size(tree: Any) -> int:
    """Bytes of the arrays on one device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def account(name: str, fn: Any, *args: Any) -> Account:
    """Returns XLA's memory analysis of `fn` compiled for these arguments; a call reuses the program."""
    analysis: Any = fn.lower(*args).compile().memory_analysis()
    return {
        "program": name,
        "arguments": analysis.argument_size_in_bytes,
        "results": analysis.output_size_in_bytes - analysis.alias_size_in_bytes,  # that take no argument's place
        "temporaries": analysis.temp_size_in_bytes,
    }


def memory(programs: list[Account], *, weights: int, optimizer: int = 0, gradients: int = 0) -> dict[str, Any]:
    """Returns the arrays of a pass and the temporaries of its largest program; the peak adds the results."""
    peak = max(program["results"] + program["temporaries"] for program in programs) + weights + optimizer + gradients
    return {
        "weights": weights,
        "optimizer": optimizer,
        "gradients": gradients,
        "temporaries": max(program["temporaries"] for program in programs),
        "peak": peak,
        "programs": programs,
    }


def room() -> int | None:
    """Returns the free bytes of a device; None if it does not report them."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    info = pathlib.Path("/proc/meminfo")
    match = re.search(r"MemAvailable:\s*(\d+) kB", info.read_text()) if info.is_file() else None
    return None if match is None else 1024 * int(match[1]) // jax.local_device_count()


def check_room(needed: int) -> None:
    """Raises TooLarge if less than a tenth of the free memory would remain."""
    free = room()
    if free is not None and needed > 0.9 * free:
        raise TooLarge(f"it takes {needed / 2**30:.1f} GiB more, and {free / 2**30:.1f} are free")


def measure(name: str, c: ConfigDict, responses: np.ndarray, *, prompt: int = PROMPT, repeats: int) -> dict[str, Any]:
    """Measures the passes of one model, smaller ones first; and the reasons for skipped ones."""
    adapters = Lora(RANK, c.model.lora_alpha, lora.parse_targets(c.model.target_modules))
    passes: dict[str, Callable[[Subject], dict[str, Any]]] = {
        "forward": forward,
        "log-probs": logprobs,
        f"LoRA update, rank {RANK}": functools.partial(updated, adapters=adapters),
        "update": functools.partial(updated, adapters=None),
    }
    out: dict[str, Any] = {"passes": {}, "left_out": {}}
    subject = None
    for stage, run in passes.items():
        try:
            if subject is None:
                subject = make_subject(name, settings.typed(c), responses, prompt=prompt, repeats=repeats)
                shapes = [rows.inputs.shape for rows in subject.rows]
                out["sequences"], out["rows"] = len(subject.trajectories), [list(shape) for shape in shapes]
                real = sum(len(t.tokens) - 1 for t in subject.trajectories)
                out["filled"] = real / sum(R * T for R, T in shapes)
            out["passes"][stage] = run(subject)
        except TooLarge as e:
            out["left_out"][stage] = str(e)
        except jax.errors.JaxRuntimeError as e:
            if "RESOURCE_EXHAUSTED" not in str(e):
                raise
            out["left_out"][stage] = "it ran out of memory"
        seconds = out["passes"].get(stage, {}).get("seconds")
        outcome = f"left out: {out['left_out'][stage]}" if seconds is None else f"{statistics.median(seconds):.4f} s"
        print(f"{name}: {stage} {outcome}", file=sys.stderr, flush=True)
    return out


def vocabulary(dtype: str, changes: Sequence[str]) -> dict[str, Any]:
    """Returns the temporaries of the log-prob pass with a large and a small vocabulary; only compiles."""
    c = base_config("none: there are no weights", dtype)
    c.data.max_prompt_length = c.data.max_response_length = max(LENGTHS) // 2
    c.model.logprob_chunk_bytes = 2**27  # of about the size of the trunk's own temporaries
    change(c, changes)
    typed = settings.typed(c)
    mesh, cases = make_mesh(typed), []
    for T in LENGTHS:
        shape = TOKENS // T, T
        if shape[0] % sharding.row_multiple(mesh):
            continue
        temporaries = []
        for vocab in (QWEN["vocab_size"], SMALL):
            cfg = pad_vocab(config_reader.parse_config(QWEN | {"vocab_size": vocab}, path="q05"), mesh.shape["tensor"])
            layout = state.model_weights(cfg, mesh, head="lm", param_dtype=c.model.param_dtype)
            empty = packing.empty_rows(shape)
            rows = abstract(empty, jax.tree.map(lambda _: sharding.rows_sharding(mesh), empty))
            fn = jax.jit(make_logprob(typed, cfg, mesh))
            program = account("log-probs", fn, abstract(layout.shapes, layout.shardings), rows)
            temporaries.append(program["temporaries"])
        cases.append({"rows": shape, "temporaries": temporaries, "ratio": temporaries[0] / temporaries[1]})
    if not cases:
        raise UserError(f"the vocabulary test has {TOKENS} tokens, and rows of {LENGTHS} do not go into the mesh")
    return {
        "tokens": TOKENS,
        "vocabularies": [QWEN["vocab_size"], SMALL],
        "logprob_chunk_bytes": c.model.logprob_chunk_bytes,
        "scan_layers": c.model.scan_layers,
        "logits": 4 * TOKENS * QWEN["vocab_size"],  # of all tokens, f32
        "cases": cases,
        "worst": max(case["ratio"] for case in cases),
    }


def table(result: dict[str, Any]) -> str:
    """The result as markdown."""
    mib, models = 2**20, result["models"]
    lines = [
        f"{title(result['machine'])}; {result['dtype']}; jax {result['jax']}; commit {result['commit']};"
        f" {result['date']}; load average before {result['load_average']:.1f}"
    ]
    if models:
        reported = any(x["device_peak"] is not None for m in models.values() for x in m["passes"].values())
        lines += [
            "",
            "| model | pass | tokens | tokens/s | GFLOP/s | of the matmul rate | weights, MiB | optimizer | gradients"
            f" | temporaries | peak |{' device peak |' if reported else ''}",
            f"|---|---|{'---:|' * (10 if reported else 9)}",
        ]
    for name, measured in models.items():
        for stage, x in measured["passes"].items():
            sizes = [x[part] for part in ("weights", "optimizer", "gradients", "temporaries", "peak")]
            cells = [
                f"{x['tokens']:,}",
                f"{x['tokens_per_s']:,.0f}",
                f"{x['flops_per_s'] / 1e9:,.0f}",
                f"{x['utilisation']:.0%}",
                *(f"{part / mib:,.0f}" if part else "" for part in sizes),
                *(["" if x["device_peak"] is None else f"{x['device_peak'] / mib:,.0f}"] if reported else []),
            ]
            lines.append(f"| {name} | {stage} | {' | '.join(cells)} |")
    left_out = [(name, *each) for name, m in models.items() for each in m["left_out"].items()]
    lines += ["", *(f"Left out: {stage} of {name}: {why}." for name, stage, why in left_out), ""] if left_out else [""]
    v = result["vocabulary"]
    large, small = v["vocabularies"]
    lines += [
        f"Log-probs of {v['tokens']:,} tokens, trunk of Qwen2.5-0.5B, chunks of {v['logprob_chunk_bytes'] / mib:g} MiB;"
        f" all logits at once {v['logits'] / mib:,.0f} MiB:",
        "",
        f"| rows | temporaries at {large:,} words, MiB | at {small:,}, MiB | ratio |",
        "|---|---:|---:|---:|",
    ]
    for case in v["cases"]:
        sizes = [f"{x / mib:,.0f}" for x in case["temporaries"]]
        lines.append(f"| {'x'.join(map(str, case['rows']))} | {' | '.join(sizes)} | {case['ratio']:.2f} |")
    return "\n".join(lines)


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", default=",".join(BY_DEFAULT), help="separated by commas; none: the vocabulary test alone"
    )
    parser.add_argument("--repeats", type=int, default=3, help="of each pass; the median counts")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of the products")
    parser.add_argument("--tokens", type=int, help="of the batch, at most; by default all, and of q05 1,024 on a CPU")
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="SECTION.NAME=VALUE")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args(argv)
    names = args.models.split(",") if args.models else []
    if unknown := [name for name in names if name not in MODELS]:
        raise UserError(f"--models={args.models}: {unknown[0]!r} is not one of {', '.join(MODELS)}")
    for name, value in (("repeats", args.repeats), ("tokens", 1 if args.tokens is None else args.tokens)):
        if value < 1:
            raise UserError(f"--{name}={value} must be 1 or more")
    begun = begin()
    by_default = CPU_TOKENS if jax.default_backend() == "cpu" else {}
    models = {}
    for name in names:
        tokens = by_default.get(name) if args.tokens is None else args.tokens
        c, responses = make_config(name, args.dtype, args.changes), some(response_lengths(), tokens)
        models[name] = measure(name, c, responses, repeats=args.repeats)
    result: dict[str, Any] = {
        **begun,
        "dtype": args.dtype,
        "changes": args.changes,
        "models": models,
        "vocabulary": vocabulary(args.dtype, args.changes),
    }
    write(result, table, args.out, "models", *names)
    if (worst := result["vocabulary"]["worst"]) >= LIMIT:
        sys.exit(f"the vocabulary test failed: {worst:.2f} times the temporaries, and the limit is {LIMIT}")


if __name__ == "__main__":
    main()
