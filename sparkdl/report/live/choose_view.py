"""The choice of the view that shows a fit, or the run of a function."""

from __future__ import annotations

from sparkdl.data.plan import TrainPlan
from sparkdl.report.live.notebook import NotebookView, board_of_cell, in_notebook
from sparkdl.report.live.progress import ConsoleView, SilentView, View, terminal_columns


def choose_view(plan: TrainPlan | None, verbose: int, run_name: str | None = None) -> View:
    """A view that shows nothing, a notebook's curves, a terminal's bar, or lines.

    Args:
        plan: of a fit; None for a function, of which only its reports are known.
        verbose: 0, 1 or 2, as the Param says.
        run_name: what the user calls the run.
    """
    if not verbose:
        return SilentView()
    shows_logs = shows_lines(verbose)
    if in_notebook():
        return NotebookView(board_of_cell(), plan, shows_logs=shows_logs, name=run_name or "")
    has_bar = plan is not None and terminal_columns() is not None
    return ConsoleView(plan, has_bar=has_bar, shows_logs=shows_logs, name=run_name or "")


def shows_lines(verbose: int) -> bool:
    """True if the view shows all that workers print."""
    return verbose > 1
