"""Changes that callbacks make to a divided model, and that its parts would not see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from sparkdl.errors import ConfigError
from sparkdl.sync.divided.dividing import local, reshard
from sparkdl.sync.divided.stages import is_in_place

_SET_DATA: Any = vars(torch.Tensor.__base__)["data"].__set__
_GET_DATA: Any = vars(torch.Tensor.__base__)["data"].__get__
_VIEWS = frozenset((
    "__getitem__", "select", "narrow", "chunk", "split", "unbind", "diagonal", "view", "reshape",
    "flatten", "unflatten", "view_as", "expand", "detach", "t", "transpose", "permute", "unsqueeze",
    "squeeze",
))  # fmt: skip
"""Functions of torch that show a tensor's own memory; of a divided one some give a copy."""


@contextmanager
def own_memory_kept(model: nn.Module, what: str) -> Iterator[None]:
    """Let callbacks act on a divided model, whose optimizer has the memory that it began with.

    ``what`` has divided it, in the words of the error.

    Raises:
        ConfigError: a layer has got another parameter, or a parameter other memory.
    """
    reshard(model)  # torch may have left what it has gathered
    before = [
        (f"{name}.{key}" if name else key, layer, key, parameter, local(parameter).data_ptr())
        for name, layer in model.named_modules()
        for key, parameter in layer._parameters.items()
        if parameter is not None
    ]
    # What is gathered for a call must not be changed in place of the parts.
    handle = model.register_forward_hook(lambda *_: _reshard_if_done(model))
    try:
        with _Lost({id(parameter): path for path, _, _, parameter, _ in before}) as lost:
            yield
    finally:
        handle.remove()
    reshard(model)
    for path, layer, key, parameter, place in before:
        now = layer._parameters.get(key)
        if now is not parameter or local(parameter).data_ptr() != place:
            lost.replaced.setdefault(path)
    text = f"{what}: a callback has "
    if lost.computes:
        raise ConfigError(
            f"{text}called backward, which sums the gradients of the workers' parts; compute "
            "them in a trainingStep, or leave parallelism unset"
        )
    for path in lost.replaced:
        raise ConfigError(
            f"{text}given {path} another tensor, or changed rows of it, of which a worker has "
            f"its own alone; change all of it in place, as by state.model.{path}.mul_(...)"
        )


def _reshard_if_done(model: nn.Module) -> None:
    if not torch.is_grad_enabled():  # else a backward pass may follow
        reshard(model)


class _Lost(TorchFunctionMode):
    """Notes changes of divided tensors that their parts would not see."""

    def __init__(self, names: dict[int, str]) -> None:
        """``names`` are those of the parameters, by ``id``."""
        super().__init__()
        self.replaced: dict[str, None] = {}
        """The names of those that get other memory, or that are changed by a copy of their rows."""
        self.computes = False
        """True if gradients were computed."""
        self._names = names
        self._views: Any = WeakIdKeyDictionary()
        """Divided tensors that were made of parameters: names, and whether they are copies."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        self.computes |= name == "backward"
        path, is_copy = None, False
        if isinstance(first, DTensor):
            own = self._names.get(id(first)), False
            path, is_copy = self._views.get(first, own)
        if path is not None and (func == _SET_DATA or (is_copy and is_in_place(func))):
            self.replaced.setdefault(path)
        result = func(*args, **(kwargs or {}))
        if path is not None and (name in _VIEWS or func == _GET_DATA):
            for found in pytree.tree_leaves(result):
                if isinstance(found, DTensor):
                    self._views[found] = path, is_copy or not _shows(found, first)
        return result


def _shows(found: torch.Tensor, first: Any) -> bool:
    """True if a divided tensor's part has the memory of the other one's."""
    memories = (local(one).untyped_storage().data_ptr() for one in (found, first))
    return len(set(memories)) == 1
