"""A reward model of a supported family, scored by JAX on the trainer's devices, sharded or on one device."""

import functools
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jppo.models import heads, hf, tensorfile
from jppo.models.attention import Attend
from jppo.models.decoder import Decoder, identity
from jppo.models.experts import make_mix
from jppo.rewards.model.classifier import Classifier, refused, without_padding
from jppo.settings import UserError
from jppo.types import Params

_SHORTEST = 64  # tokens; shorter rows are padded to this


def row_lengths(max_length: int) -> list[int]:
    """Returns the compiled row lengths: powers of two times _SHORTEST, then `max_length`."""
    lengths = [_SHORTEST]
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
        what: Classifier,
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
            _, cfg = hf.read_config(what.directory, longest=max_length)
            score = _read_score(what, cfg.hidden_size, dtype)
            trunk = hf.load_params(what.directory, cfg, head="trunk", param_dtype=dtype, shardings=shardings)
        except UserError as e:
            raise refused(what.path, str(e)) from e
        whole = None if rows is None else jax.NamedSharding(rows.mesh, jax.P())
        self._params = trunk | {"score": jax.device_put(score, whole)}
        self._rows, self._pad_token_id = rows, what.pad_token_id
        self._lengths = row_lengths(max_length)
        parts = 1 if rows is None else _parts(rows)
        self._count = -(-batch_size // parts) * parts
        mix = make_mix(None if rows is None else rows.mesh, whole_rows=True)
        constrain = identity if rows is None else functools.partial(jax.lax.with_sharding_constraint, shardings=rows)
        model = Decoder(cfg, dtype=dtype, param_dtype=dtype, constrain=constrain, attend=attend, mix=mix)
        self._scores = jax.jit(functools.partial(_scores, model, what.steps), out_shardings=whole)

    def score(self, ids: Sequence[Sequence[int]]) -> list[float]:
        """Implements Scorer.score."""
        kept = [without_padding(one, self._pad_token_id) for one in ids]
        return [scores[-1] for scores in self._all(kept)]

    def score_at(self, ids: Sequence[Sequence[int]], places: Sequence[Sequence[int]]) -> list[list[float]]:
        """Returns the log-odds of each text at its places, by a token classifier."""
        return [[scores[k] for k in chosen] for scores, chosen in zip(self._all(ids), places, strict=True)]

    def _all(self, ids: Sequence[Sequence[int]]) -> Iterator[list[float]]:
        """Yields the scores of each text's tokens, or of its last one."""
        for i in range(0, len(ids), self._count):
            yield from self._batch(ids[i : i + self._count])

    def wait_ready(self) -> None:
        """Compiles every row length, so no training step does."""
        for length in self._lengths:
            self._batch([[0] * length])

    def close(self) -> None:
        """Drops the references to the weights."""
        self._params = None

    def _batch(self, ids: Sequence[Sequence[int]]) -> list[list[float]]:
        longest = max(map(len, ids))
        fitting = [length for length in self._lengths if length >= longest]
        if not fitting:
            raise ValueError(f"a text has {longest} tokens, more than max_length={self._lengths[-1]}")
        tokens = np.zeros((self._count, fitting[0]), np.int32)
        last = np.zeros(self._count, np.int32)  # an empty row has one token
        for i, one in enumerate(ids):
            tokens[i, : len(one)] = one
            last[i] = len(one) - 1
        placed = jax.device_put((tokens, last), self._rows)
        scores: list[list[float]] = np.asarray(self._scores(self._params, *placed))[: len(ids)].tolist()
        return scores


def _scores(model: Decoder, steps: bool, params: Params, tokens: jax.Array, last: jax.Array) -> jax.Array:
    """Returns [R, 1] f32: the score after the token at `last` [R] of each row of tokens [R, T]; with `steps` all."""
    here = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    segment = (here <= last[:, None]).astype(jnp.int32)
    hidden: Any = model.apply({"params": params}, tokens, segment, here)
    if not steps:
        hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)
    kernel, bias = params["score"]
    scores: jax.Array = heads.values(hidden, kernel) + bias
    return scores


def _parts(rows: jax.NamedSharding) -> int:
    """Returns the number of shards along the first axis."""
    axes = rows.spec[0] if len(rows.spec) else ()
    return math.prod(rows.mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes or ()))


def _read_score(what: Classifier, hidden_size: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Reads the kernel [D, 1] and the bias [] of the score; of two labels the differences, which are log-odds."""
    slots = tensorfile.slots(pathlib.Path(what.directory))
    slot, bias = slots.get("score.weight"), slots.get("score.bias")
    if slot is None:
        raise UserError("it has no score.weight; a reward model is a classifier, not a language model")
    allowed = [[n, hidden_size] for n in ((1, 2) if what.steps else (1,))]
    if list(slot.shape) not in allowed:
        rule = f"{' or '.join(map(str, allowed))}; a reward model has one label"
        raise UserError(f"score.weight has shape {list(slot.shape)}, not {rule}")
    if bias is not None and (not what.steps or bias.shape != slot.shape[:1]):
        rule = f"has shape {[slot.shape[0]]} in a token classifier and is absent in a sequence classifier"
        raise UserError(f"score.bias has shape {list(bias.shape)}; it {rule}")
    stored = np.zeros(slot.shape[0]) if bias is None else tensorfile.read_tensor(bias, "score.bias")
    weight = jnp.asarray(tensorfile.read_tensor(slot, "score.weight"), dtype).astype(jnp.float32)
    offset = jnp.asarray(stored, dtype).astype(jnp.float32)
    if slot.shape[0] == 2:
        weight, offset = weight[1:] - weight[:1], offset[1:] - offset[:1]
    return weight.T, offset[0]
