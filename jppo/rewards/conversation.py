"""The reward part for scores given during a conversation: by an environment or a simulated user."""

from concurrent.futures import Future

from jppo.rewards.parts import Sample, failed
from jppo.types import Reward


class ConversationPart:
    """Returns the sum of the scores of all turns, earned at their ends; an error if the environment or user failed."""

    def submit(self, sample: Sample) -> Future[Reward]:
        """Returns the score at once."""
        future: Future[Reward] = Future()
        found = sample.exchange
        if found is None:  # a sample without a conversation, as in checks
            future.set_result(Reward(0.0, {}, error=None))
        else:
            reward = Reward(found.score, {}, error=None, earned=found.earned)
            future.set_result(reward if found.fault is None else failed(found.fault))
        return future

    def flush(self) -> None:
        """Does nothing: no sample waits."""

    def close(self) -> None:
        """Does nothing."""
