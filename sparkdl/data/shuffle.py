"""In which order does a rank read its rows in an epoch?

The order is a pure function of the seed, the epoch and the shards' content, so that any machine
at any time, also after a restart, reads the same rows in the same steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Order = npt.NDArray[Any]


def epoch_order(seed: int, epoch: int, fingerprints: Sequence[str], rows: Sequence[int]) -> Order:
    """A random permutation of the positions in the concatenation of a rank's shards.

    Args:
        seed: the run's seed.
        epoch: number of the epoch, from 0.
        fingerprints: content hash of each of the rank's shards.
        rows: number of rows of each of these shards.

    Returns:
        Positions in ``range(sum(rows))``, each exactly once; int32 as long as that suffices, so
        that a shard of 60 million rows needs 240 MB.
    """
    if len(fingerprints) != len(rows):
        raise ValueError(f"{len(fingerprints)} fingerprints but {len(rows)} row counts")
    total = sum(rows)
    is_small = total <= np.iinfo(np.int32).max
    order = np.arange(total, dtype=np.int32) if is_small else np.arange(total, dtype=np.int64)
    np.random.Generator(np.random.PCG64(_entropy(seed, epoch, fingerprints))).shuffle(order)
    return order


def group_by_length(
    order: Order, lengths: Order, num_steps: int, num_together: int, *, seed: int, epoch: int
) -> Order:
    """Exchange rows among neighbouring steps so that each batch holds rows of similar length.

    The rows of ``num_together`` steps are sorted by length and dealt out again: batches keep their
    sizes, and their lengths come in random order, which is the same on all ranks, so that no rank
    waits for another's longer rows.

    Args:
        order: the epoch's order.
        lengths: length of the row at each position.
        num_steps: steps of the epoch.
        num_together: steps whose rows are sorted together.
        seed: the run's seed.
        epoch: number of the epoch, from 0.

    Returns:
        The same positions in another order.
    """
    random = np.random.Generator(np.random.PCG64(_entropy(seed, epoch, ["lengths"])))
    bounds = len(order) * np.arange(num_steps + 1) // num_steps
    grouped = np.empty_like(order)
    for first in range(0, num_steps, num_together):
        steps = first + random.permutation(min(num_together, num_steps - first))
        start, stop = bounds[first], bounds[min(first + num_together, num_steps)]
        rows = order[start:stop]
        rows = rows[np.argsort(lengths[rows], kind="stable")]
        taken = 0
        for step in steps.tolist():
            low, high = bounds[step], bounds[step + 1]
            grouped[low:high] = rows[taken : taken + high - low]
            taken += high - low
    return grouped


def _entropy(seed: int, epoch: int, fingerprints: Sequence[str]) -> int:
    # A hash rather than arithmetic on the numbers: neighbouring seeds and epochs must not be
    # correlated, and the length of each part must not let two inputs run together.
    parts = [str(seed), str(epoch), *fingerprints]
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "little")
