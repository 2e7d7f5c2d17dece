"""Which call makes this nn.Module again?

Modules that torch.nn defines are described by their constructor's arguments, which are read from
the attributes of the same names; others only if their class makes them without arguments. Neither
is believed: the module is rebuilt and compared, so that what is described is certain to come back.
Weights are not part of a description.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.runtime.json_objects import (
    REMEDY,
    DescribeError,
    describe,
    import_object,
    import_path,
    restore,
)
from sparkdl.runtime.process import borrowed_generator
from sparkdl.storage.tensor_tree import pack

_OWN = {*vars(nn.Module()), "_compiled_call_impl"}
"""What torch itself keeps in each module: registers, hooks, the mode, a compiled twin."""
_VALUES = (
    bool, int, float, complex, str, bytes, frozenset, set, enum.Enum, np.generic,
    torch.dtype, torch.device,
)  # fmt: skip
"""Types whose ``==`` says whether two are equal."""


def find_unlisted(module: nn.Module, again: nn.Module) -> dict[str, Any]:
    """What ``module`` holds otherwise than a module of the same structure that was made anew.

    Objects of which nobody knows how they compare (functions, locks, generators) are taken for
    equal where both modules hold one of the same type.

    Returns:
        ``{"buffers": {name: tensor}, "attributes": [(part's name, attribute, value), ...]}``, a
        tree for `checkpoint.tree.pack` with the module's own tensors; empty if nothing differs.

    Raises:
        DescribeError: an attribute differs and cannot be written; names it.
    """
    ours, theirs = _buffers(module), _buffers(again)
    registered = {**_registered(module), **_registered(again)}
    buffers = {n: value for n, value in ours.items() if not _is_same_part(value, theirs.get(n), {})}
    attributes = list(_attributes(module, again, registered))
    return {"buffers": buffers, "attributes": attributes} if buffers or attributes else {}


def give_unlisted(module: nn.Module, unlisted: Mapping[str, Any]) -> None:
    """Give a module made anew what `find_unlisted` has found; it keeps these very values."""
    for name, value in unlisted["buffers"].items():
        part, _, buffer = name.rpartition(".")
        module.get_submodule(part)._buffers[buffer] = value
    for part, key, value in unlisted["attributes"]:
        vars(module.get_submodule(part))[key] = value


def derived(module: nn.Module) -> set[str]:
    """Attributes that only repeat what the registered parameters say."""
    return {"_flat_weights", "_flat_weight_refs"} if isinstance(module, nn.RNNBase) else set()


def _buffers(module: nn.Module) -> dict[str, Any]:
    """The buffers that the state dict leaves out, by name."""
    return {
        f"{name}.{key}".lstrip("."): part._buffers[key]
        for name, part in module.named_modules()
        for key in sorted(part._non_persistent_buffers_set)
    }


def _registered(module: nn.Module) -> dict[int, str]:
    """What comes back by itself, wherever else a module refers to it, by identity."""
    kinds = (module.named_parameters(), module.named_buffers(), module.named_modules())
    return {id(value): name for kind in kinds for name, value in kind}


def _attributes(
    module: nn.Module, again: nn.Module, registered: Mapping[int, str]
) -> Iterator[tuple[str, str, Any]]:
    others = dict(again.named_modules())
    for name, part in module.named_modules():
        made = vars(others[name]) if name in others else {}
        for key in sorted(vars(part).keys() - _OWN - derived(part)):
            value = vars(part)[key]
            if key in made and _is_same_part(value, made[key], registered):
                continue
            try:
                pack(value)
            except CheckpointError as error:
                raise DescribeError(
                    f"the attribute {f'{name}.{key}'.lstrip('.')} is not what the factory makes "
                    f"and cannot be written, being of {type(value)}; set it in the factory, or "
                    "register it as a buffer"
                ) from error
            yield name, key, value


def _is_same_part(ours: Any, theirs: Any, registered: Mapping[int, str]) -> bool:
    names = registered.get(id(ours)), registered.get(id(theirs))
    if names != (None, None):
        return names[0] == names[1]
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours.cpu(), theirs.cpu())
    if isinstance(ours, np.ndarray):
        return ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
    if isinstance(ours, _VALUES):
        return bool(ours == theirs) or (ours != ours and theirs != theirs)
    pairs = _parts(ours), _parts(theirs)
    return pairs[0].keys() == pairs[1].keys() and all(
        _is_same_part(value, pairs[1][key], registered) for key, value in pairs[0].items()
    )


def _parts(value: Any) -> Mapping[Any, Any]:
    """What a value is made of, as far as it can be known."""
    if isinstance(value, nn.Module):  # no child of anything, so no file has its weights
        return value.state_dict()
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if isinstance(value, dict):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
    return {}


_FACTORY = "pass a factory instead: a function that other processes can import and that makes it"


def describe_module(module: nn.Module) -> dict[str, Any]:
    """Write how to make a module of the same structure.

    Returns:
        ``{"module": path of the class, "args": ..., "frozen": names of parameters that do not
        train}``.

    Raises:
        DescribeError: it cannot be made again by a constructor, or what came out differed.
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
        again = restore_module(described)
    except DescribeError:
        raise
    except Exception as error:  # constructors raise whatever they like
        raise DescribeError(
            f"{_name(module)} cannot be made again ({type(error).__name__}: {error}); {_FACTORY}"
        ) from error
    difference = find_difference(module, again) or _find_attribute(module, again)
    if difference is not None:
        raise DescribeError(f"{_name(module)} made again differs in {difference}; {_FACTORY}")
    return described


def restore_module(description: Mapping[str, Any]) -> nn.Module:
    """Make the module that `describe_module` wrote, with fresh weights.

    The global random generator of the CPU is left as it was.

    Raises:
        ConfigError: the description is malformed or names no module.
    """
    kind = import_object(description["module"])
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ConfigError(f"{description['module']} is not a class of modules")
    with borrowed_generator():
        module = _construct(kind, description["args"])
    parameters = dict(module.named_parameters())
    for name in description["frozen"]:
        parameters[name].requires_grad_(False)
    return module


def find_difference(a: nn.Module, b: nn.Module) -> str | None:
    """Name a difference in the structure of two modules' state, or None.

    Compares names, shapes and dtypes in the state dicts, and which parameters are tied.
    """
    ours, theirs = _state(a), _state(b)
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            return f"{name} ({theirs.get(name, 'missing')} instead of {ours.get(name, 'nothing')})"
    if _ties(a) != _ties(b):
        return "which parameters are shared"
    return None


def _state(module: nn.Module) -> dict[str, Any]:
    return {
        name: (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value
        for name, value in module.state_dict().items()
    }


def _ties(module: nn.Module) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return sorted(groups.values())


def _find_attribute(a: nn.Module, b: nn.Module) -> str | None:
    """Name something else that differs: class, printed form, hooks, plain attributes."""
    if repr(a) != repr(b):
        return "its printed form"
    ours, theirs = dict(a.named_modules()), dict(b.named_modules())
    for name, one in ours.items():
        other = theirs.get(name)
        if other is None or type(one) is not type(other):
            return f"the class of {name or 'itself'}"
        for key in sorted((vars(one).keys() | vars(other).keys()) - derived(one)):
            if not _is_same(key, vars(one).get(key), vars(other).get(key)):
                return f"{name}.{key}".lstrip(".")
        if not _has_same_buffers(one, other):
            return f"the buffers of {name or 'it'}"
        if not _has_same_frozen(one, other):
            return f"which parameters of {name or 'it'} train"
    return None


def _has_same_frozen(one: nn.Module, other: nn.Module) -> bool:
    flags = [[p.requires_grad for p in m.parameters(recurse=False)] for m in (one, other)]
    return flags[0] == flags[1]


def _is_same(key: str, ours: Any, theirs: Any) -> bool:
    if key in ("training", "_modules", "_parameters", "_buffers"):  # a mode; compared elsewhere
        return True
    if key.endswith("_hooks") or "_hooks_" in key:
        return not ours
    return _equal(ours, theirs)


def _has_same_buffers(one: nn.Module, other: nn.Module) -> bool:
    """Names must agree, and values too where the weights' file will not bring them."""
    ours, theirs = one._buffers, other._buffers
    return ours.keys() == theirs.keys() and all(
        _equal(ours[name], theirs[name])
        if name in one._non_persistent_buffers_set
        else (ours[name] is None) == (theirs[name] is None)
        for name in ours
    )


def _equal(ours: Any, theirs: Any) -> bool:
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours.cpu(), theirs.cpu())
    if isinstance(ours, nn.Module):
        # Not registered as a child, or `vars` would not show it: no file will bring its weights.
        is_alike = find_difference(ours, theirs) is None and _find_attribute(ours, theirs) is None
        return is_alike and _equal(dict(ours.state_dict()), dict(theirs.state_dict()))
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(_equal, ours, theirs))
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(_equal(ours[k], theirs[k]) for k in ours)
    try:
        return bool(ours == theirs) or (ours != ours and theirs != theirs)
    except (TypeError, ValueError, RuntimeError):  # arrays have no single truth value
        return False


def _construct(kind: type[nn.Module], args: Any) -> nn.Module:
    if isinstance(args, dict):
        return kind(**{name: restore(item) for name, item in args.items()})
    children = [(name, restore(item)) for name, item in args]
    if kind is nn.ModuleList:
        return nn.ModuleList(child for _, child in children)
    return kind(OrderedDict(children))


def _arguments(module: nn.Module) -> Any:
    """Keyword arguments by name, or ``[[name, child], ...]`` of a container."""
    kind = type(module)
    if kind in (nn.Sequential, nn.ModuleList, nn.ModuleDict):
        return [[name, describe(child)] for name, child in module._modules.items()]
    if not is_builtin(kind):
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


def is_builtin(kind: type) -> bool:
    """Whether torch.nn itself defines the class."""
    return kind.__module__.startswith("torch.nn.modules.")


def _parameters(kind: type[nn.Module]) -> list[inspect.Parameter]:
    source = nn.RNNBase if issubclass(kind, nn.RNNBase) and is_builtin(kind) else kind
    found = list(inspect.signature(source.__init__).parameters.values())[1:]
    if issubclass(kind, nn.RNN):
        found.append(inspect.Parameter("nonlinearity", inspect.Parameter.KEYWORD_ONLY, default=""))
    skipped = {"device"}
    if source is nn.RNNBase:
        skipped |= {"mode"} if kind is nn.LSTM else {"mode", "proj_size"}
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p for p in found if p.name not in skipped and p.kind not in variadic]


def _argument(module: nn.Module, parameter: inspect.Parameter) -> tuple[bool, Any]:
    """Whether a constructor's argument can be read from the module, and its value."""
    name = parameter.name
    for kind, readers in _READERS.items():
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


def _layer(**more: Callable[[Any], Any]) -> dict[str, Callable[[Any], Any]]:
    """What all layers of transformers keep in their parts."""
    return {
        "d_model": lambda m: m.self_attn.embed_dim,
        "nhead": lambda m: m.self_attn.num_heads,
        "dim_feedforward": lambda m: m.linear1.out_features,
        "dropout": lambda m: m.dropout.p,
        "layer_norm_eps": lambda m: m.norm1.eps,
        "batch_first": lambda m: m.self_attn.batch_first,
        "bias": lambda m: m.linear1.bias is not None,
        "dtype": lambda m: m.linear1.weight.dtype,
        **more,
    }


_READERS: dict[type[nn.Module], dict[str, Callable[[Any], Any]]] = {
    nn.TransformerEncoderLayer: _layer(),
    nn.TransformerDecoderLayer: _layer(),
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
