"""The view of a search: a table in a notebook or lines while it runs, and a picture at its end."""

from __future__ import annotations

import html
import io
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sparkdl.report.live.notebook import CellOutputs, Show, in_notebook
from sparkdl.report.live.progress import say
from sparkdl.tuning.study import StudyOptions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from optuna.trial import FrozenTrial

_PAUSE_SECONDS = 0.5
_MOST_ROWS = 30
"""Newest trials that the table has; a search may have thousands."""
_MARKS = {"COMPLETE": ("#1f5fa8", "o"), "PRUNED": ("#b0b7c3", "x")}
"""Color and marker of the trials that ended so."""
_COLUMNS = 3


@dataclass
class TrialRow:
    """One trial."""

    params: Mapping[str, Any]
    state: str = "running"
    epochs: float = math.nan
    """Trained so far."""
    values: Mapping[str, float] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)


class TrialTable:
    """Shows the trials of a search. Thread-safe."""

    def __init__(
        self,
        options: StudyOptions,
        *,
        show: Show | None = None,
        write: Callable[[str], None] | None = None,
    ) -> None:
        """``show`` draws the table in place, ``write`` prints a line; without both it is silent."""
        self._options = options
        self._show = show
        self._write = write
        self._rows: dict[int, TrialRow] = {}
        self._best: TrialRow | None = None
        self._due = 0.0
        self._lock = threading.Lock()

    def earlier(self, number: int, params: Mapping[str, Any], state: str, value: Any) -> None:
        """A trial of an earlier run of the same study; ``value`` is the only one, or None."""
        values = {} if value is None else {self._options.monitors[0]: value}
        with self._lock:
            self._rows[number] = row = TrialRow(params, state, values=values)
            self._is_best(row)

    def begin(self, number: int, params: Mapping[str, Any]) -> None:
        """A trial begins."""
        with self._lock:
            self._rows[number] = TrialRow(params)
            if self._write is not None:
                self._write(f"trial {number} begins{f': {_listed(params)}' * bool(params)}")
            self._draw(at_once=True)

    def epoch(self, number: int, epochs: float, values: Mapping[str, float]) -> None:
        """A trial has trained so many epochs."""
        with self._lock:
            row = self._rows[number]
            row.epochs, row.values = epochs, values
            self._draw()

    def end(self, number: int, state: str, values: Mapping[str, float], error: str) -> None:
        """A trial has ended; a failure is a warning of the log already."""
        with self._lock:
            row = self._rows[number]
            row.state, row.values = state, values
            note = " (best so far)" if self._is_best(row) else ""
            if self._write is not None and not error:
                epochs = f" after {row.epochs:.4g} epoch{'s' * (row.epochs != 1)}"
                self._write(
                    f"trial {number} {state}{epochs * (row.epochs > 0)}: {_listed(values)}{note}; "
                    f"{_listed(row.params)}; {time.monotonic() - row.began:.1f} s; {self.summary()}"
                )
            self._draw(at_once=True)

    def summary(self) -> str:
        """Describe how far the search is, in words."""
        counts = Counter(row.state for row in self._rows.values())
        ended = sum(number for state, number in counts.items() if state != "running")
        states = ", ".join(f"{number} {state}" for state, number in sorted(counts.items()))
        return f"{ended} of {self._options.trials} trials ended ({states})"

    def _is_best(self, row: TrialRow) -> bool:
        """True if a trial's only value is better than all before; then it is kept in mind."""
        name = self._options.monitor
        if name is None or row.state != "complete":
            return False
        if self._best is not None:
            sign = 1 if self._options.directions[0] == "min" else -1
            if sign * row.values[name] >= sign * self._best.values[name]:
                return False
        self._best = row
        return True

    def _draw(self, at_once: bool = False) -> None:
        now = time.monotonic()
        if self._show is None or not (at_once or now >= self._due):
            return
        import pandas as pd

        self._due = now + _PAUSE_SECONDS
        rows = [
            {
                "trial": number,
                "state": row.state + ", best" * (row is self._best),
                "epochs": row.epochs,
                **{name: row.values.get(name) for name in self._options.monitors},
                **row.params,
            }
            for number, row in sorted(self._rows.items())[-_MOST_ROWS:]
        ]
        table, text = pd.DataFrame(rows), self.summary()
        shown: dict[str, Any] = {"index": False, "float_format": "{:.5g}".format, "na_rep": ""}
        page = f"<div>{html.escape(text)}</div>{table.to_html(**shown)}"
        self._show(
            "trials", {"text/html": page, "text/plain": f"{text}\n{table.to_string(**shown)}"}
        )


def make_table(options: StudyOptions, *, verbose: int) -> TrialTable:
    """The table of a search, as the Param ``verbose`` and the place where it is read ask for it."""
    show: Show | None = CellOutputs() if verbose and in_notebook() else None
    return TrialTable(options, show=show, write=say if verbose and show is None else None)


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {value:.5g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in values.items()
    )


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
    """Return the value of a trial; of one that was pruned the last that it reported."""
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
