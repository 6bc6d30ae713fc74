"""The tools of jppo: `calculator`, `search` and `python`.

`calculator` is exact arithmetic on decimal numbers, with its own parser instead of eval. `python` runs the model's
programs in the sandbox of the code rule (`jppo/sandbox/`). `search` is BM25 over a corpus file (Robertson and Zaragoza
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
from jppo.rewards.pool import Pool, Target
from jppo.sandbox.choice import STRICT, make_runner

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


class Calculator:
    """The tool `calculator`."""

    def __init__(self) -> None:
        described = "an expression of numbers, + - * / // % ** and parentheses"
        self.schema: Mapping[str, Any] = {
            "type": "function",
            "function": {
                "name": "calculator",
                "description": "Computes an arithmetic expression.",
                "parameters": {
                    "type": "object",
                    "properties": {"expression": {"type": "string", "description": described}},
                    "required": ["expression"],
                },
            },
        }

    async def __call__(self, arguments: Mapping[str, Any], context: Any) -> str:
        """Returns the value as text."""
        return shown(evaluate(str(arguments["expression"])))


def evaluate(expression: str) -> Fraction:
    """Evaluates an expression; ValueError if it is invalid or too large."""
    if len(expression) > _LONGEST:
        raise ValueError(f"the expression has more than {_LONGEST} characters")
    tokens, at = [], 0
    end = len(expression.rstrip())
    while at < end:
        match = _TOKEN.match(expression, at)
        if match is None:
            raise ValueError(f"cannot read {expression[at:end].strip()[:20]!r}")
        tokens.append(match[1] or match[2])
        at = match.end()
    value, rest = _sum(tokens, 0, DEPTH)
    if rest < len(tokens):
        raise ValueError(f"{tokens[rest]!r} is out of place")
    return value


def shown(value: Fraction) -> str:
    """Formats a number: exactly if its decimals end, otherwise to about 15 digits."""
    if value.denominator == 1:
        return str(value.numerator)
    odd, places = value.denominator, 0
    for prime in (2, 5):
        count = 0
        while odd % prime == 0:
            odd, count = odd // prime, count + 1
        places = max(places, count)
    if odd == 1 and places <= 15:
        digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
        return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"
    try:
        return f"{float(value):.15g}"
    except OverflowError:
        raise ValueError("the number is too large") from None


def _sum(tokens: list[str], at: int, depth: int) -> tuple[Fraction, int]:
    return _chain(tokens, at, depth, _SUMS, lambda t, i, d: _chain(t, i, d, _PRODUCTS, _signed))


def _chain(
    tokens: list[str], at: int, depth: int, operators: Mapping[str, Any], operand: Callable[..., tuple[Fraction, int]]
) -> tuple[Fraction, int]:
    value, at = operand(tokens, at, depth)
    while at < len(tokens) and tokens[at] in operators:
        right, after = operand(tokens, at + 1, depth)
        if right == 0 and tokens[at] in ("/", "÷", "//", "%"):
            raise ValueError("division by zero")
        value, at = _bounded(Fraction(operators[tokens[at]](value, right))), after
    return value, at


def _signed(tokens: list[str], at: int, depth: int) -> tuple[Fraction, int]:
    if depth == 0:
        raise ValueError(f"more than {DEPTH} levels deep")
    if at < len(tokens) and tokens[at] in _SUMS:
        value, after = _signed(tokens, at + 1, depth - 1)
        return (-value if tokens[at] == "-" else value), after
    value, at = _atom(tokens, at, depth)
    if at < len(tokens) and tokens[at] in ("**", "^"):
        exponent, at = _signed(tokens, at + 1, depth - 1)  # right-associative: 2**3**2 is 2**9, -2**2 is -4
        value = _power(value, exponent)
    return value, at


def _atom(tokens: list[str], at: int, depth: int) -> tuple[Fraction, int]:
    if at == len(tokens):
        raise ValueError("the expression ends too soon")
    if tokens[at] == "(":
        value, at = _sum(tokens, at + 1, depth - 1)
        if at == len(tokens) or tokens[at] != ")":
            raise ValueError("a parenthesis is not closed")
        return value, at + 1
    if not tokens[at][-1].isdigit():
        raise ValueError(f"{tokens[at]!r} is out of place")
    return _bounded(Fraction(tokens[at].replace(",", ""))), at + 1


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        if base < 0:
            raise ValueError("a root of a negative number")
        return Fraction(float(base) ** float(exponent))
    if base == 0 and exponent < 0:
        raise ValueError("division by zero")
    if abs(base) != 1 and abs(exponent) * max(_bits(base), 1) > _BITS:
        raise ValueError("the number is too large")
    return _bounded(base ** int(exponent))


def _bounded(value: Fraction) -> Fraction:
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
        of_term: dict[str, tuple[list[int], list[int]]] = collections.defaultdict(lambda: ([], []))
        for number, count in enumerate(counts):
            for term, times in count.items():
                of_term[term][0].append(number)
                of_term[term][1].append(times)
        self._of_term = {
            term: (np.array(which, np.int32), np.array(times, np.float64)) for term, (which, times) in of_term.items()
        }

    def scores(self, query: str) -> np.ndarray:  # [N]
        """Returns the score of each text."""
        out = np.zeros(len(self.texts))
        for term in terms(query):
            if term in self._of_term:
                which, times = self._of_term[term]
                rare = np.log1p((len(self.texts) - len(which) + 0.5) / (len(which) + 0.5))
                out[which] += rare * times * (K + 1.0) / (times + self._norm[which])
        return out

    def best(self, query: str, count: int) -> list[str]:
        """Returns at most `count` texts with the best scores above 0; ties keep their order."""
        scores = self.scores(query)
        order = np.argsort(-scores, kind="stable")[:count]
        return [self.texts[i] for i in order if scores[i] > 0]


def terms(text: str) -> list[str]:
    """Returns the words in lower case."""
    return _TERM.findall(text.lower())


class Search:
    """The tool `search`, over rows of a jsonl, json or parquet file (their `column`) or paragraphs of a txt file."""

    def __init__(self, *, path: str, column: str = "text", results: int = 3) -> None:
        if results < 1:
            raise UserError(f"the tool search: results={results} must be at least 1")
        self._index = Index(read_corpus(path, column))
        self._results = results
        self.schema: Mapping[str, Any] = {
            "type": "function",
            "function": {
                "name": "search",
                "description": "Searches a collection of texts and returns those that fit best.",
                "parameters": {
                    "type": "object",
                    "properties": {"query": {"type": "string", "description": "words that the texts should have"}},
                    "required": ["query"],
                },
            },
        }

    def __call__(self, arguments: Mapping[str, Any], context: Any) -> str:  # in a thread: a corpus may be large
        """Returns the numbered texts."""
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
        whole = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        raise UserError(f"the tool search: {file} cannot be read: {e}; it must be text in UTF-8") from e
    texts = [part.strip() for part in re.split(r"\n\s*\n", whole) if part.strip()]
    if not texts:
        raise UserError(f"the tool search: {file} has no text; at least one paragraph is needed")
    return texts


_MORE_S = 5.0  # for the process around the program


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
        self._pool = Pool(workers, timeout_s=timeout_s + _MORE_S, memory_bytes=max(memory_bytes, 2**30))
        self._target: Target = ("program", str(timeout_s), str(memory_bytes), *sandbox)
        self.schema: Mapping[str, Any] = {
            "type": "function",
            "function": {
                "name": "python",
                "description": "Runs a Python program and returns what it prints.",
                "parameters": {
                    "type": "object",
                    "properties": {"code": {"type": "string", "description": "the program; it must print its results"}},
                    "required": ["code"],
                },
            },
        }

    async def __call__(self, arguments: Mapping[str, Any], context: Any) -> str:
        """Returns the program's output and the last line of its error."""
        sample = {"data_source": "", "text": str(arguments["code"]), "truth": "", "extra": None}
        ran = await asyncio.wrap_future(self._pool.submit(self._target, sample))
        if ran.error is not None:
            raise RuntimeError(ran.error)
        assert ran.answer is not None
        return ran.answer

    def close(self) -> None:
        """Ends the processes."""
        self._pool.close()
