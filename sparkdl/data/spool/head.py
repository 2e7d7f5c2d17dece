"""The first rows of a shard, which travel with what is told of it: a module is tried on them."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.data.ragged import Array, Ragged

if TYPE_CHECKING:
    from sparkdl.data.collate import Rows
    from sparkdl.data.plan import Column

_OFFSETS = "offsets"


class Head:
    """Keeps the first rows that a shard gets."""

    ROWS = 8
    """Most rows that are kept."""

    def __init__(self, most_bytes: int) -> None:
        """Keep rows of so many bytes at most; 0: none."""
        self._most_bytes = most_bytes
        self._columns: list[Array | Ragged] | None = None

    def add(self, columns: Sequence[Array | Ragged]) -> None:
        """Take the first rows of these, one entry per column, unless there are some already."""
        num_rows = len(columns[0])
        if self._columns is None and self._most_bytes and num_rows:
            number = min(self.ROWS, num_rows)
            while number and sum(_size(rows[:number]) for rows in columns) > self._most_bytes:
                number //= 2
            self._columns = [_copied(rows[:number]) for rows in columns] if number else None

    def packed(self) -> str:
        """The rows as text; empty: there are none."""
        if self._columns is None:
            return ""
        arrays: dict[str, Any] = {}
        for number, rows in enumerate(self._columns):
            parts = (*rows.parts, rows.offsets) if isinstance(rows, Ragged) else (rows,)
            names = [*map(str, range(len(parts)))]
            if isinstance(rows, Ragged):
                names[-1] = _OFFSETS
            arrays |= {f"{number}-{name}": part for name, part in zip(names, parts, strict=True)}
        with io.BytesIO() as file:
            np.savez_compressed(file, **arrays)
            return base64.b64encode(file.getvalue()).decode()


def rows_of_head(head: str, columns: Sequence[Column]) -> Mapping[str, Rows]:
    """Read what `Head.packed` gave, in the shapes of the columns: key of each -> its rows."""
    import torch

    found: dict[str, Rows] = {}
    with np.load(io.BytesIO(base64.b64decode(head)), allow_pickle=False) as arrays:
        for number, column in enumerate(columns):
            names = sorted(name for name in arrays.files if name.startswith(f"{number}-"))
            parts = [arrays[name] for name in names]
            if names[-1].endswith(_OFFSETS):
                found[column.key] = Ragged(tuple(parts[:-1]), parts[-1], column.shape)
            else:
                (values,) = parts
                found[column.key] = torch.from_numpy(values.reshape(len(values), *column.shape))
    return found


def _size(rows: Array | Ragged) -> int:
    return sum(part.nbytes for part in (rows.own() if isinstance(rows, Ragged) else (rows,)))


def _copied(rows: Array | Ragged) -> Array | Ragged:
    if isinstance(rows, Ragged):
        parts = tuple(part.copy() for part in rows.own())
        return Ragged(parts, rows.offsets - rows.offsets[0], rows.shape)
    return rows.copy()
