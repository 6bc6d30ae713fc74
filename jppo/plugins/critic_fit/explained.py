"""How much of the returns a critic explains: by position, turn and data source, as a table and as a picture."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

WIDTH, LINE, LEFT, BAR = 720, 24, 180, 360  # of the picture, in pixels: width, height of a line, begin and length of 1
LEAST = 1e-5  # added to the variance of the returns, as by critic/vf_explained_var


@dataclasses.dataclass(frozen=True)
class ValuedTokens:
    """The trained tokens of some samples, with return and value, [n] each."""

    returns: np.ndarray
    values: np.ndarray
    position: np.ndarray  # in the response, from 0
    turn: np.ndarray  # of the policy, from 0
    source: np.ndarray  # data source, as text


@dataclasses.dataclass(frozen=True)
class Explained:
    """The explained variance of some tokens."""

    name: str
    tokens: int
    mean: float  # of the returns
    std: float  # of the returns
    explained: float


def explained_variance(returns: np.ndarray, values: np.ndarray) -> float:
    """1 - Var(R - V) / Var(R), as critic/vf_explained_var: 1 for a perfect critic, 0 for equal values; NaN for one."""
    if len(returns) < 2:
        return math.nan
    returns = returns.astype(np.float64)
    return float(1.0 - (returns - values).var(ddof=1) / (returns.var(ddof=1) + LEAST))


def explain(tokens: ValuedTokens) -> list[Explained]:
    """Returns the explained variance of all tokens, by powers of two of the position, by turn and by data source.

    Turns and sources are left out where there is one, and groups of a single token, which has no variance.
    """
    power = np.floor(np.log2(tokens.position + 1)).astype(int)  # tokens 1, 2-3, 4-7 and so on
    columns: list[tuple[np.ndarray, Any]] = [
        (power, lambda k: f"tokens {2**k}-{2 ** (k + 1) - 1}" if k else "token 1"),
        (tokens.turn, lambda turn: f"turn {turn + 1}"),
        (tokens.source, str),
    ]
    groups = [("all tokens", np.ones(len(power), bool))]
    for keys, name_of in columns:
        distinct = np.unique(keys)
        groups += [(name_of(key), keys == key) for key in distinct if len(distinct) > 1 and sum(keys == key) > 1]
    rows = []
    for name, chosen in groups:
        returns = tokens.returns[chosen]
        explained = explained_variance(returns, tokens.values[chosen])
        rows.append(Explained(name, len(returns), float(returns.mean()), float(returns.std()), explained))
    return rows


def format_table(rows: Sequence[Explained]) -> str:
    """Formats the rows for the console."""
    width = max(len(row.name) for row in rows)
    lines = [f"{'':{width}} {'tokens':>10} {'mean return':>12} {'std':>8} {'explained variance':>19}"]
    lines += [f"{x.name:{width}} {x.tokens:10,} {x.mean:12.3f} {x.std:8.3f} {x.explained:19.3f}" for x in rows]
    return "\n".join(lines)


def draw(rows: Sequence[Explained]) -> str:
    """Draws a bar for each row, as SVG. One below 0 has another colour and the length of its opposite."""
    height = LINE * (len(rows) + 3)
    style = f'viewBox="0 0 {WIDTH} {height}" font-family="system-ui, sans-serif" font-size="13" fill="#0f172a"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {style}>']
    parts.append(f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>')
    parts.append(
        f'<text x="16" y="{LINE}" font-weight="600">Explained variance of the returns, held-out prompts</text>'
    )
    for i, row in enumerate(rows):
        y, length = round(LINE * (i + 2.5)), BAR * min(abs(row.explained), 1.0)
        colour = "#2563eb" if row.explained >= 0 else "#ea580c"
        parts.append(f'<text x="{LEFT - 12}" y="{y}" text-anchor="end">{escape(row.name)}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y - 13}" width="{length:.1f}" height="16" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + BAR + 16}" y="{y}">{row.explained:.3f} ({row.tokens:,} tokens)</text>')
    return "\n".join([*parts, "</svg>\n"])
