"""Streams one answer from the in-process engine, a few tokens at a time."""

from collections.abc import Iterator, Sequence

import jax
import numpy as np

from jppo.rollout.continuous_batching import InprocessSettings, Programs, choice_of
from jppo.rollout.protocol import RolloutError
from jppo.types import Params, Sampling


def stream(
    programs: Programs, s: InprocessSettings, model: Params, ids: Sequence[int], sampling: Sampling
) -> Iterator[list[int]]:
    """Yields the tokens after `ids` as they are sampled, including an end token; uses one row.

    They equal the tokens of `InprocessSampler` for the same seed: a token depends only on the seed and its position.
    """
    length = next(n for _, n in s.prompt_shapes if n >= len(ids))
    prompt = np.zeros((1, length), np.int32)
    prompt[0, : len(ids)] = ids
    place = (np.array([0], np.int32), np.array([len(ids)], np.int32))
    until = np.array([len(ids) - 1 + sampling.max_tokens], np.int32)
    slots = programs.fill(model, programs.empty(), prompt, *place, until, np.array([sampling.seed], np.uint32))
    advance, choice = programs.advancing(sampling, s.cfg.vocab_size), choice_of(sampling)
    begin, going = len(ids), True
    while going:
        slots = advance(model, slots, choice, np.int32(1))
        tokens, logprob, last, until = jax.device_get((slots.tokens, slots.logprob, slots.last, slots.until))
        here = slice(begin, int(last[0]) + 1)
        if not np.isfinite(logprob[0, here]).all():
            raise RolloutError("the weights give non-finite numbers; train the model again from an earlier checkpoint")
        yield tokens[0, here].tolist()
        begin, going = here.stop, bool(last[0] < until[0])
