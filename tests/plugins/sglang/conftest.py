"""What the tests of SGLang share with those of other servers."""

from tests.rollout.conftest import settings  # noqa: F401 (a fixture)
