"""The page of a run: one HTML file without script, of the record's values and templates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from markupsafe import Markup

from sparkdl.report.page import formats
from sparkdl.report.page.render import render
from sparkdl.report.page.svg import line_chart, model_graph
from sparkdl.report.page.timeline import SPENT_ON, shown_ranks, timeline
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
_MOST_WITH_NUMBERS = 24
"""Classes of a confusion matrix whose cells have their numbers in them."""
_MOST_LABELS, _MOST_CHARTS = 100, 200
"""Classes of the confusion matrix of a run, and curves that are drawn."""

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


def page(record: RunRecord) -> str:
    """The whole page."""
    return document(record.title, body(record))


def document(title: str, content: Markup, *, is_live: bool = False) -> str:
    """A page around ``content``; a live one renews itself where a `RunServer` has sent it."""
    return str(render("base.html", title=title, content=content, is_live=is_live)) + "\n"


def body(record: RunRecord) -> Markup:
    """The content of the page."""
    totals = record.totals()
    used = [name for name in SPENT_ON if any(total.get(name) for total in totals.values())]
    drawn = condensed(record.graph) if record.graph and record.graph["nodes"] else None
    logs = [f"{formats.duration(e['at']):>10}  rank {e['rank']}  {e['line']}" for e in record.logs]
    return render(
        "report.html",
        record=record,
        tiles=_tiles(record),
        charts=_charts(record),
        timeline=timeline(record),
        words=[(f"on-{name}", name) for name in used],
        has_waiting="waiting" in used,
        num_hidden=len(totals) - len(shown_ranks(record)),
        times=[(rank, _shares(totals[rank], used)) for rank in sorted(totals, key=int)],
        failures=_failures(record),
        confusion=_confusion(record),
        layers=layer_section(record.layers),
        graph=model_graph(drawn) if drawn else None,
        num_shown=len(drawn["nodes"]) if drawn else 0,
        num_parts=len(record.graph["nodes"]) if record.graph else 0,
        machines=_machines(record),
        params={p["name"]: p["value"] for p in record.params if p["is_set"]},
        defaults={p["name"]: p["value"] for p in record.params if not p["is_set"]},
        facts=plan_facts(record),
        software=software(record),
        logs="\n".join(logs),
    )


def _tiles(record: RunRecord) -> list[tuple[str, str, str | None]]:
    """Name, value, and what stands below it."""
    seconds = record.laps.get("train")
    training = None if seconds is None else f"{formats.duration(seconds)} of it training"
    tiles = [("duration", formats.duration(record.seconds), training)]
    if record.history:
        own, last = record.measured, record.history[-1]
        names = sorted(curve_names([own]), key=lambda name: name.startswith("val_"))
        for key in names[:4]:
            small = _best(record.history, key)
            if own.get("epoch") != last.get("epoch"):
                small = f"epoch {own['epoch']:.4g}; at the end {formats.value(last.get(key))}"
            tiles.append((key, formats.value(own[key]), small))
    speed = _rows_per_second(record)
    if speed is not None:
        tiles.append(("rows per s", formats.value(speed), "all workers"))
    if "workers" in record.facts:
        tiles.append(("workers", _workers(record), record.facts.get("mode")))
    steps = record.steps[-1][1] if record.steps else None
    if steps is not None and record.facts.get("steps"):
        tiles.append(("steps", formats.value(steps), _planned_steps(record, steps)))
    if record.restarts or record.attempts:
        tiles.append(("restarts", str(record.restarts), None))
    return tiles


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
        return f"first {formats.value(values[0])}" if len(values) > 1 else None
    return f"lowest {formats.value(min(values))}"


def _rows_per_second(record: RunRecord) -> float | None:
    totals = record.totals().values()
    seconds = [sum(total.get(name, 0.0) for name in SPENT_ON[:4]) for total in totals]
    begun = next((a["start_step"] for a in record.attempts if a["start_step"] is not None), 0)
    steps = (record.steps[-1][1] or 0) - begun if record.steps else 0
    per_epoch = record.facts.get("steps_per_epoch", 0)
    rows = record.facts.get("rows", 0) * steps / per_epoch if per_epoch else 0
    return rows / max(seconds) if seconds and rows and max(seconds) > 0 else None


def _charts(record: RunRecord) -> list[Markup]:
    charts = []
    if len(record.steps) > 2:
        _, steps, losses, _ = zip(*record.steps, strict=True)
        charts.append(line_chart("loss by step", {"loss": (list(steps), list(losses))}, "step"))
    panels = curve_panels(record.history, has_costs=True)
    for title, lines in islice(panels.items(), _MOST_CHARTS):
        x_label = "report" if "report" in record.history[0] else "epoch"
        charts.append(line_chart(title.replace("_", " "), lines, x_label))
    return [chart for chart in charts if chart]


def _shares(
    total: Mapping[str, float], names: Sequence[str]
) -> list[tuple[str, float, str, float]]:
    """Name, seconds, share in words, and percent of what a rank's time was spent on."""
    whole = sum(total.values())
    seconds = [(name, total.get(name, 0.0)) for name in names]
    return [(n, s, formats.share(s, whole), 100 * s / whole if whole else 0.0) for n, s in seconds]


def _failures(record: RunRecord) -> list[tuple[float, str, str]]:
    """Return the time of each failure or new start, what happened, and what followed."""
    if not record.failures and len({a.get("workers") for a in record.attempts}) < 2:
        return []
    later = [attempt for attempt in record.attempts if attempt["number"]]
    followed = [_following(later, failure) for failure in record.failures]
    found: list[tuple[float, str, str]] = []
    for failure, attempt in zip(record.failures, followed, strict=True):
        what = "the run ended"
        if attempt is not None:
            after = formats.duration(attempt["at"] - failure["at"])
            what = f"started again after {after}{_begun(attempt)}"
        found.append((failure["at"], failure["reason"], what))
    for attempt in later:
        if attempt not in followed and "workers" in attempt:
            what = f"started again{_begun(attempt)}"
            found.append((attempt["at"], "there were slots for more workers", what))
    return sorted(found)


def _following(
    attempts: Sequence[Mapping[str, Any]], failure: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """The attempt that was made after a failure."""
    return next((attempt for attempt in attempts if attempt["at"] >= failure["at"]), None)


def _begun(attempt: Mapping[str, Any]) -> str:
    """Say where an attempt began, and with how many workers if that may change."""
    text = ""
    if (step := attempt["start_step"]) is not None:
        text = f", from step {step:,}" if step else ", from the beginning"
    workers = attempt.get("workers")
    return text if workers is None else f"{text}, with {workers} worker" + "s" * (workers > 1)


def _confusion(record: RunRecord) -> dict[str, Any] | None:
    """Labels are rows, predictions are columns; colours are shares of a label's rows."""
    if record.confusion is None:
        return None
    counts: list[list[float]] = record.confusion["counts"]
    if len(counts) > _MOST_LABELS:
        raise ValueError(f"a confusion matrix of {len(counts)} classes")
    total = sum(map(sum, counts))
    right = sum(of[label] for label, of in enumerate(counts))
    text = f"{formats.value(right)} of {formats.value(total)} rows are right"
    is_dense = len(counts) > _MOST_WITH_NUMBERS
    return {
        "epoch": f"{record.confusion['epoch']:.5g}",
        "hint": f"{text} ({formats.share(right, total)}). {_most_confused(counts)}",
        "is_dense": is_dense,
        "style": "dense" if is_dense else "many" * (len(counts) > _MOST_WITH_NUMBERS / 2),
        "rows": [_label_row(label, of) for label, of in enumerate(counts)],
    }


def _label_row(label: int, counts: Sequence[float]) -> tuple[str, list[tuple[float, str]]]:
    """The share that is right, and each count with its colour."""
    whole = sum(counts)
    cells = []
    for predicted, count in enumerate(counts):
        share = count / whole if whole else 0.0
        colour = "15 157 107" if predicted == label else "217 45 32"
        colour = f"rgb({colour} / {100 * share**0.6 * 0.85:.0f}%)" if share else ""
        cells.append((count, colour))
    return formats.share(counts[label], whole) if whole else "no rows", cells


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
    times = "once" if count == 1 else f"{formats.value(count)} times"
    return f"Most often mistaken: {label} for {predicted} ({times})."


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
        (layer, marked.get(layer), _log_ratio(newest[layer]), _strip(layer, columns))
        for layer in newest
        if layer in shown
    ]
    return render(
        "layers.html",
        bands=[(f"u-{band}", text) for band, _, text in BANDS],
        first=looks[0]["step"],
        last=looks[-1]["step"],
        rows=rows,
        num_hidden=len(newest) - len(rows),
    )


def _layer_mark(ratio: float | None) -> str | None:
    """Say what is wrong with a layer of this ratio; None: nothing."""
    if ratio is None:
        return "not finite"
    if ratio == 0:
        return "does not move"
    return "moves too fast" if ratio > BANDS[-2][1] else None


def _strip(layer: str, looks: Sequence[Look]) -> list[tuple[int, str, str]]:
    """Step, ratio and band of a layer at each look."""
    cells = []
    for look in looks:
        ratio = look["ratios"].get(layer)
        reached = math.inf if ratio is None else ratio
        band = next(name for name, end, _ in BANDS if reached <= end)
        cells.append((look["step"], _log_ratio(ratio), band))
    return cells


def _log_ratio(ratio: float | None) -> str:
    if not ratio:
        return formats.value(ratio)
    return f"{math.log10(ratio):.1f}"


def _machines(record: RunRecord) -> list[tuple[str, ...]]:
    """The driver, and the machines of the ranks: whose they are, and what they have."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, found in record.hardware.items():
        groups.setdefault(_machine(found), []).append(int(rank))
    driver = [("driver", *_machine(record.driver))] if record.driver else []
    return driver + [(f"rank {formats.ranks(of)}", *machine) for machine, of in groups.items()]


def _machine(found: Mapping[str, Any]) -> tuple[str, ...]:
    device = str(found.get("device", ""))
    if "gpu" in found:
        device += f" ({found['gpu']}, {formats.size(found['gpu_memory_bytes'])})"
    memory = formats.size(found["memory_bytes"]) if "memory_bytes" in found else ""
    names = ("host", "cpu", "cores", "threads")
    return (*(str(found.get(name, "")) for name in names), memory, device)


def plan_facts(record: RunRecord) -> dict[str, Any]:
    """The plan's numbers, by the names that readers know."""
    return {
        label: formats.size(value) if name == "parameter_bytes" else value
        for name, label in _FACTS.items()
        if (value := record.facts.get(name)) is not None
    }


def software(record: RunRecord) -> dict[str, Any]:
    """Versions, and Spark's properties."""
    spark = {f"Spark {name}": value for name, value in record.spark.items() if value}
    return {**record.versions, **spark}
