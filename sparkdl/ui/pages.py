"""What does the server show besides reports: the list of runs, and what keeps a page up to date?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from sparkdl.errors import SparkDLError
from sparkdl.report import words
from sparkdl.report.markup import Markup, joined, number, tag
from sparkdl.report.page import badge
from sparkdl.report.record import RunRecord

LIVE = "live"
"""Last part of the path of what a page asks for to be up to date."""
_SECONDS = 2

_SCRIPT = """"use strict";
const main = document.querySelector("main");
const place = main.querySelector("[data-live]");
async function renew() {
  try {
    const answer = await fetch(place.dataset.live, {cache: "no-store"});
    if (answer.ok) {
      const text = await answer.text();
      const open = [...place.querySelectorAll("details")].map((part) => part.open);
      const boxes = [...place.querySelectorAll(".scroll")].map((box) => box.scrollTop);
      if (place.dataset.shown !== text) {
        place.innerHTML = text;
        place.dataset.shown = text;
        place.querySelectorAll("details").forEach((part, k) => { part.open = open[k] || false; });
        place.querySelectorAll(".scroll").forEach((box, k) => { box.scrollTop = boxes[k] || 0; });
      }
    }
  } catch (error) {
    console.debug("no answer: " + error);
  }
  if (place.dataset.always || place.querySelector(".badge.running")) {
    setTimeout(renew, %d);
  }
}
if (place) { setTimeout(renew, %d); }
"""


def script() -> str:
    """What keeps an open page up to date."""
    return _SCRIPT % (1000 * _SECONDS, 1000 * _SECONDS)


def shell(content: Markup, *, is_live: bool, is_list: bool) -> tuple[Markup, Markup | None]:
    """What goes around a page, and into its head."""
    back = None if is_list else tag("p", tag("a", "← all runs", href="/"))
    if not is_live:
        return joined(back, content), None
    where = f"/{LIVE}" if is_list else LIVE
    # Without scripts the browser loads the whole page again.
    head = joined(
        tag("noscript", tag("meta", http_equiv="refresh", content=str(2 * _SECONDS))),
        tag("script", src="/live.js", defer=True),
    )
    return joined(
        back, tag("div", content, data_live=where, data_always="yes" if is_list else None)
    ), head


def run_list(runs: Sequence[tuple[str, RunRecord | SparkDLError]]) -> Markup:
    """All runs, the newest first."""
    title = joined(tag("header", tag("h1", "Runs")), tag("p", _counted(runs), class_="quiet"))
    if not runs:
        hint = "None yet. Set reportDir of an estimator to this directory, and fit."
        return joined(title, tag("section", tag("p", hint)))
    names = (
        "run",
        "status",
        "started (UTC)",
        "duration",
        "epochs",
        "loss",
        "",
        "validation",
        "workers",
    )
    head = tag("tr", *(tag("th", name) for name in (*names, "restarts")))
    rows = [_row(name, record) for name, record in runs]
    return joined(title, tag("section", tag("table", head, *rows, class_="runs")))


def _counted(runs: Sequence[tuple[str, RunRecord | SparkDLError]]) -> str:
    states = [run.status if isinstance(run, RunRecord) else "unreadable" for _, run in runs]
    counts = {state: states.count(state) for state in dict.fromkeys(states)}
    return ", ".join(f"{count} {state}" for state, count in counts.items())


def _row(name: str, record: RunRecord | SparkDLError) -> Markup:
    if isinstance(record, SparkDLError):
        return tag(
            "tr", tag("td", name), tag("td", badge("unreadable")), tag("td", str(record), colspan=8)
        )
    last: Mapping[str, Any] = record.history[-1] if record.history else {}
    link = tag("a", record.name, href=f"/runs/{quote(name)}/")
    facts = record.facts
    epochs = f"{len(record.history)}" + f" of {facts['epochs']}" * ("epochs" in facts)
    values: list[str] = [
        words.moment(record.started)[: len("2026-01-01 00:00")],
        words.duration(record.seconds),
        epochs,
        words.value(last["loss"]) if "loss" in last else "",
        _sparkline([entry.get("loss") for entry in record.history]),
        _validation(last),
        str(facts.get("workers", "")),
        str(record.restarts),
    ]
    return tag(
        "tr", tag("td", link), tag("td", badge(record.status)), *(tag("td", v) for v in values)
    )


def _sparkline(values: Sequence[float | None]) -> Markup:
    """The course of a value, as large as a word."""
    known = [(place, value) for place, value in enumerate(values) if value is not None]
    if len(known) < 2:
        return Markup("")
    low, high = min(value for _, value in known), max(value for _, value in known)
    across, up = 76 / (len(values) - 1), 18 / (high - low) if high > low else 0.0
    places = [f"{number(2 + x * across)} {number(20 - (y - low) * up)}" for x, y in known]
    line = tag("path", d="M" + "L".join(places), class_="line c0")
    return tag("svg", line, viewBox="0 0 80 22", width=80, height=22, role="img")


def _validation(last: Mapping[str, Any]) -> str:
    found = [(key, value) for key, value in last.items() if key.startswith("val_")]
    return ", ".join(
        f"{key[4:].replace('_', ' ')} {words.value(value)}" for key, value in found[:3]
    )
