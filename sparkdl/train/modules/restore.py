"""Notes what a module holds, and gives it back after a call that is no part of training."""

from __future__ import annotations

import contextlib
import copy
import copyreg
import functools
import random
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

_TORCHS = {*vars(nn.Module()), "_compiled_call_impl"} - {"_parameters", "_buffers", "_modules"}
"""Attributes that torch itself keeps in each module, and forward does not change."""
_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, type, range, slice,
    types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.CodeType,
    torch.dtype, torch.device, torch.Size, np.generic,
)  # fmt: skip
_OF_PROCESS = ("sparkdl.", "torch._", "torch.distributed", "torch.fx", "logging", "threading")
"""Modules of Python whose objects are no part of what a user's module holds."""


@contextlib.contextmanager
def restored(module: nn.Module) -> Iterator[None]:
    """Let code change what a module holds, and give all of that back afterwards.

    That is: parameters and buffers; attributes, of whatever objects and containers, to any depth;
    attributes of the classes of its layers; and the state of generators, those of the process
    included. Objects keep their identity, but for those of C that nobody can set, such as counters
    of itertools: a copy of these takes their place.
    """
    notes = _Notes()
    for part in module.modules():
        notes.take(part)
    generators = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(generators[0])
        np.random.set_state(generators[1])
        with torch.no_grad():
            notes.give_back()


class _Notes:
    """Notes what objects hold, and gives it back to them."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # the values too, so that no id is used twice
        self._copies: dict[int, Any] = {}
        self._undo: list[Callable[[], object]] = []

    def take(self, value: Any) -> Any:
        """Note what a value holds; return it, or what shall take its place."""
        todo = [value]
        while todo:
            one = todo.pop()
            if isinstance(one, _PLAIN) or id(one) in self._seen:
                continue
            self._seen[id(one)] = one
            todo += self._note(one)
        return self._copies.get(id(value), value)

    def give_back(self) -> None:
        """Let all have what was noted."""
        for undo in self._undo:
            undo()

    def _note(self, value: Any) -> list[Any]:
        """Note one value, and return those that it holds."""
        held: list[Any] = []
        if isinstance(value, torch.Tensor):
            self._note_tensor(value)
        elif isinstance(value, np.ndarray):
            self._note_array(value)
            held += value.reshape(-1).tolist() if value.dtype.hasobject else ()
        elif isinstance(value, random.Random):
            self._undo.append(functools.partial(value.setstate, value.getstate()))
        elif isinstance(value, torch.Generator):
            self._undo.append(functools.partial(value.set_state, value.get_state()))
        elif isinstance(value, np.random.Generator | np.random.RandomState):
            bits: Any = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator")  # noqa: B009
            self._undo.append(functools.partial(setattr, bits, "state", copy.deepcopy(bits.state)))
        elif isinstance(value, types.MethodType):
            held.append(value.__self__)
        elif isinstance(value, functools.partial):
            held += [value.func, value.args, value.keywords]
        elif type(value).__module__.startswith(_OF_PROCESS):
            pass
        else:
            held += self._note_object(value)
        return held

    def _note_object(self, value: Any) -> list[Any]:
        slots = {key: getattr(value, key) for key in _slots(value) if hasattr(value, key)}
        own = getattr(value, "__dict__", None)
        held: list[Any] = []
        if isinstance(value, dict):
            held += value.values()
            self._undo.append(functools.partial(self._fill_dict, value, {**value}))
        elif isinstance(value, list | deque | set | bytearray):
            held += () if isinstance(value, bytearray) else value
            self._undo.append(functools.partial(self._fill, value, [*value]))
        elif isinstance(value, tuple | frozenset):
            held += value
        elif own is None and not slots:
            with contextlib.suppress(Exception):  # what nobody can copy, such as a lock, stays
                self._copies[id(value)] = copy.deepcopy(value)
        if isinstance(own, dict):
            torchs = _TORCHS if isinstance(value, nn.Module) else set()
            kept = {key: one for key, one in own.items() if key not in torchs}
            held += kept.values()
            self._undo.append(functools.partial(self._fill_own, own, kept, torchs))
        for key, one in slots.items():
            held.append(one)
            self._undo.append(functools.partial(self._set, value, key, one))
        if isinstance(value, nn.Module):
            held += self._note_classes(type(value))
        return held

    def _note_classes(self, kind: type) -> list[Any]:
        held: list[Any] = []
        for base in kind.__mro__:
            if base is object or base.__module__.startswith(("torch.", *_OF_PROCESS)):
                continue
            own = {k: one for k, one in vars(base).items() if not k.startswith("__")}
            if id(base) not in self._seen:
                self._seen[id(base)] = base
                held += own.values()
                self._undo.append(functools.partial(self._fill_class, base, own))
        return held

    def _note_tensor(self, tensor: torch.Tensor) -> None:
        if nn.parameter.is_lazy(tensor) or tensor.is_meta or tensor.is_inference():
            return
        version, held = tensor._version, tensor.detach().clone()

        def undo() -> None:
            if tensor._version != version:
                tensor.detach().copy_(held)

        self._undo.append(undo)

    def _note_array(self, array: np.ndarray[Any, Any]) -> None:
        if array.flags.writeable:
            self._undo.append(functools.partial(array.__setitem__, ..., array.copy()))

    def _kept(self, value: Any) -> Any:
        return self._copies.get(id(value), value)

    def _fill_dict(self, value: dict[Any, Any], held: dict[Any, Any]) -> None:
        kept = [(key, self._kept(one)) for key, one in held.items()]
        is_same = len(value) == len(kept) and all(
            found[0] is one[0] and found[1] is one[1]
            for found, one in zip(value.items(), kept, strict=True)
        )
        if not is_same:
            dict.clear(value)
            dict.update(value, kept)

    def _fill(self, value: Any, held: list[Any]) -> None:
        """Fill a container, by the methods of Python's own class."""
        kind: Any = next(k for k in (list, deque, set, bytearray) if isinstance(value, k))
        kind.clear(value)
        fill = kind.update if kind is set else kind.extend
        fill(value, [self._kept(one) for one in held])

    def _fill_own(self, own: dict[str, Any], held: dict[str, Any], others: set[str]) -> None:
        for key in own.keys() - held.keys() - others:
            del own[key]
        for key, value in held.items():
            if own.get(key, own) is not self._kept(value):
                own[key] = self._kept(value)

    def _fill_class(self, kind: type, held: dict[str, Any]) -> None:
        for key in vars(kind).keys() - held.keys():
            if not key.startswith("__"):
                delattr(kind, key)
        for key, value in held.items():
            if vars(kind).get(key, kind) is not self._kept(value):
                setattr(kind, key, self._kept(value))

    def _set(self, value: Any, key: str, held: Any) -> None:
        with contextlib.suppress(AttributeError):  # read-only
            object.__setattr__(value, key, self._kept(held))


def _slots(value: Any) -> list[str]:
    return copyreg._slotnames(type(value))  # type: ignore[attr-defined,no-any-return]
