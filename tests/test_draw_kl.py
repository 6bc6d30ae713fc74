"""scripts/draw_kl.py on the metrics of runs."""

import importlib.util
import math
import pathlib
import xml.etree.ElementTree as ET

import pytest

FILE = pathlib.Path(__file__).resolve().parents[1] / "scripts/draw_kl.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("draw_kl", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_line_stands_where_its_values_are_inside_the_picture(script, tmp_path):
    points = [(0, 0.0), (2, math.nan), (5, 0.75), (10, 1.0)]
    script.write_curve(tmp_path / "x.svg", title="a < b", lines={"reward": points, "none": []})
    root = ET.parse(tmp_path / "x.svg").getroot()
    svg = "{http://www.w3.org/2000/svg}"
    (line,) = root.findall(f"{svg}polyline")
    (x0, y0), middle, (x1, y1) = [tuple(map(float, pair.split(","))) for pair in line.get("points").split()]
    assert 0 < x0 < x1 < 720 and 420 > y0 > y1 > 0  # up is smaller in SVG
    assert middle == (round((x0 + x1) / 2, 1), round(y0 + 0.75 * (y1 - y0), 1))
    assert {"a < b", "reward", "none", "step"} <= {text.text for text in root.findall(f"{svg}text")}
