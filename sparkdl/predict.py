"""How does an executor turn Arrow batches of features into predictions?

Every Python worker unpacks a module once and keeps it, because Spark reuses the process for later
tasks.
"""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from torch import nn

from sparkdl.config import DEVICES
from sparkdl.data.arrow import to_numpy
from sparkdl.device import choose_device
from sparkdl.errors import ConfigError
from sparkdl.packing import PackedModule, unpack
from sparkdl.plan import Column
from sparkdl.process import torch_threads, tuned_allocator

Kind = Literal["value", "array", "classes"]

MODULES_PER_WORKER = 3
"""Modules that a Python worker keeps; a pipeline or a comparison of a few models needs no more."""


@dataclass(frozen=True, kw_only=True)
class PredictTask:
    """All that a task needs to know; picklable, travels with the UDF."""

    digest: str
    fetch: Callable[[], PackedModule]
    """Gives the packed module; called only by workers that do not have it yet."""
    columns: tuple[Column, ...]
    """The inputs, as the module was trained on them."""
    batch_size: int
    device: str
    kind: Kind
    """What becomes of the module's output: one number, an array, or classes."""
    fields: tuple[tuple[str, pa.DataType], ...]
    """Fields of the struct to give: ``prediction``, ``rawPrediction``, ``probability``."""


_modules: OrderedDict[tuple[str, str], nn.Module] = OrderedDict()


def _load(task: PredictTask, device: torch.device) -> nn.Module:
    """The module on ``device``, from this process's cache where possible."""
    key = (task.digest, str(device))
    module = _modules.pop(key, None)
    if module is None:
        module = unpack(task.fetch()).eval().to(device)
    _modules[key] = module
    while len(_modules) > MODULES_PER_WORKER:
        _modules.popitem(last=False)
    return module


def predict(batches: Iterator[Sequence[pa.Array]], task: PredictTask) -> Iterator[pa.Array]:
    """Predict record batch by record batch; runs in the Python worker of a task.

    Args:
        batches: one array per input column.
        task: what to do.

    Yields:
        A struct array as long as the batch, with the fields that ``task`` names.

    Raises:
        DataError: a null, or a row of another shape than the module was trained on.
    """
    device = task_device(task.device)
    with torch_threads(_task_cpus()), tuned_allocator(), torch.inference_mode():
        module = _load(task, device)
        for arrays in batches:
            inputs = [
                to_numpy(array, column.dtype, column.shape, name=column.name)
                for array, column in zip(arrays, task.columns, strict=True)
            ]
            yield to_struct(_forward(module, inputs, task.batch_size, device), task)


def _forward(
    module: nn.Module, inputs: list[np.ndarray], batch_size: int, device: torch.device
) -> torch.Tensor:
    """Run the module over rows in runs of ``batch_size``; the outputs joined, on the CPU."""
    tensors = [_tensor(values) for values in inputs]
    num_rows = len(inputs[0])
    outputs = []
    for start in range(0, max(num_rows, 1), batch_size):
        batch = [tensor[start : start + batch_size].to(device) for tensor in tensors]
        output = module(*batch)
        check_output(output, len(batch[0]))
        outputs.append(output.cpu())
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def check_output(output: Any, num_rows: int) -> None:
    """Refuse an output that is not one tensor with a row per sample.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(output, torch.Tensor):
        raise ConfigError(
            f"the module returned a {type(output).__name__}; transform needs one tensor with a "
            f"row per sample: let the module return that in eval mode"
        )
    if output.ndim == 0 or len(output) != num_rows:
        raise ConfigError(
            f"the module returned a tensor of shape {tuple(output.shape)} for {num_rows} samples; "
            f"transform needs one row per sample"
        )


def _tensor(values: np.ndarray) -> torch.Tensor:
    with warnings.catch_warnings():
        # Arrow's buffers are read-only. Nobody else reads this batch, so even a module that
        # works in place does no harm.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(values)


def to_struct(output: torch.Tensor, task: PredictTask) -> pa.StructArray:
    """Make the struct that the UDF returns out of the module's output ``(rows, ...)``."""
    if task.kind == "classes":
        columns = _classes(output, {name for name, _ in task.fields})
    elif task.kind == "value":
        columns = {"prediction": _one_number(output)}
    else:
        columns = {"prediction": _matrix(output)}
    arrays = [_arrow(columns[name], data_type) for name, data_type in task.fields]
    fields = [pa.field(name, data_type) for name, data_type in task.fields]
    return pa.StructArray.from_arrays(arrays, fields=fields)


def _classes(output: torch.Tensor, wanted: set[str]) -> dict[str, torch.Tensor]:
    """Class index, logits and probabilities; a single logit stands for two classes."""
    logits = _matrix(output).to(torch.float64)
    if logits.shape[1] == 1:
        logits = torch.cat([-logits, logits], dim=1)
        probability = torch.sigmoid(logits)
    else:
        probability = torch.softmax(logits, dim=1) if "probability" in wanted else logits
    return {
        "prediction": logits.argmax(dim=1),
        "rawPrediction": logits,
        "probability": probability,
    }


def _one_number(output: torch.Tensor) -> torch.Tensor:
    if output.numel() != len(output):
        raise ConfigError(
            f"the module returned shape {tuple(output.shape)}; this model predicts one number "
            f"per row: the shape must be (rows,) or (rows, 1)"
        )
    return output.reshape(len(output))


def _matrix(output: torch.Tensor) -> torch.Tensor:
    """``(rows, width)``; further dimensions flattened in row-major order."""
    return output.reshape(len(output), -1) if len(output) else output.reshape(0, 1)


def _arrow(values: torch.Tensor, data_type: pa.DataType) -> pa.Array:
    """A column of numbers or of lists."""
    if pa.types.is_list(data_type):
        rows, width = values.shape
        offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * np.int32(width))
        flat = _arrow(values.reshape(-1), data_type.value_type)
        return pa.ListArray.from_arrays(offsets, flat, type=data_type)
    if values.dtype == torch.bfloat16:
        values = values.float()  # numpy has no bfloat16
    return pa.array(values.contiguous().numpy().astype(data_type.to_pandas_dtype(), copy=False))


def checked_device(device: str) -> str:
    """Return ``device`` if it is a known choice; called on the driver.

    Raises:
        ConfigError: it is not.
    """
    if device not in DEVICES:
        raise ConfigError(f"device must be one of {DEVICES}; received {device!r}")
    return device


def task_device(device: str) -> torch.device:
    """The device of this task: the GPU that Spark assigned to it, or the CPU.

    Raises:
        ClusterError: ``cuda`` was asked for and torch finds none here.
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    gpu = context.resources().get("gpu") if context else None
    partition = context.partitionId() if context else 0
    return choose_device(device, gpu.addresses if gpu else [], partition, os.environ)


def _task_cpus() -> int:
    from pyspark import TaskContext

    context = TaskContext.get()
    return context.cpus() if context else torch.get_num_threads()


def udf_function(task: PredictTask) -> Callable[..., Iterator[pa.Array]]:
    """The function of an iterator ``arrow_udf`` that predicts as ``task`` says.

    Spark tells the kind of a UDF by its type hints: a UDF of one column gets an array per batch,
    of several columns a tuple of arrays.
    """

    def predict_with_torch(batches: Iterator[pa.Array]) -> Iterator[pa.Array]:
        return predict(((array,) for array in batches), task)

    def predict_with_torch_many(
        batches: Iterator[tuple[pa.Array, ...]],
    ) -> Iterator[pa.Array]:
        return predict(batches, task)

    return predict_with_torch if len(task.columns) == 1 else predict_with_torch_many
