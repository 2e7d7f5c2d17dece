"""The picture of a search: its progress, and the value over each key that was varied."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sparkdl.tuning.study import StudyOptions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from optuna.trial import FrozenTrial

_MARKS = {"COMPLETE": ("#1f5fa8", "o"), "PRUNED": ("#b0b7c3", "x")}
"""Color and marker of the trials that ended so."""
_COLUMNS = 3


def plot(options: StudyOptions, trials: Sequence[FrozenTrial]) -> bytes:
    """A PNG of the trials that have a value; matplotlib draws it."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    shown = [t for t in trials if (value := value_of(t)) is not None and math.isfinite(value)]
    keys = list(dict.fromkeys(key for trial in shown for key in trial.params))
    columns = min(1 + len(keys), _COLUMNS)
    rows = -(-(1 + len(keys)) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.2 * rows), layout="constrained", dpi=120)
    panels = [figure.add_subplot(rows, columns, place + 1) for place in range(1 + len(keys))]
    _points(panels[0], options, shown, "trial", [trial.number for trial in shown])
    done = [trial for trial in shown if trial.state.name == "COMPLETE"]
    better = min if options.directions[0] == "min" else max
    line: list[float] = []
    for trial in done:
        line.append(better([*line[-1:], trial.values[0]]))
    panels[0].step([t.number for t in done], line, where="post", color="#c8501e", label="best")
    panels[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[0].legend(frameon=False, fontsize="small")
    for panel, key in zip(panels[1:], keys, strict=True):
        having = [trial for trial in shown if key in trial.params]
        values: list[Any] = [trial.params[key] for trial in having]
        domain = having[0].distributions[key]
        if hasattr(domain, "choices"):
            values = [str(value) for value in values]  # matplotlib gives each text a place
        _points(panel, options, having, key, values)
        if getattr(domain, "log", False):
            panel.set_xscale("log")
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def value_of(trial: FrozenTrial) -> float | None:
    """What a trial has come to; of one that was pruned the last that it reported."""
    if trial.values is not None:
        return float(trial.values[0])
    reported = trial.intermediate_values
    return reported[max(reported)] if reported else None


def _points(
    panel: Axes, options: StudyOptions, trials: Sequence[FrozenTrial], name: str, at: Sequence[Any]
) -> None:
    for state, (color, marker) in _MARKS.items():
        found = [place for place, trial in enumerate(trials) if trial.state.name == state]
        x: list[Any] = [at[place] for place in found]
        y: list[Any] = [value_of(trials[place]) for place in found]
        panel.scatter(x, y, c=color, marker=marker, s=28, label=state.lower())
    panel.set(xlabel=name, ylabel=options.monitors[0])
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
