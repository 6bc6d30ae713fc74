"""Publishes a step's policy concurrently with the critic's update where possible."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from ml_collections import ConfigDict

from jppo.distributed.hosts import Hosts
from jppo.types import TrainState


def may_overlap(c: ConfigDict, hosts: Hosts) -> bool:
    """Whether servers may get the policy while the critic learns.

    Not with several hosts: their exchanges would mix. Not with sleeping servers: they would wake on a GPU in use. Not
    in asynchronous mode: responses are in flight.
    """
    served = c.rollout.name != "inprocess"
    return hosts.count == 1 and served and c.rollout.mode == "sync" and not c.rollout.sleep_level


class Handover:
    """A call of `publish` with a step's final policy: started early by `begin`, or made by `finish`."""

    def __init__(self, publish: Callable[[TrainState], None], *, early: bool):
        self._publish = publish
        self._pool = ThreadPoolExecutor(1, "publish") if early else None
        self._under_way: Future[None] | None = None

    def begin(self, now: TrainState) -> None:
        """Starts publishing the policy of `now`, now final, if it may overlap."""
        if self._pool is not None:
            self._under_way = self._pool.submit(self._publish, now)

    def finish(self, now: TrainState) -> None:
        """Publishes the policy of `now`, or waits for `begin`; raises its error."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            self._publish(now)
        else:
            under_way.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown()  # before the engine closes
