"""Step curves over time as an SVG: the best that each of several searches has found so far.

Time is on a logarithmic axis, since a search finds most in its first seconds; a lower bound is a dashed line. Imports
no JAX and draws no more than lines and text, so that a browser, a README and a test can all read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor as floor_of, log10

# Pixels: of the picture, and of the margins left (numbers), right (names), top and bottom.
_WIDTH, _HEIGHT = 860, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 190, 40, 48

# Nothing is known of the time before that: a clock's own noise.
_FIRST_SECONDS = 1e-2

# Colours that stay apart for readers who see few (Okabe and Ito), then dashed.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933")

# What is more than so many times the best is above the picture: a first plan can be very slow.
_MOST_TIMES = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What one search found.

    Args:
      name: at its end.
      points: times in seconds with the best value from then on, values descending.
      ends: seconds at which the search ended.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    ends: float


def curves_svg(title: str, curves: Sequence[Curve], *, x_title: str, y_title: str, floor: float = 0.0) -> str:
    """The picture.

    >>> curve = Curve(name="b", points=((0.1, 2.0), (1.0, 1.5)), ends=3.0)
    >>> picture = curves_svg("a", [curve], x_title="x", y_title="y")
    >>> picture.count("<polyline"), picture.startswith("<svg")
    (1, True)

    Args:
      title: above it.
      curves: at least one point each.
      x_title: under the axis of time.
      y_title: beside the other axis.
      floor: the value of the dashed line; none for 0, or where it is far below.
    """
    first = max(min((curve.points[0][0] for curve in curves), default=1.0), _FIRST_SECONDS)
    last = max((curve.ends for curve in curves), default=10.0)
    low, high = log10(first), log10(max(last, 1.1 * first))
    best = min((curve.points[-1][1] for curve in curves), default=1.0)
    worst = max((curve.points[-1][1] for curve in curves), default=1.0)
    top = min(max((curve.points[0][1] for curve in curves), default=1.0), _MOST_TIMES * best, 1.6 * worst)
    shown = floor if floor > 0.5 * best else best
    base = shown - 0.1 * (top - shown)
    top = max(top, base * 1.01)

    def x(seconds: float) -> float:
        share = (log10(max(seconds, first)) - low) / (high - low)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        share = (min(value, top) - base) / (top - base)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_WIDTH / 2, 22, title, anchor="middle", size=15),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 10, x_title, anchor="middle"),
        f'<text transform="translate(16 {_HEIGHT / 2}) rotate(-90)" text-anchor="middle">{escape(y_title)}</text>',
    ]
    for power in range(ceil(low), floor_of(high) + 1):
        at = x(10.0**power)
        parts += [
            _line(at, _TOP, at, _HEIGHT - _BOTTOM, "#dddddd"),
            _text(at, _HEIGHT - 30, f"{10.0**power:g}", anchor="middle"),
        ]
    for step in range(6):
        value = base + step * (top - base) / 5
        parts += [
            _line(_LEFT, y(value), _WIDTH - _RIGHT, y(value), "#dddddd"),
            _text(_LEFT - 6, y(value) + 4, f"{value:.3g}", anchor="end"),
        ]
    if floor >= base and floor > 0:
        parts += [
            f'<line x1="{_LEFT}" y1="{y(floor):.1f}" x2="{_WIDTH - _RIGHT}" y2="{y(floor):.1f}" stroke="#444444" '
            'stroke-dasharray="6 4"/>',
            _text(_LEFT + 4, y(floor) - 4, f"lower bound {floor:.4g}"),
        ]
    names = _apart([y(curve.points[-1][1]) for curve in curves])
    for number, (curve, at) in enumerate(zip(curves, names, strict=True)):
        colour = _COLOURS[number % len(_COLOURS)]
        dashed = ' stroke-dasharray="5 3"' if number >= len(_COLOURS) else ""
        corners, before = [], None
        for seconds, value in curve.points:
            if before is not None:
                corners.append((x(seconds), y(before)))
            corners.append((x(seconds), y(value)))
            before = value
        corners.append((x(max(curve.ends, curve.points[-1][0])), y(curve.points[-1][1])))
        drawn = " ".join(f"{a:.1f},{b:.1f}" for a, b in corners)
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="2"{dashed}/>')
        name = f"{curve.name} {curve.points[-1][1]:.4g}"
        parts.append(_text(_WIDTH - _RIGHT + 8, at + 4, name, colour=colour))
    return "\n".join([*parts, "</svg>", ""])


def _apart(places: Sequence[float], gap: float = 15.0) -> list[float]:
    """These heights, as far down as it takes for no two to be closer than a line of text."""
    found, before = [0.0] * len(places), -gap
    for number in sorted(range(len(places)), key=places.__getitem__):
        found[number] = before = max(places[number], before + gap)
    over = max(max(found, default=0.0) - (_HEIGHT - _BOTTOM), 0.0)
    return [at - over for at in found]


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, colour: str = "#222222") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">{escape(text)}</text>'
    )
