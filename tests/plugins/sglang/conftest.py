"""Fixtures of the tests of servers."""

from tests.rollout.conftest import settings  # noqa: F401 (a fixture)
