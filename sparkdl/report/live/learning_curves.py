"""How do the learning curves of fits that still run become a picture, or text where there is none?

Needs neither a notebook nor Spark; matplotlib only for the picture.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sparkdl.errors import SparkDLError

Line = tuple[list[float], list[float]]
"""Positions, and the values there."""

_NOT_DRAWN = ("epoch", "report", "steps", "seconds", "learning_rate")
_MOST_POINTS = 1000
"""Steps of a fit whose losses are kept; beyond, every second one is forgotten."""
_MOST_PANELS = 4
_MOST_NAMED = 6
"""Fits up to which each has its line in the legend."""
_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 40
_PANEL_INCHES = (4.4, 2.9)


@dataclass(kw_only=True)
class Curves:
    """What has been heard of one fit."""

    name: str
    per_unit: int = 1
    """Steps of an epoch, by which positions of steps become those of epochs."""
    unit: str = "epoch"
    """What the records count."""
    records: dict[int, Mapping[str, float]] = field(default_factory=dict)
    """By number of the epoch or report; an epoch that is trained again after a restart has one."""
    steps: Line = field(default_factory=lambda: ([], []))

    def add_step(self, step: int, loss: float) -> None:
        """The loss after ``step`` steps; those after it, of an attempt that was lost, are gone."""
        positions, values = self.steps
        where = step / self.per_unit
        while positions and positions[-1] >= where:
            positions.pop()
            values.pop()
        if math.isfinite(loss):
            positions.append(where)
            values.append(loss)
        if len(positions) > _MOST_POINTS:
            self.steps = (positions[::2], values[::2])

    def add_record(self, record: Mapping[str, float]) -> None:
        """An epoch's record, or what a function has reported."""
        self.records[int(record[self.unit])] = record

    def names(self) -> list[str]:
        """The values that have panels, in the order in which they came."""
        keys = [key for record in self.records.values() for key in record if key not in _NOT_DRAWN]
        panels = [key.removeprefix("val_") for key in keys]
        return list(dict.fromkeys((["loss"] if self.steps[0] else []) + panels))

    def line(self, key: str) -> Line:
        """The values of the records that have ``key``."""
        found = [(n, record[key]) for n, record in sorted(self.records.items()) if key in record]
        return [float(number) for number, _ in found], [value for _, value in found]


def panels_of(fits: Sequence[Curves]) -> list[str]:
    """What is drawn of several fits, each in a panel of its own."""
    return list(dict.fromkeys(name for fit in fits for name in fit.names()))[:_MOST_PANELS]


def picture(fits: Sequence[Curves]) -> bytes:
    """The curves of all fits as PNG; fits of one panel have a colour each.

    Raises:
        SparkDLError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise SparkDLError(
            "the picture of the learning curves needs matplotlib; install it with: "
            "pip install 'sparkdl-torch[plot]'"
        ) from error
    panels = panels_of(fits)
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * len(panels), height), dpi=80, layout="constrained")
    for axis, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        num_labels = 0
        for number, fit in enumerate(fits):
            colour = f"C{number % 10}"
            positions, values = fit.steps
            if panel == "loss" and positions:
                axis.plot(positions, values, color=colour, alpha=0.35, linewidth=0.8)
            for label, dashes, line in _lines(fit, panel):
                named = f"{fit.name}: {label}" if len(fits) > 1 else label
                shown = named if len(fits) <= _MOST_NAMED else None
                num_labels += shown is not None
                axis.plot(*line, dashes, color=colour, marker="o", markersize=3, label=shown)
        axis.set(title=panel, xlabel=fits[0].unit)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
        if num_labels:
            axis.legend(fontsize="small")
    written = io.BytesIO()
    figure.savefig(written, format="png")
    return written.getvalue()


def _lines(fit: Curves, panel: str) -> Iterator[tuple[str, str, Line]]:
    """Label, style and values of a fit's lines in a panel."""
    for key, dashes in ((panel, "--"), (f"val_{panel}", "-")):
        line = fit.line(key)
        if line[0]:
            yield key, dashes, line


def sketch(fits: Sequence[Curves]) -> str:
    """The curves of all fits as text: one line of blocks for each."""
    lines = []
    for fit in fits:
        for name in panels_of([fit]):
            found = [(label, line[1]) for label, _, line in _lines(fit, name)]
            if not found:
                found = [(name, fit.steps[1])]
            title = f"{fit.name} " if len(fits) > 1 else ""
            lines += [f"{title}{label:<16} {blocks(values)}" for label, values in found]
    return "\n".join(lines)


def blocks(values: Sequence[float]) -> str:
    """A curve as a line of blocks, the lowest value the lowest, and the last value in figures."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "no finite value"
    stride = -(-len(finite) // _WIDTH)
    shown = finite[::-1][::stride][::-1]  # with the last one
    low, high = min(shown), max(shown)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    drawn = "".join(_BLOCKS[round((value - low) * scale)] for value in shown)
    return f"{drawn} {finite[-1]:.4g}"
