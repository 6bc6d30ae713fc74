"""Fixtures of the tests of servers."""

from tests.rollout.conftest import fakes, settings  # noqa: F401 (fixtures)
