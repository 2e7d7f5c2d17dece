"""Turns the ranks' measurements into the cost model's numbers, by medians and lines."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkdl.explain.cost_model import (
    Compute,
    Layout,
    Level,
    Link,
    Network,
    fit_line,
    ring_seconds,
    shared_seconds,
)

Report = Mapping[str, Any]
"""What `measuring` gives of one rank."""

_NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


@dataclass(frozen=True, kw_only=True)
class GangFound:
    """What a gang of ranks has measured."""

    levels: tuple[Level, ...]
    network: Network | None
    codec_seconds: dict[str, float]
    copy_byte_seconds: float
    device: str
    num_nodes: int
    optimizer_bytes: int
    peak_bytes: int
    worker_seconds: float
    """What the slowest rank took to measure."""


def found_by(reports: Sequence[Report], gradient_bytes: int) -> GangFound:
    """Put the reports of all ranks together.

    Args:
        reports: in the order of ranks.
        gradient_bytes: size of what was compressed.
    """
    nodes = [report["node"] for report in reports]
    layout = Layout(world_size=len(reports), num_nodes=len(set(nodes)))
    network = _network(reports[0], layout)
    state = next(report["state"] for report in reports if report["state"])
    return GangFound(
        levels=levels_of(reports),
        network=network,
        codec_seconds=_codecs(reports, network, layout, gradient_bytes),
        copy_byte_seconds=statistics.median(report["copy"] for report in reports),
        device=reports[0]["device"],
        num_nodes=layout.num_nodes,
        optimizer_bytes=state["optimizer"],
        peak_bytes=max(report["peak_bytes"] for report in reports),
        worker_seconds=max(report["seconds"] for report in reports),
    )


def levels_of(reports: Sequence[Report]) -> tuple[Level, ...]:
    """Each level's steps. Batches of several sizes are measured at one of them.

    The others are slower or quicker than it by a factor, whatever the size.
    """
    measured = [[report["levels"][i] for report in reports]
                for i in range(len(reports[0]["levels"]))]  # fmt: skip
    full = max(measured, key=lambda ranks: max(len(rank["steps"]) for rank in ranks))
    fixed, slope = fit_line(_points(full))
    found = []
    for ranks in measured:
        if not any(rank["steps"] for rank in ranks):  # nobody who had rows was to work
            continue
        rows, seconds = _points(ranks)[0]
        factor = seconds / (fixed + slope * rows)
        step_spread, rank_spread = spreads([r["steps"][0]["seconds"] for r in ranks if r["steps"]])
        found.append(
            Level(
                ranks_per_node=ranks[0]["ranks_per_node"],
                threads=ranks[0]["threads"],
                compute=Compute(
                    fixed_seconds=factor * fixed,
                    row_seconds=factor * slope,
                    step_spread=step_spread,
                    rank_spread=rank_spread,
                ),
            )
        )
    return tuple(found)


def _points(ranks: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Rows and typical seconds of each size of batch, the largest first."""
    working = [rank["steps"] for rank in ranks if rank["steps"]]
    return [
        (
            statistics.mean(steps[i]["rows"] for steps in working),
            statistics.median(statistics.median(steps[i]["seconds"]) for steps in working),
        )
        for i in range(min(map(len, working)))
    ]


def spreads(seconds_by_rank: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Standard deviations of the logarithm: of one rank's steps, and of ranks' typical steps.

    The former by the median deviation, which a pause of the machine does not move.
    """
    logs = [[math.log(max(one, 1e-9)) for one in seconds] for seconds in seconds_by_rank]
    medians = [statistics.median(one) for one in logs]
    deviations = [
        abs(value - median) for one, median in zip(logs, medians, strict=True) for value in one
    ]
    step = _NORMAL * statistics.median(deviations)
    return step, statistics.stdev(medians) if len(medians) > 1 else 0.0


def _network(report: Report, layout: Layout) -> Network | None:
    """Links by their latencies and bandwidths."""
    if "ring" not in report:
        return None
    world_size = layout.world_size
    messages = _link(
        [(n / world_size, seconds / (2 * (world_size - 1))) for n, seconds in report["ring"]]
    )
    network = Network(messages=messages, shared_ranks=layout.ranks_per_node)
    if report["topology"] not in ("shared", "hierarchical"):
        return network
    links = {}
    for name in ("in_place", "staged"):
        rest = [
            (n, max(1e-9, seconds - _between_nodes(messages, n, layout)))
            for n, seconds in report[name]
        ]
        links[name] = _link(rest)
    return Network(
        messages=messages,
        shared=links["in_place"],
        staged=links["staged"],
        shared_ranks=layout.ranks_per_node,
    )


def _between_nodes(messages: Link, num_bytes: float, layout: Layout) -> float:
    share = num_bytes / layout.ranks_per_node if layout.is_even else num_bytes
    return ring_seconds(messages, share, layout.num_nodes)


def _link(points: Sequence[tuple[float, float]]) -> Link:
    latency, byte = fit_line(points)
    return Link(latency_seconds=latency, byte_seconds=byte)


def _codecs(
    reports: Sequence[Report], network: Network | None, layout: Layout, gradient_bytes: int
) -> dict[str, float]:
    """Seconds that compressions compute: those of an exchange less the latency of a sum."""
    if network is None:
        return {}
    link = network.shared or network.messages
    least = shared_seconds(link, 0, layout.ranks_per_node, network.shared_ranks)
    return {
        name: max(0.0, statistics.median(r["codecs"][name] for r in reports) - least)
        for name in reports[0]["codecs"]
        if gradient_bytes
    }


_HEAVY = 3
"""Rows of the sample from which on a value is taken to be frequent in all rows."""


def shard_rows(
    hashes: Sequence[int], num_rows: int, num_shards: int, *, is_all: bool = False
) -> list[int]:
    """Rows of each shard, by a sample's hashes.

    Frequent rows go where Spark puts them, by the hash modulo the number of shards; the others are
    spread evenly, but that chance makes the fullest shard about ``sqrt(2 m ln W)`` larger than the
    mean ``m``, as of balls that are thrown into bins (Raab & Steger 1998).

    Args:
        hashes: of the sample's rows.
        num_rows: of all rows.
        num_shards: among which they are divided.
        is_all: whether the sample holds all rows, so that the result is exact.
    """
    loads = [0.0] * num_shards
    if is_all:
        for value in hashes:
            loads[value % num_shards] += 1
        return [round(load) for load in loads]
    counts = Counter(hashes)
    heavy = {value: count for value, count in counts.items() if count >= _HEAVY}
    for value, count in heavy.items():
        loads[value % num_shards] += count / len(hashes) * num_rows
    rest = (1 - sum(heavy.values()) / max(1, len(hashes))) * num_rows
    mean = rest / num_shards
    extra = min(math.sqrt(2 * mean * math.log(num_shards)), rest - mean) if num_shards > 1 else 0.0
    fullest = max(range(num_shards), key=loads.__getitem__)
    loads = [
        load + mean + (extra if shard == fullest else -extra / max(1, num_shards - 1))
        for shard, load in enumerate(loads)
    ]
    return _whole(loads, num_rows)


def shared_rows(num_rows: int, shares: Sequence[float]) -> list[int]:
    """Rows of each shard where these have parts that add up to 1."""
    return _whole([num_rows * share for share in shares], num_rows)


def _whole(loads: Sequence[float], num_rows: int) -> list[int]:
    """Whole numbers near ``loads`` that add up to ``num_rows``."""
    ends = [0]
    total = 0.0
    for load in loads:
        total += max(0.0, load)
        ends.append(round(total))
    ends[-1] = num_rows
    return [max(0, after - before) for before, after in itertools.pairwise(ends)]
