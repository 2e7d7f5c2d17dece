"""Names of objects, as users, job files and saved files write them: ``package.module:name``.

A saved file says ``sparkdl:AllReduce``, never in which file of the package the class lies, so that
files may move without breaking what was saved. Versions before that wrote the module's path;
`current_path` reads these.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from pkgutil import get_data
from typing import Any

from sparkdl.errors import ConfigError, did_you_mean, unknown

_imports = [
    node
    for node in ast.parse(get_data("sparkdl", "__init__.pyi") or b"").body
    if isinstance(node, ast.ImportFrom)
]
MODULE_OF = {alias.name: str(node.module) for node in _imports for alias in node.names}
"""The public names of sparkdl, and the module of each, from the imports of ``__init__.pyi``."""
_PUBLIC_PACKAGES = ("sparkdl", "sparkdl.models")


def public(name: str) -> Any:
    """The public object of a name of `MODULE_OF`, as ``sparkdl.<name>`` gives it.

    A class that users make objects of takes plain values, and says in one sentence which arguments
    it does not know; see `runtime.arguments`.
    """
    from sparkdl.runtime.arguments import plain_arguments
    from sparkdl.runtime.tracebacks import plainly

    value = getattr(import_module(MODULE_OF[name]), name)
    makes = vars(value).get("__init__") if isinstance(value, type) else None
    is_protocol = getattr(value, "_is_protocol", False)
    if makes is not None and not is_protocol and not issubclass(value, BaseException):
        value.__init__ = plain_arguments(plainly(makes))
    return value


def public_module(module: str, name: str, value: Any) -> str:
    """Return the module that an artefact names for ``value``, which ``module:name`` is today."""
    for package in _PUBLIC_PACKAGES:
        if module.startswith(f"{package}."):
            found: Any = import_module(package)
            for part in name.split("."):
                found = getattr(found, part, None)
            if found == value:
                return package
    return module


def current_path(path: str) -> str:
    """Return ``path`` as it is today, if an older version of sparkdl wrote it.

    What is public today was so under the same name, in whatever module it lay.
    """
    module, _, name = path.partition(":")
    if module.startswith("sparkdl.") and name.partition(".")[0] in MODULE_OF:
        return f"sparkdl:{name}"
    return f"sparkdl.models.demo:{name}" if module == "sparkdl.demo" else path


def public_classes(package: str) -> dict[str, str]:
    """Name in small letters -> path, of what is public among the things that a package defines."""
    found = {name for name, module in MODULE_OF.items() if module.startswith(f"{package}.")}
    return {name.lower(): f"sparkdl:{name}" for name in sorted(found)}


def import_object(
    path: Any,
    remedy: str = "install it, or put it on the path",
    look: Callable[[Any, str], Any] = getattr,
) -> Any:
    """Import ``package.module:name``, also a path of sparkdl that an older version wrote.

    ``look`` finds each part of the name in what the one before it means. ConfigError, with
    ``remedy`` for a missing module, if the path is malformed, or module or name is missing here.
    """
    module, _, name = current_path(path).partition(":") if isinstance(path, str) else ("", "", "")
    if not module or not name:
        raise ConfigError(f"an import path reads 'package.module:name'; received {path!r}")
    try:
        found = sys.modules.get(module) or import_module(module)
        return functools.reduce(look, name.split("."), found)
    except AttributeError as error:
        hint = did_you_mean(error.name, dir(error.obj)) or f"; {remedy}"
        raise ConfigError(f"cannot import '{path}': {error}{hint}") from error
    except ImportError as error:
        raise ConfigError(f"cannot import '{path}': {error}; {remedy}") from error


_importer: ContextVar[Callable[[str], Any] | None] = ContextVar("sparkdl_importer", default=None)


@contextlib.contextmanager
def importing_by(importer: Callable[[str], Any]) -> Iterator[None]:
    """Have `make_named` import by ``importer`` in the block, as the names in a saved file need."""
    token = _importer.set(importer)
    try:
        yield
    finally:
        _importer.reset(token)


def make_named(value: Any, kind: type[Any], known: Mapping[str, str], what: str) -> Any:
    """The object that a user gave, or the one that is made of the class that the user named.

    An object of ``kind`` is returned as it is. A class, a name of ``known`` (in small letters;
    underscores do not matter) or a ``"package.module:Class"`` is made with its default options.
    ConfigError, which calls it ``what``, if it is nothing of that kind, or cannot be made without
    options.
    """
    if isinstance(value, kind):
        return value
    found = value
    if isinstance(value, str):
        path = known.get(value.lower().replace("_", ""), value)
        if ":" not in path:
            more = ", or name a class of your own as 'package.module:Class'"
            raise unknown(what, value, known, more)
        own = partial(import_object, remedy=f"name a {what} that driver and workers can import")
        found = (_importer.get() or own)(path)
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ConfigError(f"{what} must be a {kind.__name__} or its name; received {value!r}")
    try:
        return found()
    except TypeError as error:
        raise ConfigError(
            f"{what} {value!r} cannot be made without options ({error}); pass an object instead of "
            "its name"
        ) from error
