"""How far steps move the layers of a model: a row for each layer, in time from left to right."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sparkdl.report.page import html
from sparkdl.report.page.html import Markup, drawing, section, tag

BANDS = (
    ("none", 0.0, "not at all"),
    ("slow", 1e-5, "below -5"),
    ("less", 1e-4, "-5 to -4"),
    ("good", 1e-2, "-4 to -2"),
    ("more", 1e-1, "-2 to -1"),
    ("fast", math.inf, "above -1"),
)
"""Class of a ratio, its upper end, and how the legend calls it."""
_MOST_LAYERS, _MOST_LOOKS = 64, 100
_MEANING = (
    "The decimal logarithm of the mean magnitude of what one step changes in a layer over that of "
    "its parameters, on rank 0. About -3 is healthy, and so is anything from -4 to -2. If all "
    "layers are above, lower the learning rate; if all are far below, raise it. A layer that does "
    "not move gets no gradient: it is dead, or has no part in the loss."
)

Look = Mapping[str, Any]


def layer_section(looks: Sequence[Look]) -> Markup:
    """The section of the looks in `RunRecord.layers`; nothing if there are none."""
    if not looks:
        return Markup("")
    # Of a step that moved anything: at its end a schedule may stand still.
    moved = (look["ratios"] for look in reversed(looks) if any(look["ratios"].values()))
    newest: Mapping[str, float | None] = next(moved, looks[-1]["ratios"])
    marked = {layer: mark for layer, ratio in newest.items() if (mark := _mark(ratio))}
    shown = [*marked, *(layer for layer in newest if layer not in marked)][:_MOST_LAYERS]
    skip = math.ceil(len(looks) / _MOST_LOOKS)
    columns = [*looks[:-1:skip], looks[-1]]
    rows = [
        _row(layer, columns, newest[layer], marked.get(layer)) for layer in newest if layer in shown
    ]
    legend = [
        tag("span", tag("i", class_=f"key u-{b}"), text, class_="entry") for b, _, text in BANDS
    ]
    hidden = len(newest) - len(rows)
    steps = f"from step {looks[0]['step']:,} to step {looks[-1]['step']:,}"
    head = tag("tr", tag("th", "layer"), tag("th", steps), tag("th", "newest", class_="n"))
    return section(
        "Updates by layer",
        tag("p", _MEANING, class_="hint"),
        tag("div", *legend, class_="legend"),
        tag("table", head, *rows, class_="layers"),
        tag("p", f"{hidden} more layers have no mark.", class_="hint") if hidden else None,
    )


def _mark(ratio: float | None) -> str | None:
    """What is wrong with a layer of this ratio; None: nothing."""
    if ratio is None:
        return "not finite"
    if ratio == 0:
        return "does not move"
    return "moves too fast" if ratio > BANDS[-2][1] else None


def _row(layer: str, looks: Sequence[Look], newest: float | None, mark: str | None) -> Markup:
    cells = []
    for place, look in enumerate(looks):
        ratio = look["ratios"].get(layer)
        text = tag("title", f"step {look['step']:,}: {_shown(ratio)}")
        reached = math.inf if ratio is None else ratio
        band = next(name for name, end, _ in BANDS if reached <= end)
        cells.append(tag("rect", text, x=place, y=0, width=1.02, height=1, class_=f"u-{band}"))
    strip = drawing(
        f"updates of {layer}", len(looks), 1, *cells, class_="strip", preserveAspectRatio="none"
    )
    warning = tag("b", mark, class_="badge failed") if mark else None
    return tag(
        "tr",
        tag("td", tag("code", layer), " ", warning, class_="text"),
        tag("td", strip),
        tag("td", _shown(newest), class_="n"),
    )


def _shown(ratio: float | None) -> str:
    if not ratio:
        return html.value(ratio)
    return f"{math.log10(ratio):.1f}"
