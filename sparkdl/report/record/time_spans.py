"""Totals of seconds that grow become a timeline of limited size.

The difference between two reports of a worker belongs to the time between them. Spans become longer
as the run goes on, so that a run of days leaves no more than some hundreds of each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from sparkdl.report.record.run_record import Event

SHORTEST_SECONDS = 1.0
"""Length of a span of a short run with few ranks."""
_SPANS_OF_ALL = 5_000
_SPANS_OF_A_RANK = 200


@dataclass(kw_only=True)
class _Rank:
    start: float
    """Time when its totals were zero, by the driver's clock."""
    reported: dict[str, float] = field(default_factory=dict)
    """Totals at the end of the last span."""
    newest: dict[str, float] = field(default_factory=dict)
    end: float = 0.0


class Spans:
    """Notes what each rank of an attempt has spent the time from ``begin`` to ``end`` on."""

    def __init__(self, world_size: int) -> None:
        self._share = max(5, min(_SPANS_OF_A_RANK, _SPANS_OF_ALL // world_size))
        self._ranks: dict[int, _Rank] = {}

    def take(self, rank: int, totals: Mapping[str, float], now: float) -> Iterator[Event]:
        """Take a rank's seconds since it began, by what it did; a span if the last is old."""
        seen = self._ranks.setdefault(rank, _Rank(start=now))
        # Reports come late, by different times: the earliest start is the least wrong.
        seen.start = min(seen.start, now - sum(totals.values()))
        seen.newest = dict(totals)
        if sum(totals.values()) - sum(seen.reported.values()) >= max(
            SHORTEST_SECONDS, now / self._share
        ):
            yield self._span(rank, seen)

    def rest(self) -> Iterator[Event]:
        """Yield spans for the time of which none was given yet."""
        for rank, seen in self._ranks.items():
            if sum(seen.newest.values()) > sum(seen.reported.values()):
                yield self._span(rank, seen)

    def _span(self, rank: int, seen: _Rank) -> Event:
        begin = max(seen.end, seen.start + sum(seen.reported.values()))
        seen.end = max(begin, seen.start + sum(seen.newest.values()))
        spent = {name: value - seen.reported.get(name, 0.0) for name, value in seen.newest.items()}
        seen.reported = seen.newest
        seconds = {name: round(value, 4) for name, value in spent.items() if value > 0}
        return {"rank": rank, "begin": round(begin, 3), "end": round(seen.end, 3),
                "seconds": seconds}  # fmt: skip
