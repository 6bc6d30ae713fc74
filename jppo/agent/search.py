"""The tool `search`: BM25 over a corpus file (Robertson and Zaragoza 2009), without a server or a stored index.

    score(d) = Σ_t log(1 + (N - n_t + 1/2) / (n_t + 1/2)) · f_td (k + 1) / (f_td + k (1 - b + b |d| / mean |d|))

over the terms t of the query, with N texts of which n_t contain t, f_td times in d.
"""

import collections
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jppo.data.rows import read_rows, text_column
from jppo.errors import expanded
from jppo.settings import UserError

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
        found = self._index.best(str(arguments["query"]), self._results)
        return "\n".join(f"[{number}] {text}" for number, text in enumerate(found, start=1)) or "nothing was found"


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
