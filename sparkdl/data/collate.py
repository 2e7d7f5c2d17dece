"""Rows put together to the tensors that ``forward`` takes, for batches and for ``transform``.

Sequences are padded, sparse vectors filled in, encoded images decoded; all at the last moment, so
that what is kept and moved around stays small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch

from sparkdl.data.kinds import kind_of
from sparkdl.data.plan import Column
from sparkdl.data.ragged import Ragged

Rows = torch.Tensor | Ragged
R = TypeVar("R")
_HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Arguments:
    """The arguments with which ``forward`` is called."""

    values: tuple[torch.Tensor, ...]
    """Each ``(batch, ...)``."""
    names: tuple[str | None, ...] = field(default=())
    """Their names; None: by position. Empty: all by position."""

    def call(self, module: Callable[..., R]) -> R:
        """``module(...)``."""
        return module(*self.positional, **self.by_name)

    @property
    def positional(self) -> tuple[torch.Tensor, ...]:
        """The arguments that are passed by position."""
        names = self.names or (None,) * len(self.values)
        return tuple(v for v, name in zip(self.values, names, strict=True) if name is None)

    @property
    def by_name(self) -> dict[str, torch.Tensor]:
        """The others, in their order."""
        pairs = zip(self.names, self.values, strict=bool(self.names))
        return {name: value for name, value in pairs if name is not None}

    @property
    def num_rows(self) -> int:
        """Samples."""
        return len(self.values[0])

    def to(self, device: torch.device) -> Arguments:
        """The same on ``device``."""
        return Arguments(tuple(value.to(device) for value in self.values), self.names)

    def packed(self) -> Any:
        """As users see it: one tensor, a tuple, or a dict if all have names."""
        if not any(self.names):
            return self.values[0] if len(self.values) == 1 else self.values
        if all(self.names):
            return dict(zip(self.names, self.values, strict=True))
        return self.values

    def repacked(self, packed: Any) -> Arguments:
        """Inverse of `packed`, for other values.

        Raises:
            TypeError: they are not arranged as `packed` gives them.
        """
        values: Any = packed
        if self.names and all(self.names):
            values = tuple(packed[name] for name in self.names) if isinstance(packed, dict) else ()
        elif not any(self.names) and len(self.values) == 1:
            values = (packed,)
        if not isinstance(values, (tuple, list)) or len(values) != len(self.values):
            raise TypeError(f"expected {_arrangement(self)}; received {type(packed).__name__}")
        for value in values:
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"expected tensors; received {type(value).__name__}")
        return Arguments(tuple(values), self.names)


def _arrangement(arguments: Arguments) -> str:
    if arguments.names and all(arguments.names):
        return f"a dict with {', '.join(map(repr, arguments.names))}"
    return f"a tuple of {len(arguments.values)} tensors"


def split(
    column: Column, rows: Rows, sizes: Sequence[int]
) -> list[tuple[str | None, Sequence[torch.Tensor]]]:
    """Cut rows into batches of ``sizes``.

    Returns:
        Name of the argument -> one tensor per batch. Sequences may have a mask besides.
    """
    if isinstance(rows, torch.Tensor):
        # Unsafe would be to change the whole column under a batch that has a gradient. Other views
        # would tie a batch that a module changes in place to the buffer, and this to the graph.
        return [(column.argument, torch.unsafe_split_with_sizes(_cast(rows, column), list(sizes)))]
    ends = list(accumulate(sizes))
    pieces = [rows[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    kind = kind_of(column.kind)
    batches = [_all_cast(kind.batch(piece, column, column.kind), column) for piece in pieces]
    return list(zip((column.argument, *column.kind.masks), zip(*batches, strict=True), strict=True))


def _cast(values: torch.Tensor, column: Column) -> torch.Tensor:
    """Floating values in the dtype that ``forward`` gets."""
    if column.cast is None or not values.is_floating_point():
        return values
    return values.to(_HALF[column.cast])


def _all_cast(values: Sequence[torch.Tensor], column: Column) -> list[torch.Tensor]:
    return [_cast(value, column) for value in values]


def arguments(columns: Sequence[Column], rows: Sequence[Rows]) -> Arguments:
    """Return the arguments of ``forward`` for all of these rows; one entry per input column."""
    values: list[torch.Tensor] = []
    names: list[str | None] = []
    for column, these in zip(columns, rows, strict=True):
        for name, (tensor,) in split(column, these, [len(these)]):
            names.append(name)
            values.append(tensor)
    return Arguments(tuple(values), tuple(names))


def copied(rows: Rows) -> Rows:
    """A copy, which does not reach into the spool's pages."""
    if isinstance(rows, torch.Tensor):
        return rows.clone()
    return Ragged(
        tuple(part.copy() for part in rows.own()), rows.offsets - rows.offsets[0], rows.shape
    )


def no_rows(column: Column) -> Rows:
    """A column without rows."""
    if column.kind.num_parts:
        parts = [np.empty((0, *inner), dtype) for dtype, inner in column.stored_parts]
        return Ragged(tuple(parts), np.zeros(1, dtype=np.int64), column.shape)
    return torch.from_numpy(np.empty((0, *column.shape), dtype=column.dtype))


def example_arguments(columns: Sequence[Column], num_rows: int = 2) -> Arguments:
    """Inputs of zeros, shaped like the module's; sequences are as long as the longest."""
    values: list[torch.Tensor] = []
    names: list[str | None] = []
    for column in columns:
        values += _all_cast(kind_of(column.kind).example(num_rows, column, column.kind), column)
        names += [column.argument, *column.kind.masks]
    return Arguments(tuple(values), tuple(names))


def narrow(value: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Rows ``start`` to ``stop`` of a batch; a view, unless it is sparse."""
    return value.narrow_copy(0, start, stop - start) if value.is_sparse else value[start:stop]
