"""What was scored turn by turn, as a part of the reward."""

import math

import numpy as np

from jppo.rewards.conversation import ConversationPart
from jppo.rewards.parts import Sample
from jppo.types import Exchange, Prompt

PROMPT = Prompt("u", "s", "q", np.zeros(1, np.int32), "", {})


def test_the_part_hands_out_the_score_or_the_fault():
    part = ConversationPart()

    def reward(exchange):
        return part.submit(Sample(PROMPT, "", 1, "stop", exchange)).result(0)

    assert reward(Exchange(0, 0, 0.0, 0.75, None)).score == 0.75
    assert reward(None).score == 0.0
    failed = reward(Exchange(0, 0, 0.0, 0.75, "step raised KeyError: 1"))
    assert math.isnan(failed.score) and failed.error == "step raised KeyError: 1"
