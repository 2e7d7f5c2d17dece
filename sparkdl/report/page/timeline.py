"""A drawing of what each rank's time was spent on, and when, as lanes of stacked shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from sparkdl.report.page import formats
from sparkdl.report.page.formats import number
from sparkdl.report.page.render import render
from sparkdl.report.page.svg import ticks
from sparkdl.report.record.run_record import RunRecord, added

SPENT_ON = ("data", "compute", "communication", "waiting", "evaluate", "checkpoint", "other")
"""In the order in which they are stacked; those of `train.time_spent`, which needs torch."""
MOST_LANES = 24

_WIDTH = 1000.0
"""Width of a lane, whose drawing is stretched."""
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
    percent = 100 / longest
    tops = {rank: _PHASES + _GAP + k * (_LANE + _GAP) for k, rank in enumerate(ranks)}
    return render(
        "timeline.html",
        height=_PHASES + _GAP + len(ranks) * (_LANE + _GAP) + 26,
        lane=_LANE,
        phases=_phases(record, longest),
        lanes=[(rank, top, _lane(record.spent[rank], longest)) for rank, top in tops.items()],
        marks=[(kind, at * percent, text) for kind, at, text in _marks(record)],
        ticks=_ticks(longest),
    )


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


def _lane(spans: Sequence[Sequence[Any]], longest: float) -> list[tuple[str, str]]:
    """One path for each word, whose pieces stand on those of the words before."""
    scale = _WIDTH / longest
    pieces: dict[str, str] = dict.fromkeys(SPENT_ON, "")
    for group in grouped(spans, _LEAST_WIDTH / scale):
        begin, end, seconds = group[0][0], group[-1][1], added(group)
        whole = max(end - begin, sum(seconds.values()))
        left, width = number(begin * scale), number((end - begin) * scale + 0.3)
        y = _LANE
        for name in SPENT_ON:
            share = seconds.get(name, 0.0) / whole if whole else 0.0
            if share > 0.002:
                y -= _LANE * share
                shape = f"M{left} {number(y)}h{width}v{number(_LANE * share)}h-{width}z"
                pieces[name] += shape
    return [(name, path) for name, path in pieces.items() if path]


def _phases(record: RunRecord, longest: float) -> list[tuple[str, float, float, float]]:
    """The driver's: name, seconds, and in percent where each begins and how wide it is."""
    laps = list(record.laps.items())
    if record.phase:
        laps.append((record.phase, max(0.0, longest - sum(record.laps.values()))))
    found, at = [], 0.0
    for name, seconds in laps:
        width = max(100 * seconds / longest - 0.1, 0.05)
        found.append((name, seconds, 100 * at / longest, width))
        at += seconds
    return found


def _marks(record: RunRecord) -> list[tuple[str, float, str]]:
    """Failures and restarts: which of them, when, and what to say."""
    marks = [
        ("failure", failure["at"], f"{formats.duration(failure['at'])}: {failure['reason']}")
        for failure in record.failures
    ]
    for attempt in record.attempts[1:]:
        text = f"restart {attempt['number']}, from step {attempt['start_step']}"
        if "workers" in attempt:
            text += f", with {attempt['workers']} worker" + "s" * (attempt["workers"] != 1)
        marks.append(("restart", attempt["at"], text))
    return marks


def _ticks(longest: float) -> list[tuple[float, str]]:
    """Places of round times in percent, and the times."""
    unit = "s" if longest < 180 else "min" if longest < 3 * 3600 else "h"
    whole = longest / _UNITS[unit]
    return [(100 * tick / whole, f"{tick:g} {unit}") for tick in ticks(0.0, whole, 8)]
