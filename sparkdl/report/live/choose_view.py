"""The choice of the view that shows a fit, the run of a function, or other work of the driver."""

from __future__ import annotations

from typing import Literal

from sparkdl.report.live.notebook import (
    CellOutputs,
    NotebookLine,
    NotebookView,
    board_of_cell,
    in_notebook,
)
from sparkdl.report.live.progress import ConsoleView, SilentView, View, terminal_columns

Kind = Literal["fit", "run"]
"""A fit, which has a plan, or the run of a function."""
_LETTERS = 6


def choose_view(kind: Kind, verbose: int, *, run_id: str, name: str = "") -> View:
    """A view that shows nothing, a notebook's curves, a terminal's bar, or lines.

    Args:
        kind: of a function only its reports are known.
        verbose: 0, 1 or 2, as the Param says.
        run_id: the run's, by whose first letters a console tells it from others.
        name: what the user calls the run.
    """
    if not verbose:
        return SilentView()
    shows_logs = shows_lines(verbose)
    if in_notebook():
        return NotebookView(board_of_cell(), shows_logs=shows_logs, kind=kind, name=name)
    has_bar = terminal_columns() is not None
    return ConsoleView(has_bar=has_bar, shows_logs=shows_logs, name=name or run_id[:_LETTERS])


def activity_view(*, has_lines: bool = True) -> View:
    """A view of work that has phases, but no steps; nothing of it stays in a terminal or cell.

    Args:
        has_lines: False: it is shown there only, and not in a file.
    """
    if in_notebook():
        return NotebookLine(CellOutputs())
    has_bar = terminal_columns() is not None
    if has_bar or has_lines:
        return ConsoleView(has_bar=has_bar, shows_logs=False)
    return SilentView()


def shows_lines(verbose: int) -> bool:
    """True if the view shows all that workers print."""
    return verbose > 1
