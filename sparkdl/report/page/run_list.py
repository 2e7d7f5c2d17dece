"""The pages of several runs: their list, which can be sorted and filtered, and their comparison."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlencode

from markupsafe import Markup

from sparkdl.errors import SparkDLError, StorageError
from sparkdl.report.page import formats
from sparkdl.report.page.render import render
from sparkdl.report.page.report_page import plan_facts, software
from sparkdl.report.page.svg import line_chart
from sparkdl.report.record.run_record import Line, RunRecord, count_of, curve_names, curve_panels

logger = logging.getLogger(__name__)

_MOST_CHARACTERS = 120
"""Most characters of the reason of a failure, in the list."""
_COLUMNS: Mapping[str, Callable[[RunRecord], Any] | None] = {
    "run": lambda record: record.title.lower(),
    "status": lambda record: record.status,
    "started (UTC)": lambda record: record.started,
    "duration": lambda record: record.seconds,
    "epochs": lambda record: count_of(record.measured),
    "loss": lambda record: record.measured.get("loss"),
    "": None,
    "validation": lambda record: record.measured.get("val_loss"),
    "workers": lambda record: record.facts.get("workers"),
    "restarts": lambda record: record.restarts,
}
"""Names of columns, and by what each can be sorted."""


class _Row(NamedTuple):
    """A run in the list."""

    name: str
    status: str
    title: str
    notes: Sequence[str]
    cells: Sequence[str | Markup] = ()
    """Cells of the columns after the status; none if the record cannot be read."""
    keys: Mapping[str, Any] = {}
    """Column -> by what it is sorted."""


def run_list(
    runs: Sequence[tuple[str, RunRecord | SparkDLError]], query: Mapping[str, str] | None = None
) -> Markup:
    """All runs in the order in which they are given, or those that ``query`` asks for in its.

    Its ``filter`` has words that the run's texts must contain; ``sort`` is the name of a column,
    after ``-`` if the largest is to come first. What has no value there comes last.
    """
    asked = {name: text for name, text in (query or {}).items() if name in ("filter", "sort")}
    rows = [_row(name, record) for name, record in runs]
    words = asked.get("filter", "").lower().split()
    shown = [row for row in rows if all(word in _text(row) for word in words)]
    sort = asked.get("sort", "")
    column, is_down = sort.removeprefix("-"), sort.startswith("-")
    if _COLUMNS.get(column) is not None:
        known = [row for row in shown if row.keys.get(column) is not None]
        known.sort(key=lambda row: _sortable(row.keys[column]), reverse=is_down)
        shown = known + [row for row in shown if row.keys.get(column) is None]
    heads = []
    for name, key in _COLUMNS.items():
        order = ("descending" if is_down else "ascending") if key and name == column else None
        then = f"-{name}" if order == "ascending" else name
        link = f"/?{urlencode({**asked, 'sort': then})}" if key else None
        heads.append((name, link, order))
    return render(
        "runs.html",
        counts=Counter(row.status for row in rows),
        rows=shown,
        heads=heads,
        filter=asked.get("filter", ""),
        sort=sort,
    )


def _text(row: _Row) -> str:
    return "\n".join((row.name, row.status, row.title, *row.notes)).lower()


def _row(name: str, record: RunRecord | SparkDLError) -> _Row:
    if isinstance(record, RunRecord):
        try:
            with showing(name):
                return _readable_row(name, record)
        except StorageError as error:
            record = error
    return _Row(name, "unreadable", name, [str(record)])


@contextmanager
def showing(name: str) -> Iterator[None]:
    """Make a StorageError of whatever a record that was read, and has odd values, leads to."""
    try:
        yield
    except Exception as error:
        logger.debug("the record of %s cannot be shown", name, exc_info=error)
        raise StorageError(
            f"the record of {name} has values that cannot be shown ({type(error).__name__}: "
            f"{error}); remove the folder if nobody needs it"
        ) from error


def _readable_row(name: str, record: RunRecord) -> _Row:
    last: Mapping[str, Any] = record.history[-1] if record.history else {}
    own, facts = record.measured, record.facts
    epochs = f"{count_of(last) or 0:.4g}"
    if "epochs" in facts:
        epochs += f" of {facts['epochs']}"
    if count_of(own) != count_of(last):
        epochs += f"; kept {count_of(own):.4g}"
    measured = [
        f"{key[4:].replace('_', ' ')} {formats.value(value)}"
        for key, value in own.items()
        if key.startswith("val_")
    ]
    cells = [
        formats.moment(record.started)[: len("2026-01-01 00:00")],
        formats.duration(record.seconds),
        epochs,
        formats.value(own["loss"]) if "loss" in own else "",
        _sparkline([entry.get("loss") for entry in record.history]),
        ", ".join(measured[:3]),
        str(facts.get("workers", "")),
        str(record.restarts),
    ]
    notes = [record.name] if record.run_name else []
    if record.error is not None:
        message = record.error["message"].strip().partition("\n")[0]
        text = f"{record.error['type']}: {message}"
        notes.append(text[:_MOST_CHARACTERS] + "…" * (len(text) > _MOST_CHARACTERS))
    keys = {column: key(record) for column, key in _COLUMNS.items() if key is not None}
    return _Row(name, record.status, record.title, notes, cells, keys)


def _sortable(value: Any) -> tuple[float, str]:
    """Numbers by their size, and all else, as damaged records have it, after them as text."""
    if isinstance(value, int | float) and math.isfinite(value):
        return value, ""
    return math.inf, str(value)


def _sparkline(values: Sequence[float | None]) -> Markup:
    """The course of a value, as large as a word."""
    known = [(place, value) for place, value in enumerate(values) if value is not None]
    if len(known) < 2:
        return Markup("")
    low, high = min(value for _, value in known), max(value for _, value in known)
    across, up = 76 / (len(values) - 1), 18 / (high - low) if high > low else 0.0
    places = [(2 + x * across, 20 - (y - low) * up) for x, y in known]
    path = "M" + "L".join(f"{formats.number(x)} {formats.number(y)}" for x, y in places)
    return Markup(
        '<svg viewBox="0 0 80 22" width="80" height="22" role="img">'
        '<path d="{}" class="line c0"/></svg>'
    ).format(path)


def comparison(runs: Mapping[str, RunRecord]) -> Markup:
    """Render what differs between runs, folder -> record, and their curves in the same drawings."""
    records = list(runs.values())
    groups = {
        "Results": [_results(record) for record in records],
        "Params": [{p["name"]: p["value"] for p in record.params} for record in records],
        "Plan": [plan_facts(record) for record in records],
        "Software": [software(record) for record in records],
    }
    tables = []
    for title, columns in groups.items():
        names = dict.fromkeys(name for column in columns for name in column)
        rows = [(name, [str(column.get(name, "")) for column in columns]) for name in names]
        differing = [(name, texts) for name, texts in rows if len(set(texts)) > 1]
        tables.append((title, differing, len(rows) - len(differing)))
    panels: dict[str, dict[str, Line]] = {}
    for number, record in enumerate(records, 1):
        for panel, lines in curve_panels(record.history).items():
            named = {f"{number}: {name}": line for name, line in lines.items()}
            panels.setdefault(panel, {}).update(named)
    charts = [
        line_chart(panel.replace("_", " "), lines, "epoch") for panel, lines in panels.items()
    ]
    return render("comparison.html", runs=runs, tables=tables, charts=[*filter(None, charts)])


def _results(record: RunRecord) -> dict[str, str]:
    own = record.measured
    return {
        "started": formats.moment(record.started),
        "duration": formats.duration(record.seconds),
        "weights": record.weights,
        **{name: formats.value(own[name]) for name in curve_names([own])},
        "restarts": str(record.restarts),
    }
