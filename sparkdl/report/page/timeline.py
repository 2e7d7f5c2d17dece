"""A drawing of what each rank's time was spent on, and when, as lanes of stacked shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparkdl.report.page import html
from sparkdl.report.page.html import Markup, drawing, joined, number, tag
from sparkdl.report.page.svg import ticks
from sparkdl.report.record.run_record import RunRecord, added

SPENT_ON = ("data", "compute", "communication", "waiting", "evaluate", "checkpoint", "other")
"""In the order in which they are stacked; those of `train.time_spent`, which needs torch."""
MOST_LANES = 24

_WIDTH = 980.0
_LEFT, _RIGHT = 64.0, 10.0
_PHASES, _LANE, _GAP = 20.0, 30.0, 7.0
_LEAST_WIDTH = 4.0
"""Spans that are narrower together are drawn as one."""
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}


def timeline(record: RunRecord) -> Markup:
    """A lane for the driver's phases and one for each rank; failures are lines across all."""
    ranks = shown_ranks(record)
    longest = max([record.seconds, *(spans[-1][1] for spans in record.spent.values() if spans)])
    if not longest > 0:
        return Markup("")
    height = _PHASES + _GAP + len(ranks) * (_LANE + _GAP) + 26
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    parts = [_driver_lane(record, longest, scale)]
    for place, rank in enumerate(ranks):
        top = _PHASES + _GAP + place * (_LANE + _GAP)
        parts.append(tag("text", f"rank {rank}", x=0, y=top + _LANE / 2 + 4, class_="label"))
        ground = {"x": _LEFT, "y": top, "width": _WIDTH - _LEFT - _RIGHT, "height": _LANE}
        parts.append(tag("rect", class_="ground", rx=3, **ground))
        parts.append(_lane(record.spent[rank], top, scale))
    parts += [_marks(record, scale, height - 26), _axis(longest, scale, height)]
    title = "What each rank's time was spent on"
    return drawing(title, _WIDTH, height, *parts, class_="timeline")


def shown_ranks(record: RunRecord) -> list[str]:
    """All ranks if they are few; else those that wait least, for which the others wait."""
    ranks = sorted(record.spent, key=int)
    if len(ranks) <= MOST_LANES:
        return ranks
    totals = record.totals()
    busiest = sorted(ranks, key=lambda rank: totals[rank].get("waiting", 0.0))[: MOST_LANES - 1]
    return sorted({"0", *busiest} & set(ranks), key=int)


def grouped(spans: Sequence[Sequence[Any]], seconds: float) -> list[list[Sequence[Any]]]:
    """Spans in their order, where those that take up to so many seconds together are a group."""
    groups: list[list[Sequence[Any]]] = []
    for span in spans:
        if groups and span[1] - groups[-1][0][0] <= seconds:
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups


def _lane(spans: Sequence[Sequence[Any]], top: float, scale: float) -> Markup:
    """One path for each word, whose pieces stand on those of the words before."""
    pieces: dict[str, str] = dict.fromkeys(SPENT_ON, "")
    for group in grouped(spans, _LEAST_WIDTH / scale):
        begin, end, seconds = group[0][0], group[-1][1], added(group)
        whole = max(end - begin, sum(seconds.values()))
        left, width = number(_LEFT + begin * scale), number((end - begin) * scale + 0.3)
        y = top + _LANE
        for name in SPENT_ON:
            share = seconds.get(name, 0.0) / whole if whole else 0.0
            if share > 0.002:
                y -= _LANE * share
                shape = f"M{left} {number(y)}h{width}v{number(_LANE * share)}h-{width}z"
                pieces[name] += shape
    return joined(
        *(
            tag("path", tag("title", name), d=shapes, class_=f"on-{name}")
            for name, shapes in pieces.items()
            if shapes
        )
    )


def _driver_lane(record: RunRecord, longest: float, scale: float) -> Markup:
    parts, at = [tag("text", "driver", x=0, y=_PHASES / 2 + 4, class_="label")], 0.0
    laps = list(record.laps.items())
    if record.phase:
        laps.append((record.phase, max(0.0, longest - sum(record.laps.values()))))
    for place, (name, seconds) in enumerate(laps):
        title = tag("title", f"{name}: {html.duration(seconds)}")
        x, width = _LEFT + at * scale, seconds * scale
        box = {"x": x, "y": 0, "width": max(width - 1, 0.5), "height": _PHASES - 2, "rx": 3}
        parts.append(tag("rect", title, class_=f"phase p{place % 2}", **box))
        if width > 7 * len(name):
            parts.append(tag("text", name, x=x + 6, y=_PHASES / 2 + 3, class_="inside"))
        at += seconds
    return joined(*parts)


def _marks(record: RunRecord, scale: float, bottom: float) -> Markup:
    marks = [
        ("failure", failure["at"], f"{html.duration(failure['at'])}: {failure['reason']}")
        for failure in record.failures
    ]
    for attempt in record.attempts[1:]:
        text = f"restart {attempt['number']}, from step {attempt['start_step']}"
        if "workers" in attempt:
            text += f", with {attempt['workers']} worker" + "s" * (attempt["workers"] != 1)
        marks.append(("restart", attempt["at"], text))
    parts = []
    for kind, at, text in marks:
        x, title = _LEFT + at * scale, tag("title", text)
        parts.append(tag("line", title, x1=x, x2=x, y1=_PHASES, y2=bottom, class_=kind))
        if kind == "failure":
            parts.append(tag("circle", title, cx=x, cy=_PHASES + 1, r=4, class_=kind))
    return joined(*parts)


def _axis(longest: float, scale: float, height: float) -> Markup:
    unit = "s" if longest < 180 else "min" if longest < 3 * 3600 else "h"
    parts = []
    for tick in ticks(0.0, longest / _UNITS[unit], 8):
        x = _LEFT + tick * _UNITS[unit] * scale
        parts.append(tag("line", x1=x, x2=x, y1=height - 24, y2=height - 19, class_="grid"))
        text = f"{tick:g} {unit}"
        parts.append(tag("text", text, x=x, y=height - 6, text_anchor="middle", class_="tick"))
    return joined(*parts)
