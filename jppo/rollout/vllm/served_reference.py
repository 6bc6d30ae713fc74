"""The reference of the KL, or a teacher, on a running vLLM server (`ref.url`): log-probs of sampled tokens.

A prompt and its response are sent as the token ids of one prompt, for which vLLM returns a log-prob per token, always
at temperature 1. Any `vllm serve MODEL` answers; nothing of jppo runs there.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jppo.rollout.protocol import RolloutError
from jppo.rollout.servers.endpoint import Endpoint, ServerFault
from jppo.settings import UserError
from jppo.types import Trajectory

ROUTE = "/v1/completions"
CONCURRENT = 64  # requests
TRIES, PAUSE_S = 3, 1.0  # the pause doubles after each try
LOWEST = -9998.0  # vLLM writes -9999 for minus infinity


class ServedReference:
    """The server at `url`, checked for a `longest` sequence and for the token ids of `tokenizer`."""

    def __init__(self, url: str, *, longest: int, tokenizer: Any, timeout_s: float):
        self._endpoint = Endpoint(url, timeout_s=timeout_s, why=lambda: "")
        ids = sorted(tokenizer.get_vocab().values())
        try:
            model = self._endpoint.get("/v1/models")["data"][0]
            self.model, most = str(model["id"]), int(model["max_model_len"])
            text = self._endpoint.post("/detokenize", {"model": self.model, "tokens": ids})["prompt"]
        except (KeyError, IndexError, TypeError, ValueError) as e:
            raise ServerFault(f"ref.url={url} does not answer as vLLM would: no {e}") from e
        except RolloutError as e:
            raise RolloutError(f"ref.url: {e}; start vLLM there, or correct the address") from e
        if most <= longest:
            raise UserError(
                f"ref.url={url}: the server's max_model_len={most} must be above data.max_prompt_length +"
                f" data.max_response_length={longest}; start it with --max-model-len {longest + 1}"
            )
        if text != tokenizer.decode(ids):
            raise UserError(
                f"ref.url={url}: {self.model} reads the policy's token ids, and decodes them to other text than the"
                " tokenizer of model.path; serve a model with that tokenizer"
            )

    def logprobs(self, trajectories: Sequence[Trajectory]) -> tuple[list[np.ndarray], dict[str, float]]:
        """Returns the log-prob of every token of each trajectory, [n] f32 with 0 first, and metrics.

        A failed request is repeated and counted; RolloutError names the prompt after the last try.
        """
        with ThreadPoolExecutor(CONCURRENT) as pool:
            found = list(pool.map(self._one, trajectories))
        return [logprob for logprob, _ in found], {"ref/retries": float(sum(tries for _, tries in found))}

    def _one(self, t: Trajectory) -> tuple[np.ndarray, int]:
        body = {"model": self.model, "prompt": t.tokens.tolist(), "max_tokens": 1, "prompt_logprobs": 0}
        for tries in range(TRIES):
            try:
                return _parsed(self._endpoint.post(ROUTE, body), t), tries
            except ServerFault as e:
                if tries + 1 == TRIES:
                    raise RolloutError(
                        f"ref.url has no log-probs for prompt {t.uid} after {TRIES} tries: {e}; start the server again"
                        " and repeat the command, which resumes"
                    ) from e
            time.sleep(PAUSE_S * 2**tries)
        raise AssertionError


def _parsed(reply: Any, t: Trajectory) -> np.ndarray:
    """Reads the log-probs of the tokens that were sent."""
    try:
        _, *others = reply["choices"][0]["prompt_logprobs"]
        found = [one[str(token)]["logprob"] for token, one in zip(t.tokens[1:], others, strict=True)]
        logprob = np.array([0.0, *found], np.float32)
    except (KeyError, IndexError, TypeError, ValueError) as e:
        raise ServerFault(f"vLLM's answer has no log-prob of each of {len(t.tokens)} tokens ({e!r})") from e
    if not np.all((logprob > LOWEST) & (logprob <= 0)):
        raise ServerFault(f"vLLM's log-probs are from {logprob.min()} to {logprob.max()}, which none should be")
    return logprob
