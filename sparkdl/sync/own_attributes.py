"""The attributes of a user's own optimizer outside of its ``state_dict()``, as plain values.

It may count steps, keep means of weights or hold another optimizer in attributes, of which torch's
``state_dict()`` knows nothing. Without them a restart, or the next round, would go on otherwise.
"""

from __future__ import annotations

import pickle
import random
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from sparkdl.errors import CheckpointError
from sparkdl.storage.tensor_tree import pack, unpack

_FIRST = "_sparkdl_first"
"""Attribute that has what the others were when the optimizer was made."""
_TORCHS = ("defaults", "state", "param_groups", "grad_scale", "found_inf", _FIRST)
_TORCHS_BEGIN = ("_optimizer_", "_zero_grad_profile", "_warned_capturable", "_opt_called")
"""Beginnings of the names of attributes that torch's optimizers and schedules keep themselves."""
HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Attributes with hooks, which may keep something; their keys differ between processes."""
_FUSED = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum"}
"""What torch's fused steps keep of each parameter."""
_SEQUENCES = (list, deque)
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)

_KINDS = (
    "left", "plain", "parameter", "id", "tensor", "state", "sequence", "mapping", "random",
    "object",
)  # fmt: skip
"""Kinds of values; `_Reader` has a method of each."""

Written = list[Any]
"""A kind, and what makes a value of that kind; see `_Writer`."""
State = Callable[[Any, tuple[int, ...]], Any]
"""Gives the state of an object that has one, within objects of these ids."""
GiveState = Callable[[Any, Any], None]


def has_state(value: Any) -> bool:
    """True for an object that tells its state, and takes one."""
    methods = ("state_dict", "load_state_dict")
    return not isinstance(value, type) and all(callable(getattr(value, m, None)) for m in methods)


def check_fused(optimizer: torch.optim.Optimizer) -> None:
    """Refuse states, as a file may have them, with which a fused step would leave its tensors.

    It believes that they are as large as the parameter; other steps look.

    Raises:
        CheckpointError: one has another size or dtype.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("fused") else ():
            for key in _FUSED & optimizer.state.get(parameter, {}).keys():
                kinds = [
                    (one.dtype, tuple(one.shape)) if isinstance(one, torch.Tensor) else one
                    for one in (optimizer.state[parameter][key], parameter)
                ]
                if kinds[0] is not None and kinds[0] != kinds[1]:
                    raise CheckpointError(
                        f"the state {key!r} of an optimizer is {kinds[0]}, and its parameter "
                        f"{kinds[1]}; resume from an older checkpoint"
                    )


def note_first(optimizer: torch.optim.Optimizer, state: State) -> None:
    """Take note of the attributes of a new optimizer, so that those that change can be told."""
    first: dict[str, Any] = {}
    writer = _Writer(_parameters(optimizer), state, (id(optimizer),))
    for name, value in _own(optimizer):
        try:
            tree, tensors = pack(writer.written(value))
        except CheckpointError:
            tree, tensors = None, {}
        first[name] = None if tensors else tree
    vars(optimizer)[_FIRST] = first


def attributes(
    optimizer: torch.optim.Optimizer, state: State, inside: tuple[int, ...] = ()
) -> dict[str, Written]:
    """The attributes that are not as they were at first, and all that have tensors.

    Args:
        optimizer: whose.
        state: gives the state of objects that have one.
        inside: ids of the objects in which it was found; those are left out.

    Raises:
        CheckpointError: the state of such an object is none that a checkpoint can hold.
    """
    first = vars(optimizer).get(_FIRST, {})
    writer, found = _Writer(_parameters(optimizer), state, (*inside, id(optimizer))), {}
    for name, value in _own(optimizer):
        written = writer.written(value)
        if first.get(name) is None or first[name] != pack(written)[0]:
            found[name] = written
    return found


def give_attributes(
    optimizer: torch.optim.Optimizer, found: dict[str, Written], give_state: GiveState
) -> None:
    """Restore what `attributes` gave; all others become what they were at first."""
    reader, own = _Reader(_parameters(optimizer), give_state), vars(optimizer)
    first = own.get(_FIRST)
    for name, value in list(_own(optimizer)):
        if first is None or name in found or (name in HOOKS and first.get(name) is None):
            continue
        if name not in first:
            del own[name]
        elif first[name] is not None:
            read = reader.read(value, unpack(first[name], {}))
            if name not in HOOKS:
                own[name] = read
    for name, written in found.items():
        if name in HOOKS:
            reader.read(list(own[name].values()), written)
        elif name in own or written[0] != "left":
            own[name] = reader.read(own.get(name), written)


def left_out(optimizer: torch.optim.Optimizer) -> dict[str, tuple[str, Any]]:
    """Return type and digest of each value in attributes that no checkpoint holds, by its path."""
    writer = _Writer(_parameters(optimizer), lambda *_: None, (id(optimizer),))
    for name, value in _own(optimizer):
        writer.written(value, name)
    return {path: (type(value).__name__, _digest(value)) for path, value in writer.left.items()}


def written(value: Any) -> Written:
    """Return the parts of a value that belongs to no optimizer."""

    def state(owner: Any, _: tuple[int, ...]) -> Any:
        found = owner.state_dict()
        return found if _Writer.is_plain(found) else None

    return _Writer((), state).written(value)


def read(now: Any, found: Written) -> Any:
    """The value of which `written` gave ``found``; ``now`` is what there is in its place."""

    def give(owner: Any, state: Any) -> None:
        if state is not None:
            owner.load_state_dict(state)

    return _Reader((), give).read(now, found)


@contextmanager
def same_objects(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep the groups and the state of an optimizer the objects that they are, with new content.

    Torch's ``load_state_dict`` makes new ones, and whoever shares them would have the old ones: an
    optimizer around another one, for instance.
    """
    groups, each, state = optimizer.param_groups, list(optimizer.param_groups), optimizer.state
    yield
    if optimizer.param_groups is not groups and len(optimizer.param_groups) == len(each):
        for old, new in zip(each, optimizer.param_groups, strict=True):
            if old is not new:
                old.clear()
                old.update(new)
        groups[:] = each
        optimizer.param_groups = groups
    if optimizer.state is not state:
        content = dict(optimizer.state)
        state.clear()
        state.update(content)
        optimizer.state = state


def _own(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    for name, value in vars(optimizer).items():
        if name in HOOKS:
            yield name, list(value.values())
        elif name not in _TORCHS and not name.startswith(_TORCHS_BEGIN):
            yield name, value


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


class _Writer:
    """Takes values apart into plain ones; objects that it meets within themselves are left out."""

    def __init__(
        self, parameters: Sequence[torch.Tensor], state: State, inside: tuple[int, ...] = ()
    ) -> None:
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._state = state
        self._inside = list(inside)
        self.left: dict[str, Any] = {}
        """Path -> the value there, which no checkpoint holds."""

    def written(self, value: Any, path: str = "") -> Written:
        """A kind, and what makes the value."""
        if id(value) in self._numbers:
            return ["parameter", self._numbers[id(value)]]
        if id(value) in self._inside:
            return ["left"]
        self._inside.append(id(value))
        try:
            return self._written(value, path)
        finally:
            self._inside.pop()

    def _written(self, value: Any, path: str) -> Written:
        if has_state(value) and not self._trains(value):
            return ["state", self._state(value, tuple(self._inside[:-1]))]
        if isinstance(value, torch.Tensor):
            if self.is_plain(value):
                return ["tensor", value.detach(), value.device.type != "cpu"]
        elif type(value) in _SEQUENCES or type(value) is tuple:
            items = [self.written(item, f"{path}[{n}]") for n, item in enumerate(value)]
            empty = () if type(value) is tuple else _empty(value)
            return ["sequence", empty, items]
        elif type(value) in _MAPPINGS and self.is_plain(_empty(value)):
            keys = [self._key(key) for key in value]
            if None not in keys:
                values = [self.written(item, f"{path}[{key!r}]") for key, item in value.items()]
                return ["mapping", _empty(value), keys, values]
        elif isinstance(value, random.Random):
            return ["random", value.getstate()]
        elif isinstance(value, np.random.Generator):
            return ["random", value.bit_generator.state]
        elif isinstance(value, np.random.RandomState | torch.Generator):
            return ["random", value.get_state()]
        elif is_of_user(value):
            names = vars(value).items()
            return ["object", {key: self.written(own, f"{path}.{key}") for key, own in names}]
        elif self.is_plain(value):
            return ["plain", value]
        self.left[path] = value
        return ["left"]

    def _trains(self, value: Any) -> bool:
        """True for a module of which parameters train, which are kept elsewhere."""
        return isinstance(value, nn.Module) and any(
            id(parameter) in self._numbers for parameter in value.parameters()
        )

    def _key(self, key: Any) -> Written | None:
        """A mapping's key; ids of parameters, which another process has not, by their numbers."""
        if id(key) in self._numbers:
            return ["parameter", self._numbers[id(key)]]
        if type(key) is int and key in self._numbers:
            return ["id", self._numbers[key]]
        return ["plain", key] if self.is_plain(key) else None

    @staticmethod
    def is_plain(value: Any) -> bool:
        try:
            pack(value)
        except CheckpointError:
            return False
        return True


class _Reader:
    """Puts values together again, in the objects that are there."""

    def __init__(self, parameters: Sequence[torch.Tensor], give_state: GiveState) -> None:
        self._parameters = parameters
        self._give_state = give_state

    def read(self, now: Any, written: Written) -> Any:
        """The value that `_Writer` took apart; ``now`` is what there is in its place."""
        kind, *parts = written
        if kind not in _KINDS:  # from a file, so no other method may be named
            raise CheckpointError(f"an optimizer's attribute has no kind {kind!r} of value")
        method: Callable[..., Any] = getattr(self, f"_{kind}")
        return method(now, *parts)

    def _left(self, now: Any) -> Any:
        return now

    def _plain(self, now: Any, value: Any) -> Any:
        return value

    def _parameter(self, now: Any, number: int) -> Any:
        return self._parameters[number]

    def _id(self, now: Any, number: int) -> int:
        return id(self._parameters[number])

    def _tensor(self, now: Any, value: torch.Tensor, is_elsewhere: bool) -> torch.Tensor:
        is_here = isinstance(now, torch.Tensor) and now.layout is value.layout is torch.strided
        if is_here and (now.shape, now.dtype) == (value.shape, value.dtype):
            with torch.no_grad():
                now.copy_(value)
            return now  # type: ignore[no-any-return]
        like = next((t for t in (now, *self._parameters) if isinstance(t, torch.Tensor)), None)
        return value.to(like.device) if is_elsewhere and like is not None else value

    def _state(self, now: Any, state: Any) -> Any:
        if has_state(now):
            self._give_state(now, state)
        return now

    def _sequence(self, now: Any, empty: Any, items: list[Written]) -> Any:
        at_hand = list(now) if isinstance(now, (tuple, *_SEQUENCES)) else []
        at_hand += [None] * (len(items) - len(at_hand))
        found = [self.read(one, item) for one, item in zip(at_hand, items, strict=False)]
        if isinstance(empty, tuple):
            return tuple(found)
        target = now if type(now) is type(empty) else empty
        target.clear()
        target.extend(found)
        return target

    def _mapping(self, now: Any, empty: Any, keys: list[Written], values: list[Written]) -> Any:
        at_hand = dict(now) if isinstance(now, dict) else {}
        found = {}
        for written, value in zip(keys, values, strict=True):
            key = self.read(None, written)
            found[key] = self.read(at_hand.get(key), value)
        target = now if type(now) is type(empty) else empty
        target.clear()
        target.update(found)
        return target

    def _random(self, now: Any, state: Any) -> Any:
        if isinstance(now, random.Random):
            now.setstate(state)
        elif isinstance(now, np.random.Generator):
            now.bit_generator.state = state
        elif isinstance(now, np.random.RandomState | torch.Generator):
            now.set_state(state)
        return now

    def _object(self, now: Any, found: dict[str, Written]) -> Any:
        if not is_of_user(now):
            return now
        own = vars(now)
        for name in own.keys() - found.keys():
            del own[name]
        for name, written in found.items():
            own[name] = self.read(own.get(name), written)
        return now


def _empty(value: Any) -> Any:
    """A container of the same kind with nothing in it."""
    if isinstance(value, defaultdict):
        return defaultdict(value.default_factory)
    return deque(maxlen=value.maxlen) if isinstance(value, deque) else type(value)()


def is_of_user(value: Any) -> bool:
    """True for an object of a class of Python, of which the attributes are all that it holds."""
    if not hasattr(value, "__dict__") or isinstance(
        value, type | types.FunctionType | types.ModuleType | nn.Module
    ):
        return False
    package = type(value).__module__.partition(".")[0]
    is_extension = isinstance(value, list | dict | tuple | set | str | int | float)
    return not is_extension and package not in {*sys.stdlib_module_names, "torch", "numpy"} - {
        "__main__"
    }


def _digest(value: Any) -> Any:
    """Return what shows whether a value has changed in this process; code does not change."""
    if callable(value) or isinstance(value, types.ModuleType | nn.Module):
        return None
    try:
        return pickle.dumps(value)
    except Exception:  # whatever the value's class raises
        return id(value)
