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

_DONE, _PRUNED, _BEST = "#1f5fa8", "#b0b7c3", "#c8501e"
_COLUMNS = 3


def plot(options: StudyOptions, trials: Sequence[FrozenTrial]) -> bytes:
    """A PNG of the trials that have a value; matplotlib draws it.

    Args:
        options: what was searched for; of several values the first is drawn.
        trials: those that came to their end, and those that were pruned.
    """
    from matplotlib.figure import Figure

    shown = [t for t in trials if (value := value_of(t)) is not None and math.isfinite(value)]
    keys = list(dict.fromkeys(key for trial in shown for key in trial.params))
    num_panels = 1 + len(keys)
    rows = -(-num_panels // _COLUMNS)
    columns = min(num_panels, _COLUMNS)
    figure = Figure(figsize=(4.2 * columns, 3.2 * rows), layout="constrained", dpi=120)
    panels = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    _progress(panels[0], options, shown)
    for panel, key in zip(panels[1:], keys, strict=False):
        _values(panel, options, key, [t for t in shown if key in t.params])
    for panel in panels[num_panels:]:
        panel.set_visible(False)
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def value_of(trial: FrozenTrial) -> float | None:
    """What a trial has come to; of one that was pruned the last that it reported."""
    if trial.values is not None:
        return float(trial.values[0])
    reported = trial.intermediate_values
    return reported[max(reported)] if reported else None


def _progress(panel: Axes, options: StudyOptions, trials: Sequence[FrozenTrial]) -> None:
    from matplotlib.ticker import MaxNLocator

    _points(panel, [t.number for t in trials], trials)
    done = [t for t in trials if t.state.name == "COMPLETE"]
    best, line = None, []
    better = min if options.modes[0] == "min" else max
    for trial in done:
        best = trial.values[0] if best is None else better(best, trial.values[0])
        line.append(best)
    panel.step([t.number for t in done], line, where="post", color=_BEST, label="best so far")
    panel.set(xlabel="trial", ylabel=options.monitors[0])
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.legend(frameon=False, fontsize="small")


def _values(panel: Axes, options: StudyOptions, key: str, trials: Sequence[FrozenTrial]) -> None:
    domains = [trial.distributions[key] for trial in trials]
    choices = getattr(domains[0], "choices", None)
    if choices is None:
        _points(panel, [t.params[key] for t in trials], trials)
    else:
        names = [str(choice) for choice in choices]
        _points(panel, [names.index(str(t.params[key])) for t in trials], trials)
        panel.set_xticks(range(len(names)), names)
    if getattr(domains[0], "log", False):
        panel.set_xscale("log")
    panel.set(xlabel=key, ylabel=options.monitors[0])


def _points(panel: Axes, places: Sequence[Any], trials: Sequence[FrozenTrial]) -> None:
    for state, color, marker, label in (
        ("COMPLETE", _DONE, "o", "complete"),
        ("PRUNED", _PRUNED, "x", "pruned"),
    ):
        pairs = [(p, value_of(t)) for p, t in zip(places, trials, strict=True)
                 if t.state.name == state]  # fmt: skip
        if pairs:
            x, y = zip(*pairs, strict=True)
            panel.scatter(x, y, c=color, marker=marker, s=28, label=label)
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
