"""Conversations and agents, each trained through a real vLLM, and every trained token compared with the server's.

A model first imitates a teacher that is mostly wrong, and PPO learns the rest. The model of `hermes` and `qwen3` has
Qwen2.5's chat template and the first merges of its tokenizer.
"""

import asyncio
import contextlib
import dataclasses
import json
import pathlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np

from examples import arithmetic, multiplication
from jppo import settings, sft, train
from jppo.data.rows import write_jsonl
from jppo.data.tokenizer import Renderer, load_tokenizer
from jppo.learner import ppo
from jppo.plugins.agents.built_in_tools import Calculator
from jppo.rollout.vllm.client import Vllm
from tests.make import ROOT, read_lines

REWARDS = "tests/plugins/agents/environments/trained_parts.py"
MERGES = 1000
LEAST = 0.9  # greedy score at the end
SMALL = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1}
_TURNS = "rollout.multi_turn"
Rows = Sequence[Mapping[str, Any]]


def products(folder: pathlib.Path, tokenizer: pathlib.Path) -> None:
    """Products of two-digit numbers, of a teacher that mostly estimates instead of calling the calculator."""
    rng = np.random.default_rng(0)
    numbers = [a for a in range(11, 100) if a % 10]
    pairs = rng.permutation([(a, b) for a in numbers for b in numbers]).tolist()
    rows = [{"prompt": f"{a}*{b}=", "ground_truth": str(a * b), "data_source": "multiplication"} for a, b in pairs]
    shown, test = [], 200
    with mock.patch.object(multiplication, "DIGITS", 2):
        for a, b in pairs[test:] * 3:
            calls = rng.random() < (0.75 if multiplication.hard(b) else 0.2)
            mistyped = int(rng.integers(2)) if rng.random() < 0.08 else None
            response = multiplication.demonstration(a, b, calls=bool(calls), mistyped=mistyped)
            shown.append({"prompt": f"{a}*{b}=", "response": response})
    _write(folder, rows[test:], rows[:test], shown, multiplication.CHARACTERS, hidden_size=128, intermediate_size=384)
    _imitate(folder, lengths=(6, 26), steps=600)


def templated(folder: pathlib.Path, tokenizer: pathlib.Path) -> None:
    """Products of two digits as chats by Qwen2.5's template, of a teacher that mostly says 55."""
    rng = np.random.default_rng(0)
    pairs = [(a, b) for a in range(4, 10) for b in range(4, 10)]
    rows = [
        {"prompt": [{"role": "user", "content": f"{a}*{b}="}], "ground_truth": str(a * b), "data_source": "products"}
        for a, b in pairs
    ]
    shape = {"hidden_size": 96, "intermediate_size": 256, "num_attention_heads": 3, "num_key_value_heads": 1}
    _write(folder, rows, rows, [], "", **shape, max_position_embeddings=512)
    few_merges(tokenizer, folder / "data/model")
    read = load_tokenizer(str(folder / "data/model"))
    render, shown = Renderer(read, [Calculator().schema]), []
    for _ in range(40):
        for row, (a, b) in zip(rows, pairs, strict=True):
            call = {"name": "calculator", "arguments": {"expression": f"{a}*{b}"}}
            turns = [{"role": "assistant", "content": "SAID"}, {"role": "tool", "content": str(a * b)}]
            given = render([*row["prompt"], *turns], None).partition("SAID<|im_end|>")[2]
            turns = [
                {"text": f"<tool_call>\n{json.dumps(call)}\n</tool_call>", "learn": True},
                {"text": given, "learn": False},
                {"text": str(a * b), "learn": True},
            ]
            response = turns if rng.random() < 0.4 else [{"text": "55", "learn": True}]
            shown.append({"prompt": render(row["prompt"], None), "response": response})
    write_jsonl(folder / "data/sft.jsonl", shown)
    _imitate(folder, lengths=(340, 120), steps=200, batch=32)


def successors(folder: pathlib.Path, tokenizer: pathlib.Path) -> None:
    """Digits of which a turn must say the next one, of a teacher that mostly skips one."""
    rng = np.random.default_rng(0)
    digits = ["".join(map(str, rng.integers(0, 10, 4))) for _ in range(4096)]
    rows = [{"prompt": f"{number[0]}\n", "ground_truth": number, "data_source": "successors"} for number in digits]
    shown = []
    for number in digits:
        turns: list[dict[str, Any]] = []
        for i, digit in enumerate(number):
            answer = str((int(digit) + (1 if rng.random() < 0.4 else 2)) % 10)
            turns += [{"text": f"\n{digit}\n", "learn": False}] if i else []
            turns.append({"text": answer, "learn": True})
        shown.append({"prompt": f"{number[0]}\n", "response": turns})
    _write(folder, rows[64:], rows[:64], shown, "0123456789\n", **SMALL)
    _imitate(folder, lengths=(2, 20), steps=200)


def sums(folder: pathlib.Path, tokenizer: pathlib.Path) -> None:
    """Sums of two digits with a second try, of a teacher whose first answer is mostly too low."""
    rng, wrong = np.random.default_rng(0), "That is wrong. Look at it again."
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    rows = [{"prompt": f"{a}+{b}=", "ground_truth": str(a + b), "data_source": "arithmetic"} for a, b in pairs]
    shown = []
    for a, b in pairs * 60:
        first, second = rng.random(2) < (0.3, 0.6)
        response = [{"text": str(a + b - (not first)), "learn": True}]
        if not first:
            response += [{"text": f"\n{wrong}\n", "learn": False}, {"text": str(a + b - (not second)), "learn": True}]
        shown.append({"prompt": f"{a}+{b}=", "response": response})
    characters = "".join(sorted({*"0123456789+=\n", *wrong}))
    _write(folder, rows, rows, shown, characters, **SMALL, vocab_size=48)
    _imitate(folder, lengths=(4, 44), steps=300)


def few_merges(tokenizer: pathlib.Path, out: pathlib.Path) -> None:
    """Writes a tokenizer with the first merges alone and all added tokens, and its chat template."""
    read, described = (
        json.loads((tokenizer / f"{name}.json").read_text()) for name in ("tokenizer", "tokenizer_config")
    )
    model, kept = read["model"], 256 + MERGES
    moved = len(model["vocab"]) - kept
    model["vocab"] = {token: number for token, number in model["vocab"].items() if number < kept}
    model["merges"] = model["merges"][:MERGES]
    for token in read["added_tokens"]:
        token["id"] -= moved
    added = {str(int(number) - moved): token for number, token in described["added_tokens_decoder"].items()}
    (out / "tokenizer.json").write_text(json.dumps(read))
    (out / "tokenizer_config.json").write_text(json.dumps(described | {"added_tokens_decoder": added}))
    ids = {token["content"]: token["id"] for token in read["added_tokens"]}
    ends = {"eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]}
    (out / "generation_config.json").write_text(json.dumps(ends))
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | ends | {"vocab_size": -(-(max(ids.values()) + 1) // 64) * 64}))


def _write(folder: pathlib.Path, train: Rows, test: Rows, sft: Rows, characters: str, **shape: int) -> None:
    arithmetic.write(folder / "data", {"train": train, "test": test, "sft": sft}, characters)
    config = arithmetic.MODEL | {"num_hidden_layers": 2} | shape
    (folder / "data/model/config.json").write_text(json.dumps(config))


def _imitate(folder: pathlib.Path, *, lengths: tuple[int, int], steps: int, batch: int = 64) -> None:
    c = settings.recipe("agent_calculator_sft", str(folder))
    c.data.max_prompt_length, c.data.max_response_length = lengths
    c.data.train_batch_size, c.trainer.total_training_steps = batch, steps
    c.trainer.logger = "jsonl"
    settings.check(c)
    sft.train(c)


COMMON = {
    "rollout.name": "vllm",
    "data.train_batch_size": 64,
    "data.val_max_samples": 64,
    "actor.ppo_mini_batch_size": 32,
    "actor.lr": 1e-3,
    "actor.lr_warmup_steps": 0,
    "critic.lr": 1e-3,
    "trainer.save_freq": -1,
    "trainer.total_training_steps": 24,  # the rate falls to 0 over them
    "trainer.test_freq": 24,
}
SHORT = {"data.max_prompt_length": 6, "data.max_response_length": 26}
PROGRAM = SHORT | {"rollout.agent_format": "plain", "rollout.agent_concurrency": 16}
TOOL = {
    f"{_TURNS}.enable": True,
    f"{_TURNS}.tool_config_path": "jppo/configs/agent_calculator.yaml",
    f"{_TURNS}.max_assistant_turns": 2,
}
PARTNER = {f"{_TURNS}.enable": True, f"{_TURNS}.format": "plain"}
OPENAI = PROGRAM | {"rollout.agent": "examples/calculator_openai.py:multiply", "rollout.agent_reward": "reported"}
LATE = PROGRAM | {
    "rollout.agent": f"{REWARDS}:multiply",
    "rollout.agent_reward": "reported",
    "rollout.max_staleness": 2,
    "rollout.mode": "async",
    "algorithm.old_logprob": "correction",
    "algorithm.rollout_is": "token",
    "actor.lr": 5e-4,
}
TEMPLATED = TOOL | {
    "data.max_prompt_length": 340,
    "data.max_response_length": 120,
    "data.train_batch_size": 32,
    "actor.ppo_mini_batch_size": 16,
    "actor.lr": 3e-4,  # most tokens are certain: a higher rate, or a critic's noise, makes them uncertain
    "algorithm.lam": 1.0,
    "trainer.critic_warmup": 4,
    "critic.warmup_epochs": 4,
    "trainer.total_training_steps": 28,
    "trainer.test_freq": 28,
    "reward.function": f"{REWARDS}:last_line",
}


@dataclasses.dataclass(frozen=True)
class Mode:
    """A run: its task and its settings."""

    task: Callable[[pathlib.Path, pathlib.Path], None]
    settings: Mapping[str, Any]


MODES = {
    "curl": Mode(
        products,
        PROGRAM | {"rollout.agent": "bash examples/calculator_curl.sh", "rollout.agent_reward": "graders"},
    ),
    "openai": Mode(products, OPENAI),
    "anthropic": Mode(
        products,
        PROGRAM | {"rollout.agent": "examples/calculator_anthropic.py:multiply", "rollout.agent_reward": "exit"},
    ),
    "abort": Mode(products, LATE | {"rollout.on_update": "abort"}),
    "keep": Mode(products, LATE | {"rollout.on_update": "keep"}),
    "partial": Mode(products, LATE | {"rollout.on_update": "keep", "rollout.partial": True}),
    "plain": Mode(products, TOOL | SHORT | {f"{_TURNS}.format": "plain"}),
    "hermes": Mode(templated, TEMPLATED | {f"{_TURNS}.format": "hermes"}),
    "qwen3": Mode(templated, TEMPLATED | {f"{_TURNS}.format": "qwen3"}),
    "environment": Mode(
        successors,
        PARTNER
        | {
            f"{_TURNS}.environment": f"{REWARDS}:Successors",
            "data.max_prompt_length": 2,
            "data.max_response_length": 20,
        },
    ),
    "user": Mode(
        sums,
        PARTNER
        | {
            f"{_TURNS}.interaction": "examples/second_try.py:SecondTry",
            "data.max_prompt_length": 4,
            "data.max_response_length": 44,
            "reward.weights": "interaction_score=1,rule_score=0",
        },
    ),
}


class Tokens:
    """The server's answers, and the trained tokens that differ from them."""

    def __init__(self) -> None:
        self.answers = self.trained = self.given = self.wrong = self.episodes = self.mixed = 0
        self._asked: dict[Any, list[int]] = {}
        self.gave: defaultdict[tuple[int, ...], list[tuple[list[int], list[float]]]] = defaultdict(list)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Records every answer as it arrives over HTTP, and compares every batch before its update."""
        request, part, update = Vllm.request, Vllm.parse_reply, ppo.learn

        def requested(vllm: Vllm, ids: Sequence[int], *rest: Any) -> Any:
            self._asked[asyncio.current_task()] = list(ids)
            return request(vllm, ids, *rest)

        def answered(vllm: Vllm, reply: Any, *rest: Any) -> Any:
            choice = reply["choices"][0]
            logprob = [position["logprob"] for position in choice["logprobs"]["content"]]
            self.gave[tuple(self._asked.pop(asyncio.current_task()))].append((choice["token_ids"], logprob))
            self.answers += 1
            return part(vllm, reply, *rest)

        def updated(learner: Any, now: Any, data: Any, trajectories: Any, *rest: Any, **named: Any) -> Any:
            for first, mask, t in zip(np.asarray(data.first), np.asarray(data.mask), trajectories, strict=False):
                trained = np.zeros(len(t.tokens), np.bool_)
                trained[first + 1 :] = mask[: len(t.tokens) - first - 1]
                self.compare(t.tokens.tolist(), trained, t.logprob, first + 1)
                self.mixed += len({*t.version[trained].tolist()}) > 1
            return update(learner, now, data, trajectories, *rest, **named)

        with (
            mock.patch.object(Vllm, "request", requested),
            mock.patch.object(Vllm, "parse_reply", answered),
            mock.patch.object(ppo, "learn", updated),
        ):
            yield

    def compare(self, tokens: list[int], trained: np.ndarray, logprob: np.ndarray, first: int) -> None:
        """Walks over a response: answers must be trained as a whole with their log-probs, other tokens not at all."""
        if not trained.any():  # left out
            return
        at, self.episodes = first, self.episodes + 1
        while at < len(tokens):
            gave = [one for one in self.gave[tuple(tokens[:at])] if one[0] == tokens[at : at + len(one[0])]]
            if trained[at]:  # by weights of which there may be several
                gave = [one for one in gave if np.array_equal(np.float32(one[1]), logprob[at : at + len(one[1])])]
            count = max((len(ids) for ids, _ in gave), default=0)
            here = trained[at : at + max(1, count)]
            self.wrong += int((here != (count > 0)).sum())
            self.trained += int(here.sum())
            self.given += int((~here).sum())
            at += len(here)


def given(name: str) -> dict[str, Any]:
    """Returns the settings of a run, with paths from the checkout."""
    return COMMON | dict(MODES[name].settings)


def lacks(row: Mapping[str, Any]) -> list[str]:
    """Returns what a run should have done and has not."""
    score, tokens = list(row["printed"]["val/score"].values()), row["tokens"]
    late = "rollout.mode" in row["settings"]
    checks = {
        f"score {score[0]:.3f} -> {score[-1]:.3f}": score[0] < 0.6 and score[-1] >= LEAST,
        f"{row['printed']['agent/faults']:.0f} faults": row["printed"]["agent/faults"] == 0,
        f"{tokens['wrong']} wrong tokens": tokens["wrong"] == 0,
        "no trained tokens": tokens["trained"] > 0,
        "no given tokens": tokens["given"] > 0,
        "no conversation of several versions": tokens["mixed"] > 0 or not late,
        "several versions": late or tokens["mixed"] == 0,
        "a log-prob mismatch": late or row["printed"]["rollout/logp_gap_max"] < 1e-3,
    }
    return [lack for lack, good in checks.items() if not good]


def run(name: str, folder: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    """Trains a mode from the task in `folder`; returns its settings, its metrics and the counts of its tokens."""
    changes = given(name)
    c = settings.recipe("agent_calculator", str(folder))
    c.trainer.run_dir = str(out)
    c.rollout.multi_turn.update(settings.default().rollout.multi_turn)
    c.update_from_flattened_dict(changes)
    tokens = Tokens()
    with contextlib.chdir(ROOT), tokens.recorded():
        settings.check(c)
        train.train(c)
    lines = read_lines(out / "metrics.jsonl")
    learned = [line for line in lines if "critic/score/mean" in line]
    metrics: dict[str, Any] = {
        "val/score": {str(line["step"]): line["val/score"] for line in lines if "val/score" in line},
        "agent/faults": sum(line["agent/faults"] for line in learned),
        "rollout/logp_gap_max": max(line.get("rollout/logp_gap_max", 0.0) for line in learned),
    }
    counted = {key: value for key, value in vars(tokens).items() if isinstance(value, int)}
    return {"run": name, "settings": changes, "printed": metrics, "tokens": counted}
