"""How are curves drawn as SVG? With round numbers on the axes, and values that show on hovering."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sparkdl.report import words
from sparkdl.report.markup import Markup, joined, number, tag

WIDTH, HEIGHT = 360.0, 216.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 10.0, 12.0, 34.0
_MOST_MARKS = 60
_MOST_POINTS = 600


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A line of a chart; values that are None or not finite leave a gap."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    style: str = "c0"
    """Class of `style.CSS`: ``c0`` to ``c5``, or ``faint``."""


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from ``low`` to ``high``."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def line_chart(title: str, curves: Sequence[Curve], x_label: str) -> Markup:
    """A figure with axes, lines and their names."""
    points = [_points(curve) for curve in curves]
    every = [point for run in points for point in run]
    if not every:
        return Markup("")
    frame = _Frame.around([x for x, _ in every], [y for _, y in every])
    lines = joined(
        *(_polyline(curve, run, frame) for curve, run in zip(curves, points, strict=True) if run)
    )
    legend = joined(
        *(tag("span", tag("i", class_=f"key {c.style}"), c.name, class_="entry") for c in curves)
    )
    svg = tag(
        "svg",
        tag("title", title),
        frame.axes(x_label),
        lines,
        viewBox=f"0 0 {number(WIDTH)} {number(HEIGHT)}",
        role="img",
        class_="chart",
    )
    caption = tag("figcaption", tag("b", title), tag("span", legend, class_="legend"))
    return tag("figure", caption, svg)


@dataclass(frozen=True)
class _Frame:
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    @classmethod
    def around(cls, xs: Sequence[float], ys: Sequence[float]) -> _Frame:
        x_low, x_high, y_low, y_high = min(xs), max(xs), min(ys), max(ys)
        if x_low == x_high:
            x_low, x_high = x_low - 0.5, x_high + 0.5
        room = 0.06 * (y_high - y_low) or abs(y_high) * 0.1 or 1.0
        floor = 0.0 if 0 <= y_low < 0.35 * y_high else y_low - room
        return cls(x_low, x_high, floor, y_high + room)

    def x(self, value: float) -> float:
        share = (value - self.x_low) / (self.x_high - self.x_low)
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)

    def axes(self, x_label: str) -> Markup:
        parts = []
        for tick in ticks(self.y_low, self.y_high):
            y = self.y(tick)
            parts.append(tag("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=y, y2=y, class_="grid"))
            text = f"{tick:.4g}"
            parts.append(tag("text", text, x=_LEFT - 6, y=y + 4, text_anchor="end", class_="tick"))
        for tick in ticks(self.x_low, self.x_high, 6):
            place = {"x": self.x(tick), "y": HEIGHT - _BOTTOM + 16}
            parts.append(tag("text", f"{tick:.6g}", text_anchor="middle", class_="tick", **place))
        middle = (_LEFT + WIDTH - _RIGHT) / 2
        place = {"x": middle, "y": HEIGHT - 4}
        label = tag("text", x_label, text_anchor="middle", class_="label", **place)
        return joined(*parts, label)


def _points(curve: Curve) -> list[tuple[float, float]]:
    pairs = zip(curve.xs, curve.ys, strict=True)
    found = [(x, y) for x, y in pairs if y is not None and math.isfinite(y)]
    step = max(1, math.ceil(len(found) / _MOST_POINTS))
    return found[::step] if step == 1 else [*found[::step], found[-1]]


def _polyline(curve: Curve, points: list[tuple[float, float]], frame: _Frame) -> Markup:
    places = [(frame.x(x), frame.y(y)) for x, y in points]
    data = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in places)
    line = tag("path", d=data, class_=f"line {curve.style}")
    if len(points) > _MOST_MARKS or curve.style == "faint":
        return line
    marks = [
        tag(
            "circle",
            tag("title", f"{curve.name} {words.value(y)} at {words.value(x)}"),
            cx=place[0],
            cy=place[1],
            r=2.6,
            class_=f"mark {curve.style}",
        )
        for (x, y), place in zip(points, places, strict=True)
    ]
    return joined(line, *marks)
