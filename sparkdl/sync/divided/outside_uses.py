"""Uses of a layer's parameters while the layer itself does not compute.

A rank has a part of them then, which the code around the layer cannot compute with.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from sparkdl.errors import ConfigError
from sparkdl.mesh import Mesh
from sparkdl.sync.divided.dividing import units
from sparkdl.sync.divided.layout import divided_layers
from sparkdl.sync.divided.stages import cut_layers, is_question, plain_attention


class OutsideUses(TorchFunctionMode):
    """Inside it, a module is run and watched; afterwards `check` says what cannot be divided."""

    def __init__(self, module: nn.Module, mesh: Mesh) -> None:
        super().__init__()
        self._found = ""
        cuts = () if mesh.pipeline == 1 else cut_layers(mesh, module)
        self._layers = {name: module.get_submodule(name) for name in divided_layers(mesh, module)}
        if mesh.num_shards > 1 and not mesh.shard_optimizer:
            names = {part: name for name, part in module.named_modules()}
            self._layers |= {names[unit]: unit for unit in units(module, mesh.smallest_unit, cuts)}
        self._owners: dict[int, list[tuple[str, str]]] = {}
        for name, layer in self._layers.items():
            for own, parameter in layer.named_parameters():
                self._owners.setdefault(id(parameter), []).append((name, own))
        self._active: Counter[str] = Counter()
        self._stack = ExitStack()

    def __enter__(self) -> Any:
        def note(name: str, change: int) -> Any:
            def hook(*_: Any) -> None:
                self._active[name] += change

            return hook

        for name, layer in self._layers.items():
            begin = layer.register_forward_pre_hook(note(name, 1))
            end = layer.register_forward_hook(note(name, -1), always_call=True)
            self._stack.callback(begin.remove)
            self._stack.callback(end.remove)
        self._stack.enter_context(plain_attention())  # the other kind does not call its layers
        enter: Any = super().__enter__
        return enter()

    def __exit__(self, *details: Any) -> None:
        leave: Any = super().__exit__
        leave(*details)
        self._stack.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_question(func):
            for value in pytree.tree_leaves((args, kwargs)):
                for name, own in self._owners.get(id(value), ()):
                    if not self._active[name]:
                        self._found = self._found or (
                            f"{getattr(func, '__name__', func)} uses {f'{name}.{own}'!r} outside "
                            f"the forward pass of {name!r}, where each worker has a part of it; "
                            f"call {name!r} itself, or let two layers share the parameter, as in "
                            "self.head.weight = self.embedding.weight"
                        )
        return func(*args, **kwargs)

    def check(self) -> None:
        """Raise ConfigError if a parameter was used so."""
        if self._found:
            raise ConfigError(f"Mesh: {self._found}")
