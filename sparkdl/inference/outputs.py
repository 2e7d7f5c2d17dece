"""The tensors of a module that become columns, and the form in which they do.

A module returns a tensor, or tuples, mappings and dataclasses of tensors, nested as it likes. An
`Output` names a part of that, or of what one of the module's layers returned. The driver runs the
module once on zeros to see what there is (`spark.inference.output_columns`); the executors run it
on the rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from sparkdl.config import require
from sparkdl.data.collate import Arguments
from sparkdl.errors import ConfigError

Key = str | int
Form = Literal["auto", "value", "array", "vector", "nested"]
FORMS: tuple[Form, ...] = get_args(Form)


@dataclass(frozen=True, kw_only=True)
class Output:
    """One output column of ``transform``: what of the module it shows, and how.

    Example::

        model.setOutputs({
            "embedding": Output(layer="encoder.2", form="vector"),  # feature extraction
            "boxes": Output(key="boxes", form="nested"),            # of a dict that is returned
            "hidden": ("states", -1),                               # short for Output(key=...)
        })
    """

    key: Key | tuple[Key, ...] = ()
    """Place to look at in what is returned: a key, an index or a field's name, or a tuple of them
    from the outside in. The empty tuple takes all of it."""
    layer: str | None = None
    """Look in what this submodule returned instead, named as by ``module.named_modules()``."""
    form: Form = "auto"
    """Form that a tensor ``(rows, ...)`` takes:

    - ``value``: a number; the shape must be ``(rows,)`` or ``(rows, 1)``
    - ``array``: an array of numbers, flattened in row-major order
    - ``vector``: the same as a Spark ML vector
    - ``nested``: arrays in arrays, which keep the shape
    - ``auto``: a number where there is one per row, else an array

    Several tensors become a struct, whose fields have this form each.
    """

    def __post_init__(self) -> None:
        key = self.key if isinstance(self.key, tuple) else (self.key,)
        are_keys = all(isinstance(k, (str, int)) and not isinstance(k, bool) for k in key)
        require(are_keys, "the key of an output is a name, an index or a tuple of these", key)
        object.__setattr__(self, "key", key)
        require(self.form in FORMS, f"the form of an output is one of {FORMS}", self.form)
        is_name = self.layer is None or isinstance(self.layer, str)
        require(is_name, "a layer is given by its name", self.layer)

    @property
    def path(self) -> tuple[Key, ...]:
        """``key`` as a tuple."""
        assert isinstance(self.key, tuple)
        return self.key

    def __str__(self) -> str:
        where = f"layer {self.layer!r}" if self.layer is not None else "the module"
        return f"output {'.'.join(map(str, self.path))!r} of {where}" if self.path else where


def children(value: Any) -> dict[Key, Any] | None:
    """The parts of a structure by key or index; None of a tensor, and of what is no structure.

    Parts that are None, as optional fields of a dataclass are, count as missing.
    """
    if isinstance(value, torch.Tensor):
        return None
    parts: dict[Any, Any]
    if isinstance(value, Mapping):
        parts = dict(value)
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        parts = value._asdict()
    elif isinstance(value, (tuple, list)):
        parts = dict(enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    else:
        return None
    return {key: part for key, part in parts.items() if part is not None}


def pick(value: Any, path: Sequence[Key], what: object) -> Any:
    """The part of what was returned at ``path``, keys from the outside in.

    An index also counts the named parts. ConfigError, which calls the output ``what``, if there is
    no such part.
    """
    for key in path:
        parts = children(value)
        if parts is None:
            raise ConfigError(f"{what}: there is nothing at {key!r} in a {_named(value)}")
        if key not in parts and isinstance(key, int) and -len(parts) <= key < len(parts):
            key = list(parts)[key]
        if key not in parts:
            known = ", ".join(map(repr, parts))
            raise ConfigError(f"{what}: there is no {key!r}; known: {known}")
        value = parts[key]
    return value


def check_rows(value: Any, num_rows: int, what: object) -> torch.Tensor:
    """Raise ConfigError for what is not one tensor with a row per sample."""
    if not isinstance(value, torch.Tensor):
        raise ConfigError(f"{what} is a {_named(value)}, of which no column can be made")
    if value.ndim == 0 or len(value) != num_rows:
        raise ConfigError(
            f"{what} has shape {tuple(value.shape)} for {num_rows} samples, and transform needs "
            "one row per sample; choose an output that has them (predictionOutput), or have "
            "forward return that"
        )
    return value


def _named(value: Any) -> str:
    return "tensor" if isinstance(value, torch.Tensor) else type(value).__name__


@dataclass(frozen=True, kw_only=True)
class Forward:
    """One way to run a module: prepared inputs in, named tensors out. Picklable."""

    preprocessing: Callable[..., Any] | None = None
    """Called as the module would be; gives its argument, or a tuple or dict of several."""
    postprocessing: Callable[[Any], Any] | None = None
    """Called with what the module returned; gives what stands in its place."""
    layers: tuple[str, ...] = ()
    """Submodules whose outputs are wanted as well."""

    def outputs(self, module: nn.Module, inputs: Arguments) -> dict[str | None, Any]:
        """Run the module: what it returned, postprocessed, under None, and its layers' outputs.

        ConfigError if a layer does not exist, or was not called exactly once.
        """
        with _watched(module, self.layers) as seen:
            output = self.module_output(module, inputs)
        missing = [name for name in self.layers if name not in seen]
        if missing:
            raise ConfigError(
                f"layer {missing[0]!r} is never called when the module predicts; name another one"
            )
        if self.postprocessing is not None:
            output = self.postprocessing(output)
        return {None: output, **seen}

    def module_output(self, module: nn.Module, inputs: Arguments) -> Any:
        """Return what the module itself gives, as the loss sees it: without ``postprocessing``."""
        if self.preprocessing is None:
            return inputs.call(module)
        prepared = inputs.call(self.preprocessing)
        if isinstance(prepared, Mapping):
            return module(**prepared)
        return module(*prepared) if isinstance(prepared, (tuple, list)) else module(prepared)


@contextlib.contextmanager
def _watched(module: nn.Module, layers: Sequence[str]) -> Iterator[dict[str | None, Any]]:
    """Note what the named submodules return while the block runs."""
    seen: dict[str | None, Any] = {}

    def watch(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if name in seen:
                raise ConfigError(
                    f"layer {name!r} is called more than once when the module predicts, so it is "
                    f"not clear which output is meant; name a layer that is called once"
                )
            # What follows may work in place, as ReLU(inplace=True) does.
            seen[name] = _copied(output)

        return hook

    with contextlib.ExitStack() as stack:
        for name in layers:
            stack.callback(find_layer(module, name).register_forward_hook(watch(name)).remove)
        yield seen


def find_layer(module: nn.Module, name: str) -> nn.Module:
    """The submodule called ``name``; ConfigError says which there are, if there is none."""
    by_name: dict[str, nn.Module] = dict(module.named_modules(remove_duplicate=False))
    if not getattr(module, "has_layers", True):
        raise ConfigError(
            f"the module has no layer {name!r}: it was saved as an exported program, which keeps "
            "none; save it again from a class or function in a file that can be imported"
        )
    if not name or name not in by_name:
        known = ", ".join(filter(None, by_name)) or "none"
        raise ConfigError(f"the module has no layer {name!r}; its layers: {known}")
    return by_name[name]


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    parts = children(value)
    if parts is None:
        return value
    copies = {key: _copied(part) for key, part in parts.items()}
    is_plain_list = isinstance(value, (tuple, list)) and not hasattr(value, "_asdict")
    return list(copies.values()) if is_plain_list else copies
