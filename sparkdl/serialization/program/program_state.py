"""The state that code of a program keeps outside of modules: globals, attributes of classes, cells.

A forward that counts its calls in a global has counted those of a trial, too. So a trial looks at
what the code names before it begins, and puts that back when it ends.
"""

from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import dis
import enum
import functools
import gc
import io
import itertools
import pickle
import random
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from sparkdl.runtime.process import lent
from sparkdl.serialization.program.iterator_copies import copy_of, moves_on, rest_of
from sparkdl.serialization.program.process_settings import kept_settings
from sparkdl.serialization.travel.pickling import HOOKS, TENSOR_HOOKS, sent_code
from sparkdl.serialization.trust import is_installed

T = TypeVar("T")

_MOST_PARTS = 10_000
"""So many objects are looked at, nearest first."""
_MOST_ITEMS = 100_000
"""Containers of more items are data rather than counts, and are left alone."""
_MOST_BYTES = 1 << 26
"""The same of arrays and tensors of more bytes."""
_MOST_BYTES_IN_ALL = 1 << 28
"""Arrays and tensors behind so many bytes of others are left alone, too: each is copied."""
_ATOMS = (type(None), bool, int, float, complex, str, bytes)
_OF_THREADS = (
    *(threading.Thread, threading.Condition, threading.Event, threading.Semaphore),
    *map(type, (threading.Lock(), threading.RLock())),
)
"""Kinds of values by which an object is known that other threads use, too."""
_OTHERS = (
    *("logging", "threading", "multiprocessing", "concurrent", "asyncio", "pyspark", "py4j"),
    *("sparkdl", "unittest"),
)
"""Packages whose objects belong to the whole process, or note what is done with them."""
_HOLDERS = (
    *(tuple, frozenset, types.MappingProxyType, types.MethodType, types.CellType),
    *(staticmethod, classmethod, property, partial, functools._lru_cache_wrapper),
)
"""Kinds that cannot change, but hold what can."""
_OF_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")
_OF_OTHERS = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR")
_ABSENT = object()
_State = list[Any] | dict[Any, Any] | bytes | torch.Tensor
"""What can be asked of a place and put there again: what it holds, or its numbers."""


@contextlib.contextmanager
def program_kept(*values: Any) -> Iterator[ProgramState]:
    """Let what the code of these values keeps outside of them be afterwards as it was before.

    So also the settings of the process.
    """
    modules = [value for value in values if isinstance(value, nn.Module)]
    with lent, kept_settings():  # fits may run on several threads
        state = ProgramState((code for code, _ in sent_code(values)), modules)
        try:
            yield state
        finally:
            state.put_back()


def read_by_steps(
    module: nn.Module, owners: Mapping[str, Any], *, with_objects: bool = False
) -> ProgramState:
    """State that steps of training read outside of ``module``: of all ``owners`` but callbacks.

    With these objects themselves, such as a loss that has a factor, or their code alone.
    """
    others = {name: value for name, value in owners.items() if name != "callbacks"}
    code = (one for one, _ in sent_code([module, others]))
    return ProgramState(code, [module], others if with_objects else {})


def whole_numbers(module: nn.Module) -> set[int]:
    """Those that layers hold in attributes, and in containers there."""
    parts = [part for layer in module.modules() for part in vars(layer).values()]
    found: set[int] = set()
    for _ in range(_MOST_PARTS):
        if not parts:
            break
        part = parts.pop()
        if type(part) is int:
            found.add(part)
        elif issubclass(type(part), (*_CONTAINERS, tuple, frozenset)) and _is_small(part):
            parts += gc.get_referents(part)
    return found


@dataclass(frozen=True)
class _Place:
    """One place that may change: what it held, and how to ask for that and to set it."""

    name: str
    was: _State
    read: Callable[[], _State]
    write: Callable[[Any], None]

    @property
    def is_changed(self) -> bool:
        return not _is_same(self.read(), self.was)


class ProgramWalk:
    """Walks over all that the user's own code names and could change.

    Objects of other people's classes are left alone, but for modules, tensors, arrays, generators
    of random numbers, and the containers of Python.
    """

    def __init__(
        self,
        code: Iterable[Any],
        modules: Iterable[nn.Module] = (),
        objects: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Look at classes and functions, or modules of Python, and at whatever they name.

        So also at ``objects``, by names.

        What ``modules`` hold themselves others keep, but for what hooks do, and what is kept in
        attributes of their parameters and buffers.
        """
        self.numbers: set[int] = set()
        """Whole numbers that were met, in containers and alone."""
        self.globals: list[tuple[str, str, Any]] = []
        """The names of modules of Python, of globals in them, and what these are."""
        self._num_bytes = 0
        self._seen: dict[int, Any] = {}  # the objects too, so that no id is used twice
        self._todo = collections.deque((one, "") for one in code)
        self._todo += ((one, name) for name, one in objects.items())
        for module in modules:
            self._seen |= {id(part): part for part in _parts(module)}
            self._todo += _beside(module)
        for _ in range(_MOST_PARTS):
            if not self._todo:
                break
            value, name = self._todo.popleft()
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                self._look(value, name)

    def _keep(self, name: str, read: Callable[[], _State], write: Callable[[Any], None]) -> None:
        """Called with each place that may change, and how to ask for what is in it and set it."""

    def _look_at(self, values: Iterable[Any], name: str) -> None:
        for value in values:
            if type(value) is int:
                self.numbers.add(value)
            elif type(value) not in _ATOMS:
                self._todo.append((value, name))

    def _look(self, value: Any, name: str) -> None:
        kind = type(value)  # its __class__ may say something else, as that of a proxy
        if issubclass(kind, type):
            if issubclass(value, enum.Enum):
                self._look_at(value.__members__.values(), value.__qualname__)
            elif _is_users(value.__module__):
                self._class(value)
        elif kind is types.FunctionType:
            if _is_users(value.__globals__.get("__name__", value.__module__)):
                self._function(value)
        elif issubclass(kind, types.ModuleType):
            self._names(vars(value), [key for key in vars(value) if key[:2] != "__"], "")
        else:
            self._object(value, kind, name)

    def _object(self, value: Any, kind: type, name: str) -> None:
        for kinds, read, write in _CONTENTS:
            if issubclass(kind, kinds) and _is_small(value) and self._has_room(value):
                self._keep(name, partial(read, value), partial(write, value))
                break
        is_known = not (_is_users(kind.__module__) or issubclass(kind, nn.Module))
        if issubclass(kind, torch.Tensor):
            if not value.is_inference() and (value.is_leaf or value.retains_grad):
                self._attribute(value, "grad", name)
        elif is_known and not issubclass(kind, (*_CONTAINERS, *_HOLDERS)):
            self._look_at(_own_state(value), name)
        else:
            self._look_at(itertools.islice(gc.get_referents(value), _MOST_PARTS), name)
            with contextlib.suppress(AttributeError):
                self._look_at((kind, object.__getattribute__(value, "__dict__")), name)
        for base in () if is_known else kind.__mro__:
            if _is_users(base.__module__):
                for key, part in vars(base).items():
                    if isinstance(part, types.MemberDescriptorType):  # of __slots__
                        self._attribute(value, key, name)

    def _has_room(self, value: Any) -> bool:
        """True if what is kept already and this together are no more than may be."""
        if issubclass(type(value), torch.Tensor | np.ndarray):
            self._num_bytes += value.nbytes
        return self._num_bytes <= _MOST_BYTES_IN_ALL

    def _attribute(self, owner: Any, key: str, name: str) -> None:
        def write(values: list[Any]) -> None:
            delattr(owner, key) if values[0] is _ABSENT else setattr(owner, key, values[0])

        self._keep(name, lambda: [getattr(owner, key, _ABSENT)], write)

    def _class(self, value: type) -> None:
        self._keep(value.__qualname__, partial(_attributes, value), partial(_set_class, value))
        parts = [part for key, part in vars(value).items() if key != "__dict__"]
        self._look_at(parts, value.__qualname__)
        self._look_at((*value.__bases__, type(value)), "")

    def _function(self, function: types.FunctionType) -> None:
        read, attributes = _named_by(function.__code__)
        self._names(function.__globals__, read, "")
        modules: list[tuple[str, Any]] = [(key, function.__globals__.get(key)) for key in read]
        for prefix, module in modules:
            if issubclass(type(module), types.ModuleType) and _is_users(module.__name__):
                names = [key for key in attributes if key in vars(module)]
                self._names(vars(module), names, f"{prefix}.")
                below = [(f"{prefix}.{key}", vars(module)[key]) for key in names]
                modules += [pair for pair in below if not any(pair[1] is one for _, one in modules)]
        cells = function.__closure__ or ()
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
            self._keep(name, partial(_content, cell), partial(_set_content, cell))
            self._look_at(gc.get_referents(cell), name)
        if function.__defaults__ is not None:
            self._attribute(function, "__defaults__", function.__qualname__)
        held = function.__defaults__, function.__kwdefaults__, vars(function)
        self._look_at(held, function.__qualname__)

    def _names(self, space: dict[str, Any], names: Iterable[str], prefix: str) -> None:
        for key in names:
            value = space.get(key, _ABSENT)
            self.globals.append((str(space.get("__name__")), key, value))
            if not issubclass(type(value), types.ModuleType):
                self._keep(prefix + key, partial(_item, space, key), partial(_set_item, space, key))
                self._look_at([value], prefix + key)


class ProgramState(ProgramWalk):
    """All that the user's own code names and could change, as it was when this was made."""

    def __init__(
        self,
        code: Iterable[Any],
        modules: Iterable[nn.Module] = (),
        objects: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """See `ProgramWalk`."""
        self._places: list[_Place] = []
        self._copies: dict[int, Any] = {}
        super().__init__(code, modules, objects)

    def changed(self) -> list[str]:
        """Names of what is otherwise now, each once."""
        return list(dict.fromkeys(place.name for place in self._places if place.is_changed))

    def counted(self) -> list[str]:
        """Names of those in which a number is another one, or to which something was added.

        So not of what is kept to be found again, such as a table that was made for a size.
        """
        moved = (one.name for one in self._places if one.is_changed and _has_moved(one))
        return list(dict.fromkeys(moved))

    def put_back(self) -> None:
        """Let everything be as it was."""
        copies: dict[int, Any] = {}
        for place in self._places:
            if place.is_changed:
                place.write(_copied(place.was, copies))

    def again(self, make: Callable[[], T]) -> T:
        """Make something once more of the program as it was."""
        self.put_back()
        return make()

    def _keep(self, name: str, read: Callable[[], _State], write: Callable[[Any], None]) -> None:
        self._places.append(_Place(name, _copied(read(), self._copies), read, write))


def _own_state(value: Any) -> Sequence[dict[str, Any]]:
    """Attributes of an object of somebody else's class, which nobody but the program uses."""
    if type(value).__module__.partition(".")[0] in _OTHERS:
        return ()
    try:
        held: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return ()
    is_shared = any(issubclass(type(part), _OF_THREADS) for part in held.values())
    return () if is_shared else (held,)


def _parts(module: nn.Module) -> Iterator[Any]:
    """Yield what is registered in a module, and it."""
    for layer in module.modules():
        yield layer
        yield from (*layer._parameters.values(), *layer._buffers.values())


def _beside(module: nn.Module) -> Iterator[tuple[Any, str]]:
    """Yield hooks, and the attributes of registered tensors, with names."""
    for path, layer in module.named_modules():
        of_layer = [(path or type(module).__name__, layer, HOOKS)]
        for key, tensor in (*layer._parameters.items(), *layer._buffers.items()):
            if tensor is not None:
                name = f"{path}.{key}" if path else key
                of_layer.append((name, tensor, frozenset(TENSOR_HOOKS)))
                yield vars(tensor), name
        for name, owner, registers in of_layer:
            for register in sorted(registers):
                for hook in (getattr(owner, register, None) or {}).values():
                    yield hook, f"a hook of {name}"


def _is_users(module: object) -> bool:
    return isinstance(module, str) and not is_installed(module)


@functools.lru_cache(maxsize=4096)
def _named_by(code: types.CodeType) -> tuple[Sequence[str], Sequence[str]]:
    """Names of globals, and of attributes, that code and the functions in it read or set."""
    names: dict[str, None] = {}
    attributes: dict[str, None] = {}
    for step in dis.get_instructions(code):
        if step.opname in _OF_GLOBALS:
            names[str(step.argval)] = None
        elif step.opname in _OF_OTHERS:
            attributes[str(step.argval)] = None
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            for known, more in zip((names, attributes), _named_by(part), strict=True):
                known.update(dict.fromkeys(more))
    return tuple(names), tuple(attributes)


def _item(space: dict[str, Any], key: str) -> _State:
    return [space.get(key, _ABSENT)]


def _set_item(space: dict[str, Any], key: str, values: list[Any]) -> None:
    if values[0] is _ABSENT:
        del space[key]
    else:
        space[key] = values[0]


def _content(cell: types.CellType) -> _State:
    return gc.get_referents(cell)[:1] or [_ABSENT]  # it may have no value yet


def _set_content(cell: types.CellType, values: list[Any]) -> None:
    if values[0] is _ABSENT:
        del cell.cell_contents
    else:
        cell.cell_contents = values[0]


def _attributes(kind: type) -> dict[str, Any]:
    return {key: part for key, part in vars(kind).items() if key[:2] != "__"}


def _set_class(kind: type, values: dict[str, Any]) -> None:
    now = _attributes(kind)
    for key in now.keys() - values.keys():
        type.__delattr__(kind, key)
    for key, value in values.items():
        if not _is_same([now.get(key, _ABSENT)], [value]):
            type.__setattr__(kind, key, value)


# The methods of Python's own classes: one of the user's may do something else.


def _items(mapping: dict[Any, Any]) -> _State:
    base: Any = collections.OrderedDict if isinstance(mapping, collections.OrderedDict) else dict
    return {key: dict.__getitem__(mapping, key) for key in base.__iter__(mapping)}


def _set_items(into: dict[Any, Any], values: dict[Any, Any]) -> None:
    base: Any = collections.OrderedDict if isinstance(into, collections.OrderedDict) else dict
    base.clear(into)
    for key, value in values.items():
        base.__setitem__(into, key, value)


def _set_list(into: list[Any], values: list[Any]) -> None:
    list.__setitem__(into, slice(None), values)


def _set_set(into: set[Any], values: list[Any]) -> None:
    set.clear(into)
    set.update(into, values)


def _set_deque(into: collections.deque[Any], values: list[Any]) -> None:
    collections.deque.clear(into)
    collections.deque.extend(into, values)


def _set_bytes(into: bytearray, values: bytes) -> None:
    into[:] = values


def _set_numbers_of(into: array.array[Any], values: list[Any]) -> None:
    into[:] = array.array(into.typecode, values)


def _set_file(file: Any, values: list[Any]) -> None:
    file.seek(0)
    file.truncate()
    file.write(values[0])
    file.seek(values[1])


def _numbers(tensor: torch.Tensor) -> _State:
    is_memory = tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized
    return tensor.detach().clone() if is_memory and not tensor.is_inference() else b""


def _set_numbers(tensor: torch.Tensor, values: torch.Tensor) -> None:
    if tensor.shape == values.shape:
        tensor.data.copy_(values)
    else:
        tensor.data = values


def _array(array: np.ndarray) -> _State:
    return array.ravel().tolist() if array.dtype.hasobject else array.tobytes()


def _set_array(array: np.ndarray, values: Any) -> None:
    if array.dtype.hasobject:
        values = np.array([*values, None], dtype=object)[:-1]
    else:
        values = np.frombuffer(values, array.dtype)
    array[...] = values.reshape(array.shape)


def _random(generator: random.Random) -> _State:
    return pickle.dumps(generator.getstate())


def _set_random(generator: random.Random, state: bytes) -> None:
    generator.setstate(pickle.loads(state))


def _numpy_generator(generator: np.random.Generator) -> _State:
    return pickle.dumps(generator.bit_generator.state)


def _set_numpy_generator(generator: np.random.Generator, state: bytes) -> None:
    generator.bit_generator.state = pickle.loads(state)


def _random_state(generator: np.random.RandomState) -> _State:
    return pickle.dumps(generator.get_state())


def _set_random_state(generator: np.random.RandomState, state: bytes) -> None:
    generator.set_state(pickle.loads(state))


def _variable(variable: contextvars.ContextVar[Any]) -> _State:
    with contextlib.suppress(LookupError):
        return [variable.get()]  # or its default
    return [_ABSENT]


def _set_variable(variable: contextvars.ContextVar[Any], values: list[Any]) -> None:
    if values[0] is not _ABSENT:  # none can be emptied
        variable.set(values[0])


_CONTENTS: Sequence[tuple[Any, Callable[[Any], Any], Callable[[Any, Any], Any]]] = (
    (dict, _items, _set_items),
    (list, lambda value: list(list.__iter__(value)), _set_list),
    (set, lambda value: list(set.__iter__(value)), _set_set),
    (collections.deque, lambda value: list(collections.deque.__iter__(value)), _set_deque),
    (bytearray, bytes, _set_bytes),
    (array.array, array.array.tolist, _set_numbers_of),
    ((io.StringIO, io.BytesIO), lambda file: [file.getvalue(), file.tell()], _set_file),
    (torch.Tensor, _numbers, _set_numbers),
    (np.ndarray, _array, _set_array),
    (random.Random, _random, _set_random),
    (np.random.Generator, _numpy_generator, _set_numpy_generator),
    (np.random.RandomState, _random_state, _set_random_state),
    (torch.Generator, torch.Generator.get_state, torch.Generator.set_state),
    (contextvars.ContextVar, _variable, _set_variable),
    (
        threading.local,
        lambda value: dict(vars(value)),
        lambda into, values: _set_items(vars(into), values),
    ),
)
"""Kinds of objects that change in their place, and how to ask and set what is in them."""
_CONTAINERS: Sequence[Any] = (dict, list, set, collections.deque)


def _is_small(value: Any) -> bool:
    if issubclass(type(value), torch.Tensor | np.ndarray):
        return bool(value.nbytes <= _MOST_BYTES)
    base = next((one for one in _CONTAINERS if issubclass(type(value), one)), None)
    return base is None or base.__len__(value) <= _MOST_ITEMS


def _copied(state: _State, copies: dict[int, Any]) -> _State:
    """The state with copies of what moves on; the same copy for the same object."""
    if isinstance(state, dict):
        return {key: copy_of(value, copies) for key, value in state.items()}
    return [copy_of(value, copies) for value in state] if isinstance(state, list) else state


def _is_same(now: _State, was: _State) -> bool:
    if isinstance(now, dict):
        assert isinstance(was, dict)
        return list(now) == list(was) and all(map(_is_one, now.values(), was.values()))
    if isinstance(now, list):
        return len(now) == len(was) and all(map(_is_one, now, was))
    if isinstance(now, torch.Tensor):
        assert isinstance(was, torch.Tensor)
        return now.shape == was.shape and torch.equal(_bytes_of(now), _bytes_of(was))
    return now == was


def _is_one(now: Any, was: Any) -> bool:
    """True for the same object, or for equal values of which no one could tell."""
    if now is was:
        return True
    if moves_on(now) and moves_on(was):
        now, was = rest_of(now), rest_of(was)
    if type(now) is tuple and type(was) is tuple:
        return len(now) == len(was) and all(map(_is_one, now, was))
    return type(now) is type(was) and type(now) in (*_ATOMS, list, range) and bool(now == was)


def _has_moved(place: _Place) -> bool:
    """True unless the place has got another object, or more keys with objects."""
    now, was = place.read(), place.was
    if isinstance(now, dict) and isinstance(was, dict):
        pairs = [(value, was.get(key, 0)) for key, value in now.items()]
    elif isinstance(now, list) and isinstance(was, list) and len(now) == len(was):
        pairs = list(zip(now, was, strict=True))
    else:
        return True
    kinds = (int, float, complex)
    return any(
        ((type(value) in kinds and type(before) in kinds) or moves_on(value))
        and not _is_one(value, before)
        for value, before in pairs
    )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
