"""Drawings of a page: line charts, and a module's graph in layers from top to bottom."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from sparkdl.report.page.formats import number, value
from sparkdl.report.page.render import render
from sparkdl.report.record.run_record import Line

_BOX, _HIGH = 190.0, 38.0
_ACROSS, _DOWN = 24.0, 22.0
_SIDE = 60.0
_KINDS = {
    "Conv": "k-conv", "Linear": "k-linear", "Bilinear": "k-linear", "Norm": "k-norm",
    "Pool": "k-pool", "Dropout": "k-quiet", "Embedding": "k-embed", "Attention": "k-attend",
    "LSTM": "k-recur", "GRU": "k-recur", "RNN": "k-recur", "input": "k-end", "output": "k-end",
}  # fmt: skip


def layers_of(graph: Mapping[str, Any]) -> list[list[int]]:
    """Nodes by their longest way from an input; what has none comes where it was run."""
    depth = [0] * len(graph["nodes"])
    for source, target in sorted(graph["edges"], key=lambda edge: edge[1]):
        if source < target:  # a layer that is used again goes back
            depth[target] = max(depth[target], depth[source] + 1)
    layers: list[list[int]] = [[] for _ in range(max(depth, default=-1) + 1)]
    for node, place in enumerate(depth):
        layers[place].append(node)
    return layers


def model_graph(graph: Mapping[str, Any]) -> Markup:
    """The graph as SVG; see `record.module_graph`."""
    layers = layers_of(graph)
    widest = max(map(len, layers), default=0)
    width = widest * (_BOX + _ACROSS) + 2 * _SIDE
    height = len(layers) * (_HIGH + _DOWN)
    places: dict[int, tuple[float, float]] = {}
    for row, nodes in enumerate(layers):
        left = width / 2 - (len(nodes) * (_BOX + _ACROSS) - _ACROSS) / 2
        for column, node in enumerate(nodes):
            places[node] = left + column * (_BOX + _ACROSS), row * (_HIGH + _DOWN) + 2
    return render(
        "graph.html",
        width=width,
        height=height,
        edges=[_edge(places[a], places[b]) for a, b in graph["edges"]],
        nodes=[_node(node, places[i]) for i, node in enumerate(graph["nodes"])],
        box=_BOX,
        high=_HIGH,
    )


def _node(node: Mapping[str, Any], place: tuple[float, float]) -> dict[str, Any]:
    (x, y), name, op = place, node["name"], node["op"]
    kind = next((style for word, style in _KINDS.items() if word in op), "k-plain")
    shape, size = " x ".join(map(str, node["shape"])), node.get("parameters", 0)
    inside = node.get("inside", 0)
    hidden = [name, f"{op}({node.get('detail', '')})", shape, f"{size:,} parameters" * bool(size)]
    hidden.append(f"{inside} parts" * bool(inside))
    shown = [f"→ {shape}" * bool(shape), f"{value(size)} parameters" * bool(size)]
    head = op if op in ("input", "output") else f"{op}  {name}"
    small = _cut(" · ".join(filter(None, shown)), 34)
    return {
        "x": x,
        "y": y,
        "kind": kind,
        "title": "\n".join(filter(None, hidden)),
        "head": _cut(head, 29),
        "small": small,
    }


def _edge(source: tuple[float, float], target: tuple[float, float]) -> tuple[str, str]:
    """Its path and its class."""
    x1, y1 = source[0] + _BOX / 2, source[1] + _HIGH
    x2, y2 = target[0] + _BOX / 2, target[1]
    rows = round((y2 - y1 + _HIGH) / (_HIGH + _DOWN))
    if rows == 1:
        middle = (y1 + y2) / 2
        return _path(("M", x1, y1), ("C", x1, middle, x2, middle, x2, y2)), "edge"
    side = max(x1, x2) + _BOX / 2 + min(_SIDE - 8, 14 + 6 * abs(rows))
    begin, end = source[1] + _HIGH / 2, target[1] + _HIGH / 2
    right1, right2 = source[0] + _BOX, target[0] + _BOX
    return _path(("M", right1, begin), ("C", side, begin, side, end, right2, end)), "edge skip"


def _path(*commands: Sequence[Any]) -> str:
    return "".join(f"{letter}{' '.join(map(number, values))}" for letter, *values in commands)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


WIDTH, HEIGHT = 360.0, 216.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 10.0, 12.0, 34.0
_MOST_MARKS = 60
_MOST_POINTS = 600


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from ``low`` to ``high``."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def line_chart(title: str, lines: Mapping[str, Line], x_label: str) -> Markup:
    """A figure with axes, and lines by name; values that are None or not finite are left out."""
    points = {name: _points(line) for name, line in lines.items()}
    every = [point for run in points.values() for point in run]
    if not every:
        return Markup("")
    frame = _Frame([x for x, _ in every], [y for _, y in every])
    styles = {name: f"c{place % 6}" for place, name in enumerate(points)}
    return render(
        "chart.html",
        title=title,
        x_label=x_label,
        names=[(style, name) for name, style in styles.items()],
        x_ticks=[(frame.x(x), f"{x:.6g}") for x in ticks(frame.x_low, frame.x_high, 6)],
        y_ticks=[(frame.y(y), f"{y:.4g}") for y in ticks(frame.y_low, frame.y_high)],
        lines=[(styles[name], name, *_polyline(run, frame)) for name, run in points.items() if run],
        width=WIDTH,
        height=HEIGHT,
        left=_LEFT,
        right=WIDTH - _RIGHT,
        bottom=HEIGHT - _BOTTOM,
    )


class _Frame:
    """Places the values of a chart in its drawing."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self.x_low, self.x_high = min(xs), max(xs)
        if self.x_low == self.x_high:
            self.x_low, self.x_high = self.x_low - 0.5, self.x_high + 0.5
        low, high = min(ys), max(ys)
        room = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
        self.y_low = 0.0 if 0 <= low < 0.35 * high else low - room
        self.y_high = high + room

    def x(self, value: float) -> float:
        share = (value - self.x_low) / (self.x_high - self.x_low)
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)


def _points(line: Line) -> list[tuple[float, float]]:
    found = [(x, y) for x, y in zip(*line, strict=True) if y is not None and math.isfinite(y)]
    step = max(1, math.ceil(len(found) / _MOST_POINTS))
    return found[::step] if step == 1 else [*found[::step], found[-1]]


def _polyline(
    points: Sequence[tuple[float, float]], frame: _Frame
) -> tuple[str, list[tuple[tuple[float, float], tuple[float, float]]]]:
    """The path, and the marks: value and place; none if there would be too many."""
    places = [(frame.x(x), frame.y(y)) for x, y in points]
    path = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in places)
    marks = list(zip(points, places, strict=True)) if len(points) <= _MOST_MARKS else []
    return path, marks
