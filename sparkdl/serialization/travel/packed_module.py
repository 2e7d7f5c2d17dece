"""A module on its way from the driver to the executors, and the trial of that way on the driver.

The memory of tensors travels as safetensors; the rest of the module is pickled, see `pickling`. A
fit sends both by `Link.send`, and workers call `unpack`; for ``transform`` the three functions at
the end are three ways to get the bytes.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from sparkdl.errors import ConfigError
from sparkdl.runtime.process import default_dtype
from sparkdl.serialization.recorded.recipe import Recipe, RecordedWeights, TensorPlace, place_of
from sparkdl.serialization.travel.pickling import (
    HOOKS,
    TENSOR_HOOKS,
    ModulePickler,
    ModuleUnpickler,
    PickleHead,
    StrictUnpickler,
    own_globals,
)
from sparkdl.storage import tensor_tree
from sparkdl.storage.checkpoint_format import decode, encode
from sparkdl.storage.tensor_file import TensorFile

GetWeight = Callable[[str], torch.Tensor]
"""Gives the values of a parameter by its name."""
Places = list[tuple[TensorPlace, list[str]]]
"""The places of parameters in a memory, with their names."""


@dataclass(frozen=True, kw_only=True)
class PackedModule:
    """A module as bytes."""

    digest: str
    skeleton: bytes
    """The module without the memory of its tensors, pickled, behind a `pickling.PickleHead`."""
    tensors: bytes
    """The memories by their numbers in the skeleton, as `checkpoint_format.encode` writes them."""
    recipe: bytes = b""
    """Recipe of tensors that are not among them, see `RecordedWeights.packed`; empty: all are."""
    pieces: Callable[[], Iterator[bytes | memoryview]] | None = None
    """Gives ``tensors``, which are empty then, piece by piece: they are read from elsewhere."""

    @property
    def num_bytes(self) -> int:
        """Size of all parts."""
        return len(self.skeleton) + len(self.tensors) + len(self.recipe)


def as_on_driver(skeleton: bytes) -> AbstractContextManager[None]:
    """Torch's default dtype is inside what it was in the program that has packed the module."""
    return default_dtype(PickleHead.read(io.BytesIO(skeleton)).default_dtype)


def pack(
    module: nn.Module,
    weights: RecordedWeights | None = None,
    *,
    with_weights: bool = True,
    is_blank: bool = False,
) -> PackedModule:
    """Turn a module into bytes, on the driver; ConfigError if it holds what cannot be sent.

    Args:
        module: without its weights, its parameters are only named; see `unpack`.
        weights: those of its parameters that are on the meta device.
        with_weights: whether parameters are sent too.
        is_blank: whether zeros stand for its weights and buffers, which are brought along anyway.
    """
    elsewhere: dict[int, str] = {}
    if not with_weights:
        elsewhere = {id(parameter): name for name, parameter in module.named_parameters()}
    pickler, skeleton = _pickled(module, weights, elsewhere)
    unmade: dict[int, int] = {}
    is_taken = False
    if weights is not None:
        recorded = {n: weights.number(span.storage) for n, span in enumerate(pickler.spans)}
        unmade = {n: number for n, number in recorded.items() if number is not None}
        for n in [n for n, number in unmade.items() if weights.is_taken(number)]:
            del unmade[n]
            is_taken = True
    blank = _blanks(module) if is_blank else {}

    def values(part: torch.Tensor) -> torch.Tensor:
        if weights is not None and weights.number(part.untyped_storage()) is not None:
            return weights.contents(part.untyped_storage()) if part.numel() else part.new_empty(0)
        if tensors := blank.get(part.untyped_storage()._cdata):
            whole = part.untyped_storage().clone()  # type: ignore[no-untyped-call]
            for tensor in tensors:
                place_of(tensor, 0).in_storage(whole).zero_()
            return part.new_empty(0).set_(whole, part.storage_offset(), part.shape, (1,))
        return part.cpu()

    def pieces() -> Iterator[bytes | memoryview]:
        yield from memories(pickler, values, unmade)

    tensors = b"" if is_taken else b"".join(pieces())
    recipe = b"" if weights is None or not unmade else weights.packed(unmade)
    contents = hashlib.sha256(tensors).digest() + hashlib.sha256(recipe).digest()
    digest = hashlib.sha256(skeleton + contents).hexdigest()
    return PackedModule(
        digest=digest,
        skeleton=skeleton,
        tensors=tensors,
        recipe=recipe,
        pieces=pieces if is_taken else None,
    )


def memories(
    pickler: ModulePickler,
    values: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.cpu,
    unmade: Collection[int] = (),
) -> Iterator[bytes | memoryview]:
    """The memory of tensors that have been pickled, by its numbers; of ``unmade`` nothing."""
    named: dict[str, torch.Tensor] = {}
    for number, span in enumerate(pickler.spans):
        part = torch.empty(0, dtype=torch.uint8, device=span.storage.device)
        begin, size = (0, 0) if number in unmade else (span.begin, max(0, span.end - span.begin))
        named[str(number)] = part.set_(span.storage, begin, (size,), (1,))
    tree = [{"tensor": number} for number in named]
    yield from encode(tensor_tree.Snapshot(tree, named), values)


def pack_blank(module: nn.Module) -> PackedModule:
    """The module with zeros for its weights and buffers, where these are brought along anyway."""
    return pack(module, is_blank=True)


def _blanks(module: nn.Module) -> dict[int, list[torch.Tensor]]:
    """The weights and buffers that a state dict has, by their memory."""
    found: dict[int, list[torch.Tensor]] = {}
    for value in module.state_dict().values():
        if isinstance(value, torch.Tensor) and _is_dense(value) and not value.is_quantized:
            found.setdefault(value.untyped_storage()._cdata, []).append(value)
    return found


def _pickled(
    module: nn.Module, weights: RecordedWeights | None, elsewhere: Mapping[int, str] | None = None
) -> tuple[ModulePickler, bytes]:
    """The skeleton of a module, and what knows its memories; raises ConfigError."""
    file = io.BytesIO()

    def is_made(tensor: torch.Tensor) -> bool:
        return weights is not None and weights.place(tensor) is not None

    pickler = ModulePickler(file, module, elsewhere, is_made)
    try:
        pickler.dump(module)
    except Exception as error:  # whatever the user's classes raise when they are pickled
        raise ConfigError(
            f"the module cannot be sent to the workers: {type(error).__name__}: {error}"
            f"{_culprit(module)}; {_to_send(module)}"
        ) from error
    return pickler, pickle.dumps(pickler.head()) + file.getvalue()


def _to_send(module: nn.Module) -> str:
    """Say what to do with a module that cannot be sent."""
    if any(isinstance(one, GraphModule) and hasattr(one, "shape_env") for one in module.modules()):
        return "a program of torch.export has no training mode: give the module that was exported"
    return (
        "make locks, files and sessions where forward first needs them, or leave them out in a "
        "__getstate__ of the class"
    )


def _culprit(module: nn.Module) -> str:
    """Name the part of a module that cannot be sent, for a message."""
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            is_register = isinstance(value, dict) and key in {"_parameters", "_buffers", *HOOKS}
            found = {f"{key}[{k!r}]": v for k, v in value.items()} if is_register else {key: value}
            if key in ("_parameters", "_buffers"):
                found = value
            if key != "_modules":
                for own, item in found.items():
                    if not _can_be_sent(item):
                        return f" (its attribute {'.'.join(filter(None, (name, own)))})"
        kind = type(part)
        if not _can_be_sent(kind):
            used = {
                f"{key}, which uses {known}" if known else key
                for key, member in vars(kind).items()
                if not key.startswith("__") or callable(member)
                for known in _unsendable(member)
            }
            shown = f": {min(used)}" if used else ""
            return f" (its class {kind.__qualname__}{shown})"
    return ""


def _unsendable(member: Any) -> Iterator[str]:
    """The global names of a function that cannot be sent; an empty one if it is no function."""
    code = getattr(member, "__code__", None)
    if code is None:
        if not _can_be_sent(member):
            yield ""
        return
    for name in code.co_names:
        if name in member.__globals__ and not _can_be_sent(member.__globals__[name]):
            yield name


def _can_be_sent(value: Any) -> bool:
    try:
        ModulePickler(io.BytesIO()).dump(value)
    except Exception:  # as above
        return False
    return True


def travelled(
    module: nn.Module, weights: RecordedWeights | None = None, *, copies: bool
) -> nn.Module:
    """The module as it arrives at a worker, before any job.

    Args:
        module: an instance of the user's, or what a factory has made.
        weights: see `pack`.
        copies: whether it has memory of its own; otherwise ``module`` must not be used any more.

    Raises:
        ConfigError: it cannot be sent, or what arrives is another module.
    """
    pickler, skeleton = _pickled(module, weights)

    def storage(number: int) -> torch.UntypedStorage:
        span = pickler.spans[number]
        if weights is not None and weights.number(span.storage) is not None:
            return span.storage
        is_part = span.end - span.begin < span.storage.nbytes()
        if not copies and span.storage.device.type == "cpu" and not is_part:
            return span.storage
        flat = torch.empty(0, dtype=torch.uint8, device=span.storage.device)
        flat = flat.set_(span.storage, span.begin, (max(0, span.end - span.begin),), (1,))
        return flat.to("cpu", copy=True).untyped_storage()

    try:
        with own_globals():
            arrived: nn.Module = StrictUnpickler(io.BytesIO(skeleton), storage).load()
    except Exception as error:  # whatever the user's classes raise when they are unpickled
        raise ConfigError(
            f"the module cannot be made again on the workers: {type(error).__name__}: {error}; see "
            "what its classes do in __init__, __setstate__ and __reduce__"
        ) from error
    difference = _difference(module, arrived)
    if difference is not None:
        remedy = "see what its classes do in __getstate__, __setstate__ and __reduce__"
        if _APART in difference and _has_scripts(module):
            remedy = (
                "a scripted layer travels with weights of its own: use the layer itself in all "
                "places, or script them together as one"
            )
        raise ConfigError(
            f"the module that arrives at the workers is another one: {difference}; {remedy}"
        )
    return arrived


_APART = "do not share memory any more"


def _has_scripts(module: nn.Module) -> bool:
    return any(isinstance(layer, torch.jit.ScriptModule) for layer in module.modules())


def _difference(given: nn.Module, arrived: Any) -> str | None:
    """Say what of a module's tensors and hooks has not arrived, or return None."""
    if not isinstance(arrived, nn.Module):
        return f"it is a {type(arrived).__name__}"
    ours, theirs = _tensors(given), _tensors(arrived)
    for name in ours.keys() ^ theirs.keys():
        return f"{name} is {'missing' if name in ours else 'new'}"
    for name, tensor in ours.items():
        if _kind(tensor) != _kind(theirs[name]):
            return f"{name} is {_kind(theirs[name])}, and was {_kind(tensor)}"
        if not _has_same_bytes(tensor, theirs[name]):
            return f"{name} has other values"
    if sharing_memory(ours) != sharing_memory(theirs):
        lost = [group for group in sharing_memory(ours) if group not in sharing_memory(theirs)]
        return f"{' and '.join(lost[0] if lost else [])} {_APART}"
    hooks, arrived_hooks = _hooks(given), _hooks(arrived)
    for name in sorted(hooks.keys() | arrived_hooks.keys()):
        if hooks.get(name) != arrived_hooks.get(name):
            return f"the hooks of {name} are not all there"
    return None


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(
        [
            *nn.Module.named_parameters(module, remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
    )


def _kind(tensor: torch.Tensor) -> str:
    if nn.parameter.is_lazy(tensor):
        return "a tensor without a shape yet"
    strides = tuple(tensor.stride()) if _is_dense(tensor) and tensor.numel() else ""
    train = "trained" if tensor.requires_grad and tensor.is_leaf else "not trained"
    shape = "nested" if tensor.is_nested else tuple(tensor.shape)
    name = "" if type(tensor) in (torch.Tensor, nn.Parameter) else f"{type(tensor).__name__} "
    return f"{name}{tensor.dtype} {shape} {tensor.layout} {strides} {train}"


def _is_dense(tensor: torch.Tensor) -> bool:
    is_there = not nn.parameter.is_lazy(tensor) and torch._C._has_storage(tensor)
    return is_there and tensor.layout is torch.strided and not tensor.is_nested


def _has_same_bytes(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if not _is_dense(ours) or ours.is_meta or ours.is_quantized or ours.numel() == 0:
        return True
    if ours.untyped_storage()._cdata == theirs.untyped_storage()._cdata:
        return True
    flat = [
        t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1) for t in (ours, theirs)
    ]
    return torch.equal(flat[0].cpu().view(torch.uint8), flat[1].view(torch.uint8))


def sharing_memory(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Names of the tensors that share memory, group by group."""
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if _is_dense(tensor) and tensor.numel() and not tensor.is_meta:
            groups.setdefault(tensor.untyped_storage()._cdata, []).append(name)
    return sorted(group for group in groups.values() if len(group) > 1)


def overlapping(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Names of the tensors of which some bytes are the same, or may be, group by group.

    Slices of one memory that follow each other are not among them.
    """
    found: list[list[str]] = []
    for names in sharing_memory(tensors):
        until = -1
        for name in sorted(names, key=lambda name: tensors[name].data_ptr()):
            tensor, begin = tensors[name], tensors[name].data_ptr()
            if begin < until:
                found[-1].append(name)
            else:
                found.append([name])
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            reach = 1 + sum((size - 1) * step for size, step in steps)
            until = max(until, begin + reach * tensor.element_size())
    return [sorted(group) for group in found if len(group) > 1]


def num_hooks(tensor: torch.Tensor) -> int:
    """Count the hooks that wait for the gradient of a tensor."""
    return sum(len(getattr(tensor, key, None) or ()) for key in TENSOR_HOOKS)


def _hooks(module: nn.Module) -> dict[str, int]:
    """Count the hooks that tensors and layers have, by name."""
    found: dict[str, int] = {}
    for name, tensor in _tensors(module).items():
        found[name] = num_hooks(tensor)
    for name, part in module.named_modules():
        registers = [vars(part).get(key) for key in sorted(HOOKS)]
        found[f"layer {name!r}"] = sum(len(item) for item in registers if isinstance(item, dict))
    return {name: count for name, count in found.items() if count}


def unpack(skeleton: bytes, tensors: bytes, weights: GetWeight | None = None) -> nn.Module:
    """Rebuild the module of a `PackedModule`'s parts; its tensors are on the CPU.

    ``weights`` gives the parameters, by name, of a module that was packed without them.
    """
    memories = decode(tensors, "the module")
    unpickler = ModuleUnpickler(
        io.BytesIO(skeleton), lambda number: _storage(memories[number]), weights
    )
    module: nn.Module = unpickler.load()
    return module


def _storage(memory: torch.Tensor) -> torch.UntypedStorage:
    return memory.untyped_storage()


def unpack_unmade(
    skeleton: bytes, tensors: bytes, recipe: bytes
) -> tuple[nn.Module, Recipe, Places]:
    """Rebuild the module of a `PackedModule`'s parts; what the recipe makes is on the meta device.

    Returns:
        The module, the recipe, and the places of what it makes, with the parameters' names.
    """
    numbers, made = RecordedWeights.unpacked(recipe)
    memories = decode(tensors, "the module")

    def storage(number: int) -> torch.UntypedStorage:
        if number in numbers:
            return _on_meta(made.sizes[numbers[number]])
        return _storage(memories[number])

    unpickler = ModuleUnpickler(io.BytesIO(skeleton), storage)
    module: nn.Module = unpickler.load()
    return module, made, _made_places(module, unpickler, numbers)


def unpack_blank(
    skeleton: bytes,
    contents: TensorFile,
    read: Callable[[str], torch.Tensor],
    numbers: Mapping[int, int] = MappingProxyType({}),
    made: Recipe | None = None,
) -> tuple[nn.Module, dict[str, Places], Places]:
    """Rebuild the module without the values of its parameters, which are on the meta device.

    Args:
        skeleton: see `PackedModule`.
        contents: of its ``tensors``.
        read: gets one of them; asked in the same order wherever the skeleton is the same.
        numbers: of what a recipe makes instead: of memory there, by number here.
        made: the recipe.

    Returns:
        The module, whose buffers and other tensors have their values; the places of the parameters
        that lack them, by the names of their memories in the file; and the places of those that
        the recipe makes.
    """

    def storage(number: int) -> torch.UntypedStorage:
        if number in numbers:
            assert made is not None
            return _on_meta(made.sizes[numbers[number]])
        name = str(number)
        if number in unpickler.head.of_parameters:
            begin, end = contents.entries[name]["data_offsets"]
            return _on_meta(end - begin)
        return _storage(read(name))

    unpickler = ModuleUnpickler(io.BytesIO(skeleton), storage)
    module: nn.Module = unpickler.load()
    blank: dict[str, Places] = {}
    for number, places in _places(module, unpickler).items():
        if number not in numbers:
            blank[str(number)] = places
    return module, blank, _made_places(module, unpickler, numbers)


def _on_meta(num_bytes: int) -> torch.UntypedStorage:
    return torch.UntypedStorage(num_bytes, device="meta")  # type: ignore[no-untyped-call]


def _places(module: nn.Module, unpickler: ModuleUnpickler) -> dict[int, Places]:
    """Return the places of parameters on the meta device, by the numbers of the memories."""
    numbers = {m.storage._cdata: number for number, m in sorted(unpickler.memories.items())}
    found: dict[int, Places] = {}
    for name, parameter in module.named_parameters():
        if parameter.is_meta and not nn.parameter.is_lazy(parameter):
            number = numbers.get(parameter.untyped_storage()._cdata)
            if number is not None:
                found.setdefault(number, []).append((place_of(parameter, number), [name]))
    return found


def _made_places(
    module: nn.Module, unpickler: ModuleUnpickler, numbers: Mapping[int, int]
) -> Places:
    places = _places(module, unpickler)
    return [
        (replace(place, storage=numbers[number]), names)
        for number in sorted(numbers.keys() & places.keys())
        for place, names in places[number]
    ]


def given(packed: PackedModule) -> PackedModule:
    """The module itself, for one that travels inside the closure."""
    return packed


def from_broadcast(broadcast: Any) -> PackedModule:
    """The module in a broadcast variable of classic Spark."""
    packed: PackedModule = broadcast.value
    return packed


def from_artifact(file_name: str) -> PackedModule:
    """The module in a file that Spark Connect has brought to this executor: a pickled one."""
    from pyspark import SparkFiles

    packed: PackedModule = pickle.loads(Path(SparkFiles.get(file_name)).read_bytes())
    return packed
