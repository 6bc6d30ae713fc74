"""The sandbox of graded programs and of the python tool, from `reward.sandbox`."""

from collections.abc import Iterable

from jppo.agent.python import Python
from jppo.agent.tools import Toolbox
from jppo.rewards.graders import RUNS_CODE, grader_of
from jppo.rewards.sandbox.choice import describe_sandbox
from jppo.settings import Settings


def sandbox_of(c: Settings) -> tuple[str, ...]:
    """Returns the mode and the service's address."""
    return (c.reward.sandbox, c.reward.sandbox_url)


def introduce_sandbox(c: Settings, sources: Iterable[str], toolbox: Toolbox | None) -> str:
    """Returns the console line on active protections; '' if the run executes no programs of the model."""
    asked = [c.reward.grader] if c.reward.grader else sources
    graded = not c.reward.function and any(grader_of(source) in RUNS_CODE for source in asked)
    tools = toolbox.tools if toolbox is not None else []
    if not graded and not any(isinstance(tool, Python) for tool in tools):
        return ""
    return describe_sandbox(*sandbox_of(c))
