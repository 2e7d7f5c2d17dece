"""How much memory will the rows of a row group need, which nobody has read yet?

Rows of one shape need the same everywhere. Of others footers tell how many values or bytes a row
group stores; rows that were read tell how much memory becomes of these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sparkdl.data.ragged import Ragged
from sparkdl.data.readers import Rows
from sparkdl.plan import Column

_OFFSET_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class RowSize:
    """What the rows of a column need, by some of them. Make it with `row_size`."""

    row_bytes: int
    """About that of a row."""
    bytes_per_unit: float
    """Of what is stored, see `stored_units`; 0: all rows need the same."""

    def num_bytes(self, num_rows: int, units: int) -> int:
        """Of ``num_rows`` rows of which ``units`` are stored.

        Not less than those need that were seen: of what is cut off behind ``max_length``, or comes
        from a transform, the units do not tell.
        """
        ragged = num_rows * _OFFSET_BYTES + math.ceil(units * self.bytes_per_unit)
        return max(num_rows * self.row_bytes, ragged if self.bytes_per_unit else 0)


def row_size(column: Column, rows: Rows, arrays: Sequence[pa.Array]) -> RowSize:
    """Measure rows.

    Args:
        column: as the plan has it.
        rows: some of its rows, in a dtype of their own.
        arrays: the columns of which they were made.
    """
    itemsize = np.dtype(column.dtype).itemsize
    if not isinstance(rows, Ragged):
        return RowSize(row_bytes=math.prod(column.shape) * itemsize, bytes_per_unit=0)
    *others, values = rows.own()
    num_bytes = values.size * itemsize + sum(part.nbytes for part in others)
    return RowSize(
        row_bytes=-(-num_bytes // max(1, len(rows))) + _OFFSET_BYTES,
        bytes_per_unit=num_bytes / max(1, sum(map(_units, arrays))),
    )


def stored_units(row_group: pq.RowGroupMetaData, leaves: Sequence[int]) -> int:
    """What a row group stores of a column: bytes of strings and binary, else values.

    Args:
        row_group: its footer.
        leaves: numbers of the column's leaves in it.
    """
    columns = [row_group.column(leaf) for leaf in leaves]
    return sum(
        c.total_uncompressed_size if c.physical_type == "BYTE_ARRAY" else c.num_values
        for c in columns
    )


def _units(array: pa.Array) -> int:
    """The same of an array."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _units(array.dictionary_decode())
    if pa.types.is_struct(kind):
        return sum(map(_units, array.flatten()))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _units(array.flatten())
    if any(is_type(kind) for is_type in _BYTES):
        return int(pc.sum(pc.binary_length(array)).as_py() or 0)
    return len(array)


_BYTES = (
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_string,
    pa.types.is_large_string,
)
