"""What the tests of carriers share with those of servers."""

from tests.rollout.conftest import fakes, settings  # noqa: F401 (fixtures)
