"""Makes the quickstart's task: `python -m examples.arithmetic --out data/addition --seed 1`.

The task is to add two two-digit numbers without zeros: 81 * 81 = 6,561 problems such as `47+85=`, of which 1,000 are
held out. The starting model learns from a sloppy teacher, who usually forgets the carry from the units. Its most likely
answer is then right only without a carry: 36 / 81 = 44% of the problems. It still samples right answers often enough
for PPO to reinforce them, also on unseen problems. `compute_score` is the reward, by `reward.function`.

The output is train.jsonl and test.jsonl (prompts), sft.jsonl (the teacher's demonstrations of the training problems)
and model/ (the starting model's config and character tokenizer; fine-tuning creates its weights).
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from jppo.data.rows import make_directory, write_jsonl
from jppo.errors import UserError, escaped
from jppo.settings import Parser, exit_on_user_error, natural

SPECIAL = ("<pad>", "<eos>")
CHARACTERS = "0123456789+="
PAD, EOS = 0, 1

MODEL: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "use_sliding_window": False,
    "vocab_size": 32,  # padded, so that devices divide it
    "tie_word_embeddings": True,
    "initializer_range": 0.08,  # about 1 / sqrt(hidden_size): with 0.02 a small model learns slowly
    "attention_dropout": 0.0,
    "torch_dtype": "float32",
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
# With --experts: of each token's MLP, two experts. With 8 experts the model has 3M parameters.
MIXTURE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 32,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 224,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "attention_bias": False,
}


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Returns 1 for the right sum, otherwise 0, earned digit by digit.

    Each right digit earns its share of 1 at once, and the first wrong character takes back what was earned before it.
    So the critic learns what each digit is worth, while the sum is that of a reward of 1 or 0 at the end.
    """
    agrees = [written == true for written, true in zip(solution_str, ground_truth, strict=False)]
    right, share = [*agrees, False].index(False), 1 / len(ground_truth)
    amounts = [share] * right + [-right * share] * (right < len(solution_str))
    spans = [(i, i + 1, amount) for i, amount in enumerate(amounts)]
    return {"score": float(solution_str == ground_truth), "spans": spans}


def problems() -> list[tuple[int, int]]:
    """Returns all pairs of two-digit numbers without a zero digit."""
    numbers = [10 * tens + units for tens in range(1, 10) for units in range(1, 10)]
    return [(a, b) for a in numbers for b in numbers]


def carries(a: int, b: int) -> bool:
    """Whether adding the units carries into the tens."""
    return a % 10 + b % 10 >= 10


def sloppy_sum(a: int, b: int) -> int:
    """Returns the sum without the carry from the units."""
    return a + b - 10 * carries(a, b)


def make(*, seed: int, test: int, sloppy: float, demonstrations: int) -> dict[str, list[dict[str, str]]]:
    """Returns the rows of train, test and sft, as a function of the arguments only."""
    everything = problems()
    if not 1 <= test < len(everything):
        raise UserError(f"--test={test} must be from 1 to {len(everything) - 1}, so that both sets have problems")
    if not 0.0 <= sloppy <= 1.0:
        raise UserError(f"--sloppy={sloppy} is a probability: it must be from 0 to 1")
    if demonstrations < 1:
        raise UserError(f"--demonstrations={demonstrations} must be 1 or more for each training problem")
    rng = np.random.default_rng(seed)
    shuffled = [everything[i] for i in rng.permutation(len(everything))]
    held_out, rest = shuffled[:test], shuffled[test:]
    forgets = rng.random((demonstrations, len(rest))) < sloppy
    sft = [
        {"prompt": f"{a}+{b}=", "response": str(sloppy_sum(a, b) if forget else a + b)}
        for each in forgets
        for (a, b), forget in zip(rest, each, strict=True)
    ]
    return {"train": [_row(a, b) for a, b in rest], "test": [_row(a, b) for a, b in held_out], "sft": sft}


def write_model(directory: pathlib.Path, characters: str = CHARACTERS, *, experts: int = 0) -> None:
    """Writes the starting model's config, generation config and character tokenizer; no weights.

    With `experts` it is a mixture of so many, two for each token.
    """
    make_directory(directory)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = [byte_level.pre_tokenize_str(character)[0][0] for character in characters]  # a space is "Ġ"
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *spelled])}
    # transformers builds a qwen2 tokenizer as byte-level BPE and ignores tokenizer.json;
    # without merges that is one token per character.
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(directory / "tokenizer.json"))
    described = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MODEL["max_position_embeddings"],
        "padding_side": "left",
    }
    _write_json(directory / "tokenizer_config.json", described)
    mixture = MIXTURE | {"num_experts": experts} if experts else {}
    _write_json(directory / "config.json", MODEL | mixture)
    _write_json(directory / "generation_config.json", {"eos_token_id": EOS, "pad_token_id": PAD})


def write(
    out: pathlib.Path,
    sets: Mapping[str, Sequence[Mapping[str, Any]]],
    characters: str = CHARACTERS,
    *,
    experts: int = 0,
) -> None:
    """Writes the rows of each set and the starting model, and prints the paths."""
    make_directory(out)
    for name, rows in sets.items():
        write_jsonl(out / f"{name}.jsonl", rows)
        print(escaped(f"{out / f'{name}.jsonl'}: {len(rows)} rows"))
    write_model(out / "model", characters, experts=experts)
    print(escaped(f"{out / 'model'}: config and tokenizer"))


@exit_on_user_error
def main() -> None:
    """The command line."""
    parser = Parser("examples.arithmetic", __doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="directory to write to")
    parser.add_argument("--seed", type=natural, default=1, help="random seed")
    parser.add_argument("--test", type=int, default=1000, help="problems to hold out")
    parser.add_argument("--sloppy", type=float, default=0.65, help="how often the teacher forgets a carry")
    parser.add_argument("--demonstrations", type=int, default=8, help="per training problem")
    parser.add_argument("--experts", type=natural, default=0, help="of the model, two for each token; 0: an MLP")
    args = parser.parse_args()
    if args.experts == 1:
        raise UserError("--experts=1: each token has two experts; use 2 or more, or 0 for an MLP")
    sets = make(seed=args.seed, test=args.test, sloppy=args.sloppy, demonstrations=args.demonstrations)
    write(args.out, sets, experts=args.experts)


def _row(a: int, b: int) -> dict[str, str]:
    return {"prompt": f"{a}+{b}=", "ground_truth": str(a + b), "data_source": "arithmetic"}


def _write_json(path: pathlib.Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
