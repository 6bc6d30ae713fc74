"""A reward model as a part of the reward: the text that it reads, scores in batches, normalised or clipped.

What makes the scores is a `Scorer`: `model_jax.py` for the families that jppo knows, `model_process.py` for all others
that transformers knows, `model_vllm.py` for one that vLLM serves. All of them take token ids, so that the text and its
end are the same whichever it is.
"""

import dataclasses
import json
import math
import pathlib
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from jppo.config import UserError
from jppo.models import families, hf
from jppo.rewards.parts import Sample, failed
from jppo.structs import Reward


class ScoringError(Exception):
    """A batch could not be scored; the message says why."""


class Scorer(Protocol):
    """A sequence classifier with one label."""

    def score(self, ids: Sequence[Sequence[int]]) -> list[float]:
        """The logit of each sequence of tokens, of any number of them; ScoringError where that fails."""
        ...

    def close(self) -> None:
        """Ends what it started; may be called twice, and while another thread waits for scores."""
        ...


@dataclasses.dataclass(frozen=True)
class Classifier:
    """What config.json says of a reward model."""

    path: str  # as in reward.model.path, for the errors
    directory: str  # where it lies
    model_type: str
    vocab_size: int
    pad_token_id: int | None


def read_classifier(path: str, *, tokenizer: Any, max_length: int) -> Classifier:
    """The reward model at `path`, its config and its own tokenizer checked; UserError where it cannot be one."""
    directory = located(path)
    file = directory / "config.json"
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError as e:
        raise refused(path, f"{file} is missing; a model directory must hold it") from e
    except (ValueError, RecursionError) as e:
        raise refused(path, f"{file} is no JSON: {e}") from e
    if not isinstance(config, dict):
        raise refused(path, f"{file} must hold a JSON object, not {type(config).__name__}")
    names = config.get("id2label")
    labels = len(names) if isinstance(names, dict) else config.get("num_labels")
    if labels not in (None, 1):
        raise refused(path, f"{file} names {labels} labels; a reward model has one: the score")
    inner = config.get("text_config")  # of models that read pictures too
    text = inner if isinstance(inner, dict) and inner else config
    vocab_size = text.get("vocab_size")
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if not isinstance(vocab_size, int) or largest >= vocab_size:
        raise refused(
            path,
            f"its tokenizer has ids up to {largest}, and its embedding vocab_size={vocab_size} rows;"
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
    return Classifier(path, str(directory), str(config.get("model_type")), vocab_size, text.get("pad_token_id"))


def located(path: str) -> pathlib.Path:
    """The directory of the reward model, its weights included."""
    try:
        return hf.resolve(path, weights=True)
    except UserError as e:
        raise refused(path, str(e)) from e


def refused(path: str, why: str) -> UserError:
    """The error of a reward model that cannot be used."""
    return UserError(f"reward.model.path={path}: {why}")


def choose_engine(engine: str, model_type: str) -> str:
    """What scores: `auto` is jax for the families that jppo knows, else transformers."""
    if engine == "auto":
        return "jax" if model_type in families.FAMILIES else "transformers"
    if engine == "jax" and model_type not in families.FAMILIES:
        raise UserError(
            f"reward.model.engine='jax' knows {', '.join(families.FAMILIES)}, and the model is a {model_type}; "
            "set it to 'transformers'"
        )
    return engine


def without_padding(ids: Sequence[int], pad_token_id: int | None) -> list[int]:
    """The ids up to the one at which a decoder's score stands in transformers: the last that is no padding.

    A causal model gives that token the same score whatever follows. Where all is padding, it is the first.
    """
    last = max((i for i, token in enumerate(ids) if token != pad_token_id), default=0)
    return list(ids[: last + 1])


class Texts:
    """What a reward model reads of a sample, in tokens.

    Chat messages and the response as the assistant's turn, by the chat template of the model's own tokenizer. Without
    a template, and for a prompt that is text, the prompt and then the response, with the tokenizer's special tokens.
    """

    def __init__(self, tokenizer: Any, *, max_length: int):
        """The tokenizer is the reward model's own, and used by nobody else: its side of truncation is set."""
        if max_length < 1:
            raise UserError(f"reward.model.max_length={max_length} must be 1 or more")
        tokenizer.truncation_side = "left"
        self._tokenizer, self._max_length = tokenizer, max_length
        self._lock = threading.Lock()  # a fast tokenizer is changed while it truncates

    def render(self, sample: Sample) -> tuple[str, bool]:
        """The text, and whether it holds its special tokens already."""
        messages = sample.prompt.messages
        if isinstance(messages, str):
            return messages + sample.text, False
        if self._tokenizer.chat_template is None:
            return "\n".join([*(message["content"] for message in messages), sample.text]), False
        turns = [*messages, {"role": "assistant", "content": sample.text}]
        return self._tokenizer.apply_chat_template(turns, add_generation_prompt=False, tokenize=False), True

    def read(self, sample: Sample) -> tuple[list[int], bool]:
        """Its tokens, and whether it was cut: of a text that is too long the end is kept."""
        text, whole = self.render(sample)
        with self._lock:
            ids = self._tokenizer(text, add_special_tokens=not whole, verbose=False)["input_ids"]
            cut = len(ids) > self._max_length
            if cut:  # once more, by the tokenizer: it keeps the special tokens that it adds itself
                ids = self._tokenizer(
                    text, add_special_tokens=not whole, truncation=True, max_length=self._max_length, verbose=False
                )["input_ids"]
        if not ids:
            raise ValueError("the tokenizer of the reward model makes no token of the text")
        return list(ids), cut


class Normalizer:
    """The running mean and standard deviation of all scores so far, by Welford's method over batches.

    Chan, Golub and LeVeque: with n scores of mean μ and m more of mean ν, δ = ν - μ, the mean moves by δ m / (n + m),
    and the sum of squared deviations grows by that of the batch and δ² n m / (n + m).
    """

    def __init__(self) -> None:
        self.count = self.mean = self.squares = 0.0

    def update(self, raw: np.ndarray) -> None:
        """Takes a batch of scores in, to the same effect in any order."""
        if raw.size == 0:
            return
        raw = np.sort(raw.astype(np.float64))
        mean, count = float(raw.mean()), self.count + raw.size
        delta = mean - self.mean
        self.squares += float(np.square(raw - mean).sum()) + delta**2 * self.count * raw.size / count
        self.mean += delta * raw.size / count
        self.count = count

    def apply(self, raw: np.ndarray) -> np.ndarray:
        """(raw - mean) / std in f64; 0 where all scores so far are alike."""
        std = math.sqrt(self.squares / self.count) if self.count else 0.0
        return (raw.astype(np.float64) - self.mean) / max(std, 1e-8)

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps: JSON types."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load(self, state: Mapping[str, float]) -> None:
        """Goes on from where `state` was taken."""
        self.count, self.mean, self.squares = (float(state[key]) for key in ("count", "mean", "squares"))


class ModelPart:
    """A reward model as a part: scored in batches of `batch_size` in the background, in the order of submission.

    `parts` hold the score as the model gave it, `rm_raw`. With a normalizer all scores up to a flush are normalised
    together then, so that they depend on no thread's timing. Without `learn` the normalizer stays as it is, as in
    validation; while it is empty the scores of a flush are normalised by themselves.
    """

    def __init__(
        self,
        model: Scorer,
        texts: Texts,
        *,
        batch_size: int,
        normalizer: Normalizer | None = None,
        clip: float | None = None,
        learn: bool = True,
    ):
        if batch_size < 1:
            raise UserError(f"reward.model.batch_size={batch_size} must be 1 or more")
        if clip is not None and clip <= 0:
            raise UserError(f"reward.model.clip={clip} must be above 0, or None for no limit")
        self._model, self._texts = model, texts
        self._batch_size, self._normalizer, self._clip, self._learn = batch_size, normalizer, clip, learn
        self._lock = threading.Lock()
        self._closed = False
        self._waiting: list[tuple[Sample, Future[Reward]]] = []  # not yet a whole batch
        self._open: set[Future[Reward]] = set()  # without a result
        self._scored: list[tuple[Future[Reward], float]] = []  # to be normalised; the thread's own
        self._cut = 0  # texts, since `metrics` was last asked
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward-model")  # one: batches are done in order

    def submit(self, sample: Sample) -> Future[Reward]:
        """As in Part: the sample waits for a whole batch, or for `flush`."""
        future: Future[Reward] = Future()
        future.set_running_or_notify_cancel()  # nobody cancels it
        with self._lock:
            if self._closed:
                future.set_result(failed("the reward model is closed"))
                return future
            self._open.add(future)
            self._waiting.append((sample, future))
            if len(self._waiting) == self._batch_size:
                self._send()
        return future

    def flush(self) -> None:
        """As in Part; returns at once."""
        with self._lock:
            if self._closed:
                return
            self._send()
            if self._normalizer is not None:
                self._thread.submit(self._normalise)

    def metrics(self) -> dict[str, float]:
        """How many texts were cut since this was last asked."""
        with self._lock:
            cut, self._cut = self._cut, 0
        return {"reward/rm_cut": float(cut)}

    def ready(self) -> None:
        """Waits for a model that loads in a process of its own; UserError where it cannot."""
        wait = getattr(self._model, "wait_ready", None)
        if wait is not None:
            wait()

    def testing(self) -> "ModelPart":
        """The same for held-out samples, which the normalizer does not learn from; not to be closed."""
        return ModelPart(
            self._model,
            self._texts,
            batch_size=self._batch_size,
            normalizer=self._normalizer,
            clip=self._clip,
            learn=False,
        )

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps: the normalizer's state, or nothing."""
        return {} if self._normalizer is None else self._normalizer.state()

    def load(self, state: Mapping[str, float]) -> None:
        """The inverse of `state`; a state from a run without a normalizer is empty, and so is the start of one."""
        if self._normalizer is not None and state:
            self._normalizer.load(state)

    def close(self) -> None:
        """Ends the model; what has no score by then is failed."""
        with self._lock:
            self._closed, self._waiting = True, []
        self._model.close()
        self._thread.shutdown(wait=True, cancel_futures=True)
        for future in list(self._open):
            self._resolve(future, failed("the reward model was closed before it had scored this"))

    def _send(self) -> None:
        batch, self._waiting = self._waiting, []
        if batch:
            self._thread.submit(self._score, batch)

    def _score(self, batch: list[tuple[Sample, Future[Reward]]]) -> None:
        read: list[tuple[Future[Reward], list[int]]] = []
        for sample, future in batch:
            try:
                ids, cut = self._texts.read(sample)
            except Exception as e:  # a template that refuses the messages costs its own sample only
                self._resolve(future, failed(f"{type(e).__name__}: {e}"))
                continue
            read.append((future, ids))
            with self._lock:
                self._cut += cut
        try:
            raw = self._model.score([ids for _, ids in read]) if read else []
            if len(raw) != len(read):
                raise ScoringError(f"the reward model gave {len(raw)} scores for {len(read)} texts")
        except Exception as e:  # whatever it is, it is said of every sample of the batch
            error = str(e) if isinstance(e, ScoringError) else f"{type(e).__name__}: {e}"
            for future, _ in read:
                self._resolve(future, failed(error))
            return
        for (future, _), score in zip(read, raw, strict=True):
            if not math.isfinite(score):
                self._resolve(future, failed(f"the reward model's score is {score}; it must be a finite number"))
            elif self._normalizer is not None:
                self._scored.append((future, score))
            else:
                self._resolve(future, self._reward(score, score))

    def _normalise(self) -> None:
        """Runs after all batches that were sent before it."""
        assert self._normalizer is not None
        scored, self._scored = self._scored, []
        raw = np.array([score for _, score in scored], np.float64)
        normalizer = self._normalizer
        if self._learn:
            normalizer.update(raw)
        elif not normalizer.count:
            normalizer = Normalizer()
            normalizer.update(raw)
        for (future, score), value in zip(scored, normalizer.apply(raw), strict=True):
            self._resolve(future, self._reward(float(value), score))

    def _reward(self, score: float, raw: float) -> Reward:
        if self._clip is not None:
            score = min(max(score, -self._clip), self._clip)
        return Reward(score=score, parts={"rm_raw": raw}, error=None)

    def _resolve(self, future: Future[Reward], reward: Reward) -> None:
        self._open.discard(future)
        future.set_result(reward)
