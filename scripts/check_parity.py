"""Compares jppo's model with transformers': logits, log-probs, entropy, on padded and packed random tokens.

    python scripts/check_parity.py HF_DIR [--dtype float32] [--random] [--greedy 300]

Prints the largest difference of each, relative to transformers' largest value, and exits with 1 when one is
above 1e-4, 1e-2 in float16, 8e-2 in bfloat16. A classifier with one label (a reward model) is compared by its values.
Needs torch. With --random only HF_DIR's config.json is read: both take the same random weights. With --greedy both also
write so many tokens, which must be the same. The lengths of a model with longrope must all be within its first context,
or all beyond it.
"""

import argparse
import pathlib
import shutil
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from jppo.chat import engine_settings
from jppo.errors import UserError
from jppo.models import decoder, heads, hf
from jppo.rollout.inprocess import make_programs, stream
from jppo.rollout.protocol import greedy

TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 8e-2}


def main() -> int:
    """Exits with 0 if both agree, 1 if they differ, 2 if the model cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("hf_dir")
    parser.add_argument("--dtype", default="float32", choices=list(TOLERANCE), help="of both models")
    parser.add_argument("--random", action="store_true", help="random weights in the shape of config.json")
    parser.add_argument("--lengths", default="33,7,1,64", help="of the sequences, separated by commas")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--greedy", type=int, default=0, help="tokens that both write, too")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    lengths = [int(n) for n in args.lengths.split(",")]
    try:
        with tempfile.TemporaryDirectory() as folder:
            if args.random:
                write_random(args.hf_dir, folder, args.seed)
            directory = folder if args.random else args.hf_dir
            return compare(directory, args.dtype, lengths, args.temperature, args.seed, args.greedy)
    except UserError as e:
        print(e, file=sys.stderr)
        return 2


def write_random(hf_dir: str, folder: str, seed: int) -> None:
    """A checkpoint of random weights in the shape of hf_dir's config.json, biases and buffers not 0, norms not 1."""
    file = hf.resolve_directory(hf_dir, weights=False) / "config.json"
    hf.read_config(file.parent)  # rejects unsupported models before the weights are initialised
    shutil.copy(file, folder)
    torch.manual_seed(seed)
    config = transformers.AutoConfig.from_pretrained(folder)
    model = kind_of(folder).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for p in model.state_dict().values():  # parameters, and buffers of the file
            if p.ndim == 1:
                p.add_(0.1 * torch.randn(p.shape))
    model.save_pretrained(folder)
    shutil.copy(file, pathlib.Path(folder) / "config.json")


def kind_of(hf_dir: str | pathlib.Path) -> Any:
    """Returns transformers' class for the directory."""
    architectures = hf.read_config(hf_dir)[0].get("architectures") or [""]
    if architectures[0].endswith("ForSequenceClassification"):
        return transformers.AutoModelForSequenceClassification
    return transformers.AutoModelForCausalLM


def compare(hf_dir: str, dtype: str, lengths: list[int], temperature: float, seed: int, greedy: int) -> int:
    """Prints the table of differences; returns 1 if one is above the tolerance."""
    _, cfg = hf.read_config(hf_dir, longest=max(max(lengths), greedy + 1))
    kind = kind_of(hf_dir)
    classifier = kind is transformers.AutoModelForSequenceClassification
    values = hf.load_params(hf_dir, cfg, head="value" if classifier else "lm", param_dtype=jnp.dtype(dtype))
    # eager: the one form of theirs in which every family has its soft caps, and experts may have any width
    model = kind.from_pretrained(
        hf.resolve_directory(hf_dir, weights=True),
        dtype=getattr(torch, dtype),
        attn_implementation="eager",
        experts_implementation="eager",
    ).to(getattr(torch, dtype))  # transformers reads MXFP4 as bfloat16
    rng = np.random.default_rng(seed)
    parts = [rng.integers(0, cfg.vocab_size, n).astype(np.int32) for n in lengths]
    goals = [rng.integers(0, cfg.vocab_size, n).astype(np.int32) for n in lengths]
    model.eval()
    if classifier:
        theirs = [reference_values(model, part) for part in parts]
    else:
        theirs = [reference(model, part, goal, temperature) for part, goal in zip(parts, goals, strict=True)]

    @jax.jit
    def ours(values, tokens, goals, segment, position):
        model = decoder.Decoder(cfg, dtype=jnp.dtype(dtype), param_dtype=jnp.dtype(dtype))
        hidden = model.apply({"params": values}, tokens, segment, position)
        if classifier:
            return (heads.values(hidden, values["score"]["kernel"]),)
        kernel = decoder.head_kernel(values, cfg)
        logp, entropy = heads.logprob_entropy(
            (hidden, kernel, cfg), goals, temperature=temperature, chunk_tokens=16, with_entropy=True
        )
        return heads.logits_of((hidden, kernel, cfg)), logp, entropy

    worst = 0.0
    names = ("values",) if classifier else ("logits", "log-probs", "entropy")
    for name, layout in (("padded", padded), ("packed", packed)):
        tokens, segment, position, real = layout(parts)
        outputs = ours(values, tokens, layout(goals)[0], segment, position)
        for quantity, x, expected in zip(names, outputs, zip(*theirs, strict=True), strict=True):
            expected = np.concatenate(expected)
            difference = np.abs(np.asarray(x)[real] - expected).max() / np.abs(expected).max()
            print(f"{name}  {quantity:<9}  largest relative difference {difference:.2e}")
            worst = max(worst, float(difference)) if np.isfinite(difference) else np.inf
    if greedy:
        same = agreement(model, values, cfg, dtype, parts[0][:1], greedy)
        print(f"greedy  {same} of {greedy} tokens are the same")
        worst = worst if same == greedy else np.inf
    verdict = "ok" if worst <= TOLERANCE[dtype] else "FAILED"
    print(f"{verdict}: {cfg.family} {dtype}, {worst:.2e} of at most {TOLERANCE[dtype]:.0e}")
    return int(worst > TOLERANCE[dtype])


def reference(model, tokens: np.ndarray, goals: np.ndarray, temperature: float) -> tuple[np.ndarray, ...]:
    """transformers' logits [T, V], log-probs [T] and entropy [T] of one sequence alone."""
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens)[None].long()).logits[0].float()
    logp = torch.log_softmax(logits / temperature, -1)
    chosen = logp.gather(1, torch.from_numpy(goals)[:, None].long())[:, 0]
    return logits.numpy(), chosen.numpy(), -(logp.exp() * logp).sum(-1).numpy()


def reference_values(model, tokens: np.ndarray) -> tuple[np.ndarray, ...]:
    """Returns transformers' value [T] after every token: its classifier's output on every prefix."""
    with torch.no_grad():
        hidden = model.base_model(torch.from_numpy(tokens)[None].long()).last_hidden_state[0]
        return (model.score(hidden)[:, 0].float().numpy(),)


def agreement(model, values, cfg, dtype: str, prompt: np.ndarray, count: int) -> int:
    """Counts the greedy tokens after the prompt on which both agree; jppo uses its cache."""
    with torch.no_grad():
        expected = model.generate(
            torch.from_numpy(prompt)[None].long(), max_new_tokens=count, min_new_tokens=count, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )[0, len(prompt) :].numpy()  # fmt: skip
    settings = engine_settings(cfg, dtype, len(prompt) + count, len(prompt))
    programs = make_programs(settings, (), steps=count)
    written = stream(programs, settings, programs.prepare(values), prompt, greedy(count))
    differ = np.flatnonzero(np.concatenate(list(written)) != expected)
    return int(differ[0]) if len(differ) else count


def padded(parts: list[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Packs one sequence per row: tokens, segment, position [R, T], and the mask of real entries."""
    longest = max(map(len, parts)) + 3
    tokens = np.stack([np.pad(part, (0, longest - len(part))) for part in parts])
    segment = np.stack([np.repeat([1, 0], [len(part), longest - len(part)]) for part in parts]).astype(np.int32)
    position = np.broadcast_to(np.arange(longest, dtype=np.int32), tokens.shape)
    return tokens, segment, position, segment > 0


def packed(parts: list[np.ndarray]) -> tuple[np.ndarray, ...]:
    """All sequences in one row, then some empty entries."""
    lengths = [len(part) for part in parts] + [5]
    tokens = np.concatenate([*parts, np.zeros(5, np.int32)])[None]
    segment = np.repeat([*range(1, len(parts) + 1), 0], lengths).astype(np.int32)[None]
    position = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])[None]
    return tokens, segment, position, segment > 0


if __name__ == "__main__":
    sys.exit(main())
