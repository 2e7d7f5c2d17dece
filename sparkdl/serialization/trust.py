"""The names in a saved file that may be imported and called.

The names in a saved file are those that somebody has written there. So none is looked up unless it
is in code that the user trusts: in the user's own files, in a short list of public classes and
functions of torch, torchvision, torchmetrics and sparkdl that only compute, or in a package that
the user has named. A name counts by where its object is defined: ``torch:os.system`` is a function
of ``posix``. Of installed packages a method never counts: the file would also choose the object
that it works on. Nor does a name with a part that begins with ``_``.

Files of the user do not count where those who write models may write as well: in the folder that is
being read, below the folder of any other saved module, and in packages without ``__init__.py``,
which any folder next to a program is.

This keeps a file from running what it likes. It is no sandbox: trusted code is called with the
arguments that the file holds.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sparkdl.errors import ConfigError
from sparkdl.runtime.public_names import MODULE_OF, current_path, import_object

INDEX = "module.json"
"""The file by which the folder of a saved module is known."""
_CLASSES = (
    "torch.nn.modules", "torch.optim", "torchmetrics.aggregation", "torchmetrics.classification",
    "torchmetrics.regression", "torchmetrics.retrieval", "torchvision.transforms",
    *(f"torchvision.transforms.v2._{name}" for name in (
        "augment", "auto_augment", "color", "container", "geometry", "meta", "misc", "temporal",
        "type_conversion",
    )),
    *(f"torchvision.ops.{name}" for name in (
        "drop_block", "feature_pyramid_network", "misc", "stochastic_depth",
    )),
    "sparkdl.inputs", "sparkdl.models",
)  # fmt: skip
"""Modules of which public classes count. Functions beside them change what all modules of a process
do, or read and write files."""
_VALUES = (
    "sparkdl.comm.compression", "sparkdl.config", "sparkdl.data.sources",
    "sparkdl.inference.outputs", "sparkdl.mesh", "sparkdl.report.listeners",
    "sparkdl.serialization.initial_weights", "sparkdl.sync", "sparkdl.train",
)  # fmt: skip
"""Packages whose classes count if they are public names of sparkdl: others open sockets and
files."""
_FUNCTIONS = (
    "math", "torch._C._special", "torch.nn.functional", "torch.nn.init",
    "torchmetrics.functional.classification", "torchmetrics.functional.regression",
    "torchmetrics.functional.retrieval", "sparkdl.models", "sparkdl.train.optimizers.warmup",
)  # fmt: skip
"""Modules of which public functions count."""
_ACTIVATIONS = frozenset((
    "avg_pool2d", "avg_pool3d", "elu_", "gelu", "hardtanh_", "leaky_relu_", "linear",
    "log_sigmoid", "one_hot", "softplus", "softshrink",
))  # fmt: skip
"""Functions of ``torch._C._nn`` that ``torch.nn.functional`` shows, and that check their sizes."""
_UNSAFE = re.compile(
    r"torch\.nn\.functional:(embedding_bag|ctc_loss|fractional_max_pool\w*|max_unpool\w*"
    r"|\w*grouped_mm|scaled_mm)"
    r"|torch\.nn\.modules\.container:ParameterDict"
)
"""Functions that believe that sizes and offsets fit, or need memory that they do not look at; and a
class that sets whatever attributes its keys name, even its class."""
_BUILDERS = tuple(
    f"torchvision.models.{name}"
    for name in (
        "alexnet", "convnext", "densenet", "efficientnet", "googlenet", "inception", "maxvit",
        "mnasnet", "mobilenetv2", "mobilenetv3", "regnet", "resnet", "shufflenetv2", "squeezenet",
        "swin_transformer", "vgg", "vision_transformer",
    )
)  # fmt: skip
"""Modules whose public classes and functions make networks. The functions download weights if they
are asked to by keyword or by position."""
_BY_NAME = ("sparkdl", "torch", "pyspark", "py4j")
"""Packages whose code counts as installed wherever it lies."""
_OF_PYTHON = {Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib")}
"""Folders of Python itself, in which there is more than its standard library."""
_WEIGHTS = re.compile("weights|pretrained")
_FILE_URL = re.compile("file:(//(localhost)?(?=/))?")
_INSIDE_SAVED = re.compile(r"(/(stages/\d+_[^/]+|bestModel))+/?$")
"""Folders in which a pipeline or a tuned model keeps its parts."""


@dataclass(frozen=True)
class Trust:
    """Code that saved files may name."""

    packages: tuple[str, ...] = ()
    """Packages and modules that the user trusts besides."""
    in_all: bool = False
    """True where the names are the program's own, as while it saves."""
    place: str | None = None
    """The folder of this host that is being read: code that lies in it does not count."""

    def reading(self, place: str) -> Trust:
        """Return the same trust, for what is read from a path or URL."""
        path = _FILE_URL.sub("", place)
        return replace(self, place=_INSIDE_SAVED.sub("", path) if path.startswith("/") else None)

    def import_object(self, path: Any) -> Any:
        """Import ``package.module:name``, which a saved file holds.

        ConfigError if it is missing or malformed, or in code that nobody has said to trust.
        """
        if self.in_all:
            return import_object(path)
        if not isinstance(path, str) or not path.isprintable():  # a terminal might obey it
            raise ConfigError(f"an import path reads 'package.module:name'; received {path!r}")
        module, _, name = current_path(path).partition(":")
        is_there = module in sys.modules or find_spec(module.partition(".")[0] or "-") is None
        if name and not is_there:  # that it is missing is another error
            self._require_module(path, module)

        def look(owner: Any, part: str) -> Any:
            """Return an attribute; to look it up runs no code that is not trusted."""
            if not isinstance(owner, types.ModuleType | type):
                raise _no_code(path, owner)
            is_lazy = isinstance(owner, types.ModuleType) and part not in vars(owner)
            if is_lazy and hasattr(owner, "__getattr__"):  # which may import something
                self._require_module(path, owner.__name__)
            return getattr(owner, part)

        found = import_object(path, look=look)
        where = _defined_in(found)
        if where is None:
            raise _no_code(path, found)
        if not self._admits(where, found):
            raise _refusal(path, where)
        return found

    def check_call(self, function: Any, args: Iterable[Any], keywords: Mapping[str, Any]) -> None:
        """Raise ConfigError if a trusted function would download something with its arguments."""
        while isinstance(function, functools.partial):
            function = function.func
        where = _defined_in(function)
        if self.in_all or where is None or self.names(where) or isinstance(function, type):
            return
        asked = any(keywords.get(name) for name in keywords if _WEIGHTS.match(name))
        if _is_within(where, _BUILDERS) and (asked or any(True for _ in args)):
            raise _refusal(f"{where}:{function.__qualname__}", f"{where} and downloads weights")

    def names(self, name: str) -> bool:
        """True if the user has named what ``name`` stands for, or a package that it is in."""
        return self.in_all or _is_within(name, self.packages)

    def _admits(self, module: str, found: Any) -> bool:
        return self.names(module) or _is_listed(module, found) or is_users_own(module, self.place)

    def _require_module(self, path: Any, module: str) -> None:
        """Raise ConfigError if a module may not be imported."""
        listed = (*_CLASSES, *_FUNCTIONS, *_BUILDERS, "torch._C._nn", "sparkdl")
        is_trusted = self.names(module) or _is_within(module, listed)
        if not is_trusted and not is_users_own(module, self.place):
            raise _refusal(path, module)


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


def is_installed(module: Any) -> bool:
    """True if a module comes with Python or with a package, whose version tells its code.

    ``module`` is its name, as classes and functions have it; of some in C it is None, empty or a
    descriptor.
    """
    if not module or not isinstance(module, str):
        return True
    package = module.partition(".")[0]
    if package in _BY_NAME or package in sys.stdlib_module_names or package.startswith("_cython_"):
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None and module in sys.modules and package != module:  # a part of another's, in C
        return is_installed(package)
    return file is not None and _is_in_packages(file)


def is_users_own(module: str, place: str | None = None) -> bool:
    """True if a module is of a file that no package manager has installed, or of no file at all.

    A file in the folder ``place``, or below that of a saved module, does not count, nor does what
    is not imported yet and is in a package without ``__init__.py``. To find a module in a package
    imports the package, which is the user's own then.
    """
    package, _, _ = module.partition(".")
    if package in (*_BY_NAME, "__mp_main__") or package in sys.stdlib_module_names:
        return False
    if module in sys.modules:
        found = sys.modules[module]
        file = getattr(found, "__file__", None)
        if file is None:  # made by the program, as a notebook is, and not by an import
            is_made = getattr(found, "__spec__", None) is None
            return is_made and (package == module or not is_installed(package))
        return _is_own_file(file, place)
    parent = module.rpartition(".")[0]
    if parent and not is_users_own(parent, place):
        return False
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):  # the parent is no package, or the program has made it
        spec = None
    if spec is None:
        return bool(parent)  # there is nothing to import, which is another error
    return spec.has_location and spec.origin is not None and _is_own_file(spec.origin, place)


def _is_own_file(file: str, place: str | None) -> bool:
    """True if neither a package manager nor those who write models have put a file there."""
    if _is_in_packages(file):
        return False
    read = None if place is None else Path(place).resolve()
    folders = {*Path(file).absolute().parents, *Path(file).resolve().parents}
    return read not in folders and not any(
        os.path.exists(folder / INDEX)  # noqa: PTH110 # false where nobody may look
        for folder in folders
    )


def _is_listed(module: str, found: Any) -> bool:
    """True if a class or function is one of those that everybody trusts."""
    name = found.__qualname__
    if "." in name or name.startswith("_") or _UNSAFE.fullmatch(f"{module}:{name}"):
        return False
    if isinstance(found, type):
        is_public = MODULE_OF.get(name) == module and _is_within(module, _VALUES)
        return is_public or _is_in_public(module, (*_CLASSES, *_BUILDERS))
    if module == "torch._C._nn":
        return name in _ACTIVATIONS
    return _is_in_public(module, (*_FUNCTIONS, *_BUILDERS))


def _is_in_public(module: str, packages: Iterable[str]) -> bool:
    """True if a module is one of some packages, and not behind a name with ``_`` in them."""
    found = (package for package in packages if _is_within(module, (package,)))
    return any("._" not in module.removeprefix(package) for package in found)


@functools.lru_cache(maxsize=4096)
def _is_in_packages(file: str) -> bool:
    """True if a package manager has put a file there, or Python, whose own tests are code, too."""
    if not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts):
        return True
    folders = {*Path(file).absolute().parents, *Path(file).resolve().parents}
    return not _OF_PYTHON.isdisjoint(folders)


def _is_within(module: str, packages: Iterable[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _defined_in(found: Any) -> str | None:
    """The module that defines a class or a function; None for other things.

    Of a class method it is that of the class in whose body it stands: subclasses have it too.
    """
    code = found.__func__ if isinstance(found, types.MethodType) else found
    if isinstance(found, types.MethodType) and not isinstance(found.__self__, type):
        return None
    if not isinstance(code, type | types.FunctionType | types.BuiltinFunctionType):
        return None
    where = code.__module__
    return where if isinstance(where, str) else None


def _no_code(path: Any, found: Any) -> ConfigError:
    return ConfigError(f"'{path}' in a saved file is no class and no function: {found!r}")


def _refusal(path: Any, where: str) -> ConfigError:
    package = where.partition(".")[0]
    return ConfigError(
        f"a saved file names '{path}', which is code of {where}; if you trust the file and the "
        f"package, load it with trusted=['{package}'], or with the Spark setting "
        f"spark.sparkdl.trustedPackages={package}"
    )
