"""Arrow arrays as numpy arrays of one shape and dtype, and what is wrong with others.

Used while spooling and by ``transform``. A column is uniform when it has no null and all its rows
have the same shape; then the conversion is a view wherever Arrow's layout allows one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_LIST_TYPES = (pa.types.is_list, pa.types.is_large_list)
_NESTED_TYPES = (*_LIST_TYPES, pa.types.is_fixed_size_list)
BINARY_TYPES = (pa.types.is_binary, pa.types.is_large_binary)
_UNEVEN = "ragged"
"""In place of the shape of a row that has none: lists of different lengths are in it."""


class NotUniform(ValueError):
    """The array has nulls or rows of different shapes; `examine` says which.

    Attributes:
        findings: what is known of them already, or None.
    """

    def __init__(self, findings: Findings | None = None) -> None:
        super().__init__()
        self.findings = findings


def uniform(array: pa.Array) -> np.ndarray:
    """View a uniform Arrow array as ``(rows, *shape)`` in its own dtype.

    Raises:
        NotUniform: there are nulls, or rows of different shapes.
    """
    if array.null_count:
        raise NotUniform
    if any(is_type(array.type) for is_type in _LIST_TYPES):
        width = _common_width(array)
        inner = uniform(array.flatten())
        return inner.reshape(len(array), width, *inner.shape[1:])
    if pa.types.is_fixed_size_list(array.type):
        inner = uniform(array.flatten())
        return inner.reshape(len(array), array.type.list_size, *inner.shape[1:])
    if any(is_type(array.type) for is_type in BINARY_TYPES):
        return _bytes_matrix(array)
    return np.asarray(array.to_numpy(zero_copy_only=False))


def offsets(array: pa.Array) -> np.ndarray:
    """Offsets of a list or binary array that has rows, ``(rows + 1,)``, honouring a slice."""
    large = pa.types.is_large_list(array.type) or pa.types.is_large_binary(array.type)
    raw = np.frombuffer(array.buffers()[1], dtype=np.int64 if large else np.int32)
    return raw[array.offset : array.offset + len(array) + 1]


def _common_width(array: pa.Array) -> int:
    if len(array) == 0:
        return 0
    widths = np.diff(offsets(array))
    if (widths != widths[0]).any():
        raise NotUniform
    return int(widths[0])


def _bytes_matrix(array: pa.Array) -> np.ndarray:
    width = _common_width(array)
    data = array.buffers()[2] if len(array) else None
    if data is None or width == 0:
        return np.empty((len(array), width), dtype=np.uint8)
    start = int(offsets(array)[0])
    flat = np.frombuffer(data, dtype=np.uint8)[start : start + width * len(array)]
    return flat.reshape(len(array), width)


@dataclass
class Findings:
    """The faults of a column: counts that add up over batches and shards."""

    nulls: int = 0
    """Rows that are null or contain a null."""
    inner_nulls: int = 0
    """Rows among them that are not null themselves."""
    first_null: str | None = None
    shapes: Counter[str] = field(default_factory=Counter)
    """Rows per shape, only kept when a column was found not to be uniform."""
    first_of_shape: dict[str, str] = field(default_factory=dict)
    causes: Counter[str] = field(default_factory=Counter)
    """Rows per cause, such as an image that cannot be decoded."""
    first_of_cause: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Return True if any row cannot be used."""
        is_ragged = len(self.shapes) > 1 or _UNEVEN in self.shapes
        return self.nulls > 0 or is_ragged or bool(self.causes)

    def note_null(self, place: str) -> None:
        """Count a row that is null."""
        self.nulls += 1
        self.first_null = self.first_null or place

    def note_shape(self, shape: tuple[int | str, ...] | str, place: str, count: int = 1) -> None:
        """Count rows of a shape."""
        self.shapes[str(shape)] += count
        self.first_of_shape.setdefault(str(shape), place)

    def note_cause(self, cause: str, place: str) -> None:
        """Count a row that cannot be used, and say why."""
        self.causes[cause] += 1
        self.first_of_cause.setdefault(cause, place)

    def merge(self, other: Findings) -> None:
        """Add another part's findings; mostly there are none."""
        if not (other.nulls or other.shapes or other.causes):
            return
        self.nulls += other.nulls
        self.inner_nulls += other.inner_nulls
        self.first_null = self.first_null or other.first_null
        self.shapes.update(other.shapes)
        for shape, where in other.first_of_shape.items():
            self.first_of_shape.setdefault(shape, where)
        self.causes.update(other.causes)
        for cause, where in other.first_of_cause.items():
            self.first_of_cause.setdefault(cause, where)

    def message(self, name: str, remedy_of_shapes: str = "pad or drop them") -> str:
        """One sentence: what is wrong in column ``name``, how often, where first, what to do."""
        if self.causes:
            return f'column "{name}" has {self.faults()}; drop or mend them'
        if self.nulls:
            rows, remedy = f"{self.nulls} null row{'s' * (self.nulls > 1)}", "drop or fill them"
            if self.inner_nulls:
                rows = rows.replace("null row", "row") + " with a null"
                rows += f", in {self.inner_nulls} of them among the row's values"
                quoted = name if name.isidentifier() else f"`{name}`"
                remedy += (
                    f", as by where('not exists({quoted}, x -> x is null)'), or in pandas, whose "
                    f"NaN is null in Spark, by df[[not np.any(pd.isna(row)) for row in "
                    f"df[{name!r}]]]"
                )
            return f'column "{name}" has {rows} (first: {self.first_null}); {remedy}'
        uneven = self.shapes[_UNEVEN]
        if uneven:
            return (
                f'column "{name}" is ragged: {uneven} row{"s" * (uneven > 1)} with lists of '
                f"different lengths inside (first: {self.first_of_shape[_UNEVEN]}); pad or drop "
                "them"
            )
        usual, _ = self.shapes.most_common(1)[0]
        odd = {shape: count for shape, count in self.shapes.items() if shape != usual}
        example = next(iter(odd))
        return (
            f'column "{name}" is ragged: most rows have shape {usual}, but {sum(odd.values())} '
            f"do not (first: {self.first_of_shape[example]}, of shape {example}); "
            f"{remedy_of_shapes}"
        )

    def faults(self) -> str:
        """Say how many rows are bad for which cause, and how many are null, each with its first."""
        found = [
            f"{count} bad row{'s' * (count > 1)}: {cause} (first: {self.first_of_cause[cause]})"
            for cause, count in self.causes.most_common(3)
        ]
        others = self.causes.total() - sum(count for _, count in self.causes.most_common(3))
        if others:
            found.append(f"{others} for other causes")
        if self.nulls:
            found.append(f"{self.nulls} null (first: {self.first_null})")
        return "; ".join(found)

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return dict(vars(self))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Findings:
        """Inverse of `to_dict`."""
        counts = {name: Counter(values[name]) for name in ("shapes", "causes")}
        return cls(**{**values, **counts})


def examine(
    array: pa.Array, *, where: str = "", first_row: int = 0, is_sequence: bool = False
) -> Findings:
    """Find nulls and shapes row by row; slow, for columns that `uniform` refused.

    Args:
        array: the column's values.
        where: suffix of a row's description, such as `` of partition 2``.
        first_row: number of the array's first row.
        is_sequence: whether rows may differ in length.
    """
    findings = Findings()
    nulls = np.asarray(_has_null(array))
    findings.nulls = int(nulls.sum())
    findings.inner_nulls = findings.nulls - array.null_count
    if findings.nulls:
        findings.first_null = f"row {first_row + int(nulls.argmax())}{where}"
    for row in np.flatnonzero(~nulls).tolist():
        shape = _shape_of(array[row])
        if is_sequence and len(array[row]) and not isinstance(shape, str):
            shape = ("any length", *shape[1:])
        findings.note_shape(shape, f"row {first_row + row}{where}")
    return findings


def is_list(kind: pa.DataType) -> bool:
    """Return True if a type is one of lists, of whatever layout."""
    return any(is_type(kind) for is_type in _NESTED_TYPES)


def _has_null(array: pa.Array) -> np.ndarray:
    own = np.asarray(array.is_null().to_numpy(zero_copy_only=False))
    if not is_list(array.type):
        return own
    inner = _has_null(array.flatten())
    parents = pc.list_parent_indices(array).to_numpy(zero_copy_only=False)
    own = own.copy()
    own[parents[inner]] = True
    return own


def _shape_of(scalar: pa.Scalar) -> tuple[int | str, ...] | str:
    if is_list(scalar.type):
        try:
            inner = uniform(scalar.values)
        except NotUniform:
            return _UNEVEN
        return inner.shape
    if any(is_type(scalar.type) for is_type in BINARY_TYPES):
        return (len(scalar.as_buffer()),)
    return ()
