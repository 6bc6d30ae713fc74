"""HTTP clients for judges through their providers' SDKs: one question, one answer, one clear error."""

import asyncio
import dataclasses
import email.utils
import importlib
import math
import os
import re
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

from jppo.errors import UserError


@dataclasses.dataclass(frozen=True)
class Provider:
    """An API's address, SDK and key variables."""

    sdk: str
    base_url: str
    keys: tuple[str, ...]  # environment variables; the first that is set counts


PROVIDERS = {
    "openai": Provider("openai", "https://api.openai.com/v1", ("OPENAI_API_KEY",)),
    "dashscope": Provider("openai", "https://dashscope.aliyuncs.com/compatible-mode/v1", ("DASHSCOPE_API_KEY",)),
    "gemini": Provider(
        "openai", "https://generativelanguage.googleapis.com/v1beta/openai/", ("GEMINI_API_KEY", "GOOGLE_API_KEY")
    ),
    "claude": Provider("anthropic", "https://api.anthropic.com", ("ANTHROPIC_API_KEY", "CLAUDE_API_KEY")),
}
_NO_KEY = "none"  # for servers on this machine
_LOCAL = ("localhost", "127.0.0.1", "::1")
# Errors about a request's form, and the form to use from then on; settings stay the same.
_OTHER_FORMS = {
    "max_completion_tokens": "OpenAI's reasoning models have another name for max_tokens",
    "enable_thinking": "DashScope's thinking models reject thinking in this form of request",
}


class JudgeError(Exception):
    """A sample could not be scored by the judge."""

    def __init__(self, message: str, *, again: bool = False, after_s: float = 0.0):
        super().__init__(message)
        self.again = again  # the same request may succeed later
        self.after_s = after_s  # the server's minimum delay


@dataclasses.dataclass(frozen=True)
class JudgeReply:
    """A judge's reply."""

    text: str
    finish: str  # as the server reports it
    prompt_tokens: int
    completion_tokens: int


class JudgeClient:
    """The client of one judge: returns an answer to a question or raises one JudgeError."""

    def __init__(
        self, api_type: str, *, model: str, base_url: str, temperature: float, max_tokens: int, timeout_s: float
    ):
        """Prepares the client of a provider's SDK; UserError if its key or its package is missing."""
        if not model:
            raise UserError("reward.judge.model is empty; set it to a model name of the judge's server")
        provider = PROVIDERS[api_type]
        self._url = base_url or provider.base_url
        is_local = _host(self._url) in _LOCAL
        key = _read_key(api_type, self._url, needed=not is_local)
        self.scrub = _make_scrubber(key)
        # everything that an answer depends on, except the question
        self.asked = dict(
            api_type=api_type, base_url=self._url, model=model, temperature=temperature, max_tokens=max_tokens
        )
        self._judge = f"the judge {model} at {self._url}"
        self._timeout_s = timeout_s
        self._sdk = _import_sdk(provider.sdk)
        options: dict[str, Any] = dict(api_key=key, base_url=self._url, timeout=timeout_s, max_retries=0)
        if is_local:  # proxies do not reach it; anthropic's client uses the environment's even without trust_env
            mounts = dict.fromkeys(("http://", "https://", "all://"))
            client = self._sdk.DefaultAsyncHttpxClient
            options["http_client"] = client(trust_env=False, mounts=mounts, timeout=timeout_s)
        self._other_forms: set[str] = set()
        if provider.sdk == "openai":
            self._client = self._sdk.AsyncOpenAI(**options)
            self._send, self._read = self._send_openai, _read_openai
        else:
            self._client = self._sdk.AsyncAnthropic(**options)
            self._send, self._read = self._send_anthropic, _read_anthropic

    async def ask(self, system: str, question: str) -> JudgeReply:
        """Sends one question and returns the reply; any failure or time-out becomes one JudgeError."""
        sdk, forms = self._sdk, frozenset(self._other_forms)
        try:
            async with asyncio.timeout(self._timeout_s):  # the SDK's timeout applies to each read
                reply = await self._send(system, question)
        except (TimeoutError, sdk.APITimeoutError) as e:
            raise self._error(f"did not answer within timeout_s={self._timeout_s:g}", again=True) from e
        except sdk.APIStatusError as e:
            raise self._status_error(e, forms) from e
        except sdk.APIConnectionError as e:
            raise self._error(f"broke off, or cannot be reached ({e.__cause__ or e})", again=True) from e
        except (sdk.APIError, ValueError, RecursionError) as e:
            raise self._error(f"gave an unreadable answer ({type(e).__name__}: {e})") from e
        try:
            return self._read(reply)
        except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as e:
            raise self._error(f"gave an unreadable answer: {reply}") from e

    async def close(self) -> None:
        await self._client.close()

    async def _send_openai(self, system: str, question: str) -> Any:
        """Sends a chat request by OpenAI's SDK, in the form of arguments that this server takes.

        `_other_forms` has the arguments whose usual form it has rejected before.
        """
        limit = "max_completion_tokens" if "max_completion_tokens" in self._other_forms else "max_tokens"
        extra = {"extra_body": {"enable_thinking": False}} if "enable_thinking" in self._other_forms else {}
        return await self._client.chat.completions.create(
            model=self.asked["model"],
            messages=[*([{"role": "system", "content": system}] if system else []), _user_message(question)],
            temperature=self.asked["temperature"],
            **{limit: self.asked["max_tokens"]},
            **extra,
        )

    async def _send_anthropic(self, system: str, question: str) -> Any:
        """Sends a message request by Anthropic's SDK."""
        return await self._client.messages.create(
            model=self.asked["model"],
            messages=[_user_message(question)],
            max_tokens=self.asked["max_tokens"],
            extra_body={"temperature": self.asked["temperature"]},  # not an argument of later SDKs
            **({"system": system} if system else {}),
        )

    def _status_error(self, e: Any, forms: frozenset[str]) -> JudgeError:
        """Returns the error for a status of 400 or more; `forms` are those that the failed request used."""
        status, message = e.status_code, _server_message(e)
        retryable = (status in (408, 429) or status >= 500) and "insufficient_quota" not in f"{e.body}"
        if status == 400 and self._send == self._send_openai:
            rejected_forms = {form for form in _OTHER_FORMS if form in message}
            retryable = not rejected_forms <= forms
            self._other_forms |= rejected_forms
        return self._error(f"answered {status}: {message}", again=retryable, after_s=_retry_after(e.response.headers))

    def _error(self, failure: str, *, again: bool = False, after_s: float = 0.0) -> JudgeError:
        return JudgeError(self.scrub(f"{self._judge} {failure}")[:600], again=again, after_s=after_s)


def _user_message(question: str) -> dict[str, str]:
    return {"role": "user", "content": question}


def _read_openai(reply: Any) -> JudgeReply:
    """Extracts text, finish reason and token counts from a reply of OpenAI's SDK."""
    choice, usage = reply.choices[0], reply.usage
    refusal = getattr(choice.message, "refusal", None)
    text = refusal or choice.message.content or ""
    if not isinstance(text, str):
        raise TypeError("the content is not text")
    return JudgeReply(
        text=text,
        finish="refusal" if refusal else str(choice.finish_reason),
        prompt_tokens=int(usage.prompt_tokens) if usage else 0,
        completion_tokens=int(usage.completion_tokens) if usage else 0,
    )


def _read_anthropic(reply: Any) -> JudgeReply:
    """Extracts text, finish reason and token counts from a reply of Anthropic's SDK."""
    return JudgeReply(
        text="".join(block.text for block in reply.content if block.type == "text"),
        finish=str(reply.stop_reason),
        prompt_tokens=int(reply.usage.input_tokens),
        completion_tokens=int(reply.usage.output_tokens),
    )


def _server_message(e: Any) -> str:
    """Returns the server's message in an SDK's status error."""
    body = e.body
    while isinstance(body, Mapping) and (inner := body.get("error") or body.get("message")):
        body = inner
    return body if isinstance(body, str) and body else str(e.message)


def _retry_after(headers: Mapping[str, str]) -> float:
    """Returns the seconds that a server asks to wait; 0 by default."""
    header = headers.get("retry-after", "")
    try:
        seconds = float(headers["retry-after-ms"]) / 1000 if "retry-after-ms" in headers else float(header)
    except ValueError:
        date = email.utils.parsedate_tz(header)
        seconds = 0.0 if date is None else email.utils.mktime_tz(date) - time.time()
    return max(seconds, 0.0) if math.isfinite(seconds) else 0.0


def _host(url: str) -> str:
    """Returns the host name of reward.judge.base_url; UserError if it is no plain http address."""
    if "@" in url or "?" in url:  # the URL is not shown in the error
        raise UserError("reward.judge.base_url contains a password or a query; set keys in the environment")
    try:
        url_parts = urllib.parse.urlsplit(url)
        host = url_parts.hostname if url_parts.scheme in ("http", "https") else None
    except ValueError:
        host = None
    if host is None:
        raise UserError(f"reward.judge.base_url={url!r} is not an address; use the form http://127.0.0.1:8000/v1")
    return host


def _read_key(api_type: str, url: str, *, needed: bool) -> str:
    """Returns the API key from the provider's environment variables; UserError if a needed one is missing."""
    variables = PROVIDERS[api_type].keys
    set_keys = [(name, os.environ[name].strip()) for name in variables if os.environ.get(name, "").strip()]
    if not set_keys and needed:
        raise UserError(
            f"reward.judge.api_type={api_type!r} needs a key for {url}: set {' or '.join(variables)} in the environment"
        )
    name, key = set_keys[0] if set_keys else ("", _NO_KEY)
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"the key in {name} contains invalid characters; set it again")
    return key


def _make_scrubber(key: str) -> Callable[[str], str]:
    """Makes the function that masks the key in texts, also in the partly masked form in which servers quote it."""
    secrets = [
        r"[^\s*]{0,40}\*{3,}\S*",
        *([re.escape(key), re.escape(urllib.parse.quote(key))] if key != _NO_KEY else []),
    ]
    pattern = re.compile("|".join(secrets))
    return lambda text: pattern.sub("***", text)


def _import_sdk(name: str) -> Any:
    """Imports the provider's SDK; UserError with the install command if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise UserError(f"this judge needs the package {name}; pip install 'jppo[judge]'") from e
