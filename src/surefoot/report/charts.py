"""Charts as plain SVG text: lines over steps, interval bars. Must not know what a run is.

Colours are classes (``s0`` .. ``s9``), so that the style sheet sets them for light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.report.figures import number
from surefoot.report.html import Html, h, join

MAX_POINTS = 240
_SMOOTH_FROM = 30
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 12.0, 10.0, 34.0
_PAD = 18.0  # room for half a label at both ends of a scale
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line: ``points`` as (x, y) in order of x; ``band`` as (x, low, high); ``style`` is its colour."""

    name: str
    style: int
    points: tuple[Point, ...]
    band: tuple[tuple[float, float, float], ...] = ()


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most ``limit`` points: neighbours are averaged."""
    size = math.ceil(len(points) / limit)
    if size <= 1:
        return list(points)
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in p) / len(p), sum(y for _, y in p) / len(p)) for p in parts]


def rolling(points: Sequence[Point]) -> list[Point]:
    """Centred rolling mean over about a tenth of the points, at least five."""
    half = max(5, len(points) // 10) // 2
    out: list[Point] = []
    for i, (x, _) in enumerate(points):
        near = [y for _, y in points[max(0, i - half) : i + half + 1]]
        out.append((x, sum(near) / len(near)))
    return out


def ticks(low: float, high: float, count: int, *, whole: bool = False) -> list[float]:
    """Round values in [low, high], about ``count`` of them."""
    span = high - low
    if span <= 0:
        return [low]
    rough = span / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.7)
    if whole:
        step = max(1.0, round(step))
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class _Frame:
    """Where data stands in the picture."""

    width: float
    height: float
    x: tuple[float, float]
    y: tuple[float, float]

    def px(self, value: float) -> float:
        low, high = self.x
        return _LEFT + (value - low) / ((high - low) or 1.0) * (self.width - _LEFT - _RIGHT)

    def py(self, value: float) -> float:
        low, high = self.y
        return self.height - _BOTTOM - (value - low) / (high - low) * (self.height - _TOP - _BOTTOM)


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    width: int = 380,
    height: int = 230,
    y_range: tuple[float, float] | None = None,
    x_label: str = "step",
) -> Html:
    """Lines over steps. ``label`` names the quantity for those who cannot see the picture."""
    shown = [s for s in series if s.points]
    xs = [x for s in shown for x, _ in s.points]
    ys = [y for s in shown for _, y in s.points]
    frame = _Frame(width, height, (min(xs), max(xs)), y_range or _y_range(ys))
    described = "; ".join(_described(s) for s in shown)
    return h(
        "svg",
        _axes(frame, x_label),
        *(_band(frame, s) for s in shown if s.band),
        *(_line(frame, s) for s in shown),  # dashed lines come last and let the solid first one through
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_label=f"{label} by {x_label}. {described}",
        class_="chart",
    )


def legend(series: Sequence[tuple[str, int]]) -> Html:
    """Names with a sample of their line; dashes tell them apart without colour."""
    items = [
        h(
            "li",
            h(
                "svg",
                h("line", x1=1, y1=6, x2=29, y2=6, class_=f"line s{style}"),
                viewBox="0 0 30 12",
                width=30,
                height=12,
                aria_hidden="true",
            ),
            name,
        )
        for name, style in series
    ]
    return h("ul", *items, class_="legend")


def interval_bar(
    low: float, estimate: float, high: float, domain: tuple[float, float], *, zero: bool, width: int = 240
) -> Html:
    """One interval on a common scale. With ``zero`` a line marks 0 and the colour says on which side it lies;
    an interval that covers 0 has a hollow point.
    """
    left, right = domain
    height, pad = 22, _PAD if zero else 6.0

    def at(value: float) -> float:
        clamped = min(max(value, left), right)
        return pad + (clamped - left) / ((right - left) or 1.0) * (width - 2 * pad)

    side = "plain" if not zero else "up" if low > 0 else "down" if high < 0 else "unsure"
    middle = height / 2
    return h(
        "svg",
        h("line", x1=pad, y1=middle, x2=width - pad, y2=middle, class_="rail"),
        h("line", x1=at(0), y1=1, x2=at(0), y2=height - 1, class_="zero") if zero else None,
        h("line", x1=at(low), y1=middle, x2=at(high), y2=middle, class_=f"range {side}"),
        h("circle", cx=at(estimate), cy=middle, r=4, class_=f"point {side}"),
        viewBox=f"0 0 {width} {height}",
        width=width,
        height=height,
        aria_hidden="true",
        class_="interval",
    )


def scale(domain: tuple[float, float], *, width: int = 240) -> Html:
    """The axis above a column of :func:`interval_bar`."""
    left, right = domain
    marks = [
        h(
            "text",
            f"{value:+.3g}" if abs(value) > 1e-9 else "0",
            x=_PAD + (value - left) / ((right - left) or 1.0) * (width - 2 * _PAD),
            y=12,
            text_anchor="middle",
        )
        for value in ticks(left, right, 4)
    ]
    return h(
        "svg", *marks, viewBox=f"0 0 {width} 16", width=width, height=16, aria_hidden="true", class_="scale"
    )


def _y_range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low >= 0 and low < 0.5 * high:
        low = 0.0
    if high == low:  # in the middle of the picture, with 0 in it
        return min(0.0, 2 * low), max(0.0, 2 * high) or (1.0 if low == 0 else 0.0)
    pad = 0.06 * (high - low)
    return (low if low == 0 else low - pad), high + pad


def _described(series: Series) -> str:
    (x0, y0), (x1, y1) = series.points[0], series.points[-1]
    return f"{series.name}: {number(float(y0))} at {number(x0)} to {number(float(y1))} at {number(x1)}"


def _axes(frame: _Frame, x_label: str) -> Html:
    low, high = frame.y
    parts: list[Html] = []
    for value in ticks(low, high, 4):
        y = frame.py(value)
        parts.append(h("line", x1=_LEFT, y1=y, x2=frame.width - _RIGHT, y2=y, class_="grid"))
        parts.append(h("text", _tick(value), x=_LEFT - 6, y=y + 4, text_anchor="end"))
    for value in ticks(*frame.x, max(2, int(frame.width / 80)), whole=True):
        x = frame.px(value)
        parts.append(h("text", number(int(value)), x=x, y=frame.height - 18, text_anchor="middle"))
    bottom = frame.height - _BOTTOM
    parts.append(h("line", x1=_LEFT, y1=bottom, x2=frame.width - _RIGHT, y2=bottom, class_="axis"))
    middle = (_LEFT + frame.width - _RIGHT) / 2
    parts.append(h("text", x_label, x=middle, y=frame.height - 3, text_anchor="middle"))
    return join(*parts)


def _tick(value: float) -> str:
    if abs(value) < 1e-300:
        return "0"
    if 1e-3 <= abs(value) < 1e4:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def _path(frame: _Frame, points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{frame.px(x):.1f} {frame.py(y):.1f}" for x, y in points)


def _band(frame: _Frame, series: Series) -> Html:
    upper = [(x, high) for x, _, high in series.band]
    lower = [(x, low) for x, low, _ in reversed(series.band)]
    return h("path", d=_path(frame, [*upper, *lower]) + "Z", class_=f"band s{series.style}")


def _line(frame: _Frame, series: Series) -> Html:
    points = thin(series.points)
    many = len(points) >= _SMOOTH_FROM
    path = h("path", d=_path(frame, points), class_=f"line s{series.style}" + (" faint" if many else ""))
    if many:
        return join(path, h("path", d=_path(frame, rolling(points)), class_=f"line s{series.style}"))
    dots = [
        h(
            "circle",
            h("title", f"{series.name}, {number(x)}: {number(float(y))}"),
            cx=frame.px(x),
            cy=frame.py(y),
            r=2.5,
            class_=f"dot s{series.style}",
        )
        for x, y in points
    ]
    return join(path, *dots)
