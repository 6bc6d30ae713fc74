"""The tool `calculator`: exact arithmetic on decimal numbers, with its own parser instead of eval."""

import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

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
