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
import contextlib
import functools
import gc
import hashlib
import importlib
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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.serialization.program.named_code import (
    Place,
    computes_only,
    function_of,
    functions_of,
    is_code,
    is_imported,
    is_plain,
    lookups_in,
    named_by,
    owner_of,
    parsed,
    value_at,
)
from sparkdl.serialization.program.package_patches import package_patches
from sparkdl.serialization.program.packed_values import (
    MOST_BYTES,
    module_by_value,
    pack_value,
    reason_of,
    tell_once,
    told,
)
from sparkdl.serialization.program.process_settings import (
    changed_settings,
    give_settings_back,
    take_settings,
)
from sparkdl.serialization.travel.operators import codes_in
from sparkdl.serialization.trust import is_installed

if TYPE_CHECKING:
    from sparkdl.serialization.program.program_state import ProgramState

logger = logging.getLogger(__name__)

_FRESH_SECONDS = 120.0
"""Longest wait for a fresh process, which may have to import torch."""
_FEW_BYTES = 1 << 16
"""Larger globals do not come along for the case that a file changes."""
_MOST_SECONDS = 0.5
"""Longest that results of a cached function are computed anew, to see whether they are the same."""
_OF_A_HOST = re.compile(
    r"(PATH|HOME|PWD|TMPDIR|USER|HOSTNAME|PYTHONPATH|LD_LIBRARY_PATH|CUDA_VISIBLE_DEVICES"
    r"|((LOCAL|GROUP|NODE|ROLE)_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|(PY)?SPARK_.*|SPARKDL_.*)$"
)
"""Environment variables that each host and worker has for itself."""
_ABSENT = "absent"


def imported_values(code: Iterable[Any]) -> dict[Place, str]:
    """Digests of what classes and functions name of modules that other processes import."""
    return {place: _digest(value) for place, value in named_by(code, by_name=True).items()}


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
            value = value_at(place)
            # A method's closure has its class, for super(): that is the executor's own.
            found[place] = pack_value(value, module_by_value(value), with_classes=False)
        except Exception as error:  # whatever classes raise that cannot be pickled
            tell_once(place, reason_of(error))
    for place in code.lacks.keys() & there.keys() - found.keys():
        if code.sources[place[0]] is None:
            tell_once(place, code.lacks[place])
    if found:
        names = ", ".join(".".join(place) for place in found)
        logger.info("workers get what the program has changed of imported modules: %s", names)
    return ProgramValues(found, code=code)


def changed_values(code: Iterable[Any]) -> ProgramValues:
    """Return what `values_to_send` gives of this code, where no executor is asked what it has."""
    code = list(code)
    expected = imported_values(code)
    sent = values_to_send(expected, _perhaps_changed(expected))
    return ProgramValues(sent.values, code=program_code(code))


def changed_names(code: Iterable[Any]) -> list[str]:
    """Names of what the program has otherwise than the files say that have it.

    A fresh process is asked only where the files' text does not tell. Results of cached functions
    do not count where these give them again.
    """
    expected = imported_values(code)
    asked = _perhaps_changed(expected)
    # A file cannot have what a notebook or a script has made.
    of_main = {place for place in expected if _home(place) in ("__main__", "__mp_main__")}
    fresh = as_imported(asked.keys() - of_main)
    changed = {place for place, digest in fresh.items() if digest != asked[place]}
    changed -= {place for place in changed if _gives_again(place)}
    return sorted(".".join(place) for place in changed | of_main)


def values_of_main(*values: Any) -> dict[str, str]:
    """Digests of what the code of these values reads in a script or notebook, by name.

    Without what cannot be told apart.
    """
    from sparkdl.serialization.program.program_state import ProgramWalk
    from sparkdl.serialization.travel.pickling import sent_code

    found = {}
    for module, name, value in ProgramWalk(one for one, _ in sent_code(values)).globals:
        if module in ("__main__", "__mp_main__") and not isinstance(value, types.ModuleType):
            try:
                found[name] = _digest(value)
            except Exception as error:  # whatever objects raise that are looked at
                logger.debug("%s cannot be told apart: %s", name, error)
    return found


def _gives_again(place: Place) -> bool:
    """True for a cached function that computes anew what its cache holds, and does nothing else."""
    from sparkdl.serialization.travel.pickling import cached_results

    function = value_at(place)
    if not isinstance(function, functools._lru_cache_wrapper) or not computes_only(
        function.__wrapped__
    ):
        return False
    results, began = cached_results(function), time.monotonic()
    with contextlib.suppress(Exception):  # whatever the user's code raises
        for args, named, result in results:
            if not is_plain([*args, *named.values()]):
                return False
            again = function.__wrapped__(*args, **named)
            if time.monotonic() - began > _MOST_SECONDS or not is_plain(again):
                return False
            if _digest(again) != _digest(result):
                return False
        return True
    return False


def _home(place: Place) -> str | None:
    """Return the module of the class or function at a place; None: there is something else."""
    with contextlib.suppress(Exception):  # a value of an Enum has no place of its own
        value: Any = value_at(place)
        value = function_of(value.fget if isinstance(value, property) else value)
        return str(value.__module__) if is_code(value) else None
    return None


def _perhaps_changed(expected: Mapping[Place, str]) -> dict[Place, str]:
    """Digests of those values that may be others than the files say."""
    return {
        place: digest
        for place, digest in expected.items()
        if _is_as_written(place[0]) and not _is_of_file(place)
    }


def program_code(code: Iterable[Any]) -> ProgramCode:
    """All that classes and functions name of the user's own modules, as the program has it."""
    code = list(code)
    named = named_by(code, by_name=False)
    modules = {place[0] for place in named}
    modules |= {str(member.__module__) for member in named.values() if is_code(member)}
    sources = {
        module: None if _changed_at(module) > _began() else _source_digest(module)
        for module in sorted(modules)
        if is_imported(module) and _is_as_written(module)
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
            pack_value(member, sources, MOST_BYTES if is_edited or is_code(member) else _FEW_BYTES)
            found[place] = member
        except Exception as error:  # whatever classes raise that cannot be pickled
            lacks[place] = reason_of(error)
            if is_edited and is_code(member):
                tell_once(place, lacks[place])
    packed = pack_value(found, sources, sys.maxsize) if found else b""
    functions = [part for part in (*code, *named.values()) if is_code(part)]
    _tell_lookups(code)
    return ProgramCode(
        *(sources, packed, lacks, package_patches(functions), _environment(functions)),
        settings=changed_settings(),
    )


def _tell_lookups(code: Iterable[Any]) -> None:
    """Warn, once, of the program's own functions that look for names while they run."""
    for function in functions_of(code):
        where = str(function.__globals__.get("__name__"))
        words = [] if is_installed(where) or is_imported(where) else lookups_in(function.__code__)
        place = where, f"{function.__qualname__} {words}"
        if words and place not in told:
            told.add(place)
            logger.warning(
                "%s uses %s, which on a worker is its own: it has the names that code of the "
                "program names, and may find others than here, or none; name what it takes",
                *(function.__qualname__, ", ".join(words)),
            )


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
        for function in functions_of(code)
        for part in codes_in(function.__code__)
        for const in part.co_consts
        if isinstance(const, str)
    }
    return {name: os.environ.get(name) for name in sorted(changed & named)}


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
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of torch and numpy that the program has changed, see `changed_settings`."""

    def is_needed(self) -> bool:
        """True if a file may be another one for this process than for the program."""
        return any(
            source is None or source != _source_digest(module)
            for module, source in self.sources.items()
        )


def _is_of_file(place: Place) -> bool:
    """True if a value is what the file says, for certain, without importing that anew."""
    value: Any = value_at(place)
    value = value.fget if isinstance(value, property) else function_of(value)
    if is_code(value):
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
        todo.append(("", parsed(file or "")))
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
            pickle.dumps(
                (
                    self.values,
                    self.code.values,
                    self.code.patches,
                    self.code.environment,
                    self.code.settings,
                )
            )
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
        take_settings(code.settings)
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
    owner, name = owner_of(place)
    is_function = isinstance(owner, types.FunctionType)  # whose defaults are in no dict
    before = getattr(owner, name) if is_function else vars(owner).get(name, _before)
    _before.append((owner, name, before))
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
    give_settings_back()
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


def _found(place: Place) -> str:
    try:
        return _digest(value_at(place))
    except Exception:  # whatever a module raises when it is imported, or a name that is not there
        return _ABSENT


def _digest(value: Any) -> str:
    from sparkdl.serialization.identity import identity

    value = function_of(value)
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
        if isinstance(value, functools._lru_cache_wrapper) and value.cache_info().currsize:
            about = [about, "with results"]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def _cell_digest(value: Any) -> str:
    """Return a digest, or of functions and classes only their names: they may hold each other."""
    return f"{value.__module__}.{value.__qualname__}" if is_code(value) else _digest(value)


def _contents(function: types.FunctionType) -> list[Any]:
    """Return what the cells of a function's closure hold."""
    parts = [gc.get_referents(cell) for cell in function.__closure__ or ()]
    return [part for held in parts for part in held]


def _is_of_its_file(function: types.FunctionType) -> bool:
    file = getattr(sys.modules.get(function.__module__), "__file__", None) or ""
    return Path(file).stem == Path(function.__code__.co_filename).stem
