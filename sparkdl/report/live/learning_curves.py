"""The learning curves of runs, which may still go on, as a picture (matplotlib) or as text."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sparkdl.errors import SparkDLError, import_or
from sparkdl.report.record.run_record import Line, curve_panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_POINTS = 1000
"""Steps of a run whose losses are kept; beyond, every second one is forgotten."""
_MOST_PANELS = 4
_MOST_NAMED = 6
"""Runs up to which each has its line in the legend."""
_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 40
_PANEL_INCHES = (4.4, 2.9)


@dataclass(kw_only=True)
class Curves:
    """The losses and records of one run so far."""

    name: str
    steps_per_epoch: int = 1
    """Divisor that turns positions of steps into those of epochs."""
    unit: str = "epoch"
    """Unit that the records count."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """A record per epoch or report; grows by `add_record`."""
    has_costs: bool = False
    """True if the gradient's norm, learning rate and seconds have panels too."""
    steps: Line = field(default_factory=lambda: ([], []))

    def add_step(self, step: int, loss: float) -> None:
        """The loss after ``step`` steps; those after it, of an attempt that was lost, are gone."""
        positions, values = self.steps
        where = step / self.steps_per_epoch
        while positions and positions[-1] >= where:
            positions.pop()
            values.pop()
        if math.isfinite(loss):
            positions.append(where)
            values.append(loss)
        if len(positions) > _MOST_POINTS:
            self.steps = (positions[::2], values[::2])

    def panels(self) -> dict[str, dict[str, Line]]:
        """Panel -> line -> values; ``loss`` is the first one if the losses of steps are known."""
        first: dict[str, dict[str, Line]] = {"loss": {}} if self.steps[0] else {}
        return first | curve_panels(self.history, has_costs=self.has_costs)


def panels_of(runs: Sequence[Curves], most: int | None = _MOST_PANELS) -> list[str]:
    """Return the names of what is drawn of several runs, each in a panel of its own."""
    return list(dict.fromkeys(name for run in runs for name in run.panels()))[:most]


def picture(runs: Sequence[Curves]) -> bytes:
    """The curves of all runs as PNG, in a few panels; see `draw`."""
    written = io.BytesIO()
    draw(runs, _MOST_PANELS).savefig(written, format="png")
    return written.getvalue()


def draw(runs: Sequence[Curves], most_panels: int | None = None) -> Figure:
    """The curves of all runs, each with a colour; raises SparkDLError without matplotlib."""
    missing = "the picture of the learning curves needs matplotlib; install it with: "
    with import_or(SparkDLError(f"{missing}pip install matplotlib")):
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    panels = panels_of(runs, most_panels) or ["loss"]
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * len(panels), height), dpi=80, layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for number, run in enumerate(runs):
        found, colour = run.panels(), f"C{number % 10}"
        for axis, panel in zip(axes, panels, strict=True):
            if panel == "loss" and run.steps[0]:
                axis.plot(*run.steps, color=colour, alpha=0.35, linewidth=0.8)
            for name, line in found.get(panel, {}).items():
                label = f"{run.name}: {name}" if len(runs) > 1 else name
                axis.plot(
                    *line,
                    "-" if name.startswith("val_") else "--",
                    color=colour,
                    marker="o",
                    markersize=3,
                    label=label if len(runs) <= _MOST_NAMED else None,
                )
    for axis, panel in zip(axes, panels, strict=True):
        axis.set(title=panel, xlabel=runs[0].unit)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[1]:
            axis.legend(fontsize="small")
    return figure


def sketch(runs: Sequence[Curves]) -> str:
    """The curves of all runs as text: one line of blocks for each."""
    lines = []
    for run in runs:
        for panel, found in list(run.panels().items())[:_MOST_PANELS]:
            values = {name: line[1] for name, line in found.items()} or {panel: run.steps[1]}
            title = f"{run.name} " if len(runs) > 1 else ""
            lines += [f"{title}{name:<16} {blocks(line)}" for name, line in values.items()]
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
