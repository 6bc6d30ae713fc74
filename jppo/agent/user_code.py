"""Runs user code (tools, users, environments) without blocking the event loop of the conversations.

Coroutines run on their own loop, in one thread for the whole run; each plain function runs in its own thread. The
caller enforces the timeout, so code that blocks costs only its caller's time.
"""

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class UserCodeRunner:
    """Runs coroutines on a second event loop, which starts with the first one."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        # Callers wait for a slot on their own loop, and an engine may use several loops in turn.
        self._slots: dict[tuple[asyncio.AbstractEventLoop, int], asyncio.Semaphore] = {}

    async def run(self, what: Callable[..., Any], *arguments: Any, timeout_s: float, slots: int | None = None) -> Any:
        """Returns or raises what the callable does; TimeoutError after `timeout_s`.

        At most `slots` calls of the same callable run at once; waiting for a slot does not count.
        """
        if slots is None:
            return await self._run(what, arguments, timeout_s)
        key = asyncio.get_running_loop(), id(what)
        if key not in self._slots:
            self._slots = {k: s for k, s in self._slots.items() if not k[0].is_closed()}
            self._slots[key] = asyncio.Semaphore(slots)
        async with self._slots[key]:
            return await self._run(what, arguments, timeout_s)

    async def _run(self, what: Callable[..., Any], arguments: tuple[Any, ...], timeout_s: float) -> Any:
        future = self._on_loop(what, arguments) if is_async(what) else _in_thread(what, arguments)
        return await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)

    def _on_loop(self, what: Callable[..., Any], arguments: tuple[Any, ...]) -> Future[Any]:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="jppo-tools", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(_guarded(what, arguments), self._loop)

    def close(self) -> None:
        """Stops the loop and cancels its tasks; may be called twice."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(_stop, loop)


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.call_soon(loop.stop)  # after the tasks have seen it


async def _guarded(what: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return await what(*arguments)
    except (SystemExit, KeyboardInterrupt) as e:  # these would end the loop
        raise RuntimeError(f"it raised {type(e).__name__}") from e
    except asyncio.CancelledError as e:
        if asyncio.current_task().cancelling():  # type: ignore[union-attr]
            raise
        raise RuntimeError("it was cancelled") from e  # it cancelled itself


def is_async(what: Callable[..., Any]) -> bool:
    """Whether a call returns a coroutine: of a function, a method, or an object's `__call__`."""
    return inspect.iscoroutinefunction(what) or inspect.iscoroutinefunction(getattr(what, "__call__", None))  # noqa: B004


def _in_thread(what: Callable[..., Any], arguments: tuple[Any, ...]) -> Future[Any]:
    future: Future[Any] = Future()

    def work() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = what(*arguments)
        except BaseException as e:  # exit(), too
            future.set_exception(e if isinstance(e, Exception) else RuntimeError(f"it raised {type(e).__name__}"))
        else:
            future.set_result(result)

    threading.Thread(target=work, name="jppo-tool", daemon=True).start()  # a hanging thread must not block the exit
    return future
