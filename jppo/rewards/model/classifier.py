"""The files of a reward model: its config, its tokenizer with the text of a sample, and weights as safetensors."""

import bisect
import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
import pathlib
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from jppo.child_process import executable, python_path
from jppo.models import families, hf, tensorfile
from jppo.rewards.parts import Sample
from jppo.settings import UserError


@dataclasses.dataclass(frozen=True)
class Classifier:
    """The config.json of a reward model."""

    path: str  # as in reward.model.path, for errors
    directory: str  # its local path
    model_type: str
    vocab_size: int
    pad_token_id: int | None
    steps: bool = False  # a token classifier


CONVERTED = "~/.cache/jppo/reward_models"
_V_HEADS = ("v_head.weight", "v_head.summary.weight")  # Starling's and TRL's
_PLACE = "said-by-the-policy"
_OWN = "reward.function=PATH.py:compute_score can run any model, and reward.judge.* asks a server"


def read_classifier(
    path: str, *, tokenizer: Any, max_length: int, directory: pathlib.Path | None = None, steps: bool = False
) -> Classifier:
    """Reads the reward model at `path` and checks its config and tokenizer; UserError if it is not one.

    `directory` is a converted copy; `steps`: a token classifier.
    """
    directory = located(path) if directory is None else directory
    file = directory / "config.json"
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError as e:
        raise refused(path, f"{file} is missing; a model directory must have it") from e
    except (ValueError, RecursionError) as e:
        raise refused(path, f"{file} is not valid JSON: {e}") from e
    if not isinstance(config, dict):
        raise refused(path, f"{file} must be a JSON object, not {type(config).__name__}")
    names = config.get("id2label")
    labels = len(names) if isinstance(names, dict) else config.get("num_labels")
    wrong = "Sequence" if steps else "Token"
    if f"For{wrong}Classification" in (kind := str(config.get("architectures"))):
        way = (
            "leave reward.model.step_aggregation empty" if steps else "set reward.model.step_aggregation=min or another"
        )
        raise refused(path, f"{file} has architectures={kind}, which scores {'responses' if steps else 'steps'}; {way}")
    if labels not in ((None, 1, 2) if steps else (None, 1)):
        rule = "a model of steps has one, or two of which the second is good" if steps else "a reward model has one"
        raise refused(path, f"{file} has {labels} labels; {rule}; {_OWN}")
    if steps and not tokenizer.is_fast:
        raise refused(path, "its tokenizer has no offsets, which locate the steps; put a tokenizer.json there")
    inner = config.get("text_config")  # of multimodal models
    text = inner if isinstance(inner, dict) and inner else config
    vocab_size = text.get("vocab_size")
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if not isinstance(vocab_size, int) or largest >= vocab_size:
        raise refused(
            path,
            f"its tokenizer has ids up to {largest}, but its embedding has vocab_size={vocab_size} rows;"
            " put the model's own tokenizer files there",
        )
    longest = [text.get("max_position_embeddings") or math.inf, tokenizer.model_max_length]
    known = [one for one in longest if isinstance(one, int | float)]
    if len(known) < len(longest):
        raise refused(
            path, f"max_position_embeddings={longest[0]!r} and model_max_length={longest[1]!r} must be numbers"
        )
    if max_length > min(known):
        raise UserError(
            f"reward.model.max_length={max_length} is more than the {min(known)} tokens that the config.json and "
            f"tokenizer_config.json of reward.model.path={path} allow; set it to {min(known)} or less"
        )
    return Classifier(path, str(directory), str(config.get("model_type")), vocab_size, text.get("pad_token_id"), steps)


def located(path: str) -> pathlib.Path:
    """Returns the directory of the reward model after checking for weights."""
    try:
        directory = hf.resolve_directory(path, weights=True)
        if not list(directory.glob("*.safetensors")):  # of the hub's models some have PyTorch weights alone
            directory = hf.resolve_directory(path, weights=True, further=["pytorch_model*.bin"])
        return directory
    except UserError as e:
        raise refused(path, str(e)) from e


def converted(directory: pathlib.Path, *, python: str, cache: str = CONVERTED, steps: bool = False) -> pathlib.Path:
    """Returns the directory, or its copy in the cache with weights as safetensors; UserError if that fails.

    Models with PyTorch files, and causal models with a value head, are converted once. The latter become sequence
    classifiers, or token classifiers with `steps`.
    """
    weights = torch_files(directory)
    if not weights and not has_v_head(directory):
        return directory
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(directory.iterdir())]
    key = hashlib.sha256(json.dumps([str(directory.resolve()), stats]).encode()).hexdigest()[:16]
    kind = "token" if steps else "sequence"
    target = pathlib.Path(cache).expanduser() / f"{directory.name}-{key}{'-steps' if steps else ''}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    made = tempfile.mkdtemp(dir=target.parent)
    try:
        program = [executable(python, "reward.model.python"), "-m", "jppo.rewards.model.convert_worker"]
        env = {**os.environ, "PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [*program, str(directory), made, kind], env=env, capture_output=True, text=True, check=False
        )
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["it says nothing"])[-1][:300]
            raise refused(str(directory), f"its weights cannot be converted to safetensors: {said}")
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.rename(made, target)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target


def torch_files(directory: pathlib.Path) -> list[pathlib.Path]:
    """Lists the PyTorch weights of a directory without safetensors."""
    return [] if list(directory.glob("*.safetensors")) else sorted(directory.glob("pytorch_model*.bin"))


def has_v_head(directory: pathlib.Path) -> bool:
    """Whether the safetensors of a directory are a causal model with a value head."""
    if not ((directory / tensorfile.SINGLE).is_file() or (directory / tensorfile.INDEX).is_file()):
        return False
    try:
        return any(name in _V_HEADS for name in tensorfile.slots(directory))
    except UserError as e:
        raise refused(str(directory), str(e)) from e


def refused(path: str, why: str) -> UserError:
    """Returns the error for a reward model that cannot be used."""
    return UserError(f"reward.model.path={path}: {why}")


def choose_engine(engine: str, model_type: str) -> str:
    """Selects the engine: `auto` is jax for supported families, otherwise transformers."""
    if engine == "auto":
        return "jax" if model_type in families.FAMILIES else "transformers"
    if engine == "jax" and model_type not in families.FAMILIES:
        raise UserError(
            f"reward.model.engine='jax' supports {', '.join(families.FAMILIES)}, but the model is a {model_type}; "
            "set it to 'transformers'"
        )
    return engine


def without_padding(ids: Sequence[int], pad_token_id: int | None) -> list[int]:
    """Returns the ids up to the last non-padding token, where transformers reads a decoder's score.

    The score of a causal model does not depend on later tokens. If all tokens are padding, the first one counts.
    """
    last = max((i for i, token in enumerate(ids) if token != pad_token_id), default=0)
    return list(ids[: last + 1])


class Texts:
    """Builds the token input of a reward model for a sample.

    Chat messages and the response as the assistant's turn, in the chat template of the model's own tokenizer. Without a
    template, and for text prompts, the prompt and then the response, with the tokenizer's special tokens.
    """

    def __init__(self, tokenizer: Any, *, max_length: int):
        """Takes the reward model's own tokenizer and sets its truncation side."""
        if max_length < 1:
            raise UserError(f"reward.model.max_length={max_length} must be 1 or more")
        tokenizer.truncation_side = "left"
        self._tokenizer, self._max_length = tokenizer, max_length
        self._lock = threading.Lock()  # truncation changes a fast tokenizer's state

    def render(self, sample: Sample) -> tuple[str, bool]:
        """Returns the text, and whether it already has its special tokens."""
        messages = sample.prompt.messages
        if isinstance(messages, str):
            return messages + sample.text, False
        if self._tokenizer.chat_template is None:
            return "\n".join([*(message["content"] for message in messages), sample.text]), False
        turns = [*messages, {"role": "assistant", "content": sample.text}]
        return self._tokenizer.apply_chat_template(turns, add_generation_prompt=False, tokenize=False), True

    def read(self, sample: Sample) -> tuple[list[int], bool]:
        """Returns the tokens, and whether they were truncated; the end of a long text is kept."""
        encoded, cut = self._encoded(*self.render(sample))
        return list(encoded["input_ids"]), cut

    def read_marked(self, sample: Sample, pieces: Sequence[str]) -> tuple[list[int], list[int], bool]:
        """Like `read`, of a response of such pieces; the second result is the token that ends each piece.

        The chat template does not see the response, which some templates change.
        """
        text, whole = self.render(dataclasses.replace(sample, text=_PLACE))
        before, found, after = text.rpartition(_PLACE)
        if not found:
            raise ValueError("the chat template of the reward model omits the response; remove the template")
        encoded, cut = self._encoded("".join([before, *pieces, after]), whole, return_offsets_mapping=True)
        spans = [(begin, i) for i, (begin, end) in enumerate(encoded["offset_mapping"]) if begin < end]
        ends = (len(before) + length for length in itertools.accumulate(map(len, pieces)))
        inside = [bisect.bisect_left(spans, (end,)) - 1 for end in ends]  # the last token that begins before the end
        if lost := inside.count(-1):
            raise ValueError(
                f"truncation to reward.model.max_length={self._max_length} removes {lost} of {len(pieces)} steps; raise"
                " it, or lower data.max_response_length"
            )
        return list(encoded["input_ids"]), [spans[k][1] for k in inside], cut

    def _encoded(self, text: str, whole: bool, **how: Any) -> tuple[Mapping[str, Any], bool]:
        """Tokenises a text, which may have its special tokens; the second result: whether it was truncated."""
        how |= dict(add_special_tokens=not whole, verbose=False)
        with self._lock:
            encoded = self._tokenizer(text, **how)
            cut = len(encoded["input_ids"]) > self._max_length
            if cut:  # again by the tokenizer, which keeps the special tokens that it adds
                encoded = self._tokenizer(text, truncation=True, max_length=self._max_length, **how)
        if not encoded["input_ids"]:
            raise ValueError("the tokenizer of the reward model returns no tokens for the text")
        return encoded, cut
