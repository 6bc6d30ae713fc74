"""Makes prompts with checkable instructions: `python -m examples.instructions --out runs/smollm2/data/instructions`

A prompt has a request about a topic and one or two instructions: "Describe the moon. Answer in exactly 2 sentences. Do
not use any commas." There are 16 kinds of instructions. Two of them, `hashtag` and `title`, are only in test.jsonl,
as are 12 of the 48 topics. So the test has no prompt of the training, and its data source `instructions_new` measures
kinds that were never trained. `instruction_checks.py:compute_score` is the reward.
"""

import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jppo.data.rows import write_sets
from jppo.errors import UserError
from jppo.settings import Parser, exit_on_user_error, natural

from .instruction_checks import LANGUAGES

REQUESTS = (
    "Tell me about {topic}.",
    "Describe {topic}.",
    "Write something about {topic}.",
    "What do you know about {topic}?",
    "Explain {topic} to a child.",
    "Why do people like {topic}?",
)
# Each with its main word, in the singular.
TOPICS = {
    "the moon": "moon", "bread": "bread", "rivers": "river", "cats": "cat", "dogs": "dog", "trees": "tree",
    "trains": "train", "bicycles": "bicycle", "the sea": "sea", "mountains": "mountain", "books": "book",
    "music": "music", "rain": "rain", "snow": "snow", "gardens": "garden", "birds": "bird", "horses": "horse",
    "football": "football", "chess": "chess", "painting": "painting", "coffee": "coffee", "tea": "tea",
    "chocolate": "chocolate", "apples": "apple", "bees": "bee", "whales": "whale", "ships": "ship",
    "airplanes": "airplane", "the sun": "sun", "stars": "star", "winter": "winter", "summer": "summer",
    "towns": "town", "farms": "farm", "schools": "school", "museums": "museum", "clocks": "clock",
    "bridges": "bridge", "lakes": "lake", "forests": "forest", "deserts": "desert", "islands": "island",
    "cheese": "cheese", "swimming": "swimming", "dancing": "dancing", "cooking": "cooking", "robots": "robot",
    "computers": "computer",
}  # fmt: skip
TEST_TOPICS = 12
KEYWORDS = ("world", "people", "water", "time", "life", "beautiful", "history", "friend", "simple", "important")
OPENINGS = (
    "Once upon a time", "I think that", "In my opinion", "Did you know that", "Everyone knows that",
    "Today I learned that", "Let me tell you",
)  # fmt: skip
KEYS = ("name", "color", "size", "use", "place", "reason")
NEW_KINDS = ("hashtag", "title")  # only in the test
UNNAMED = ("no_word", "language", "json_object")  # an answer to these need not name its topic

Make = Callable[[np.random.Generator, str], dict[str, Any]]  # (rng, main word of the topic) -> parameters


def one_of(name: str, values: Sequence[Any]) -> Make:
    """Returns a maker of one parameter with a random value."""
    return lambda rng, topic: {name: values[rng.integers(len(values))]}


def _words(rng: np.random.Generator, topic: str) -> dict[str, Any]:
    least = 5 * int(rng.integers(1, 5))
    return {"least": least, "most": least + 5}


def _keys(rng: np.random.Generator, topic: str) -> dict[str, Any]:
    return {"keys": [KEYS[i] for i in sorted(rng.permutation(len(KEYS))[: rng.integers(2, 4)])]}


# A form and a content can be asked for together, the others are alone. By kind: wordings, and how parameters are made.
FORMS: dict[str, tuple[tuple[str, ...], Make]] = {
    "word_count": (("Use between {least} and {most} words.", "Answer in {least} to {most} words."), _words),
    "sentence_count": (
        ("Answer in exactly {count} sentences.", "Write exactly {count} sentences, not more and not fewer."),
        one_of("count", (2, 3)),
    ),
    "numbered_list": (
        ("Give a numbered list of exactly {count} things.", "List {count} facts, numbered 1 to {count}."),
        one_of("count", (2, 3, 4)),
    ),
    "question": (("End your answer with a question.", "Your answer must be a question."), lambda *_: {}),
    "digits": (
        ("Use at least one number in digits.", "Your answer must have a number or a year in digits."),
        lambda *_: {},
    ),
    "title": (
        ("Begin with a title in double angular brackets, such as <<title>>.", "Start with <<title>>, then the text."),
        lambda *_: {},
    ),
    "hashtag": (("Add a hashtag.", "End with a hashtag, like #this."), lambda *_: {}),
}
CONTENTS: dict[str, tuple[tuple[str, ...], Make]] = {
    "first_letter": (
        ("Begin your answer with the letter {letter}.", "The first letter of your answer must be {letter}."),
        one_of("letter", "ABCFHMPSW"),
    ),
    "opening": (
        ('Begin your answer with "{phrase}"', 'Start with the words "{phrase}".'),
        one_of("phrase", OPENINGS),
    ),
    "keyword": (('Use the word "{word}".', "Your answer must contain the word {word}."), one_of("word", KEYWORDS)),
    "no_word": (
        ('Do not use the word "{word}".', "Never mention the word {word} itself."),
        lambda rng, topic: {"word": topic},
    ),
    "no_letter": (
        ('Do not use the letter "{letter}".', "Avoid every word with the letter {letter}."),
        one_of("letter", "bcfgkpvwz"),
    ),
    "no_comma": (("Do not use any commas.", "Write without commas."), lambda *_: {}),
    "often": (
        (
            'Use the word "{word}" at least {count} times.',
            "Your answer must have the word {word} {count} times or more.",
        ),
        lambda rng, topic: {"word": topic, "count": int(rng.integers(2, 4))},
    ),
}
ALONE: dict[str, tuple[tuple[str, ...], Make]] = {
    "json_object": (("Answer with a JSON object with the keys {keys} only.", "Reply in JSON. Keys: {keys}."), _keys),
    "language": (("Answer in {name}.", "Reply in {name}, not in English."), one_of("name", tuple(LANGUAGES))),
}
KINDS = FORMS | CONTENTS | ALONE


def make(*, seed: int, train: int, test: int) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of train and test, as a function of the arguments only."""
    if train < 1 or test < 1:
        raise UserError(f"--train={train} and --test={test} must be 1 or more")
    rng = np.random.default_rng(seed)
    topics = [list(TOPICS)[i] for i in rng.permutation(len(TOPICS))]
    known = [kind for kind in KINDS if kind not in NEW_KINDS]
    # Kinds of the test take turns, so that each has as many prompts.
    return {
        "train": [_row(rng, topics[TEST_TOPICS:], known[i % len(known)], known) for i in range(train)],
        "test": [_row(rng, topics[:TEST_TOPICS], list(KINDS)[i % len(KINDS)], known) for i in range(test)],
    }


def _row(rng: np.random.Generator, topics: Sequence[str], kind: str, partners: Sequence[str]) -> dict[str, Any]:
    """Returns a prompt with an instruction of the kind and, for half of those that can have one, a second."""
    topic = topics[rng.integers(len(topics))]
    kinds = [kind]
    if kind not in ALONE and rng.random() < 0.5:
        others = [name for name in (CONTENTS if kind in FORMS else FORMS) if name in partners]
        kinds.append(others[rng.integers(len(others))])
    asked = [REQUESTS[rng.integers(len(REQUESTS))].format(topic=topic)]
    kept = [*asked]  # without the phrase that an answer must repeat
    given: list[tuple[str, dict[str, Any]]] = []
    named = not set(kinds) & set(UNNAMED)
    for name in kinds:
        wordings, parameters_of = KINDS[name]
        parameters = parameters_of(rng, TOPICS[topic])
        shown = parameters | ({"keys": ", ".join(parameters["keys"])} if "keys" in parameters else {})
        wording = wordings[rng.integers(len(wordings))]
        asked.append(wording.format(**shown))
        kept.append(wording.format(**shown | {"phrase": ""}))
        given.append((name, parameters))
        named &= name != "no_letter" or parameters["letter"] not in TOPICS[topic]
    return {
        "prompt": [{"role": "user", "content": " ".join(asked)}],
        "ground_truth": json.dumps(given),
        "extra_info": {"asked": kept, "topic": TOPICS[topic] if named else ""},
        "data_source": "instructions_new" if kind in NEW_KINDS else "instructions",
    }


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = Parser("examples.instructions", __doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="directory to write to")
    parser.add_argument("--seed", type=natural, default=1, help="random seed")
    parser.add_argument("--train", type=int, default=4096, help="prompts to train on")
    parser.add_argument("--test", type=int, default=320, help="prompts to hold out")
    args = parser.parse_args(argv)
    sets = make(seed=args.seed, train=args.train, test=args.test)
    write_sets(args.out, sets)


if __name__ == "__main__":
    main()
