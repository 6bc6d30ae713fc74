"""Answers to sampling requests of the Tinker API: responses, and log-probs of prompts."""

import itertools
from collections.abc import Sequence

import numpy as np

from jppo.run.own_loop import Model
from jppo.tinker import wire
from jppo.tinker.futures import Future, Sample


def answer(base: Model, jobs: Sequence[Future]) -> None:
    """Answers requests of one group: they have the same weights and sampling, and all are scored or none."""
    asked = [job.sample for job in jobs if job.sample is not None]
    first = asked[0]
    scores: list[np.ndarray | None] = [None] * len(asked) if first.scored is None else _scores(base, asked)
    roomy = len(first.prompt) <= base.settings.data.max_prompt_length
    found = iter(base.sample([one.prompt for one in asked], weights=first.weights, **first.how) if roomy else [])
    for job, score in zip(jobs, scores, strict=True):
        samples = list(itertools.islice(found, first.how["n"]))
        if any(t.finish == "abort" for t in samples):
            raise RuntimeError("the engine aborted a response")
        told = [(t.tokens[t.sampled], t.logprob[t.sampled], t.finish == "length") for t in samples]
        job.finish(wire.write_samples(told, score))


def _scores(base: Model, asked: Sequence[Sample]) -> list[np.ndarray | None]:
    """Returns the log-probs of the prompts' last tokens, NaN for the others."""
    longer = [one.prompt for one in asked if len(one.prompt) > 1]  # the first token has no log-prob
    rows = iter(base.logprobs(base.examples(longer), weights=asked[0].weights) if longer else [])
    found: list[np.ndarray | None] = []
    for one in asked:
        score = np.full(len(one.prompt), np.nan, np.float32)
        if len(one.prompt) > 1 and one.scored:
            score[-one.scored :] = next(rows)[: len(one.prompt) - 1][-one.scored :]
        found.append(score)
    return found
