"""Curves over steps as a small SVG, without a plotting library."""

import math
import pathlib
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

Points = Sequence[tuple[float, float]]  # (step, value)

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 28, 72, 56
COLOURS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#64748b")


def write_curve(path: pathlib.Path, *, title: str, lines: Mapping[str, Points]) -> None:
    """Draws lines over steps; skips non-finite values."""
    series = {name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in lines.items()}
    everything = [point for points in series.values() for point in points]
    xs = _ticks([x for x, _ in everything], count=8, whole=True)
    ys = _ticks([y for _, y in everything], count=6, whole=False)
    parts = [*_frame(title, xs, ys)]
    legend = LEFT
    for i, (name, points) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        if points:
            places = " ".join(f"{_x(x, xs):.1f},{_y(y, ys):.1f}" for x, y in points)
            parts.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(_stroke(legend, 52, legend + 18, 52, colour, 2.5))
        parts.append(_text(legend + 24, 56, name, anchor="start", size=13))
        legend += 48 + round(7.2 * len(name))
    path.write_text("\n".join([*parts, "</svg>\n"]), encoding="utf-8")


def _ticks(values: Sequence[float], *, count: int, whole: bool) -> list[float]:
    """Returns round, evenly spaced numbers that enclose the values."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if low >= 0 and low < high / 2:
        low = 0.0
    if high == low:
        high = low + 1.0
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * (1 - 1e-9))
    if whole:
        step = max(1.0, step)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * i for i in range(first, last + 1)]


def _x(value: float, ticks: Sequence[float]) -> float:
    return LEFT + (value - ticks[0]) / (ticks[-1] - ticks[0]) * (WIDTH - LEFT - RIGHT)


def _y(value: float, ticks: Sequence[float]) -> float:
    return HEIGHT - BOTTOM - (value - ticks[0]) / (ticks[-1] - ticks[0]) * (HEIGHT - TOP - BOTTOM)


def _frame(title: str, xs: Sequence[float], ys: Sequence[float]) -> list[str]:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(LEFT, 30, title, anchor="start", size=17, style='fill="#0f172a" font-weight="600"'),
    ]
    for y in ys:
        parts.append(_stroke(LEFT, _y(y, ys), WIDTH - RIGHT, _y(y, ys), "#e2e8f0", 1))
        parts.append(_text(LEFT - 10, _y(y, ys) + 4, f"{y:.6g}", anchor="end"))
    for x in xs:
        parts.append(_stroke(_x(x, xs), HEIGHT - BOTTOM, _x(x, xs), HEIGHT - BOTTOM + 5, "#94a3b8", 1))
        parts.append(_text(_x(x, xs), HEIGHT - BOTTOM + 20, f"{x:.6g}"))
    parts.append(_stroke(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM, "#94a3b8", 1))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, "step", size=13))
    return parts


def _stroke(x1: float, y1: float, x2: float, y2: float, colour: str, width: float) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"/>'


def _text(x: float, y: float, text: str, anchor: str = "middle", size: int = 12, style: str = 'fill="#475569"') -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" {style}>{escape(text)}</text>'
