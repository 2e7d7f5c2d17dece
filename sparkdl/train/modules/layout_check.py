"""Sees that a divided module computes what the whole one does, before the first step.

A layout by names cannot tell where a layer's output goes. One that divides the wrong layers
would mostly end in an error of shapes, but may also compute something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from sparkdl.data.batches import Batch, cut, sequential_batches
from sparkdl.data.collate import no_rows
from sparkdl.data.plan import TrainPlan
from sparkdl.data.source import ShardRows
from sparkdl.errors import CommunicationError, ConfigError
from sparkdl.sync.frozen_layers import evaluation_mode

_ROWS = 4
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest difference, as a part of the largest number, by the dtype that is computed with."""


def layout_check(
    module: nn.Module,
    shards: Sequence[ShardRows],
    plan: TrainPlan,
    device: torch.device,
    compute_dtype: torch.dtype | None,
) -> Callable[[], None]:
    """Compute some rows with the whole module; returns what compares the divided one with that.

    Args:
        module: where it computes; it is divided in place before the comparison.
        shards: training rows; ranks that compute together have the same.
        plan: of the run.
        device: where the module is.
        compute_dtype: of the divided module's layers; None: that which they have.

    Returns:
        A function, collective along the whole mesh, that raises a ConfigError if they differ.
    """
    batch = next(iter(sequential_batches(shards, plan)), None)
    if batch is None:
        (batch,) = cut(plan, {column.key: no_rows(column) for column in plan.columns}, [0])
    batch = batch.rows(0, min(_ROWS, batch.num_rows)).map(lambda value: value.to(device))
    expected = _computed(module, batch)

    def compare() -> None:
        remedy = (
            "let layers by columns be followed by layers by rows, with nothing between them but "
            "what treats each number by itself; and let the module take sizes from its tensors"
        )
        try:
            found = _computed(module, batch)
        except (CommunicationError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, ValueError, IndexError) as error:
            raise ConfigError(
                f"Mesh: the module cannot compute with this layout: {error}; {remedy}"
            ) from error
        for own, whole in zip(found, expected, strict=True):
            allowed = _TOLERANCE.get(compute_dtype or whole.dtype, 0.0)
            is_same = own.shape == whole.shape
            if is_same and whole.numel() and whole.is_floating_point():
                largest = max(1e-30, whole.abs().max().item())
                is_same = (own.to(whole.dtype) - whole).abs().max().item() <= allowed * largest
            if not is_same:
                raise ConfigError(
                    f"Mesh: with this layout the module computes something else; {remedy}"
                )

    return compare


def _computed(module: nn.Module, batch: Batch) -> list[torch.Tensor]:
    with torch.no_grad(), evaluation_mode(module):
        return [value.detach().clone() for value in _tensors(batch.arguments.call(module))]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a module's output."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
