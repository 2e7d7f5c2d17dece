"""A confusion matrix as a table whose cells are darker where they hold more rows."""

from __future__ import annotations

from collections.abc import Sequence

from sparkdl.report.page import html
from sparkdl.report.page.html import Markup, joined, row, tag

_MOST_WITH_NUMBERS = 24


def confusion_matrix(counts: Sequence[Sequence[float]]) -> Markup:
    """Labels are rows, predictions are columns; colours are shares of a label's rows."""
    total = sum(map(sum, counts))
    right = sum(row[place] for place, row in enumerate(counts))
    is_dense = len(counts) > _MOST_WITH_NUMBERS
    rows = [_row(label, row, is_dense=is_dense) for label, row in enumerate(counts)]
    head = Markup("")
    if not is_dense:
        head = row("label \\ predicted", *range(len(counts)), "right", kind="th")
    text = f"{html.value(right)} of {html.value(total)} rows are right"
    text += f" ({html.share(right, total)}). "
    worst = _most_confused(counts)
    return joined(
        tag("p", text + worst, class_="hint"),
        tag("table", head, *rows, class_="matrix dense" if is_dense else "matrix"),
    )


def _row(label: int, row: Sequence[float], *, is_dense: bool) -> Markup:
    whole = sum(row)
    cells = []
    for predicted, count in enumerate(row):
        share = count / whole if whole else 0.0
        colour = "15 157 107" if predicted == label else "217 45 32"
        style = f"background:rgb({colour} / {100 * share**0.6 * 0.85:.0f}%)" if share else None
        title = f"label {label}, predicted {predicted}: {html.value(count)}"
        text = "" if is_dense or not count else html.value(count)
        cells.append(tag("td", text, style=style, title=title))
    if is_dense:
        return tag("tr", *cells)
    right = html.share(row[label], whole) if whole else "no rows"
    return tag("tr", tag("th", str(label)), *cells, tag("td", right, class_="quiet"))


def _most_confused(counts: Sequence[Sequence[float]]) -> str:
    pairs = [
        (count, label, predicted)
        for label, row in enumerate(counts)
        for predicted, count in enumerate(row)
        if label != predicted and count
    ]
    if not pairs:
        return ""
    count, label, predicted = max(pairs)
    return f"Most often mistaken: {label} for {predicted} ({html.value(count)} times)."
