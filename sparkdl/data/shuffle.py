"""The order in which the rows of a shard are read in an epoch.

The order is a pure function of the seed, the epoch and the shard's fingerprint, so that any machine
at any time, also after a restart, reads the same rows in the same steps. Rows that fit into memory
are permuted as a whole. More of them are read in row groups, runs of neighbouring rows: the groups
come in random order, and the rows of some of them, a window, are mixed (see `WindowedOrder`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Order = npt.NDArray[Any]


def epoch_order(seed: int, epoch: int, fingerprint: str, num_rows: int) -> Order:
    """A random permutation of the positions of a shard's rows.

    Args:
        seed: the run's seed.
        epoch: number of the epoch, from 0.
        fingerprint: the shard's: a hash of its rows in their order.
        num_rows: its rows.

    Returns:
        Positions in ``range(num_rows)``, each exactly once; int32 as long as that suffices, so
        that a shard of 60 million rows needs 240 MB.
    """
    return _permutation(num_rows, _entropy(seed, epoch, [fingerprint]))


def cut_rows(num_rows: int, group_rows: int) -> list[int]:
    """Cut a shard into row groups of ``group_rows`` rows; the last one may be smaller.

    Returns:
        Rows of each group, in their order.
    """
    whole, rest = divmod(num_rows, group_rows)
    return [group_rows] * whole + [rest] * (rest > 0)


@dataclass(frozen=True, kw_only=True)
class WindowedOrder:
    """An epoch's order that needs few row groups at a time. Make it with `windowed_order`.

    The order is cut into windows: ``range(bounds[w], bounds[w + 1])`` of it are the rows of window
    ``w``. Each window is made when it is asked for, from nothing but these values, so a run that
    is resumed in the middle of an epoch computes none of those before.
    """

    entropy: tuple[int, int, str]
    """Seed, epoch, fingerprint of the shard."""
    starts: Order
    """int64 ``(groups + 1,)``: first position of each row group, and the number of all rows."""
    sequence: Order
    """int64 ``(groups,)``: numbers of the row groups in the order in which they are read."""
    cuts: Order
    """int64 ``(windows + 1,)``: which part of ``sequence`` makes each window."""
    bounds: Order
    """int64 ``(windows + 1,)``: which part of the epoch's order each window is."""

    def __len__(self) -> int:
        """Rows of the epoch."""
        return int(self.bounds[-1])

    @property
    def num_windows(self) -> int:
        """Windows of the epoch."""
        return len(self.cuts) - 1

    def window_of(self, place: int) -> int:
        """The window that holds place ``place`` of the epoch's order."""
        return int(np.searchsorted(self.bounds, place, side="right")) - 1

    def groups(self, window: int) -> Order:
        """Numbers of the window's row groups, ascending, as a disk likes to read them."""
        return np.sort(self.sequence[self.cuts[window] : self.cuts[window + 1]])

    def mixture(self, window: int) -> Order:
        """The order of a window's rows, as places in the concatenation of its `groups`."""
        count = int(self.bounds[window + 1] - self.bounds[window])
        seed, epoch, fingerprint = self.entropy
        return _permutation(count, _entropy(seed, epoch, [fingerprint, "window", str(window)]))


def windowed_order(
    seed: int,
    epoch: int,
    fingerprint: str,
    group_sizes: Sequence[int],
    groups_together: int,
) -> WindowedOrder:
    """The order of an epoch whose rows do not fit into memory together.

    Row groups come in random order and are dealt to as few windows as hold at most
    ``groups_together`` of them, all windows nearly equal; in each, all rows are mixed. Unlike in a
    permutation of all rows, the rows of one group are read in the same window of every epoch.

    Args:
        seed: the run's seed.
        epoch: number of the epoch, from 0.
        fingerprint: the shard's: a hash of its rows in their order.
        group_sizes: rows of each of its row groups, in their order.
        groups_together: row groups whose rows are mixed.

    Returns:
        The order; with ``groups_together`` of at least ``len(group_sizes)`` it is one window.
    """
    if groups_together < 1:
        raise ValueError(f"groups_together must be at least 1; received {groups_together}")
    entropy = _entropy(seed, epoch, [fingerprint, "groups"])
    sequence = _permutation(len(group_sizes), entropy).astype(np.int64)
    num_windows = -(-len(group_sizes) // groups_together)
    cuts = len(group_sizes) * np.arange(num_windows + 1, dtype=np.int64) // max(1, num_windows)
    sizes = np.asarray(group_sizes, dtype=np.int64)
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes[sequence])])
    return WindowedOrder(
        entropy=(seed, epoch, fingerprint),
        starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]),
        sequence=sequence,
        cuts=cuts,
        bounds=ends[cuts],
    )


class LengthGroups:
    """Exchanges rows among neighbouring steps so that each batch holds rows of similar length.

    The rows of ``num_together`` steps are sorted by length and dealt out again: batches keep their
    sizes, and their lengths come in random order, which is the same on all ranks, so that no rank
    waits for another's longer rows.

    Args:
        num_rows: rows of the epoch.
        num_steps: steps of the epoch.
        num_together: steps whose rows are sorted together.
        seed: the run's seed.
        epoch: number of the epoch, from 0.
    """

    def __init__(
        self, num_rows: int, num_steps: int, num_together: int, *, seed: int, epoch: int
    ) -> None:
        random = np.random.Generator(np.random.PCG64(_entropy(seed, epoch, ["lengths"])))
        self._steps = [
            first + random.permutation(min(num_together, num_steps - first))
            for first in range(0, num_steps, num_together)
        ]
        self._bounds = num_rows * np.arange(num_steps + 1) // num_steps
        firsts = [*range(0, num_steps, num_together), num_steps]
        self._group_bounds = self._bounds[firsts]

    def span(self, place: int) -> tuple[int, int]:
        """First and one past the last place of the group that ``place`` belongs to."""
        group = self._group_of(place)
        return int(self._group_bounds[group]), int(self._group_bounds[group + 1])

    def deal(self, start: int, rows: Order, lengths: Order) -> Order:
        """The rows of one group in their new order.

        Args:
            start: the group's first place.
            rows: positions of its rows, in the epoch's order.
            lengths: their lengths.
        """
        rows = rows[np.argsort(lengths, kind="stable")]
        dealt = np.empty_like(rows)
        taken = 0
        for step in self._steps[self._group_of(start)].tolist():
            low, high = self._bounds[step] - start, self._bounds[step + 1] - start
            dealt[low:high] = rows[taken : taken + high - low]
            taken += high - low
        return dealt

    def _group_of(self, place: int) -> int:
        return int(np.searchsorted(self._group_bounds, place, side="right")) - 1


class DealtByLength:
    """An order whose rows are exchanged by their length, those of some steps together.

    Args:
        groups: which steps are grouped.
        order: gives the rows from one place of the epoch to another.
        lengths: gives the length of each of some rows.
    """

    def __init__(
        self,
        groups: LengthGroups,
        order: Callable[[int, int], Order],
        lengths: Callable[[Order], Order],
    ) -> None:
        self._groups = groups
        self._order = order
        self._lengths = lengths
        self._start, self._dealt = 0, np.empty(0, dtype=np.int64)
        """First place of the group at hand, and its rows."""

    def rows(self, start: int, stop: int) -> Order:
        """The rows from ``start`` to ``stop``; whoever asks goes forward only."""
        pieces = [self._dealt[:0]]
        while start < stop:
            if not 0 <= start - self._start < len(self._dealt):
                self._start, end = self._groups.span(start)
                rows = self._order(self._start, end)
                self._dealt = self._groups.deal(self._start, rows, self._lengths(rows))
            offset = start - self._start
            pieces.append(self._dealt[offset : offset + stop - start])
            start += len(pieces[-1])
        return np.concatenate(pieces)

    def first_needed(self, place: int) -> int:
        """The first place of the order whose row may be asked for after ``place``."""
        return self._start if 0 <= place - self._start < len(self._dealt) else place


def _permutation(count: int, entropy: int) -> Order:
    is_small = count <= np.iinfo(np.int32).max
    order = np.arange(count, dtype=np.int32) if is_small else np.arange(count, dtype=np.int64)
    np.random.Generator(np.random.PCG64(entropy)).shuffle(order)
    return order


def _entropy(seed: int, epoch: int, fingerprints: Sequence[str]) -> int:
    # A hash rather than arithmetic on the numbers: neighbouring seeds and epochs must not be
    # correlated, and the length of each part must not let two inputs run together.
    parts = [str(seed), str(epoch), *fingerprints]
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "little")
