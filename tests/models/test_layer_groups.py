"""Which layers are stacked and scanned together."""

import pytest

from jppo.models.config import LayerModules, layer_groups


@pytest.mark.parametrize(
    "pattern, expected",
    [
        ("ddd", [{("layers",): [0, 1, 2]}]),
        ("d", [{("layers",): [0]}]),
        ("dsdsds", [{("layers", "0"): [0, 2, 4], ("layers", "1"): [1, 3, 5]}]),
        ("ddsdds", [{("layers", "0"): [0, 3], ("layers", "1"): [1, 4], ("layers", "2"): [2, 5]}]),
        ("dssds", [{("layers0",): [0]}, {("layers1",): [1, 2]}, {("layers2",): [3]}, {("layers3",): [4]}]),
    ],
)
def test_a_repeated_pattern_is_one_scan_and_another_one_a_run(pattern, expected):
    found = layer_groups(tuple(LayerModules(letter == "s") for letter in pattern))
    layers = [{stack.path: list(range(len(pattern)))[stack.layers] for stack in group} for group in found]
    assert layers == expected
    for group in found:
        for stack in group:
            assert {pattern[i] for i in range(len(pattern))[stack.layers]} == {"s" if stack.modules.sparse else "d"}
