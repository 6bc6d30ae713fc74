"""The reward part for scores given during a conversation: by an environment or a simulated user."""

from concurrent.futures import Future

from jppo.rewards.parts import Part, Sample, failed, graded
from jppo.types import Reward


class ConversationPart(Part):
    """Returns the sum of the scores of all turns, earned at their ends; an error if the environment or user failed."""

    def submit(self, sample: Sample) -> Future[Reward]:
        """Returns the score at once."""
        found = sample.exchange
        if found is None:  # a sample without a conversation, as in checks
            return graded(Reward(0.0, {}, error=None))
        if found.fault is not None:
            return graded(failed(found.fault))
        return graded(Reward(found.score, {}, error=None, earned=found.earned))
