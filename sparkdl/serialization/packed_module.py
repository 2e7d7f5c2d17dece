"""A module on its way from the driver to the executors.

Tensors travel as safetensors; the rest of the module is pickled by value, in memory only, so that
a class from a notebook works. The three ways to get the bytes are the three functions at the end.
"""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import cloudpickle
import torch
from torch import nn

from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.serialization.recorded.recipe import Place, Recipe, RecordedWeights
from sparkdl.storage import tensor_tree
from sparkdl.storage.checkpoint_format import decode, encode
from sparkdl.storage.tensor_file import TensorFile

GetWeight = Callable[[str], torch.Tensor]
"""Gives the values of a parameter by its name."""


@dataclass(frozen=True, kw_only=True)
class PackedModule:
    """A module as bytes."""

    digest: str
    skeleton: bytes
    """The module without its tensors, pickled."""
    tensors: bytes
    """The tensors by their numbers in the skeleton, as `checkpoint_format.encode` writes them."""
    recipe: bytes = b""
    """How those are made that are not among them, see `RecordedWeights.packed`; empty: all are."""
    pieces: Callable[[], Iterator[bytes | memoryview]] | None = None
    """Gives ``tensors``, which are empty then, piece by piece: they are read from elsewhere."""

    @property
    def num_bytes(self) -> int:
        """Size of all parts."""
        return len(self.skeleton) + len(self.tensors) + len(self.recipe)


class _TensorPickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle has no types
    """Pickles by value, but collects tensors instead of pickling them."""

    def __init__(self, file: io.BytesIO, elsewhere: Mapping[int, str]) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}
        self._elsewhere = elsewhere

    def persistent_id(self, value: Any) -> tuple[int | str, bool, bool] | None:
        """Number the tensor, by identity, so that tied weights stay tied."""
        if not isinstance(value, torch.Tensor):
            return None
        if id(value) in self._elsewhere:
            return self._elsewhere[id(value)], True, value.requires_grad
        number = self._numbers.setdefault(id(value), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value)
        return number, isinstance(value, nn.Parameter), value.requires_grad


class _TensorUnpickler(pickle.Unpickler):
    def __init__(
        self, file: io.BytesIO, tensors: list[torch.Tensor], weights: GetWeight | None = None
    ) -> None:
        super().__init__(file)
        self._tensors, self._weights = tensors, weights
        self.parameters: dict[int | str, nn.Parameter] = {}

    def persistent_load(self, pid: tuple[int | str, bool, bool]) -> torch.Tensor:
        number, is_parameter, requires_grad = pid
        if is_parameter and number in self.parameters:
            return self.parameters[number]
        if isinstance(number, str):
            assert self._weights is not None
            tensor = self._weights(number)
        else:
            tensor = self._tensor(number, is_parameter)
        if is_parameter:
            return self.parameters.setdefault(number, nn.Parameter(tensor, requires_grad))
        return tensor

    def _tensor(self, number: int, is_parameter: bool) -> torch.Tensor:
        return self._tensors[number]


class _BlankUnpickler(_TensorUnpickler):
    """Leaves parameters on the meta device; asks for other tensors when it meets them."""

    def __init__(
        self,
        file: io.BytesIO,
        contents: TensorFile,
        read: Callable[[str], torch.Tensor],
        places: Mapping[int, Place],
    ) -> None:
        super().__init__(file, [])
        self._contents, self._read = contents, read
        self._places = places
        self._known: dict[int, torch.Tensor] = {}

    def name(self, number: int) -> str:
        """That which a tensor has in the file."""
        (name,) = self._contents.tree[number].values()
        return str(name)

    def values(self, number: int) -> torch.Tensor:
        """A tensor as it was packed."""
        name = self.name(number)
        found: torch.Tensor = tensor_tree.unpack(
            self._contents.tree[number], {name: self._read(name)}
        )
        return found

    def _tensor(self, number: int, is_parameter: bool) -> torch.Tensor:
        if number in self._places:
            return self._places[number].blank()
        if is_parameter and "tensor" in self._contents.tree[number]:
            return self._contents.empty(self.name(number), "meta")
        if number not in self._known:
            self._known[number] = self.values(number)
        return self._known[number]


def pack(
    module: nn.Module, weights: RecordedWeights | None = None, *, with_weights: bool = True
) -> PackedModule:
    """Turn a module into bytes, on the driver; ConfigError if it holds what cannot be sent.

    Args:
        module: without its weights, its parameters are only named; see `unpack`.
        weights: those of its parameters that are on the meta device.
        with_weights: whether parameters are sent too.
    """
    file = io.BytesIO()
    elsewhere: dict[int, str] = {}
    if not with_weights:
        elsewhere = {id(parameter): name for name, parameter in module.named_parameters()}
    pickler = _TensorPickler(file, elsewhere)
    unmade: dict[int, torch.Tensor] = {}
    try:
        pickler.dump(module)
        taken: dict[int, torch.Tensor] = {}
        if weights is not None:
            unmade = {n: t for n, t in enumerate(pickler.tensors) if weights.place(t) is not None}
            taken = {n: unmade.pop(n) for n in list(unmade) if weights.is_taken(unmade[n])}
        plain = [
            torch.empty(0)
            if n in unmade or n in taken
            else t.detach().as_subclass(torch.Tensor).cpu()
            for n, t in enumerate(pickler.tensors)
        ]
        tree, named = tensor_tree.pack(plain)
    except (pickle.PicklingError, TypeError, AttributeError, CheckpointError) as error:
        raise ConfigError(f"the module cannot be sent to executors: {error}") from error
    for number, tensor in taken.items():
        tree[number] = {"tensor": f"taken.{number}"}
        named[f"taken.{number}"] = tensor.detach()

    def pieces() -> Iterator[bytes | memoryview]:
        yield from encode(tensor_tree.Snapshot(tree, named), values)

    def values(tensor: torch.Tensor) -> torch.Tensor:
        found = None if weights is None else weights.of(tensor)
        return tensor.detach() if found is None else found

    tensors = b"" if taken else b"".join(pieces())
    skeleton = file.getvalue()
    recipe = b"" if weights is None or not unmade else weights.packed(unmade)
    contents = hashlib.sha256(tensors).digest() + hashlib.sha256(recipe).digest()
    digest = hashlib.sha256(skeleton + contents).hexdigest()
    return PackedModule(
        digest=digest,
        skeleton=skeleton,
        tensors=tensors,
        recipe=recipe,
        pieces=pieces if taken else None,
    )


def unpack(skeleton: bytes, tensors: bytes, weights: GetWeight | None = None) -> nn.Module:
    """Rebuild the module of a `PackedModule`'s parts; its tensors are on the CPU.

    ``weights`` gives the parameters, by name, of a module that was packed without them.
    """
    unpickler = _TensorUnpickler(io.BytesIO(skeleton), decode(tensors, "the module"), weights)
    module: nn.Module = unpickler.load()
    return module


class _UnmadeUnpickler(_TensorUnpickler):
    """Leaves what a recipe makes on the meta device."""

    def __init__(
        self, file: io.BytesIO, tensors: list[torch.Tensor], places: Mapping[int, Place]
    ) -> None:
        super().__init__(file, tensors)
        self._places = places

    def _tensor(self, number: int, is_parameter: bool) -> torch.Tensor:
        place = self._places.get(number)
        if place is None:
            return super()._tensor(number, is_parameter)
        return place.blank()


def unpack_unmade(
    skeleton: bytes, tensors: bytes, recipe: bytes
) -> tuple[nn.Module, Recipe, list[tuple[Place, list[str]]]]:
    """Rebuild the module of a `PackedModule`'s parts; what the recipe makes is on the meta device.

    Returns:
        The module, the recipe, and the places of what it makes, with the parameters' names.
    """
    places, made = RecordedWeights.unpacked(recipe)
    unpickler = _UnmadeUnpickler(io.BytesIO(skeleton), decode(tensors, "the module"), places)
    module: nn.Module = unpickler.load()
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters():
        names.setdefault(id(parameter), []).append(name)
    return (
        module,
        made,
        [(place, names[id(unpickler.parameters[number])]) for number, place in places.items()],
    )


def unpack_blank(
    skeleton: bytes,
    contents: TensorFile,
    read: Callable[[str], torch.Tensor],
    places: Mapping[int, Place] = MappingProxyType({}),
) -> tuple[nn.Module, dict[str, list[str]], list[tuple[Place, list[str]]]]:
    """Rebuild the module without the values of its parameters, which are on the meta device.

    Args:
        skeleton: see `PackedModule`.
        contents: of its ``tensors``.
        read: gets one of them; asked in the same order wherever the skeleton is the same.
        places: of what a recipe makes instead, by number.

    Returns:
        The module, whose buffers and other tensors have their values, and the names of the
        parameters that lack them, by the tensors' names in the file, and by their places.
    """
    unpickler = _BlankUnpickler(io.BytesIO(skeleton), contents, read, places)
    module: nn.Module = unpickler.load()
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    blank: dict[str, list[str]] = {}
    made: list[tuple[Place, list[str]]] = []
    for number, parameter in unpickler.parameters.items():
        assert isinstance(number, int)
        if not parameter.is_meta:
            continue
        if number in places:
            made.append((places[number], [names[id(parameter)]]))
        elif id(parameter) in names:
            blank.setdefault(unpickler.name(number), []).append(names[id(parameter)])
        else:  # one that the module does not know of
            known = nn.Parameter(unpickler.values(number), parameter.requires_grad)
            torch.utils.swap_tensors(parameter, known)  # type: ignore[no-untyped-call]
    return module, blank, made


def pack_blank(module: nn.Module) -> PackedModule:
    """The module with zeros for its weights and buffers, where these are brought along anyway."""
    blank = copy.deepcopy(module)
    for tensor in blank.state_dict().values():
        if isinstance(tensor, torch.Tensor):
            tensor.detach().zero_()
    return pack(blank)


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
