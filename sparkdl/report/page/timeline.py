"""A drawing of what each rank's time was spent on, and when, as lanes of stacked shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparkdl.report.page import html
from sparkdl.report.page.html import Markup, drawing, joined, number, tag
from sparkdl.report.page.svg import ticks
from sparkdl.report.record.run_record import RunRecord

SPENT_ON = ("data", "compute", "communication", "waiting", "evaluate", "checkpoint", "other")
"""In the order in which they are stacked; those of `train.time_spent`, which needs torch."""
MOST_LANES = 24

_WIDTH = 980.0
_LEFT, _RIGHT = 64.0, 10.0
_PHASES, _LANE, _GAP = 20.0, 30.0, 7.0
_LONG = {"s": (1.0, "s"), "min": (60.0, "min"), "h": (3600.0, "h")}


def timeline(record: RunRecord) -> Markup:
    """A lane for the driver's phases and one for each rank; failures are lines across all."""
    ranks = shown_ranks(record)
    longest = max([record.seconds, *(spans[-1][1] for spans in record.spent.values() if spans)])
    if not longest > 0:
        return Markup("")
    height = _PHASES + _GAP + len(ranks) * (_LANE + _GAP) + 26
    num_bins = 240 if len(ranks) <= 8 else 120
    parts = [_driver_lane(record, longest)]
    for place, rank in enumerate(ranks):
        top = _PHASES + _GAP + place * (_LANE + _GAP)
        bins = binned(record.spent[rank], longest, num_bins)
        parts.append(tag("text", f"rank {rank}", x=0, y=top + _LANE / 2 + 4, class_="label"))
        ground = {"x": _LEFT, "y": top, "width": _WIDTH - _LEFT - _RIGHT, "height": _LANE}
        parts.append(tag("rect", class_="ground", rx=3, **ground))
        parts.append(_lane(bins, top, longest))
    parts += [_marks(record, longest, height - 26), _axis(longest, height)]
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


def binned(
    spans: Sequence[Sequence[object]], longest: float, num_bins: int
) -> list[dict[str, float]]:
    """For each bin of time what share of it was spent on what; the rest of it is not known."""
    width = longest / num_bins
    bins: list[dict[str, float]] = [{} for _ in range(num_bins)]
    for begin, end, seconds in spans:
        assert isinstance(begin, float | int) and isinstance(end, float | int)
        assert isinstance(seconds, Mapping)
        last = min(num_bins - 1, int(end / width))
        for place in range(min(num_bins - 1, int(begin / width)), last + 1):
            inside = min(end, (place + 1) * width) - max(begin, place * width)
            part = inside / (end - begin) if end > begin else 1.0
            for name, value in seconds.items():
                share = max(0.0, part * value / width)
                bins[place][name] = bins[place].get(name, 0.0) + share
    return bins


def _lane(bins: Sequence[Mapping[str, float]], top: float, longest: float) -> Markup:
    """One path for each word: steps above the steps of the words before."""
    width = (_WIDTH - _LEFT - _RIGHT) / len(bins)
    below = [0.0] * len(bins)
    paths = []
    for name in SPENT_ON:
        pieces = []
        for place, shares in enumerate(bins):
            share = min(shares.get(name, 0.0), 1.0 - below[place])
            if share > 0.002:
                y, height = top + _LANE * (1 - below[place] - share), _LANE * share
                x = _LEFT + place * width
                corner = f"M{number(x)} {number(y)}"
                pieces.append(
                    f"{corner}h{number(width + 0.3)}v{number(height)}h-{number(width + 0.3)}z"
                )
                below[place] += share
        if pieces:
            paths.append(tag("path", tag("title", name), d="".join(pieces), class_=f"on-{name}"))
    return joined(*paths)


def _driver_lane(record: RunRecord, longest: float) -> Markup:
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
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


def _marks(record: RunRecord, longest: float, bottom: float) -> Markup:
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    parts = []
    for failure in record.failures:
        x = _LEFT + failure["at"] * scale
        title = tag("title", f"{html.duration(failure['at'])}: {failure['reason']}")
        parts.append(tag("line", title, x1=x, x2=x, y1=_PHASES, y2=bottom, class_="failure"))
        parts.append(tag("circle", title, cx=x, cy=_PHASES + 1, r=4, class_="failure"))
    for attempt in record.attempts[1:]:
        x = _LEFT + attempt["at"] * scale
        title = tag("title", f"restart {attempt['number']}, from step {attempt['start_step']}")
        parts.append(tag("line", title, x1=x, x2=x, y1=_PHASES, y2=bottom, class_="restart"))
    return joined(*parts)


def _axis(longest: float, height: float) -> Markup:
    unit = "s" if longest < 180 else "min" if longest < 3 * 3600 else "h"
    seconds, name = _LONG[unit]
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    parts = []
    for tick in ticks(0.0, longest / seconds, 8):
        x = _LEFT + tick * seconds * scale
        parts.append(tag("line", x1=x, x2=x, y1=height - 24, y2=height - 19, class_="grid"))
        text = f"{tick:g} {name}"
        parts.append(tag("text", text, x=x, y=height - 6, text_anchor="middle", class_="tick"))
    return joined(*parts)
