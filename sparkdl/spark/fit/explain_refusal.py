"""Why a module did not take rows of zeros, in words that speak of the user's rows."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkdl.data.plan import Column
from sparkdl.inputs import Sequence

if TYPE_CHECKING:
    from torch import nn

ROWS = 2
"""Rows of zeros in a dry run."""
_OF_ROWS = re.compile(rf"(\((?=\d+x)|input(?: of size:? ?)?\[|size: \[){ROWS}(?=x|, |\])")
"""Where torch's messages have the number of rows."""
_TORCHS = (RuntimeError, IndexError, NotImplementedError, TypeError)
"""What torch raises if it cannot use a tensor; other errors are the module's own."""


@dataclass(frozen=True)
class FailedLayer:
    """The innermost layer that was running when a module failed."""

    name: str
    """Its path in the module, empty for the module itself."""
    layer: nn.Module
    given: str
    """The tensors that it got."""

    @property
    def is_torchs(self) -> bool:
        """True if it is a layer of torch's own."""
        return type(self.layer).__module__.startswith("torch.nn.")


def failed_layer(error: BaseException, module: nn.Module) -> FailedLayer | None:
    """The layer in whose ``forward`` an error was raised, by the error's traceback."""
    from torch import nn

    names, found = {part: name for name, part in module.named_modules()}, None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code, values = frame.f_code, frame.f_locals
        layer = values.get("self")
        if code.co_name == "forward" and isinstance(layer, nn.Module) and layer in names:
            arguments = [values.get(name) for name in code.co_varnames[1 : code.co_argcount]]
            given = ", ".join(shown for value in arguments if (shown := _shown_tensor(value)))
            found = FailedLayer(names[layer], layer, given)
    return found


def _shown_tensor(value: object) -> str:
    import torch

    from sparkdl.train.objective.loss import shape_text

    if not isinstance(value, torch.Tensor):
        return ""
    shape: list[object] = list(value.shape)
    if shape and value.shape[0] == ROWS:
        shape[0] = "batch"
    return f"{str(value.dtype).removeprefix('torch.')} {shape_text(shape)}"


def refusal(error: Exception, module: nn.Module, features: Items[Column]) -> str:
    """One sentence: what the module got, what failed in which layer, and what to do."""
    shown = ", ".join(_shown_input(column) for column in features)
    failed = failed_layer(error, module)
    message = _OF_ROWS.sub(r"\1batch", str(error))
    what = f"{type(error).__name__}: {message}"
    if failed is not None and failed.is_torchs and failed.given:
        place = f"layer {failed.name}, " * bool(failed.name)
        what = f"{place}{failed.layer}, got {failed.given}: {message}"
    if not isinstance(error, _TORCHS):
        return f"the module's forward failed on the features ({shown}): {what}; correct forward"
    whole = [f'"{c.name}" ({c.dtype})' for c in features if not c.dtype.startswith("float")]
    cast = f"call .float() on {', '.join(whole)} in forward, " * bool(whole)
    return (
        f"the module cannot take the features ({shown}): {what}; {cast}adapt the module, or set "
        "inputShape"
    )


def _shown_input(column: Column) -> str:
    from sparkdl.train.objective.loss import shape_text

    is_sequence = isinstance(column.kind, Sequence)
    shape = ("batch", *(("length",) * is_sequence), *column.shape)
    name = "" if column.argument is None else f"{column.argument}="
    return f'{name}"{column.name}" {column.dtype} {shape_text(shape)}'
