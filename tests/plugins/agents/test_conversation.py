"""Conversations, held with a policy that says what it is told to."""

import asyncio
import concurrent.futures
import dataclasses
import re
import threading
import time

import numpy as np
import pytest

from jppo.errors import UserError
from jppo.plugins.agents.conversation import Turns, make_environment, make_interaction
from jppo.rollout.protocol import greedy
from jppo.types import Exchange

SCHEMA = {"type": "function", "function": {"name": "slow", "parameters": {"properties": {"x": {"type": "string"}}}}}


def sampled_texts(hall, t):
    """The runs of sampled tokens, each as text."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], t.sampled.astype(int), [0]])))
    return [hall.tokenizer.decode(t.tokens[a:b]) for a, b in edges.reshape(-1, 2)]


CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12*34"}}\n</tool_call>'


def test_a_whole_conversation_has_the_ids_of_the_template(hermes):
    t, ask = hermes.hold(f"Let me see.\n{CALL}", "It is 408.")
    messages = [
        {"role": "user", "content": "What is 12*34?"},
        {"role": "assistant", "content": f"Let me see.\n{CALL}"},
        {"role": "tool", "content": "408"},
        {"role": "assistant", "content": "It is 408."},
    ]
    text = hermes.tokenizer.apply_chat_template(messages, tools=[hermes.tools[0].schema], tokenize=False)
    whole = hermes.encode(text)
    newline = hermes.encode("\n")
    assert [*t.tokens.tolist(), *newline] == whole  # the template ends with a line break that nobody samples
    assert ask.asked[1] == whole[: len(ask.asked[1])]
    assert sampled_texts(hermes, t) == [f"Let me see.\n{CALL}<|im_end|>", "It is 408.<|im_end|>"]
    assert (t.turns, t.finish) == (2, "stop")
    assert t.text.startswith("Let me see.") and "408" in t.text and t.text.endswith("It is 408.")
    assert (t.exchange.calls, t.exchange.call_errors) == (1, 0)


def test_every_token_has_its_log_prob_and_version_and_what_was_given_has_none(plain):
    t, ask = plain.hold("<<12*34>>", "408", prompt=plain.prompt("12*34="))
    assert plain.tokenizer.decode(t.tokens) == "12*34=<<12*34>><eos>[[408]]408<eos>"
    chosen = np.repeat([False, True, False, True], [6, 10, 7, 4])
    np.testing.assert_array_equal(t.sampled, chosen)
    np.testing.assert_array_equal(t.version, np.where(chosen, 7, -1))
    expected = np.zeros(27)
    expected[6:16], expected[23:] = -1 - np.arange(10) / 100, -2 - np.arange(4) / 100
    np.testing.assert_allclose(t.logprob, expected, rtol=1e-6)
    assert t.text == "<<12*34>>[[408]]408"
    assert ask.room == [400, 400 - 17] and ask.seeds[0] == 5 != ask.seeds[1]


def test_sampled_tokens_alone_have_kept_tokens(plain):
    t, _ = plain.hold("<<12*34>>", "408", prompt=plain.prompt("12*34="), kept=2)
    turn = np.repeat([-1, 1, -1, 2], [6, 10, 7, 4])
    np.testing.assert_array_equal(t.kept, np.stack([np.where(t.sampled, t.tokens, -1), turn], axis=1))


def test_a_token_has_the_experts_of_the_first_turn_that_read_it(plain):
    t, _ = plain.hold("<<12*34>>", "408", prompt=plain.prompt("12*34="), experts=True)
    read = np.repeat([1, 2, -1], [6 + 10 - 1, 1 + 7 + 3, 1])  # a turn reads all but its own last token
    np.testing.assert_array_equal(t.experts, np.broadcast_to(read[:, None, None], (27, 2, 1)))


def test_tokens_that_no_text_encodes_to_stay_as_they_were_sampled(hermes):
    letters = [hermes.tokenizer.convert_tokens_to_ids(c) for c in "It is".replace(" ", "Ġ")]
    first = [*letters, *hermes.encode(CALL), hermes.tokenizer.eos_token_id]
    _, ask = hermes.hold(first, "408.")
    assert letters != hermes.encode("It is")
    assert ask.asked[1][: len(ask.asked[0]) + len(first)] == ask.asked[0] + first


def test_a_turn_that_ended_without_its_end_token_gets_one_between(hermes):
    end = hermes.tokenizer.eos_token_id
    t, ask = hermes.hold(hermes.encode(CALL), "408.")
    given = ask.asked[1][len(ask.asked[0]) + len(hermes.encode(CALL)) :]
    assert given[0] == end and not t.sampled[len(ask.asked[1]) - len(given)]
    other, again = hermes.hold([*hermes.encode(CALL), end], "408.")
    assert again.asked[1] == ask.asked[1] and other.sampled.sum() == t.sampled.sum() + 1


def test_several_calls_are_made_side_by_side_and_answered_in_one_turn(hermes):
    second = CALL.replace("12*34", "2**10")
    t, _ = hermes.hold(f"{CALL}\n{second}\n{second}", "Done.")
    text = hermes.tokenizer.decode(t.tokens)
    assert "<tool_response>\n408\n</tool_response>\n<tool_response>\n1024\n</tool_response>" in text
    assert text.count("<|im_start|>user") == 2  # all answers are one turn
    assert "1 calls were not made, only 2 may be" in text and (t.exchange.calls, t.exchange.call_errors) == (3, 1)


@pytest.mark.parametrize(
    "said,told",
    [
        ("<tool_call>{oops}</tool_call>", "the call is not valid"),
        ("<tool_call>12*34", "the call has no </tool_call>"),
        ('<tool_call>{"name": "oven", "arguments": {}}</tool_call>', "there is no tool 'oven'"),
        ('<tool_call>{"name": "calculator", "arguments": {}}</tool_call>', "calculator needs 'expression'"),
        (CALL.replace("12*34", "1/0"), "division by zero"),
    ],
)
def test_what_is_no_call_is_told_to_the_policy_and_counted(hermes, said, told):
    t, _ = hermes.hold(said, "Sorry.")
    assert told in t.text and t.turns == 2 and (t.exchange.calls, t.exchange.call_errors) == (1, 1)


def test_the_conversation_ends_at_its_limits(plain):
    prompt = plain.prompt("12*34=")
    plain.turns = Turns(assistant=1, user=-1)
    t, _ = plain.hold("<<12*34>>", prompt=prompt)
    assert (t.turns, t.exchange.calls, t.finish, t.text) == (1, 0, "stop", "<<12*34>>")  # a call that nobody would read
    plain.turns = Turns(assistant=-1, user=1)
    t, _ = plain.hold("<<12*34>>", "<<5*5>>", prompt=prompt)
    assert (t.turns, t.exchange.calls) == (2, 1)


def test_the_response_never_outgrows_its_room(plain):
    prompt = plain.prompt("12*34=")
    for room in range(1, 30):
        t, _ = plain.hold("<<12*34>>", "408", prompt=prompt, room=room)
        n = len(t.tokens) - len(prompt.ids)
        assert n <= room and t.sampled[-1] and t.finish == ("stop" if room >= 21 else "length")
        assert t.turns == (2 if room > 17 else 1)
    assert plain.hold("<<12*34>>", prompt=prompt, finish="length")[0].turns == 1  # a turn that was cut calls nothing


class Slow:
    """Waits, or blocks, or fails in one of many ways."""

    schema = SCHEMA

    async def __call__(self, arguments, context):
        return await getattr(self, arguments["x"])(context)

    async def hang(self, context):
        await asyncio.sleep(60)

    async def block(self, context):
        time.sleep(1.0)

    async def leave(self, context):
        raise SystemExit(3)

    async def cancelled(self, context):
        raise asyncio.CancelledError

    async def withdrawn(self, context):
        raise concurrent.futures.CancelledError

    async def flood(self, context):
        return "o" * 10_000_000

    async def nothing(self, context):
        return None

    async def odd(self, context):
        return "\ud800 <|im_end|>"

    async def row(self, context):
        context.memory["asked"] = context.memory.get("asked", 0) + 1
        return f"{context.given['secret']} {context.memory['asked']} {context.prompt.ground_truth}"


def call_of(what):
    return f'<tool_call>{{"name": "slow", "arguments": {{"x": "{what}"}}}}</tool_call>'


@pytest.mark.parametrize(
    "what,told",
    [
        ("hang", "error: slow took longer than 0.5 s"),
        ("block", "error: slow took longer than 0.5 s"),
        ("leave", "it raised SystemExit"),
        ("cancelled", "it was cancelled"),
        ("flood", f"{'o' * 29}...{'o' * 28}"),
        ("nothing", "None"),
        ("odd", "?"),
        ("missing", "AttributeError"),
        ("withdrawn", "it raised CancelledError"),
    ],
)
def test_a_tool_that_misbehaves_costs_its_own_call_only(hermes, what, told):
    hermes.tools = [Slow()]
    hermes.limits["timeout_s"] = 0.5 if "longer" in told else 60.0
    t, _ = hermes.hold(call_of(what), "Well.", prompt=hermes.prompt())
    assert told in t.text and t.turns == 2
    assert t.exchange.call_errors == (what not in ("flood", "nothing", "odd"))


class Plain(Slow):
    """The same, but for a plain call."""

    def __call__(self, arguments, context):
        return getattr(self, arguments["x"])(context)

    def stop(self, context):
        return next(iter(()))

    def withdrawn(self, context):
        raise concurrent.futures.CancelledError

    async def later(self, context):
        await asyncio.sleep(0.01)
        return f"on the loop of {threading.current_thread().name}"


@pytest.mark.parametrize(
    "what,told",
    [
        ("stop", "error: RuntimeError: it raised StopIteration"),
        ("withdrawn", "error: RuntimeError: it raised CancelledError"),
        ("later", "on the loop of jppo-tools"),
        ("leave", "error: RuntimeError: it raised SystemExit"),  # in a coroutine, as the next one
        ("hang", "error: slow took longer than 0.5 s"),
    ],
)
def test_a_plain_tool_may_raise_anything_and_return_a_coroutine(hermes, what, told):
    hermes.tools = [Plain()]
    hermes.limits["timeout_s"] = 0.5 if "longer" in told else 60.0
    t, _ = hermes.hold(call_of(what), "Well.", prompt=hermes.prompt())
    assert told in t.text and t.turns == 2 and t.exchange.call_errors == (what != "later")


def test_the_row_speaks_to_its_tools_and_the_conversation_remembers(hermes):
    hermes.tools = [Slow()]
    prompt = hermes.prompt(extra_info={"tools_kwargs": {"slow": {"secret": "open"}}})
    t, _ = hermes.hold(call_of("row"), call_of("row"), "Well.", prompt=prompt)
    assert "open 1 408" in t.text and "open 2 408" in t.text and t.exchange.call_errors == 0


def test_a_tool_that_blocks_does_not_hold_up_the_others(plain):
    together, loops = threading.Barrier(10), []

    class Blocks:
        schema = SCHEMA

        def __call__(self, arguments, context):  # a plain function
            together.wait(60)  # until nine others are called
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), *loops).result(60)  # the conversations' loop goes on
            return "1"

    plain.tools = [Blocks()]
    talk, prompt, sampling = plain.talk(), plain.prompt("12*34="), dataclasses.replace(greedy(100), temperature=1.0)

    def one():
        return talk(plain.policy("<<1>>", "1"), prompt, sampling=sampling, seed=1, near=0)

    async def many():
        loops.append(asyncio.get_running_loop())
        return await asyncio.gather(*(one() for _ in range(100)))

    assert all(t.turns == 2 and t.exchange.call_errors == 0 for t in asyncio.run(many()))


USERS = """
class User:
    async def respond(self, messages, context):
        assert messages[0]["content"] == "What is 12*34?"
        if context.prompt.ground_truth in messages[-1]["content"]:
            return "thanks", True, 1.0
        context.memory["wrong"] = context.memory.get("wrong", 0) + 1
        return f"no, try again: {context.memory['wrong']}", False, -0.25

class Guess:
    def reset(self, prompt):
        self.left = 3
        return "I think of a number."
    async def step(self, text):
        self.left -= 1
        return f"{self.left} left", 0.5, self.left == 0

class Raises(User):
    def respond(self, messages, context):
        raise KeyError("who")

class Text(User):
    def respond(self, messages, context):
        return "three"

class NotANumber(User):
    def respond(self, messages, context):
        return "a", False, float("nan")

class HalfUser(User):
    def respond(self, messages, context):
        return "a \\ud83d", False, 0.0

class HalfStep(Guess):
    def step(self, text):
        return "\\udc00", 0.0, False

class HalfReset(Guess):
    def reset(self, prompt):
        return "a \\ud83d b"

class HalfError(User):
    def respond(self, messages, context):
        raise ValueError("\\ud83d")

class Huge(User):
    def respond(self, messages, context):
        return "a", False, 10**5000

class Sleeps(User):
    def respond(self, messages, context):
        import time
        time.sleep(0.3)

class BadReset(Guess):
    def reset(self, prompt):
        return 3

class Built(Guess):
    count = 0
    def __init__(self):
        Built.count += 1
        if Built.count > 1:  # the first one is the check at the start
            self.build()

class SlowlyBuilt(Built):
    def build(self):
        import time
        time.sleep(0.3)

class WronglyBuilt(Built):
    def build(self):
        raise SystemExit(3)

class OnceBuilt(User):
    def __init__(self):
        assert not hasattr(OnceBuilt, "one")
        OnceBuilt.one = self

class Leaves:
    def __init__(self):
        raise SystemExit(3)

class NoMethod:
    pass

class Needs:
    def __init__(self, more):
        pass
"""


@pytest.fixture
def users(tmp_path):
    (tmp_path / "users.py").write_text(USERS)
    return f"{tmp_path / 'users.py'}:"


def test_a_simulated_user_answers_until_it_is_content(hermes, users):
    hermes.begin = make_interaction(f"{users}User", user_code=hermes.user_code, timeout_s=60)
    t, _ = hermes.hold("407", "409", "408")
    messages = [
        {"role": "user", "content": "What is 12*34?"},
        {"role": "assistant", "content": "407"},
        {"role": "user", "content": "no, try again: 1"},
        {"role": "assistant", "content": "409"},
        {"role": "user", "content": "no, try again: 2"},
        {"role": "assistant", "content": "408"},
    ]
    text = hermes.tokenizer.apply_chat_template(messages, tools=[hermes.tools[0].schema], tokenize=False)
    assert [*t.tokens.tolist(), *hermes.encode("\n")] == hermes.encode(text)
    edges = np.flatnonzero(np.diff(t.sampled, append=False)) - np.argmax(t.sampled)
    earned = tuple(zip(edges[1::2].tolist(), (-0.25, -0.25, 1.0), strict=True))  # each at the end of its turn
    assert t.exchange == Exchange(0, 0, 0.0, score=0.5, fault=None, earned=earned) and t.turns == 3


def test_a_user_and_tools_share_a_conversation(hermes, users):
    hermes.begin = make_interaction(f"{users}User", user_code=hermes.user_code, timeout_s=60)
    t, _ = hermes.hold(CALL, "407", "408")
    assert (t.exchange.calls, t.exchange.score, t.turns) == (1, 0.75, 3)


def test_an_environment_begins_and_rewards_every_turn_the_last_one_too(hermes, plain, users):
    for hall, prompt in ((hermes, hermes.prompt()), (plain, plain.prompt("12*34="))):
        hall.begin = make_environment(f"{users}Guess", user_code=hall.user_code, timeout_s=60)
        t, ask = hall.hold("5", "6", "7", prompt=prompt)
        assert (t.turns, t.exchange.score, t.finish) == (3, 1.5, "stop")
        first = len(ask.asked[0])
        assert first > len(prompt.ids) and not t.sampled[:first].any() and t.sampled[first]
        assert len(t.tokens) <= len(prompt.ids) + 400
        ends = np.flatnonzero(t.sampled[first:] & ~np.append(t.sampled[first + 1 :], False))
        assert t.exchange.earned == tuple((k, 0.5) for k in ends.tolist()) and len(ends) == 3
        hall.turns = Turns(assistant=2, user=-1)
        assert hall.hold("5", "6", prompt=prompt)[0].exchange.score == 1.0
    opened = hermes.tokenizer.decode(hermes.hold("5", "6", prompt=hermes.prompt())[1].asked[0])
    assert "What is 12*34?\nI think of a number.<|im_end|>\n<|im_start|>assistant\n" in opened


@pytest.mark.parametrize(
    "name,fault",
    [
        ("Raises", "respond raised KeyError: 'who'"),
        ("Text", "respond returned str; it must be (text, done, score)"),
        ("NotANumber", "respond returned 'a' and nan"),
        ("Huge", "respond returned 'a' and int; they must be"),
        ("Sleeps", "respond took longer than 0.1 s"),
        ("BadReset", "reset returned int; it must be text"),
        ("HalfUser", "respond returned text with '\\ud83d', half a surrogate pair; it must be valid Unicode"),
        ("HalfError", "respond raised ValueError: \\ud83d"),
        ("HalfStep", "step returned text with '\\udc00', half a surrogate pair"),
        ("HalfReset", "reset returned text with '\\ud83d', half a surrogate pair"),
    ],
)
def test_a_partner_that_fails_costs_its_own_response(plain, users, name, fault):
    make = make_environment if name in ("BadReset", "HalfReset", "HalfStep") else make_interaction
    plain.begin = make(f"{users}{name}", user_code=plain.user_code, timeout_s=0.1 if name == "Sleeps" else 60.0)
    t, _ = plain.hold("5", prompt=plain.prompt("12*34="))
    assert t.turns == 1 and t.exchange.fault.startswith(fault)


@pytest.mark.parametrize(
    "name,fault",
    [
        ("SlowlyBuilt", "__init__ took longer than 0.1 s"),
        ("WronglyBuilt", "__init__ raised RuntimeError: it raised SystemExit"),
    ],
)
def test_an_environment_that_cannot_be_built_costs_its_own_sample(plain, users, name, fault):
    plain.begin = make_environment(f"{users}{name}", user_code=plain.user_code, timeout_s=0.1 if "0.1" in fault else 60)
    t, _ = plain.hold("5", prompt=plain.prompt("12*34="))
    assert t.exchange.fault == fault


def test_one_simulated_user_serves_the_whole_run(plain, users):
    plain.begin = make_interaction(f"{users}OnceBuilt", user_code=plain.user_code, timeout_s=60)
    prompt = plain.prompt("What is 12*34?")
    assert [plain.hold("408", prompt=prompt)[0].exchange.score for _ in range(2)] == [1.0, 1.0]


@pytest.mark.parametrize(
    "name,said",
    [
        ("NoMethod", "has no method 'respond'"),
        ("Needs", "cannot be created"),
        ("Leaves", "cannot be created without arguments \\(SystemExit: 3\\)"),
        ("Nobody", "defines no 'Nobody'"),
    ],
)
def test_a_partner_that_cannot_be_is_one_line(plain, users, name, said):
    with pytest.raises(UserError, match=said) as e:
        make_interaction(f"{users}{name}", user_code=plain.user_code, timeout_s=1)
    assert "\n" not in str(e.value)


def test_an_environment_that_says_too_much_at_first_costs_its_own_sample(plain, users):
    plain.begin = make_environment(f"{users}Guess", user_code=plain.user_code, timeout_s=60)
    t, ask = plain.hold("5", prompt=plain.prompt("12*34="), room=1)
    assert ask.asked == [] and t.tokens.tolist() == plain.encode("12*34=") and not t.sampled.any()
    assert t.version.tolist() == [-1] * 6 and t.logprob.tolist() == [0.0] * 6
    assert re.match(
        r"with the opening message the prompt has \d+ tokens instead of 6, and the response ends at 7;",
        t.exchange.fault,
    )
    assert t.finish == "abort" and t.turns == 0
