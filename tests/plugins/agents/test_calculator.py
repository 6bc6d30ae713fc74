"""The calculator against Python's own arithmetic, and against what is no arithmetic."""

import ast
import random
import time
from fractions import Fraction

import pytest

from jppo.plugins.agents.built_in_tools import evaluate, format_number


def by_python(text):
    """The value by Python's parser, its numbers made fractions."""
    tree = ast.parse(text, mode="eval")

    class Exact(ast.NodeTransformer):
        def visit_Constant(self, node):
            call = ast.Call(ast.Name("Fraction", ast.Load()), [ast.Constant(str(node.value))], [])
            return ast.copy_location(call, node)

    return eval(compile(ast.fix_missing_locations(Exact().visit(tree)), "", "eval"), {"Fraction": Fraction})


def test_it_computes_as_python_does():
    rng, tried = random.Random(0), 0
    for _ in range(2000):
        parts = []
        for _ in range(rng.randint(1, 6)):
            number = rng.choice(["3", "12", "0.5", "7", "(2-5)", "-4", "(1+2*3)"])
            parts += [number, rng.choice(["+", "-", "*", "/", "//", "%", "**2*", " - "])]
        text = "".join(parts[:-1])
        try:
            expected = by_python(text)
        except ZeroDivisionError:
            with pytest.raises(ValueError, match="division by zero"):
                evaluate(text)
            continue
        tried += 1
        assert evaluate(text) == expected, text
    assert tried > 1500


@pytest.mark.parametrize(
    "text,value",
    [
        ("1234*5678", "7006652"),
        ("2**3**2", "512"),
        ("-2**2", "-4"),
        ("2^-1", "0.5"),
        ("0.1+0.2", "0.3"),
        ("1/3", "0.333333333333333"),
        ("-1/8", "-0.125"),
        ("1,234.50 × 2", "2469"),
        ("007", "7"),
        ("2**0.5", "1.4142135623731"),
        ("((((1))))", "1"),
        ("10**300 / 3", "3.33333333333333e+299"),
    ],
)
def test_what_it_shows(text, value):
    assert format_number(evaluate(text)) == value


@pytest.mark.parametrize(
    "text",
    ["", "1+", "*2", "(1", "1)", "1 2", "__import__('os')", "a", "1e5", "9**9**9", "2**99999", "1/0", "5%0", "0**-1",
     "(-1)**0.5", "(" * 400, "-" * 400 + "1", "9" * 501, "1;2", "10**1200*10**1200", "(1/3)**5000", "2**(1/3)**-99999"],
)  # fmt: skip
def test_what_is_no_arithmetic_is_an_error_at_once(text):
    began = time.thread_time()
    with pytest.raises((ValueError, OverflowError)):
        format_number(evaluate(text))
    assert time.thread_time() - began < 1
