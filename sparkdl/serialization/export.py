"""The export of a saved model to files for programs that do not know sparkdl.

The file's ending says which: ONNX, torch's exported program, or safetensors. A folder is a saved
module again, but one that needs none of the code it was made with.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from sparkdl.errors import ConfigError, unknown
from sparkdl.serialization.example_inputs import example_of
from sparkdl.serialization.exported_program import write_program
from sparkdl.serialization.load import ModelSignature, open_saved, signature_of
from sparkdl.serialization.saved_module import WEIGHTS, SavedModule, prepare_program
from sparkdl.serialization.trust import INDEX
from sparkdl.storage.hadoop_storage import open_parent
from sparkdl.storage.storage import Storage, without_password

_FACTORY = "factory"
"""Name, in `SavedModule.extra`, of what a saved model says of its own code."""


ENDINGS = (".onnx", ".pt2", ".safetensors")
_ENDING = re.compile(r"\.[A-Za-z]\w*$")
"""A folder may be called v1.2."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Describes what was written."""

    what: str
    inputs: tuple[str, ...]
    """One line for each input of the model."""
    difference: float | None = None
    """The largest absolute difference of outputs that was found, of ONNX files."""


def export_saved(
    model: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    trusted: str | Iterable[str] = (),
) -> Exported:
    """Write a saved model in the form that the ending of ``target`` names.

    Args:
        model: path or URL, as for `sparkdl.load_module`.
        target: path or URL: ``.onnx`` is an ONNX file, ``.pt2`` an exported program,
            ``.safetensors`` the state dict; a name without an ending is a folder for
            `sparkdl.load_module`.
        overwrite: whether what is there is replaced.
        trusted: packages whose code the model may name, see `sparkdl.load_module`.

    Raises:
        ConfigError: there is something at ``target``, the model cannot have that form, or its code
            cannot be imported here.
        StorageError: the model cannot be read, or the target not be written.
    """
    storage, name = open_parent(os.fspath(target).rstrip("/"))
    if not name:
        shown = without_password(os.fspath(target))
        raise ConfigError(f"name a file or folder to write; received {shown!r}")
    ending = _ENDING.search(name)
    if ending is not None and ending[0] not in ENDINGS:
        raise unknown("ending", ending[0], ENDINGS, "; or none for a folder")
    if storage.exists(name) and not overwrite:
        raise ConfigError(
            f"there is something at {without_password(os.fspath(target))} already; choose another "
            "target, or replace it with --overwrite"
        )
    if name.endswith(".onnx"):
        from sparkdl.serialization.onnx_export import export_onnx

        difference = export_onnx(model, target, trusted=trusted)
        inputs = _lines(open_saved(model, trusted))
        return Exported(what="an ONNX file", inputs=inputs, difference=difference)
    saved = open_saved(model, trusted)
    if name.endswith(".safetensors"):
        storage.write(name, saved.files[WEIGHTS])
        return Exported(what=f"{len(saved.weights())} tensors", inputs=())
    if name.endswith(".pt2"):
        example = example_of(_signature(saved).inputs)
        storage.write(name, write_program(saved.make(), example))
        return Exported(what="an exported program", inputs=_lines(saved))
    _write_folder(saved, storage, name)
    return Exported(what="a folder for sparkdl.load_module", inputs=_lines(saved))


def _write_folder(saved: SavedModule, storage: Storage, name: str) -> None:
    # What was saved along, less the name of the factory; see `json_objects.describe`.
    extra = [entry for entry in saved.index["extra"]["dict"] if entry[0] != _FACTORY]
    example = example_of(_signature(saved).inputs)
    prepared = prepare_program(saved.make(), example_inputs=example, extra={"dict": extra})
    if storage.exists(name):
        if not storage.exists(f"{name}/{INDEX}"):
            raise ConfigError(
                f"{storage}/{name} holds something else than an exported model, so it is not "
                "replaced; choose another target"
            )
        storage.remove(name)
    prepared.write(storage, name)


def _signature(saved: SavedModule) -> ModelSignature:
    signature = signature_of(saved.index, saved.trust)
    if signature is None:
        raise ConfigError(
            "an estimator has not seen its columns, so nothing can be exported of it but its "
            "weights; export the model that its fit gives"
        )
    return signature


def _lines(saved: SavedModule) -> tuple[str, ...]:
    lines = []
    for column in _signature(saved).inputs:
        length = ("length",) if column.kind.has_length else ()
        shape = ", ".join(map(str, ("batch", *length, *column.shape)))
        lines.append(f"input {column.argument or column.name}: {column.dtype}, ({shape})")
    return tuple(lines)
