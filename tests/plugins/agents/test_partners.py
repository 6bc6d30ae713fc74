"""The examples: a game of guessing, and a user who lets the policy try again."""

import asyncio

import pytest

from examples.guessing import Guessing
from examples.second_try import SecondTry
from jppo.plugins.agents.tools import Context


def test_the_game_of_guessing(plain):
    async def play(*said):
        game = Guessing()
        assert await game.reset(plain.prompt("guess")) == "I think of a number. Guess it."
        return [await game.step(text) for text in said]

    assert asyncio.run(play("it is 500", "I say 3 or 300", "?", "408!")) == [
        ("smaller", 0.0, False), ("larger", 0.0, False), ("I see no number.", 0.0, False), ("That is it.", 0.7, True),
    ]  # fmt: skip
    lost = asyncio.run(play(*["9" * 30] * 10))
    assert [over for _, _, over in lost] == [False] * 9 + [True] and sum(worth for _, worth, _ in lost) == 0


@pytest.mark.parametrize(
    "answers,found",
    [
        (["407", "so 408"], [(False, None), (True, 0.5)]),
        (["12 * 34 = 408"], [(True, 1.0)]),
        (["no", "407"], [(False, None), (True, None)]),
    ],
)
def test_the_second_try(plain, answers, found):
    context = Context(plain.prompt("12*34="), {}, {})
    user, messages, said = SecondTry(), [{"role": "user", "content": "12*34="}], []
    for answer in answers:
        messages.append({"role": "assistant", "content": answer})
        text, done, score = asyncio.run(user.respond(messages, context))
        messages.append({"role": "user", "content": text})
        said.append((done, score))
    assert said == found
