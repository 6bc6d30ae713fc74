"""Parts of the reward that are scored at once: the length, and what was scored turn by turn."""

import math

import numpy as np
import pytest

from jppo.errors import UserError
from jppo.rewards.graders import OverlongPart, overlong
from jppo.rewards.parts import ConversationPart, Sample
from jppo.types import Exchange, Prompt

PROMPT = Prompt("u", "s", "q", np.zeros(1, np.int32), "", {})


# L = 100 and b = 20: nothing up to 80, then one twentieth a token
@pytest.mark.parametrize(
    ("length", "score"), [(0, 0), (79, 0), (80, 0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1)]
)
def test_the_last_tokens_before_the_end_cost_more_and_more(length, score):
    assert overlong(length, max_response_length=100, buffer_tokens=20) == pytest.approx(score)
    part = OverlongPart(max_response_length=100, buffer_tokens=20)
    reward = part.submit(Sample(PROMPT, "", length, "stop")).result(0)
    assert reward.score == pytest.approx(score) and reward.error is None and reward.parts == {}


@pytest.mark.parametrize("buffer", [0, -1, 101])
def test_a_buffer_must_fit(buffer):
    with pytest.raises(UserError, match=r"reward\.overlong_buffer_tokens"):
        OverlongPart(max_response_length=100, buffer_tokens=buffer)


def test_the_part_hands_out_the_score_or_the_fault():
    part = ConversationPart()

    def reward(exchange):
        return part.submit(Sample(PROMPT, "", 1, "stop", exchange)).result(0)

    assert reward(Exchange(0, 0, 0.0, 0.75, None)).score == 0.75
    assert reward(None).score == 0.0
    failed = reward(Exchange(0, 0, 0.0, 0.75, "step raised KeyError: 1"))
    assert math.isnan(failed.score) and failed.error == "step raised KeyError: 1"
