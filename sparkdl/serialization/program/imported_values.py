"""Values of a program's own modules where other processes import something else.

Code of such modules travels by its name, so that executors have what the files say: ``mylib.SIZE =
3`` in a notebook, or another ``mylib.Net.forward``, would stay on the driver. So globals, and
attributes of classes, that the sent code names are compared by digests: with those of an executor
and, where they differ, with those of a fresh process on the driver. What is otherwise there was
changed by the program, and is sent. What is the same depends on the machine, and is left alone.

Files change, too: an executor may have imported one before the program has edited and reloaded it,
or after an edit that the program has not reloaded. So all code that is named comes along as well,
and is used where a file is not what it was when the program began.
"""

from __future__ import annotations

import ast
import builtins
import collections
import contextlib
import dis
import enum
import functools
import gc
import hashlib
import importlib
import inspect
import io
import itertools
import json
import logging
import os
import pickle
import re
import socket
import subprocess
import sys
import time
import types
import zipimport
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from sparkdl.serialization.trust import is_installed

if TYPE_CHECKING:
    from sparkdl.serialization.program.program_state import ProgramState

logger = logging.getLogger(__name__)

Place = tuple[str, str]
"""A module of Python, and the name of something in it, with dots."""

_FRESH_SECONDS = 120.0
"""Longest wait for a fresh process, which may have to import torch."""
_MOST_BYTES = 1 << 20
"""Larger values are not sent: they are caches rather than settings."""
_FEW_BYTES = 1 << 16
"""The same of globals that come along only for the case that a file changes."""
_MOST_PARTS = 10_000
"""So many of what a value holds, nearest first, are asked for code."""
_ATOMS = {type(None), bool, int, float, complex, str, bytes}
_OPAQUE = (
    *(types.ModuleType, types.CodeType, types.FrameType, types.TracebackType, types.GeneratorType),
    logging.Logger,
)
"""Kinds of objects that lead to all of a process, or to no code."""
_DRIVERS = {"pyspark", "py4j"}
"""Packages whose objects are connections."""
_OF_A_HOST = re.compile(
    r"(PATH|HOME|PWD|TMPDIR|USER|HOSTNAME|PYTHONPATH|LD_LIBRARY_PATH|CUDA_VISIBLE_DEVICES"
    r"|((LOCAL|GROUP|NODE|ROLE)_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|(PY)?SPARK_.*|SPARKDL_.*)$"
)
"""Environment variables that each host and worker has for itself."""
_ABSENT = "absent"
_PATCHED = ("torch", "torch.nn.functional")
"""Modules of packages whose functions programs put others in the place of."""
_OF_CLASSES = ("torch.nn", "torch.optim", "torch.optim.lr_scheduler")
"""Modules of packages into whose classes programs put what they name otherwise, or not at all."""
_HEAP_TYPE = 1 << 9
"""Flag of classes that Python code has made."""
_VALUES = {
    *_ATOMS, list, tuple, dict, set, frozenset, types.SimpleNamespace, collections.OrderedDict,
    collections.defaultdict, collections.deque, collections.Counter,
}  # fmt: skip
_ARRAYS = {("torch", "Tensor"), ("numpy", "ndarray"), ("numpy", "generic")}
"""Kinds of values that a program may have put into a package."""


def imported_values(code: Iterable[Any]) -> dict[Place, str]:
    """Digests of what classes and functions name of modules that other processes import."""
    return {place: _digest(value) for place, value in _named(code, by_name=True).items()}


def differing(expected: Mapping[Place, str]) -> dict[Place, str]:
    """Digests of what is otherwise in this process than `imported_values` said of another."""
    found = {place: _found(place) for place in expected}
    return {place: digest for place, digest in found.items() if digest != expected[place]}


def values_to_send(
    expected: Mapping[Place, str], there: Mapping[Place, str], code: ProgramCode | None = None
) -> ProgramValues:
    """Return what the program has of what executors have otherwise.

    Args:
        expected: what `imported_values` has found in this process.
        there: what `differing` has found in theirs.
        code: what `program_code` has found, which they had then.
    """
    code = code or ProgramCode()
    fresh = as_imported(there)
    changed = [place for place in there if fresh.get(place, expected[place]) != expected[place]]
    found: dict[Place, bytes] = {}
    for place in changed:
        try:
            value = _at(place)
            # A method's closure has its class, for super(): that is the executor's own.
            found[place] = _packed(value, _module_by_value(value), with_classes=False)
        except Exception as error:  # whatever classes raise that cannot be pickled
            _tell_once(place, _reason(error))
    for place in code.lacks.keys() & there.keys() - found.keys():
        if code.sources[place[0]] is None:
            _tell_once(place, code.lacks[place])
    if found:
        names = ", ".join(".".join(place) for place in found)
        logger.info("workers get what the program has changed of imported modules: %s", names)
    return ProgramValues(found, code=code)


def changed_values(code: Iterable[Any]) -> ProgramValues:
    """Return what `values_to_send` gives of this code, where no executor is asked what it has."""
    code = list(code)
    expected = imported_values(code)
    asked = {
        place: digest
        for place, digest in expected.items()
        if _is_as_written(place[0]) and not _is_of_file(place)
    }
    return ProgramValues(values_to_send(expected, asked).values, code=program_code(code))


def program_code(code: Iterable[Any]) -> ProgramCode:
    """All that classes and functions name of the user's own modules, as the program has it."""
    code = list(code)
    named = _named(code, by_name=False)
    modules = {place[0] for place in named}
    modules |= {str(member.__module__) for member in named.values() if _is_code(member)}
    sources = {
        module: None if _changed_at(module) > _began() else _source_digest(module)
        for module in sorted(modules)
        if _is_imported(module) and _is_as_written(module)
    }
    classes = {place for place, member in named.items() if isinstance(member, type)}
    found: dict[Place, Any] = {}
    lacks: dict[Place, str] = {}
    for place, member in named.items():
        path = place[1].split(".")
        is_in_class = any((place[0], ".".join(path[:n])) in classes for n in range(1, len(path)))
        if place[0] not in sources or is_in_class:
            continue
        is_edited = sources[place[0]] is None
        try:
            _packed(member, sources, _MOST_BYTES if is_edited or _is_code(member) else _FEW_BYTES)
            found[place] = member
        except Exception as error:  # whatever classes raise that cannot be pickled
            lacks[place] = _reason(error)
            if is_edited and _is_code(member):
                _tell_once(place, lacks[place])
    packed = _packed(found, sources, sys.maxsize) if found else b""
    functions = [part for part in (*code, *named.values()) if _is_code(part)]
    return ProgramCode(sources, packed, lacks, _patches(functions), _environment(functions))


def _environment(code: Iterable[Any]) -> dict[str, str | None]:
    """The environment variables that code names and the program has set or removed."""
    began = dict(
        entry.decode("utf-8", "surrogateescape").partition("=")[::2]
        for entry in Path("/proc/self/environ").read_bytes().split(b"\0")
    )
    changed = {
        name
        for name in began.keys() | os.environ.keys()
        if name and began.get(name) != os.environ.get(name) and not _OF_A_HOST.match(name)
    }
    named = {
        const
        for function in _functions(code)
        for part in _codes(function.__code__)
        for const in part.co_consts
        if isinstance(const, str)
    }
    return {name: os.environ.get(name) for name in sorted(changed & named)}


def _functions(code: Iterable[Any]) -> list[types.FunctionType]:
    """The functions among these classes and functions, and those of the classes."""
    members = [
        part for one in code for part in (vars(one).values() if isinstance(one, type) else [one])
    ]
    return [one for one in map(_function_of, members) if isinstance(one, types.FunctionType)]


def _patches(code: Iterable[Any]) -> dict[Place, bytes]:
    """What the program has put into packages, and code finds there.

    So in the place of functions of torch and methods of classes, and values under names that the
    packages' own files do not have, such as ``nn.Linear.scale = 2``.
    """
    code = list(code)
    read: set[str] = set()
    owners: dict[Any, str] = {sys.modules[name]: "" for name in _PATCHED if name in sys.modules}
    owners[builtins] = ""
    if "torch" in sys.modules:
        owners[sys.modules["torch"].Tensor] = "Tensor."
    for name in _OF_CLASSES:
        for kind in vars(sys.modules.get(name, types)).values() if name in sys.modules else ():
            if isinstance(kind, type) and _at_home(kind):
                owners[kind] = f"{kind.__qualname__}."
    for function in _functions(code):
        if is_installed(function.__globals__.get("__name__")):
            continue
        names: set[str] = set()
        for part in _codes(function.__code__):
            names |= {const for const in part.co_consts if isinstance(const, str)}
            names.update(part.co_names)
        read |= names
        modules = _modules(function.__globals__.get(name) for name in names)
        for name in sorted(names):  # as in torch.cuda
            modules |= _modules(vars(module).get(name) for module in modules)
        owners |= dict.fromkeys(modules, "")
    for kind in [one for one in code if isinstance(one, type)]:
        owners |= {base: f"{base.__qualname__}." for base in kind.__mro__ if base is not object}
    found: dict[Place, bytes] = {}
    for owner, prefix in owners.items():
        if prefix and not owner.__flags__ & _HEAP_TYPE:  # nobody can put anything there
            continue
        module = str(owner.__module__) if prefix else owner.__name__
        for key, member in list(vars(owner).items()) if is_installed(module) else ():
            if _is_put_there(module, prefix, key, member, read):
                place = module, prefix + key
                try:
                    found[place] = _packed(member, _module_by_value(member), with_classes=False)
                except Exception as error:  # whatever classes raise that cannot be pickled
                    _tell_once(place, _reason(error))
    return found


def _modules(values: Iterable[Any]) -> set[types.ModuleType]:
    return {value for value in values if type(value) is types.ModuleType}


def _at_home(kind: type) -> bool:
    """True if a class is where its names say."""
    try:
        return _at((kind.__module__, kind.__qualname__)) is kind
    except (AttributeError, ImportError, KeyError):
        return False


def _is_put_there(module: str, prefix: str, key: str, member: Any, read: set[str]) -> bool:
    """True if the program has put this into a package: a function of its own, or a new value."""
    function = _function_of(member)
    kind = type(function)
    if kind is types.FunctionType:
        own = inspect.unwrap(function)
        where = getattr(own, "__globals__", {}).get("__name__")
        if where in sys.modules and not is_installed(where):
            return True
    if key[:2] == "__" or (key not in read and key != "forward") or module == "sys":
        return False
    if kind is types.FunctionType and inspect.unwrap(function).__qualname__ == prefix + key:
        return False
    made = _names_in(module, prefix.rstrip("."))
    is_defined = made is not None and key in made.functions
    if kind is types.FunctionType or is_defined:
        return is_defined
    if kind is types.BuiltinFunctionType:
        return bool(function.__name__ != key) and not (made and key in made.names)
    if made is None:  # of C: numbers that are the same everywhere may go along
        return kind in _ATOMS
    is_of_c = key in vars(sys.modules.get(f"{module}._C", types))
    return key not in made.names and not is_of_c and _is_value(member)


def _is_value(member: Any) -> bool:
    """True for plain values, arrays, and what is of the user's own classes."""
    kind = type(member)
    if issubclass(kind, type):
        return not is_installed(member.__module__)
    bases = {(base.__module__, base.__qualname__) for base in kind.__mro__}
    is_users = not (is_installed(kind.__module__) or kind.__module__.startswith("_cython"))
    return kind in _VALUES or is_users or bool(bases & _ARRAYS)


@dataclass(frozen=True)
class _Names:
    """The names that a file sets, in its module or in one of its classes."""

    names: frozenset[str]
    functions: frozenset[str]
    """Those of them that a definition without decorators makes."""


@functools.lru_cache(maxsize=256)
def _names_in(module: str, kind: str) -> _Names | None:
    """The names that the file of a module sets in it, or in a class; None: no file can be read."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    try:
        found: ast.AST = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    for name in filter(None, kind.split(".")):
        classes = (one for one in ast.walk(found) if isinstance(one, ast.ClassDef))
        named = next((one for one in classes if one.name == name), None)
        if named is None:
            return None
        found = named
    names: list[str] = []
    functions: set[str] = set()
    todo = list(ast.iter_child_nodes(found))
    while todo:
        one = todo.pop()
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(one.name)
            if not isinstance(one, ast.ClassDef) and not one.decorator_list:
                functions.add(one.name)
            continue
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            names.append(one.id)
        elif isinstance(one, ast.alias):
            names.append(one.asname or one.name)
        todo += ast.iter_child_nodes(one)
    once = {name for name, count in collections.Counter(names).items() if count == 1}
    return _Names(frozenset(names), frozenset(functions & once))


def _module_by_value(value: Any) -> list[str]:
    """That of a changed function, whose name would give executors what their file says."""
    function = _function_of(value)
    is_function = isinstance(function, types.FunctionType)
    return [function.__module__] if is_function and _is_imported(str(function.__module__)) else []


def _reason(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _is_code(value: Any) -> bool:
    return isinstance(value, type | types.FunctionType)


@dataclass(frozen=True)
class ProgramCode:
    """Code of the user's own modules, and the globals that it names."""

    sources: Mapping[str, str | None] = field(default_factory=dict)
    """Digests of the modules' files; None: the file has changed since the program began."""
    values: bytes = b""
    """A pickle of what the program has in them, by `Place`."""
    lacks: Mapping[Place, str] = field(default_factory=dict)
    """Place of what cannot be sent -> the reason."""
    patches: Mapping[Place, bytes] = field(default_factory=dict)
    """What the program has in the place of code of packages, pickled one by one."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Environment variables that code names and the program has set; None: has removed."""

    def is_needed(self) -> bool:
        """True if a file may be another one for this process than for the program."""
        return any(
            source is None or source != _source_digest(module)
            for module, source in self.sources.items()
        )


_told: set[Place] = set()


def _tell_once(place: Place, why: str) -> None:
    if place not in _told:
        _told.add(place)
        logger.warning(
            "the program has changed %s, which cannot be sent to executors (%s): they have what "
            "its file says",
            ".".join(place),
            why,
        )


class _Bounded(io.BytesIO):
    """Takes so many bytes at most."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def write(self, data: Any) -> int:
        written = super().write(data)
        if self.tell() > self._most:
            raise ValueError(f"it takes more than {self._most >> 10} KiB")
        return written


def _packed(
    value: Any, modules: Iterable[str], most: int = _MOST_BYTES, *, with_classes: bool = True
) -> bytes:
    """A pickle; code of ``modules`` is in it by value; see `CodePickler`."""
    from sparkdl.serialization.travel.pickling import CodePickler

    with _Bounded(most) as file:
        pickler = CodePickler(file, modules, with_classes=with_classes)
        pickler.dump(value)
        return file.getvalue()


def _is_of_file(place: Place) -> bool:
    """True if a value is what the file says, for certain, without importing that anew."""
    value: Any = _at(place)
    value = value.fget if isinstance(value, property) else _function_of(value)
    if _is_code(value):
        return bool(value.__name__ == place[1].rpartition(".")[2])
    if isinstance(value, logging.Logger):
        return True
    literals = _literals(place[0], _changed_at(place[0]))
    name = place[1].removesuffix("._value_")  # of a member of an Enum
    return name in literals and _digest(literals[name]) == _digest(value)


@functools.lru_cache(maxsize=64)
def _literals(module: str, changed_at: float) -> dict[str, Any]:
    """The names that a file, which was changed then, sets to plain values."""
    file = getattr(sys.modules[module], "__file__", None)
    found: dict[str, Any] = {}
    todo: list[tuple[str, ast.AST]] = []
    with contextlib.suppress(OSError, SyntaxError, ValueError, TypeError):
        todo.append(("", ast.parse(Path(file or "").read_bytes())))
    while todo:
        prefix, node = todo.pop()
        for one in ast.iter_child_nodes(node):
            if isinstance(one, ast.ClassDef):
                todo.append((f"{prefix}{one.name}.", one))
            targets = one.targets if isinstance(one, ast.Assign) else [getattr(one, "target", None)]
            if isinstance(one, ast.Assign | ast.AnnAssign) and one.value is not None:
                for target in targets:
                    with contextlib.suppress(ValueError):
                        if isinstance(target, ast.Name):
                            found[prefix + target.id] = ast.literal_eval(one.value)
    return found


class ProgramValues:
    """Values of a program, which whoever unpickles this object gives to its own modules.

    They hold until the next one is unpickled: Python workers serve one run after the other.
    """

    def __init__(
        self,
        values: Mapping[Place, bytes] | None = None,
        home: tuple[str, int] | None = None,
        code: ProgramCode | None = None,
    ) -> None:
        """Keep ``values``, pickled one by one, in the process ``home``; None: this one.

        ``code`` is used where a file is another one.
        """
        self.values = dict(values or {})
        self.home = home or _this_process()
        self.code = code or ProgramCode()

    @property
    def digest(self) -> str:
        """Tells those of one program apart."""
        return hashlib.sha256(
            pickle.dumps((self.values, self.code.values, self.code.patches, self.code.environment))
        ).hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        return _given, (self.values, self.home, self.code)


_environment_before: dict[str, str | None] = {}
"""Environment variables that `_given` has set or removed in this process, as they were."""
_before: list[tuple[Any, str, Any]] = []
"""Values that `_given` has replaced in this process: owner, name, and what was there."""


_states: list[ProgramState] = []
"""What the modules of the program that runs here had before it: none, or one."""


def _given(
    values: Mapping[Place, bytes], home: tuple[str, int], code: ProgramCode
) -> ProgramValues:
    if home != _this_process():
        give_back()
        for name, text in code.environment.items():
            _environment_before[name] = os.environ.get(name)
            _set_variable(name, text)
        _states.append(_state_of(code.sources))
        if code.is_needed():
            try:
                for place, value in pickle.loads(code.values).items():
                    _set(place, value)
            except ModuleNotFoundError as error:  # whoever needs it says so, with the remedy
                logger.info("the code of %s is not all here: %s", ", ".join(code.sources), error)
            except Exception as error:  # whatever modules raise when they are imported
                names = ", ".join(code.sources)
                _warn_of(f"the code of {names}, whose files are others here, or none,", error)
        for place, data in {**code.patches, **values}.items():
            try:
                _set(place, pickle.loads(data))
            except Exception as error:  # such as a class that is not there
                _warn_of(".".join(place), error)
    return ProgramValues(values, home, code)


def _state_of(modules: Iterable[str]) -> ProgramState:
    """What these modules of the user's have at present, before code has counted there."""
    from sparkdl.serialization.program.program_state import ProgramState

    found = []
    for name in modules:
        with contextlib.suppress(Exception):  # whoever needs it tells why it cannot be imported
            found.append(importlib.import_module(name))
    return ProgramState(found)


def _warn_of(what: str, error: Exception) -> None:
    """Say what is missing; that may not be needed."""
    logger.warning(
        "%s is not what it is on the driver: this worker cannot take what was sent (%s: %s)",
        *(what, type(error).__name__, error),
    )


def _set(place: Place, value: Any) -> None:
    owner, name = _owner(place)
    _before.append((owner, name, vars(owner).get(name, _before)))
    setattr(owner, name, value)


def _set_variable(name: str, text: str | None) -> None:
    if text is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = text


def give_back() -> None:
    """Let this process have what its files say, as before a program ran here."""
    while _environment_before:
        _set_variable(*_environment_before.popitem())
    while _before:
        owner, name, value = _before.pop()
        if value is _before:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
    while _states:
        _states.pop().put_back()


def _this_process() -> tuple[str, int]:
    return socket.gethostname(), os.getpid()


_known: dict[tuple[Place, float], str] = {}
"""Digests of what a fresh process has, by place and by the age of the module's file."""


def as_imported(places: Iterable[Place]) -> dict[Place, str]:
    """Digests of a fresh process on this machine; empty if none can be started."""
    keys = {place: (place, _changed_at(place[0])) for place in places}
    unknown = [place for place, key in keys.items() if key not in _known]
    if unknown:
        try:
            done = subprocess.run(
                [sys.executable, "-c", _FRESH],
                input=pickle.dumps((sys.path, unknown)),
                capture_output=True,
                timeout=_FRESH_SECONDS,
                check=True,
            )
            found: dict[Place, str] = pickle.loads(done.stdout)
        except (subprocess.SubprocessError, OSError, pickle.UnpicklingError, EOFError) as error:
            logger.warning(
                "no fresh process says what files have (%s), so what the program may have set to "
                "other values is not sent, and executors have what their files say: %s",
                *(error, ", ".join(".".join(place) for place in unknown)),
            )
            return {}
        _known.update({keys[place]: digest for place, digest in found.items()})
    return {place: _known[key] for place, key in keys.items() if key in _known}


def _changed_at(module: str) -> float:
    try:
        return Path(getattr(sys.modules.get(module), "__file__", None) or "").stat().st_mtime
    except OSError:
        return 0.0


_IMPORTED = time.time()


def _began() -> float:
    """Return the clock's time when this process began, or at least had not imported this module."""
    try:
        ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return _IMPORTED
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return min(_IMPORTED, time.time() - age)


def _source_digest(module: str) -> str | None:
    """That of the file from which this process has a module, or would import it; None: of none."""
    found = sys.modules.get(module)
    try:
        spec = find_spec(module) if found is None else found.__spec__
        assert spec is not None and spec.origin is not None
        data = spec.loader.get_data(spec.origin)  # type: ignore[union-attr]
    except Exception:  # whatever a package raises when it is imported, or a loader without files
        return None
    return hashlib.sha256(data).hexdigest()


def _is_as_written(module: str) -> bool:
    """True for a module whose code no import hook has rewritten, with names of its own."""
    loader = getattr(getattr(sys.modules.get(module), "__spec__", None), "loader", None)
    return type(loader) in (SourceFileLoader, zipimport.zipimporter)


_FRESH = """
import os, pickle, sys
out = os.dup(1)
os.dup2(2, 1)  # imports may print
sys.path[:], places = pickle.load(sys.stdin.buffer)
from sparkdl.serialization.program import imported_values as this
found = {place: this._found(place) for place in places}
with open(out, "wb") as file:
    pickle.dump(found, file)
"""


def _named(code: Iterable[Any], *, by_name: bool) -> dict[Place, Any]:
    """Return what code names of the user's own modules, and of those that it names in turn.

    ``by_name``: without code itself and modules, and without what travels with other code.
    """
    found: dict[Place, Any] = {}
    seen: dict[tuple[int, bool], Any] = {}  # the values too, so that no id is used twice
    todo = [(one, False) for one in code]
    """Values to look at, with True if other processes have them because they import a module."""
    made: dict[int, Place] = {}
    """Classes that functions have made, by id, and where other processes have theirs."""
    while todo:
        start, is_there = todo.pop()
        for value in _code_in(start, seen, is_there):
            module = str(value.__module__)
            has_name = _is_imported(module) and _travels_by_name(value)
            if has_name and not by_name:
                found[module, value.__qualname__] = value
            is_known = is_there or has_name
            if not isinstance(value, type):
                todo += [(part, is_known) for part in _held_by(value)]
                for place, member in _globals_of(value, is_known or not by_name):
                    if place is not None and isinstance(member, type):
                        made.setdefault(id(member), place)
                    if place is not None and not (by_name and type(member) is types.ModuleType):
                        found[place] = member
                    todo.append((member, place is not None))
                continue
            todo += [(part, is_known) for part in (type(value), *value.__bases__)]
            there = (module, value.__qualname__) if has_name else made.get(id(value))
            members = value._member_map_ if isinstance(value, enum.EnumMeta) else {}
            for name, one in members.items():
                for key, part in vars(one).items():
                    if there and (key == "_value_" or not key.startswith("_")):
                        found[there[0], f"{there[1]}.{name}.{key}"] = part
            for key, member in vars(value).items():
                is_special = key.startswith("__") and not isinstance(member, types.FunctionType)
                is_fixed = isinstance(value, enum.EnumMeta) and not isinstance(
                    member, types.FunctionType | staticmethod | classmethod | property
                )
                if there and not is_special and not is_fixed:
                    found[there[0], f"{there[1]}.{key}"] = member
                if key != "__annotations__":
                    todo.append((member, is_known))
    return found


def _code_in(value: Any, seen: dict[tuple[int, bool], Any], is_there: bool) -> Iterator[Any]:
    """The user's own classes and functions that are nearest to a value, each once.

    What an object holds is asked of the garbage collector, which runs no code of its class.
    """
    todo = collections.deque([value])
    for _ in range(_MOST_PARTS):
        if not todo:
            return
        one = todo.popleft()
        kind = type(one)
        if {(id(one), is_there), (id(one), True)} & seen.keys():
            continue
        seen[id(one), is_there] = one
        if issubclass(kind, type):
            if not is_installed(one.__module__):
                yield one
        elif kind is types.FunctionType:
            if is_installed(one.__module__) and is_installed(one.__globals__.get("__name__")):
                todo += _held_by(one)
            else:
                yield one
        elif (
            not issubclass(kind, _OPAQUE) and str(kind.__module__).partition(".")[0] not in _DRIVERS
        ):
            parts = itertools.islice(gc.get_referents(one), _MOST_PARTS)
            todo.append(kind)
            todo += [part for part in parts if type(part) not in _ATOMS]


def _held_by(function: types.FunctionType) -> list[Any]:
    """Return what a function has besides its globals, such as what it wraps."""
    held = function.__closure__, function.__defaults__, function.__kwdefaults__, vars(function)
    return [part for part in held if part]


_OF_IMPORT = {*vars(types.ModuleType("")), "__builtins__", "__cached__", "__file__", "__path__"}
"""Globals that importing a module sets: each process has its own."""


def _globals_of(function: types.FunctionType, is_there: bool) -> Iterator[tuple[Place | None, Any]]:
    """The globals that a function reads, and what it reads of modules among them.

    ``is_there``: whether other processes have the function's own module.
    """
    where = str(function.__globals__.get("__name__"))
    if is_installed(where):
        return
    read: set[str] = set()
    attributes: set[str] = set()
    for code in _codes(function.__code__):
        for step in dis.get_instructions(code):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME"):
                read.add(str(step.argval))
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"):
                attributes.add(str(step.argval))
    read -= _OF_IMPORT
    attributes -= _OF_IMPORT
    own = vars(sys.modules.get(where, types))
    is_own = is_there and function.__globals__ is own and _is_imported(where)
    todo = [(name, function.__globals__.get(name, sys.modules.get(name))) for name in sorted(read)]
    seen = set()
    for name, value in todo:
        if isinstance(value, types.ModuleType):
            if is_own and name in function.__globals__:
                yield (where, name), value
            if _is_imported(value.__name__) and value.__name__ not in seen:
                seen.add(value.__name__)
                for member in sorted(attributes & vars(value).keys()):
                    found = vars(value)[member]
                    if issubclass(type(found), types.ModuleType):
                        todo.append(("", found))
                    else:
                        yield (value.__name__, member), found
        elif name in function.__globals__:
            yield (where, name) if is_own else None, value


def _is_imported(module: str) -> bool:
    """True for a module of the user's own that travels by its name."""
    by_value = cloudpickle.list_registry_pickle_by_value()
    package = module.partition(".")[0]
    is_own = module not in ("__main__", "__mp_main__") and not is_installed(module)
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return is_own and spec is not None and not {module, package} & set(by_value)


def _travels_by_name(value: type | types.FunctionType) -> bool:
    """True if its module has it under its name: what functions make travels with all it names."""
    found: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = inspect.getattr_static(found, name, None)
    return _function_of(found) is value


def _function_of(value: Any) -> Any:
    """That of a method; other values as they are."""
    is_method = type(value) in (staticmethod, classmethod, types.MethodType)
    return value.__func__ if is_method else value


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _codes(const)


def _owner(place: Place) -> tuple[Any, str]:
    """The module or class that has a name, and the last part of that."""
    owner: Any = importlib.import_module(place[0])
    *path, last = place[1].split(".")
    for name in path:
        members = owner._member_map_ if isinstance(owner, enum.EnumMeta) else {}
        owner = members[name] if name in members else vars(owner)[name]
    return owner, last


def _at(place: Place) -> Any:
    owner, name = _owner(place)
    return vars(owner)[name]


def _found(place: Place) -> str:
    try:
        return _digest(_at(place))
    except Exception:  # whatever a module raises when it is imported, or a name that is not there
        return _ABSENT


def _digest(value: Any) -> str:
    from sparkdl.serialization.identity import identity

    value = _function_of(value)
    if isinstance(value, property):
        value = value.fget
    about: Any
    if isinstance(value, types.FunctionType):
        # Of code that comes from the file nobody asks what it is: imports may have rewritten it.
        code = None if _is_of_its_file(value) else value.__code__
        about = identity((code, value.__defaults__, value.__kwdefaults__))
        about = [value.__module__, value.__qualname__, about]
        about += [_cell_digest(part) for part in _contents(value)]
    elif isinstance(value, type | types.ModuleType):
        about = [getattr(value, "__module__", ""), getattr(value, "__qualname__", value.__name__)]
    else:
        about = identity(value)
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def _cell_digest(value: Any) -> str:
    """Return a digest, or of functions and classes only their names: they may hold each other."""
    is_code = _is_code(value)
    return f"{value.__module__}.{value.__qualname__}" if is_code else _digest(value)


def _contents(function: types.FunctionType) -> list[Any]:
    """Return what the cells of a function's closure hold."""
    parts = [gc.get_referents(cell) for cell in function.__closure__ or ()]
    return [part for held in parts for part in held]


def _is_of_its_file(function: types.FunctionType) -> bool:
    file = getattr(sys.modules.get(function.__module__), "__file__", None) or ""
    return Path(file).stem == Path(function.__code__.co_filename).stem
