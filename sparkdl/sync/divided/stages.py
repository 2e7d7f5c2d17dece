"""Stages of a module along ``pipeline``: where it is cut, and what belongs to which stage.

A module is cut where the first layer of a stage is called. Nothing but what that layer is called
with may go from the layers before it to those after it. What else these need must follow from the
module's inputs, which all stages have.
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from sparkdl.data.collate import Arguments
from sparkdl.errors import ConfigError, did_you_mean
from sparkdl.mesh import Mesh
from sparkdl.runtime.name_patterns import some_of, spread


@dataclass(frozen=True, kw_only=True)
class Sent:
    """The arguments for the first layer of a stage, of which some values are sent."""

    form: Any
    """Its arguments, as torch's tree of values."""
    places: tuple[int, ...]
    """Numbers of the values that are sent: those that depend on parameters."""
    shapes: tuple[torch.Tensor, ...]
    """The values that are sent, without their contents, on the meta device."""
    changed: list[bool]
    """Which of them the stage changes in place; empty until it has been run."""


@dataclass(frozen=True, kw_only=True)
class Stages:
    """A module's stages."""

    cuts: tuple[str, ...]
    """Name of the first layer of each stage but the first."""
    owners: Mapping[str, int]
    """Name of each parameter -> the stage that uses it."""
    layers: Mapping[str, int]
    """Names of the largest layers that one stage computes whole -> that stage."""
    called: Mapping[str, int]
    """Name of each layer that is called -> the first stage that does."""

    @property
    def count(self) -> int:
        """Stages."""
        return len(self.cuts) + 1

    def owner_of(self, name: str) -> int:
        """The stage of a buffer."""
        while name:
            name = name.rpartition(".")[0]
            if name in self.called:
                return self.called[name]
        return 0


def cut_layers(mesh: Mesh, module: nn.Module) -> tuple[str, ...]:
    """Name of the first layer of each stage but the first.

    Raises:
        ConfigError: a pattern means no layer, stages are not in the order of layers, or there is
            no list of layers that can be cut.
    """
    if isinstance(mesh.stages, str):
        return _balanced(mesh.num_stages, module)
    names = [name for name, _ in module.named_modules() if name]
    found: list[list[str]] = []
    for pattern in mesh.stages:
        meant = [name for name in names if any(fnmatchcase(name, one) for one in spread(pattern))]
        if not meant:
            hint = did_you_mean(pattern.lstrip("*."), names) or f"; there are {some_of(names)}"
            raise ConfigError(f"Mesh: no layer fits {pattern!r} of the stages{hint}")
        found.append(meant)
    for before, after in pairwise(found):
        if names.index(before[-1]) >= names.index(after[0]):
            raise ConfigError(
                f"Mesh: the stage of {after[0]!r} follows that of {before[-1]!r}, and the layers "
                "do not; give the patterns of stages in the order of the layers, each layer once"
            )
    return tuple(meant[0] for meant in found[1:])


def stages_by_order(mesh: Mesh, module: nn.Module) -> dict[str, int]:
    """Name of each parameter -> its stage, if parameters are used in the order of registration.

    Good enough to tell sizes. Which stage uses which is known when the module has been run.
    """
    cuts = () if mesh.pipeline == 1 else cut_layers(mesh, module)
    found, stage = {}, 0
    for layer, part in module.named_modules():
        stage += layer in cuts
        for name, _ in part.named_parameters(prefix=layer, recurse=False):
            found[name] = stage
    return {name: found[name] for name, _ in module.named_parameters()}


def _balanced(count: int, module: nn.Module) -> tuple[str, ...]:
    """Cuts the list of layers with the most weights so that the largest stage is smallest."""
    lists = [
        (name, part)
        for name, part in module.named_modules()
        if isinstance(part, (nn.ModuleList, nn.Sequential)) and len(part) >= count
    ]
    if not lists:
        raise ConfigError(
            f"Mesh: {type(module).__name__} has no ModuleList or Sequential of at least {count} "
            "layers to cut into stages; name the layers of each stage, as in "
            "stages=['encoder.0-5', 'encoder.6-11']"
        )

    def weights(part: nn.Module) -> int:
        return sum(parameter.numel() for parameter in part.parameters())

    name, chosen = max(lists, key=lambda one: weights(one[1]))
    members = [f"{name}.{child}" if name else child for child, _ in chosen.named_children()]
    sizes = [weights(module.get_submodule(member)) for member in members]
    rest = [n for n, _ in module.named_parameters() if name and not n.startswith(f"{name}.")]
    order = [n for n, _ in module.named_parameters()]
    inside = next((order.index(n) for n in order if n.startswith(members[0])), 0)
    for other in rest:
        place = 0 if order.index(other) < inside else -1
        sizes[place] += module.get_parameter(other).numel()
    starts = _smallest_maximum(sizes, count)
    return tuple(members[start] for start in starts[1:])


def _smallest_maximum(sizes: Sequence[int], count: int) -> list[int]:
    """Find where ``count`` runs of ``sizes`` begin so that the largest sum of a run is smallest."""
    best: dict[tuple[int, int], tuple[int, list[int]]] = {(0, 0): (0, [])}
    for end in range(1, len(sizes) + 1):
        for runs in range(1, min(count, end) + 1):
            options = [
                (max(best[start, runs - 1][0], sum(sizes[start:end])), start)
                for start in range(runs - 1, end)
                if (start, runs - 1) in best
            ]
            largest, start = min(options)
            best[end, runs] = (largest, [*best[start, runs - 1][1], start])
    return best[len(sizes), count][1]


class Skeleton:
    """A copy of a module without weights, which computes the shapes of values alone."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        """Copy ``module``; its parameters may be on the meta device.

        ``device`` is where it will compute.
        """
        self.names = [name for name, _ in module.named_parameters()]
        self._trained = {name for name, p in module.named_parameters() if p.requires_grad}
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        memo: dict[int, Any] = {}
        for parameter in module.parameters():
            memo[id(parameter)] = _fake(mode, parameter, device)
        kept = list(module.parameters())  # ids are of living parameters
        self.module = copy.deepcopy(module, memo)
        del kept

    def follow(self, module: nn.Module) -> None:
        """Have the modes of the layers of ``module``, of which this is the copy."""
        for own, other in zip(self.module.modules(), module.modules(), strict=True):
            own.training = other.training

    def sent(self, arguments: Arguments, cuts: Sequence[str]) -> list[Sent]:
        """Return the values that go over each cut for these inputs."""
        with _at_cuts(self.module, cuts) as found:
            _computed(self.module, arguments)
        return found

    def stages(self, arguments: Arguments, cuts: Sequence[str]) -> Stages:
        """Return which parts of the module belong to which stage.

        Raises:
            ConfigError: the module cannot be cut so.
        """
        uses = {name: set[int]() for name in self.names}
        called: dict[str, set[int]] = {}
        for is_training in (True, False):
            self.module.train(is_training)
            self._note_uses(arguments, cuts, uses, called)
        for name, stages in uses.items():
            if len(stages) > 1:
                raise ConfigError(
                    f"Mesh: the parameter {name!r} is used by the stages {sorted(stages)}; a "
                    "pipeline has no weights in common, so let both uses lie in one stage"
                )
        owners = {name: min(stages, default=len(cuts)) for name, stages in uses.items()}
        for stage in range(len(cuts) + 1):
            if not any(owners[name] == stage for name in self._trained):
                raise ConfigError(
                    f"Mesh: the stage {stage} has no parameter that trains, so it would only keep "
                    "others waiting; cut elsewhere, or freeze less"
                )
        for is_training in (True, False):
            self.module.train(is_training)
            self._check_flow(arguments, cuts, owners)
        # a cut is noted after the layer that begins there was called
        begins = {name: number for number, name in enumerate(cuts, 1)}
        first = {name: begins.get(name, min(seen)) for name, seen in called.items()}
        return Stages(
            cuts=tuple(cuts), owners=owners, layers=self._layers(owners, cuts), called=first
        )

    def _note_uses(
        self,
        arguments: Arguments,
        cuts: Sequence[str],
        uses: Mapping[str, set[int]],
        called: dict[str, set[int]],
    ) -> None:
        """Note the stages that use each parameter, and that call each layer, in the present mode.

        Raises:
            ConfigError: the module changes what it holds, or a stage never begins.
        """
        module = self.module
        with ExitStack() as stack:
            found = stack.enter_context(_at_cuts(module, cuts))
            for name, part in module.named_modules():

                def note(*_: Any, name: str = name) -> None:
                    called.setdefault(name, set()).add(len(found))

                if name:
                    stack.callback(part.register_forward_pre_hook(note).remove)
            seen = stack.enter_context(_Uses(module, uses, found))
            _computed(module, arguments)
        if changed := seen.changed():
            raise ConfigError(
                f"Mesh: the module changes {changed!r} when it computes, and along a "
                "pipeline it computes each part of a batch by itself; leave such values out, or "
                "pipeline at 1"
            )
        if len(found) < len(cuts):
            raise ConfigError(
                f"Mesh: the module never calls the layer {cuts[len(found)]!r}, with which a stage "
                "begins; name layers that are called"
            )

    def _layers(self, owners: Mapping[str, int], cuts: Sequence[str]) -> dict[str, int]:
        found: dict[str, int] = {}

        def within(part: nn.Module, prefix: str) -> None:
            for name, child in part.named_children():
                path = prefix + name
                own = {owners[n] for n in self.names if n.startswith(f"{path}.")}
                is_cut = any(cut.startswith(f"{path}.") for cut in cuts)
                is_called = not isinstance(child, (nn.ModuleList, nn.ModuleDict))
                if len(own) == 1 and not is_cut and is_called:
                    found[path] = own.pop()
                elif own:
                    within(child, f"{path}.")

        within(self.module, "")
        return found

    def _check_flow(
        self, arguments: Arguments, cuts: Sequence[str], owners: Mapping[str, int]
    ) -> None:
        """See that stages get all that they need: what they compute with has a mode of its own."""
        for number, cut in enumerate(cuts, 1):
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            own: dict[str, torch.Tensor] = {
                name: _fake(mode, parameter, parameter.device)
                for name, parameter in self.module.named_parameters()
                if owners[name] >= number
            }

            def receive(_: Any, args: Any, kwargs: Any, mode: FakeTensorMode = mode) -> Any:
                values, form = pytree.tree_flatten((args, kwargs))
                return pytree.tree_unflatten(
                    [_fake(mode, v, v.device) if isinstance(v, FakeTensor) else v for v in values],
                    form,
                )

            layer = self.module.get_submodule(cut)
            hook = layer.register_forward_pre_hook(receive, with_kwargs=True)
            seen = _Mixed()
            try:
                with seen:
                    output = torch.func.functional_call(
                        self.module, own, arguments.positional, arguments.by_name
                    )
            finally:
                hook.remove()
            modes = _modes(output)
            if seen.is_mixed or not modes <= {mode}:
                raise ConfigError(
                    f"Mesh: the stage that begins with {cut!r} uses values of layers before it "
                    f"besides those that {cut!r} is called with; cut elsewhere, or pass these "
                    "values from layer to layer"
                )


class _Mixed(TorchFunctionMode):
    """Sees whether values of two modes come together."""

    is_mixed = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.is_mixed |= len(_modes((args, kwargs))) > 1
        return func(*args, **kwargs)


def _modes(values: Any) -> set[FakeTensorMode]:
    leaves = pytree.tree_leaves(values)
    return {value.fake_mode for value in leaves if isinstance(value, FakeTensor)}


def _fake(mode: FakeTensorMode, like: torch.Tensor, device: torch.device) -> nn.Parameter:
    with mode:
        empty = torch.empty(like.shape, dtype=like.dtype, device=device)
    return nn.Parameter(empty, requires_grad=False)


@contextmanager
def _at_cuts(module: nn.Module, cuts: Sequence[str]) -> Iterator[list[Sent]]:
    """Note with what the layers are called, in the order of the cuts."""
    found: list[Sent] = []
    versions: list[list[tuple[torch.Tensor, int]]] = []

    def watch(number: int, name: str) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            if number != len(found):
                what = "more than once" if number < len(found) else "before earlier ones"
                raise ConfigError(
                    f"Mesh: the layer {name!r}, with which a stage begins, is called {what}; cut "
                    "where layers are called once, one after the other"
                )
            values, form = pytree.tree_flatten((args, kwargs))
            places = tuple(n for n, value in enumerate(values) if isinstance(value, FakeTensor))
            shapes = tuple(
                torch.empty(values[n].shape, dtype=values[n].dtype, device="meta") for n in places
            )
            found.append(Sent(form=form, places=places, shapes=shapes, changed=[]))
            versions.append([(values[n], values[n]._version) for n in places])

        return hook

    with ExitStack() as stack:
        for number, name in enumerate(cuts):
            hook = module.get_submodule(name).register_forward_pre_hook(
                watch(number, name), with_kwargs=True
            )
            stack.callback(hook.remove)
        yield found
    for sent, before in zip(found, versions, strict=True):
        sent.changed[:] = [value._version != version for value, version in before]


class _Uses(TorchFunctionMode):
    """Notes in which stage each parameter is used, and whether one, or a buffer, is changed."""

    def __init__(self, module: nn.Module, uses: Mapping[str, set[int]], found: Any) -> None:
        super().__init__()
        self._module = module
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._uses, self._found = uses, found
        self._held = dict([*module.named_buffers(), *module.named_parameters()])
        self._attributes = _attributes(module)
        self._marks = {name: _mark(value, set()) for name, value in self._attributes.items()}
        self._changed: str | None = None

    def __enter__(self) -> _Uses:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in pytree.tree_leaves((args, kwargs)):
            name = self._names.get(id(value))
            if name is not None and not is_question(func):
                self._uses[name].add(len(self._found))
        if func is torch.autograd.grad:
            raise ConfigError(
                "Mesh: torch.autograd.grad is called while the module computes, of which each "
                "stage of a pipeline has a part only; use the axis data"
            )
        if func is functional.batch_norm and (args[5:6] or (kwargs.get("training"),))[0]:
            raise ConfigError(
                "Mesh: the module normalizes by the rows of a batch (batch_norm), of which each "
                "part goes through a pipeline by itself; use GroupNorm or LayerNorm"
            )
        if args and is_in_place(func):
            changed = {id(value) for value in pytree.tree_leaves(args[0])}
            same = (name for name, held in self._held.items() if id(held) in changed)
            self._changed = self._changed or next(same, None)
        return func(*args, **kwargs)

    def changed(self) -> str | None:
        """Return the name of what was changed in place, or replaced in its layer, so far."""
        kept = self._module.state_dict(keep_vars=True)
        replaced = [name for name, b in self._held.items() if name in kept and kept[name] is not b]
        now = {name: _mark(value, set()) for name, value in _attributes(self._module).items()}
        names = dict.fromkeys([*self._marks, *now])
        replaced += [name for name in names if self._marks.get(name) != now.get(name)]
        return self._changed or next(iter(replaced), None)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What layers hold besides parameters, buffers and other layers, by its name."""
    return {
        f"{path}.{key}" if path else key: value
        for path, layer in module.named_modules()
        for key, value in vars(layer).items()
        if key not in _TORCHS
    }


def _mark(value: Any, seen: set[int]) -> Any:
    """What is another if a value was replaced, or changed in place; of the values that live.

    ``seen``: ids of the objects that have a mark already.
    """
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, tuple):  # as equal as its parts
        return [_mark(one, seen) for one in value]
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    if id(value) in seen or isinstance(value, _OF_THE_PROGRAM):
        return id(value)
    seen.add(id(value))
    parts = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    items = value if isinstance(value, list | deque | set) else ()
    named = [(key, _mark(one, seen)) for key, one in parts.items()]
    return id(value), named, [_mark(one, seen) for one in items]


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.device, torch.dtype)
"""Classes of values that are what they show."""
_OF_THE_PROGRAM = (type, FunctionType, ModuleType, logging.Logger)
"""Classes of what a module may name, but does not hold."""
_TORCHS = frozenset(vars(nn.Module()))


_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "pow", "and", "or", "xor")}


def is_in_place(func: Any) -> bool:
    """True of functions of torch that change their first argument."""
    name = getattr(func, "__name__", "")
    is_public = name[:1] != "_" or name.startswith("_foreach_")
    return name in _IN_PLACE or name == "__setitem__" or (name[-1:] == "_" and is_public)


def is_question(func: Any) -> bool:
    """True of functions of torch that ask a tensor for its shape and the like."""
    return getattr(func, "__name__", "") in ("__get__", "size", "dim", "numel", "is_floating_point")


@contextmanager
def plain_attention() -> Iterator[None]:
    """Inside, torch's Transformer layers pass plain tensors on, also in evaluation."""
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)


def _computed(module: nn.Module, arguments: Arguments) -> Any:
    try:
        with torch.no_grad(), plain_attention():
            return arguments.call(module)
    except (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
    ) as error:
        raise ConfigError(
            "Mesh: a pipeline needs a module whose steps and shapes follow from the shapes of its "
            f"inputs, and this one asks for values: {error}"
        ) from error
