"""A publish on its way into a server: buckets of tensors in separate memory, until all have arrived and been checked.

The served model is not touched before, so a publish that is cut, incomplete or wrong leaves the old weights in use.
Also imported in the server's interpreter, so it needs only the standard library and numpy.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jppo.rollout.vllm import layout
from jppo.rollout.vllm.layout import TensorEntry, WeightsRefused

Bucket = tuple[Sequence[TensorEntry], Any]  # tensors, and the bytes that hold them


class Staging:
    """The buckets of one publish for a model with the `expected` names and shapes."""

    def __init__(self, expected: Mapping[str, tuple[int, ...]], version: int | None = None):
        self.version = version
        self.buckets: list[Bucket] = []
        self.complete = False
        self.error: str | None = None  # the first refusal: nothing after it counts
        self._expected = expected

    def add(self, version: int, entries: Sequence[TensorEntry], fetch: Callable[[], Any]) -> None:
        """Fetches a bucket, in any case: another process may be sending it to several servers."""
        try:
            self._require_open(version)
            before = [entry for bucket, _ in self.buckets for entry in bucket]
            layout.check_names([*before, *entries], self._expected, whole=False)
        except WeightsRefused as e:
            self._refuse(e)
        try:
            data = fetch()
            if self.error is None:
                self.buckets.append((entries, data))
        except WeightsRefused as e:
            self._refuse(e)

    def finish(self, version: int, digest: str) -> None:
        """Completes the publish if it has every tensor of the model, and these are the ones that were sent."""
        try:
            self._require_open(version)
            entries = [entry for bucket, _ in self.buckets for entry in bucket]
            layout.check_names(entries, self._expected)
            if self.error is None and (found := layout.digest(entries)) != digest:
                raise WeightsRefused(f"the tensors have the digest {found}, but {digest} was sent")
            self.complete = self.error is None
        except WeightsRefused as e:
            self._refuse(e)

    def take(self) -> list[Bucket]:
        """Returns the buckets of a complete publish, once; none of another."""
        if not self.complete:
            self._refuse("it is not complete")
            return []
        buckets, self.buckets, self.complete = self.buckets, [], False
        return buckets

    def _require_open(self, version: int) -> None:
        self.version = version if self.version is None else self.version
        if version != self.version or self.complete:
            raise WeightsRefused(f"a bucket of version {version} came into the publish of version {self.version}")

    def _refuse(self, why: Exception | str) -> None:
        self.error = self.error or str(why)
        self.buckets, self.complete = [], False
