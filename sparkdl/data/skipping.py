"""Which rows are left out of training, since their images cannot be used?

Decided once, while spooling, before anything is written: the rows that are left out are in no
count, no fingerprint, no epoch, and the same whenever the same rows are spooled.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from sparkdl.data.ragged import Array, Ragged
from sparkdl.data.readers import BadRows, Rows, read, read_usable
from sparkdl.data.stats import ColumnStats
from sparkdl.inputs import Image, Specification


def leave_out(
    batch: pa.RecordBatch,
    kinds: Sequence[Specification],
    stats: Sequence[ColumnStats],
    *,
    where: str,
    first: int,
) -> tuple[pa.RecordBatch, dict[int, Rows | None]]:
    """Leave out the rows of which some column says that they shall be skipped.

    Args:
        batch: the columns, and whatever comes behind them.
        kinds: specifications of the columns.
        stats: where the columns' findings are added.
        where: suffix of a row's description.
        first: number of the first row.

    Returns:
        The other rows, and by column's number what has been read of them on the way; None where
        they cannot be used.
    """
    found: dict[int, tuple[Rows, Array]] = {}
    ready: dict[int, Rows | None] = {}
    kept = np.ones(batch.num_rows, dtype=bool)
    for index, kind in enumerate(kinds):
        if not isinstance(kind, Image) or not kind.skips:
            continue
        try:
            rows, usable, skipped = read_usable(
                batch.column(index), kind, where=where, first_row=first
            )
        except BadRows as error:
            stats[index].nulls_and_shapes.merge(error.findings)
            ready[index] = None
            continue
        stats[index].skipped.merge(skipped)
        found[index] = rows, usable
        kept &= usable
    for index, (rows, usable) in found.items():
        ready[index] = rows if kept.all() else chosen(rows, kept[usable])
    return (batch if kept.all() else batch.filter(pa.array(kept))), ready


def read_noting(
    array: pa.Array, kind: Specification, stats: ColumnStats, *, where: str, first: int
) -> Rows | None:
    """The rows of a column; or None, and a note, if some cannot be used. See `leave_out`."""
    try:
        return read(array, kind, where=where, first_row=first)
    except BadRows as error:
        stats.nulls_and_shapes.merge(error.findings)
        return None


def chosen(rows: Rows, mask: Array) -> Rows:
    """The rows at which ``mask``, bool ``(rows,)``, is True."""
    return rows.where(mask) if isinstance(rows, Ragged) else rows[mask]
