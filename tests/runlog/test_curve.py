import math
import xml.etree.ElementTree as ET

from jppo.runlog.curve import write_curve

SVG = "{http://www.w3.org/2000/svg}"


def draw(tmp_path, **kw):
    write_curve(tmp_path / "c.svg", title="a < b", **kw)
    return ET.parse(tmp_path / "c.svg").getroot()


def test_lines_and_dots_stand_where_their_values_are(tmp_path):
    root = draw(tmp_path, lines={"reward": [(0, 0.0), (10, 1.0)]}, dots={"test": [(0, 0.5), (5, 0.75)]})
    line = [tuple(map(float, p.split(","))) for p in root.findall(f"{SVG}polyline")[0].get("points").split()]
    (x0, y0), (x1, y1) = line
    assert x0 < x1 and y0 > y1  # up is smaller in SVG
    dots = [(float(c.get("cx")), float(c.get("cy"))) for c in root.findall(f"{SVG}circle")][:2]
    assert dots == [(x0, (y0 + y1) / 2), ((x0 + x1) / 2, y0 + 0.75 * (y1 - y0))]
    texts = [t.text for t in root.findall(f"{SVG}text")]
    assert {"a < b", "reward", "test", "step", "0.500", "0.750"} <= set(texts)


def test_everything_is_inside_the_picture(tmp_path):
    points = [(1, -3.0), (2, math.nan), (3, 17.0), (435, 4.2)]
    root = draw(tmp_path, lines={"reward": points}, dots={})
    places = [tuple(map(float, p.split(","))) for p in root.find(f"{SVG}polyline").get("points").split()]
    assert len(places) == 3 and all(0 < x < 720 and 0 < y < 420 for x, y in places)


def test_few_points_or_none_still_draw(tmp_path):
    for points in ([], [(0, 0.4)], [(3, 0.0), (4, 0.0)]):
        root = draw(tmp_path, lines={"reward": points}, dots={"test": points})
        assert len(root.findall(f"{SVG}circle")) >= len(points)
