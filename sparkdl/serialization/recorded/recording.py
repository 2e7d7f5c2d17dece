"""Weights that a factory gives a module, noted instead of kept, and made one tensor at a time.

The factory runs as ever, but its tensors are on the meta device: each operation on them is noted,
with the state of the generator before those that draw. A tensor is made by doing again what it
depends on, so it has the bits that the factory would have given it. Numbers are drawn while the
factory runs too, one tensor at a time, so that the generator goes on as without this.

After torchdistX's deferred initialization, with the operations as plain values that can be sent.
"""

from __future__ import annotations

import io
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from sparkdl.runtime.process import tuned_allocator
from sparkdl.serialization.recorded.recipe import (
    AS_ON_CPU,
    Constant,
    Drawn,
    NotRecorded,
    RecordedWeights,
    Step,
    TensorPlace,
    is_meta,
    storage_of_size,
    tensors_in,
)

_aten = torch.ops.aten
_FILLS = {
    _aten.bernoulli_.float, _aten.cauchy_.default, _aten.copy_.default, _aten.exponential_.default,
    _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.geometric_.default, _aten.log_normal_.default,
    _aten.normal_.default, _aten.random_.default, _aten.random_.to, _aten.uniform_.default,
    _aten.zero_.default, getattr(_aten.random_, "from"),
}  # fmt: skip
"""Operations that write all of its first argument without reading it."""
_MOST_CONSTANT_BYTES = 16 << 20
"""Most bytes of tensors that a factory has from elsewhere, such as a list of numbers or a file."""


class _Finder(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle has no types
    """Finds the tensors that travel with a module."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.found: dict[int, torch.Tensor] = {}

    def persistent_id(self, value: Any) -> int | None:
        """Note a tensor once."""
        if not isinstance(value, torch.Tensor):
            return None
        self.found[id(value)] = value
        return id(value)


def recorded(make: Callable[[], Any]) -> tuple[nn.Module, RecordedWeights]:
    """The module that ``make`` gives, with its parameters on the meta device, and their values.

    Other tensors of the module have their values. What ``make`` draws from torch's generator of
    the CPU, and where this is afterwards, is as if it were called alone.

    Raises:
        NotRecorded: it does what cannot be done again, with the reason.
        Exception: what ``make`` raises, perhaps only here.
    """
    with tuned_allocator(spares_memory=True):  # large tensors come and go
        return _recorded(make)


def _recorded(make: Callable[[], Any]) -> tuple[nn.Module, RecordedWeights]:
    weights = RecordedWeights()
    recorder = _Recorder(weights)
    try:
        with recorder, _AsOnCpu(weights, recorder):
            module = make()
    finally:  # the factory, or torch, may have caught it
        if recorder.refusal is not None:
            raise NotRecorded(recorder.refusal)
    if not isinstance(module, nn.Module):
        raise NotRecorded(f"it returns a {type(module).__name__}")
    parameters = dict(module.named_parameters())
    for name, parameter in parameters.items():
        if is_lazy(parameter):
            raise NotRecorded(f"{name} gets its shape from the first rows")
        if type(parameter) is not nn.Parameter or weights.place(parameter) is None:
            raise NotRecorded(f"{name} is not made by torch's operations alone")
    owned = {id(parameter) for parameter in parameters.values()}
    try:
        finder = _Finder()
        finder.dump(module)
    except Exception as error:  # whatever the user's classes raise when they are pickled
        raise NotRecorded(f"it cannot be pickled: {error}") from error
    others = [tensor for key, tensor in finder.found.items() if key not in owned]
    _make_real(others, [weights.place(parameter) for parameter in parameters.values()], weights)
    for parameter in parameters.values():
        weights.digest(parameter)  # what cannot be made again shows now
    return module, weights


def _make_real(
    tensors: Sequence[torch.Tensor], owned: Sequence[TensorPlace | None], weights: RecordedWeights
) -> None:
    """Give values to the tensors that are no parameters, in place."""
    taken = {place.storage for place in owned if place is not None}
    places: list[TensorPlace] = []
    unmade: list[torch.Tensor] = []
    for tensor in tensors:
        place = weights.place(tensor)
        if place is None:
            if tensor.is_meta:
                raise NotRecorded("it has a tensor on the meta device")
            continue
        if place.storage in taken:
            raise NotRecorded("it keeps a view of a parameter")
        places.append(place)
        unmade.append(tensor)
    for tensor, made in zip(unmade, weights.recipe.make(places), strict=True):
        value: torch.Tensor = made
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(made, tensor.requires_grad)
        elif tensor.requires_grad and tensor.is_leaf:
            value.requires_grad_()
        value.__dict__.update(tensor.__dict__)
        try:
            torch.utils.swap_tensors(tensor, value)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise NotRecorded(f"a tensor beside the parameters is in use: {error}") from error


_OF_MEMORY = {
    torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.storage,
    torch.Tensor._typed_storage, torch.Tensor.__reduce_ex__, torch.Tensor.__dlpack__,
    torch.Tensor.share_memory_,
}  # fmt: skip
"""Functions that have no answer for a tensor without memory."""


class _AsOnCpu(TorchFunctionMode):
    """Lets tensors on the meta device look to Python as those of the CPU that they stand for."""

    def __init__(self, weights: RecordedWeights, recorder: _Recorder) -> None:
        super().__init__()
        self._weights, self._recorder = weights, recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not args or not isinstance(args[0], torch.Tensor) or not is_meta(args[0]):
            return func(*args, **kwargs)
        tensor = args[0]
        with torch._C.DisableTorchFunction():
            place = self._weights.place(tensor)
        if place is None:
            return func(*args, **kwargs)
        try:
            if func in AS_ON_CPU:
                return AS_ON_CPU[func]
        except TypeError:  # a function without a hash
            return func(*args, **kwargs)
        if func in _OF_MEMORY:
            raise self._recorder.refuse(f"it looks at a tensor's memory ({func.__name__})")
        if func in (torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.tolist):
            with torch._C.DisableTorchFunction():
                values = self._weights.recipe.make([place])[0]
                if func is torch.Tensor.tolist:
                    return values.tolist()
                array = values.numpy()
            array.flags.writeable = False  # it shares no memory with the tensor
            self._recorder.arrays.append((place.storage, weakref.ref(array)))
            return array if func is torch.Tensor.numpy else array.__array__(*args[1:], **kwargs)
        if func is torch.Tensor.__setitem__ and isinstance(args[2], bool | int | float | complex):
            # torch would make a tensor of the number without an operation that can be noted
            number = torch.scalar_tensor(args[2], dtype=tensor.dtype, device="cpu")
            return func(tensor, args[1], number)
        if func is torch.Tensor.__deepcopy__:
            return self._copied(tensor, *args[1:])
        if func in (torch.Tensor.to, torch.Tensor.cpu):
            args, kwargs = tree_map(_without_place, (args[1:], kwargs))
            if func is torch.Tensor.cpu:
                return tensor.to("meta", **kwargs)
            return func(tensor, *args, **kwargs)
        return func(*args, **kwargs)

    def _copied(self, tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        if id(tensor) in memo:
            known: torch.Tensor = memo[id(tensor)]
            return known
        with torch.no_grad():
            copied = tensor.detach().clone(memory_format=torch.preserve_format)
        if isinstance(tensor, nn.Parameter):
            copied = nn.Parameter(copied, tensor.requires_grad)
        else:
            copied.requires_grad_(tensor.requires_grad)
        copied.__dict__.update(tensor.__dict__)
        memo[id(tensor)] = copied
        return copied


def _without_place(value: Any) -> Any:
    """Return what a meta tensor is moved to, for a tensor that would be moved to ``value``."""
    if isinstance(value, str):
        return "meta" if value == "cpu" else value
    if isinstance(value, torch.device):
        return torch.device("meta") if value.type == "cpu" else value
    if isinstance(value, torch.Tensor) and not is_meta(value):
        return torch.empty_like(value, device="meta")
    return value


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations of a factory."""

    def __init__(self, weights: RecordedWeights) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = weights
        self.refusal: str | None = None
        self.arrays: list[tuple[int, weakref.ref[Any]]] = []
        """Storages that NumPy has been given, and the arrays, which would change with them."""
        self._constant_bytes = 0

    def refuse(self, reason: str) -> Exception:
        """Note why this factory cannot be recorded."""
        self.refusal = self.refusal or reason
        return NotRecorded(reason)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        try:
            with torch._C.DisableTorchFunction():
                return self._called(func, args, kwargs)
        except NotRecorded as error:
            raise self.refuse(str(error)) from error

    def _called(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in((args, kwargs))
        places = {id(t): place for t in tensors if (place := self._weights.place(t)) is not None}
        device = None if kwargs.get("device") is None else torch.device(kwargs["device"])
        if tensors and not places:  # from elsewhere, such as a file
            if func is not _aten.lift_fresh.default:
                return func(*args, **kwargs)
            return self._lifted(tensors[0])
        if device is not None and device.type == "meta" and not places:
            return func(*args, **kwargs)
        if device is not None and device.type not in ("cpu", "meta"):
            raise NotRecorded(f"it makes tensors on {device.type}")
        if places and func is _aten._to_copy.default and device == torch.device("cpu"):
            raise NotRecorded("it moves tensors to the CPU in an unusual way")
        if func is _aten.set_.source_Tensor and all(id(one) in places for one in tensors):
            return func(*args, **kwargs)  # as a view: the storage tells what it is
        if places and device is not None:
            kwargs["device"] = torch.device("cpu")  # where it is when it is done again
        if func.overloadpacket is _aten.set_:
            raise NotRecorded("it gives a tensor other memory")
        return self._note(func, args, kwargs, places)

    def _note(
        self, func: Any, args: Any, kwargs: dict[str, Any], places: dict[int, TensorPlace]
    ) -> Any:
        written = _written(func, args, kwargs)
        if any(id(tensor) not in places for tensor in written):
            raise NotRecorded(f"{func} changes a tensor that it has from elsewhere")
        filled = None
        if func in _FILLS:
            place = places[id(args[0])]
            is_whole = place.is_dense and (
                math.prod(place.size) * place.dtype.itemsize
                == self._weights.recipe.sizes[place.storage]
            )
            is_own = all(places[k].storage != place.storage for k in places if k != id(args[0]))
            filled = place.storage if is_whole and is_own else None
        generator, state = kwargs.get("generator"), None
        if torch.Tag.nondeterministic_seeded in func.tags:
            drawn = torch.default_generator if generator is None else generator
            if drawn.device.type != "cpu":
                raise NotRecorded(f"it draws on {drawn.device.type}")
            state = drawn.get_state().numpy().tobytes()

        def noted(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return places.get(id(value)) or self._constant(value)
            return Drawn() if isinstance(value, torch.Generator) else value

        # Constants are copied now: the factory may change them later.
        noted_args, noted_kwargs = tree_map(noted, (args, kwargs))
        read = {place.storage for place in places.values()} - {filled}
        real_outputs: Any = None
        if state is not None:  # the generator goes on
            real_outputs = self._done(func, args, kwargs, places, filled)
        if written and filled is not None:
            outputs = args[0]
        else:
            outputs = self._on_meta(func, args, kwargs, places, real_outputs)
        for tensor in written:
            size = self._weights.recipe.sizes[places[id(tensor)].storage]
            if tensor.untyped_storage().nbytes() != size:
                raise NotRecorded(f"{func} changes the size of a tensor")
        made = []
        for index, tensor in enumerate(tree_flatten(outputs)[0]):
            if isinstance(tensor, torch.Tensor) and self._weights.place(tensor) is None:
                if tensor.layout is not torch.strided or tensor.is_quantized:
                    raise NotRecorded(f"{func} gives a tensor that is not dense")
                made.append((index, self._weights.taken(tensor)))
        changed = {places[id(tensor)].storage for tensor in written}
        if any(storage in changed and array() is not None for storage, array in self.arrays):
            raise NotRecorded("it changes a tensor while a NumPy array shares its memory")
        if made or changed:
            self._weights.recipe.add(
                Step(
                    name=str(func),
                    args=noted_args,
                    kwargs=noted_kwargs,
                    made=tuple(made),
                    reads=frozenset(read),
                    writes=frozenset(changed | {place.storage for _, place in made}),
                    state=state,
                )
            )
        return outputs

    def _on_meta(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        places: dict[int, TensorPlace],
        real_outputs: Any,
    ) -> Any:
        """Return what the operation gives, on the meta device."""
        names = {argument.name for argument in func._schema.arguments}
        kwargs = dict(kwargs)
        kwargs.pop("pin_memory", None)
        if "generator" in kwargs:
            kwargs["generator"] = None
        if "device" in names and (not places or kwargs.get("device") is not None):
            kwargs["device"] = torch.device("meta")

        def on_meta(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and id(value) not in places:
                return torch.empty_like(value, device="meta")
            return value

        try:
            meta_args, meta_kwargs = tree_map(on_meta, (args, kwargs))
            return func(*meta_args, **meta_kwargs)
        except (NotImplementedError, RuntimeError):  # it depends on values, or has no such kernel
            if real_outputs is None:
                real_outputs = self._done(func, args, kwargs, places, None)
            return tree_map(_on_meta, real_outputs)

    def _done(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        places: dict[int, TensorPlace],
        filled: int | None,
    ) -> Any:
        """Run the operation on the values; arguments that it changes stand for themselves.

        ``filled`` is a storage whose values do not count.
        """
        given = list({id(t): t for t in tensors_in((args, kwargs)) if id(t) in places}.values())
        wanted = [tensor for tensor in given if places[id(tensor)].storage != filled]
        made = self._weights.recipe.make([places[id(tensor)] for tensor in wanted])
        real = {id(tensor): value for tensor, value in zip(wanted, made, strict=True)}
        for tensor in given:
            if id(tensor) not in real:
                place = places[id(tensor)]
                size = self._weights.recipe.sizes[place.storage]
                real[id(tensor)] = place.in_storage(storage_of_size(size))
        kwargs = {**kwargs, "device": torch.device("cpu")} if kwargs.get("device") else kwargs
        real_args, real_kwargs = tree_map(
            lambda value: real.get(id(value), value) if isinstance(value, torch.Tensor) else value,
            (args, kwargs),
        )
        back = {id(real[id(tensor)]): tensor for tensor in given}
        with torch.no_grad():
            outputs = func(*real_args, **real_kwargs)
        return tree_map(lambda value: back.get(id(value), value), outputs)

    def _lifted(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of given numbers, as one that the factory has made."""
        constant = self._constant(tensor)
        found: torch.Tensor = _on_meta(tensor)
        place = self._weights.taken(found)
        self._weights.recipe.add(
            Step(
                name=str(_aten.clone.default),
                args=(constant,),
                kwargs={},
                made=((0, place),),
                reads=frozenset(),
                writes=frozenset([place.storage]),
                state=None,
            )
        )
        return found

    def _constant(self, tensor: torch.Tensor) -> Constant:
        if tensor.is_meta or tensor.layout is not torch.strided or tensor.device.type != "cpu":
            raise NotRecorded("it computes with a tensor that is not on the CPU")
        self._constant_bytes += tensor.nbytes
        if self._constant_bytes > _MOST_CONSTANT_BYTES:
            raise NotRecorded(
                "it computes with large tensors that torch has not made, such as those of a file"
            )
        with torch.no_grad():
            self._weights.recipe.constants.append(tensor.detach().clone())
        return Constant(len(self._weights.recipe.constants) - 1)


def _on_meta(value: Any) -> Any:
    """A tensor of the meta device that lies in its storage as ``value`` does."""
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return value
    if value.storage_offset():
        raise NotRecorded("a function gives a part of another tensor")
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The arguments that an operation changes, by its schema."""
    found: list[torch.Tensor] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        found += tensors_in(value)
    return found
