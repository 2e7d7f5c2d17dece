"""An epoch's order that comes in windows, as one order of all rows."""

from __future__ import annotations

import numpy as np

from sparkdl.data.shuffle import WindowedOrder


def rows_of(order: WindowedOrder, window: int) -> list[int]:
    """Those of a window, as positions in the concatenation of all shards."""
    rows = [np.arange(*order.starts[group : group + 2]) for group in order.groups(window)]
    found: list[int] = np.concatenate(rows)[order.mixture(window)].tolist()
    return found


def whole(order: WindowedOrder) -> list[int]:
    """Those of the epoch."""
    return [row for window in range(order.num_windows) for row in rows_of(order, window)]
