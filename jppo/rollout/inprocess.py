"""The in-process rollout engine: a `Sampler` on the trainer's devices, mesh and parameters.

    sampler = InprocessEngine(...).ready(...)    has no weights yet
    sampler.hold(policy, ...)                    sets the trainer's arrays to sample from; compiles at the first call

`continuous_batching.py` decodes.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future

import jax
import numpy as np

from jppo.models import placing
from jppo.models.lora import Weights
from jppo.rollout import continuous_batching, protocol
from jppo.rollout.continuous_batching import Batcher, InprocessSettings, Programs, choice_of, make_programs
from jppo.rollout.protocol import Done, RolloutError, Sampler, Talk
from jppo.settings import UserError
from jppo.types import Params, Prompt, Sampling, Trajectory


@dataclasses.dataclass(frozen=True)
class InprocessEngine:
    """The engine as `train.py` starts and ends it."""

    settings: InprocessSettings

    def ready(
        self, *, eos_token_ids: Sequence[int], decode: Callable[[list[int]], str], talk: Talk | None = None
    ) -> "InprocessSampler":
        """Returns the sampler without weights; `talk` None means one turn."""
        return InprocessSampler(
            self.settings, eos_token_ids=eos_token_ids, decode=decode, talk=talk or protocol.one_turn(decode)
        )

    def close(self) -> None:
        """Does nothing."""


class InprocessSampler(Sampler):
    """The Sampler over the trainer's own parameters."""

    def __init__(
        self,
        settings: InprocessSettings,
        *,
        eos_token_ids: Sequence[int],
        decode: Callable[[list[int]], str],
        talk: Talk,
    ):
        self.settings = settings
        self._decode = decode
        self._ends = frozenset(eos_token_ids)
        self._talk = talk
        self._programs = make_programs(settings, eos_token_ids, turns=continuous_batching.TURNS)
        self._compiled = False
        self.version: int | None = None
        self._policy: Weights | None = None

    def hold(self, policy: Weights, *, version: int) -> None:
        """Sets the parameters to sample from, as `version`, valid until the caller donates them."""
        self.version, self._policy = version, policy
        if not self._compiled:
            self._batcher(self._programs.prepare(placing.to_device(policy))).compile()
            self._compiled = True

    def start(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        done: Done | None = None,
        only: Collection[int] | None = None,
    ) -> Future[list[Trajectory]]:
        """Like `Sampler.start`; blocks, because the devices are the trainer's."""
        self._check(prompts, sampling)
        model = self._programs.prepare(placing.to_device(self._held()))

        async def generate() -> list[Trajectory]:
            batcher = self._batcher(model)
            answering = asyncio.ensure_future(batcher.answer_all())
            talking = asyncio.ensure_future(protocol.converse(batcher.ask, self._talk, prompts, sampling, done, only))
            try:
                await asyncio.wait([answering, talking], return_when=asyncio.FIRST_COMPLETED)
                if answering.done():  # it ends only by failing
                    answering.result()
                return await talking
            finally:
                answering.cancel()
                talking.cancel()
                await asyncio.gather(answering, talking, return_exceptions=True)

        future: Future[list[Trajectory]] = Future()
        future.set_result(protocol.run(generate()))
        return future

    def close(self) -> None:
        """Drops the weights; may be called twice."""
        self.version = self._policy = None

    def _batcher(self, model: Params) -> Batcher:
        assert self.version is not None  # `model` is of it
        return Batcher(self.settings, self._programs, model, self._ends, self._decode, self.version)

    def _check(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        s = self.settings
        for prompt in prompts:
            n = len(prompt.ids)
            if not 1 <= n <= s.max_prompt_length or n + sampling.max_tokens > s.max_model_len:
                raise UserError(
                    f"prompt {prompt.uid}: {n} tokens must be 1 to data.max_prompt_length={s.max_prompt_length}, and"
                    f" with max_tokens={sampling.max_tokens} fit the engine's {s.max_model_len}; cut the prompt, or"
                    " request less"
                )
        how = sampling
        if how.max_tokens < 1 or how.temperature < 0 or not 0 < how.top_p <= 1 or not 0 <= how.min_p < 1:
            raise UserError(
                f"max_tokens={how.max_tokens} must be at least 1, temperature={how.temperature} at least 0, top_p="
                f"{how.top_p} above 0 and at most 1, min_p={how.min_p} at least 0 and below 1"
            )

    def _held(self) -> Weights:
        if self._policy is None:
            raise RolloutError("the engine has no weights yet; publish some first")
        if any(x.is_deleted() for x in jax.tree.leaves(self._policy)):
            raise RolloutError(
                f"version {self.version} of the weights is gone: it was trained on, and none was published"
            )
        return self._policy


def stream(
    programs: Programs, s: InprocessSettings, model: Params, ids: Sequence[int], sampling: Sampling
) -> Iterator[list[int]]:
    """Yields the tokens after `ids` as they are sampled, a few at a time, including an end token; uses one row.

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
