"""Statistics of a shard's columns, taken while they are spooled, for the driver to judge."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparkdl.data.arrow_arrays import Findings
from sparkdl.data.column_rules import bad_values_message, remedy_of_shapes
from sparkdl.data.plan import Shard, SpoolColumn


@dataclass(kw_only=True)
class ColumnStats:
    """The statistics of one column in one shard."""

    shape: tuple[int, ...] | None = None
    """Shape of a row; None when the shard has no row."""
    dtype: str | None = None
    """dtype of the values; None when the shard has none."""
    longest: int = 0
    """Values of the longest row, where rows may differ."""
    nulls_and_shapes: Findings = field(default_factory=Findings)
    skipped: Findings = field(default_factory=Findings)
    """Rows that were left out, since their specification asks for that."""
    bad_values: int = 0
    """Labels that are infinite, NaN, or no class numbers where these are wanted; bad weights."""
    first_bad: str | None = None
    minimum: float | None = None
    maximum: float | None = None

    def problem(self, column: SpoolColumn, *, is_all: bool = True) -> str | None:
        """Why rows of the column, or some that stand for all, cannot be used; None: they can."""
        if self.nulls_and_shapes:
            return self.nulls_and_shapes.message(column.name, remedy_of_shapes(column))
        if is_all and column.role == "weight" and self.maximum == 0:
            return f'column "{column.name}" is 0 in all rows, so that none counts; correct it'
        if not self.bad_values:
            return None
        return bad_values_message(column, self.bad_values, str(self.first_bad))

    def places(self) -> list[str]:
        """The rows that messages name."""
        found = [self.first_bad]
        for findings in (self.nulls_and_shapes, self.skipped):
            found.append(findings.first_null)
            found += (*findings.first_of_shape.values(), *findings.first_of_cause.values())
        return [place for place in found if place is not None]

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        values = dict(vars(self))
        for name in ("nulls_and_shapes", "skipped"):
            values[name] = values[name].to_dict()
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ColumnStats:
        """Inverse of `to_dict`."""
        shape = values["shape"]
        return cls(
            **{
                **values,
                "shape": None if shape is None else tuple(shape),
                "nulls_and_shapes": Findings.from_dict(values["nulls_and_shapes"]),
                "skipped": Findings.from_dict(values["skipped"]),
            }
        )


@dataclass(frozen=True, kw_only=True)
class SpooledShard:
    """A shard, and what was noted while it was spooled."""

    shard: Shard
    content: int
    """Sum of the rows' hashes modulo 2**64: equal for equal rows in any order and sharding."""
    columns: tuple[ColumnStats, ...]
    """Columns with equal statistics may share them: they stay as they are."""
    num_skipped_rows: int = 0
    """Rows that are in neither split, since some column's value cannot be used."""
    hashes: Mapping[str, int] = field(default_factory=dict)
    """Row that messages name, as they do -> its hash."""
    memory_bytes: int = 0
    """Memory of the host or container that holds the shard, as its task has found it."""
    head: str = ""
    """Its first rows, see `spool.head`; empty: they were not asked for, or are too large."""

    @property
    def is_sound(self) -> bool:
        """True if all rows can be used that were not left out."""
        return not any(one.nulls_and_shapes or one.bad_values for one in self.columns)

    def to_dict(self) -> dict[str, Any]:
        """As plain values; of columns with equal statistics, which are most of many, once."""
        places: dict[str, int] = {}
        distinct = {id(column): column for column in self.columns}
        place_of = {
            number: places.setdefault(json.dumps(column.to_dict()), len(places))
            for number, column in distinct.items()
        }
        columns = [place_of[id(column)] for column in self.columns]
        shown = {"stats": list(map(json.loads, places)), "columns": columns}
        return {**vars(self), "shard": vars(self.shard), **shown}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SpooledShard:
        """Inverse of `to_dict`."""
        stats = [ColumnStats.from_dict(one) for one in values["stats"]]
        columns = tuple(stats[place] for place in values["columns"])
        shard = {**values["shard"], "hosts": tuple(values["shard"]["hosts"])}
        rest = {name: value for name, value in values.items() if name != "stats"}
        return cls(**{**rest, "shard": Shard(**shard), "columns": columns})


def no_rows(shards: Sequence[SpooledShard]) -> str:
    """Why there is nothing to train on, given that no shard holds a row."""
    skipped = sum(spooled.num_skipped_rows for spooled in shards)
    if skipped:
        return f"all {skipped} rows were skipped (on_error='skip'); check the column of images"
    return "the DataFrame has no rows; check its source and filters"


def skipped_rows(names: Sequence[str], shards: Sequence[SpooledShard]) -> tuple[int, str]:
    """Count the rows that were left out on request, and say of which columns and why.

    Args:
        names: of the columns.
        shards: all of them.
    """
    texts = []
    for index, name in enumerate(names):
        found = Findings()
        for spooled in shards:
            found.merge(spooled.columns[index].skipped)
        if found:
            texts.append(f'column "{name}" has {found.faults()}')
    return sum(spooled.num_skipped_rows for spooled in shards), "; ".join(texts)


def merge_stats(stats: Sequence[ColumnStats]) -> ColumnStats:
    """One column's statistics over all shards."""
    merged = ColumnStats()
    for part in stats:
        merged.shape = merged.shape if merged.shape is not None else part.shape
        merged.longest = max(merged.longest, part.longest)
        if merged.dtype is not None and part.dtype not in (None, merged.dtype):
            cause = f"{part.dtype} where others have {merged.dtype}: let the transform cast it"
            merged.nulls_and_shapes.note_cause(cause, "in another partition")
        merged.dtype = merged.dtype or part.dtype
        merged.nulls_and_shapes.merge(part.nulls_and_shapes)
        merged.bad_values += part.bad_values
        merged.first_bad = merged.first_bad or part.first_bad
        if part.minimum is not None:
            low = part.minimum if merged.minimum is None else merged.minimum
            merged.minimum = min(low, part.minimum)
        if part.maximum is not None:
            high = part.maximum if merged.maximum is None else merged.maximum
            merged.maximum = max(high, part.maximum)
    return merged
