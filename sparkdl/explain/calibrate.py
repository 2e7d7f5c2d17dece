"""Turns the ranks' measurements into the cost model's numbers, by medians and lines."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sparkdl.explain.cost_model import (
    Compute,
    Gang,
    Layout,
    Network,
    NetworkLink,
    between_nodes_seconds,
    fit_line,
)

Report = Mapping[str, Any]
"""The measurements of one rank, as `measure_worker` gives them."""

_NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


def found_by(reports: Sequence[Report], places: Sequence[tuple[int, int]], seconds: float) -> Gang:
    """Put the reports of all ranks, in their order, together; the whole job took ``seconds``."""
    layout = Layout(world_size=len(reports), num_nodes=len({report["node"] for report in reports}))
    network = _network(reports[0], layout)
    least = 0.0 if network is None else (network.shared or network.messages).latency_seconds
    return Gang(
        levels=dict(zip(places, levels_of(reports, places), strict=True)),
        network=network,
        # Of an exchange's time that which is not the latency of a sum.
        codec_seconds={
            name: max(0.0, statistics.median(report["codecs"][name] for report in reports) - least)
            for name in reports[0].get("codecs", ())
        },
        copy_byte_seconds=statistics.median(report["copy"] for report in reports),
        device=reports[0]["device"],
        num_nodes=layout.num_nodes,
        optimizer_bytes=max(report["optimizer_bytes"] for report in reports),
        peak_bytes=max(report["peak_bytes"] for report in reports),
        num_ranks=len(reports),
        launch_seconds=max(0.0, seconds - max(report["seconds"] for report in reports)),
    )


def levels_of(reports: Sequence[Report], places: Sequence[tuple[int, int]]) -> list[Compute]:
    """Each level's steps. Batches of several sizes are measured at the first of them only."""
    levels = [[steps for steps in ranks if steps]  # of ranks that had rows, and were to work
              for ranks in zip(*(report["levels"] for report in reports), strict=True)]  # fmt: skip
    fixed, slope = fit_line(_points(levels[0]))
    found = []
    for (_, threads), ranks in zip(places, levels, strict=True):
        rows, seconds = _points(ranks)[0]
        factor = seconds / (fixed + slope * rows)
        step_spread, rank_spread = spreads([steps[0]["seconds"] for steps in ranks])
        found.append(
            Compute(
                threads=threads,
                fixed_seconds=factor * fixed,
                row_seconds=factor * slope,
                step_spread=step_spread,
                rank_spread=rank_spread,
            )
        )
    return found


def _points(ranks: Sequence[Sequence[Mapping[str, Any]]]) -> list[tuple[float, float]]:
    """Rows and typical seconds of each size of batch, the largest first."""
    return [
        (
            statistics.mean(step["rows"] for step in steps),
            statistics.median(statistics.median(step["seconds"]) for step in steps),
        )
        for steps in zip(*ranks, strict=True)
    ]


def spreads(seconds_by_rank: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Standard deviations of logarithms: of one rank's steps, robustly, and of ranks' medians."""
    logs = [[math.log(max(one, 1e-9)) for one in seconds] for seconds in seconds_by_rank]
    medians = [statistics.median(one) for one in logs]
    deviations = [
        abs(value - median) for one, median in zip(logs, medians, strict=True) for value in one
    ]
    step = _NORMAL * statistics.median(deviations)
    return step, statistics.stdev(medians) if len(medians) > 1 else 0.0


def _network(report: Report, layout: Layout) -> Network | None:
    """Links by their latencies and bandwidths."""
    if layout.world_size == 1:
        return None
    num_messages = 2 * (layout.world_size - 1)
    messages = _link(
        [(n / layout.world_size, seconds / num_messages) for n, seconds in report["ring"]]
    )
    shared = None
    if report["topology"] in ("shared", "hierarchical"):
        shared = _link(
            [
                (n, max(1e-9, seconds - between_nodes_seconds(messages, n, layout)))
                for n, seconds in report["shared"]
            ]
        )
    return Network(messages=messages, shared=shared, shared_ranks=layout.ranks_per_node)


def _link(points: Sequence[tuple[float, float]]) -> NetworkLink:
    latency, byte = fit_line(points)
    return NetworkLink(latency_seconds=latency, byte_seconds=byte)


_HEAVY = 3
"""Rows of the sample from which on a value is taken to be frequent in all rows."""


def shard_rows(hashes: Sequence[int], num_rows: int, num_shards: int) -> list[int]:
    """Rows of each shard, by a sample's hashes; exact if these are of all rows.

    Frequent rows go where Spark puts them, by the hash modulo the number of shards; the others are
    spread evenly, but that chance makes the fullest shard about ``sqrt(2 m ln W)`` larger than the
    mean ``m``, as of balls that are thrown into bins (Raab & Steger 1998).
    """
    loads = [0.0] * num_shards
    for value, count in Counter(hashes).items():
        if len(hashes) == num_rows or count >= _HEAVY:
            loads[value % num_shards] += count / len(hashes) * num_rows
    rest = num_rows - sum(loads)
    mean = rest / num_shards
    extra = min(math.sqrt(2 * max(0.0, mean) * math.log(num_shards)), rest - mean)
    fullest = loads.index(max(loads))
    # What the fullest has more, the others have less.
    part = extra * num_shards / max(1, num_shards - 1)
    loads = [load + mean - part / num_shards for load in loads]
    loads[fullest] += part
    return shared_rows(num_rows, [load / num_rows for load in loads])


def shared_rows(num_rows: int, shares: Sequence[float]) -> list[int]:
    """Rows of each shard, whole numbers, where these have parts that add up to 1."""
    ends = [round(num_rows * end) for end in itertools.accumulate(shares, initial=0.0)]
    return [after - before for before, after in itertools.pairwise(ends)]
