"""Samples of a torch dataset as the rows of an epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from sparkdl.data.column_rules import refuse_bad
from sparkdl.data.plan import Column, SpoolColumn
from sparkdl.data.ragged import Array
from sparkdl.data.shuffle import epoch_order
from sparkdl.errors import ConfigError, DataError
from sparkdl.inputs import Tensor

if TYPE_CHECKING:
    from sparkdl.data.collate import Rows
    from sparkdl.data.gather import Buffer

Fields = dict[str, Array]
"""Name of a part of a sample -> its values."""

_ARROW_TYPES: Mapping[str, pa.DataType] = {
    "float16": pa.float32(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
    "int8": pa.int8(),
    "uint8": pa.int16(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
}
"""Types under which Spark's rules for columns apply to tensors."""


def named(sample: Any, names: Sequence[str]) -> Fields:
    """A sample's parts by name.

    Raises:
        DataError: it is nothing of which tensors can be made.
        ConfigError: a tuple has more parts than there are names.
    """
    if isinstance(sample, Mapping):
        parts = {str(name): value for name, value in sample.items()}
    elif isinstance(sample, (tuple, list)):
        if len(sample) > len(names):
            raise ConfigError(
                f"samples have {len(sample)} parts, but names has {len(names)}: {list(names)}; "
                "name them all with DatasetSource(names=(...))"
            )
        parts = dict(zip(names, sample, strict=False))
    else:
        parts = {names[0]: sample}
    return {name: _array(value, name) for name, value in parts.items()}


def _array(value: Any, name: str) -> Array:
    import torch

    array = value
    if isinstance(value, torch.Tensor):
        array = value.detach().cpu()
        array = array.float() if value.dtype == torch.bfloat16 else array
    array = np.asarray(array)
    if array.dtype.name not in _ARROW_TYPES:
        raise DataError(
            f'part "{name}" of a sample is {type(value).__name__} of {array.dtype}, of which no '
            "column can be made; let the dataset give tensors, arrays or numbers of other types"
        )
    return array


def schema_of(sample: Fields) -> pa.Schema:
    """The columns, as Spark's rules see them, of samples like this one."""
    fields = []
    for name, value in sample.items():
        kind = _ARROW_TYPES[value.dtype.name]
        for _ in range(value.ndim):
            kind = pa.list_(kind)
        fields.append((name, kind))
    return pa.schema(fields)


def column_of(wanted: SpoolColumn, sample: Fields) -> Column:
    """A column as the first sample has it."""
    value = sample[wanted.name]
    dtype = wanted.dtype
    if wanted.role == "feature" and value.dtype.kind != "f":
        dtype = value.dtype.name  # Spark has no uint8
    return Column(
        name=wanted.name,
        role=wanted.role,
        dtype=dtype,
        shape=tuple(value.shape),
        specification=wanted.specification,
    )


def row_bytes(columns: Sequence[Column]) -> int:
    """Memory of a row of dense columns."""
    return sum(math.prod(c.shape) * np.dtype(c.dtype).itemsize for c in columns)


def check_kinds(columns: Sequence[SpoolColumn]) -> None:
    """Refuse specifications of columns that are tensors already.

    Raises:
        ConfigError: names the first.
    """
    for column in columns:
        if not isinstance(column.kind, Tensor) or column.kind.transform is not None:
            raise ConfigError(
                f'"{column.name}": this source gives tensors, of which only Tensor(...) without '
                "transform can be made; transform samples where they are read"
            )


@dataclass(frozen=True)
class Sampler:
    """Puts samples together to rows."""

    columns: Sequence[Column]
    wanted: Sequence[SpoolColumn]
    names: Sequence[str]
    """Names of the parts of samples that are tuples."""

    def rows(
        self, samples: Sequence[Any], places: Sequence[str], buffer: Buffer | None = None
    ) -> dict[str, Rows]:
        """The plan's columns of samples.

        Args:
            samples: as the dataset gives them.
            places: describe them for errors.
            buffer: memory to use.

        Raises:
            DataError: a sample is not like the first that the driver saw.
        """
        import torch

        parts = [named(sample, self.names) for sample in samples]
        found: dict[str, Rows] = {}
        for column, wanted in zip(self.columns, self.wanted, strict=True):
            shape, dtype = (len(parts), *column.shape), getattr(torch, column.dtype)
            rows = torch.empty(shape if buffer is None else (0, *column.shape), dtype=dtype)
            if buffer is not None:
                rows = buffer.rows(column.key, rows, len(parts))
            values = rows.numpy()
            for row, part in enumerate(parts):
                values[row] = _value(part, column, wanted, places[row])
            found[column.key] = rows
        return found


def _value(part: Fields, column: Column, wanted: SpoolColumn, place: str) -> Array:
    """A sample's value of a column, in the shape of the plan."""
    if wanted.name not in part:
        raise DataError(f'{place} has no part "{wanted.name}"; it has {sorted(part)}')
    value = part[wanted.name]
    known = column.shape if wanted.shape is None else wanted.shape
    if value.shape != tuple(known):
        raise DataError(
            f'column "{column.name}" is ragged: {place} has shape {value.shape}, others '
            f"{tuple(known)}; pad samples in the dataset"
        )
    if not (wanted.as_classes or _fits(value, np.dtype(column.dtype))):
        raise DataError(
            f'column "{column.name}" is {column.dtype}, which cannot hold the {value.dtype} '
            f"of {place}; let the dataset give all samples one dtype"
        )
    refuse_bad(value[None], wanted, lambda _: place)
    return value.reshape(column.shape)


def _fits(value: Array, dtype: np.dtype[Any]) -> bool:
    """Return True if values keep what they are in another dtype; floating ones may be rounded."""
    if np.can_cast(value.dtype, dtype, "safe") or dtype.kind == "f":
        return True
    if value.dtype.kind not in "iu" or dtype.kind not in "iu":
        return False
    about = np.iinfo(dtype)
    return not value.size or bool(about.min <= value.min() and value.max() <= about.max)


Make = Callable[[int, int], Any]
"""Makes the dataset of a shard for an epoch and a seed."""
Take = Callable[[int, int], tuple[list[Any], list[str]]]
"""The samples from one place of the epoch to another, and what errors call each."""


@dataclass(frozen=True)
class SampledRows:
    """A shard's samples of a dataset; see `source.ShardRows`."""

    sampler: Sampler
    num_rows: int
    taker: Callable[..., Take]
    """Makes a `Take` of seed and epoch, and of ``is_shuffled``."""

    def epoch(self, seed: int, epoch: int, *, num_together: int | None = None) -> SampledEpoch:
        if num_together is not None:
            raise ConfigError("groupByLength needs a DataFrame; a dataset's lengths are not known")
        return SampledEpoch(self.sampler, self.taker(seed, epoch))

    def in_order(self, batch_size: int) -> Iterator[Mapping[str, Rows]]:
        take = self.taker(0, 0, is_shuffled=False)
        for start in range(0, self.num_rows, batch_size):
            samples, places = take(start, min(start + batch_size, self.num_rows))
            yield self.sampler.rows(samples, places)


def by_index(make: Make, indices: Array, fingerprint: str) -> Callable[..., Take]:
    """Takes the samples of a map-style dataset at ``indices``, in an order of ours."""

    def taker(seed: int, epoch: int, *, is_shuffled: bool = True) -> Take:
        order = np.arange(len(indices))
        if is_shuffled:
            order = epoch_order(seed, epoch, fingerprint, len(indices))
        dataset = make(epoch, seed)

        def take(start: int, stop: int) -> tuple[list[Any], list[str]]:
            chosen = indices[order[start:stop]].tolist()
            if hasattr(dataset, "__getitems__"):  # torch's way to ask for several at once
                samples = list(dataset.__getitems__(chosen))
            else:
                samples = [dataset[index] for index in chosen]
            return samples, [f"sample {index}" for index in chosen]

        return take

    return taker


def as_given(make: Make, shard_id: int, num_rows: int) -> Callable[..., Take]:
    """Takes the samples as an iterable dataset gives them, whatever order is asked for."""

    def given(seed: int, epoch: int) -> Iterator[Any]:
        count = 0
        for sample in islice(iter(make(epoch, seed)), num_rows):
            count += 1
            yield sample
        if count < num_rows:
            raise DataError(
                f"the dataset of shard {shard_id} gave {count} samples in epoch {epoch + 1}, but "
                f"{num_rows} are wanted; correct its __len__ or num_rows"
            )

    def taker(seed: int, epoch: int, *, is_shuffled: bool = True) -> Take:
        samples = given(seed, epoch)
        reached = 0

        def take(start: int, stop: int) -> tuple[list[Any], list[str]]:
            nonlocal reached
            for _ in islice(samples, start - reached):  # used before the run was resumed
                pass
            reached = stop
            taken = list(islice(samples, stop - start))
            return taken, [f"sample {place}" for place in range(start, stop)]

        return take

    return taker


@dataclass(frozen=True)
class SampledEpoch:
    """See `source.EpochRows`."""

    sampler: Sampler
    take: Take

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.sampler.columns)

    def read(self, start: int, stop: int, buffer: Buffer) -> dict[str, Rows]:
        """Ask the dataset for the samples."""
        samples, places = self.take(start, stop) if stop > start else ([], [])
        return self.sampler.rows(samples, places, buffer)

    def close(self) -> None:
        """Nothing is held."""
