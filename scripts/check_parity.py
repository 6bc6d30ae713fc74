"""Compares jppo's model with transformers': logits, log-probs, entropy, on padded and packed random tokens.

    python scripts/check_parity.py HF_DIR [--dtype float32] [--random]

Prints the largest difference of each, relative to transformers' largest value, and exits with 1 when one is
above 1e-4. Needs torch. With --random only HF_DIR's config.json is read: both take the same random weights.
"""

import argparse
import pathlib
import shutil
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from jppo.config import UserError
from jppo.models import decoder, heads, hf

TOLERANCE = 1e-4


def main() -> int:
    """Exit code 0 where the two agree, 1 where they do not, 2 where the model cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("hf_dir")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of both models")
    parser.add_argument("--random", action="store_true", help="random weights in the shape of config.json")
    parser.add_argument("--lengths", default="33,7,1,64", help="of the sequences, separated by commas")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    lengths = [int(n) for n in args.lengths.split(",")]
    try:
        if not args.random:
            return compare(args.hf_dir, args.dtype, lengths, args.temperature, args.seed)
        with tempfile.TemporaryDirectory() as folder:
            write_random(args.hf_dir, folder, args.seed)
            return compare(folder, args.dtype, lengths, args.temperature, args.seed)
    except UserError as e:
        print(e, file=sys.stderr)
        return 2


def write_random(hf_dir: str, folder: str, seed: int) -> None:
    """A checkpoint of random weights in the shape of hf_dir's config.json, biases not 0 and norms not 1."""
    file = hf.resolve(hf_dir, weights=False) / "config.json"
    hf.read_config(file.parent)  # refuses what is not supported, before the weights are drawn
    shutil.copy(file, folder)
    torch.manual_seed(seed)
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(0.1 * torch.randn(p.shape))
    model.save_pretrained(folder)
    shutil.copy(file, pathlib.Path(folder) / "config.json")


def compare(hf_dir: str, dtype: str, lengths: list[int], temperature: float, seed: int) -> int:
    """Prints the table of differences; 1 where one is above the tolerance."""
    _, cfg = hf.read_config(hf_dir)
    values = hf.load_params(hf_dir, cfg, head="lm", param_dtype=jnp.dtype(dtype))
    torch_dtype = getattr(torch, dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(hf.resolve(hf_dir, weights=True), dtype=torch_dtype)
    rng = np.random.default_rng(seed)
    parts = [rng.integers(0, cfg.vocab_size, n).astype(np.int32) for n in lengths]
    goals = [rng.integers(0, cfg.vocab_size, n).astype(np.int32) for n in lengths]
    theirs = [reference(model.eval(), part, goal, temperature) for part, goal in zip(parts, goals, strict=True)]

    @jax.jit
    def ours(values, tokens, goals, segment, position):
        model = decoder.Decoder(cfg, dtype=jnp.dtype(dtype), param_dtype=jnp.dtype(dtype))
        hidden = model.apply({"params": values}, tokens, segment, position)
        kernel = decoder.head_kernel(values, cfg)
        logp, entropy = heads.logprob_entropy(
            (hidden, kernel, cfg), goals, temperature=temperature, chunk_tokens=16, with_entropy=True
        )
        return heads.logits_of((hidden, kernel, cfg)), logp, entropy

    worst = 0.0
    names = ("logits", "log-probs", "entropy")
    for name, layout in (("padded", padded), ("packed", packed)):
        tokens, segment, position, real = layout(parts)
        found = ours(values, tokens, layout(goals)[0], segment, position)
        for what, x, expected in zip(names, found, zip(*theirs, strict=True), strict=True):
            expected = np.concatenate(expected)
            difference = np.abs(np.asarray(x)[real] - expected).max() / np.abs(expected).max()
            print(f"{name}  {what:<9}  largest relative difference {difference:.2e}")
            worst = max(worst, float(difference)) if np.isfinite(difference) else np.inf
    verdict = "ok" if worst <= TOLERANCE else "FAILED"
    print(f"{verdict}: {cfg.family} {dtype}, {worst:.2e} of at most {TOLERANCE:.0e}")
    return int(worst > TOLERANCE)


def reference(model, tokens: np.ndarray, goals: np.ndarray, temperature: float) -> tuple[np.ndarray, ...]:
    """transformers' logits [T, V], log-probs [T] and entropy [T] of one sequence alone."""
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens)[None].long()).logits[0].float()
    logp = torch.log_softmax(logits / temperature, -1)
    chosen = logp.gather(1, torch.from_numpy(goals)[:, None].long())[:, 0]
    return logits.numpy(), chosen.numpy(), -(logp.exp() * logp).sum(-1).numpy()


def padded(parts: list[np.ndarray]) -> tuple[np.ndarray, ...]:
    """One sequence a row: tokens, segment, position [R, T], and which entries are real."""
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
