"""The export of a fitted module to ONNX, and the check that the file computes the same.

torch's exporter writes the file from the graph that `torch.export` makes; onnxruntime then runs it
on batches of several sizes beside the module. Only what agrees is put in its place.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from sparkdl.errors import ConfigError
from sparkdl.serialization.example_inputs import InputExample, as_example, example_of
from sparkdl.serialization.exported_program import export_program, silenced
from sparkdl.serialization.load import ModelSignature, open_saved, signature_of
from sparkdl.storage.hadoop_storage import open_parent
from sparkdl.storage.storage import without_password
from sparkdl.sync.frozen_layers import evaluation_mode

TOLERANCES = {
    torch.float64: (1e-4, 1e-5),
    torch.float32: (1e-4, 1e-5),
    torch.float16: (1e-2, 1e-3),
    torch.bfloat16: (1e-1, 1e-2),
}
"""Relative and absolute difference that is put up with, per dtype of an output; others: none.

onnxruntime sums in another order than torch, and computes some functions by other formulas."""
_NUM_ROWS = (1, 2, 5)
"""Sizes of the batches on which the file is tried."""
_PIECE_BYTES = 8 << 20
_MISSING_OPERATOR = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.:]+)'")


def export_onnx(
    model: Any, path_or_url: str | os.PathLike[str], *,
    example_inputs: tuple[torch.Tensor, ...] | Mapping[str, torch.Tensor] | None = None,
    trusted: str | Iterable[str] = (),
) -> float:  # fmt: skip
    """Write a model as an ONNX file whose batches may have any size, and try the file.

    onnxruntime runs it on batches of 1, 2 and 5 rows; floats must differ from the module's by no
    more than 1e-4 of themselves plus 1e-5 (half precision: 1e-2 and 1e-3), all else not at all.
    Files over 2 GB keep their weights in a second file, ``<name>.data``, that must lie beside.

    Example::

        sparkdl.export_onnx(model, "digits.onnx")  # a fitted model
        sparkdl.export_onnx("s3://models/digits", "digits.onnx")  # a saved one, without Spark

    Args:
        model: a fitted model; path or URL of a saved one (see `load_module`); or a module, which
            needs ``example_inputs``. It is exported in evaluation mode, on the CPU.
        path_or_url: the file to write; a file that is there is replaced.
        example_inputs: one batch, ``(batch, ...)`` each, on which module and file are compared: a
            tuple, or a dict by the names of ``forward``'s arguments. None: numbers from a normal
            distribution, and zeros for whole numbers, in the shapes of the model's columns.
            Inputs that are passed by position are then named after the columns, and sequences
            may have any length.
        trusted: packages whose code a saved model may name, see `load_module`.

    Returns:
        The largest absolute difference that was found.

    Raises:
        ConfigError: the packages are missing, torch or ONNX lack an operator of the module, or
            the file does not compute what the module does. Nothing is written then.
        StorageError: the model cannot be read, or the file not be written.
    """
    _check_packages()
    module, signature = _resolve(model, trusted)
    devices = {str(t.device) for t in (*module.parameters(), *module.buffers())} - {"cpu"}
    if devices:
        raise ConfigError(
            f"export_onnx runs the module on the CPU, and parts of it are on {sorted(devices)}; "
            "pass module.cpu()"
        )
    example = _made_up(signature) if example_inputs is None else as_example(example_inputs)
    batches = [example.rows(num_rows) for num_rows in _NUM_ROWS]
    batches += [example.shorter()] * any(example.lengths)
    names = None if signature is None else _names(signature, example)
    storage, name = open_parent(path_or_url)
    if not name:
        shown = without_password(os.fspath(path_or_url))
        raise ConfigError(f"name the file to write, such as model.onnx; received {shown!r}")
    with tempfile.TemporaryDirectory(prefix="sparkdl-onnx-") as folder:
        file = Path(folder) / name
        _write(module, example, names, file)
        with evaluation_mode(module):
            difference = _compare(module, batches, file)
        for written in sorted(Path(folder).iterdir(), reverse=True):  # the weights first
            with written.open("rb") as opened:
                storage.write(written.name, iter(partial(opened.read, _PIECE_BYTES), b""))
    return difference


def _resolve(model: Any, trusted: str | Iterable[str]) -> tuple[nn.Module, ModelSignature | None]:
    if isinstance(model, str | os.PathLike):
        saved = open_saved(model, trusted)
        return saved.make(), signature_of(saved.index, saved.trust)
    if isinstance(model, nn.Module):
        return model, None
    module, columns = getattr(model, "module", None), getattr(model, "columns", None)
    if not isinstance(module, nn.Module) or columns is None:
        raise ConfigError(
            f"export_onnx takes a fitted model, the path of a saved one, or a torch.nn.Module; "
            f"received {type(model).__name__}"
        )
    return module, ModelSignature(inputs=tuple(columns), num_classes=None)


def _made_up(signature: ModelSignature | None) -> InputExample:
    if signature is None:
        raise ConfigError(
            "a module does not tell what it takes; pass example_inputs=(tensor, ...), one batch of "
            "rows each"
        )
    generator = torch.Generator().manual_seed(0)
    example = example_of(signature.inputs, max(_NUM_ROWS))
    return example.with_values(
        [
            torch.randn(x.shape, generator=generator, dtype=x.dtype) if x.is_floating_point() else x
            for x in example.values
        ]
    )


def _names(signature: ModelSignature, example: InputExample) -> list[str]:
    """The file's inputs: columns of what goes by position, then the names of all else."""
    columns = [column.name for column in signature.inputs if column.argument is None]
    # A mask may stand among the positions: its sequence goes by position, it never does.
    return [*columns, *example.arguments.by_name]


def _check_packages() -> None:
    missing = []
    for package in ("onnx", "onnxscript", "onnxruntime"):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import_module(package)
        except ImportError:
            missing.append(package)
    if missing:
        raise ConfigError(
            f"export_onnx needs {', '.join(missing)}; pip install {' '.join(missing)}"
        )


def _write(
    module: nn.Module, inputs: InputExample, names: Sequence[str] | None, file: Path
) -> None:
    program = export_program(module, inputs)
    try:
        # The exporter warns of its own deprecations, and logs what concerns other packages.
        with silenced("torch.onnx", level=logging.ERROR):
            exported: Any = torch.onnx.export(
                program, dynamo=True, verbose=False, input_names=names
            )
            exported.save(str(file))
    except Exception as error:  # torch's errors of this kind are not public
        raise ConfigError(f"the module cannot be written as ONNX: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """Say what went wrong, out of the chain of errors."""
    text = str(error)
    while error.__cause__ is not None:
        error = error.__cause__
        text = f"{text}\n{error}"
    operator = _MISSING_OPERATOR.search(text)
    if operator is not None:
        return (
            f"ONNX has no counterpart of the operator {operator[1]}; compute it otherwise, or "
            "serve the module itself with sparkdl.load_module"
        )
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _compare(module: nn.Module, batches: Sequence[InputExample], file: Path) -> float:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors; the rest is about speed
    try:
        session = onnxruntime.InferenceSession(
            str(file), options, providers=["CPUExecutionProvider"]
        )
        return max(_difference(module, session, inputs) for inputs in batches)
    except ConfigError:
        raise
    except Exception as error:  # onnxruntime's errors have no public base class
        raise ConfigError(
            f"onnxruntime cannot run the file: {error}; serve the module itself with "
            "sparkdl.load_module"
        ) from error


def _difference(module: nn.Module, session: Any, inputs: InputExample) -> float:
    """The largest difference on one batch; ConfigError if it is too large."""
    names = [node.name for node in session.get_inputs()]
    ordered = (*inputs.arguments.positional, *inputs.arguments.by_name.values())
    given = {name: x.numpy() for name, x in zip(names, ordered, strict=True)}
    found = [torch.from_numpy(array) for array in session.run(None, given)]
    with torch.no_grad():
        expected = _leaves(inputs.arguments.call(module))
    largest = 0.0
    for ours, theirs in zip(expected, found, strict=True):
        relative, absolute = TOLERANCES.get(ours.dtype, (0.0, 0.0))
        try:
            torch.testing.assert_close(theirs, ours, rtol=relative, atol=absolute, equal_nan=True)
        except AssertionError as error:
            raise ConfigError(
                f"the ONNX file does not compute what the module does, on "
                f"{inputs.arguments.num_rows} rows: "
                f"{str(error).strip()}; serve the module itself with sparkdl.load_module"
            ) from error
        if ours.numel() and ours.is_floating_point():
            gap = (ours.double() - theirs.double()).abs().nan_to_num(0.0)
            largest = max(largest, float(gap.max()))
    return largest


def _leaves(output: Any) -> list[torch.Tensor]:
    """The tensors of an output, in the order in which torch's exporter writes them."""
    leaves = tree_leaves(output)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            raise ConfigError(
                "a module for ONNX must return tensors, or tuples, lists and dicts of them; it "
                f"returned {type(leaf).__name__}"
            )
    return leaves
