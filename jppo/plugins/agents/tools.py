"""Tools: their protocol, their configuration file, and their calls; a failure affects only its own call.

`rollout.multi_turn.tool_config_path` is a YAML file

    tools:
      - class_name: calculator            # calculator, python, search, PATH.py:CLASS or MODULE:CLASS
        config: {}                        # keyword arguments of the class
        tool_schema: {}                   # in OpenAI's form; default: the class's own `schema`

or a Python file with a function `tools()` that returns tools.

User code (tools, users, environments) runs beside the event loop of the conversations: coroutines on their own loop, in
one thread for the whole run; each plain function in its own thread. The caller enforces the timeout, so code that
blocks costs only its caller's time.
"""

import asyncio
import contextlib
import dataclasses
import inspect
import math
import pathlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, Protocol

import yaml

from jppo.errors import UserError, expanded
from jppo.event_loop import LoopThread
from jppo.plugins.agents.built_in_tools import Calculator, Python, Search
from jppo.plugins.agents.calls import Call, Fault, ParsedCall, Schema
from jppo.plugins.sandbox.choice import STRICT
from jppo.registry import Registry, explain, user_module
from jppo.rewards.earned import finite, short
from jppo.types import Prompt
from jppo.user_files import is_async


class UserCodeRunner:
    """Runs coroutines on a second event loop, which starts with the first one."""

    def __init__(self) -> None:
        self._thread: LoopThread | None = None
        self._lock = threading.Lock()
        # Callers wait for a slot on their own loop, and an engine may use several loops in turn.
        self._slots: dict[tuple[asyncio.AbstractEventLoop, int], asyncio.Semaphore] = {}

    async def run(
        self, function: Callable[..., Any], *arguments: Any, timeout_s: float, slots: int | None = None
    ) -> Any:
        """Returns or raises what the callable does; TimeoutError after `timeout_s`.

        At most `slots` calls of the same callable run at once; waiting for a slot does not count.
        """
        key = asyncio.get_running_loop(), id(function)
        if slots is not None and key not in self._slots:
            self._slots = {k: s for k, s in self._slots.items() if not k[0].is_closed()}
            self._slots[key] = asyncio.Semaphore(slots)
        async with contextlib.nullcontext() if slots is None else self._slots[key]:
            return await asyncio.wait_for(self._run(function, arguments), timeout_s)

    async def _run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Returns or raises what the callable does, or the coroutine that a plain function returns."""
        if is_async(function):
            return await asyncio.wrap_future(self._submit(function, arguments))
        result = await asyncio.wrap_future(_run_in_thread(function, arguments))
        return await asyncio.wrap_future(self._submit(lambda: result, ())) if inspect.isawaitable(result) else result

    def _submit(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Future[Any]:
        with self._lock:
            if self._thread is None:
                self._thread = LoopThread("jppo-tools")
        return self._thread.submit(_await_safely(function, arguments))

    def close(self) -> None:
        """Stops the loop and cancels its tasks; may be called twice."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:  # not closed: a call that blocks would hold its caller
            thread.loop.call_soon_threadsafe(_stop_loop, thread.loop)


def _stop_loop(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.call_soon(loop.stop)  # after the tasks have seen it


async def _await_safely(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Awaits a call; what would end the loop becomes a RuntimeError."""
    try:
        return await function(*arguments)
    except (SystemExit, KeyboardInterrupt, CancelledError) as e:  # these would end the loop, or cancel the caller
        raise RuntimeError(f"it raised {type(e).__name__}") from e
    except asyncio.CancelledError as e:
        if asyncio.current_task().cancelling():  # type: ignore[union-attr]
            raise
        raise RuntimeError("it was cancelled") from e  # it cancelled itself


def _run_in_thread(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Future[Any]:
    """Calls a plain function in a separate thread."""
    future: Future[Any] = Future()

    def work() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = function(*arguments)
        except BaseException as e:  # exit(), too
            # asyncio refuses a StopIteration, so that the caller waits forever, and cancels it by a CancelledError
            is_plain = isinstance(e, Exception) and not isinstance(e, StopIteration | CancelledError)
            future.set_exception(e if is_plain else RuntimeError(f"it raised {type(e).__name__}"))
        else:
            future.set_result(result)

    threading.Thread(target=work, name="jppo-tool", daemon=True).start()  # a hanging thread must not block the exit
    return future


TOOLS = Registry[Callable[..., Any]]("tools", {"calculator": Calculator, "python": Python, "search": Search})
SETTING = "rollout.multi_turn.tool_config_path"
_CUT = "..."


@dataclasses.dataclass(frozen=True)
class Context:
    """The conversation as a tool, a user or an environment sees it."""

    prompt: Prompt
    given: Mapping[str, Any]  # for a tool: the row's extra_info.tools_kwargs[NAME]
    memory: dict[str, Any]  # storage that lives as long as the conversation


class Tool(Protocol):
    """A tool, created once per run. `close()`, if defined, is called at its end."""

    schema: Schema

    async def __call__(self, arguments: Mapping[str, Any], context: Context) -> Any:
        """Returns the answer, as text; an exception becomes an error answer. A plain function runs in a thread.

        With the attribute `rewards = True` it may return (text, reward of the turn). One with `runs_programs = True`
        runs the model's programs: a run prints the sandbox's protections.
        """
        ...


@dataclasses.dataclass(frozen=True)
class ToolLimits:
    """Limits of tool calls."""

    parallel: int  # calls per turn
    characters: int  # of an answer
    side: str  # which part of a longer answer is cut
    timeout_s: float


@dataclasses.dataclass(frozen=True)
class ToolReplies:
    """The tools' answers to the calls of one turn, or to one of them."""

    messages: list[dict[str, str]]
    errors: int
    seconds: float  # summed over calls
    reward: float = 0.0  # the same
    fault: str | None = None  # an invalid reward


class Toolbox:
    """The tools of a run. `may_reward`: one of them gives rewards; `runs_programs`: one runs the model's programs."""

    def __init__(self, tools: Sequence[Tool], limits: ToolLimits, user_code: UserCodeRunner):
        self.schemas = [tool.schema for tool in tools]
        self._tools = {tool.schema["function"]["name"]: tool for tool in tools}
        self.runs_programs = any(getattr(tool, "runs_programs", False) for tool in tools)
        self.may_reward = any(getattr(tool, "rewards", False) for tool in tools)
        self._limits = limits
        self._user_code = user_code

    async def call(self, calls: Sequence[ParsedCall], prompt: Prompt, memory: dict[str, Any]) -> ToolReplies:
        """Makes the calls concurrently and returns their replies; calls above the limit get one reply, an error.

        `memory` is the conversation's, which the tools may change.
        """
        limit = self._limits.parallel
        replies = list(await asyncio.gather(*(self._call_one(call, prompt, memory) for call in calls[:limit])))
        if (surplus := len(calls) - limit) > 0:
            text = f"error: {surplus} calls were not made, only {limit} may be made at once"
            replies.append(ToolReplies([{"role": "tool", "name": "error", "content": self._cut(text)}], surplus, 0.0))
        return ToolReplies(
            [message for reply in replies for message in reply.messages],
            errors=sum(reply.errors for reply in replies),
            seconds=sum(reply.seconds for reply in replies),
            reward=sum(reply.reward for reply in replies),
            fault=next((reply.fault for reply in replies if reply.fault is not None), None),
        )

    async def _call_one(self, call: ParsedCall, prompt: Prompt, memory: dict[str, Any]) -> ToolReplies:
        """Makes one call; a failure becomes an answer with the error."""
        start_s = time.monotonic()
        name, text, failed, reward, fault = "error", "", True, 0.0, ""
        if isinstance(call, Fault):
            text = f"error: {call.why}"
        else:
            name = call.name
            try:
                text, reward, fault = await self._run_tool(call, prompt, memory)
                failed = bool(fault)
            except TimeoutError:
                text = f"error: {name} took longer than {self._limits.timeout_s:g} s"
            except Exception as e:  # a tool may raise anything
                text = f"error: {explain(e)}"
        message = {"role": "tool", "name": name, "content": self._cut(text)}
        return ToolReplies([message], int(failed), time.monotonic() - start_s, reward, fault or None)

    async def _run_tool(self, call: Call, prompt: Prompt, memory: dict[str, Any]) -> tuple[str, float, str]:
        """Returns the text, the reward, and what is wrong with the reward."""
        context = Context(prompt, row_arguments(prompt, call.name), memory)
        tool = self._tools[call.name]
        slots = getattr(tool, "concurrency", None)
        answer = await self._user_code.run(tool, call.arguments, context, timeout_s=self._limits.timeout_s, slots=slots)
        if not getattr(tool, "rewards", False):
            if isinstance(answer, tuple):
                raise TypeError("the tool returned a tuple, which only a tool with rewards=True may")
            return str(answer), 0.0, ""
        text, reward = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, None)
        number = 0.0 if reward is None else finite(reward)
        if not isinstance(text, str) or number is None:
            rule = "it must be text, or (text, a finite number or None)"
            return "", 0.0, f"the tool {call.name} returned {short(answer)}; {rule}"
        return text, number, ""

    def _cut(self, text: str) -> str:
        text = text.encode("utf-8", "replace").decode("utf-8")  # a tokenizer cannot encode half a surrogate pair
        return cut_to_length(text, self._limits.characters, self._limits.side)

    def close(self) -> None:
        """Closes the tools; may be called twice."""
        for tool in self._tools.values():
            getattr(tool, "close", lambda: None)()


def row_arguments(prompt: Prompt, name: str) -> Mapping[str, Any]:
    """Returns a row's arguments for one tool: verl's extra_info.tools_kwargs[NAME]."""
    tools_kwargs = (prompt.extra.get("extra_info") or {}).get("tools_kwargs")
    arguments = tools_kwargs.get(name) if isinstance(tools_kwargs, Mapping) else None
    return arguments if isinstance(arguments, Mapping) else {}


def cut_to_length(text: str, length: int, side: str) -> str:
    """Truncates the text to `length` characters: left, middle or right is replaced by three dots."""
    if len(text) <= length:
        return text
    dots = _CUT if length > len(_CUT) else ""
    kept_length = length - len(dots)
    if side == "left":
        return dots + text[len(text) - kept_length :]
    if side == "right":
        return text[:kept_length] + dots
    left_length = -(-kept_length // 2)
    return text[:left_length] + dots + text[len(text) - (kept_length - left_length) :]


def read_tools(
    path: str, *, allow_code: bool, timeout_s: float = math.inf, sandbox: tuple[str, ...] = (STRICT,)
) -> list[Tool]:
    """Creates the tools of a YAML or Python file; '' means none. Faults are UserErrors.

    `timeout_s` is the limit of a call. `sandbox` is where the tool python runs programs: reward.sandbox and
    reward.sandbox_url.
    """
    if not path:
        return []
    file, setting = expanded(path), f"{SETTING}={path}"
    tools = _load_python(file, setting) if file.suffix == ".py" else _load_yaml(file, setting, sandbox)
    if not tools:
        raise UserError(f"{setting} lists no tool; add one, or leave the setting empty")
    names = [_require_name(tool, setting) for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{setting} has two tools of the name {name!r}; rename one in its tool_schema")
    for tool in tools:
        _require_parameters(tool.schema["function"], setting)
        if isinstance(tool, Python) and not allow_code:
            raise UserError(
                f"{setting}: the tool python runs the model's programs; allow it by"
                " rollout.multi_turn.allow_code=True; docs/security.md describes its sandbox"
            )
        if isinstance(tool, Python) and tool.call_timeout_s > timeout_s:
            raise UserError(
                f"{setting}: a call of the tool python may take its timeout_s and a start, {tool.call_timeout_s:g} s;"
                f" rollout.multi_turn.tool_timeout_s={timeout_s:g} must be as long, or a late program keeps its worker"
            )
    return tools


def _load_python(file: pathlib.Path, setting: str) -> list[Tool]:
    make = getattr(user_module(file, setting), "tools", None)
    if not callable(make):
        raise UserError(f"{setting}: the file has no function tools(); give it one that returns a list of tools")
    try:
        return list(make())
    except UserError:
        raise
    except Exception as e:
        raise UserError(f"{setting}: tools() failed ({explain(e)}); fix the file") from e


def _load_yaml(file: pathlib.Path, setting: str, sandbox: tuple[str, ...]) -> list[Tool]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        fault = "there is no such file" if isinstance(e, FileNotFoundError) else f"it cannot be read: {e}"
        raise UserError(f"{setting}: {fault}; give a YAML or Python file") from e
    except yaml.YAMLError as e:
        raise UserError(f"{setting} is not valid YAML: {' '.join(str(e).split())}; fix it") from e
    entries = content.get("tools") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(f"{setting} must have a list `tools` of objects with class_name, config and tool_schema")
    return [_make_tool(entry, setting, sandbox) for entry in entries]


def _make_tool(entry: Mapping[str, Any], setting: str, sandbox: tuple[str, ...]) -> Tool:
    """Creates a tool by its entry in a YAML file; UserError if it is invalid."""
    name, config, schema = entry.get("class_name"), entry.get("config") or {}, entry.get("tool_schema")
    if unknown := set(entry) - {"class_name", "config", "tool_schema"}:
        raise UserError(
            f"{setting}: {min(map(str, unknown))!r} is not known; an entry has class_name, config, tool_schema"
        )
    if not isinstance(name, str) or not isinstance(config, dict) or not isinstance(schema, dict | None):
        raise UserError(
            f"{setting}: an entry is class_name (text), config and tool_schema (objects); one is {dict(entry)}"
        )
    cls = TOOLS.find(name, f"{setting}: class_name")
    try:
        tool: Tool = cls(**config, **({"sandbox": sandbox} if cls is Python else {}))
        if schema is not None:
            tool.schema = schema
    except UserError:
        raise
    except Exception as e:
        raise UserError(
            f"{setting}: {name} cannot be created with config={config} ({explain(e)}); fix one of the two"
        ) from e
    return tool


def _require_name(tool: Any, setting: str) -> str:
    """Returns a tool's name; UserError if it has no valid schema, or cannot be called."""
    schema = getattr(tool, "schema", None)
    function = schema.get("function") if isinstance(schema, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name or any(c.isspace() for c in name):
        raise UserError(
            f"{setting}: the tool {type(tool).__name__} has no schema in OpenAI's form, {{'type': 'function',"
            " 'function': {'name': ..., 'description': ..., 'parameters': ...}}; give it `schema`, or tool_schema in"
            " the file"
        )
    if not callable(tool):
        raise UserError(
            f"{setting}: the tool {name!r} cannot be called; give it `async def __call__(arguments, context)`"
        )
    with contextlib.suppress(ValueError):  # some callables have no signature
        try:
            inspect.signature(tool).bind({}, None)
        except TypeError as e:
            raise UserError(
                f"{setting}: the tool {name!r} takes {inspect.signature(tool)}; it must take (arguments, context)"
            ) from e
    return name


def _require_parameters(function: Mapping[str, Any], setting: str) -> None:
    """UserError if the schema of a tool's parameters is there and of another form than parsers of calls read."""
    parameters = function.get("parameters") or {}
    fields = parameters if isinstance(parameters, Mapping) else {"properties": parameters}
    properties, required = fields.get("properties") or {}, fields.get("required") or []
    if not isinstance(properties, Mapping) or not isinstance(required, list | tuple):
        raise UserError(
            f"{setting}: the tool {function['name']!r} has parameters={short(parameters)}; it must be an object whose"
            " `properties` is an object and whose `required` is a list of names"
        )
