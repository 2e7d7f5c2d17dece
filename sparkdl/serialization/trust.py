"""What a saved file may have imported and called.

The names in a saved file are those that somebody has written there. So none is looked up unless it
is in code that the user trusts: in the user's own files, in those parts of torch, torchvision,
torchmetrics and sparkdl that only compute, or in a package that the user has named. A name counts
by where its object is defined: ``torch:os.system`` is a function of ``posix``. Of installed
packages a method never counts: the file would also choose the object that it works on.

This keeps a file from running what it likes. It is no sandbox: trusted code is called with the
arguments that the file holds.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sparkdl.errors import ConfigError
from sparkdl.runtime.public_names import current_path, import_object

_COMPUTING = (
    "math", "torch.nn.functional", "torch.nn.init", "torch._C._nn", "torch._C._special",
    "torchvision.models", "torchvision.ops", "torchvision.transforms", "torchmetrics",
    "sparkdl.models", "sparkdl.train.optimizers.warmup",
)  # fmt: skip
_CLASSES = (
    "torch.nn.modules", "torch.optim", "sparkdl.comm.compression", "sparkdl.config",
    "sparkdl.data.kinds", "sparkdl.data.sources", "sparkdl.inference.outputs", "sparkdl.inputs",
    "sparkdl.mesh",
    "sparkdl.report.listeners", "sparkdl.serialization.initial_weights", "sparkdl.sync",
    "sparkdl.train",
)  # fmt: skip
"""Of these the classes alone: their functions change what all modules of a process do, or read and
write files."""
_BY_NAME = ("sparkdl", "torch", "pyspark")
"""Packages whose code counts as installed wherever it lies."""


@dataclass(frozen=True)
class Trust:
    """Code that saved files may name."""

    packages: tuple[str, ...] = ()
    """Packages and modules that the user trusts besides."""
    in_all: bool = False
    """True where the names are the program's own, as while it saves."""

    def import_object(self, path: Any) -> Any:
        """Import ``package.module:name``, which a saved file holds.

        ConfigError if it is missing or malformed, or in code that nobody has said to trust.
        """
        if self.in_all:
            return import_object(path)
        module = current_path(path).partition(":")[0] if isinstance(path, str) else ""
        # To look at what is imported already runs nothing; all else is imported only if trusted.
        # That a package is missing is another error.
        is_new = bool(module) and module not in sys.modules
        if is_new and not self._admits_module(module) and find_spec(module.partition(".")[0]):
            raise _refusal(path, module)
        found = import_object(path)
        where = _defined_in(found)
        if where is None:
            raise ConfigError(f"'{path}' in a saved file is no class and no function: {found!r}")
        if not self._admits(where, found):
            raise _refusal(path, where)
        return found

    def names(self, name: str) -> bool:
        """True if the user has named what ``name`` stands for, or a package that it is in."""
        return self.in_all or _is_within(name, self.packages)

    def _admits(self, module: str, found: Any) -> bool:
        return (
            self.names(module)
            or (_is_within(module, _COMPUTING) and not _is_method(found))
            or (_is_within(module, _CLASSES) and isinstance(found, type))
            or is_users_own(module)
        )

    def _admits_module(self, module: str) -> bool:
        return (
            self.names(module)
            or _is_within(module, (*_COMPUTING, *_CLASSES, "sparkdl"))
            or is_users_own(module)
        )


USUAL = Trust()
"""The trust of those who say nothing."""


def trusting(packages: str | Iterable[str]) -> Trust:
    """Trust in what everybody trusts and in some packages; ConfigError if these are no names."""
    names = (packages,) if isinstance(packages, str) else tuple(packages)
    for name in names:
        if not isinstance(name, str) or not all(p.isidentifier() for p in name.split(".")):
            raise ConfigError(
                f"trusted takes names of packages, such as ['mypackage']; received {name!r}"
            )
    return Trust(names)


def is_installed(module: str | None) -> bool:
    """True if a module comes with Python or with a package, whose version tells its code."""
    package = (module or "builtins").partition(".")[0]
    if package in _BY_NAME or package in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return file is not None and _is_in_packages(file)


def is_users_own(module: str) -> bool:
    """True if a module is of a file that no package manager has installed, or of no file at all."""
    package = module.partition(".")[0]
    if package in (*_BY_NAME, "__mp_main__") or package in sys.stdlib_module_names:
        return False
    if module in sys.modules:
        found = sys.modules[module]
        file = getattr(found, "__file__", None)
        if file is None:  # made by the program, as a notebook is, and not by an import
            return getattr(found, "__spec__", None) is None
        return not _is_in_packages(file)
    spec = find_spec(package)  # which imports nothing, there being no dot
    if spec is None:
        return False
    places = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())
    return bool(places) and not any(place is None or _is_in_packages(place) for place in places)


def _is_in_packages(file: str) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _is_within(module: str, packages: Iterable[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _defined_in(found: Any) -> str | None:
    """The module that defines a class or a function; None for other things."""
    owner = found.__self__ if isinstance(found, types.MethodType) else found
    if isinstance(found, types.MethodType) and not isinstance(owner, type):
        return None
    if not isinstance(owner, type | types.FunctionType | types.BuiltinFunctionType):
        return None
    where = owner.__module__
    return where if isinstance(where, str) else None


def _is_method(found: Any) -> bool:
    """True for a function that a class holds, bound to the class or not."""
    is_function = isinstance(found, types.FunctionType | types.MethodType)
    return is_function and "." in found.__qualname__


def _refusal(path: Any, where: str) -> ConfigError:
    package = where.partition(".")[0]
    return ConfigError(
        f"a saved file names '{path}', which is code of {where}; if you trust the file and the "
        f"package, load it with trusted=['{package}'], or with the Spark setting "
        f"spark.sparkdl.trustedPackages={package}"
    )
