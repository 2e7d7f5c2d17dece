"""Finds what a module does that cannot be done where workers have parts of it, in a trial of it.

- It uses a layer's parameters while the layer itself does not compute, when a rank has a part.
- Between layers by columns and by rows it computes with what trains and is not divided. There each
  worker would get the gradient of its own part of the values only.
- It changes a parameter when it computes, of which a rank may have a copy for this call alone.
- It takes gradients itself, which does not go through layers that are divided.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from sparkdl.errors import ConfigError
from sparkdl.mesh import Mesh
from sparkdl.sync.divided.dividing import units
from sparkdl.sync.divided.layout import cut_parameters, divided_layers
from sparkdl.sync.divided.stages import cut_layers, is_in_place, is_question, plain_attention

_VIEWS = frozenset(
    ("__getitem__", "as_strided", "chunk", "detach", "diagonal", "movedim", "narrow", "permute",
     "select", "split", "squeeze", "swapaxes", "t", "transpose", "unbind", "unflatten", "unsqueeze",
     "view", "view_as")
)  # fmt: skip
"""Functions whose results have the memory of their first argument."""


class OutsideUses(TorchFunctionMode):
    """Inside it, a module is run and watched; afterwards `check` says what cannot be divided."""

    def __init__(self, module: nn.Module, mesh: Mesh) -> None:
        super().__init__()
        self._found = self._changed = ""
        self._mesh = mesh
        cuts = () if mesh.pipeline == 1 else cut_layers(mesh, module)
        self._cuts = divided_layers(mesh, module)
        self._layers = {name: module.get_submodule(name) for name in self._cuts}
        self._own: dict[int, list[str]] = {}
        """Id of a parameter -> names of the layers that must compute while it is used."""
        self._names = {id(p): name for name, p in module.named_parameters()}
        self._storages = {_storage(p): name for name, p in module.named_parameters()}
        """A parameter's memory, also by ``.data`` and views -> its name."""
        self._versions = [(p, _storage(p), p._version) for p in module.parameters()]
        if mesh.num_shards > 1:
            names = {part: name for name, part in module.named_modules()}
            own = () if mesh.shard_optimizer else units(module, mesh.smallest_unit, cuts)
            self._layers |= {names[unit]: unit for unit in own} | {"": module}
            inside = {id(p) for unit in own for p in unit.parameters()}
            around = [p for p in module.parameters() if id(p) not in inside]
            self._own |= {id(p): [""] for p in around}
        for name, layer in self._layers.items():
            for parameter in layer.parameters() if name else ():
                self._own.setdefault(id(parameter), []).append(name)
        cut = cut_parameters(self._cuts, module)
        self._whole = {
            id(p): name for name, p in module.named_parameters()
            if p.requires_grad and name not in cut
        } if self._cuts else {}  # fmt: skip
        self._views: Any = WeakIdKeyDictionary()
        """View of a parameter -> its name."""
        self._parts: Any = WeakIdKeyDictionary()
        """Tensor of which each worker has a part -> the layer by columns behind it."""
        self._trained: Any = WeakIdKeyDictionary()
        """Tensor that all workers have -> a parameter on which it depends."""
        self._active: Counter[str] = Counter()
        self._stack = ExitStack()

    def __enter__(self) -> Any:
        def begin(name: str) -> Any:
            def hook(*_: Any) -> None:
                self._active[name] += 1

            return hook

        def end(name: str) -> Any:
            def hook(layer: nn.Module, _: Any, output: Any) -> None:
                if name or not self._mesh.shard_optimizer:  # its layers stay whole until the step
                    self._active[name] -= 1
                how = self._cuts.get(name)
                if how in ("columns", "channels"):
                    self._note(self._parts, output, name)
                elif how in ("rows", "gathered"):
                    self._note(self._trained, output, f"{name}.weight")

            return hook

        for name, layer in self._layers.items():
            before = layer.register_forward_pre_hook(begin(name))
            after = layer.register_forward_hook(end(name), always_call=True)
            self._stack.callback(before.remove)
            self._stack.callback(after.remove)
        self._stack.enter_context(plain_attention())  # the other kind does not call its layers
        enter: Any = super().__enter__
        return enter()

    def __exit__(self, *details: Any) -> None:
        leave: Any = super().__exit__
        leave(*details)
        self._stack.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if self._mesh.tensor * self._mesh.num_shards > 1 and name in ("grad", "backward"):
            self._report(
                f"torch.autograd.{name} is called while the module computes, which does not go "
                "through layers that are divided along shard or tensor; use the axis data, or "
                "leave it out"
            )
        if is_question(func):
            result = func(*args, **kwargs)
            if isinstance(result, torch.Tensor) and name == "__get__":
                is_data = func == torch.Tensor.data.__get__  # type: ignore[attr-defined]
                if is_data:
                    self._note_view(args[0], result)
                if self._cuts:
                    self._follow(name, args, result, is_detached=is_data)
            return result
        if name == "requires_grad_" and id(args[0]) in self._names:
            self._report(
                f"requires_grad of {self._names[id(args[0])]!r} is set while the module computes, "
                "which the parts of it on workers do not follow; use frozenLayers, or set it in a "
                "callback"
            )
            return func(*args, **kwargs)
        leaves = pytree.tree_leaves((args, kwargs))
        for value in leaves:
            self._see_use(value, name)
        if args and is_in_place(func):
            for value in pytree.tree_leaves(args[0]):
                view = self._views.get(value) if isinstance(value, torch.Tensor) else None
                self._see_change(self._storages.get(_storage(value)) or view)
        result = func(*args, **kwargs)
        if name in _VIEWS and args:
            self._note_view(args[0], result)
        if self._cuts and not any(self._active[layer] for layer in self._cuts):
            self._follow(name, leaves, result, is_detached=name == "detach")
        return result

    def _note_view(self, viewed: Any, result: Any) -> None:
        """Note views of parameters, which have memory of their own where weights are lent."""
        name = self._names.get(id(viewed))
        if name is None and isinstance(viewed, torch.Tensor):
            name = self._views.get(viewed)
        for value in pytree.tree_leaves(result) if name is not None else ():
            self._views[value] = name

    def _see_use(self, value: Any, name: str) -> None:
        for layer in self._own.get(id(value), ()):
            if self._active[layer]:
                continue
            own = self._names[id(value)]
            if not layer:
                self._report(
                    f"{name} uses {own!r} outside the forward pass of the module, where each "
                    "worker has a part of it; call the module itself, or use data or tensor in "
                    "place of shard"
                )
                continue
            size = sum(p.numel() for p in self._layers[layer].parameters())
            raised = "" if layer in self._cuts else f", or set smallest_unit={size + 1}"
            self._report(
                f"{name} uses {own!r} outside the forward pass of {layer!r}, where each worker has "
                f"a part of it; call {layer!r} itself, or let two layers share the parameter, as "
                f"in self.head.weight = self.embedding.weight{raised}"
            )

    def _follow(self, name: str, inputs: Any, result: Any, *, is_detached: bool) -> None:
        """Note what of the result each worker would have a part of, or that trains and is whole."""
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        parts = [self._parts[value] for value in tensors if value in self._parts]
        known = [self._whole.get(id(v)) or self._trained.get(v) for v in tensors]
        source = next((one for one in known if one is not None), None)
        if parts and source is not None:
            self._report(
                f"{name} computes with {source!r}, or what follows from it, and with what "
                f"{parts[0]!r} gives, of which each worker has a part; so it would get the "
                f"gradient of that part alone. Leave {parts[0]!r} and the layer by rows behind it "
                "out of the layout, so that they stay whole"
            )
        if parts:
            self._note(self._parts, result, parts[0])
        elif source is not None and not is_detached:
            self._note(self._trained, result, source)

    def _note(self, where: Any, values: Any, name: str) -> None:
        for value in pytree.tree_leaves(values):
            if isinstance(value, torch.Tensor) and (
                value.is_floating_point() or value.is_complex()
            ):
                where[value] = name

    def _see_change(self, name: str | None) -> None:
        if self._mesh.num_shards > 1 and name is not None:
            self._changed = self._changed or (
                f"the module changes its parameter {name!r} when it computes, of which a worker "
                "has a copy for this call alone; let it be a buffer, or use data or tensor in "
                "place of shard and shard_optimizer"
            )

    def _report(self, what: str) -> None:
        self._found = self._found or what  # the first is the cause of the others

    def check(self) -> None:
        """Raise ConfigError if something was seen."""
        for parameter, storage, version in self._versions:
            if parameter._version != version or _storage(parameter) != storage:
                self._see_change(self._storages.get(storage))
        if self._changed or self._found:
            raise ConfigError(f"Mesh: {self._changed or self._found}")


def _storage(value: Any) -> int | None:
    """Return a number that tells memory from other memory; None: it is no plain tensor."""
    with torch._C.DisableTorchFunction():  # which may lend other memory for the question
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return None
        return int(value.untyped_storage()._cdata)
