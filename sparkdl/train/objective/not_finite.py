"""Finds the columns that hold NaN or infinite values, once a loss has run away."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch

from sparkdl.comm.communicator import Communicator
from sparkdl.data.collate import Rows
from sparkdl.data.plan import Column
from sparkdl.data.ragged import Ragged
from sparkdl.data.source import ShardRows
from sparkdl.errors import CommunicationError, TrainingDiverged
from sparkdl.train.objective.divergence import without_remedies

SECONDS = 5.0
"""Longest look of a rank, for which its peers wait."""
_BATCH = 4096


def with_columns(
    error: TrainingDiverged,
    columns: Sequence[Column],
    shards: Sequence[ShardRows],
    comm: Communicator | None,
) -> TrainingDiverged:
    """The error with a sentence about the training rows that are not finite.

    Args:
        error: the loss has run away.
        columns: those of the plan.
        shards: this rank's training rows; read for `SECONDS` at most.
        comm: ranks of which all come here, to add their counts; None: this rank tells its own.
    """
    mine = _Looked(columns, shards)
    told = [json.dumps([mine.rows, mine.is_all, mine.found, mine.empty]).encode()]
    if comm is not None:
        with contextlib.suppress(CommunicationError):  # then this rank tells its own
            told = comm.all_gather_bytes(told[0])
    looked = [json.loads(data) for data in told]
    rows = sum(one[0] for one in looked)
    of = f"{rows:,} training rows" + ("" if all(one[1] for one in looked) else " looked at")
    found: Counter[str] = Counter()
    empty: Counter[str] = Counter()
    for one in looked:
        found.update(one[2])
        empty.update(one[3])
    if not found:
        lists = "; ".join(f"{name} of {count:,}" for name, count in empty.items())
        why = f"; empty lists, whose mean is NaN, are in: {lists}" if lists else ""
        return TrainingDiverged(f"{error}. None of the {of} has NaN or an infinite value{why}")
    return TrainingDiverged(f"{without_remedies(error)}. Among the {of} {named(found)}")


FOUND = "NaN or infinite values are in: "
"""Words by which the driver knows the message, whose remedy follows from the types of columns."""


def named(found: Mapping[str, int]) -> str:
    """Say in how many rows of which columns there are such values: the sum of `bad_rows`."""
    those = "; ".join(f"{name} of {count:,}" for name, count in found.items())
    return f"{FOUND}{those}; drop or mend these rows"


def bad_rows(rows: Mapping[str, Rows], columns: Sequence[Column]) -> dict[str, int]:
    """Role and name of a column -> rows with a value that is not finite, where there are any."""
    counts = {_name(column): _count(rows[column.key]) for column in columns}
    return {name: count for name, count in counts.items() if count}


def _name(column: Column) -> str:
    return f'{column.role} "{column.name}"'


class _Looked:
    """The findings of a rank in its rows."""

    def __init__(self, columns: Sequence[Column], shards: Iterable[ShardRows]) -> None:
        self.rows = 0
        self.found: Counter[str] = Counter()
        """Role and name of a column -> rows with a value that is not finite."""
        self.empty: Counter[str] = Counter()
        """The same of those without any value."""
        self.is_all = False
        until = time.monotonic() + SECONDS
        for shard in shards:
            if shard.num_rows == 0:
                continue
            for rows in shard.in_order(_BATCH):
                if time.monotonic() > until:
                    return
                self.rows += max((len(rows[column.key]) for column in columns), default=0)
                self.found.update(bad_rows(rows, columns))
                for column in columns:
                    values = rows[column.key]
                    if isinstance(values, Ragged) and (count := int((values.lengths == 0).sum())):
                        self.empty[_name(column)] += count
        self.is_all = True


def _count(rows: Rows) -> int:
    """Number of the rows with a value that is NaN or infinite."""
    if isinstance(rows, Ragged):
        bad = torch.zeros(len(rows), dtype=torch.bool)
        owner = torch.repeat_interleave(torch.arange(len(rows)), torch.from_numpy(rows.lengths))
        for part in rows.own():
            values = torch.from_numpy(part)
            bad[owner[_not_finite(values)]] = True
        return int(bad.sum())
    return int(_not_finite(rows).sum())


def _not_finite(values: torch.Tensor) -> torch.Tensor:
    """Bool ``(rows,)``: whether a value of the row is NaN or infinite."""
    if not values.is_floating_point():
        return torch.zeros(len(values), dtype=torch.bool)
    return ~torch.isfinite(values)[:, None].flatten(1).all(1)
