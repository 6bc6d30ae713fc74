"""Model passes: tokens/s and FLOP utilisation, on a CPU or on an accelerator.

    python benchmarks/models.py                                 # shapes S and M, and Qwen2.5-0.5B
    python benchmarks/models.py --models q05,q15,q7 --sequences 16 --length 4096          # on a GPU
    python benchmarks/models.py --models S --dtype bfloat16 --set model.attention=xla

Each model has random weights, is in a process of its own, and goes through the passes of training: hidden states;
log-probs, without entropy; an update of adapters and one of all weights, by the clipped loss, the optimizer's steps
with it. The batch is ragged (work.py), and --tokens takes a part of it; or it is --sequences of --length tokens, half
of each prompt, with rematerialised layers. Tokens are real ones. FLOP are those that the real tokens need, relative to
a large matrix product in between and to the vendor's dense peak, for known devices. A pass that runs out of the
device's memory is left out. 7B has weights and moments in bfloat16, the others in float32. No vLLM is needed.
Writes OUT/<date>-<machine>-models-<models>.json and prints a table.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from machine import ROOT, begin, machine, names_of, title, write
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
from jppo.learner.make import Trained, chunk_tokens, load_trained, make_decoder, make_mesh, make_trainable, plan_rows
from jppo.learner.trainable import CompiledLoss
from jppo.models import config_reader, lora
from jppo.models.config import ModelConfig, pad_vocab
from jppo.models.lora import Lora
from jppo.run.make import make_recipe
from jppo.settings import Settings
from jppo.types import Array, Params, Rows, Trajectory

# Qwen2.5-0.5B, and the same family's larger models, whose heads are 128 wide.
QWEN = hf_config(24, 896, 4864, 14, 2, 151936) | {"rope_theta": 1000000.0, "max_position_embeddings": 32768}
WIDER = {
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
CPU_TOKENS = {"q05": 1024}  # tokens of the batch for a minute or two on a CPU; other models use all
CPU_SCANS = {"q05"}  # unrolled, XLA copies the weights of every layer on a CPU; the small ones are faster so
IN_BF16 = {"q7"}  # weights and their optimizer, too
RANK = 16  # of the adapters


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
    flops = forward_flops(s.cfg, s.responses, prompt=s.prompt, lm_head=lm_head)
    return timed(s, lambda: jax.block_until_ready([fn(s.trained.learned, rows) for rows in s.rows]), flops)


def updated(s: Subject, adapters: Lora | None) -> dict[str, Any]:
    """An update over the batch, of all weights or of the `adapters`: gradients and optimizer steps."""
    minis, compiled = make_minis(s), make_loss(s)
    trained, flops = s.trained, 3 * forward_flops(s.cfg, s.responses, prompt=s.prompt, lm_head=True)
    if adapters is not None:
        layout = state.adapters(s.cfg, s.mesh, adapters, head="lm")
        key = jax.random.key(s.c.trainer.seed)
        trained = Trained(layout, *state.adapt(layout, s.trained.learned, adapters, key=key))
        flops = lora_update_flops(s.cfg, adapters, s.responses, prompt=s.prompt)
    trainable, opt = make_trainable(s.c.actor, "actor", compiled, trained, total_steps=1, scaled=s.c.model.scales_loss)
    step, now = np.zeros((), np.int32), [trained.learned, opt]
    del opt

    def run() -> None:
        now[:] = trainable.learn(*now, step, minis, None)[:2]

    return timed(s, run, flops)


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


def measure(name: str, c: ConfigDict, responses: np.ndarray, *, prompt: int = PROMPT, repeats: int) -> dict[str, Any]:
    """Measures the passes of one model, smaller ones first; and the reasons for skipped ones."""
    adapters = Lora(RANK, c.model.lora_alpha, lora.parse_targets(c.model.target_modules))
    passes: dict[str, Callable[[Subject], dict[str, Any]]] = {
        "hidden states": forward,
        "log-probs": logprobs,
        f"LoRA update, rank {RANK}": functools.partial(updated, adapters=adapters),
        "update": functools.partial(updated, adapters=None),
    }
    out: dict[str, Any] = {"passes": {}, "left_out": {}}
    subject = None
    for stage, run in passes.items():
        try:
            subject = subject or make_subject(name, settings.typed(c), responses, prompt=prompt, repeats=repeats)
            out["passes"][stage] = run(subject)
        except jax.errors.JaxRuntimeError as e:
            if "RESOURCE_EXHAUSTED" not in str(e):
                raise
            out["left_out"][stage] = "it ran out of memory"
        seconds = out["passes"].get(stage, {}).get("seconds")
        outcome = out["left_out"][stage] if seconds is None else f"{statistics.median(seconds):.4f} s"
        print(f"{name}: {stage} {outcome}", file=sys.stderr, flush=True)
    return out


def one(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The passes of one model, in this process."""
    on_cpu = jax.default_backend() == "cpu"
    dtype = args.dtype or ("float32" if on_cpu else "bfloat16")
    tokens = CPU_TOKENS.get(name) if on_cpu and args.tokens is None else args.tokens
    responses, prompt, sizes = some(response_lengths(), tokens), PROMPT, dict[str, Any]()
    if args.length:
        prompt = args.length // 2
        responses = np.full(args.sequences, args.length - prompt)
        sizes = {"data.max_prompt_length": prompt, "data.max_response_length": args.length - prompt}
        sizes |= dict.fromkeys(("data.train_batch_size", "actor.ppo_mini_batch_size"), args.sequences)
        sizes["model.remat"] = "full"
    if name in IN_BF16:
        sizes |= dict.fromkeys(("model.param_dtype", "actor.master_dtype", "actor.moments_dtype"), "bfloat16")
    c = make_config(name, dtype, [*(f"{k}={v}" for k, v in sizes.items()), *args.changes])
    measured = measure(name, c, responses, prompt=prompt, repeats=args.repeats)
    peak = None if on_cpu else sharding.known_peak(machine()["device"], dtype)
    return measured | {"dtype": dtype, "peak_flops_per_s": peak}


def in_process(name: str, argv: Sequence[str]) -> dict[str, Any]:
    """Runs `one` in a separate process, with its own memory."""
    command = [sys.executable, __file__, *argv, "--measure", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return {"passes": {}, "left_out": {"every pass": f"exit code {done.returncode}"}}
    return json.loads(done.stdout.splitlines()[-1])


def table(result: dict[str, Any]) -> str:
    """The result as markdown."""
    lines = [
        f"{title(result['machine'])}; jax {result['jax']}; commit {result['commit']}; {result['date']};"
        f" load average before {result['load_average']:.1f}",
        "",
        "| model | pass | tokens | tokens/s | GFLOP/s | of the matmul rate | of the vendor's peak | device peak, GiB |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, measured in result["models"].items():
        for stage, x in measured["passes"].items():
            peak = measured["peak_flops_per_s"]
            cells = (
                f"{x['tokens']:,}",
                f"{x['tokens_per_s']:,.0f}",
                f"{x['flops_per_s'] / 1e9:,.0f}",
                f"{x['utilisation']:.0%}",
                "" if peak is None else f"{x['flops_per_s'] / peak:.1%}",
                "" if x["device_peak"] is None else f"{x['device_peak'] / 2**30:.1f}",
            )
            lines.append(f"| {name}, {measured['dtype']} | {stage} | {' | '.join(cells)} |")
    left_out = [(name, *each) for name, m in result["models"].items() for each in m["left_out"].items()]
    return "\n".join([*lines, "", *(f"Left out: {stage} of {name}: {why}." for name, stage, why in left_out)]).rstrip()


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="S,M,q05", help=f"of {', '.join(MODELS)}, separated by commas")
    parser.add_argument("--repeats", type=int, default=3, help="of each pass; the median counts")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of the products; bfloat16 on an accelerator")
    parser.add_argument("--tokens", type=int, help="of the batch, at most; by default all, and of q05 1,024 on a CPU")
    parser.add_argument("--length", type=int, help="of each sequence; in place of the ragged batch")
    parser.add_argument("--sequences", type=int, default=16, help="of this length; an update is one mini-batch of them")
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="SECTION.NAME=VALUE")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    names = names_of(args.models, MODELS, "--models")
    for option, least in (("repeats", 1), ("tokens", 1), ("length", 2), ("sequences", 1)):
        if (value := getattr(args, option)) is not None and value < least:
            raise UserError(f"--{option}={value} must be {least} or more")
    if args.measure:
        print(json.dumps(one(args.measure, args)))
        return
    # This process must not take the device before its children: `write` asks for the machine when they are done.
    given = sys.argv[1:] if argv is None else argv
    result = {**begin(), "changes": args.changes, "models": {name: in_process(name, given) for name in names}}
    write(result, table, args.out, "models", *names)
    if not all(x["passes"] for x in result["models"].values()):
        sys.exit("a model failed: see above")


if __name__ == "__main__":
    main()
