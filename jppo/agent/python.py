"""The tool `python`: runs the model's programs in the sandbox of the code rule (`jppo/sandbox/`)."""

import asyncio
from collections.abc import Mapping
from typing import Any

from jppo.rewards.pool import Pool, Target
from jppo.sandbox.choice import STRICT, make_runner
from jppo.settings import UserError

_MORE_S = 5.0  # for the process around the program


class Python:
    """The tool `python`. `workers` programs run at once; waiting for a worker does not count towards the timeout."""

    def __init__(
        self,
        *,
        timeout_s: float = 5.0,
        memory_bytes: int = 2**30,
        workers: int = 2,
        sandbox: tuple[str, ...] = (STRICT,),  # reward.sandbox and reward.sandbox_url
    ) -> None:
        if not (timeout_s > 0 and memory_bytes >= 2**26 and workers >= 1):
            raise UserError(
                f"the tool python: timeout_s={timeout_s} must be above 0, memory_bytes={memory_bytes} at least {2**26},"
                f" workers={workers} at least 1"
            )
        try:
            make_runner(*sandbox)
        except ValueError as e:
            raise UserError(f"the tool python: {e}") from e
        self.concurrency = workers
        self._pool = Pool(workers, timeout_s=timeout_s + _MORE_S, memory_bytes=max(memory_bytes, 2**30))
        self._target: Target = ("program", str(timeout_s), str(memory_bytes), *sandbox)
        self.schema: Mapping[str, Any] = {
            "type": "function",
            "function": {
                "name": "python",
                "description": "Runs a Python program and returns what it prints.",
                "parameters": {
                    "type": "object",
                    "properties": {"code": {"type": "string", "description": "the program; it must print its results"}},
                    "required": ["code"],
                },
            },
        }

    async def __call__(self, arguments: Mapping[str, Any], context: Any) -> str:
        """Returns the program's output and the last line of its error."""
        sample = {"data_source": "", "text": str(arguments["code"]), "truth": "", "extra": None}
        ran = await asyncio.wrap_future(self._pool.submit(self._target, sample))
        if ran.error is not None:
            raise RuntimeError(ran.error)
        assert ran.answer is not None
        return ran.answer

    def close(self) -> None:
        """Ends the processes."""
        self._pool.close()
