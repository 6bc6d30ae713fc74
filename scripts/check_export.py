"""Checks that an exported model gives the same greedy answers in transformers, in vLLM and in jppo.

    python scripts/check_export.py runs/quickstart/hf
    python scripts/check_export.py HF_DIR --prompts FILE.jsonl --n 20 --max-tokens 64

Prompts are the `prompt` column of the file, text or chat messages; the default is HF_DIR/../data/test.jsonl.
All in float32: transformers reads the model by itself and answers one prompt at a time; vLLM is a real server
that gets the weights as in training, from jppo's reading of them; jppo predicts each token by a whole forward
pass. Prints how many answers agree and the first that do not; exits with 1 where any differs.
"""

import argparse
import pathlib
import sys
import tempfile
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from jppo.data.prompts import prompt_of, tokenise
from jppo.data.rows import read_rows
from jppo.data.tokenizer import decode, end_token_ids, load_tokenizer
from jppo.errors import UserError
from jppo.models import decoder, heads, hf, hf_write
from jppo.models.config import ModelConfig
from jppo.rollout.protocol import RolloutError, greedy
from jppo.rollout.servers.member import ServerLimits
from jppo.rollout.vllm.arguments import ServerSettings
from jppo.rollout.vllm.client import start_vllm
from jppo.types import Params, Prompt

Answers = list[list[int]]  # token ids of each response, the end token included


def by_transformers(hf_dir: str, prompts: Sequence[np.ndarray], *, max_tokens: int, end: Sequence[int]) -> Answers:
    """Returns greedy answers of transformers."""
    path = hf.resolve_directory(hf_dir, weights=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    # In place of the directory's own: a repetition penalty there would be no greedy decoding.
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=max_tokens, eos_token_id=list(end), pad_token_id=end[0]
    )
    answers = []
    for ids in prompts:
        tokens = torch.from_numpy(ids)[None].long()
        whole = model.generate(tokens, attention_mask=torch.ones_like(tokens))
        answers.append(whole[0, len(ids) :].tolist())
    return answers


def by_jppo(
    params: Params, cfg: ModelConfig, prompts: Sequence[np.ndarray], *, max_tokens: int, end: Sequence[int]
) -> Answers:
    """Greedy answers of jppo's decoder: a whole forward pass over rows of one length for every token."""
    model = decoder.Decoder(cfg)
    length = np.array([len(ids) for ids in prompts])  # [B]
    tokens = np.zeros((len(prompts), int(length.max()) + max_tokens), np.int32)  # [B, T]
    for row, ids in zip(tokens, prompts, strict=True):
        row[: len(ids)] = ids

    @jax.jit
    def following(params: Params, tokens: jax.Array, length: jax.Array) -> jax.Array:  # [B] i32
        position = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        segment = (position < length[:, None]).astype(jnp.int32)
        hidden = model.apply({"params": params}, tokens, segment, position)
        last = jnp.take_along_axis(hidden, length[:, None, None] - 1, axis=1)  # [B, 1, D]
        return jnp.argmax(heads.logits_of((last, decoder.head_kernel(params, cfg), cfg))[:, 0], axis=-1)

    answers: Answers = [[] for _ in prompts]
    for _ in range(max_tokens):
        chosen = np.asarray(following(params, tokens, length))
        for i, answer in enumerate(answers):
            if not answer or answer[-1] not in end:
                answer.append(int(chosen[i]))
                tokens[i, length[i]] = chosen[i]
                length[i] += 1
    return answers


def by_vllm(
    args: argparse.Namespace,
    params: Params,
    cfg: ModelConfig,
    prompts: Sequence[np.ndarray],
    end: Sequence[int],
) -> Answers:
    """Greedy answers of a vLLM server that got `params` by a publish."""
    settings = ServerSettings(
        python=args.python,
        servers=1,
        port=0,
        dtype="float32",
        max_model_len=max(map(len, prompts)) + args.max_tokens,
        vocab_size=cfg.vocab_size,
        max_num_seqs=64,
        enforce_eager=True,
        gpu_memory_utilization=0.3,
        kv_cache_memory_bytes=1 << 28,
        omp_threads=1,
        start_timeout_s=300.0,
        latent=cfg.latent_sizes,
        delta=cfg.delta_kind,
    )
    asked = [Prompt(str(i), "", "", ids, "", {}) for i, ids in enumerate(prompts)]
    with tempfile.TemporaryDirectory() as run_dir:
        engine = start_vllm(
            str(hf.resolve_directory(args.hf_dir, weights=False)),
            run_dir,
            settings=settings,
            urls=[],
            limits=ServerLimits(request_timeout_s=600.0, health_timeout_s=60.0, max_restarts=0),
            publish_dir="",
        )
        try:
            sampler = engine.ready(eos_token_ids=end, decode=lambda _: "")
            sampler.load(hf_write.hf_tensors(params, cfg), version=1)
            drawn = sampler.generate(asked, greedy(args.max_tokens), version=1)
        finally:
            engine.close()
    return [t.tokens[t.sampled].tolist() for t in drawn]


def first_difference(a: Answers, b: Answers) -> tuple[int, int] | None:
    """Returns prompt and token of the first difference, or None."""
    for i, (one, other) in enumerate(zip(a, b, strict=True)):
        if one != other:
            same = [x == y for x, y in zip(one, other, strict=False)]
            return i, same.index(False) if False in same else len(same)
    return None


def compare(args: argparse.Namespace) -> int:
    """Prints the comparison; returns 1 on any difference."""
    _, cfg = hf.read_config(args.hf_dir)
    tokenizer = load_tokenizer(args.hf_dir)
    end = end_token_ids(args.hf_dir, tokenizer)
    file = args.prompts if args.prompts is not None else pathlib.Path(args.hf_dir).parent / "data/test.jsonl"
    if not file.is_file():
        raise UserError(f"{file} is no file; name one with prompts by --prompts FILE.jsonl")
    rows = read_rows(file)[: args.n]
    messages = [prompt_of(row) for row in rows]
    prompts = [np.asarray(ids, np.int32) for ids in tokenise(messages, rows, tokenizer)]
    params = hf.load_params(args.hf_dir, cfg, head="lm", param_dtype=jnp.float32)
    options = {"max_tokens": args.max_tokens, "end": end}
    answers = {
        "transformers": by_transformers(args.hf_dir, prompts, **options),
        "vLLM": by_vllm(args, params, cfg, prompts, end),
        "jppo": by_jppo(params, cfg, prompts, **options),
    }
    tokens = sum(map(len, answers["transformers"]))
    print(f"{len(prompts)} prompts of {file}, {tokens} tokens of greedy answers")
    failed = False
    for one, other in (("transformers", "vLLM"), ("transformers", "jppo"), ("vLLM", "jppo")):
        agree = sum(a == b for a, b in zip(answers[one], answers[other], strict=True))
        print(f"{one:<12} and {other:<4} agree on {agree} of {len(prompts)} answers")
        if place := first_difference(answers[one], answers[other]):
            failed = True
            i, t = place
            print(f"  first at token {t} of the answer to {messages[i]!r}:")
            for name in (one, other):
                print(f"  {name:<12} {decode(tokenizer, answers[name][i])!r}")
    return int(failed)


def main(argv: list[str] | None = None) -> int:
    """Exits with 0 if all agree, 1 if they differ, 2 if the model or the prompts cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hf_dir")
    parser.add_argument("--prompts", type=pathlib.Path)
    parser.add_argument("--n", type=int, default=100, help="prompts, from the file's start")
    parser.add_argument("--max-tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--python", default="", help="the interpreter that has vLLM")
    args = parser.parse_args(argv)
    try:
        if args.n < 1 or args.max_tokens < 1:
            raise UserError(f"--n={args.n} and --max-tokens={args.max_tokens} must be 1 or more")
        return compare(args)
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except RolloutError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
