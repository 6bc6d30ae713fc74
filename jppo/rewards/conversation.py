"""The reward part for scores given during a conversation: by an environment, a simulated user, or tools."""

from collections.abc import Mapping
from concurrent.futures import Future

from jppo.rewards.parts import Part, Sample, failed, graded
from jppo.types import Exchange, Reward

ENVIRONMENT, AGENT, INTERACTION, TOOLS = "environment_score", "agent_score", "interaction_score", "tool_score"
TURNS = (ENVIRONMENT, AGENT, INTERACTION)  # parts that read the scores of turns


class ConversationPart(Part):
    """Returns the sum of the scores of all turns, earned at their ends; an error if the environment or user failed."""

    def __init__(self, *, tools: bool = False):
        """Reads the rewards from tools, or else those from the environment or user."""
        self._tools = tools

    def submit(self, sample: Sample) -> Future[Reward]:
        """Returns the score at once."""
        found = sample.exchange
        if found is None:  # a sample without a conversation, as in checks
            return graded(Reward(0.0, {}, error=None))
        if found.fault is not None:
            return graded(failed(found.fault))
        score, earned = found.score, found.earned
        if self._tools:
            score, earned = sum(amount for _, amount in found.tool_earned), found.tool_earned
        return graded(Reward(score, {}, error=None, earned=earned))


def weighted(exchange: Exchange | None, weights: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """Returns what a branch of an episode earned at its turns, scaled by the weights of the parts."""
    if exchange is None:
        return ()
    of_turns, of_tools = sum(weights.get(part, 0.0) for part in TURNS), weights.get(TOOLS, 0.0)
    pairs = [(of_turns, exchange.earned), (of_tools, exchange.tool_earned)]
    return tuple((k, weight * amount) for weight, earned in pairs for k, amount in earned)
