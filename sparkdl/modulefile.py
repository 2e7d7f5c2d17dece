"""How is a fitted module saved as a directory, and loaded without unpickling anything?

``module.json`` says how to make the module (a factory, a description, or an exported program) and
holds sizes and SHA-256 of the other files; ``weights.safetensors`` holds the state dict;
``program.pt2`` is there only if neither a factory nor a description could be written. The sums
find damage, not malice: whoever can write the directory can also name another factory, so load
only from directories that you would import code from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from sparkdl.checkpoint.format import decode, encode
from sparkdl.checkpoint.storage import Storage
from sparkdl.checkpoint.tree import Snapshot, pack
from sparkdl.describe import DescribeError, describe, restore
from sparkdl.describe_module import find_difference
from sparkdl.errors import CheckpointError, ConfigError, StorageError
from sparkdl.process import borrowed_generator
from sparkdl.program import read_program, write_program

VERSION = 1
_INDEX = "module.json"
_WEIGHTS = "weights.safetensors"
_PROGRAM = "program.pt2"


def save_module(
    module: nn.Module,
    factory: Any | None,
    storage: Storage,
    path: str,
    *,
    example_inputs: tuple[torch.Tensor, ...] | None,
    extra: Mapping[str, Any],
) -> None:
    """Write a module on the CPU as a directory; ``module.json`` is written last.

    Args:
        module: the fitted module; left as it was.
        factory: importable callable without arguments (or `functools.partial`) that makes such a
            module; None if there is none.
        storage: where to.
        path: the directory, relative to the storage.
        example_inputs: a batch, ``(batch, ...)`` each, needed for an exported program only.
        extra: further values for `load_module_from` to give back; see `describe.describe`.

    Raises:
        ConfigError: the module cannot be made again in any of the three ways, or ``factory``
            makes another one; names causes and remedies.
        StorageError: the storage cannot be written.
    """
    index: dict[str, Any] = {"version": VERSION, "extra": describe(dict(extra))}
    recipe, program = _recipe(module, factory, example_inputs)
    files = {_WEIGHTS: _weights(module)}
    if program is not None:
        files[_PROGRAM] = program
    index["recipe"] = recipe
    index["files"] = {name: _record(data) for name, data in files.items()}
    storage.remove(f"{path}/{_INDEX}")  # a directory half written must not look like a module
    for name, data in files.items():
        storage.write(f"{path}/{name}", data)
    storage.write(f"{path}/{_INDEX}", json.dumps(index, indent=1).encode())


def load_module_from(storage: Storage, path: str) -> tuple[nn.Module, dict[str, Any]]:
    """Make the module that `save_module` wrote.

    Returns:
        The module, in evaluation mode on the CPU, and ``extra``.

    Raises:
        StorageError: a file is missing, damaged or of a later version; nothing was built then.
        ConfigError: the code that makes the module is not importable here, or has changed.
    """
    index = _read_index(storage, path)
    files = {name: _read(storage, f"{path}/{name}", record) for name, record in index["files"]}
    recipe = index["recipe"]
    if "program" in recipe:
        return read_program(files[_PROGRAM]), restore(index["extra"])
    weights = decode(files[_WEIGHTS], f"{path}/{_WEIGHTS}")
    module = _make(restore(recipe["factory"])) if "factory" in recipe else restore(recipe["module"])
    _load_weights(module, weights, recipe)
    return module.cpu().eval(), restore(index["extra"])


def _recipe(
    module: nn.Module, factory: Any | None, example_inputs: tuple[torch.Tensor, ...] | None
) -> tuple[dict[str, Any], bytes | None]:
    """How to make the module again, and the exported program if that is the way."""
    causes = []
    if factory is not None:
        try:
            described = describe(factory)
        except DescribeError as error:
            causes.append(f"the factory cannot be written: {error}")
        else:
            return _factory_recipe(module, factory, described), None
    try:
        return {"module": describe(module)}, None
    except DescribeError as error:
        causes.append(f"the module cannot be described: {error}")
    try:
        if example_inputs is None:
            raise ConfigError("an exported program needs example inputs, and there are none")
        return {"program": _PROGRAM}, write_program(module, example_inputs)
    except ConfigError as error:
        causes.append(str(error))
    raise ConfigError(
        "the module cannot be saved without pickle; one of these must be mended: "
        + "; ".join(f"({i}) {cause}" for i, cause in enumerate(causes, 1))
    )


def _factory_recipe(module: nn.Module, factory: Any, described: Any) -> dict[str, Any]:
    difference = find_difference(module, _make(factory))
    if difference is not None:
        raise ConfigError(
            f"the factory makes another module than the fitted one: it differs in {difference}; "
            f"pass the factory that made it, with all its arguments"
        )
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    return {"factory": described, "frozen": frozen}


def _make(factory: Any) -> nn.Module:
    if not callable(factory):
        raise ConfigError(f"a factory must be callable; received {factory!r}")
    with borrowed_generator():
        module = factory()
    if not isinstance(module, nn.Module):
        raise ConfigError(f"a factory must make an nn.Module; {factory!r} made {type(module)}")
    return module


def _weights(module: nn.Module) -> bytes:
    # Plain dicts: names and tensors are all that another reader of safetensors needs.
    state = {name: _on_cpu(value) for name, value in module.state_dict().items()}
    value, tensors = pack(state)
    return b"".join(encode(Snapshot(value, tensors)))


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _load_weights(module: nn.Module, weights: Mapping[str, Any], recipe: Any) -> None:
    """Copy the weights in; unlike torch, refuse to convert their dtypes."""
    state = module.state_dict()
    for name in sorted(state.keys() | weights.keys()):
        ours, theirs = _kind(state.get(name)), _kind(weights.get(name))
        if ours != theirs:
            raise ConfigError(
                f"the code that makes the module has changed since it was saved: {name} is {ours}, "
                f"saved was {theirs}; use the version that saved it"
            )
    module.load_state_dict(dict(weights))
    parameters = dict(module.named_parameters())
    for name in recipe.get("frozen", ()):
        parameters[name].requires_grad_(False)


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return "absent" if value is None else type(value).__name__


def _record(data: bytes) -> dict[str, Any]:
    return {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _read_index(storage: Storage, path: str) -> dict[str, Any]:
    place = f"{path}/{_INDEX}"
    try:
        index = json.loads(storage.read(place))
        version = index["version"]
        if version != VERSION:
            raise StorageError(f"{place} has version {version}; this sparkdl reads {VERSION}")
        recipe = index["recipe"]
        expected = {_WEIGHTS, _PROGRAM} if "program" in recipe else {_WEIGHTS}
        if not {"factory", "module", "program"} & set(recipe) or set(index["files"]) != expected:
            raise StorageError(f"{place} is damaged: it does not say how to make the module")
        index["files"] = [
            (name, (int(record["size_bytes"]), str(record["sha256"])))
            for name, record in index["files"].items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(f"{place} is damaged: {error!r}; save the module again") from error
    return dict(index)


def _read(storage: Storage, place: str, record: tuple[int, str]) -> bytes:
    data = storage.read(place)
    if len(data) != record[0] or hashlib.sha256(data).hexdigest() != record[1]:
        raise CheckpointError(
            f"{place} is damaged: {len(data)} bytes, expected {record[0]} with SHA-256 "
            f"{record[1]}; save the module again"
        )
    return data
