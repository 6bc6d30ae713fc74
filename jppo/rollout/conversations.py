"""Runs many conversations with an engine concurrently on one event loop; each `Talk` returns a trajectory."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from jppo import traces
from jppo.rollout.protocol import Answer, Ask, Done, Talk, of_tokens, sample_seed
from jppo.types import Prompt, Sampling, Trajectory

T = TypeVar("T")


def one_turn(decode: Callable[[list[int]], str]) -> Talk:
    """Returns the single-turn talk."""

    async def talk(ask: Ask, prompt: Prompt, *, sampling: Sampling, seed: int, near: Hashable) -> Trajectory:
        answer = await ask(prompt.ids.tolist(), sampling=sampling, seed=seed, near=near)
        return respond(prompt, answer, text=decode(answer.tokens))

    return talk


def respond(prompt: Prompt, answer: Answer, *, text: str) -> Trajectory:
    """Returns the trajectory of a prompt with one answer."""
    before, after = len(prompt.ids), len(answer.tokens)
    return Trajectory(
        uid=prompt.uid,
        tokens=np.concatenate([prompt.ids, answer.tokens]).astype(np.int32),
        sampled=np.repeat([False, True], [before, after]),
        logprob=np.concatenate([np.zeros(before), answer.logprob]).astype(np.float32),
        version=np.concatenate([np.full(before, -1), answer.version]).astype(np.int32),
        text=text,
        finish=answer.finish,
        turns=1,
        server=answer.server,
        experts=of_tokens(answer.experts, before + after),
    )


async def converse(
    ask: Ask,
    talk: Talk,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    done: Done | None,
    only: Collection[int] | None = None,
) -> list[Trajectory]:
    """Runs `sampling.n` talks per prompt concurrently; the first failure ends all.

    `only`: the indices of the wanted talks; None: all.
    """
    wanted = range(len(prompts) * sampling.n) if only is None else sorted(only)

    async def hold(number: int) -> Trajectory:
        i, j = divmod(number, sampling.n)
        seed = sample_seed(sampling.seed, i, j)
        with traces.span("sample", prompt=prompts[i].uid, number=j) as note:
            t = await talk(ask, prompts[i], sampling=sampling, seed=seed, near=i)
            versions = np.unique(t.version[t.sampled]).tolist()
            note(versions=versions, server=t.server, turns=t.turns, tokens=int(t.sampled.sum()), finish=t.finish)
            if done is not None:
                done(number, t)
        return t

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(hold(number)) for number in wanted]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None  # the first; the others were cancelled or are alike
    return [task.result() for task in tasks]


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` to its end on its own event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:  # a notebook already has a loop
        return pool.submit(asyncio.run, work).result()
