"""The pickling of values and modules on their way to other processes, in memory only.

cloudpickle sends code by value, so that a class from a notebook works. Torch describes tensors, and
their memory is sent apart: views, strides and shared memory come along, and so do attributes, hooks
and classes of tensors. What neither of them can pickle has a reducer here.
"""

from __future__ import annotations

import contextlib
import copyreg
import dis
import enum
import functools
import gc
import importlib
import io
import logging
import os
import pickle
import pkgutil
import socket
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from sparkdl.serialization.travel.operators import Operators, named_operators

_ALIGNMENT = 16
"""Bytes of the largest number; sent memory begins at a multiple."""
HOOKS = frozenset(key for key in vars(nn.Module()) if "_hooks" in key)
"""The attributes in which torch registers the hooks of a module."""
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""The same of a tensor."""

_MADE_OPERATOR: Any = torch.library.CustomOpDef  # type: ignore[attr-defined] # not in __all__
_OPERATORS = (_MADE_OPERATOR, type(torch.ops.aten.add), type(torch.ops.aten.add.default))
"""Classes of operators: made by a program, of all variants, of one."""

_Reduced = tuple[Any, ...]


_MOST_RESULTS = 1 << 20
"""Bytes of a cache's results from which on these stay where they are."""

logger = logging.getLogger(__name__)


class BoundedBytes(io.BytesIO):
    """Takes so many bytes at most; raises ValueError for more."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def write(self, data: Any) -> int:
        written = super().write(data)
        if self.tell() > self._most:
            raise ValueError(f"it takes more than {self._most >> 10} KiB")
        return written


class UsesModule(pickle.PicklingError):
    """A value would take along a part of the module that is trained."""


def dumps(value: Any, strange: Mapping[int, str] | None = None) -> bytes:
    """Pickle a value for other processes; raises Exception, whatever its classes raise.

    ``strange`` are names of parameters, by ``id``, that travel elsewhere: a value that uses one
    would get a copy of it, which nobody trains, so it raises UsesModule.
    """
    with io.BytesIO() as file:
        pickler = Pickler(file)
        pickler.strange = strange or {}
        pickler.dump(value)
        return file.getvalue()


def loads(data: bytes) -> Any:
    """Read what `dumps` has written, here or elsewhere; classes of this process stay as they are.

    Raises Exception, whatever the classes raise.
    """
    return Unpickler(io.BytesIO(data)).load()


_Spaces = dict[str, dict[str, Any]]
_spaces: ContextVar[_Spaces | None] = ContextVar("spaces", default=None)
"""Shared globals: the name of a module of the program's -> its globals here."""
_keeps_names: ContextVar[bool] = ContextVar("keeps_names", default=False)
"""True if functions that this process has written get its own globals, as they are."""


@contextlib.contextmanager
def shared_globals(spaces: _Spaces) -> Iterator[None]:
    """Give functions of a module that are read in such blocks the same globals.

    A module and its loss are pickled apart; what one of them leaves in a list of the program's,
    the other one must find. Elsewhere each pickle has globals of its own.
    """
    token = _spaces.set(spaces)
    try:
        yield
    finally:
        _spaces.reset(token)


@contextlib.contextmanager
def own_globals() -> Iterator[None]:
    """Give functions of the program that are read again here its own globals, as they are.

    Classes that are read here have them, too.
    """
    token = _keeps_names.set(True)
    try:
        with shared_globals({name: vars(sys.modules[name]) for name in _by_value()}):
            yield
    finally:
        _keeps_names.reset(token)


@contextlib.contextmanager
def lent_globals() -> Iterator[None]:
    """As `own_globals`, but with copies of what names have, as on a worker, until the end."""
    spaces = {name: vars(sys.modules[name]) for name in _by_value()}
    before = {name: dict(space) for name, space in spaces.items()}
    try:
        with shared_globals(spaces):
            yield
    finally:
        for name, space in spaces.items():
            changed = {k: v for k, v in before[name].items() if space.get(k) is not v}
            space.update(changed)


def _by_value() -> list[str]:
    """Names of the modules here whose code goes by value."""
    names = ("__main__", *cloudpickle.list_registry_pickle_by_value())
    return [name for name in names if name in sys.modules]


def _space(module: str, names: dict[str, Any], home: tuple[str, int] | None) -> dict[str, Any]:
    spaces = _spaces.get()
    if spaces is None or (_keeps_names.get() and home != _process()):
        found: dict[str, Any] = _Space(module)
    else:
        found = spaces.setdefault(module, {})
    _give_names(found, names)
    return found


def _give_names(space: dict[str, Any], names: dict[str, Any]) -> None:
    keeps = _keeps_names.get() and not isinstance(space, _Space)
    space.update({k: v for k, v in names.items() if k not in space} if keeps else names)


def _set_function(function: types.FunctionType, state: tuple[Any, ...]) -> None:
    """Set the state of a function that is read, as cloudpickle does it, but for its globals."""
    own, slots, set_state = state
    _give_names(function.__globals__, slots["__globals__"])
    set_state(function, (own, {**slots, "__globals__": {}}))


class _Space(dict[str, Any]):
    """The globals of functions that are pickled by value, as far as they need them."""

    def __init__(self, module: str) -> None:
        super().__init__()
        self.module = module
        self.home: tuple[str, int] | None = None
        """The process whose module has these globals itself; None: they came to this one."""

    def __reduce__(self) -> Any:
        return _space, (self.module, dict(self), self.home)


def _spaces_of_modules() -> dict[int, _Space]:
    """The ``id`` of the globals of modules whose code goes by value -> what becomes of them."""
    return {id(vars(sys.modules[name])): _Space(name) for name in _by_value()}


class Pickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle has no types
    """Pickles code by value, and refuses what lives on the driver only."""

    strange: Mapping[int, str] = MappingProxyType({})
    """See `dumps`."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.globals_ref = _spaces_of_modules()
        self._spaces_by_name = {space.module: space for space in self.globals_ref.values()}

    def reducer_override(self, value: Any) -> Any:
        """Return how to pickle a value; called for each that is not of a type of Python's own."""
        kind = type(value)
        if kind.__module__.startswith("pyspark.") and kind.__name__ in (
            "SparkSession",
            "DataFrame",
        ):
            raise pickle.PicklingError(f"a {kind.__name__} lives on the driver")
        if id(value) in self.strange:
            raise UsesModule(
                f"it uses {self.strange[id(value)]} of the module itself, and workers train "
                "another one"
            )
        if kind is types.FunctionType and isinstance(value.__globals__, _Space):
            space = self._spaces_by_name.get(value.__globals__.module)
            if space is not None:
                self.globals_ref[id(value.__globals__)] = space
        elif kind is types.FunctionType:
            space = self.globals_ref.get(id(value.__globals__))
            if isinstance(space, _Space):
                space.home = _process()
        if kind is object or (kind is types.FunctionType and value.__name__ == "<lambda>"):
            place = _place_of(value)
            if place is not None:
                return _object_there if kind is object else _lambda_there, place
        for of_kind, reduce in _REDUCERS:
            if isinstance(value, of_kind):
                found = reduce(value)
                if found is not None:
                    return found
        found = super().reducer_override(value)
        if kind is types.FunctionType and found is not NotImplemented:
            make, args, state, _, _, set_state = found
            state, set_state = (*state, set_state), _set_function
            found = make, args, state, None, None, set_state
            place = _place_in_program(value)
            if place is not None:
                made = _of_program, (_process(), place, make, args)
                return *made, (place, state, set_state), None, None, _set_unless_there
        if issubclass(kind, enum.EnumMeta) and found is not NotImplemented:
            return *found[:2], (found[2], _given_to_members(value)), None, None, _set_enum
        return found


def _process() -> tuple[str, int]:
    return socket.gethostname(), os.getpid()


def _place_in_program(function: types.FunctionType) -> tuple[str, str] | None:
    """The place of a global function of the program's own, of which copies here are the same one.

    So code may know it by its identity. None: it has no name, or it uses what else the program has,
    of which a copy is to have its own.
    """
    own = vars(sys.modules.get(function.__module__, types))
    if own is not function.__globals__ or function.__closure__ or vars(function):
        return None
    codes = [function.__code__]
    for code in codes:
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
        steps = dis.get_instructions(code)
        names = {str(step.argval) for step in steps if step.opname.endswith(("_GLOBAL", "_NAME"))}
        if any(not isinstance(own.get(name, types), types.ModuleType) for name in names):
            return None
    if own.get(function.__name__) is function:
        return function.__module__, function.__name__
    names = {name for name, one in list(own.items()) if one is function}
    return (function.__module__, min(names)) if names else None


def _there(place: tuple[str, str]) -> Any:
    return vars(sys.modules.get(place[0], types)).get(place[1])


def _of_program(
    home: tuple[str, int], place: tuple[str, str], make: Callable[..., Any], args: Any
) -> Any:
    """Return the program's own function, or in other processes a new one."""
    is_there = home == _process() and isinstance(_there(place), types.FunctionType)
    return _there(place) if is_there else make(*args)


def _set_unless_there(function: Any, state: tuple[Any, ...]) -> None:
    place, state, set_state = state
    if function is not _there(place):
        set_state(function, state)


def _place_of(value: Any) -> tuple[str, str] | None:
    """Module and name of an object that code may know by its identity; None: it has no name."""
    by_value = {"__main__", "__mp_main__", *cloudpickle.list_registry_pickle_by_value()}
    names, is_function = list(sys.modules), isinstance(value, types.FunctionType)
    own: tuple[str, str] | None = None
    for name in [value.__module__] if is_function else names:
        module = sys.modules.get(name)
        is_imported = name not in by_value and getattr(module, "__spec__", None) is not None
        if is_imported or (name in by_value and not is_function):
            for key, one in list(vars(module).items()):
                if one is value and is_imported:
                    return name, key
                if one is value:
                    own = own or (name, key)
    return own


def _lambda_there(module: str, name: str) -> Any:
    return vars(importlib.import_module(module))[name]


def _object_there(module: str, name: str) -> Any:
    """Return the object, or another one where the program's own module is not."""
    with contextlib.suppress(ImportError):
        found = vars(importlib.import_module(module)).get(name)
        if type(found) is object:
            return found
    return object()


class CodePickler(Pickler):
    """Pickles code of some modules by value; it gets the globals of the modules that are there."""

    def __init__(
        self, file: io.BytesIO, modules: Iterable[str], *, with_classes: bool = True
    ) -> None:
        """Pickle functions and, ``with_classes``, classes.

        Else classes go by name if they can, and caches have their results.
        """
        super().__init__(file)
        self._with_classes = with_classes
        self._spaces = {id(vars(sys.modules[module])): module for module in modules}

    def reducer_override(self, value: Any) -> Any:
        """Return how to pickle a value; called for each that is not of a type of Python's own."""
        if isinstance(value, types.FunctionType) and id(value.__globals__) in self._spaces:
            code, _, _, _, closure = self._function_getnewargs(value)
            state, slots = cloudpickle.cloudpickle._function_getstate(value)
            slots |= {"__globals__": {}, "_cloudpickle_submodules": []}
            made = self._spaces[id(value.__globals__)], code, closure
            set_state = cloudpickle.cloudpickle._function_setstate
            return _function_there, made, (state, slots), None, None, set_state
        is_wrapper = type(value) in (types.FunctionType, functools._lru_cache_wrapper)
        if is_wrapper and value.__module__ in self._spaces.values():
            if type(value) is types.FunctionType:  # what a package's decorator has made
                return self._dynamic_function_reduce(value)
            return _with_results(value, has_results=not self._with_classes)
        is_class = self._with_classes and isinstance(value, type)
        if is_class and value.__module__ in self._spaces.values():
            made = cloudpickle.cloudpickle._dynamic_class_reduce(value)
            return (*made[:5], _fill_class)
        return super().reducer_override(value)


def _function_there(module: str, code: types.CodeType, closure: Any) -> types.FunctionType:
    space = vars(importlib.import_module(module))
    return types.FunctionType(code, space, code.co_name, None, closure)


class _CodeCollector(Pickler):
    """Takes note of classes and functions that are pickled; tensors are left out."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.found: list[Any] = []
        self.operators: set[str] = set()
        """Names of operators, below torch.ops."""
        self.imports: set[str] = set()
        """Names of modules that code imports."""

    def persistent_id(self, value: Any) -> str | None:
        """Leave out a tensor."""
        return "" if isinstance(value, torch.Tensor) else None

    def reducer_override(self, value: Any) -> Any:
        """Return how to pickle a value; called for each."""
        found = super().reducer_override(value)
        if isinstance(value, type | types.FunctionType):
            self.found.append((value, found is NotImplemented))
            if found is not NotImplemented and isinstance(value, types.FunctionType):
                self.operators |= named_operators(value.__code__)
        elif isinstance(value, _OPERATORS) and found[0] is not _lambda_there:
            self.operators.add(_name_of(value))
        is_module = isinstance(value, types.ModuleType)
        if is_module and cloudpickle.cloudpickle._should_pickle_by_reference(value):
            self.imports.add(value.__name__)
        return found


@dataclass(frozen=True, kw_only=True)
class SentCode:
    """Code that a value takes along, and what that needs elsewhere."""

    code: Sequence[tuple[Any, bool]]
    """Classes and functions, and whether by their names alone."""
    modules: frozenset[str]
    """Names of the modules of Python that its code has in globals."""
    operators: Operators
    """Operators of torch that it and its code call."""


def sent_along(value: Any) -> SentCode:
    """Return what a value takes along; of one that cannot travel, what comes before that shows."""
    collector = _CodeCollector()
    with contextlib.suppress(Exception):  # `check_travels` and `pack` refuse what cannot travel
        collector.dump(value)
    modules = frozenset(collector.imports)
    operators = Operators(frozenset(collector.operators), modules)
    return SentCode(code=collector.found, modules=modules, operators=operators)


def sent_code(value: Any) -> Sequence[tuple[Any, bool]]:
    """Classes and functions that a value takes along, and whether by their names alone."""
    return sent_along(value).code


def _operator(value: Any) -> _Reduced:
    """An operator that a program has made; the module that makes it registers it elsewhere, too."""
    place = _place_of(value)
    if place is not None and place[0] not in _by_value():
        return _lambda_there, place
    return pkgutil.resolve_name, (f"torch.ops.{_name_of(value)}",)


def _name_of(operator: Any) -> str:
    is_made = isinstance(operator, _MADE_OPERATOR)
    return operator._qualname.replace("::", ".") if is_made else str(operator)


def _script(value: Any) -> _Reduced:
    file = io.BytesIO()
    with _as_long_as_torch_has_them():
        torch.jit.save(value, file)
    return _scripted, (torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8),)


def _scripted(data: torch.Tensor) -> nn.Module:
    with _as_long_as_torch_has_them():
        module: nn.Module = torch.jit.load(  # type: ignore[no-untyped-call]
            io.BytesIO(data.numpy().data), map_location="cpu"
        )
    return module


@contextlib.contextmanager
def _as_long_as_torch_has_them() -> Iterator[None]:
    """Scripts are the user's choice, so the user has seen torch's warning when they were made."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".torch.jit", category=DeprecationWarning)
        yield


def _graph_module(module: fx.GraphModule) -> _Reduced:
    """As torch does it, but what the code names travels by value, not by its module's name."""
    state = dict(vars(module))
    code = module.recompile()
    del state["_graph"]
    hooks = {key: state[key] for key in HOOKS & state.keys()}
    return _traced, (type(module).__name__, code.src, code.globals, state), hooks


def _traced(kind: str, source: str, names: dict[str, Any], state: dict[str, Any]) -> nn.Module:
    from torch.fx import _symbolic_trace, graph_module

    # The code calls the functions of the graph; what these do is no part of it.
    whole = _symbolic_trace._create_wrapped_func
    named = {k: whole(v) if isinstance(v, types.FunctionType) else v for k, v in names.items()}
    forward = graph_module._forward_from_src(source, named)
    module = graph_module._deserialize_graph_module(forward, state)
    type(module).__name__ = kind  # which is this one's alone
    return module


def _special_module(module: nn.Module) -> _Reduced | None:
    """A module whose class torch has made at run time, or which has slots; None: another one."""
    kind: Any = type(module)
    is_made = parametrize.is_parametrized(module) and "__getstate__" in vars(kind)
    base = kind.__bases__[0] if is_made else kind
    slots = [slot for slot in copyreg._slotnames(kind) if hasattr(module, slot)]  # type: ignore[attr-defined]
    is_usual = base.__getstate__ is nn.Module.__getstate__ and base.__reduce__ is object.__reduce__
    if not is_made and not (slots and is_usual):
        return None
    made: Any = module.parametrizations if is_made else ()
    names = tuple(made)
    state = dict(vars(module)), {slot: getattr(module, slot) for slot in slots}
    return _made, (base, names), state, None, None, _set_state


def _made(base: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    module = base.__new__(base)
    if names:
        parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module


def _set_state(module: nn.Module, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    vars(module).update(state[0])
    vars(module).pop("_compiled_call_impl", None)
    for slot, content in state[1].items():
        object.__setattr__(module, slot, content)


def _cached(function: Any) -> _Reduced | None:
    """A function with a cache as another one with the same results, unless it can be imported."""
    if _is_importable(function):
        return None
    return _with_results(function, has_results=not _trying.get())


def _with_results(function: Any, *, has_results: bool) -> _Reduced:
    own = function.__wrapped__, function.cache_parameters()
    results = _results_to_send(function) if has_results else []
    return (_cached_again, own, results, None, None, _fill) if results else (_cached_again, own)


_trying: ContextVar[bool] = ContextVar("_trying", default=False)
"""Whether results are pickled to see if they can be, without what caches hold in turn."""
_not_sent: set[str] = set()
"""Names of functions of which a warning says that others begin with an empty cache."""


def _results_to_send(function: Any) -> list[Any]:
    """What the cache holds, or nothing, with a warning, if it is large or cannot be pickled."""
    results = cached_results(function)
    token = _trying.set(True)
    try:
        with BoundedBytes(_MOST_RESULTS) as file:
            Pickler(file).dump(results)
    except Exception as error:  # whatever classes raise that cannot be pickled
        if function.__qualname__ not in _not_sent:
            _not_sent.add(function.__qualname__)
            logger.warning(
                "the results that the cache of %s holds are not sent (%s): workers begin with an "
                "empty one, and compute them anew",
                *(function.__qualname__, str(error).partition("\n")[0]),
            )
        return []
    finally:
        _trying.reset(token)
    return results


def cached_results(function: Any) -> list[tuple[tuple[Any, ...], dict[str, Any], Any]]:
    """Arguments by position and by name, and the result, of what a function's cache holds.

    Only the garbage collector lets see that.
    """
    size, parts = function.cache_info().currsize, gc.get_referents(function)
    places = [i for i, one in enumerate(parts) if type(one) is dict and one is not vars(function)]
    if not size or not places:
        return []
    store: dict[Any, Any] = parts[places[-1]]  # what is before it are results
    mark = next((one for one in parts[places[-1] :] if type(one) is object), None)
    about = function.cache_parameters()
    if about["maxsize"] is None:
        pairs = list(store.items())
    else:  # keys and results follow each other, those that were asked for last at the end
        keys, pairs, left = {id(key) for key in store}, [], iter(parts)
        for one in left:
            if id(one) in keys and len(pairs) < size:
                pairs.append((one, next(left)))
    return [(*_arguments(key, mark, is_typed=about["typed"]), result) for key, result in pairs]


def _arguments(key: Any, mark: Any, *, is_typed: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that a cache files a result under, see `functools._make_key`.

    ``mark`` stands between those by position and those by name.
    """
    if type(key) is not tuple:
        return (key,), {}
    count = next((place for place, one in enumerate(key) if one is mark), None)
    if count is None:
        return (key[: len(key) // 2] if is_typed else key), {}
    rest = key[count + 1 :]
    by_name = rest[: 2 * (len(rest) - count) // 3] if is_typed else rest
    return key[:count], dict(zip(by_name[::2], by_name[1::2], strict=True))


class _Giving:
    """A function below a cache, which first gives results that the cache shall have."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.results = function, list[Any]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.results.pop() if self.results else self.function(*args, **kwargs)


def _cached_again(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Any:
    giving = _Giving(function)
    found: Any = functools.update_wrapper(functools.lru_cache(**parameters)(giving), function)
    found.giving = giving
    return found


def _fill(function: Any, results: Sequence[tuple[tuple[Any, ...], dict[str, Any], Any]]) -> None:
    given = function.giving.results
    for args, kwargs, result in results:
        given.append(result)
        with contextlib.suppress(Exception):  # of an argument that is not whole yet, in a circle
            function(*args, **kwargs)
        given.clear()


def _is_importable(value: Any) -> bool:
    """True if other processes find the value by the name that it has."""
    module = sys.modules.get(value.__module__)
    if module is None or module.__name__ in {
        "__main__",
        *cloudpickle.list_registry_pickle_by_value(),
    }:
        return False
    found: Any = module
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def _special_python_module(module: types.ModuleType) -> _Reduced | None:
    """A module of a class of its own, such as torch.backends.cudnn, by its name."""
    if type(module) is types.ModuleType or sys.modules.get(module.__name__) is not module:
        return None
    return pkgutil.resolve_name, (module.__name__,)


def _cached_property(value: functools.cached_property[Any]) -> _Reduced:
    """Without the lock that it has before Python 3.12."""
    return functools.cached_property, (value.func,), {"attrname": value.attrname}


def _weak(value: Any) -> _Reduced:
    target = value()
    return (_dead, ()) if target is None else (weakref.ref, (target,))


def _dead() -> Any:
    return weakref.ref(types.SimpleNamespace())


def _contents(variable: ContextVar[Any]) -> tuple[Any, ...]:
    """The value of a variable in the context that sends it, if it has one."""
    with contextlib.suppress(LookupError):
        return (variable.get(),)
    return ()


def _variable(name: str, *default: Any) -> ContextVar[Any]:
    return ContextVar(name, default=default[0]) if default else ContextVar(name)


def _of_thread(value: threading.local) -> _Reduced:
    """With what it has on the thread that sends it, for the thread that reads it."""
    return threading.local, (), dict(vars(value))


_REDUCERS: tuple[tuple[Any, Callable[[Any], _Reduced | None]], ...] = (
    ((torch.jit.ScriptModule, torch.jit.ScriptFunction), _script),
    (fx.GraphModule, _graph_module),
    # torch.ops, and its namespaces, of which code takes hold by their names
    ((type(torch.ops), type(torch.ops.aten)), lambda ops: (pkgutil.resolve_name, (ops.__name__,))),
    (_OPERATORS, _operator),
    (nn.Module, _special_module),
    (functools._lru_cache_wrapper, _cached),
    (functools.cached_property, _cached_property),
    (weakref.ReferenceType, lambda value: _weak(value) if type(value) is weakref.ref else None),
    (weakref.WeakKeyDictionary, lambda value: (weakref.WeakKeyDictionary, (dict(value),))),
    (weakref.WeakValueDictionary, lambda value: (weakref.WeakValueDictionary, (dict(value),))),
    (weakref.WeakSet, lambda value: (weakref.WeakSet, (list(value),))),
    (types.ModuleType, lambda value: _special_python_module(value)),
    (ContextVar, lambda value: (_variable, (value.name, *_contents(value)))),
    (threading.local, lambda value: _of_thread(value) if type(value) is threading.local else None),
)
"""Functions that pickle values, by their class; None: in the usual way."""


@dataclass(frozen=True)
class Memory:
    """Memory of tensors, or a part of it, that has been sent."""

    storage: torch.UntypedStorage
    begin: int
    """The first byte of the whole that is there."""


@dataclass(frozen=True)
class _Numbered:
    """Stands for memory in a pickle."""

    number: int


@dataclass(frozen=True)
class _Named:
    """Stands in a pickle for the values of a parameter that come from elsewhere."""

    name: str


class _Span:
    """Memory, and which of its bytes are needed."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self.begin, self.end = storage.nbytes(), 0
        self.is_of_parameters, self.is_of_others = False, False


@dataclass(frozen=True)
class PickleHead:
    """The facts known of a pickled module before it is read. Written in front of it."""

    begins: list[int]
    """Position of the first byte of each memory that is sent."""
    of_parameters: frozenset[int]
    """The numbers of memories in which only registered parameters lie."""
    next_hook: int
    """The number of the next hook in the process that has written it."""
    default_dtype: torch.dtype
    """Default dtype of the program, for what forward makes."""

    @classmethod
    def read(cls, file: io.BytesIO) -> PickleHead:
        """Read it; what follows in ``file`` is the module."""
        head: PickleHead = pickle.load(file)
        return head


class ModulePickler(Pickler):
    """Pickles a module but for the memory of its tensors."""

    def __init__(
        self,
        file: io.BytesIO,
        module: nn.Module | None = None,
        elsewhere: Mapping[int, str] | None = None,
        is_made: Callable[[torch.Tensor], bool] = lambda tensor: False,
    ) -> None:
        """Write to ``file``.

        Args:
            file: for one pickle.
            module: whose parameters are told from other tensors.
            elsewhere: names of those whose values are not sent, by ``id``.
            is_made: says of a tensor on the meta device that its memory counts nevertheless.
        """
        super().__init__(file)
        self.spans: list[_Span] = []
        self._numbers: dict[int, int] = {}
        self._elsewhere = elsewhere or {}
        self._is_made = is_made
        self._registered = set() if module is None else {id(p) for p in module.parameters()}
        self._memory = SharedMemory({} if module is None else dict(registered(module)))

    def persistent_id(self, value: Any) -> Any:
        """Return what stands for memory, and for what comes from elsewhere; None for all else."""
        if isinstance(value, _Numbered):
            return value.number
        if isinstance(value, _Named):
            return value.name
        if isinstance(value, torch.UntypedStorage):
            return self._note(value, 0, value.nbytes(), False), None
        if isinstance(value, torch.TypedStorage):
            whole = value._untyped_storage
            return self._note(whole, 0, whole.nbytes(), False), value.dtype
        return None

    def reducer_override(self, value: Any) -> Any:
        """Return how to pickle a value; called for each that is not of a type of Python's own."""
        if isinstance(value, torch.Tensor):
            with torch._C.DisableTorchFunctionSubclass():
                return self._tensor(value)
        if type(value) is np.ndarray:
            storage = self._memory.of_array(value)
            if storage is not None:
                begin, end = array_bytes(value)
                start = storage.data_ptr()
                number = self._note(storage, begin - start, end - start, False)
                about = value.dtype, value.ctypes.data - start, value.shape, value.strides
                return _array, (_Numbered(number), *about)
        return super().reducer_override(value)

    def head(self) -> PickleHead:
        """Return what belongs in front of what has been written."""
        return PickleHead(
            begins=[span.begin for span in self.spans],
            of_parameters=frozenset(
                number
                for number, span in enumerate(self.spans)
                if span.is_of_parameters and not span.is_of_others
            ),
            next_hook=RemovableHandle.next_id,
            default_dtype=torch.get_default_dtype(),
        )

    def _tensor(self, tensor: torch.Tensor) -> Any:
        kind = type(tensor)
        hooks = {key: found for key in TENSOR_HOOKS if (found := getattr(tensor, key, None))}
        own_ways = kind.__reduce_ex__, kind.__reduce__, kind.__torch_dispatch__
        if own_ways[0] not in _USUAL or own_ways[1:] != _USUAL_REST:
            if is_lazy(tensor):
                dtype = tensor.data.dtype
                return (
                    _lazy,
                    (kind, tensor.requires_grad, dtype),
                    (vars(tensor), hooks),
                    None,
                    None,
                    _give,
                )
            if hooks:
                raise pickle.PicklingError(f"a tensor of {kind} has hooks, which its class drops")
            return super().reducer_override(tensor)
        state = torch._utils._get_obj_state(tensor)  # type: ignore[no-untyped-call]
        needs_grad = tensor.requires_grad and tensor.is_leaf  # others are computed anew
        is_own = id(tensor) in self._registered
        if kind is torch.Tensor and not (state or hooks or needs_grad or is_own):
            return self._plain(tensor, False)
        data: Any
        if id(tensor) in self._elsewhere:
            data = _Named(self._elsewhere[id(tensor)])
        else:
            data = Reducible(self._plain(tensor, is_own))
        return of_kind, (kind, data, needs_grad), (state, hooks), None, None, _give

    def _plain(self, tensor: torch.Tensor, is_own: bool) -> Any:
        """Return how to make a tensor with these values, of no graph, without what else it has."""
        plain = tensor.detach()
        if type(plain) is not torch.Tensor:
            plain = plain.as_subclass(torch.Tensor)
        is_there = plain.device.type != "meta" or self._is_made(plain)
        if not (is_there and _is_strided(plain)):
            make, args = plain._reduce_ex_internal(2)  # type: ignore[no-untyped-call]
            return (_quantized if make is torch._utils._rebuild_qtensor else make), args
        size, stride, width = tuple(plain.shape), plain.stride(), plain.element_size()
        begin = end = int(plain.storage_offset()) * width
        if plain.numel():
            end += (sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1) * width
        if plain.device.type == "meta":
            begin, end = 0, plain.untyped_storage().nbytes()
        number = self._note(plain.untyped_storage(), begin, end, is_own)
        about = torch._utils.get_tensor_metadata(plain)  # type: ignore[no-untyped-call]
        where = plain.storage_offset(), size, stride, about
        return _strided, (_Numbered(number), plain.dtype, *where)

    def _note(self, storage: torch.UntypedStorage, begin: int, end: int, is_own: bool) -> int:
        """The number of memory of which these bytes are needed."""
        number = self._numbers.setdefault(storage._cdata, len(self.spans))
        if number == len(self.spans):
            self.spans.append(_Span(storage))
        span = self.spans[number]
        if begin < end:
            span.begin = min(span.begin, begin // _ALIGNMENT * _ALIGNMENT)
            span.end = max(span.end, end)
        span.is_of_parameters |= is_own
        span.is_of_others |= not is_own
        return number


_USUAL = (torch.Tensor.__reduce_ex__, nn.Parameter.__reduce_ex__)
_USUAL_REST = (torch.Tensor.__reduce__, torch.Tensor.__torch_dispatch__)


class Reducible:
    """Is pickled as told, and read as what that makes."""

    def __init__(self, reduced: Any) -> None:
        self._reduced = reduced

    def __reduce__(self) -> Any:
        return self._reduced


def _is_strided(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested or any(getattr(tensor, "names", ())))
        and torch._C._has_storage(tensor)
    )


def _strided(
    memory: Memory,
    dtype: torch.dtype,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    about: Any,
) -> torch.Tensor:
    tensor = torch.empty(0, dtype=dtype, device=memory.storage.device)
    offset = max(0, offset - memory.begin // tensor.element_size())  # 0: it has no numbers
    tensor = tensor.set_(memory.storage, offset, size, stride)
    if about:
        torch._utils.set_tensor_metadata(tensor, about)  # type: ignore[no-untyped-call]
    return tensor


def _quantized(*args: Any) -> torch.Tensor:
    with warnings.catch_warnings():  # of what torch itself uses there
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        made: torch.Tensor = torch._utils._rebuild_qtensor(*args)  # type: ignore[no-untyped-call]
    return made


def of_kind(kind: Any, data: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """A tensor of the class ``kind`` with the memory of ``data``."""
    if kind is nn.Parameter:
        return nn.Parameter(data, requires_grad)
    if issubclass(kind, nn.Parameter):
        made: torch.Tensor = torch.Tensor._make_subclass(kind, data, requires_grad)
        return made
    with torch._C.DisableTorchFunctionSubclass():
        found = data if kind is torch.Tensor else data.as_subclass(kind)
        return found.requires_grad_() if requires_grad else found


def _lazy(kind: Any, requires_grad: bool, dtype: torch.dtype) -> torch.Tensor:
    made: torch.Tensor = kind(requires_grad=requires_grad, dtype=dtype)
    return made


def _give(tensor: torch.Tensor, found: tuple[Any, Mapping[str, Any]]) -> None:
    """Give a tensor its attributes and hooks."""
    state, hooks = found
    with torch._C.DisableTorchFunctionSubclass():
        if state:
            torch._utils._set_obj_state(tensor, state)  # type: ignore[no-untyped-call]
        for key, registered in hooks.items():
            setattr(tensor, key, registered)


def registered(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers of a module, by all their names."""
    for name, layer in module.named_modules(remove_duplicate=False):
        for key, value in (*layer._buffers.items(), *layer._parameters.items()):
            if value is not None:
                yield ".".join(filter(None, (name, key))), value


class SharedMemory:
    """Knows the memory of tensors, and what else lies there."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Note ``tensors`` by their names; those without memory of their own do not count."""
        self._named: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in tensors.items():
            if _has_numbers(tensor):
                memory = tensor.untyped_storage().data_ptr()
                self._named.setdefault(memory, []).append((name, tensor))

    def of_tensor(self, tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """Return the one of the tensors that a view shows, with its name.

        None: it shows no other one of its dtype.
        """
        if not _has_numbers(tensor):
            return None
        for name, base in self._named.get(tensor.untyped_storage().data_ptr(), ()):
            (begin, end), (first, last) = _numbers(tensor), _numbers(base)
            if base.dtype == tensor.dtype and first <= begin and end <= last:
                return name, base
        return None

    def of_array(self, array: np.ndarray[Any, Any]) -> torch.UntypedStorage | None:
        """The memory that an array shares with a tensor; None: with none."""
        base: Any = array
        while isinstance(base, np.ndarray):
            base = base.base
        if isinstance(base, torch.Tensor) and not array.dtype.hasobject:
            return base.untyped_storage()
        named = self.named_of_array(array)
        return None if named is None else named[1].untyped_storage()

    def named_of_array(self, array: np.ndarray[Any, Any]) -> tuple[str, torch.Tensor] | None:
        """Return the one of the tensors that an array shows, with its name; None: it shows none."""
        if array.dtype.hasobject or not array.size:
            return None
        begin, end = array_bytes(array)
        for start, named in self._named.items():
            for name, base in named:
                first, last = (start + n * base.element_size() for n in _numbers(base))
                if base.is_cpu and first <= begin and end <= last:
                    return name, base
        return None


def _has_numbers(tensor: torch.Tensor) -> bool:
    """True for a tensor of torch's own with dense numbers in memory."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_meta:
        return False
    return _is_strided(tensor) and tensor.numel() > 0


def _numbers(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where in its memory the numbers of a tensor begin and end."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    begin = int(tensor.storage_offset())
    return begin, begin + sum((n - 1) * step for n, step in steps) + 1


def array_bytes(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    """The addresses at which an array's bytes begin and end."""
    steps = [(n - 1) * step for n, step in zip(array.shape, array.strides, strict=True)]
    begin = array.ctypes.data + sum(step for step in steps if step < 0)
    return begin, array.ctypes.data + sum(step for step in steps if step > 0) + array.itemsize


def view_of(
    base: torch.Tensor,
    strides: tuple[int, ...],
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
) -> torch.Tensor:
    """A view of a tensor's memory.

    Args:
        base: the tensor; if it has other strides, the view is one of a copy.
        strides: those that it had where the view was looked at.
        offset: numbers between the first of the tensor and that of the view.
        size: of the view.
        stride: of the view.
    """
    base = base.detach()
    if base.stride() != tuple(strides):
        base = base.new_empty_strided(base.shape, strides).copy_(base)
    return base.as_strided(tuple(size), tuple(stride), int(base.storage_offset()) + offset)


def array_of(
    base: torch.Tensor, dtype: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> np.ndarray[Any, Any]:
    """An array in the memory of a tensor, ``offset`` bytes after its first number."""
    storage = base.untyped_storage()
    offset += int(base.storage_offset()) * base.element_size()
    return _array(Memory(storage, 0), dtype, offset, shape, strides)


def _array(
    memory: Memory, dtype: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> np.ndarray[Any, Any]:
    flat = torch.empty(0, dtype=torch.uint8).set_(memory.storage).numpy()
    return np.ndarray(
        tuple(shape), dtype, buffer=flat, offset=offset - memory.begin, strides=tuple(strides)
    )


class Unpickler(pickle.Unpickler):
    """Reads what `Pickler` has written; a class that this process has defined stays as it is."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what a pickle names."""
        found = super().find_class(module, name)
        return _set_class if found is cloudpickle.cloudpickle._class_setstate else found


class ModuleUnpickler(Unpickler):
    """Rebuilds what `ModulePickler` has written."""

    def __init__(
        self,
        file: io.BytesIO,
        storage: Callable[[int], torch.UntypedStorage],
        weights: Callable[[str], torch.Tensor] | None = None,
    ) -> None:
        """Read from ``file``.

        Args:
            file: begins with the `PickleHead`.
            storage: gives a memory, of which the first byte is that of the head.
            weights: gives the parameters that come from elsewhere.
        """
        self.head = PickleHead.read(file)
        super().__init__(file)
        self.memories: dict[int, Memory] = {}
        self._storage, self._weights = storage, weights
        # Hooks are filed under numbers; one that is registered here must not take another's place.
        RemovableHandle.next_id = max(RemovableHandle.next_id, self.head.next_hook)

    def persistent_load(self, pid: Any) -> Any:
        """Return what ``pid`` stands for in the pickle; see `ModulePickler.persistent_id`."""
        if isinstance(pid, str):
            assert self._weights is not None
            return self._weights(pid)
        number, dtype = pid if isinstance(pid, tuple) else (pid, None)
        if number not in self.memories:
            self.memories[number] = Memory(self._storage(number), self.head.begins[number])
        memory = self.memories[number]
        if not isinstance(pid, tuple):
            return memory
        if dtype is None:
            return memory.storage
        return torch.TypedStorage(  # type: ignore[no-untyped-call]
            wrap_storage=memory.storage, dtype=dtype, _internal=True
        )


def _set_class(kind: type, state: Any) -> type:
    """Fill a class that a pickle brings, unless this process has defined it.

    Its functions would become copies, which do not see what the program gives to its globals later.
    """
    own = vars(sys.modules.get(kind.__module__, types))
    if any(member is kind for member in own.values()):
        return kind
    functions = (getattr(member, "__func__", member) for member in vars(kind).values())
    if any(getattr(function, "__globals__", None) is own for function in functions):
        return kind
    return _fill_class(kind, state)


def _given_to_members(kind: Any) -> dict[str, dict[str, Any]]:
    """The attributes of an Enum's members, which its definition does not make."""
    return {
        name: {key: part for key, part in vars(member).items() if key[:1] != "_"}
        for name, member in kind._member_map_.items()
    }


def _set_enum(kind: Any, state: tuple[Any, Mapping[str, Mapping[str, Any]]]) -> Any:
    given, attributes = state
    kind = _set_class(kind, given)
    for name, now in _given_to_members(kind).items():
        member, parts = kind._member_map_[name], attributes[name]
        vars(member).update(parts)
        for key in now.keys() - parts.keys():  # of a program that was here before
            del vars(member)[key]
    return kind


def _fill_class(kind: type, state: Any) -> type:
    """Fill a class, which a process keeps from one pickle to the next: remove what is no more."""
    for name in () if issubclass(kind, enum.Enum) else vars(kind).keys() - state[0].keys():
        is_slot = isinstance(vars(kind)[name], types.MemberDescriptorType)
        if not (name.startswith("__") and name.endswith("__")) and not is_slot:
            delattr(kind, name)
    filled: type = cloudpickle.cloudpickle._class_setstate(kind, state)
    return filled


class StrictUnpickler(ModuleUnpickler):
    """Refuses what only this process finds."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what a pickle names."""
        if module == "__main__":
            raise pickle.PicklingError(
                f"it names {name} of the main program, which workers do not have; move it into a "
                "file that they can import"
            )
        return super().find_class(module, name)
