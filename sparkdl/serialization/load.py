"""Saved models for programs without Spark: their modules, and what these take and give.

`load_module` gives the fitted module, `load_signature` what it takes and gives. Both accept the
folder of a saved model, of a pipeline model that holds one, of an estimator whose module was saved
along, or of one of a pipeline's stages; as a path or as a URL, see `storage.hadoop_storage`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any, Literal

import torch
from torch import nn

from sparkdl.data.collate import Arguments, example_arguments
from sparkdl.data.plan import Column
from sparkdl.errors import ConfigError, SparkDLError, StorageError
from sparkdl.runtime.json_values import fits
from sparkdl.serialization.json_objects import describe, restore
from sparkdl.serialization.saved_module import SavedModule, open_module, read_module_index
from sparkdl.serialization.trust import INDEX, USUAL, Trust, trusting
from sparkdl.storage.hadoop_storage import open_place
from sparkdl.storage.storage import Storage

Place = str | os.PathLike[str]

_INSIDE = ("", "model", "module", "bestModel/model")
"""Places of the module in a folder: itself, a model's, an estimator's, a tuned model's."""
_STAGES = "stages"


@dataclass(frozen=True, kw_only=True)
class ModelSignature:
    """Describes what a model takes and gives."""

    inputs: tuple[Column, ...]
    """One per argument of the module: the name of its column in Spark, dtype, shape of a row."""
    num_classes: int | None
    """Classes of a classifier; None for other models."""

    def example_inputs(self, num_rows: int = 2) -> tuple[torch.Tensor, ...]:
        """Inputs of zeros, ``(num_rows, *shape)`` each, for a module that takes them by position.

        Raises:
            ConfigError: the module takes some by name; see `example_arguments`.
        """
        arguments = self.example_arguments(num_rows)
        if any(arguments.names):
            raise ConfigError(
                "the module takes inputs by name; use signature.example_arguments().call(module)"
            )
        return arguments.values

    def example_arguments(self, num_rows: int = 2) -> Arguments:
        """Inputs of zeros, with the names by which the module takes them.

        ``.call(module)`` passes them; ``.values`` and ``.names`` are what is passed. Sequences
        are as long as the longest of training, and their masks say that all values count.
        """
        return example_arguments(self.inputs, num_rows)


@dataclass(frozen=True, kw_only=True)
class NamedTransform:
    """The transform of an input, as a signature has it: imported only when it is called."""

    text: str
    """JSON that names it, such as ``{"import": "package.module:function"}``."""
    trusted: tuple[str, ...] = ()
    """Packages that it may be in, see `load_module`."""
    place: str | None = None
    """Place where it was read, whose files it may not be in."""

    def __call__(self, batch: Any) -> Any:
        """Import the transform and call it; ConfigError if it is not here, or is not trusted."""
        trust = replace(trusting(self.trusted), place=self.place)
        return restore(json.loads(self.text), trust)(batch)


def load_module(path_or_url: Place, *, trusted: str | Iterable[str] = ()) -> nn.Module:
    """Load the fitted module of a saved model; needs neither Spark nor a cluster.

    All files are compared with their SHA-256 before any code is imported or run. The code that
    makes the module must be importable, unless the model was saved as an exported program.
    Whoever can write to the folder can name other code there, which is imported and called only
    if you trust it: if it is in files of your own (that no package manager has installed), in the
    layers of torch and torchvision, in ``sparkdl.models``, or in a package that you name.

    Example::

        module = sparkdl.load_module("s3://models/digits")
        signature = sparkdl.load_signature("s3://models/digits")
        with torch.inference_mode():
            logits = module(torch.zeros(8, *signature.inputs[0].shape))

    Args:
        path_or_url: folder of a saved model, pipeline model (with one such stage), stage or
            estimator.
        trusted: packages whose classes and functions the folder may name as well.

    Returns:
        The module on the CPU, in evaluation mode.

    Raises:
        StorageError: there is no such model, or it is damaged or of a later version.
        ConfigError: code that makes the module cannot be imported here, has changed, or is not
            trusted.
    """
    return open_saved(path_or_url, trusted).make()


def load_signature(path_or_url: Place, *, trusted: str | Iterable[str] = ()) -> ModelSignature:
    """Read what a saved model takes and gives, but neither its weights nor its code.

    Args:
        path_or_url: as for `load_module`.
        trusted: as for `load_module`, of inputs of a kind of one's own and of transforms.

    Raises:
        StorageError: there is no such model, it is damaged or of a later version, or it is an
            estimator, which does not know yet what it will be trained on.
    """
    storage = open_place(path_or_url)
    trust = trusting(trusted).reading(storage.url)
    signature = signature_of(read_module_index(storage, place_of_saved(storage)), trust)
    if signature is None:
        raise StorageError(
            f"{storage} holds an estimator, which has not seen its columns; save the model "
            "that its fit gives"
        )
    return signature


def open_saved(path_or_url: Place, trusted: str | Iterable[str] = ()) -> SavedModule:
    """The files of a saved model, read and found whole; see `load_module`."""
    trust, storage = trusting(trusted), open_place(path_or_url)
    return open_module(storage, place_of_saved(storage), trust)


def signature_of(index: Mapping[str, Any], trust: Trust) -> ModelSignature | None:
    """Return what a saved module with this index takes and gives; None for that of an estimator."""
    try:
        return _signature(index, trust)
    except SparkDLError:
        raise
    except Exception as error:  # whatever odd values lead to
        raise StorageError(
            f"{INDEX} does not say what the model takes: {type(error).__name__}: {error}; save the "
            "model again, or take an intact copy"
        ) from error


def _signature(index: Mapping[str, Any], trust: Trust) -> ModelSignature | None:
    # Not restored as a whole: that would import the factory's code.
    extra = {name: value for name, value in index["extra"]["dict"] if isinstance(name, str)}
    if "columns" not in extra:
        return None
    return ModelSignature(
        inputs=tuple(_unimported(column, trust) for column in restore(extra["columns"], trust)),
        num_classes=extra.get("num_classes"),
    )


def column_as_json(column: Column) -> dict[str, Any]:
    """A column as values of JSON; DescribeError if its transform cannot be imported by name."""
    return {**vars(column), "specification": describe(column.specification)}


def column_from_json(values: Mapping[str, Any], trust: Trust = USUAL) -> Column:
    """Inverse of `column_as_json`; also of what was written before there were specifications.

    ConfigError if the specification's transform cannot be imported here, or is not trusted.
    """
    return _column(values, restore(values.get("specification"), trust))


def _column(values: Mapping[str, Any], specification: Any) -> Column:
    """Make the column; StorageError if a value is of another kind than columns have."""
    numbers, dtype, cast = values["shape"], values["dtype"], values.get("cast")
    is_usual = fits(numbers, list[int]) and fits(values.get("longest", 0), int)
    is_usual = is_usual and min([*numbers, values.get("longest", 0)]) >= 0
    is_usual = is_usual and fits(dtype, str) and isinstance(getattr(torch, dtype, 0), torch.dtype)
    if not is_usual or not fits(cast, Literal["bfloat16", "float16"] | None):
        shown = {key: value for key, value in values.items() if key != "specification"}
        raise StorageError(
            f"a saved column reads {shown}, which no column does; save the model again, or take an "
            "intact copy"
        )
    return Column(**{**values, "shape": tuple(numbers), "specification": specification})


def _unimported(values: Mapping[str, Any], trust: Trust) -> Column:
    """A column as `column_from_json` makes it, but its transform is a `NamedTransform`.

    The file itself may not name one: called, it trusts what its own field says.
    """
    described = values.get("specification")
    if described is None or described["fields"]["transform"] is None:
        return column_from_json(values, trust)
    text = json.dumps(described["fields"]["transform"])
    named = NamedTransform(text=text, trusted=trust.packages, place=trust.place)
    kind = trust.import_object(described["dataclass"])
    own = {
        name: restore(value, trust)
        for name, value in described["fields"].items()
        if name != "transform"
    }
    return _column(values, kind(**own, transform=named))


def place_of_saved(storage: Storage) -> str:
    """The folder of the storage that holds a saved module; StorageError if there is not one."""
    found = list(_folders(storage, ""))
    if not found:
        raise StorageError(
            f"{storage} holds no saved module; pass the folder that was given to save(), or one of "
            "its stages"
        )
    if len(found) > 1:
        stages = sorted(str(PurePosixPath(*PurePosixPath(folder).parts[:2])) for folder in found)
        raise StorageError(
            f"{storage} is a pipeline with {len(found)} saved modules; name one of its stages: "
            f"{', '.join(stages)}"
        )
    return found[0]


def _folders(storage: Storage, folder: str) -> Iterator[str]:
    for inside in _INSIDE:
        place = f"{folder}/{inside}".strip("/") or "."
        if storage.exists(f"{place}/{INDEX}"):
            yield place
            return
    for outer in ("", "bestModel"):  # a tuned model may be a pipeline
        stages = "/".join(part for part in (folder, outer, _STAGES) if part)
        for name in storage.list(stages):
            yield from _folders(storage, f"{stages}/{name}")
