"""Objects as JSON, and back, without pickle.

Functions and classes are written by the path under which they are imported, dataclasses by their
fields, modules by the call that makes them. `restore` imports and calls, nothing else, and no
other code than `trust` admits.

Modules that torch.nn defines are described by their constructor's arguments, which are read from
the attributes of the same names; others only if their class makes them without arguments. Neither
is believed: the module is rebuilt and compared, so that what is described is certain to come back.
Weights are not part of a description.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import inspect
import math
import re
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from sparkdl.errors import ConfigError, SparkDLError
from sparkdl.runtime.process import borrowed_generator
from sparkdl.runtime.public_names import import_object, public_module
from sparkdl.serialization.compare_modules import find_attribute, find_difference
from sparkdl.serialization.trust import USUAL, Trust

REMEDY = "move it into a .py file that driver and workers import, and pass it itself or its partial"
_FACTORY = "pass a factory instead: a function that other processes can import and that makes it"
_OUR_OWN = Trust(in_all=True)
"""In names that this program has just written itself."""
_TENSOR_BYTES = 1 << 16
"""Larger tensors belong into a file of weights, not into JSON."""


class DescribeError(ConfigError):
    """An object cannot be written as JSON in a way that is sure to make it again."""


def describe(value: Any) -> Any:
    """Write a value as JSON.

    Accepts JSON's own values, tuples, small tensors, torch dtypes, importable functions and
    classes, ``functools.partial`` of them, frozen dataclasses, and modules that a call can make
    again. DescribeError if it is something else, or cannot be imported under its own name.
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
        keywords = {name: describe(item) for name, item in value.keywords.items()}
        args = [describe(item) for item in value.args]
        return {"partial": describe(value.func), "args": args, "keywords": keywords}
    if dataclasses.is_dataclass(value):
        return _describe_dataclass(value)
    if isinstance(value, nn.Module):
        return _describe_module(value)
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if type(value) is torch.Size:
        return {"tuple": list(value)}
    if type(value) in (torch.Tensor, nn.Parameter):
        return _describe_tensor(value)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise DescribeError(f"an object of type {kind} cannot be written as JSON; {REMEDY}")


def restore(description: Any, trust: Trust = USUAL) -> Any:
    """Make the value that `describe` wrote, with code that is trusted.

    ConfigError if the description is malformed, or names what cannot be imported here, or what is
    not trusted.
    """
    if description is None or isinstance(description, bool | int | float | str):
        return description
    try:
        if isinstance(description, list):
            return [restore(item, trust) for item in description]
        kind = next(iter(description), None) if isinstance(description, dict) else None
        if kind not in _RESTORERS:
            raise ConfigError(f"not a description of an object: {_short(description)}")
        return _RESTORERS[kind](description, trust)
    except SparkDLError:
        raise
    except RecursionError:
        raise ConfigError("a description of an object is nested too deeply") from None
    except Exception as error:  # constructors raise whatever they like
        raise ConfigError(
            f"cannot make the object described by {_short(description)}: "
            f"{type(error).__name__}: {error}"
        ) from error


def import_path(value: Any) -> str:
    """The ``package.module:name`` of a class or function; DescribeError says why there is none."""
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
    again = restore(described, _OUR_OWN)
    if any(describe(getattr(again, f.name)) != describe(getattr(value, f.name)) for f in fields):
        raise DescribeError(f"{value!r} is not what its fields make: {again!r}; {REMEDY}")
    return described


def _describe_tensor(value: Any) -> Any:
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


def _restore_tensor(description: Mapping[str, Any], trust: Trust) -> Any:
    data = bytearray(base64.b64decode(description["tensor"], validate=True))
    dtype, shape = _restore_dtype(description, trust), description["shape"]
    # To no bytes belongs no shape but one with a size of 0.
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape)


def _restore_dtype(description: Mapping[str, Any], trust: Trust) -> Any:
    dtype = getattr(torch, description["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"torch has no dtype {description['dtype']!r}")
    return dtype


def _restore_partial(description: Mapping[str, Any], trust: Trust) -> Any:
    function = restore(description["partial"], trust)
    keywords = {name: restore(item, trust) for name, item in description["keywords"].items()}
    args = restore(description["args"], trust)
    trust.check_call(function, args, keywords)
    return functools.partial(function, *args, **keywords)


def _restore_dataclass(description: Mapping[str, Any], trust: Trust) -> Any:
    kind = trust.import_object(description["dataclass"])
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise ConfigError(f"{description['dataclass']} is not a dataclass")
    return kind(**{name: restore(item, trust) for name, item in description["fields"].items()})


def _describe_module(module: nn.Module) -> dict[str, Any]:
    """Write class, arguments and names of frozen parameters, which make a module of that structure.

    DescribeError if it cannot be made again by a constructor, or what came out differed.
    """
    if any(nn.parameter.is_lazy(p) for p in module.parameters()):
        raise DescribeError(
            f"{_name(module)} has parameters without a shape yet; call it on a batch first"
        )
    described = {
        "module": import_path(type(module)),
        "args": _arguments(module),
        "frozen": [name for name, p in module.named_parameters() if not p.requires_grad],
    }
    try:
        again = _restore_module(described, _OUR_OWN)
    except DescribeError:
        raise
    except Exception as error:  # constructors raise whatever they like
        raise DescribeError(
            f"{_name(module)} cannot be made again ({type(error).__name__}: {error}); {_FACTORY}"
        ) from error
    difference = find_difference(module, again) or find_attribute(module, again)
    if difference is not None:
        raise DescribeError(f"{_name(module)} made again differs in {difference}; {_FACTORY}")
    return described


def _restore_module(description: Mapping[str, Any], trust: Trust) -> nn.Module:
    """Make the module that `_describe_module` wrote, with fresh weights.

    The global random generator of the CPU is left as it was. ConfigError if the description is
    malformed or names no module.
    """
    kind = trust.import_object(description["module"])
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ConfigError(f"{description['module']} is not a class of modules")
    with borrowed_generator():
        module = _construct(kind, description["args"], trust)
    for name in description["frozen"]:
        module.get_parameter(name).requires_grad_(False)
    return module


def check_name(name: Any) -> str:
    """Return the name of a child or an attribute; ConfigError if it is no plain one.

    Tools write such names into Python source, as ``torch.fx`` does.
    """
    if not isinstance(name, str) or not (name.isidentifier() or re.fullmatch("[0-9]+", name)):
        raise ConfigError(
            f"a part of a module is called {name!r}; names of parts in a saved file are "
            "identifiers or numbers"
        )
    return name


def _construct(kind: type[nn.Module], args: Any, trust: Trust) -> nn.Module:
    if isinstance(args, dict):
        return kind(**{name: restore(item, trust) for name, item in args.items()})
    children = [(check_name(name), restore(item, trust)) for name, item in args]
    if kind is nn.ModuleList:
        return nn.ModuleList(child for _, child in children)
    return kind(OrderedDict(children))


def _arguments(module: nn.Module) -> Any:
    """Keyword arguments by name, or ``[[name, child], ...]`` of a container."""
    kind = type(module)
    if kind in (nn.Sequential, nn.ModuleList, nn.ModuleDict):
        return [[name, describe(child)] for name, child in module._modules.items()]
    if not _is_builtin(kind):
        required = [p.name for p in _parameters(kind) if p.default is p.empty]
        if required:
            raise DescribeError(
                f"{_name(module)} needs the arguments {', '.join(required)}, which cannot be found "
                f"out from the module; {REMEDY}"
            )
        return {}
    described = {}
    for parameter in _parameters(kind):
        known, value = _argument(module, parameter)
        if known:
            described[parameter.name] = describe(value)
        elif parameter.default is parameter.empty:
            raise DescribeError(f"{_name(module)} does not keep its {parameter.name}; {_FACTORY}")
    return described


def _is_builtin(kind: type) -> bool:
    """Return True if torch.nn itself defines the class."""
    return kind.__module__.startswith("torch.nn.modules.")


def _parameters(kind: type[nn.Module]) -> list[inspect.Parameter]:
    source = nn.RNNBase if issubclass(kind, nn.RNNBase) and _is_builtin(kind) else kind
    found = list(inspect.signature(source.__init__).parameters.values())[1:]
    if issubclass(kind, nn.RNN):
        found.append(inspect.Parameter("nonlinearity", inspect.Parameter.KEYWORD_ONLY, default=""))
    skipped = {"device"}
    if source is nn.RNNBase:
        skipped |= {"mode"} if kind is nn.LSTM else {"mode", "proj_size"}
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p for p in found if p.name not in skipped and p.kind not in variadic]


def _argument(module: nn.Module, parameter: inspect.Parameter) -> tuple[bool, Any]:
    """Return True if a constructor's argument can be read from the module, and its value."""
    name = parameter.name
    for kind, readers in _ARGUMENT_READERS.items():
        if isinstance(module, kind) and name in readers:
            return True, readers[name](module)
    if name == "dtype":
        dtypes = {p.dtype for p in module.parameters()} | {
            b.dtype for b in module.buffers() if b.is_floating_point()
        }
        return len(dtypes) == 1, next(iter(dtypes), None)
    if not hasattr(module, name):
        return False, None
    value = getattr(module, name)
    if isinstance(value, nn.Parameter) or (value is None and name in module._parameters):
        # ``bias`` and the like: a switch in the call, a parameter or None in the module.
        return isinstance(parameter.default, bool), value is not None
    return True, value


_OF_LAYERS: dict[str, Callable[[Any], Any]] = {
    "d_model": lambda m: m.self_attn.embed_dim,
    "nhead": lambda m: m.self_attn.num_heads,
    "dim_feedforward": lambda m: m.linear1.out_features,
    "dropout": lambda m: m.dropout.p,
    "layer_norm_eps": lambda m: m.norm1.eps,
    "batch_first": lambda m: m.self_attn.batch_first,
    "bias": lambda m: m.linear1.bias is not None,
    "dtype": lambda m: m.linear1.weight.dtype,
}
"""Arguments that all layers of transformers keep in their parts."""
_ARGUMENT_READERS: dict[type[nn.Module], dict[str, Callable[[Any], Any]]] = {
    nn.TransformerEncoderLayer: _OF_LAYERS,
    nn.TransformerDecoderLayer: _OF_LAYERS,
    nn.TransformerEncoder: {"encoder_layer": lambda m: m.layers[0]},
    nn.TransformerDecoder: {"decoder_layer": lambda m: m.layers[0]},
    nn.MultiheadAttention: {
        "bias": lambda m: m.in_proj_bias is not None,
        "add_bias_kv": lambda m: m.bias_k is not None,
    },
}
"""Arguments that a module keeps under another name or in its parts."""


def _name(module: nn.Module) -> str:
    return f"a module of class {type(module).__qualname__}"


_RESTORERS: dict[Any, Callable[[Mapping[str, Any], Trust], Any]] = {
    "float": lambda description, trust: float(description["float"]),
    "tuple": lambda description, trust: tuple(restore(i, trust) for i in description["tuple"]),
    "dict": lambda description, trust: {
        restore(key, trust): restore(item, trust) for key, item in description["dict"]
    },
    "import": lambda description, trust: trust.import_object(description["import"]),
    "partial": _restore_partial,
    "dataclass": _restore_dataclass,
    "module": _restore_module,
    "dtype": _restore_dtype,
    "tensor": _restore_tensor,
}


def _short(description: Any) -> str:
    text = repr(description)
    return text if len(text) <= 200 else text[:200] + "..."
