"""An executor turns Arrow batches of features into a module's outputs.

Every Python worker unpacks a module once and keeps it, because Spark reuses the process for later
tasks.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from torch import nn

from sparkdl.data.collate import Arguments, arguments
from sparkdl.data.collate import Rows as Tensors
from sparkdl.data.column_readers import read_trained
from sparkdl.data.kinds import Rows
from sparkdl.data.plan import Column
from sparkdl.data.ragged import Ragged, gather
from sparkdl.errors import ConfigError
from sparkdl.inference.outputs import Forward, Output, check_rows, pick
from sparkdl.inputs import Image
from sparkdl.runtime.hardware import choose_device
from sparkdl.runtime.process import (
    default_dtype,
    spared_collector,
    torch_threads,
    tuned_allocator,
)
from sparkdl.serialization.program.imported_values import ProgramValues
from sparkdl.serialization.program.process_settings import settings_of_task
from sparkdl.serialization.stored_module import WeightsAt
from sparkdl.serialization.travel.packed_module import PackedModule, unpack
from sparkdl.sync.frozen_layers import evaluating

Make = Literal["value", "array", "nested", "number", "class", "logits", "probability"]

MODULES_PER_WORKER = 3
"""Modules that a Python worker keeps; a pipeline or a comparison of a few models needs no more."""
FLUSH_BYTES = 32 << 20
"""Outputs are handed to Spark when they reach this size, or with the record batch's last row."""
MOST_TOGETHER = 32
"""Forward passes whose rows are sorted by length together, if their outputs are not larger."""
_MOST_IN_A_LIST = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One flat column that a task gives: a tensor, and what is made of it."""

    name: str
    output: Output
    """Output with the tensor's key; its form plays no part any more."""
    make: Make
    """A number or array as `outputs.Output` describes; ``number``: the same as a double; the
    likeliest ``class`` of logits, the ``logits`` of all classes, their ``probability``."""
    arrow_type: pa.DataType


@dataclass(frozen=True, kw_only=True)
class ModuleTask:
    """All that a task needs to run a module on prepared inputs; picklable, travels with the UDF."""

    values: ProgramValues = field(default_factory=ProgramValues)
    """Values that the program changed in modules that workers import; unpickled before all else."""
    digest: str
    fetch: Callable[[], PackedModule]
    """Gives the packed module; called only by workers that do not have it yet."""
    columns: tuple[Column, ...]
    """The inputs, as the module was trained on them."""
    batch_size: int
    device: str
    forward: Forward
    weights: WeightsAt | None = None
    """Place of the weights that the packed module lacks; None: it has them."""
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    """Default dtype of the program, for what forward makes."""


@dataclass(frozen=True, kw_only=True)
class PredictTask(ModuleTask):
    """All that a task of ``transform`` needs to know."""

    leaves: tuple[Leaf, ...]
    """Fields of the struct to give."""


_modules: OrderedDict[tuple[str, str], nn.Module] = OrderedDict()


def load(task: ModuleTask, device: torch.device) -> nn.Module:
    """The module on ``device``, from this process's cache where possible."""
    key = (task.digest, str(device))
    module = _modules.pop(key, None)
    if module is None:
        packed = task.fetch()
        read = None if task.weights is None else task.weights.open().read
        module = evaluating(unpack(packed.skeleton, packed.tensors, read))
        module.to(device)
    _modules[key] = module
    while len(_modules) > MODULES_PER_WORKER:
        _modules.popitem(last=False)
    return module


def predict(batches: Iterator[Sequence[pa.Array]], task: PredictTask) -> Iterator[pa.Array]:
    """Predict record batch by record batch; runs in the Python worker of a task.

    A batch is one array per input column. It gives struct arrays with the fields that ``task``
    names, together as long as the batch. Sequences of similar length are padded together. DataError
    for a null, or a row of another shape than the module was trained on.
    """
    value_bytes = math.inf
    """Bytes of output for each value of a sequence, as they were last."""
    with ready(task) as (module, device):
        for arrays in batches:
            inputs, start = Inputs(arrays, task.columns), 0
            pieces: list[pa.Array] = []  # Spark only asks that all together are as long
            num_bytes = 0
            while start < inputs.num_rows:
                rows = inputs.together(start, FLUSH_BYTES / value_bytes, task.batch_size)
                start = int(rows[-1]) + 1
                order = inputs.by_length(rows)
                found = pa.concat_arrays(
                    [
                        predicted(
                            module, inputs.run(order[first : first + task.batch_size], device), task
                        )
                        for first in range(0, len(order), task.batch_size)
                    ]
                )
                if order is not rows:
                    found = found.take(pa.array(np.argsort(order)))
                if inputs.lengths is not None:
                    value_bytes = max(1, found.nbytes) / max(1, int(inputs.lengths[rows].sum()))
                pieces.append(found)
                num_bytes += found.nbytes
                if num_bytes >= FLUSH_BYTES:
                    yield pa.concat_arrays(pieces)
                    pieces, num_bytes = [], 0
            if pieces:
                yield pa.concat_arrays(pieces)


def predicted(module: nn.Module, run: RowRange, task: PredictTask) -> pa.Array:
    """Return what ``task`` wants of the module for the rows of a run; null for skipped rows."""
    if run.arguments is None:
        return pa.nulls(
            run.num_rows, pa.struct([(leaf.name, leaf.arrow_type) for leaf in task.leaves])
        )
    found = task.forward.outputs(module, run.arguments)
    return run.spread(to_struct(found, run.arguments.num_rows, task.leaves))


@contextlib.contextmanager
def ready(task: ModuleTask) -> Iterator[tuple[nn.Module, torch.device]]:
    """The module and its device: the GPU that Spark assigned to this task, or the CPU.

    Threads, allocator and torch are set up for inference; settings of torch and numpy that come
    with the task, or that the module changes, end with it. ClusterError if ``cuda`` was asked for
    and torch finds none here.
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    gpu = context.resources().get("gpu") if context else None
    partition = context.partitionId() if context else 0
    device = choose_device(task.device, gpu.addresses if gpu else [], partition, os.environ)
    cpus = context.cpus() if context else torch.get_num_threads()
    spared = spared_collector() if context else contextlib.nullcontext()
    settings = torch_threads(cpus), default_dtype(task.default_dtype)
    with settings_of_task(), spared, settings[0], settings[1], tuned_allocator(), torch.no_grad():
        yield load(task, device), device


@dataclass(frozen=True)
class RowRange:
    """Neighbouring rows, as ``forward`` takes them."""

    arguments: Arguments | None
    """Arguments for the rows that are kept; None if none are."""
    num_rows: int
    """All rows of the run."""
    kept: np.ndarray | None = None
    """True for rows that are not skipped, bool ``(rows,)``; None: all are kept."""

    def chosen(self, values: Tensors) -> Tensors:
        """Return the values of the rows that are kept, out of one for each row."""
        return values if self.kept is None else _where(values, self.kept)

    def spread(self, values: pa.Array) -> pa.Array:
        """Return a value for each row, out of one for each kept row; null where it is skipped."""
        if self.kept is None:
            return values
        return values.take(pa.array(np.cumsum(self.kept) - 1, mask=~self.kept))


class Inputs:
    """The inputs of a record batch, one array per column; images are decoded when they are wanted.

    DataError for a null, or a row of another shape than the module was trained on.
    """

    def __init__(self, arrays: Sequence[pa.Array], columns: Sequence[Column]) -> None:
        """Read what may be read at once."""
        self.num_rows = len(arrays[0])
        self._columns = columns
        self._arrays = arrays
        self._read = [
            # Decoded, images need many times their bytes.
            None if isinstance(column.kind, Image) else _tensor(read_trained(array, column)[0])
            for array, column in zip(arrays, columns, strict=True)
        ]

    @functools.cached_property
    def lengths(self) -> np.ndarray | None:
        """Length of each row's longest sequence; None where nothing is padded."""
        padded = [
            read.lengths
            for read, column in zip(self._read, self._columns, strict=True)
            if isinstance(read, Ragged) and column.kind.num_parts == 1
        ]
        if not padded or any(read is None for read in self._read):
            return None
        longest: np.ndarray = np.maximum.reduce(padded)
        return longest

    def together(self, start: int, most_values: float, batch_size: int) -> np.ndarray:
        """The rows from ``start`` on that are sorted together: whole batches.

        One of them, or several whose sequences have at most so many values.
        """
        count = batch_size
        if self.lengths is not None:
            sums = np.cumsum(self.lengths[start : start + MOST_TOGETHER * batch_size])
            fitting = int(np.searchsorted(sums, most_values, side="right"))
            count = max(batch_size, fitting - fitting % batch_size)
        return np.arange(start, min(start + count, self.num_rows))

    def by_length(self, rows: np.ndarray) -> np.ndarray:
        """The same rows, the shortest sequences first; as they are where nothing is padded."""
        if self.lengths is None:
            return rows
        lengths = self.lengths[rows]
        return rows if lengths.min() == lengths.max() else rows[np.argsort(lengths, kind="stable")]

    def run(self, rows: np.ndarray, device: torch.device) -> RowRange:
        """The arguments of ``forward`` for some rows."""
        found = [self._rows(number, rows) for number in range(len(self._columns))]
        masks = [usable for _, usable in found if usable is not None]
        kept = np.logical_and.reduce(masks) if masks else None
        if kept is not None and not kept.any():
            return RowRange(None, len(rows), kept)
        values = [
            value if kept is None else _where(value, kept if usable is None else kept[usable])
            for value, usable in found
        ]
        given = arguments(self._columns, values).to(device)
        return RowRange(given, len(rows), None if kept is None or kept.all() else kept)

    def _rows(self, number: int, rows: np.ndarray) -> tuple[Tensors, np.ndarray | None]:
        """Those of a column that can be used, and which these are; None: all."""
        read, first, last = self._read[number], int(rows[0]), int(rows[-1])
        is_slice = last - first + 1 == len(rows) and bool((np.diff(rows) == 1).all())
        if read is None:
            assert is_slice
            part = self._arrays[number].slice(first, len(rows))
            values, usable = read_trained(part, self._columns[number], first_row=first)
            return _tensor(values), usable
        if is_slice:
            return read[first : last + 1], None
        if isinstance(read, Ragged):
            return gather([read], rows), None
        return read[torch.from_numpy(rows)], None


def runs(
    arrays: Sequence[pa.Array], columns: Sequence[Column], batch_size: int, device: torch.device
) -> Iterator[RowRange]:
    """The inputs of a record batch in runs of at most ``batch_size`` rows; raises as `Inputs`."""
    inputs = Inputs(arrays, columns)
    for start in range(0, inputs.num_rows, batch_size):
        yield inputs.run(np.arange(start, min(start + batch_size, inputs.num_rows)), device)


def _where(rows: Tensors, mask: np.ndarray) -> Tensors:
    return rows.where(mask) if isinstance(rows, Ragged) else rows[torch.from_numpy(mask)]


def _tensor(rows: Rows) -> Tensors:
    if isinstance(rows, Ragged):
        return rows
    with warnings.catch_warnings():
        # Arrow's buffers are read-only. Nobody else reads this batch, so even a module that
        # works in place does no harm.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(rows)


def to_struct(
    found: Mapping[str | None, Any], num_rows: int, leaves: Sequence[Leaf]
) -> pa.StructArray:
    """Make the struct that the UDF returns out of what `Forward.outputs` gave.

    ConfigError if an output has no row per sample, or not one number where one was promised.
    """
    tensors: dict[Output, torch.Tensor] = {}
    for output in {leaf.output for leaf in leaves}:
        value = pick(found[output.layer], output.path, output)
        tensors[output] = check_rows(value, num_rows, output).detach().cpu()
    arrays = [to_arrow(_MAKERS[leaf.make](tensors[leaf.output]), leaf) for leaf in leaves]
    fields = [pa.field(leaf.name, leaf.arrow_type) for leaf in leaves]
    return pa.StructArray.from_arrays(arrays, fields=fields)


def _one_number(output: torch.Tensor) -> torch.Tensor:
    if output.numel() != len(output):
        raise ConfigError(
            f"the module returned shape {tuple(output.shape)}; this model predicts one number "
            f"per row: the shape must be (rows,) or (rows, 1)"
        )
    return output.reshape(len(output))


def _matrix(output: torch.Tensor) -> torch.Tensor:
    """``(rows, width)``; further dimensions flattened in row-major order."""
    return output[:, None].flatten(1)  # which a reshape to -1 cannot do without rows


def likeliest_class(output: torch.Tensor) -> torch.Tensor:
    """Class numbers ``(rows,)``; a single logit per row tells class 1 from class 0."""
    logits = _matrix(output)
    return (logits[:, 0] > 0).long() if logits.shape[1] == 1 else logits.argmax(dim=1)


def predicted_class(output: torch.Tensor) -> torch.Tensor:
    """Class numbers in float64, ``(rows,)``; NaN where a probability is NaN, and so tells nothing.

    That is where an output is NaN, or, of several, the largest one infinite.
    """
    unknown = class_probabilities(output).isnan().any(dim=1)
    return likeliest_class(output).double().masked_fill_(unknown, math.nan)


def class_logits(output: torch.Tensor) -> torch.Tensor:
    """Logits of all classes, ``(rows, classes)`` in float64; a single logit stands for two."""
    logits = _matrix(output).double()
    return torch.cat([-logits, logits], dim=1) if logits.shape[1] == 1 else logits


def raw_predictions(output: torch.Tensor) -> torch.Tensor:
    """Logits as Spark ML keeps them, ``(rows, classes)`` in float64.

    Of two classes they are less their mean, which changes no probability: Spark's
    BinaryClassificationEvaluator ranks rows by the second one alone.
    """
    logits = class_logits(output)
    return logits - logits.mean(1, keepdim=True) if logits.shape[1] == 2 else logits


def class_probabilities(output: torch.Tensor) -> torch.Tensor:
    """Probabilities of all classes, ``(rows, classes)`` in float64."""
    logits, is_single = class_logits(output), _matrix(output).shape[1] == 1
    return torch.sigmoid(logits) if is_single else torch.softmax(logits, dim=1)


_MAKERS: dict[Make, Callable[[torch.Tensor], torch.Tensor]] = {
    "value": _one_number,
    "number": _one_number,
    "array": _matrix,
    "nested": lambda output: output,
    "class": predicted_class,
    "logits": raw_predictions,
    "probability": class_probabilities,
}


def to_arrow(values: torch.Tensor, leaf: Leaf) -> pa.Array:
    """A column of numbers ``(rows,)``, or of lists in as many levels as there are dimensions.

    ConfigError if there are more numbers than an Arrow list can hold, or other dimensions than the
    type has.
    """
    if values.numel() > _MOST_IN_A_LIST:
        raise ConfigError(
            f"{leaf.output} has {values.numel():,} numbers for {len(values)} rows, more than one "
            f"Arrow array holds; lower batchSize"
        )
    element = leaf.arrow_type
    while pa.types.is_list(element):
        element = element.value_type
    flat = values.reshape(-1)
    if flat.dtype == torch.bfloat16:
        flat = flat.float()  # numpy has no bfloat16
    array = pa.array(flat.contiguous().numpy().astype(element.to_pandas_dtype(), copy=False))
    for dim in range(values.ndim - 1, 0, -1):
        num_lists, width = math.prod(values.shape[:dim]), values.shape[dim]
        offsets = pa.array(np.arange(num_lists + 1, dtype=np.int32) * np.int32(width))
        array = pa.ListArray.from_arrays(offsets, array)
    if array.type != leaf.arrow_type:
        raise ConfigError(
            f"{leaf.output} has shape {tuple(values.shape)} here, but another number of dimensions "
            f"when the module was run on zeros; let it give the same for every batch"
        )
    return array
