"""The publish of a step's policy, beside the update of the critic where nothing is against it."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from ml_collections import ConfigDict

from jppo.distributed.hosts import Hosts
from jppo.types import TrainState


def may_overlap(c: ConfigDict, hosts: Hosts) -> bool:
    """Whether servers may get the policy while the critic learns.

    Several hosts would mix up what they exchange, servers that sleep would wake on a GPU that is still in use, and
    asynchronous ones are in the middle of responses.
    """
    served = c.rollout.name != "inprocess"
    return hosts.count == 1 and served and c.rollout.mode == "sync" and not c.rollout.sleep_level


class Handover:
    """`publish`, of the state that a step will leave: begun early by `begin`, or done by `finish`."""

    def __init__(self, publish: Callable[[TrainState], None], *, early: bool):
        self._publish = publish
        self._pool = ThreadPoolExecutor(1, "publish") if early else None
        self._under_way: Future[None] | None = None

    def begin(self, now: TrainState) -> None:
        """The policy of `now` will not change any more; where that is early enough its publish begins."""
        if self._pool is not None:
            self._under_way = self._pool.submit(self._publish, now)

    def finish(self, now: TrainState) -> None:
        """Returns when the policy of `now` is published; raises what stopped it."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            self._publish(now)
        else:
            under_way.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown()  # the engine is closed after this
