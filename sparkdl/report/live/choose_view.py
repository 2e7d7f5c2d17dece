"""Which view shows a fit, or the run of a function? The one place where that is chosen."""

from __future__ import annotations

from sparkdl.data.plan import TrainPlan
from sparkdl.report.live.notebook import NotebookView, board_of_cell, in_notebook
from sparkdl.report.live.progress import (
    LinesView,
    ProgressView,
    ReportView,
    SilentView,
    View,
    on_terminal,
)


def fit_view(plan: TrainPlan, verbose: int) -> View:
    """Nothing, a notebook's curves, a terminal's bar, or lines for a file.

    Args:
        plan: of the fit.
        verbose: 0, 1 or 2, as the Param says.
    """
    if not verbose:
        return SilentView()
    if in_notebook():
        return NotebookView(board_of_cell(), plan, shows_logs=verbose > 1)
    if on_terminal():
        return ProgressView(plan, shows_logs=verbose > 1)
    return LinesView(plan, shows_logs=verbose > 1)


def shows_lines(verbose: int) -> bool:
    """Whether the view shows all that workers print."""
    return verbose > 1 or (verbose > 0 and in_notebook())


def function_view(verbose: int) -> View:
    """The same for a function, of which only what it reports is known.

    Args:
        verbose: 0, 1 or 2, as `TorchRunner` says.
    """
    if not verbose:
        return SilentView()
    if in_notebook():
        return NotebookView(board_of_cell(), None, shows_logs=verbose > 1)
    return ReportView(shows_logs=verbose > 1)
