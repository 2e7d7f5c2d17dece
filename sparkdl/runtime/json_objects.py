"""How does an object become JSON, and come back, without pickle?

Functions and classes by the path under which they are imported, dataclasses by their fields,
modules by the arguments that make them (`describe_module`). `restore` imports and calls, nothing
else: a description is as trustworthy as the Python code whose names it gives, so read model
directories only from places where you would also import code from.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import importlib
import math
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from sparkdl.errors import ConfigError
from sparkdl.runtime.public_names import current_path, public_module

REMEDY = (
    "move it to a module, a .py file that driver and workers can import, and pass the class or "
    "function itself, or functools.partial of it"
)
_TENSOR_BYTES = 1 << 16
"""Larger tensors belong into a file of weights, not into JSON."""


class DescribeError(ConfigError):
    """An object cannot be written as JSON in a way that is sure to make it again."""


def describe(value: Any) -> Any:
    """Write a value as JSON.

    Accepts JSON's own values, tuples, small tensors, torch dtypes, importable functions and
    classes, ``functools.partial`` of them, frozen dataclasses, and modules that
    `describe_module.describe_module` can rebuild.

    Raises:
        DescribeError: it is something else, or cannot be imported under its own name.
    """
    if value is None or (isinstance(value, bool | int | str) and type(value) in (bool, int, str)):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if type(value) is list:
        return [describe(item) for item in value]
    if type(value) is tuple:
        return {"tuple": [describe(item) for item in value]}
    if type(value) is dict:
        return {"dict": [[describe(key), describe(item)] for key, item in value.items()]}
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | types.MethodType):
        return {"import": import_path(value)}
    if type(value) is functools.partial:
        return _describe_partial(value)
    if dataclasses.is_dataclass(value):
        return _describe_dataclass(value)
    return _describe_torch(value)


def restore(description: Any) -> Any:
    """Make the value that `describe` wrote.

    Raises:
        ConfigError: the description is malformed, or names what cannot be imported here.
    """
    if description is None or isinstance(description, bool | int | float | str):
        return description
    if isinstance(description, list):
        return [restore(item) for item in description]
    kind = next(iter(description), None) if isinstance(description, dict) else None
    if kind not in _RESTORERS:
        raise ConfigError(f"not a description of an object: {_short(description)}")
    try:
        return _RESTORERS[kind](description)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"cannot make the object described by {_short(description)}: "
            f"{type(error).__name__}: {error}"
        ) from error


def import_path(value: Any) -> str:
    """The ``package.module:name`` under which a class or function can be imported.

    Raises:
        DescribeError: there is none; says why and what to do.
    """
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "?")
    if isinstance(value, types.MethodType) and isinstance(value.__self__, type):
        module = value.__self__.__module__  # a class method: found through its class
        name = f"{value.__self__.__qualname__}.{value.__name__}"
    if name.rpartition(".")[2] == "<lambda>":
        raise DescribeError(f"a lambda cannot be imported by name; {REMEDY}")
    if "<locals>" in name:
        raise DescribeError(f"{name} is defined inside a function, so it has no path; {REMEDY}")
    if module in ("__main__", "__mp_main__"):
        raise DescribeError(
            f"{name} is defined in __main__, a notebook or script, which other processes lack; "
            f"{REMEDY}"
        )
    if not isinstance(module, str):
        raise DescribeError(f"{value!r} belongs to no module; {REMEDY}")
    path = f"{module}:{name}"
    try:
        found = import_object(path)
    except ConfigError as error:
        raise DescribeError(f"{value!r} is not what its name says: {error}; {REMEDY}") from error
    if found is not value and not (isinstance(value, types.MethodType) and found == value):
        raise DescribeError(f"importing {path} gives another object than {value!r}; {REMEDY}")
    return f"{public_module(module, name, value)}:{name}"


def import_object(path: Any) -> Any:
    """Import ``package.module:name``, also a path of sparkdl that an older version wrote.

    Raises:
        ConfigError: the path is malformed, or module or name is missing here.
    """
    module, _, name = current_path(path).partition(":") if isinstance(path, str) else ("", "", "")
    if not module or not name:
        raise ConfigError(f"an import path reads 'package.module:name'; received {path!r}")
    try:
        found = sys.modules.get(module) or importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"cannot import {module} ({error}); install it, or put it on the path, wherever {path} "
            f"is used"
        ) from error
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise ConfigError(f"module {module} has no {name}; is it another version?") from None
    return found


def _describe_partial(value: functools.partial[Any]) -> Any:
    return {
        "partial": describe(value.func),
        "args": [describe(item) for item in value.args],
        "keywords": {name: describe(item) for name, item in value.keywords.items()},
    }


def _describe_dataclass(value: Any) -> Any:
    kind = type(value)
    if not kind.__dataclass_params__.frozen:
        raise DescribeError(
            f"{kind.__qualname__} is a dataclass that can change; declare it with frozen=True"
        )
    fields = dataclasses.fields(value)
    described = {
        "dataclass": import_path(kind),
        "fields": {f.name: describe(getattr(value, f.name)) for f in fields if f.init},
    }
    again = restore(described)
    if any(describe(getattr(again, f.name)) != describe(getattr(value, f.name)) for f in fields):
        raise DescribeError(f"{value!r} is not what its fields make: {again!r}; {REMEDY}")
    return described


def _describe_torch(value: Any) -> Any:
    torch = sys.modules.get("torch")  # an object of torch exists only if torch was imported
    if torch is not None:
        if isinstance(value, torch.nn.Module):
            from sparkdl.serialization.rebuild import describe_module

            return describe_module(value)
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if type(value) is torch.Size:
            return {"tuple": list(value)}
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            return _describe_tensor(value)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise DescribeError(f"an object of type {kind} cannot be written as JSON; {REMEDY}")


def _describe_tensor(value: Any) -> Any:
    import torch

    if value.layout is not torch.strided or value.nbytes > _TENSOR_BYTES:
        raise DescribeError(
            f"a tensor of shape {tuple(value.shape)} is too large to be written as JSON; make it "
            f"in a function and pass that"
        )
    flat = value.detach().cpu().resolve_conj().contiguous().reshape(-1).view(torch.uint8)
    return {
        "tensor": base64.b64encode(flat.numpy().tobytes()).decode("ascii"),
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
    }


def _restore_tensor(description: Mapping[str, Any]) -> Any:
    import torch

    data = bytearray(base64.b64decode(description["tensor"], validate=True))
    dtype, shape = _restore_dtype(description), description["shape"]
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)


def _restore_dtype(description: Mapping[str, Any]) -> Any:
    import torch

    dtype = getattr(torch, description["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"torch has no dtype {description['dtype']!r}")
    return dtype


def _restore_partial(description: Mapping[str, Any]) -> Any:
    function = restore(description["partial"])
    keywords = {name: restore(item) for name, item in description["keywords"].items()}
    return functools.partial(function, *restore(description["args"]), **keywords)


def _restore_dataclass(description: Mapping[str, Any]) -> Any:
    kind = import_object(description["dataclass"])
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise ConfigError(f"{description['dataclass']} is not a dataclass")
    return kind(**{name: restore(item) for name, item in description["fields"].items()})


def _restore_module(description: Mapping[str, Any]) -> Any:
    from sparkdl.serialization.rebuild import restore_module

    return restore_module(description)


_RESTORERS: dict[Any, Callable[[Mapping[str, Any]], Any]] = {
    "float": lambda description: float(description["float"]),
    "tuple": lambda description: tuple(restore(item) for item in description["tuple"]),
    "dict": lambda description: {restore(key): restore(item) for key, item in description["dict"]},
    "import": lambda description: import_object(description["import"]),
    "partial": _restore_partial,
    "dataclass": _restore_dataclass,
    "module": _restore_module,
    "dtype": _restore_dtype,
    "tensor": _restore_tensor,
}


def _short(description: Any) -> str:
    text = repr(description)
    return text if len(text) <= 200 else text[:200] + "..."
