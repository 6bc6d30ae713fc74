"""Reward models as classifiers: their config, tokenizer and weights, and the scores of supported families by JAX."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jppo.child_process import executable, python_path
from jppo.errors import UserError
from jppo.models import families, heads, hf, tensorfile
from jppo.models.attention import Attend
from jppo.models.decoder import Decoder, identity
from jppo.models.sequence_parallel import WHOLE
from jppo.types import Params


@dataclasses.dataclass(frozen=True)
class Classifier:
    """The config.json of a reward model."""

    path: str  # as in reward.model.path, for errors
    directory: str  # its local path
    model_type: str
    vocab_size: int
    pad_token_id: int | None
    steps: bool = False  # a token classifier


_CACHE = "~/.cache/jppo/reward_models"
_SHORTEST_ROW = 64  # tokens; shorter rows are padded to this
_V_HEADS = ("v_head.weight", "v_head.summary.weight")  # Starling's and TRL's
_ALTERNATIVES = "reward.function=PATH.py:compute_score can run any model, and reward.judge.* asks a server"


def read_classifier(
    path: str, *, tokenizer: Any, max_length: int, directory: pathlib.Path | None = None, steps: bool = False
) -> Classifier:
    """Reads the reward model at `path` and checks its config and tokenizer; UserError if it is not one.

    `directory` is a converted copy; `steps`: a token classifier.
    """
    directory = locate(path) if directory is None else directory
    file = directory / "config.json"
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError as e:
        raise model_error(path, f"{file} is missing; a model directory must have it") from e
    except (ValueError, RecursionError) as e:
        raise model_error(path, f"{file} is not valid JSON: {e}") from e
    if not isinstance(config, dict):
        raise model_error(path, f"{file} must be a JSON object, not {type(config).__name__}")
    label_names = config.get("id2label")
    label_count = len(label_names) if isinstance(label_names, dict) else config.get("num_labels")
    wrong_kind = "Sequence" if steps else "Token"
    if f"For{wrong_kind}Classification" in (kind := str(config.get("architectures"))):
        fix = (
            "leave reward.model.step_aggregation empty" if steps else "set reward.model.step_aggregation=min or another"
        )
        scored = "responses" if steps else "steps"
        raise model_error(path, f"{file} has architectures={kind}, which scores {scored}; {fix}")
    if label_count not in ((None, 1, 2) if steps else (None, 1)):
        rule = "a model of steps has one, or two of which the second is good" if steps else "a reward model has one"
        raise model_error(path, f"{file} has {label_count} labels; {rule}; {_ALTERNATIVES}")
    if steps and not tokenizer.is_fast:
        raise model_error(path, "its tokenizer has no offsets, which locate the steps; put a tokenizer.json there")
    nested = config.get("text_config")  # of multimodal models
    model_config = nested if isinstance(nested, dict) and nested else config
    vocab_size, pad_token_id = model_config.get("vocab_size"), model_config.get("pad_token_id")
    largest_id = max(tokenizer.get_vocab().values(), default=-1)
    if not isinstance(vocab_size, int) or largest_id >= vocab_size:
        raise model_error(
            path,
            f"its tokenizer has ids up to {largest_id}, but its embedding has vocab_size={vocab_size} rows;"
            " put the model's own tokenizer files there",
        )
    limits = [model_config.get("max_position_embeddings") or math.inf, tokenizer.model_max_length]
    if not all(isinstance(limit, int | float) for limit in limits):
        raise model_error(
            path, f"max_position_embeddings={limits[0]!r} and model_max_length={limits[1]!r} must be numbers"
        )
    if max_length > min(limits):
        raise UserError(
            f"reward.model.max_length={max_length} is more than the {min(limits)} tokens that the config.json and "
            f"tokenizer_config.json of reward.model.path={path} allow; set it to {min(limits)} or less"
        )
    return Classifier(path, str(directory), str(config.get("model_type")), vocab_size, pad_token_id, steps)


def locate(path: str) -> pathlib.Path:
    """Returns the local directory of the reward model, with its weights; UserError if there are none."""
    try:
        directory = hf.resolve_directory(path, weights=True)
        if not list(directory.glob("*.safetensors")):  # of the hub's models some have PyTorch weights alone
            directory = hf.resolve_directory(path, weights=True, further=["pytorch_model*.bin"])
        return directory
    except UserError as e:
        raise model_error(path, str(e)) from e


def convert_weights(directory: pathlib.Path, *, python: str, cache: str = _CACHE, steps: bool = False) -> pathlib.Path:
    """Returns the directory, or a cached copy of it whose weights are safetensors; UserError if that fails.

    Models with PyTorch files, and causal models with a value head, are converted once. The latter become sequence
    classifiers, or token classifiers with `steps`.
    """
    is_torch = not list(directory.glob("*.safetensors")) and any(directory.glob("pytorch_model*.bin"))
    if not is_torch and not _has_v_head(directory):
        return directory
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(directory.iterdir())]
    key = hashlib.sha256(json.dumps([str(directory.resolve()), stats]).encode()).hexdigest()[:16]
    kind = "token" if steps else "sequence"
    target = pathlib.Path(cache).expanduser() / f"{directory.name}-{key}{'-steps' if steps else ''}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = tempfile.mkdtemp(dir=target.parent)
    try:
        program = [executable(python, "reward.model.python"), "-m", "jppo.plugins.reward_models.convert_worker"]
        env = {**os.environ, "PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1"}
        process = subprocess.run(
            [*program, str(directory), temporary, kind], env=env, capture_output=True, text=True, check=False
        )
        if process.returncode:
            reason = (process.stderr.strip().splitlines() or ["it says nothing"])[-1][:300]
            raise model_error(str(directory), f"its weights cannot be converted to safetensors: {reason}")
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.rename(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _has_v_head(directory: pathlib.Path) -> bool:
    """Whether the safetensors of a directory are a causal model with a value head."""
    if not ((directory / tensorfile.SINGLE).is_file() or (directory / tensorfile.INDEX).is_file()):
        return False
    try:
        return any(name in _V_HEADS for name in tensorfile.slots(directory))
    except UserError as e:
        raise model_error(str(directory), str(e)) from e


def model_error(path: str, why: str) -> UserError:
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
    """Drops the padding tokens at the end: transformers reads a decoder's score at the last other token.

    The score of a causal model does not depend on later tokens. If all tokens are padding, the first one counts.
    """
    last_index = max((i for i, token in enumerate(ids) if token != pad_token_id), default=0)
    return list(ids[: last_index + 1])


def compiled_lengths(max_length: int) -> list[int]:
    """Returns the compiled row lengths: powers of two times _SHORTEST_ROW, then `max_length`."""
    lengths = [_SHORTEST_ROW]
    while lengths[-1] < max_length:
        lengths.append(2 * lengths[-1])
    return [*lengths[:-1], max_length]


class JaxRewardModel:
    """Scores by the last token's score logit, like transformers' sequence classifiers, or by chosen tokens' logits.

    Every batch has `batch_size` rows (more if `rows` does not divide it), so there is one compilation per length.
    `shardings` places the parameters and `rows` the rows; without them everything is on one device.
    """

    def __init__(
        self,
        classifier: Classifier,
        *,
        batch_size: int,
        max_length: int,
        dtype: Any = "float32",
        shardings: Params | None = None,
        rows: jax.NamedSharding | None = None,
        attend: Attend | None = None,
    ):
        """Loads the weights; UserError if they are not a reward model's. `attend` is an attention kernel."""
        try:
            _, cfg = hf.read_config(classifier.directory, longest=max_length)
            score = _read_score(classifier, cfg.hidden_size, dtype)
            trunk = hf.load_params(classifier.directory, cfg, head="trunk", param_dtype=dtype, shardings=shardings)
        except UserError as e:
            raise model_error(classifier.path, str(e)) from e
        replicated = None if rows is None else jax.NamedSharding(rows.mesh, jax.P())
        self._params = trunk | {"score": jax.device_put(score, replicated)}
        self._rows, self._pad_token_id = rows, classifier.pad_token_id
        self._lengths = compiled_lengths(max_length)
        shard_count = 1 if rows is None else rows.mesh.size // rows.shard_shape((rows.mesh.size,))[0]
        self._batch_rows = -(-batch_size // shard_count) * shard_count
        mesh: Any = None if rows is None else rows.mesh
        constrain = identity if rows is None else functools.partial(jax.lax.with_sharding_constraint, shardings=rows)
        model = Decoder(cfg, dtype=dtype, param_dtype=dtype, constrain=constrain, attend=attend, mesh=mesh, split=WHOLE)
        self._scores = jax.jit(functools.partial(_compute_scores, model, classifier.steps), out_shardings=replicated)

    def score(self, ids: Sequence[Sequence[int]]) -> list[float]:
        """Returns the score logit of each token sequence; the padding at its end is ignored."""
        stripped_ids = [without_padding(sequence, self._pad_token_id) for sequence in ids]
        return [scores[-1] for scores in self._score_all(stripped_ids)]

    def score_at(self, ids: Sequence[Sequence[int]], positions: Sequence[Sequence[int]]) -> list[list[float]]:
        """Returns the log-odds of each text at its places, by a token classifier."""
        return [[scores[k] for k in columns] for scores, columns in zip(self._score_all(ids), positions, strict=True)]

    def _score_all(self, ids: Sequence[Sequence[int]]) -> Iterator[list[float]]:
        """Scores any number of texts in batches; yields the scores of each one's tokens, or of its last one."""
        for start in range(0, len(ids), self._batch_rows):
            yield from self._score_batch(ids[start : start + self._batch_rows])

    def wait_ready(self) -> None:
        """Compiles every row length, so no training step does."""
        for length in self._lengths:
            self._score_batch([[0] * length])

    def close(self) -> None:
        self._params = None

    def _score_batch(self, ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Pads up to `_batch_rows` texts to a compiled length; returns the scores of their tokens, or of the last."""
        longest = max(map(len, ids))
        fitting_lengths = [length for length in self._lengths if length >= longest]
        if not fitting_lengths:
            raise ValueError(f"a text has {longest} tokens, more than max_length={self._lengths[-1]}")
        tokens = np.zeros((self._batch_rows, fitting_lengths[0]), np.int32)
        last_token = np.zeros(self._batch_rows, np.int32)  # an empty row has one token
        for i, sequence in enumerate(ids):
            tokens[i, : len(sequence)] = sequence
            last_token[i] = len(sequence) - 1
        tokens_and_last = jax.device_put((tokens, last_token), self._rows)
        scores: list[list[float]] = np.asarray(self._scores(self._params, *tokens_and_last))[: len(ids)].tolist()
        return scores


def _compute_scores(model: Decoder, steps: bool, params: Params, tokens: jax.Array, last_index: jax.Array) -> jax.Array:
    """Returns [R, 1] f32: the score after the token `last_index` [R] of each row [R, T]; with `steps` after all."""
    position = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    segment = (position <= last_index[:, None]).astype(jnp.int32)
    hidden: Any = model.apply({"params": params}, tokens, segment, position)
    if not steps:
        hidden = jnp.take_along_axis(hidden, last_index[:, None, None], axis=1)
    kernel, bias = params["score"]
    scores: jax.Array = heads.values(hidden, kernel) + bias
    return scores


def _read_score(classifier: Classifier, hidden_size: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Reads the score head: kernel [D, 1] and bias []; of two labels the differences, which give log-odds."""
    slots = tensorfile.slots(pathlib.Path(classifier.directory))
    slot, bias_slot = slots.get("score.weight"), slots.get("score.bias")
    if slot is None:
        raise UserError("it has no score.weight; a reward model is a classifier, not a language model")
    allowed = [[n, hidden_size] for n in ((1, 2) if classifier.steps else (1,))]
    if list(slot.shape) not in allowed:
        rule = f"{' or '.join(map(str, allowed))}; a reward model has one label"
        raise UserError(f"score.weight has shape {list(slot.shape)}, not {rule}")
    if bias_slot is not None and (not classifier.steps or bias_slot.shape != slot.shape[:1]):
        rule = f"has shape {[slot.shape[0]]} in a token classifier and is absent in a sequence classifier"
        raise UserError(f"score.bias has shape {list(bias_slot.shape)}; it {rule}")
    bias_values = np.zeros(slot.shape[0]) if bias_slot is None else tensorfile.read_tensor(bias_slot, "score.bias")
    weight = jnp.asarray(tensorfile.read_tensor(slot, "score.weight"), dtype).astype(jnp.float32)
    bias = jnp.asarray(bias_values, dtype).astype(jnp.float32)
    if slot.shape[0] == 2:
        weight, bias = weight[1:] - weight[:1], bias[1:] - bias[:1]
    return weight.T, bias[0]
