"""Checks of followed instructions, and the reward that counts them: examples.instructions makes the prompts.

A checker is a pure function (response, parameters) -> bool for one kind of instruction. `CHECKERS` has all kinds. The
idea is that of IFEval (arXiv 2311.07911): instructions that a short program can verify. Kinds, wordings and code are
different.

`compute_score` is the reward, by `reward.function`: the fraction of a prompt's instructions that the response follows,
and 0 for a response that is no answer: a degenerate one, a copy of the prompt, or one that does not name its topic. It
does not see whether a response is true. Standard library only.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Parameters = Mapping[str, Any]

# Frequent words that are in none of the other languages here, nor in English.
LANGUAGES = {
    "Spanish": "el los las y por para muy pero como más también está hay puede sus cuando donde desde porque",
    "French": "les est et dans pour avec qui sur pas sont cette au très nous vous ou leur être elle aussi",
    "German": "der das und ist ein eine mit von nicht dem auf für sich auch wir zu sind oder wird werden",
    "Italian": "il gli che di è della nel sono più anche questo molto delle dei nella alla perché essere",
}
ENGLISH = "the and of to is in that it for was with as are be this by from they you have or can which"
_WORDS_OF = {name: frozenset(words.split()) for name, words in {**LANGUAGES, "English": ENGLISH}.items()}
LEAST_WORDS = 3  # of a response that is not degenerate
LEAST_DISTINCT = 0.5  # of its words
COPIED_WORDS = 4  # in a row
_YOURS = re.compile(r"\byour\b.{0,20}\b(answer|response)s?\b", re.I)


def words(text: str) -> list[str]:
    """Returns the words of a text: letters and digits, with apostrophes and hyphens inside."""
    return re.findall(r"\w+(?:['’-]\w+)*", text)


def letters(text: str) -> str:
    """Returns the letters of a text."""
    return "".join(character for character in text if character.isalpha())


def word_count(response: str, parameters: Parameters) -> bool:
    """From `least` to `most` words."""
    return bool(parameters["least"] <= len(words(response)) <= parameters["most"])


def sentence_count(response: str, parameters: Parameters) -> bool:
    """Exactly `count` sentences, each with an end mark; an unfinished one is wrong."""
    text = response.strip().rstrip("\"'”’)*")
    pieces = [piece for piece in re.split(r"(?<=[.!?])[\"'”’)*]*\s+", text) if words(piece)]
    return len(pieces) == parameters["count"] and text.endswith((".", "!", "?"))


def numbered_list(response: str, parameters: Parameters) -> bool:
    """Exactly the numbers from 1 to `count` at the beginning of lines, each with words; an introduction is allowed."""
    items = re.findall(r"^[ \t]*(\d+)[.)][ \t]+(.*)$", response, re.M)
    numbers = [number for number, _ in items]
    return numbers == [str(n + 1) for n in range(parameters["count"])] and all(words(text) for _, text in items)


def question(response: str, parameters: Parameters) -> bool:
    """Ends with a question mark; quotes and stars after it are allowed."""
    return bool(words(response)) and response.strip().rstrip("\"'”’)*").endswith("?")


def first_letter(response: str, parameters: Parameters) -> bool:
    """The first letter is `letter`, in either case."""
    return letters(response)[:1].lower() == parameters["letter"].lower()


def keyword(response: str, parameters: Parameters) -> bool:
    """Contains `word` as a whole word, in any case."""
    return re.search(rf"\b{re.escape(parameters['word'])}\b", response, re.I) is not None


def no_word(response: str, parameters: Parameters) -> bool:
    """Has words, and `word` is not among them, nor its plural."""
    return bool(words(response)) and not re.search(rf"\b{re.escape(parameters['word'])}s?\b", response, re.I)


def no_letter(response: str, parameters: Parameters) -> bool:
    """Has letters, and `letter` is not among them, in either case."""
    return bool(letters(response)) and parameters["letter"].lower() not in response.lower()


def no_comma(response: str, parameters: Parameters) -> bool:
    """Has words and no comma."""
    return bool(words(response)) and not re.search("[,，、]", response)


def often(response: str, parameters: Parameters) -> bool:
    """Contains `word` or its plural at least `count` times, in any case."""
    return len(re.findall(rf"\b{re.escape(parameters['word'])}(?:s|es)?\b", response, re.I)) >= parameters["count"]


def digits(response: str, parameters: Parameters) -> bool:
    """Has a number in digits."""
    return re.search(r"[0-9]", response) is not None


def opening(response: str, parameters: Parameters) -> bool:
    """Begins with `phrase`, in any case, and has at least two other words; marks before it are allowed."""
    text, phrase = ([word.lower() for word in words(given)] for given in (response, parameters["phrase"]))
    return text[: len(phrase)] == phrase and len(text) >= len(phrase) + 2


def hashtag(response: str, parameters: Parameters) -> bool:
    """Has a hashtag: # and a word that begins with a letter, without a space."""
    return re.search(r"(?<![\w#&])#[^\W\d_]", response) is not None


def json_object(response: str, parameters: Parameters) -> bool:
    """A JSON object with exactly `keys`, whose values are not empty; a code fence around it is allowed."""
    text = response.strip()
    fenced = re.fullmatch(r"```(?:json)?\s*(.*?)\s*```", text, re.S)
    try:
        parsed = json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        return False
    if not isinstance(parsed, dict) or sorted(parsed) != sorted(parameters["keys"]):
        return False
    return all(value is not None and str(value).strip() not in ("", "[]", "{}") for value in parsed.values())


def language(response: str, parameters: Parameters) -> bool:
    """Two frequent words or more of the language `name`, and more than of any other here."""
    lowered = [word.lower() for word in words(response)]
    counts = {name: sum(word in known for word in lowered) for name, known in _WORDS_OF.items()}
    own = counts.pop(parameters["name"])
    return own >= 2 and own > max(counts.values())


def title(response: str, parameters: Parameters) -> bool:
    """One title in double angular brackets, <<like this>>, and at least two words after it."""
    titles = re.findall(r"<<([^<>\n]+)>>", response)
    return len(titles) == 1 and bool(words(titles[0])) and len(words(response.split(">>", 1)[1])) >= 2


CHECKERS: dict[str, Callable[[str, Parameters], bool]] = {
    "word_count": word_count,
    "sentence_count": sentence_count,
    "numbered_list": numbered_list,
    "question": question,
    "digits": digits,
    "title": title,
    "hashtag": hashtag,
    "first_letter": first_letter,
    "opening": opening,
    "keyword": keyword,
    "no_word": no_word,
    "no_letter": no_letter,
    "no_comma": no_comma,
    "often": often,
    "json_object": json_object,
    "language": language,
}


def degenerate(response: str) -> bool:
    """Whether a response is no answer: fewer than three words, or more than half of its words are repetitions.

    One word would follow several instructions, no comma and a first letter among them, and the same word five times
    a number of words, too. In a short English text about four words in five are different.
    """
    lowered = [word.lower() for word in words(response) if len(word) > 1]
    return len(lowered) < LEAST_WORDS or len(set(lowered)) < LEAST_DISTINCT * len(lowered)


def copied(response: str, asked: Sequence[str]) -> bool:
    """Whether a response has COPIED_WORDS words in a row from one of the texts that its prompt is made of.

    A copied instruction follows itself: "Your answer must contain the word friend" contains the word friend. So a
    response that speaks to the reader of "your answer" is a copy, too.
    """
    runs = [_runs(text) for text in (response, *asked)]
    return any(runs[0] & of_prompt for of_prompt in runs[1:]) or _YOURS.search(response) is not None


def _runs(text: str) -> set[tuple[str, ...]]:
    lowered = [word.lower() for word in words(text)]
    return {tuple(lowered[i : i + COPIED_WORDS]) for i in range(len(lowered) - COPIED_WORDS + 1)}


def off_topic(response: str, topic: str) -> bool:
    """Whether a response does not name its topic by the word or its plural; the topic "" needs no name."""
    lowered = {word.lower() for word in words(response.replace("_", " "))}
    return bool(topic) and not lowered & {topic, f"{topic}s", f"{topic}es", f"{topic}'s", f"{topic}’s"}


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """Returns the fraction of the instructions that are followed, and why a response is no answer.

    `ground_truth` is JSON, [[kind, parameters], ...]; `extra_info` has `asked`, the texts of the prompt without what an
    answer must repeat, and `topic`, the word that names it, which is empty where an answer need not.
    """
    given, extra = json.loads(ground_truth), extra_info or {}
    lacks = sorted({"asked", "topic"} - set(extra)) + sorted({kind for kind, _ in given} - set(CHECKERS))
    if lacks:
        raise ValueError(
            f"the rows are of another version, by {', '.join(lacks)}; delete their folder and make them by"
            " examples.instructions"
        )
    none = {
        "degenerate": degenerate(solution_str),
        "copied": copied(solution_str, extra["asked"]),
        "off_topic": off_topic(solution_str, extra["topic"]),
    }
    followed = [not any(none.values()) and CHECKERS[kind](solution_str, parameters) for kind, parameters in given]
    scores = {"score": sum(followed) / len(given), "followed_all": float(all(followed))}
    return scores | {name: float(flag) for name, flag in none.items()}
