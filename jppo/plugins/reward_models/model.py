"""A reward model as a part of the reward: its texts, batches, normalisation, clipping; scores of responses or steps.

A `Scorer` computes the scores: `classifier.py` for families that jppo supports, `model_process.py` for all others in
transformers, and for classifiers served by vLLM. All take token ids, so the text and its end are the same for each.
"""

import bisect
import dataclasses
import itertools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from jppo.errors import UserError
from jppo.rewards.earned import step_ends
from jppo.rewards.parts import Sample, at_characters, failed, pending
from jppo.types import Reward

_RESPONSE_MARK = "said-by-the-policy"
# Aggregates of the first, the first two, ... of the steps' probabilities [K]: [K].
_AGGREGATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "last": lambda p: p,
    "min": np.minimum.accumulate,
    "prod": np.cumprod,
    "sum": np.cumsum,
    "mean": lambda p: np.cumsum(p) / np.arange(1, len(p) + 1),
}


class ScoringError(Exception):
    """A batch could not be scored; the message has the reason."""


class Scorer(Protocol):
    """A sequence classifier with one label."""

    def score(self, ids: Sequence[Sequence[int]]) -> list[float]:
        """Returns the logit of each token sequence; raises ScoringError on failure."""
        ...

    def close(self) -> None:
        """Stops its processes; may be called twice, and while another thread waits for scores."""
        ...


class StepScorer(Scorer, Protocol):
    """A token classifier."""

    def score_at(self, ids: Sequence[Sequence[int]], positions: Sequence[Sequence[int]]) -> list[list[float]]:
        """Returns the log-odds of each text at its places."""
        ...


class Texts:
    """Builds the token input of a reward model for a sample.

    Chat messages and the response as the assistant's turn, in the chat template of the model's own tokenizer. Without a
    template, and for text prompts, the prompt and then the response, with the tokenizer's special tokens.
    """

    def __init__(self, tokenizer: Any, *, max_length: int):
        """Takes the reward model's own `tokenizer`; texts over `max_length` tokens lose their beginning."""
        if max_length < 1:
            raise UserError(f"reward.model.max_length={max_length} must be 1 or more")
        tokenizer.truncation_side = "left"
        self._tokenizer, self._max_length = tokenizer, max_length
        self._lock = threading.Lock()  # truncation changes a fast tokenizer's state

    def render(self, sample: Sample) -> tuple[str, bool]:
        """Returns prompt and response as one text, and whether it already has its special tokens."""
        messages = sample.prompt.messages
        if isinstance(messages, str):
            return messages + sample.text, False
        if self._tokenizer.chat_template is None:
            return "\n".join([*(message["content"] for message in messages), sample.text]), False
        turns = [*messages, {"role": "assistant", "content": sample.text}]
        return self._tokenizer.apply_chat_template(turns, add_generation_prompt=False, tokenize=False), True

    def read(self, sample: Sample) -> tuple[list[int], bool]:
        """Returns the tokens of prompt and response, and whether they were truncated, which keeps a long text's end."""
        encoded, truncated = self._encode(*self.render(sample))
        return list(encoded["input_ids"]), truncated

    def read_marked(self, sample: Sample, pieces: Sequence[str]) -> tuple[list[int], list[int], bool]:
        """Tokenises prompt and a response in pieces; returns ids, each piece's last token, and whether it was cut.

        The chat template does not see the response, which some templates change.
        """
        text, has_special_tokens = self.render(dataclasses.replace(sample, text=_RESPONSE_MARK))
        prefix, placeholder, suffix = text.rpartition(_RESPONSE_MARK)
        if not placeholder:
            raise ValueError("the chat template of the reward model omits the response; remove the template")
        whole_text = "".join([prefix, *pieces, suffix])
        encoded, truncated = self._encode(whole_text, has_special_tokens, return_offsets_mapping=True)
        spans = [(begin, i) for i, (begin, end) in enumerate(encoded["offset_mapping"]) if begin < end]
        ends = (len(prefix) + length for length in itertools.accumulate(map(len, pieces)))
        last_tokens = [bisect.bisect_left(spans, (end,)) - 1 for end in ends]  # the last that begins before the end
        if lost := last_tokens.count(-1):
            raise ValueError(
                f"truncation to reward.model.max_length={self._max_length} removes {lost} of {len(pieces)} steps; raise"
                " it, or lower data.max_response_length"
            )
        return list(encoded["input_ids"]), [spans[k][1] for k in last_tokens], truncated

    def _encode(self, text: str, has_special_tokens: bool, **options: Any) -> tuple[Mapping[str, Any], bool]:
        """Tokenises a text; the second result says whether it was truncated."""
        options |= dict(add_special_tokens=not has_special_tokens, verbose=False)
        with self._lock:
            encoded = self._tokenizer(text, **options)
            truncated = len(encoded["input_ids"]) > self._max_length
            if truncated:  # again by the tokenizer, which keeps the special tokens that it adds
                encoded = self._tokenizer(text, truncation=True, max_length=self._max_length, **options)
        if not encoded["input_ids"]:
            raise ValueError("the tokenizer of the reward model returns no tokens for the text")
        return encoded, truncated


@dataclasses.dataclass
class Normalizer:
    """Running mean and standard deviation of all scores, by Welford's method over batches (Chan, Golub and LeVeque).

    With n scores of mean μ and m more of mean ν, δ = ν - μ, the mean moves by δ m / (n + m), and the sum of squared
    deviations grows by the batch's own and δ² n m / (n + m).
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def update(self, raw: np.ndarray) -> None:
        """Updates mean and deviation by a batch of scores, in any order."""
        if raw.size == 0:
            return
        raw = np.sort(raw.astype(np.float64))
        mean, count = float(raw.mean()), self.count + raw.size
        delta = mean - self.mean
        self.squares += float(np.square(raw - mean).sum()) + delta**2 * self.count * raw.size / count
        self.mean += delta * raw.size / count
        self.count = count

    def apply(self, raw: np.ndarray) -> np.ndarray:
        """Normalises scores: (raw - mean) / std in f64; 0 if all scores so far are equal."""
        std = math.sqrt(self.squares / self.count) if self.count else 0.0
        return (raw.astype(np.float64) - self.mean) / max(std, 1e-8)

    def state(self) -> dict[str, float]:
        """Returns the state for a checkpoint, as JSON types."""
        return dataclasses.asdict(self)

    def load(self, state: Mapping[str, float]) -> None:
        self.count, self.mean, self.squares = (float(state[key]) for key in ("count", "mean", "squares"))


class ModelPart:
    """A reward model as a part: scores batches of `batch_size` in the background, in the order of submission.

    `parts` has the unnormalised score, `rm_raw`. With a normalizer, all scores up to a flush are normalised together,
    so they do not depend on thread timing.
    """

    def __init__(
        self,
        model: Scorer,
        texts: Texts,
        *,
        batch_size: int,
        normalizer: Normalizer | None = None,
        clip: float | None = None,
    ):
        """Takes the model and its input; `clip` bounds the scores."""
        self._model, self._texts = model, texts
        self._batch_size, self._normalizer, self._clip = batch_size, normalizer, clip
        self._lock = threading.Lock()
        self._closed = False
        self._unsent: list[tuple[Sample, Future[Reward]]] = []  # not yet a whole batch
        self._unresolved: set[Future[Reward]] = set()  # unresolved
        self._scored: list[tuple[Future[Reward], float]] = []  # to be normalised; owned by the thread
        self._truncated_count = 0  # truncated texts since the last call of `metrics`
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward-model")  # one worker keeps batches in order

    def submit(self, sample: Sample) -> Future[Reward]:
        """Queues the sample for the next whole batch, or for `flush`; returns the future of its reward."""
        future: Future[Reward] = pending()
        with self._lock:
            if self._closed:
                future.set_result(failed("the reward model is closed"))
                return future
            self._unresolved.add(future)
            self._unsent.append((sample, future))
            if len(self._unsent) == self._batch_size:
                self._send_batch()
        return future

    def flush(self) -> None:
        """Sends the queued samples as a last batch and has all scores normalised; returns at once."""
        with self._lock:
            if self._closed:
                return
            self._send_batch()
            if self._normalizer is not None:
                self._thread.submit(self._normalise)

    def metrics(self) -> dict[str, float]:
        """Returns the number of truncated texts since the last call."""
        with self._lock:
            truncated_count, self._truncated_count = self._truncated_count, 0
        return {"reward/rm_cut": float(truncated_count)}

    def ready(self) -> None:
        """Waits for a model that loads in its own process; UserError if that fails."""
        wait = getattr(self._model, "wait_ready", None)
        if wait is not None:
            wait()

    def testing(self) -> "ModelPart":
        """Returns the part for held-out samples, whose scores are the model's own: by a normalizer they would move.

        It must not be closed.
        """
        clip = self._clip if self._normalizer is None else None
        return ModelPart(self._model, self._texts, batch_size=self._batch_size, clip=clip)

    def state(self) -> dict[str, float]:
        """Returns the normalizer's state for a checkpoint, if there is one."""
        return {} if self._normalizer is None else self._normalizer.state()

    def load(self, state: Mapping[str, float]) -> None:
        """Restores `state`; an empty state, from a run without a normalizer, starts a new one."""
        if self._normalizer is not None and state:
            self._normalizer.load(state)

    def close(self) -> None:
        """Closes the model; samples without a score fail."""
        with self._lock:
            self._closed, self._unsent = True, []
        self._model.close()
        self._thread.shutdown(wait=True, cancel_futures=True)
        for future in list(self._unresolved):
            self._resolve(future, failed("the reward model was closed before it had scored this"))

    def _send_batch(self) -> None:
        """Hands the unsent samples to the scoring thread as one batch; the caller holds the lock."""
        batch, self._unsent = self._unsent, []
        if batch:
            self._thread.submit(self._score_batch, batch)

    def _score_batch(self, batch: list[tuple[Sample, Future[Reward]]]) -> None:
        """Scores a batch in the scoring thread; a failure becomes an error of its samples."""
        inputs: list[tuple[Future[Reward], Any]] = []
        for sample, future in batch:
            try:
                model_input, truncated = self._model_input(sample)
            except Exception as e:  # a template that refuses the messages is an error of this sample only
                self._resolve(future, failed(f"{type(e).__name__}: {e}"))
                continue
            inputs.append((future, model_input))
            with self._lock:
                self._truncated_count += truncated
        try:
            scores = self._score_inputs([each_input for _, each_input in inputs]) if inputs else []
            if len(scores) != len(inputs):
                raise ScoringError(f"the reward model gave {len(scores)} scores for {len(inputs)} texts")
        except Exception as e:  # an exception is an error of every sample in the batch
            error = str(e) if isinstance(e, ScoringError) else f"{type(e).__name__}: {e}"
            for future, _ in inputs:
                self._resolve(future, failed(error))
            return
        for (future, model_input), score in zip(inputs, scores, strict=True):
            self._finish_score(future, model_input, score)

    def _model_input(self, sample: Sample) -> tuple[Any, bool]:
        """Returns the model's input for a sample, and whether it was truncated."""
        return self._texts.read(sample)

    def _score_inputs(self, inputs: Sequence[Any]) -> Sequence[Any]:
        return self._model.score(inputs)

    def _finish_score(self, future: Future[Reward], model_input: Any, score: Any) -> None:
        """Resolves the future by the model's score, or keeps the score for `_normalise`."""
        if not math.isfinite(score):
            self._resolve(future, failed(f"the reward model's score is {score}; it must be a finite number"))
        elif self._normalizer is not None:
            self._scored.append((future, score))
        else:
            self._resolve(future, self._reward(score, score))

    def _normalise(self) -> None:
        """Normalises and resolves all scores since the last flush; runs after all earlier batches."""
        assert self._normalizer is not None
        scored_futures, self._scored = self._scored, []
        scores = np.array([score for _, score in scored_futures], np.float64)
        self._normalizer.update(scores)
        for (future, score), value in zip(scored_futures, self._normalizer.apply(scores), strict=True):
            self._resolve(future, self._reward(float(value), score))

    def _reward(self, score: float, raw: float) -> Reward:
        """Returns the reward with a clipped score and the unnormalised one."""
        if self._clip is not None:
            score = min(max(score, -self._clip), self._clip)
        return Reward(score=score, parts={"rm_raw": raw}, error=None)

    def _resolve(self, future: Future[Reward], reward: Reward) -> None:
        self._unresolved.discard(future)
        future.set_result(reward)


@dataclasses.dataclass(frozen=True)
class MarkedSteps:
    """The steps of a response as the model reads them, each followed by the mark."""

    ids: list[int]
    positions: list[int]  # among the ids: the last token of each step's mark
    earn_at: list[int]  # tokens of the response that end its steps; none for a text without tokens


class StepPart(ModelPart):
    """A token classifier as a part; `parts` has the number of steps. A response without steps scores 0.

    The response is split at a delimiter; blank texts are no steps. The model reads each step followed by a mark, and
    its log-odds at the last token of the mark give p, the probability that the step is good. The score of a response is
    an aggregate of p_1 to p_K. A step earns the change of the aggregate over the steps so far, at its last token. So
    the amounts sum to the score, and are potential-based shaping of it (Ng, Harada and Russell 1999).
    """

    def __init__(
        self,
        model: StepScorer,
        texts: Texts,
        *,
        batch_size: int,
        aggregation: str,
        delimiter: str,
        mark: str,
        decode: Callable[[list[int]], str],
    ):
        """`mark` follows each step in the model's input, split at `delimiter`; `decode` is the policy's tokenizer's."""
        super().__init__(model, texts, batch_size=batch_size)
        self._step_model, self._decode = model, decode
        self._aggregate, self._delimiter, self._mark = _AGGREGATIONS[aggregation], delimiter, mark

    def testing(self) -> "StepPart":
        """Returns the part itself: it has no statistics."""
        return self

    def _model_input(self, sample: Sample) -> tuple[MarkedSteps, bool]:
        """Returns the steps of a response with a mark after each, as tokens, and whether they were truncated."""
        steps = [piece for piece in sample.text.split(self._delimiter) if piece.strip()]
        tokens = [] if sample.tokens is None else sample.tokens.tolist()
        end_amounts = tuple((end, 0.0) for end in step_ends(sample.text, self._delimiter))
        ids, mark_positions, truncated = self._texts.read_marked(sample, [piece + self._mark for piece in steps])
        end_tokens = [token for token, _ in at_characters(end_amounts, tokens, self._decode)]
        return MarkedSteps(ids, mark_positions, end_tokens), truncated

    def _score_inputs(self, inputs: Sequence[MarkedSteps]) -> list[list[float]]:
        return self._step_model.score_at([steps.ids for steps in inputs], [steps.positions for steps in inputs])

    def _finish_score(self, future: Future[Reward], steps: MarkedSteps, log_odds: Any) -> None:
        """Resolves the future by the log-odds of the steps: each earns its change of the aggregate."""
        if len(log_odds) != len(steps.positions):
            reward = failed(f"the reward model gave {len(log_odds)} scores for {len(steps.positions)} steps")
        elif not all(map(math.isfinite, log_odds)):
            reward = failed(f"the reward model's scores of the steps are {log_odds}; they must be finite numbers")
        else:
            probabilities = 0.5 * (1.0 + np.tanh(0.5 * np.array(log_odds, np.float64)))  # σ without overflow
            amounts = np.diff(self._aggregate(probabilities), prepend=0.0).tolist()
            earned = tuple(zip(steps.earn_at, amounts, strict=True)) if steps.earn_at else ()
            reward = Reward(math.fsum(amounts), {"steps": float(len(amounts))}, error=None, earned=earned)
        self._resolve(future, reward)
