"""The page of a run: one HTML file without script, whose sections are functions of the record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from sparkdl.report.page import html
from sparkdl.report.page.html import Content, Markup, drawing, joined, row, section, tag
from sparkdl.report.page.svg import line_chart, model_graph
from sparkdl.report.page.timeline import MOST_LANES, SPENT_ON, shown_ranks, timeline
from sparkdl.report.record.module_graph import condensed
from sparkdl.report.record.run_record import RunRecord, curve_names, curve_panels

_FACTS = {
    "mode": "mode", "strategy": "strategy", "workers": "workers", "mesh": "mesh", "slots": "slots",
    "rows": "training rows", "validation_rows": "validation rows", "epochs": "epochs",
    "shards": "parts of the rows",
    "steps_per_epoch": "steps per epoch", "steps": "steps", 
    "batch_size": "rows of a shard in one step",
    "module": "module", "parameters": "parameters", "trained_parameters": "of these, trained",
    "parameter_bytes": "size of the parameters", "function": "function",
}  # fmt: skip
_CSS = resources.files(__package__).joinpath("style.css").read_text(encoding="utf-8")
"""Of a page; all of it, since a report brings everything along."""
_MOST_WITH_NUMBERS = 24
"""Classes of a confusion matrix whose cells have their numbers in them."""

Look = Mapping[str, Any]
"""An entry of `RunRecord.layers`."""
BANDS = (
    ("none", 0.0, "not at all"),
    ("slow", 1e-5, "below -5"),
    ("less", 1e-4, "-5 to -4"),
    ("good", 1e-2, "-4 to -2"),
    ("more", 1e-1, "-2 to -1"),
    ("fast", math.inf, "above -1"),
)
"""Class of a ratio, its upper end, and how the legend calls it."""
_MOST_LAYERS, _MOST_LOOKS = 64, 100
_MEANING = (
    "The decimal logarithm of the mean magnitude of what one step changes in a layer over that of "
    "its parameters, on rank 0. About -3 is healthy, and so is anything from -4 to -2. If all "
    "layers are above, lower the learning rate; if all are far below, raise it. A layer that does "
    "not move gets no gradient: it is dead, or has no part in the loss."
)


def page(record: RunRecord) -> str:
    """The whole page."""
    return document(record.title, body(record))


def document(title: str, content: Markup, head: Markup | None = None) -> str:
    """A page around ``content``; ``head`` goes into its head."""
    top = joined(
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        head,
        tag("style", Markup(_CSS)),
    )
    whole = tag("html", tag("head", top), tag("body", tag("main", content)), lang="en")
    return f"<!DOCTYPE html>\n{whole}\n"


def body(record: RunRecord) -> Markup:
    """The content of the page."""
    return joined(
        _header(record),
        _tiles(record),
        _error(record),
        _curves(record),
        _chosen(record),
        _time(record),
        _failures(record),
        _confusion(record),
        layer_section(record.layers),
        _graph(record),
        _hardware(record),
        _configuration(record),
        _warnings(record),
        tag(
            "footer",
            f"run {record.run_id}, written by sparkdl {record.versions.get('sparkdl', '')}",
        ),
    )


_PHASES = {
    "preflight": "the fit is checked before rows are read",
    "spool": "rows are shuffled and written to local disks, where workers map them into memory",
}
"""What the names of phases say to who has read no page about them."""


def badge(status: str) -> Markup:
    """A run's status."""
    return tag("span", status, class_=f"badge {status}")


def _header(record: RunRecord) -> Markup:
    started = html.duration(record.seconds)
    if record.started:
        started = f"{html.moment(record.started)} · {started}"
    if record.run_name:
        started = f"{record.name} · {started}"
    if record.phase:
        started += f" · now: {record.phase}"
    return joined(
        tag("header", tag("h1", record.title), badge(record.status)),
        tag("p", started, class_="quiet"),
        tag("p", f"The model has the weights of {record.weights}.") if record.weights else None,
    )


def _tiles(record: RunRecord) -> Markup:
    seconds = record.laps.get("train")
    training = None if seconds is None else f"{html.duration(seconds)} of it training"
    tiles = [_tile("duration", html.duration(record.seconds), training)]
    if record.history:
        own, last = record.measured, record.history[-1]
        names = sorted(curve_names([own]), key=lambda name: name.startswith("val_"))
        for key in names[:4]:
            small = _best(record.history, key)
            if own.get("epoch") != last.get("epoch"):
                small = f"epoch {own['epoch']:.4g}; at the end {html.value(last.get(key))}"
            tiles.append(_tile(key, html.value(own[key]), small))
    speed = _rows_per_second(record)
    if speed is not None:
        tiles.append(_tile("rows per s", html.value(speed), "all workers"))
    if "workers" in record.facts:
        tiles.append(_tile("workers", _workers(record), record.facts.get("mode")))
    steps = record.steps[-1][1] if record.steps else None
    if steps is not None and record.facts.get("steps"):
        tiles.append(_tile("steps", html.value(steps), _planned_steps(record, steps)))
    if record.restarts or record.attempts:
        tiles.append(_tile("restarts", str(record.restarts), None))
    return tag("div", *tiles, class_="tiles")


def _tile(name: str, value: Content, small: Content) -> Markup:
    return tag(
        "div", tag("span", name), tag("b", value), tag("small", small) if small else None,
        class_="tile",
    )  # fmt: skip


def _planned_steps(record: RunRecord, steps: float) -> str | None:
    """None where the last epoch is over with another number of steps.

    Epochs before a fit went on had others if it had other workers then.
    """
    planned = record.facts.get("first_step", 0) + record.facts["steps"]
    last_epoch = record.facts.get("first_epoch", 0) + record.facts["epochs"]
    is_over = bool(record.history) and record.history[-1].get("epoch", 0) >= last_epoch
    return None if is_over and steps != planned else f"of {planned:,} planned"


def _workers(record: RunRecord) -> str:
    """Their number, or the numbers between which it was."""
    sizes = {attempt["workers"] for attempt in record.attempts if "workers" in attempt}
    if len(sizes) > 1:
        return f"{min(sizes)} to {max(sizes)}"
    return str(sizes.pop() if sizes else record.facts["workers"])


def _best(history: Sequence[Mapping[str, Any]], key: str) -> str | None:
    values = [record[key] for record in history if record.get(key) is not None]
    if len(values) < 2 or "loss" not in key:
        return f"first {html.value(values[0])}" if len(values) > 1 else None
    return f"lowest {html.value(min(values))}"


def _rows_per_second(record: RunRecord) -> float | None:
    totals = record.totals().values()
    seconds = [sum(total.get(name, 0.0) for name in SPENT_ON[:4]) for total in totals]
    begun = next((a["start_step"] for a in record.attempts if a["start_step"] is not None), 0)
    steps = (record.steps[-1][1] or 0) - begun if record.steps else 0
    per_epoch = record.facts.get("steps_per_epoch", 0)
    rows = record.facts.get("rows", 0) * steps / per_epoch if per_epoch else 0
    return rows / max(seconds) if seconds and rows and max(seconds) > 0 else None


def _error(record: RunRecord) -> Markup:
    if record.status == "lost":
        text = "Its driver has written nothing for long: it was killed, or cannot write here."
        return section("Lost", tag("p", text), class_="trouble")
    if record.error is None:
        return Markup("")
    trace = record.error.get("traceback")
    return section(
        record.error["type"],
        tag("p", record.error["message"]),
        tag("pre", trace) if trace else None,
        class_="trouble",
    )


def _curves(record: RunRecord) -> Markup:
    charts = []
    if len(record.steps) > 2:
        _, steps, losses, _ = zip(*record.steps, strict=True)
        charts.append(line_chart("loss by step", {"loss": (list(steps), list(losses))}, "step"))
    for title, lines in curve_panels(record.history, has_costs=True).items():
        x_label = "report" if "report" in record.history[0] else "epoch"
        charts.append(line_chart(title.replace("_", " "), lines, x_label))
    if not any(charts):
        return Markup("")
    return section("Learning curves", tag("div", *charts, class_="charts"))


def _time(record: RunRecord) -> Markup:
    totals = record.totals()
    if not totals and not record.laps:
        return Markup("")
    used = [name for name in SPENT_ON if any(total.get(name) for total in totals.values())]
    legend = [tag("span", tag("i", class_=f"key on-{n}"), n, class_="entry") for n in used]
    hidden = len(totals) - len(shown_ranks(record))
    hints = [f"{name}: {_PHASES[name]}." for name in record.laps if name in _PHASES]
    if hidden > 0:
        hints.append(f"{hidden} more ranks are in the table; shown are those that waited least.")
    if len(totals) > 1 and "waiting" not in used:
        hints.append(
            "Waiting and communication cannot be measured apart here. The rank with the least "
            "communication is the one that the others waited for."
        )
    return section(
        "Where the time went",
        timeline(record),
        tag("div", *legend, class_="legend") if legend else None,
        *(tag("p", hint, class_="hint") for hint in hints),
        _time_table(totals, used) if totals else None,
    )


def _time_table(totals: Mapping[str, Mapping[str, float]], used: Sequence[str]) -> Markup:
    times = (tag("th", name, class_="n") for name in used)
    head = tag("tr", tag("th", "rank"), tag("th", "share of its time"), *times)
    rows = []
    for rank in sorted(totals, key=int):
        whole, pieces, cells = sum(totals[rank].values()), [], []
        for name in used:
            seconds = totals[rank].get(name, 0.0)
            share = html.share(seconds, whole)
            style = f"width:{100 * seconds / whole if whole else 0:.2f}%"
            pieces.append(tag("i", class_=f"on-{name}", style=style, title=f"{name} {share}"))
            text = html.duration(seconds)
            cells.append(tag("td", text, class_="n", title=share, data_name=name))
        bar = tag("td", tag("div", *pieces, class_="bar"))
        rows.append(tag("tr", tag("td", rank, data_name="rank"), bar, *cells))
    table = tag("table", head, *rows, class_="rows")
    return tag("details", tag("summary", "all ranks"), table) if len(rows) > MOST_LANES else table


def _failures(record: RunRecord) -> Markup:
    if not record.failures and len({a.get("workers") for a in record.attempts}) < 2:
        return Markup("")
    later = [attempt for attempt in record.attempts if attempt["number"]]
    followed = [_following(later, failure) for failure in record.failures]
    found: list[tuple[float, str, str]] = []
    for failure, attempt in zip(record.failures, followed, strict=True):
        what = "the run ended"
        if attempt is not None:
            after = html.duration(attempt["at"] - failure["at"])
            what = f"started again after {after}{_begun(attempt)}"
        found.append((failure["at"], failure["reason"], what))
    for attempt in later:
        if attempt not in followed and "workers" in attempt:
            what = f"started again{_begun(attempt)}"
            found.append((attempt["at"], "there were slots for more workers", what))
    rows = [
        row(html.duration(at), reason, what, class_="text") for at, reason, what in sorted(found)
    ]
    names = ("after", "what happened", "what followed")
    return section("Failures and restarts", tag("table", row(*names, kind="th"), *rows))


def _following(
    attempts: Sequence[Mapping[str, Any]], failure: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """The attempt that was made after a failure."""
    return next((attempt for attempt in attempts if attempt["at"] >= failure["at"]), None)


def _begun(attempt: Mapping[str, Any]) -> str:
    """Where an attempt began, and with how many workers if that may change."""
    text = ""
    if (step := attempt["start_step"]) is not None:
        text = f", from step {step:,}" if step else ", from the beginning"
    workers = attempt.get("workers")
    return text if workers is None else f"{text}, with {workers} worker" + "s" * (workers > 1)


def _confusion(record: RunRecord) -> Markup:
    """Labels are rows, predictions are columns; colours are shares of a label's rows."""
    if record.confusion is None:
        return Markup("")
    counts: list[list[float]] = record.confusion["counts"]
    total = sum(map(sum, counts))
    right = sum(of[label] for label, of in enumerate(counts))
    text = f"{html.value(right)} of {html.value(total)} rows are right"
    text += f" ({html.share(right, total)}). {_most_confused(counts)}"
    is_dense = len(counts) > _MOST_WITH_NUMBERS
    names = ("label \\ predicted", *range(len(counts)), "right")
    head = None if is_dense else row(*names, kind="th")
    rows = [_label_row(label, of, is_dense=is_dense) for label, of in enumerate(counts)]
    style = "dense" if is_dense else "many" if len(counts) > _MOST_WITH_NUMBERS / 2 else ""
    return section(
        f"Confusion matrix, validation rows, epoch {record.confusion['epoch']:.5g}",
        tag("p", text, class_="hint"),
        tag("table", head, *rows, class_=f"matrix {style}"),
    )


def _label_row(label: int, counts: Sequence[float], *, is_dense: bool) -> Markup:
    whole = sum(counts)
    cells = []
    for predicted, count in enumerate(counts):
        share = count / whole if whole else 0.0
        colour = "15 157 107" if predicted == label else "217 45 32"
        style = f"background:rgb({colour} / {100 * share**0.6 * 0.85:.0f}%)" if share else None
        title = f"label {label}, predicted {predicted}: {html.value(count)}"
        text = "" if is_dense or not count else html.value(count)
        cells.append(tag("td", text, style=style, title=title))
    if is_dense:
        return tag("tr", *cells)
    right = html.share(counts[label], whole) if whole else "no rows"
    return tag("tr", tag("th", str(label)), *cells, tag("td", right, class_="quiet"))


def _most_confused(counts: Sequence[Sequence[float]]) -> str:
    pairs = [
        (count, label, predicted)
        for label, of in enumerate(counts)
        for predicted, count in enumerate(of)
        if label != predicted and count
    ]
    if not pairs:
        return ""
    count, label, predicted = max(pairs)
    times = "once" if count == 1 else f"{html.value(count)} times"
    return f"Most often mistaken: {label} for {predicted} ({times})."


def _chosen(record: RunRecord) -> Markup:
    chosen = record.facts.get("chosen")
    if not chosen:
        return Markup("")
    rows = [row(name, c["value"], c["reason"]) for name, c in chosen.items()]
    hint = "These Params were left to “auto”, and chosen by measurements before the run."
    if (seconds := record.laps.get("choose")) is not None:
        hint += f" That took {html.duration(seconds)}."
    table = tag("table", row("Param", "value", "reason", kind="th"), *rows)
    return section(
        "Chosen automatically", tag("div", table, class_="scroll"), tag("p", hint, class_="hint")
    )


def layer_section(looks: Sequence[Look]) -> Markup:
    """The section of the looks in `RunRecord.layers`; nothing if there are none."""
    if not looks:
        return Markup("")
    # Of a step that moved anything: at its end a schedule may stand still.
    moved = (look["ratios"] for look in reversed(looks) if any(look["ratios"].values()))
    newest: Mapping[str, float | None] = next(moved, looks[-1]["ratios"])
    marked = {layer: mark for layer, ratio in newest.items() if (mark := _layer_mark(ratio))}
    shown = [*marked, *(layer for layer in newest if layer not in marked)][:_MOST_LAYERS]
    skip = math.ceil(len(looks) / _MOST_LOOKS)
    columns = [*looks[:-1:skip], looks[-1]]
    rows = [
        _layer_row(layer, columns, newest[layer], marked.get(layer))
        for layer in newest
        if layer in shown
    ]
    legend = [
        tag("span", tag("i", class_=f"key u-{b}"), text, class_="entry") for b, _, text in BANDS
    ]
    hidden = len(newest) - len(rows)
    steps = f"from step {looks[0]['step']:,} to step {looks[-1]['step']:,}"
    head = tag("tr", tag("th", "layer"), tag("th", steps), tag("th", "newest", class_="n"))
    return section(
        "Updates by layer",
        tag("p", _MEANING, class_="hint"),
        tag("div", *legend, class_="legend"),
        tag("table", head, *rows, class_="layers"),
        tag("p", f"{hidden} more layers have no mark.", class_="hint") if hidden else None,
    )


def _layer_mark(ratio: float | None) -> str | None:
    """What is wrong with a layer of this ratio; None: nothing."""
    if ratio is None:
        return "not finite"
    if ratio == 0:
        return "does not move"
    return "moves too fast" if ratio > BANDS[-2][1] else None


def _layer_row(layer: str, looks: Sequence[Look], newest: float | None, mark: str | None) -> Markup:
    cells = []
    for place, look in enumerate(looks):
        ratio = look["ratios"].get(layer)
        text = tag("title", f"step {look['step']:,}: {_log_ratio(ratio)}")
        reached = math.inf if ratio is None else ratio
        band = next(name for name, end, _ in BANDS if reached <= end)
        cells.append(tag("rect", text, x=place, y=0, width=1.02, height=1, class_=f"u-{band}"))
    strip = drawing(
        f"updates of {layer}", len(looks), 1, *cells, class_="strip", preserveAspectRatio="none"
    )
    warning = tag("b", mark, class_="badge failed") if mark else None
    return tag(
        "tr",
        tag("td", tag("code", layer), " ", warning, class_="text"),
        tag("td", strip),
        tag("td", _log_ratio(newest), class_="n"),
    )


def _log_ratio(ratio: float | None) -> str:
    if not ratio:
        return html.value(ratio)
    return f"{math.log10(ratio):.1f}"


def _graph(record: RunRecord) -> Markup:
    if record.graph is None or not record.graph["nodes"]:
        return Markup("")
    drawn = condensed(record.graph)
    hint = "Point at a layer for its options. Shapes are those of one row."
    if len(drawn["nodes"]) < len(record.graph["nodes"]):
        hint += f" {len(record.graph['nodes'])} parts are shown as {len(drawn['nodes'])}."
    scroll = tag("div", model_graph(drawn), class_="scroll")
    return section("Model", scroll, tag("p", hint, class_="hint"))


def _hardware(record: RunRecord) -> Markup:
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, found in record.hardware.items():
        groups.setdefault(_machine(found), []).append(int(rank))
    names = ("", "host", "processor", "cores", "threads", "memory", "device")
    rows = [row("driver", *_machine(record.driver), names=names)] if record.driver else []
    for machine, of in groups.items():
        rows.append(row(f"rank {html.ranks(of)}", *machine, names=names))
    if not rows:
        return Markup("")
    return section("Hardware", tag("table", row(*names, kind="th"), *rows, class_="rows"))


def _machine(found: Mapping[str, Any]) -> tuple[str, ...]:
    device = str(found.get("device", ""))
    if "gpu" in found:
        device += f" ({found['gpu']}, {html.size(found['gpu_memory_bytes'])})"
    memory = html.size(found["memory_bytes"]) if "memory_bytes" in found else ""
    names = ("host", "cpu", "cores", "threads")
    return (*(str(found.get(name, "")) for name in names), memory, device)


def _configuration(record: RunRecord) -> Markup:
    facts = {
        label: html.size(value) if name == "parameter_bytes" else value
        for name, label in _FACTS.items()
        if (value := record.facts.get(name)) is not None
    }
    spark = {f"Spark {name}": value for name, value in record.spark.items() if value}
    chosen = {p["name"]: p["value"] for p in record.params if p["is_set"]}
    others = {p["name"]: p["value"] for p in record.params if not p["is_set"]}
    title = tag("summary", f"{len(others)} Params left at their defaults")
    return section(
        "Configuration",
        joined(tag("h3", "Params that were set"), _table(chosen)) if chosen else None,
        tag("details", title, _table(others)) if others else None,
        joined(tag("h3", "Plan"), _table(facts)) if facts else None,
        tag("h3", "Software"),
        _table({**record.versions, **spark}),
    )


def _table(values: Mapping[str, Any]) -> Markup:
    rows = []
    for name, value in values.items():
        is_count = isinstance(value, int) and not isinstance(value, bool)
        text = f"{value:,}" if is_count else str(value)
        rows.append(tag("tr", tag("th", name), tag("td", tag("code", text), class_="text")))
    return tag("table", *rows, class_="pairs")


def _warnings(record: RunRecord) -> Markup:
    if not record.logs:
        return Markup("")
    lines = [f"{html.duration(e['at']):>10}  rank {e['rank']}  {e['line']}" for e in record.logs]
    title = f"Warnings of the workers ({record.num_logs:,})"
    return section(title, tag("pre", "\n".join(lines)))
