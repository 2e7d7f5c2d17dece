"""Attributes of layers besides parameters, buffers and other layers, and their way to the driver.

Forward may count steps or keep a mean in a plain attribute; a callback may set one, or change the
layers themselves. In a plain loop the module has all of that at the end. `Attributes` notes what
came, and tells what is another at the end. Values go back to the driver as modules come from it;
checkpoints, of which nothing is unpickled, have those that are plain.
"""

from __future__ import annotations

import copyreg
import functools
import hashlib
import io
import logging
import pickle
import re
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm

from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.serialization.travel.packed_module import PackedModule, memories, pack
from sparkdl.serialization.travel.pickling import (
    HOOKS,
    TENSOR_HOOKS,
    ModulePickler,
    Pickler,
    Reducible,
    SharedMemory,
    StrictUnpickler,
    array_of,
    of_kind,
    registered,
    view_of,
)
from sparkdl.serialization.travel.shared_values import SharedValue, Twins
from sparkdl.storage import tensor_tree
from sparkdl.storage.checkpoint_format import decode
from sparkdl.sync.module_tensors import device_of, fingerprint, places_of, set_trains, trains

logger = logging.getLogger(__name__)

_TORCHS = {*vars(nn.Module()), "_compiled_call_impl"}
"""Attributes that torch keeps in each module: registers, hooks, the mode, a compiled twin."""
_OF_TRAINING = ("sparkdl.", "torch.distributed.", "torch._subclasses.", "torch._dynamo.")
"""Begin the names of Python's modules whose objects are no attributes of the user's."""
_OF_SCRIPTS = re.compile(r"^    (\w+) = ", re.MULTILINE)
"""Pattern of what a script says of its own attributes."""
_OF_MESH = ("__composable_api_", "_is_fsdp_", "_fsdp_", "_distribute_module_applied")
"""Begin the names of attributes with which torch divides layers."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_SHARED = (list, dict, set, deque, bytearray, np.ndarray, torch.Tensor)
"""Types of Python, numpy and torch whose objects can be changed in place."""

Values = dict[str, dict[str, Any]]
"""Attributes by the names of their layers, and their own."""
Removed = dict[str, list[str]]
"""Names of attributes, likewise."""


@dataclass(frozen=True, kw_only=True)
class _Changes:
    """The changes of the attributes. Picklable if the values are."""

    values: Values
    removed: Removed
    stay: list[tuple[str, str]]
    """Names and types of those that cannot be sent."""
    trains: dict[str, bool]


class Attributes:
    """Knows what a module held when it came, and what is another now."""

    def __init__(
        self,
        module: nn.Module,
        *,
        resets: bool = False,
        is_divided: bool = False,
        shared: Sequence[SharedValue] = (),
    ) -> None:
        """Take note of what ``module`` holds.

        Args:
            module: as it came.
            resets: whether it shall hold that again later.
            is_divided: whether layers become others because a mesh divides them.
            shared: what it shares with others that train with it.
        """
        self._module = module
        self._is_divided = is_divided
        self._layers, self._in_evaluation = _layers(module), _in_evaluation(module)
        self._kept = [value for _, _, value in _values(module)]  # so that no id is used twice
        self._marks = self._all_marks()
        known = self._known()
        self._twins = Twins(module, shared, lambda value: _mark_of_twin(value, known))
        self._first: PackedModule | None = None
        if resets:
            self._first = self._packed(_all(module), {})

    def changed_layers(self) -> list[str]:
        """Names of layers that are there no more, are new, or have other parts, classes or hooks.

        Buffers are no matter: forward may make them.
        """
        if self._is_divided:
            return []
        now = _layers(self._module)
        names = [*self._layers, *(name for name in now if name not in self._layers)]
        changed = [name for name in names if self._layers.get(name) != now.get(name)]
        return [name or "the module itself" for name in changed]

    def has_changed(self) -> bool:
        """True if an attribute is new, another or gone, or a layer has another mode."""
        return any(self._changes()) or _in_evaluation(self._module) != self._in_evaluation

    def check_shared(self) -> None:
        """See that what is shared with others is still the same; raises ConfigError."""
        self._twins.check()

    def marks(self) -> Iterator[tuple[nn.Module, str, Any]]:
        """Yield each attribute's layer and path, and what tells its values apart."""
        layers = dict(self._module.named_modules())
        for (layer, key), mark in self._all_marks().items():
            yield layers[layer], _path(layer, key), mark

    def packed(self) -> PackedModule:
        """All that has changed, for `come_back`.

        That is the whole module where layers have, and where some are scripted: objects of scripts'
        own classes cannot be sent alone.

        Raises:
            ConfigError: the module has to be sent, and cannot be.
        """
        scripts = [isinstance(one, torch.jit.ScriptModule) for one in self._module.modules()]
        if any(scripts) or self.changed_layers():
            return pack(self._module)
        return self._packed(*self._changes())

    def state_dict(self) -> dict[str, Any]:
        """Return what has changed, as far as it is plain, and what it lacks, for a checkpoint.

        New things that no process can send, such as locks, are made anew where they are needed.
        Callbacks and forward may have put layers into evaluation mode, so all that are are named.

        Raises:
            ConfigError: see `check_shared`.
        """
        self.check_shared()
        values, removed = self._changes()
        lacks, elsewhere, known = [], [], self._known()
        for layer, own in values.items():
            for key in list(own):
                try:
                    if _devices(own[key]) - {"cpu"}:
                        elsewhere.append([layer, key])
                    own[key] = _plain(own[key])
                except CheckpointError:
                    value = own.pop(key)
                    if (layer, key) in self._marks or _can_be_sent(value, known):
                        lacks.append([_path(layer, key), type(value).__name__])
        layers = self.changed_layers()
        return {
            "values": values,
            "elsewhere": elsewhere,
            "removed": removed,
            "lacks": lacks,
            "layers": layers,
            "in_evaluation": _in_evaluation(self._module),
            "shared": self._shared(values, known, {path for path, _ in lacks}),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Hold what `state_dict` gave, or came; with ``resets`` all else becomes what came.

        Raises:
            ConfigError: layers had changed.
        """
        if state is not None and state["layers"]:
            raise ConfigError(
                "a callback or forward has changed layers of the module "
                f"({', '.join(state['layers'][:5])}), and training cannot go on from its "
                "checkpoint, which has their numbers only; change layers before fit, and begin "
                "another fit where they shall change"
            )
        if self._first is not None:
            values, removed = self._changes()
            if values or removed:
                lost = {layer: list(own) for layer, own in values.items()}
                first = _read(self._module, self._first)
                _give(self._module, first.values, lost)
        if state is None:
            return
        for path, kind in state["lacks"]:
            logger.warning(
                "the checkpoint lacks the attribute %s, a %s, which training has changed: it is "
                "again what it was at first; keep it in a buffer, or in an attribute of numbers, "
                "strings, tensors, lists and dicts",
                *(path, kind),
            )
        values = {layer: dict(own) for layer, own in state["values"].items()}
        for layer, key in state["elsewhere"]:
            values[layer][key] = _plain(values[layer][key], device_of(self._module))
        self._share(values, state.get("shared", ()))
        _give(self._module, values, state["removed"])
        if "in_evaluation" in state:
            for name, one in self._module.named_modules():
                one.training = name not in state["in_evaluation"]

    def _changes(self) -> tuple[Values, Removed]:
        """The attributes that are new or another, and the names of those that are gone.

        What shares an object with them comes along, so that it is one object again.
        """
        held: dict[tuple[str, str], list[Any]] = {}
        now = self._all_marks(held)
        changed = [
            place
            for place, mark in now.items()
            if mark is not None and self._marks.get(place) != mark
        ]
        of_objects: dict[int, list[tuple[str, str]]] = {}
        for place, objects in held.items():
            for one in objects:
                of_objects.setdefault(id(one), []).append(place)
        found = set(changed)
        while changed:
            sharing = {p for one in held[changed.pop()] for p in of_objects[id(one)]} - found
            changed += sharing
            found |= sharing
        values: Values = {}
        for layer, key, value in _values(self._module):
            if (layer, key) in found:
                values.setdefault(layer, {})[key] = value
        removed: Removed = {}
        for layer, key in sorted(self._marks.keys() - now.keys()):
            removed.setdefault(layer, []).append(key)
        return values, removed

    def _packed(self, values: Values, removed: Removed) -> PackedModule:
        known, stay = self._known(), []
        for layer, own in values.items():
            for key in list(own):
                if not _can_be_sent(own[key], known):
                    stay.append((_path(layer, key), type(own.pop(key)).__name__))
        flags = trains(self._module)
        file = io.BytesIO()
        pickler = _Referring(file, known)
        pickler.dump(_Changes(values=values, removed=removed, stay=stay, trains=flags))
        skeleton = pickle.dumps(pickler.head()) + file.getvalue()
        return PackedModule(digest="", skeleton=skeleton, tensors=b"".join(memories(pickler)))

    def _all_marks(
        self, held: dict[tuple[str, str], list[Any]] | None = None
    ) -> dict[tuple[str, str], Any]:
        """Return each attribute's mark, to see if it changes; ``held`` gets the objects in each."""
        known, found = self._known(), {}
        for layer, key, value in _values(self._module):
            objects: list[Any] = []
            found[layer, key] = _mark(value, known, objects)
            if held is not None:
                held[layer, key] = objects
        return found

    def _known(self) -> _Known:
        return _Known(self._module, shares=not self._is_divided)

    def _shared(self, values: Values, known: _Known, lacks: set[str]) -> list[Any]:
        """Find objects that are in several places, and memory of registered tensors.

        `_share` has them share again.
        """
        first: dict[int, list[Any]] = {}
        alone: list[tuple[list[Any], Any]] = []
        found: list[Any] = []
        same: list[Any] = []
        held = list(_values(self._module))  # so that no id is used twice
        for layer, key, whole in held:
            if _path(layer, key) in lacks:
                continue
            is_sent = key in values.get(layer, ())
            todo: list[tuple[Any, list[Any]]] = [(whole, [])]
            while todo:
                value, steps = todo.pop()
                if not isinstance(value, (tuple, *_SHARED)):
                    continue
                path, shown = [layer, key, steps], known.shown(value)
                if id(value) in first and not isinstance(value, tuple):
                    other = first[id(value)]
                    if is_sent or other[1] in values.get(other[0], ()):
                        same.append([path, "attribute", other])
                    continue
                if shown is None or shown[0] != "itself":
                    first[id(value)] = path
                if shown is not None:
                    found += [[path, "tensor", shown]] if is_sent else []
                elif isinstance(value, np.ndarray | torch.Tensor):
                    alone.append((path, value))
                items: Any = value.items() if isinstance(value, dict) else ()
                if isinstance(value, list | tuple | deque):
                    items = enumerate(value)
                todo += reversed([(item, [*steps, step]) for step, item in items])
        alone.sort(key=lambda one: one[1].nbytes, reverse=True)  # a part comes after its whole
        wholes = {str(n): v for n, (_, v) in enumerate(alone) if isinstance(v, torch.Tensor)}
        memory = SharedMemory(wholes)
        for number, (path, value) in enumerate(alone):
            shown = _shown(value, memory)
            if shown is not None and shown[1] != str(number):
                other = alone[int(shown[1])][0]
                if any(place[1] in values.get(str(place[0]), ()) for place in (path, other)):
                    found.append([path, "attribute", [*other, shown]])
        return found + same

    def _share(self, values: Values, shared: Any) -> None:
        """Have what `_shared` has found share again, in what a module is given."""
        live = {(layer, key): value for layer, key, value in _values(self._module)}
        tensors = dict(registered(self._module))
        for (layer, key, steps), kind, about in shared:
            if kind == "tensor":
                if about[1] not in tensors:
                    continue
                value = _show(tensors[about[1]], *about)
            else:
                layer_of, key_of = str(about[0]), str(about[1])
                own = values.get(layer_of, {})
                value = own[key_of] if key_of in own else live[layer_of, key_of]
                for step in about[2]:
                    value = value[step]
                for shown in about[3:]:
                    value = _show(value, *shown)
            own = values.setdefault(layer, {})
            whole = own[key] if key in own else live[layer, key]
            own[key] = _put(whole, steps, value)


def showing_weights(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the paths of attributes that show the memory of parameters, and the names of these.

    Not that which torch's own `spectral_norm` makes anew before each forward pass.
    """
    made = {
        (path, hook.name)
        for path, layer in module.named_modules()
        for hook in layer._forward_pre_hooks.values()
        if isinstance(hook, SpectralNorm)
    }
    known = _Known(module)
    parameters = dict(nn.Module.named_parameters(module, remove_duplicate=False))
    for layer, key, value in _values(module):
        objects: list[Any] = []
        if (layer, key) not in made:
            _mark(value, known, objects)
        for one in objects:
            shown = known.shown(one)
            if shown is not None and shown[0] != "itself" and shown[1] in parameters:
                yield _path(layer, key), shown[1]


def come_back(module: nn.Module, packed: PackedModule) -> nn.Module:
    """Give a module what `Attributes.packed` gave of the one that was trained.

    Returns:
        The module, or another one, where layers have changed.
    """
    found = _read(module, packed)
    if isinstance(found, nn.Module):
        return found
    for path, kind in found.stay:
        logger.warning(
            "the attribute %s, a %s that training has made or changed, cannot be sent back: the "
            "fitted module is without it, or has what it was before; leave it out in a "
            "__getstate__ of the class if forward makes it anew",
            *(path, kind),
        )
    _give(module, found.values, found.removed)
    set_trains(module, found.trains)
    return module


def _read(module: nn.Module, packed: PackedModule) -> Any:
    """Read what `Attributes` has packed, which may refer to what is registered in ``module``."""
    known = dict(_registered(module))
    found = decode(packed.tensors, "attributes of the module")
    unpickler = StrictUnpickler(
        io.BytesIO(packed.skeleton),
        lambda number: found[number].untyped_storage(),
        lambda name: known[name],
    )
    return unpickler.load()


def _give(module: nn.Module, values: Mapping[str, Any], removed: Mapping[str, Any]) -> None:
    """Remove attributes, then set others."""
    layers = dict(module.named_modules())
    for name in values.keys() | removed.keys():
        layer: Any = layers[name]
        given, kind = values.get(name, {}), type(layer)
        if isinstance(layer, torch.jit.ScriptModule):
            for key, value in given.items():
                setattr(layer, key, value)
            continue
        if kind.__setstate__ is not nn.Module.__setstate__ and not _is_parametrized(kind):
            state = layer.__getstate__()
            layer.__setstate__({**state, **given} if isinstance(state, dict) else given[""])
            continue
        for key in removed.get(name, ()):
            vars(layer).pop(key, None)
        slots = {key: given[key] for key in _slots(layer) & given.keys()}
        vars(layer).update({key: value for key, value in given.items() if key not in slots})
        for key, value in slots.items():
            object.__setattr__(layer, key, value)


def _all(module: nn.Module) -> Values:
    found: Values = {}
    for layer, key, value in _values(module):
        found.setdefault(layer, {})[key] = value
    return found


def _values(module: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """The attributes of all layers: the layer's name, their own, and what they hold."""
    for name, layer in module.named_modules():
        kind: Any = type(layer)
        state: Any = vars(layer)
        if isinstance(layer, torch.jit.ScriptModule):
            state = _of_script(layer)
        elif kind.__getstate__ is not nn.Module.__getstate__ and not _is_parametrized(kind):
            state = layer.__getstate__()
        if not isinstance(state, dict):
            yield name, "", state
            continue
        slots = {slot: getattr(layer, slot) for slot in _slots(layer) if hasattr(layer, slot)}
        for key, value in {**state, **slots}.items():
            if key not in _TORCHS and not key.startswith(_OF_MESH):
                yield name, key, value


def _slots(layer: nn.Module) -> set[str]:
    return set(copyreg._slotnames(type(layer)))  # type: ignore[attr-defined]


def _is_parametrized(kind: Any) -> bool:
    """True for a class that torch has made for a module with parametrizations, or of such a one."""
    owner = next((one for one in kind.__mro__ if "__getstate__" in vars(one)), object)
    return owner.__name__.startswith("Parametrized")


def _registered(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what both modules have, under names for pickles."""
    for name, layer in module.named_modules(remove_duplicate=False):
        yield f"layer {name}", layer
    for name, tensor in registered(module):
        yield f"tensor {name}", tensor


class _Known:
    """Knows what is registered in a module: both sides have it, so it is only named."""

    def __init__(self, module: nn.Module, *, shares: bool = True) -> None:
        """Take note of ``module``.

        It ``shares`` memory with the other side's if neither is divided.
        """
        found = list(_registered(module))
        self.names = {id(value): name for name, value in reversed(found)}
        tensors = dict(registered(module))
        self.tensors = tensors
        self._memory = SharedMemory(tensors if shares else {})

    def shown(self, value: Any) -> list[Any] | None:
        """Describe which registered tensor a value is or shows, for `_show`; None: it is none."""
        name = self.names.get(id(value), "")
        if isinstance(value, torch.Tensor) and name:
            return ["itself", name.removeprefix("tensor ")]
        return _shown(value, self._memory)


def _shown(value: Any, memory: SharedMemory) -> list[Any] | None:
    """Describe what a tensor or array shows of the tensors whose memory is known, for `_show`."""
    if isinstance(value, torch.Tensor):
        found = memory.of_tensor(value)
        if found is not None:
            name, base = found
            offset = int(value.storage_offset() - base.storage_offset())
            return ["view", name, base.stride(), offset, tuple(value.shape), value.stride()]
    elif type(value) is np.ndarray:
        found = memory.named_of_array(value)
        if found is not None:
            name, base = found
            offset = value.ctypes.data - base.data_ptr()
            return ["array", name, value.dtype.str, offset, value.shape, value.strides]
    return None


def _show(base: torch.Tensor, kind: str, name: str, *about: Any) -> Any:
    """Make what `_Known.shown` has found, of the tensor with that name."""
    if kind == "itself":
        return base
    return view_of(base, *about) if kind == "view" else array_of(base, *about)


def _put(whole: Any, steps: list[Any], value: Any) -> Any:
    """A value with another one at the end of some steps into it."""
    if not steps:
        return value
    part = _put(whole[steps[0]], steps[1:], value)
    if isinstance(whole, tuple):
        return (*whole[: steps[0]], part, *whole[steps[0] + 1 :])
    whole[steps[0]] = part
    return whole


def _layers(module: nn.Module) -> dict[str, Any]:
    """Return each layer's class, parts, parameters and hooks, as this process knows them."""

    def hooks(owner: Any, registers: Any) -> list[list[int]]:
        found = (getattr(owner, register, None) or {} for register in registers)
        return [[id(hook) for hook in one.values() if not _is_of_training(hook)] for one in found]

    return {
        name: (
            type(layer),
            [key for key, _ in layer._modules.items()],
            [(key, p is None or hooks(p, TENSOR_HOOKS)) for key, p in layer._parameters.items()],
            hooks(layer, sorted(HOOKS)),
        )
        for name, layer in module.named_modules(remove_duplicate=False)
    }


def _in_evaluation(module: nn.Module) -> list[str]:
    return [name for name, layer in module.named_modules() if not layer.training]


def _devices(value: Any) -> set[str]:
    """Kinds of devices on which the tensors of a value lie; raises CheckpointError."""
    return {tensor.device.type for tensor in tensor_tree.pack(value)[1].values()}


def _plain(value: Any, device: torch.device | None = None) -> Any:
    """A value with tensors of no graph, on ``device`` if there is one; raises CheckpointError."""
    tree, tensors = tensor_tree.pack(value)
    found = {name: t if device is None else t.to(device) for name, t in tensors.items()}
    return tensor_tree.unpack(tree, found)


def _of_script(layer: torch.jit.ScriptModule) -> dict[str, Any]:
    """Return the attributes of a scripted layer, as Python has them; not those of its own classes.

    Nothing lists their names but a text for readers, in which they are indented by four.
    """
    text = layer._c.dump_to_str(False, False, False)
    names = [name for name in _OF_SCRIPTS.findall(text) if layer._c.hasattr(name)]
    found = {name: layer._c.getattr(name) for name in dict.fromkeys(names)}
    registers = layer._parameters, layer._buffers, layer._modules
    known = {name for register in registers for name in register.keys()}  # noqa: SIM118
    return {
        name: value
        for name, value in found.items()
        if name not in known and not isinstance(value, torch.ScriptObject)
    }


def _is_of_training(value: Any) -> bool:
    """True for what training or torch's compiler keeps in a module while it lasts."""
    value = value.func if isinstance(value, functools.partial) else value
    owner = getattr(value, "__module__", None) or ""
    return str(owner).startswith(_OF_TRAINING)


def _path(layer: str, key: str) -> str:
    return ".".join(filter(None, (layer, key)))


class _Referring(ModulePickler):
    """Names what is registered in the module, which the driver has."""

    def __init__(self, file: io.BytesIO, known: _Known) -> None:
        super().__init__(file)
        self._known = known

    def persistent_id(self, value: Any) -> Any:
        return self._known.names.get(id(value)) or super().persistent_id(value)

    def reducer_override(self, value: Any) -> Any:
        shown = self._known.shown(value)
        if shown is None:
            return super().reducer_override(value)
        shows = _show, (self._known.tensors[shown[1]], *shown)
        if isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf:
            return of_kind, (type(value), Reducible(shows), True)
        return shows


def _can_be_sent(value: Any, known: _Known) -> bool:
    try:
        _Referring(io.BytesIO(), known).dump(value)
    except Exception:  # whatever the value's class raises
        return False
    return True


class _Marking(Pickler):
    """Writes what tells one value from another in this process."""

    def __init__(self, file: io.BytesIO, known: _Known, held: list[Any]) -> None:
        """Write to ``file``; ``held`` gets objects that can be changed in place."""
        super().__init__(file)
        self._known, self._held = known, held

    def persistent_id(self, value: Any) -> Any:
        """A name, or what tells a tensor from others; code is what it is."""
        if id(value) in self._known.names:
            return self._known.names[id(value)]
        if isinstance(value, _SHARED) or hasattr(value, "__dict__"):
            if not isinstance(value, type | types.FunctionType | types.ModuleType):
                self._held.append(value)
            shown = self._known.shown(value)
            if shown is not None:
                return *map(str, shown), str(type(value)), getattr(value, "requires_grad", None)
        if isinstance(value, type | types.FunctionType):
            return "code", id(value)
        if not isinstance(value, torch.Tensor):
            return None
        if type(value) not in (torch.Tensor, nn.Parameter) or value.is_meta or value.is_quantized:
            return "tensor", id(value), value._version
        if value.layout is not torch.strided:
            parts = tensor_tree.pack(value.detach())[1].values()
            return "tensor", str(value.layout), *map(fingerprint, parts)
        numbers = fingerprint(value.detach().resolve_conj().resolve_neg())
        return "tensor", str(value.dtype), tuple(value.shape), value.requires_grad, numbers


def _mark_of_twin(value: Any, known: _Known) -> Any:
    """As `_mark`; of a layer what it holds, though it is registered."""
    if not isinstance(value, nn.Module):
        return _mark(value, known, [])
    attributes = {(name, key): _mark(one, known, []) for name, key, one in _values(value)}
    tensors = {place.name: fingerprint(place.value) for place in places_of(value)}
    return attributes, tensors


def _mark(value: Any, known: _Known, held: list[Any]) -> Any:
    """Return a mark that other values do not have in this process; None: it is no matter."""
    if _is_of_training(value):
        return None
    if type(value) in _PLAIN:
        return type(value), repr(value)
    file = io.BytesIO()
    try:
        _Marking(file, known, held).dump(value)
    except Exception:  # whatever the value's class raises
        return type(value), id(value)
    return type(value), hashlib.sha256(file.getbuffer()).digest()
