"""The kinds of input: how each is read from Arrow, and put together to a batch.

`KINDS` has those of the specifications in `sparkdl.inputs`, which know neither numpy nor Arrow. A
specification in a file of its own names its kind itself; docs/extending.md has an example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from sparkdl.data.arrow_arrays import Findings, NotUniform, offsets, uniform
from sparkdl.data.images import decode_rows, read_images
from sparkdl.data.plan import Column
from sparkdl.data.ragged import Array, Ragged, offsets_of
from sparkdl.inputs import Image, Sequence, Sparse, Specification, Tensor

if TYPE_CHECKING:
    import torch

Rows = Array | Ragged
"""``(rows, *shape)``, or rows that need different amounts of memory."""


class Kind(Protocol):
    """Converts the columns of one class of specification, and makes batches of them."""

    def read(self, values: Any, specification: Any, *, where: str, first_row: int) -> Rows:
        """Convert a column.

        Args:
            values: an Arrow array, or a numpy array that a transform gave.
            specification: the kind's own.
            where: suffix of a row's description, such as `` of partition 2``.
            first_row: number of the first row.

        Raises:
            NotUniform: rows cannot be used; says which, or leaves that to `examine`.
            WrongType: a transform gave another type than the kind can use.
        """

    def batch(self, rows: Ragged, column: Column, specification: Any) -> list[torch.Tensor]:
        """The tensors of a batch of ragged rows: the values, then the masks."""

    def example(self, num_rows: int, column: Column, specification: Any) -> list[torch.Tensor]:
        """Inputs of zeros, shaped like those of `batch`."""


class OwnKind(Kind, Protocol):
    """The kind that a specification has as its ``own_kind`` if it is not in `KINDS`.

    It travels to the executors with the class of the specification.
    """

    types: Items[Callable[[pa.DataType], bool]]
    """Tests such as ``pa.types.is_binary``, of which one must hold for the type that the column has
    in Arrow. The driver sees to it; such columns reach `read` as Spark has them."""
    dtype: str
    """numpy name of the dtype of what `read` returns."""


class TensorKind:
    """Rows of one shape."""

    def read(self, values: Any, specification: Tensor, *, where: str, first_row: int) -> Rows:
        dense = values if isinstance(values, np.ndarray) else uniform(values)
        require_numbers(dense)
        return dense

    def batch(self, rows: Ragged, column: Column, specification: Tensor) -> list[torch.Tensor]:
        raise AssertionError("tensors are never ragged")

    def example(self, num_rows: int, column: Column, specification: Any) -> list[torch.Tensor]:
        import torch

        return [torch.zeros((num_rows, *column.shape), dtype=getattr(torch, column.dtype))]


class ImageKind(TensorKind):
    """Images: decoded while they are read, or for each batch."""

    TYPES = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_struct)

    def read(self, values: Any, specification: Any, *, where: str, first_row: int) -> Rows:
        require(values, *self.TYPES)
        rows, _, _ = read_images(values, specification, where=where, first_row=first_row)
        return rows

    def batch(self, rows: Ragged, column: Column, specification: Any) -> list[torch.Tensor]:
        import torch

        return [torch.from_numpy(decode_rows(rows, specification, column.shape))]


class SequenceKind:
    """Rows of different lengths, which are padded in a batch."""

    def read(self, values: Any, specification: Sequence, *, where: str, first_row: int) -> Rows:
        rows = _sequence(values, specification)
        require_numbers(rows.parts[0])
        return rows

    def batch(self, rows: Ragged, column: Column, specification: Sequence) -> list[torch.Tensor]:
        return _padded(rows, column, specification)[: 1 + len(specification.masks)]

    def example(self, num_rows: int, column: Column, specification: Any) -> list[torch.Tensor]:
        import torch

        shape = (num_rows, max(1, column.longest), *column.shape)
        zeros = torch.zeros(shape, dtype=getattr(torch, column.dtype))
        masks = [torch.ones(shape[:2], dtype=torch.bool) for _ in specification.masks]
        return [zeros, *masks]


class SparseKind(TensorKind):
    """Vectors that stay sparse until the batch."""

    def read(self, values: Any, specification: Any, *, where: str, first_row: int) -> Rows:
        require(values, pa.types.is_struct)
        return _sparse(values, where=where, first_row=first_row)

    def batch(self, rows: Ragged, column: Column, specification: Any) -> list[torch.Tensor]:
        return [_vectors(rows, column, specification)]

    def example(self, num_rows: int, column: Column, specification: Any) -> list[torch.Tensor]:
        (zeros,) = super().example(num_rows, column, specification)
        return [zeros if specification.dense else zeros.to_sparse()]


KINDS: Mapping[type[Specification], Kind] = {
    Tensor: TensorKind(),
    Image: ImageKind(),
    Sequence: SequenceKind(),
    Sparse: SparseKind(),
}


def kind_of(specification: Specification) -> Kind:
    """Return the kind of the specification's class."""
    if specification.own_kind is not None:
        own: Kind = specification.own_kind
        return own
    return next(kind for known, kind in KINDS.items() if isinstance(specification, known))


class WrongType(TypeError):
    """A transform's result has a type that its specification cannot use."""


def require(values: Any, *is_type: Any) -> None:
    """Only a transform can give another type: columns were checked by the driver."""
    if not isinstance(values, pa.Array) or not any(check(values.type) for check in is_type):
        raise WrongType(str(getattr(values, "type", type(values).__name__)))


def require_numbers(values: Array) -> None:
    """Likewise of the values."""
    if values.dtype.kind not in "biuf" and len(values):
        raise WrongType("values that are no numbers")


def _sequence(values: Any, specification: Sequence) -> Ragged:
    if isinstance(values, np.ndarray):
        if values.ndim < 2:
            raise WrongType(f"an array of shape {values.shape}")
        width = np.full(len(values), values.shape[1], dtype=np.int64)
        flat = values.reshape(-1, *values.shape[2:])
        return _cut(Ragged((flat,), offsets_of(width), flat.shape[1:]), specification)
    require(values, pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    if values.null_count:
        raise NotUniform
    if pa.types.is_fixed_size_list(values.type):
        values = values.cast(pa.list_(values.type.value_type))
    flat = uniform(values.flatten())
    bounds = offsets(values).astype(np.int64) if len(values) else np.zeros(1, dtype=np.int64)
    shape = flat.shape[1:] if len(flat) else None
    return _cut(Ragged((flat,), bounds - bounds[0], shape), specification)


def _cut(rows: Ragged, specification: Sequence) -> Ragged:
    """The first ``max_length`` values of each row."""
    longest, lengths = specification.max_length, rows.lengths
    if longest is None or not len(rows) or lengths.max() <= longest:
        return rows
    place = np.arange(len(rows.parts[0])) - np.repeat(rows.offsets[:-1], lengths)
    kept = tuple(part[place < longest] for part in rows.parts)
    return Ragged(kept, offsets_of(np.minimum(lengths, longest)), rows.shape)


def _sparse(array: pa.StructArray, *, where: str, first_row: int) -> Ragged:
    """Rows of Spark ML's vectors (``type`` 0 is sparse, 1 dense), or of the same without type."""
    if array.null_count:
        raise NotUniform
    fields = {array.type.field(i).name: column for i, column in enumerate(array.flatten())}
    if not {"size", "indices", "values"} <= fields.keys():
        raise WrongType(str(array.type))
    values = fields["values"]
    if values.null_count or values.flatten().null_count:
        raise NotUniform
    lengths = _lengths(values)
    is_dense = np.asarray(fields["indices"].is_null())
    sizes = np.asarray(fields["size"].fill_null(-1))
    sizes = np.where(is_dense, lengths, sizes)
    flat = np.asarray(values.flatten())
    index = np.arange(len(flat)) - np.repeat(offsets_of(lengths)[:-1], lengths)
    given = fields["indices"].fill_null([]) if is_dense.any() else fields["indices"]
    is_odd = _lengths(given) != np.where(is_dense, 0, lengths)
    if is_odd.any():
        findings = Findings()
        for row in np.flatnonzero(is_odd).tolist():
            findings.note_cause("not as many indices as values", f"row {first_row + row}{where}")
        raise NotUniform(findings)
    index[np.repeat(~is_dense, lengths)] = np.asarray(given.flatten())
    _check_sparse(sizes, lengths, index, where=where, first_row=first_row)
    shape = (int(sizes[0]),) if len(sizes) else None
    return Ragged((index.astype(np.int32), flat), offsets_of(lengths), shape)


def _check_sparse(
    sizes: Array, lengths: Array, index: Array, *, where: str, first_row: int
) -> None:
    """Refuse rows of different sizes, and indices outside of them or out of order."""
    findings = Findings()
    if len(sizes) and (sizes != sizes[0]).any():
        for row, size in enumerate(sizes.tolist()):
            findings.note_shape((size,), f"row {first_row + row}{where}")
    owner = np.repeat(np.arange(len(lengths)), lengths)
    is_wrong = (index < 0) | (index >= sizes[owner])
    is_wrong[1:] |= (np.diff(index) <= 0) & (np.diff(owner) == 0)
    for row in np.unique(owner[is_wrong]).tolist():
        cause = "indices out of order or outside of the size"
        findings.note_cause(cause, f"row {first_row + row}{where}")
    if findings:
        raise NotUniform(findings)


def _lengths(array: pa.Array) -> Array:
    if not len(array):
        return np.zeros(0, dtype=np.int64)
    return np.diff(offsets(array)).astype(np.int64)


def _padded(rows: Ragged, column: Column, kind: Sequence) -> list[torch.Tensor]:
    """``(rows, longest, *inner)``, and which values are the rows' own."""
    import torch

    lengths = rows.lengths
    longest = max(1, int(lengths.max(initial=1)))
    mask = np.arange(longest) < lengths[:, None]
    shape = (len(rows), longest, *column.shape)
    padded = np.full(shape, kind.padding_value, dtype=column.dtype)
    padded[mask] = rows.own()[0].reshape(-1, *column.shape)
    return [torch.from_numpy(padded), torch.from_numpy(mask)]


def _vectors(rows: Ragged, column: Column, kind: Sparse) -> torch.Tensor:
    """``(rows, size)``."""
    import torch

    index, values = rows.own()
    owner = np.repeat(np.arange(len(rows)), rows.lengths)
    shape = (len(rows), *column.shape)
    if kind.dense:
        dense = np.zeros(shape, dtype=column.dtype)
        dense[owner, index] = values
        return torch.from_numpy(dense)
    places = torch.from_numpy(np.stack([owner, index.astype(np.int64)]))
    return torch.sparse_coo_tensor(
        places, torch.from_numpy(values.copy()), shape, is_coalesced=True, check_invariants=False
    )
