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

_NUMBERS = (1, 2, 3, 64)
"""Numbers of rows for which a module should do the same."""


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
    if not _is_hard_to_export(tried, example):
        return
    features = [column for column in example.columns if column.role == "feature"]
    try:
        prepare_module(tried, factory, example_inputs=example_of(features), extra={})
    except ConfigError as error:
        logger.warning("the fitted model will predict, but save will refuse it: %s", error)


def _is_hard_to_export(module: nn.Module, example: Example) -> bool:
    """Return True if forward in evaluation is of a kind that torch may refuse to export."""
    import torch

    from sparkdl.serialization.example_inputs import InputExample
    from sparkdl.sync.frozen_layers import evaluating

    arguments = example.of("feature", example.num_rows)
    given = InputExample(arguments, (False,) * len(arguments.values))
    looks, calls = [_Look() for _ in _NUMBERS], []
    for num_rows, look in zip(_NUMBERS, looks, strict=True):
        # It ran before; what fails now wants several rows, or fails as somebody looks.
        with contextlib.suppress(Exception), torch.no_grad(), borrowed_generator(), look:
            given.rows(num_rows).arguments.call(evaluating(module))
            calls.append(look.calls)
    return any(look.asks for look in looks) or any(one != calls[0] for one in calls)


class _Look:
    """What a module does while this is entered, as far as others than torch have a say in it."""

    def __init__(self) -> None:
        self.asks = False
        """Whether it asks tensors for their values, or calls operators that are not torch's own."""
        self.calls: list[tuple[Any, ...]] = []
        """Operators, with the number of their results and the numbers that torch takes for
        constants. Those of a loop over rows are others for another number of rows."""
        self._modes = contextlib.ExitStack()

    def __enter__(self) -> None:
        import torch
        from torch.overrides import TorchFunctionMode
        from torch.utils import _pytree as pytree
        from torch.utils._python_dispatch import TorchDispatchMode

        own, aten, look = torch.Tensor, torch.ops.aten, self

        class Functions(TorchFunctionMode):
            def __torch_function__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                look.asks |= func in (own.numpy, own.tolist, own.__array__)
                return func(*args, **(kwargs or {}))

        class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                look.asks |= func.namespace != "aten" or func is aten._local_scalar_dense.default
                found = func(*args, **(kwargs or {}))
                kinds = (int, float) if func is aten.slice.Tensor else float
                numbers = [one for one in pytree.tree_leaves(args) if isinstance(one, kinds)]
                look.calls.append((func, len(pytree.tree_leaves(found)), numbers))
                return found

        for mode in (Functions(), Operators()):  # type: ignore[no-untyped-call]
            self._modes.enter_context(mode)

    def __exit__(self, *error: object) -> None:
        self._modes.close()
