"""The picture of a search: its progress, and the value over each key that was varied."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sparkdl.cli.job_files.study_file import Space, StudySection

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from optuna.trial import FrozenTrial

_DONE, _PRUNED, _BEST = "#1f5fa8", "#b0b7c3", "#c8501e"
_COLUMNS = 3


def plot(section: StudySection, trials: Sequence[FrozenTrial]) -> bytes:
    """A PNG of the trials that have a value; matplotlib draws it.

    Args:
        section: what was searched.
        trials: those that came to their end, and those that were pruned.
    """
    from matplotlib.figure import Figure

    shown = [t for t in trials if (value := value_of(t)) is not None and math.isfinite(value)]
    num_panels = 1 + len(section.search)
    rows = -(-num_panels // _COLUMNS)
    columns = min(num_panels, _COLUMNS)
    figure = Figure(figsize=(4.2 * columns, 3.2 * rows), layout="constrained", dpi=120)
    panels = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    _progress(panels[0], section, shown)
    for panel, (key, space) in zip(panels[1:], section.search.items(), strict=False):
        _values(panel, section, key, space, shown)
    for panel in panels[num_panels:]:
        panel.set_visible(False)
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def value_of(trial: FrozenTrial) -> float | None:
    """What a trial has come to; of one that was pruned the last that it reported."""
    if trial.value is not None:
        return trial.value
    reported = trial.intermediate_values
    return reported[max(reported)] if reported else None


def _progress(panel: Axes, section: StudySection, trials: Sequence[FrozenTrial]) -> None:
    from matplotlib.ticker import MaxNLocator

    _points(panel, [t.number for t in trials], trials)
    done = [t for t in trials if t.state.name == "COMPLETE"]
    best, line = None, []
    better = min if section.direction == "minimize" else max
    for trial in done:
        assert trial.value is not None
        best = trial.value if best is None else better(best, trial.value)
        line.append(best)
    panel.step([t.number for t in done], line, where="post", color=_BEST, label="best so far")
    panel.set(xlabel="trial", ylabel=section.metric)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.legend(frameon=False, fontsize="small")


def _values(
    panel: Axes, section: StudySection, key: str, space: Space, trials: Sequence[FrozenTrial]
) -> None:
    trials = [t for t in trials if key in t.params]
    if space.choices:
        names = [str(choice) for choice in space.choices]
        _points(panel, [names.index(str(t.params[key])) for t in trials], trials)
        panel.set_xticks(range(len(names)), names)
    else:
        _points(panel, [t.params[key] for t in trials], trials)
    if space.log:
        panel.set_xscale("log")
    panel.set(xlabel=key, ylabel=section.metric)


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
