"""How is a module's graph drawn? In layers from top to bottom; what skips layers goes around."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparkdl.report import words
from sparkdl.report.markup import Markup, joined, number, tag

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
    """The graph as SVG; see `report.graph`."""
    layers = layers_of(graph)
    widest = max(map(len, layers), default=0)
    width = widest * (_BOX + _ACROSS) + 2 * _SIDE
    height = len(layers) * (_HIGH + _DOWN)
    places: dict[int, tuple[float, float]] = {}
    for row, nodes in enumerate(layers):
        left = width / 2 - (len(nodes) * (_BOX + _ACROSS) - _ACROSS) / 2
        for column, node in enumerate(nodes):
            places[node] = left + column * (_BOX + _ACROSS), row * (_HIGH + _DOWN) + 2
    return tag(
        "svg",
        tag("title", "The module's layers, and what flows between them"),
        joined(*(_edge(places[a], places[b]) for a, b in graph["edges"])),
        joined(*(_node(node, places[i]) for i, node in enumerate(graph["nodes"]))),
        viewBox=f"0 0 {number(width)} {number(height)}",
        width=width,
        height=height,
        role="img",
        class_="graph",
    )


def _node(node: Mapping[str, Any], place: tuple[float, float]) -> Markup:
    x, y = place
    kind = next((style for word, style in _KINDS.items() if word in node["op"]), "k-plain")
    size = node.get("parameters", 0)
    inside = node.get("inside", 0)
    facts = [
        " x ".join(map(str, node["shape"])),
        f"{size:,} parameters" * bool(size),
        f"{inside} parts" * bool(inside),
    ]
    told = [node["name"], f"{node['op']}({node.get('detail', '')})", *filter(None, facts)]
    head = node["op"] if node["op"] in ("input", "output") else f"{node['op']}  {node['name']}"
    return tag(
        "g",
        tag("title", "\n".join(told)),
        tag("rect", x=x, y=y, width=_BOX, height=_HIGH, rx=7, class_=f"node {kind}"),
        tag("text", _cut(head, 29), x=x + 10, y=y + 16, class_="name"),
        tag("text", _cut(_line(facts[0], size), 34), x=x + 10, y=y + 30, class_="small"),
    )


def _line(shape: str, size: int) -> str:
    parts = [f"→ {shape}"] if shape else []
    return " · ".join([*parts, *([f"{words.value(size)} parameters"] if size else [])])


def _edge(source: tuple[float, float], target: tuple[float, float]) -> Markup:
    x1, y1 = source[0] + _BOX / 2, source[1] + _HIGH
    x2, y2 = target[0] + _BOX / 2, target[1]
    rows = round((y2 - y1 + _HIGH) / (_HIGH + _DOWN))
    if rows == 1:
        middle = (y1 + y2) / 2
        curve = _path(("M", x1, y1), ("C", x1, middle, x2, middle, x2, y2))
        return tag("path", d=curve, class_="edge")
    side = max(x1, x2) + _BOX / 2 + min(_SIDE - 8, 14 + 6 * abs(rows))
    begin, end = source[1] + _HIGH / 2, target[1] + _HIGH / 2
    right1, right2 = source[0] + _BOX, target[0] + _BOX
    curve = _path(("M", right1, begin), ("C", side, begin, side, end, right2, end))
    return tag("path", d=curve, class_="edge skip")


def _path(*commands: Sequence[Any]) -> str:
    return "".join(f"{letter}{' '.join(map(number, values))}" for letter, *values in commands)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
