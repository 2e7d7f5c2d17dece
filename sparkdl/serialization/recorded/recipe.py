"""Recipes of tensors that are not kept: the operations that they depend on, as plain values."""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

AS_ON_CPU: dict[Any, Any] = {
    torch.Tensor.device.__get__: torch.device("cpu"),
    torch.Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
}
"""Answers that Python gets for a tensor that is to be on the CPU."""


class NotRecorded(Exception):
    """The factory does what cannot be done again one tensor at a time."""


@dataclass(frozen=True)
class TensorPlace:
    """The place of a tensor in a storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def in_storage(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor in this storage."""
        tensor = torch.empty(0, dtype=self.dtype, device="cpu")
        return tensor.set_(storage, self.offset, self.size, self.stride)

    def blank(self) -> torch.Tensor:
        """One like it on the meta device."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")

    @property
    def is_dense(self) -> bool:
        """True if its numbers lie beside each other, in any order."""
        expected = 1
        for stride, length in sorted(zip(self.stride, self.size, strict=True)):
            if length != 1 and stride != expected:
                return False
            expected *= length
        return self.offset == 0


@dataclass(frozen=True)
class Constant:
    """A tensor from elsewhere, by its number."""

    number: int


@dataclass(frozen=True)
class Drawn:
    """The place of a generator of the factory's own among the arguments."""


@dataclass(frozen=True)
class Step:
    """One operation."""

    name: str
    args: Any
    kwargs: Mapping[str, Any]
    made: tuple[tuple[int, TensorPlace], ...]
    """Outputs in storages of their own, with their numbers among the outputs."""
    reads: frozenset[int]
    """Storages whose numbers count before it."""
    writes: frozenset[int]
    state: bytes | None
    """State of the generator before; None: nothing is drawn."""

    def run(self, real: Callable[[Any], Any]) -> list[Any]:
        """Do it again with what ``real`` gives for its arguments; returns the outputs."""
        namespace, name, overload = self.name.split(".")
        function = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            generator = None
            if self.state is not None:
                state = torch.frombuffer(bytearray(self.state), dtype=torch.uint8)
                if any(isinstance(value, Drawn) for value in self.kwargs.values()):
                    generator = torch.Generator()
                    generator.set_state(state)
                else:
                    stack.enter_context(torch.random.fork_rng(devices=[]))
                    torch.default_generator.set_state(state)

            def given(value: Any) -> Any:
                return generator if isinstance(value, Drawn) else real(value)

            args, kwargs = tree_map(given, self.args), tree_map(given, dict(self.kwargs))
            return tree_flatten(function(*args, **kwargs))[0]


@dataclass
class Recipe:
    """The way to make tensors: the operations that they depend on."""

    steps: list[Step] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Bytes of each storage."""
    constants: list[torch.Tensor] = field(default_factory=list)
    num_threads: int = 1
    """Threads of torch where it was written; the bits of matrix products depend on it."""
    written: dict[int, list[int]] = field(default_factory=dict)
    """Numbers of the steps that write to a storage."""

    def add(self, step: Step) -> None:
        """Append an operation."""
        for storage in step.writes:
            self.written.setdefault(storage, []).append(len(self.steps))
        self.steps.append(step)

    def needed(self, storages: Sequence[int]) -> list[int]:
        """Numbers of the steps on which the contents of storages depend, in order."""
        found: set[int] = set()
        left: list[int] = []

        def want(storage: int, before: int) -> None:
            numbers = self.written.get(storage, [])
            place = bisect_left(numbers, before)
            if place and numbers[place - 1] not in found:
                found.add(numbers[place - 1])
                heapq.heappush(left, -numbers[place - 1])

        for storage in storages:
            want(storage, len(self.steps))
        while left:
            number = -heapq.heappop(left)
            for storage in self.steps[number].reads:
                want(storage, number)
        return sorted(found)

    def make(self, places: Sequence[TensorPlace]) -> list[torch.Tensor]:
        """Tensors with the values that they have after all steps; others are let go at once.

        Raises:
            NotRecorded: an operation gives another shape than it did when it was noted.
        """
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return self._made(places)

    def _made(self, places: Sequence[TensorPlace]) -> list[torch.Tensor]:
        numbers = self.needed([place.storage for place in places])
        last = {s: n for n in numbers for s in self.steps[n].reads | self.steps[n].writes}
        last |= {place.storage: len(self.steps) for place in places}
        storages: dict[int, torch.UntypedStorage] = {}

        def real(value: Any) -> Any:
            if isinstance(value, TensorPlace):
                if value.storage not in storages:
                    storages[value.storage] = storage_of_size(self.sizes[value.storage])
                return value.in_storage(storages[value.storage])
            return self.constants[value.number] if isinstance(value, Constant) else value

        for number in numbers:
            step = self.steps[number]
            outputs = step.run(real)
            for index, place in step.made:
                found = outputs[index]
                if place != place_of(found, place.storage):
                    raise NotRecorded(f"{step.name} gives {tuple(found.stride())} as strides")
                storages[place.storage] = found.untyped_storage()
            del outputs
            for storage in step.reads | step.writes:
                if last[storage] == number:
                    storages.pop(storage, None)
        return [real(place) for place in places]

    def only(self, storages: Sequence[int]) -> Recipe:
        """Return the part of it that these storages need."""
        numbers = self.needed(storages)
        found = Recipe(sizes=self.sizes, constants=self.constants, num_threads=self.num_threads)
        for number in numbers:
            found.add(self.steps[number])
        used = {
            value.number
            for step in found.steps
            for value in tree_flatten((step.args, dict(step.kwargs)))[0]
            if isinstance(value, Constant)
        }
        none = torch.empty(0)
        found.constants = [
            value if number in used else none for number, value in enumerate(self.constants)
        ]
        return found


def place_of(tensor: torch.Tensor, storage: int) -> TensorPlace:
    """Return the place of ``tensor`` in its storage, which has this number."""
    size, stride = tuple(tensor.shape), tuple(tensor.stride())
    return TensorPlace(storage, tensor.dtype, size, stride, int(tensor.storage_offset()))


class RecordedWeights:
    """The parameters of a module that a factory has made, which are on the meta device."""

    def __init__(self) -> None:
        self.recipe = Recipe(num_threads=torch.get_num_threads())
        self._numbers: dict[int, int] = {}
        self._kept: list[torch.UntypedStorage] = []
        """Meta storages, so that no other gets the same address."""
        self._digests: dict[TensorPlace, str] = {}
        self._read: dict[int, tuple[TensorPlace, Callable[[], torch.Tensor]]] = {}
        """Storages whose contents come from elsewhere."""

    def place(self, tensor: torch.Tensor) -> TensorPlace | None:
        """Return the place of one of the factory's tensors; None: it is none of them."""
        if is_lazy(tensor) or not torch._C._has_storage(tensor):
            return None
        number = self._numbers.get(_address(tensor))
        if number is None:
            return None
        if tensor.is_conj() or tensor.is_neg():
            raise NotRecorded("it uses conjugate views of complex numbers")
        return place_of(tensor, number)

    def number(self, storage: torch.UntypedStorage) -> int | None:
        """The number of a storage in the recipe; None: the factory's tensors do not lie in it."""
        return self._numbers.get(storage._cdata)

    def taken(self, tensor: torch.Tensor) -> TensorPlace:
        """The place of a tensor that the factory has just made."""
        storage = tensor.untyped_storage()
        self._numbers[_address(tensor)] = len(self._kept)
        self._kept.append(storage)
        self.recipe.sizes.append(storage.nbytes())
        return place_of(tensor, len(self._kept) - 1)

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of one of the factory's tensors; None: it is none of them."""
        place = self.place(tensor)
        return None if place is None else self._made(place)

    def take(self, tensor: torch.Tensor, read: Callable[[], torch.Tensor]) -> None:
        """Let the values of a parameter be those that ``read`` gives, in its dtype."""
        place = self.place(tensor)
        assert place is not None
        if (
            place.is_dense
            and math.prod(place.size) * place.dtype.itemsize == (self.recipe.sizes[place.storage])
        ):
            self._read[place.storage] = place, read
            self._digests.clear()
            return
        raise NotRecorded("a parameter is a part of another tensor")

    def is_taken(self, number: int) -> bool:
        """Return True if `take` has given the values in this storage."""
        return number in self._read

    def contents(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The bytes of a storage whose values `take` has given."""
        place, _ = self._read[self._numbers[storage._cdata]]
        made = self._made(place).untyped_storage()
        return torch.empty(0, dtype=torch.uint8).set_(made, 0, (made.nbytes(),), (1,))

    def _made(self, place: TensorPlace) -> torch.Tensor:
        if place.storage not in self._read:
            return self.recipe.make([place])[0]
        whole, read = self._read[place.storage]
        with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
            values = torch.empty_strided(whole.size, whole.stride, dtype=whole.dtype).copy_(read())
            return place.in_storage(values.untyped_storage())

    def digest(self, tensor: torch.Tensor) -> str | None:
        """The SHA-256 of these values."""
        place = self.place(tensor)
        if place is not None and place not in self._digests:
            self._digests[place] = digest_of(self._made(place))
        return None if place is None else self._digests[place]

    def fill(self, module: nn.Module) -> None:
        """Give the module that these are of all its weights."""
        places = [(parameter, self.place(parameter)) for parameter in module.parameters()]
        give_memory(module, torch.device("cpu"))
        for parameter, place in places:
            if place is not None:
                parameter.detach().copy_(self._made(place))

    def packed(self, numbers: Mapping[int, int]) -> bytes:
        """Pack how these storages of the recipe are made, in memory only."""
        sent: bytes = cloudpickle.dumps((dict(numbers), self.recipe.only(list(numbers.values()))))
        return sent

    @staticmethod
    def unpacked(sent: bytes) -> tuple[dict[int, int], Recipe]:
        """Unpack what `packed` has packed."""
        found: tuple[dict[int, int], Recipe] = cloudpickle.loads(sent)
        return found


def digest_of(tensor: torch.Tensor) -> str:
    """The SHA-256 of a tensor's bytes in the order of its dimensions."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


def storage_of_size(num_bytes: int) -> torch.UntypedStorage:
    """Memory of the CPU with any contents."""
    return torch.UntypedStorage(num_bytes)  # type: ignore[no-untyped-call]


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def give_memory(module: nn.Module, device: torch.device) -> None:
    """Move a module to a device, where its parameters on the meta device get any values.

    Each stays the object that it is, so that those which layers share are still shared. Weak
    references, as recurrent layers and torch's tracers have them, stay, too: where there are such,
    ``torch.utils.swap_tensors`` refuses.
    """

    def placed(value: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(value, device=device) if value.is_meta else value.to(device)

    is_plain = all(type(parameter) is nn.Parameter for parameter in module.parameters())
    for parameter in module.parameters() if is_plain else ():
        if parameter.is_meta or parameter.device != device:
            value = placed(parameter.detach()).requires_grad_(parameter.requires_grad)
            torch._C._swap_tensor_impl(parameter, value)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(not is_plain)
    try:
        module._apply(placed)  # type: ignore[no-untyped-call]
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def is_meta(tensor: torch.Tensor) -> bool:
    """True if it is on the meta device, whatever Python is told."""
    with torch._C.DisableTorchFunction():
        return bool(tensor.is_meta)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors among the arguments or outputs of a function."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]
