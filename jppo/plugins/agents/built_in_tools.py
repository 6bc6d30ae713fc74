"""The tools of jppo: `calculator`, `search` and `python`.

`calculator` is exact arithmetic on decimal numbers, with its own parser instead of eval. `python` runs the model's
programs in the sandbox of the code rule. `search` is BM25 over a corpus file (Robertson and Zaragoza
2009), without a server or a stored index. The score of a text d is

    score(d) = Σ_t log(1 + (N - n_t + 1/2) / (n_t + 1/2)) · f_td (k + 1) / (f_td + k (1 - b + b |d| / mean |d|))

over the terms t of the query, with N texts of which n_t contain t, f_td times in d.
"""

import asyncio
import collections
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from jppo.data.rows import read_rows, text_column
from jppo.errors import UserError, expanded
from jppo.plugins.sandbox.choice import STRICT, make_runner
from jppo.rewards.pool import Pool, Target

_LONGEST = 500  # characters of an expression
DEPTH = 50  # nesting of parentheses, signs and powers
_BITS = 4096  # of a numerator or denominator

_TOKEN = re.compile(r"\s*(?:(\d[\d,]*(?:\.\d+)?|\.\d+)|(\*\*|//|[-+*/%^()×÷]))")
_SUMS: dict[str, Callable[[Fraction, Fraction], Any]] = {"+": operator.add, "-": operator.sub}
_PRODUCTS: dict[str, Callable[[Fraction, Fraction], Any]] = {
    "*": operator.mul,
    "×": operator.mul,
    "/": operator.truediv,
    "÷": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
}


def _schema(name: str, purpose: str, parameter: str, description: str) -> Mapping[str, Any]:
    """Returns the schema of a tool with one required text, in OpenAI's form."""
    properties = {parameter: {"type": "string", "description": description}}
    parameters = {"type": "object", "properties": properties, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": purpose, "parameters": parameters}}


class Calculator:
    """The tool `calculator`."""

    def __init__(self) -> None:
        argument = "an expression of numbers, + - * / // % ** and parentheses"
        self.schema = _schema("calculator", "Computes an arithmetic expression.", "expression", argument)

    async def __call__(self, arguments: Mapping[str, Any], context: Any) -> str:
        return format_number(evaluate(str(arguments["expression"])))


def evaluate(expression: str) -> Fraction:
    """Evaluates an expression; ValueError if it is invalid or too large."""
    if len(expression) > _LONGEST:
        raise ValueError(f"the expression has more than {_LONGEST} characters")
    tokens, position = [], 0
    end = len(expression.rstrip())
    while position < end:
        match = _TOKEN.match(expression, position)
        if match is None:
            raise ValueError(f"cannot read {expression[position:end].strip()[:20]!r}")
        tokens.append(match[1] or match[2])
        position = match.end()
    value, next_token = _parse_sum(tokens, 0, DEPTH)
    if next_token < len(tokens):
        raise ValueError(f"{tokens[next_token]!r} is out of place")
    return value


def format_number(value: Fraction) -> str:
    """Formats a number: exactly if its decimals end, otherwise to about 15 digits."""
    if value.denominator == 1:
        return str(value.numerator)
    denominator, decimals = value.denominator, 0
    for prime in (2, 5):
        count = 0
        while denominator % prime == 0:
            denominator, count = denominator // prime, count + 1
        decimals = max(decimals, count)
    if denominator == 1 and decimals <= 15:
        digits = str(abs(value.numerator) * 10**decimals // value.denominator).rjust(decimals + 1, "0")
        return f"{'-' if value < 0 else ''}{digits[:-decimals]}.{digits[-decimals:]}"
    try:
        return f"{float(value):.15g}"
    except OverflowError:
        raise ValueError("the number is too large") from None


def _parse_sum(tokens: list[str], i: int, depth: int) -> tuple[Fraction, int]:
    """Evaluates sums and products from a position on; returns the value and the position after them."""
    return _parse_chain(tokens, i, depth, _SUMS, lambda t, i, d: _parse_chain(t, i, d, _PRODUCTS, _parse_signed))


def _parse_chain(
    tokens: list[str], i: int, depth: int, operators: Mapping[str, Any], operand: Callable[..., tuple[Fraction, int]]
) -> tuple[Fraction, int]:
    """Evaluates operands joined by operators of one precedence, from left to right."""
    value, i = operand(tokens, i, depth)
    while i < len(tokens) and tokens[i] in operators:
        right, next_i = operand(tokens, i + 1, depth)
        if right == 0 and tokens[i] in ("/", "÷", "//", "%"):
            raise ValueError("division by zero")
        value, i = _require_bounded(Fraction(operators[tokens[i]](value, right))), next_i
    return value, i


def _parse_signed(tokens: list[str], i: int, depth: int) -> tuple[Fraction, int]:
    """Evaluates an operand with its signs and powers."""
    if depth == 0:
        raise ValueError(f"more than {DEPTH} levels deep")
    if i < len(tokens) and tokens[i] in _SUMS:
        value, next_i = _parse_signed(tokens, i + 1, depth - 1)
        return (-value if tokens[i] == "-" else value), next_i
    value, i = _parse_atom(tokens, i, depth)
    if i < len(tokens) and tokens[i] in ("**", "^"):
        exponent, i = _parse_signed(tokens, i + 1, depth - 1)  # right-associative: 2**3**2 is 2**9, -2**2 is -4
        value = _power(value, exponent)
    return value, i


def _parse_atom(tokens: list[str], i: int, depth: int) -> tuple[Fraction, int]:
    """Evaluates a number, or an expression in parentheses."""
    if i == len(tokens):
        raise ValueError("the expression ends too soon")
    if tokens[i] == "(":
        value, i = _parse_sum(tokens, i + 1, depth - 1)
        if i == len(tokens) or tokens[i] != ")":
            raise ValueError("a parenthesis is not closed")
        return value, i + 1
    if not tokens[i][-1].isdigit():
        raise ValueError(f"{tokens[i]!r} is out of place")
    return _require_bounded(Fraction(tokens[i].replace(",", ""))), i + 1


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        if base < 0:
            raise ValueError("a root of a negative number")
        return Fraction(float(base) ** float(exponent))
    if base == 0 and exponent < 0:
        raise ValueError("division by zero")
    if abs(base) != 1 and abs(exponent) * max(_bits(base), 1) > _BITS:
        raise ValueError("the number is too large")
    return _require_bounded(base ** int(exponent))


def _require_bounded(value: Fraction) -> Fraction:
    if _bits(value) > _BITS:
        raise ValueError("the number is too large")
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


K, B = 1.2, 0.75
_TERM = re.compile(r"\w+")


class Index:
    """A BM25 index in memory."""

    def __init__(self, texts: Sequence[str]):
        self.texts = texts
        counts = [collections.Counter(terms(text)) for text in texts]
        length = np.array([sum(count.values()) for count in counts], np.float64)
        self._norm = K * (1.0 - B + B * length / max(length.mean(), 1e-9))  # [N]
        postings: dict[str, tuple[list[int], list[int]]] = collections.defaultdict(lambda: ([], []))
        for text_number, count in enumerate(counts):
            for term, occurrences in count.items():
                postings[term][0].append(text_number)
                postings[term][1].append(occurrences)
        self._postings = {
            term: (np.array(numbers, np.int32), np.array(occurrences, np.float64))
            for term, (numbers, occurrences) in postings.items()
        }

    def scores(self, query: str) -> np.ndarray:  # [N]
        """Returns the score of each text."""
        scores = np.zeros(len(self.texts))
        for term in terms(query):
            if term in self._postings:
                numbers, occurrences = self._postings[term]
                rarity = np.log1p((len(self.texts) - len(numbers) + 0.5) / (len(numbers) + 0.5))
                scores[numbers] += rarity * occurrences * (K + 1.0) / (occurrences + self._norm[numbers])
        return scores

    def best(self, query: str, count: int) -> list[str]:
        """Returns at most `count` texts with the best scores above 0; ties keep their order."""
        scores = self.scores(query)
        order = np.argsort(-scores, kind="stable")[:count]
        return [self.texts[i] for i in order if scores[i] > 0]


def terms(text: str) -> list[str]:
    return _TERM.findall(text.lower())


class Search:
    """The tool `search`, over rows of a jsonl, json or parquet file (their `column`) or paragraphs of a txt file."""

    def __init__(self, *, path: str, column: str = "text", results: int = 3) -> None:
        if results < 1:
            raise UserError(f"the tool search: results={results} must be at least 1")
        self._index = Index(read_corpus(path, column))
        self._results = results
        purpose = "Searches a collection of texts and returns those that fit best."
        self.schema = _schema("search", purpose, "query", "words that the texts should have")

    def __call__(self, arguments: Mapping[str, Any], context: Any) -> str:  # in a thread: a corpus may be large
        """Returns the texts that fit best, numbered."""
        texts = self._index.best(str(arguments["query"]), self._results)
        return "\n".join(f"[{number}] {text}" for number, text in enumerate(texts, start=1)) or "nothing was found"


def read_corpus(path: str, column: str) -> list[str]:
    """Reads the texts of a file; UserError if it has none."""
    file = expanded(path)
    if file.suffix not in (".txt", ".jsonl", ".json", ".parquet"):
        raise UserError(f"the tool search: path={path!r} must be a .txt, .jsonl, .json or .parquet file")
    if not file.is_file():
        raise UserError(f"the tool search: no file {file}; give the path of a corpus")
    if file.suffix != ".txt":
        return [text_column(row, column) for row in read_rows(file)]
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        raise UserError(f"the tool search: {file} cannot be read: {e}; it must be text in UTF-8") from e
    texts = [part.strip() for part in re.split(r"\n\s*\n", content) if part.strip()]
    if not texts:
        raise UserError(f"the tool search: {file} has no text; at least one paragraph is needed")
    return texts


_STARTUP_S = 5.0  # for the process around the program


class Python:
    """The tool `python`. `workers` programs run at once; waiting for a worker does not count towards the timeout."""

    runs_programs = True

    def __init__(
        self,
        *,
        timeout_s: float = 5.0,
        memory_bytes: int = 2**30,
        workers: int = 2,
        sandbox: tuple[str, ...] = (STRICT,),  # reward.sandbox and reward.sandbox_url
    ) -> None:
        if not (timeout_s > 0 and memory_bytes >= 2**26 and workers >= 1):
            raise UserError(
                f"the tool python: timeout_s={timeout_s} must be above 0, memory_bytes={memory_bytes} at least {2**26},"
                f" workers={workers} at least 1"
            )
        try:
            make_runner(*sandbox)
        except ValueError as e:
            raise UserError(f"the tool python: {e}") from e
        self.concurrency = workers
        self.call_timeout_s = timeout_s + _STARTUP_S  # after which a program's worker is free again
        self._pool = Pool(workers, timeout_s=self.call_timeout_s, memory_bytes=max(memory_bytes, 2**30))
        self._target: Target = ("program", str(timeout_s), str(memory_bytes), *sandbox)
        purpose = "Runs a Python program and returns what it prints."
        self.schema = _schema("python", purpose, "code", "the program; it must print its results")

    async def __call__(self, arguments: Mapping[str, Any], context: Any) -> str:
        """Returns the program's output with the last line of its error; RuntimeError if it could not be run."""
        sample = {"data_source": "", "text": str(arguments["code"]), "truth": "", "extra": None}
        result = await asyncio.wrap_future(self._pool.submit(self._target, sample))
        if result.error is not None:
            raise RuntimeError(result.error)
        assert result.answer is not None
        return result.answer

    def close(self) -> None:
        self._pool.close()
