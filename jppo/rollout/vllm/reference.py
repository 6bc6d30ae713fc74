"""The reference of the KL, or a teacher, on vLLM servers: `ref.url`.

Any running `vllm serve MODEL` will do, with nothing of jppo: a prompt and its response are sent as the token ids of one
prompt, which vLLM answers with a log-prob per token, always at temperature 1.
"""

import time
from collections.abc import Mapping, Sequence
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


class ServedReferences:
    """The servers of `ref.url`: one for each data source, or one for all of them under ''."""

    def __init__(self, urls: Mapping[str, str], *, longest: int, tokenizer: Any, timeout_s: float):
        self._by_source = {
            source: ServedReference(url, longest=longest, tokenizer=tokenizer, timeout_s=timeout_s)
            for source, url in urls.items()
        }

    def __str__(self) -> str:
        servers = self._by_source.items()
        return ", ".join(f"{one.model} at {one.url}{source and f' for {source}'}" for source, one in servers)

    def logprobs(
        self, trajectories: Sequence[Trajectory], sources: Sequence[str]
    ) -> tuple[list[np.ndarray], dict[str, float]]:
        """Returns the log-prob of every token of each trajectory, [n] f32 with 0 first, and metrics.

        A failed request is repeated and counted; RolloutError names the prompt after the last try.
        """
        with ThreadPoolExecutor(CONCURRENT) as pool:
            asked = zip(sources, trajectories, strict=True)
            found = list(pool.map(lambda pair: self._of(pair[0]).logprob(pair[1]), asked))
        return [logprob for logprob, _ in found], {"ref/retries": float(sum(tries for _, tries in found))}

    def _of(self, source: str) -> "ServedReference":
        return self._by_source.get(source) or self._by_source[""]


class ServedReference:
    """The server at `url`, checked for a `longest` sequence and for the token ids of `tokenizer`."""

    def __init__(self, url: str, *, longest: int, tokenizer: Any, timeout_s: float):
        self.url = url
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

    def logprob(self, t: Trajectory) -> tuple[np.ndarray, int]:
        """Returns the log-prob of every token, and how many requests failed before."""
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
