"""Tells, as a fit begins, of a module that ``save`` will refuse.

A module whose class no file has can be saved as an exported program only. To export one takes
seconds. So that is tried where forward does what torch mostly refuses to export: it asks tensors
for their values, or calls operators that are not torch's own.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

from sparkdl.errors import ConfigError
from sparkdl.runtime.process import borrowed_generator
from sparkdl.serialization.saved_module import is_described, prepare_module, why_not_saved
from sparkdl.spark.fit.check_request import CheckedValues
from sparkdl.spark.fit.example import Example, is_compiled, own_copy

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)


def warn_if_not_saved(checked: CheckedValues, example: Example) -> None:
    """Say why the fitted module cannot be saved, if it can neither be described nor exported."""
    from torch import nn

    from sparkdl.serialization.example_inputs import example_of

    module, given = checked.module, checked.request.module
    factory = None if isinstance(given, nn.Module) else given
    is_plain = checked.weights is None and checked.config.parallelism is None
    if not is_plain or is_compiled(module) or is_described(module, factory):
        return
    if why_not_saved(module, factory) is not None:  # which was told before
        return
    tried = own_copy(module, None)
    if not _asks_for_values(tried, example):
        return
    features = [column for column in example.columns if column.role == "feature"]
    try:
        prepare_module(tried, factory, example_inputs=example_of(features), extra={})
    except ConfigError as error:
        logger.warning("the fitted model will predict, but save will refuse it: %s", error)


def _asks_for_values(module: nn.Module, example: Example) -> bool:
    """Return True if forward in evaluation asks for numbers, or calls operators of others."""
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    from sparkdl.sync.frozen_layers import evaluating

    own, found = torch.Tensor, list[Any]()

    class Functions(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func in (own.numpy, own.tolist, own.__array__):
                found.append(func)
            return func(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.namespace != "aten" or func is torch.ops.aten._local_scalar_dense.default:
                found.append(func)
            return func(*args, **(kwargs or {}))

    looking = (Functions(), Operators())  # type: ignore[no-untyped-call]
    # It ran before; what fails now fails as somebody looks.
    with (
        contextlib.suppress(Exception),
        torch.no_grad(),
        borrowed_generator(),
        looking[0],
        looking[1],
    ):
        example.of("feature", example.num_rows).call(evaluating(module))
    return bool(found)
