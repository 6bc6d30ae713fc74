"""Random conversations with a chat template: the policy's prompts against the template's own renderings.

A conversation has tools, a user or both; thoughts that are whole, empty, unfinished or absent; and several calls in a
turn. Each request to the policy must be the template's own rendering of the conversation, in which the turns of the
policy are messages with their calls as fields. With `rollout.multi_turn.history=sampled` it may differ.
"""

import asyncio
import dataclasses
import json
import random
import re
from typing import Any

import jinja2
import numpy as np

from jppo.data.tokenizer import decode, spell
from jppo.errors import UserError
from jppo.plugins.agents import turn_tokens
from jppo.plugins.agents.calls import PARSERS
from jppo.plugins.agents.conversation import PartnerReply, Turns, make_talk
from jppo.plugins.agents.tools import Toolbox, ToolLimits, UserCodeRunner
from jppo.rollout.protocol import Answer, greedy
from jppo.types import Prompt

KINDS = {"users": ("user",), "tools": ("tool",), "both": ("tool", "user")}
PARAMETERS = {
    "type": "object",
    "properties": {"what": {"type": "string", "description": "a"}, "most": {"type": "integer", "description": "b"}},
    "required": ["what"],
}
SCHEMA = {"type": "function", "function": {"name": "look", "description": "Looks it up.", "parameters": PARAMETERS}}
LIMITS = ToolLimits(parallel=3, characters=1000, side="middle", timeout_s=10.0)
MARK = "said-by-nobody"
WORDS = ["tea", "12", "is", "not", "7.5", "<b>", "a_b", "{x}", "zwei", "né"]


class Look:
    """A tool that repeats what it is asked."""

    schema = SCHEMA

    async def __call__(self, arguments: Any, context: Any) -> str:
        """Returns the arguments."""
        return f"found {arguments['what']} {arguments.get('most', 0)}"


@dataclasses.dataclass
class Case:
    """A conversation as the template should see it, and what the policy was asked."""

    messages: list[dict[str, Any]]
    asked: list[list[int]] = dataclasses.field(default_factory=list)
    answers: list[list[int]] = dataclasses.field(default_factory=list)
    wrong: str = ""


class Hall:
    """A tokenizer with a template, and the format of its calls."""

    def __init__(self, tokenizer: Any, template: str):
        self.tokenizer = tokenizer  # its special tokens grow, and its template is replaced
        self._ends: dict[bool, list[int]] = {}
        special = {*re.findall(r"<[|｜][^'\"\s<>]+?[|｜]?>|<[a-z_]+[|｜]>|</?think>|<(?:end|start)_of_turn>", template)}
        self.tokenizer.add_tokens(sorted(special), special_tokens=True)
        self.tokenizer.chat_template = template
        if self.tokenizer.bos_token is None:
            self.tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
        try:
            self.systems = bool(
                self.render([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], None)
            )
        except jinja2.TemplateError:
            self.systems = False

    def render(self, messages: Any, tools: Any, opened: bool = True) -> str:
        """The template's own rendering."""
        return self.tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=opened, tokenize=False)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def end(self, message: dict[str, Any], new: list[dict[str, Any]], tools: Any) -> list[int]:
        """The token that the template has after a turn, which the policy samples."""
        if (calls := "tool_calls" in message) in self._ends:
            return self._ends[calls]
        before = [{"role": "user", "content": "a"}]
        message = message | {"content": MARK}
        plain = self.render([*before, {"role": "assistant", "content": MARK}], tools, False)
        text = plain[plain.index(MARK) + len(MARK) :]
        if not text:  # the next turn's head ends this one
            whole = self.render([*before, message, *(new or [{"role": "user", "content": "b"}])], tools)
            text = whole[len(self.render([*before, message], tools, False)) :]
        self._ends[calls] = self.encode(text)[:1]
        return self._ends[calls]


def call_text(format: str, name: str, arguments: dict[str, Any]) -> str:
    """A call as Qwen's templates write it."""
    if format == "hermes":
        encoded = json.dumps(arguments, ensure_ascii=False)
        return f'<tool_call>\n{{"name": "{name}", "arguments": {encoded}}}\n</tool_call>'
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def words(rng: random.Random) -> str:
    """Some words."""
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 5)))


def a_turn(rng: random.Random, format: str, tools: bool, thinks: bool, first: int) -> tuple[str, dict[str, Any], list]:
    """Text of a turn, the same as a message, and its calls."""
    thought = rng.choice(["whole", "empty", "half", "none"])
    inside = {"whole": f"{words(rng)}\n{words(rng)}", "empty": ""}.get(thought)
    head = f"{'' if thinks else '<think>'}\n{inside}\n</think>\n\n" if inside is not None else ""
    head = head.removeprefix("\n") if thinks else head
    if thought == "half":
        return (text := f"{'' if thinks else '<think>'}\n{words(rng)}"), {"role": "assistant", "content": text}, []
    calls = []
    for i in range(rng.randint(0, 3) if tools and not (thinks and not head) else 0):
        arguments = {"what": words(rng)} | ({"most": rng.randint(1, 9)} if rng.random() < 0.5 else {})
        id = f"call{first + i:05d}"
        calls.append({"id": id, "type": "function", "function": {"name": "look", "arguments": arguments}})
    prose = words(rng) if rng.random() < 0.7 or not calls else ""
    texts = [call_text(format, **call["function"]) for call in calls]
    text = head + "\n".join([*([prose] if prose else []), *texts])
    message = {"role": "assistant", "content": (head + prose).rstrip() if calls else head + prose}
    return text, message | ({"tool_calls": calls} if calls else {}), calls


class Play:
    """Both sides of one conversation."""

    def __init__(self, hall: Hall, kind: str, format: str, seed: int):
        self.hall, self.format, self.rng = hall, format, random.Random(seed)
        self.tools = [SCHEMA] if "tool" in KINDS[kind] else None
        self.users, self.turns = "user" in KINDS[kind], self.rng.randint(2, 6)
        messages = [{"role": "system", "content": words(self.rng)}] if hall.systems and self.rng.random() < 0.3 else []
        for _ in range(self.rng.choice([0, 0, 1])):
            messages += [
                {"role": "user", "content": words(self.rng)},
                {"role": "assistant", "content": words(self.rng)},
            ]
        self.case = Case([*messages, {"role": "user", "content": words(self.rng)}])
        self.calls = 0

    def prompt(self) -> Prompt:
        """The prompt as data has it."""
        text = self.hall.render(self.case.messages, self.tools)
        messages = [dict(message) for message in self.case.messages]
        return Prompt("p", "x", messages, np.array(self.hall.encode(text), np.int32), "", {})

    async def ask(self, ids: Any, **options: Any) -> Answer:
        """The policy's turn; first what it is asked is compared."""
        case = self.case
        case.asked.append(list(ids))
        own, asked = self.hall.render(case.messages, self.tools), spell(self.hall.tokenizer, ids)
        if own != asked:
            at = next(
                (i for i, (a, b) in enumerate(zip(own, asked, strict=False)) if a != b), min(len(own), len(asked))
            )
            case.wrong = (
                case.wrong or f"turn {len(case.asked)}: {asked[at - 20 : at + 30]!r} for {own[at - 20 : at + 30]!r}"
            )
        thinks = own.rstrip().endswith("<think>")
        text, message, calls = a_turn(self.rng, self.format, self.tools is not None, thinks, self.calls)
        self.calls += len(calls)
        new: list[dict[str, Any]] = [
            {
                "role": "tool",
                "name": "look",
                "tool_call_id": call["id"],
                "content": f"found {x['what']} {x.get('most', 0)}",
            }
            for call in calls
            for x in [call["function"]["arguments"]]
        ]
        end = self.hall.end(message, new, self.tools)
        tokens = self.hall.encode(self.as_written(text, message, own, end)) + end
        case.answers.append(tokens)
        self.text = words(self.rng)
        case.messages += [message, *(new or [{"role": "user", "content": self.text}])]
        return Answer(tokens, [-1.0] * len(tokens), [1] * len(tokens), "stop")

    def as_written(self, text: str, message: dict[str, Any], own: str, end: list[int]) -> str:
        """The text with the blanks that the template has in this turn."""
        whole = self.hall.render([*self.case.messages, message], self.tools, False)
        written = whole[len(own) :].partition(spell(self.hall.tokenizer, end))[0]
        if "tool_calls" not in message and self.rng.random() < 0.2:
            message["content"] = text = text + self.rng.choice([" ", "\n", "\n\n"])
            return text
        return written if whole.startswith(own) and written.split() == text.split() else text

    async def begin(self, context: Any) -> Any:
        """The user."""

        async def respond(messages: Any) -> PartnerReply:
            return PartnerReply(self.text, len(self.case.asked) >= self.turns, 0.0)

        return "", respond


async def hold(hall: Hall, kind: str, format: str, seed: int, chat: Any, options: dict[str, Any]) -> tuple[str, int]:
    """Holds one conversation; returns what is wrong, and its trajectories."""
    play = Play(hall, kind, format, seed)
    toolbox = Toolbox([Look()] if play.tools else [], LIMITS, options["user_code"])
    parts = (chat, PARSERS[format], toolbox, play.begin if play.users else None)
    talk = make_talk(*parts, turns=Turns(play.turns, -1), **{k: v for k, v in options.items() if k != "user_code"})
    try:
        t = await talk(play.ask, play.prompt(), sampling=greedy(100_000), seed=seed, near=0)
    except jinja2.TemplateError as e:
        return f"the template refuses the conversation: {e}", 1
    check_trained(play.case, t)
    return play.case.wrong, 1 + len(getattr(t, "branches", ()))


def check_trained(case: Case, t: Any) -> None:
    """Each answer must be trained on once, after the tokens that it was asked with."""
    left = [(asked, answer) for asked, answer in zip(case.asked, case.answers, strict=True)]
    for branch in (t, *getattr(t, "branches", ())):
        edges = np.flatnonzero(np.diff(branch.sampled.astype(int), prepend=0, append=0)).reshape(-1, 2)
        for a, b in edges:
            here = branch.tokens[:a].tolist(), branch.tokens[a:b].tolist()
            if here in left:
                left.remove(here)
            else:
                case.wrong = case.wrong or "a trained turn was not sampled so"
    if left or t.exchange.fault:
        case.wrong = case.wrong or t.exchange.fault or "a turn is not trained on"


def outcome(
    tokenizer: Any, template: str, kind: str, count: int, history: str, seed: int = 0
) -> tuple[str, int, float]:
    """Outcome of a template for a kind of conversation, the exact ones, and the mean number of trajectories."""
    hall, refusal = Hall(tokenizer, template), ""
    for format in ("hermes", "qwen3_coder"):
        options: dict[str, Any] = dict(roles=KINDS[kind], name=format)
        options |= dict(parse=PARSERS[format], history=history, parallel=3)
        try:
            chat = turn_tokens.template_chat(hall.tokenizer, [SCHEMA] if kind != "users" else [], **options)
            break
        except UserError as e:
            refusal = refusal if refusal and "the run reads" in str(e) else f"refused: {e}"
    else:
        return refusal, 0, 0.0
    asked: dict[str, Any] = dict(
        user_code=UserCodeRunner(),
        decode=lambda ids: decode(hall.tokenizer, ids),
        spell=lambda ids: spell(hall.tokenizer, ids),
        ends=tuple(id for token, id in hall.tokenizer.get_added_vocab().items() if "think" not in token),
        branches=20,
    )

    async def every() -> list[tuple[str, int]]:
        return [await hold(hall, kind, format, seed + i, chat, asked) for i in range(count)]

    held = asyncio.run(every())
    asked["user_code"].close()
    wrong = [why for why, _ in held if why]
    trajectories = float(np.mean([trajectories for _, trajectories in held]))
    return f"differs: {wrong[0]}" if wrong else "exact", count - len(wrong), trajectories
