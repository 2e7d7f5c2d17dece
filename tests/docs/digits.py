"""What several pages' blocks work on: the digits, and models that need no training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from sparkdl import TorchClassifierModel
from sparkdl.data.plan import Column


def saved_model(
    module: nn.Module,
    column: str,
    shape: tuple[int, ...],
    *,
    factory: Callable[[], nn.Module] | None = None,
    num_classes: int = 10,
) -> Any:
    """A classifier that was not trained, ready to be saved or to predict."""
    dtype = "uint8" if column == "image" else "float32"
    columns = [Column(name=column, role="feature", dtype=dtype, shape=shape)]
    model = TorchClassifierModel(module.eval(), columns, num_classes=num_classes)
    model.module_factory = factory or type(module)
    return model
