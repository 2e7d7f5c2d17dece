"""How many rows will the fullest worker have? Equal rows stay together, as they hash alike."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

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
