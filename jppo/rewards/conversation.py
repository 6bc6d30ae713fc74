"""The part that hands out what was scored while the response came about: by an environment, or a simulated user."""

from concurrent.futures import Future

from jppo.rewards.parts import Sample, failed
from jppo.structs import Reward


class ConversationPart:
    """The sum of what was given turn by turn; an error where whoever gives it has failed."""

    def submit(self, sample: Sample) -> Future[Reward]:
        """The score, at once."""
        future: Future[Reward] = Future()
        found = sample.exchange
        if found is None:  # an answer without a conversation, as checks have it: nobody gave anything
            future.set_result(Reward(0.0, {}, error=None))
        else:
            future.set_result(Reward(found.score, {}, error=None) if found.fault is None else failed(found.fault))
        return future

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """There is nothing to end."""
