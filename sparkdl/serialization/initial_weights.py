"""The weights of another training, from which a training starts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.errors import ConfigError, StorageError
from sparkdl.runtime.name_patterns import check_fit, fits_any
from sparkdl.storage.hadoop_storage import open_parent
from sparkdl.storage.storage import scheme_of, without_password

if TYPE_CHECKING:
    from torch import nn

_SUFFIX = ".safetensors"
_PICKLED = (".pt", ".pth", ".bin", ".ckpt")


@dataclass(frozen=True, kw_only=True)
class InitialWeights:
    """Weights to start from, and which of them to leave aside.

    Example: a classifier of ten classes from one of a thousand, whose last layer ``head`` is made
    anew::

        TorchClassifier(
            module=make_net,
            initialWeights=InitialWeights(source="s3://models/large", skip=("head",)),
        )
    """

    source: Any
    """A fitted model, a module, a state dict, or the path or URL of a saved model or of a
    ``.safetensors`` file."""
    skip: tuple[str, ...] = ()
    """Patterns (see `runtime.name_patterns`) of names that may be missing, left over or of another
    shape: the module keeps its own values there. All other names and shapes must agree."""

    def __post_init__(self) -> None:
        skip: Any = self.skip
        if isinstance(skip, str) or not all(isinstance(one, str) for one in skip):
            raise ConfigError(f"skip must be a tuple of patterns; received {skip!r}")
        object.__setattr__(self, "skip", tuple(skip))  # lists, from files
        object.__setattr__(self, "source", _source(self.source))

    @property
    def is_in_memory(self) -> bool:
        """Whether the source is a state dict; otherwise it is a path."""
        return not isinstance(self.source, str)


def load_initial_weights(module: nn.Module, initial: InitialWeights) -> None:
    """Give the weights to ``module``, on the CPU.

    Numbers take the module's dtype.

    Raises:
        ConfigError: names, shapes or kinds differ, numbers do not fit into the module's dtype, or
            tensors that are one in the module are several different ones; lists them.
        StorageError: the file or folder cannot be read, or is damaged.
    """
    import torch

    state, own = _state(initial.source), module.state_dict()
    check_fit(initial.skip, [*own, *state], "initialWeights.skip")
    state = {name: value for name, value in state.items() if not fits_any(initial.skip, name)}
    wanted = {name: value for name, value in own.items() if not fits_any(initial.skip, name)}
    differences = [
        *(f"{name} is not in the weights" for name in wanted.keys() - state.keys()),
        *(f"{name} is not in the module" for name in state.keys() - wanted.keys()),
        *(
            f"{name} is {_kind(wanted[name])} in the module, {_kind(state[name])} in the weights"
            for name in wanted.keys() & state.keys()
            if not _agree(wanted[name], state[name])
        ),
        *_lost(wanted, state),
    ]
    if differences:
        shown = "; ".join(sorted(differences)[:5])
        raise ConfigError(
            f"initialWeights differ from the module in {len(differences)} place(s): {shown}"
            f"{'; ...' * (len(differences) > 5)}; use the module that they are of, or "
            "InitialWeights(source=..., skip=(patterns of names to leave aside,))"
        )
    with torch.no_grad():
        module.load_state_dict(state, strict=False)


def _source(value: Any) -> Any:
    """What is kept of what the user gave: a path, or a plain state dict."""
    if isinstance(value, str | os.PathLike):
        path = os.fspath(value)
        if path.endswith(_PICKLED):
            raise ConfigError(
                f"{without_password(path)} is a pickle, which can run code; load it with "
                "torch.load(path, weights_only=True) and pass the state dict"
            )
        return path if scheme_of(path) is not None else str(Path(path).expanduser().absolute())
    from torch import nn

    module = value if isinstance(value, nn.Module) else getattr(value, "module", None)
    state = module.state_dict() if isinstance(module, nn.Module) else value
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise ConfigError(
            "initialWeights must be a fitted model, a module, a state dict, or the path of a saved "
            f"model or {_SUFFIX} file; received {type(value).__name__}"
        )
    return dict(state)


def _state(source: Any) -> dict[str, Any]:
    if not isinstance(source, str):
        return dict(source)
    if not source.endswith(_SUFFIX):
        from sparkdl.serialization.load import open_saved

        return open_saved(source).weights()
    from safetensors import SafetensorError
    from safetensors.torch import load

    storage, name = open_parent(source)
    try:
        return load(storage.read(name))
    except SafetensorError as error:
        name = without_password(source)
        raise StorageError(f"{name} is no whole file of safetensors: {error}") from error


def _agree(ours: Any, theirs: Any) -> bool:
    import torch
    from torch.nn.parameter import is_lazy

    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return type(ours) is type(theirs)
    is_same_kind = ours.is_floating_point() == theirs.is_floating_point()
    return is_same_kind and (is_lazy(ours) or ours.shape == theirs.shape)


def _lost(wanted: Mapping[str, Any], state: Mapping[str, Any]) -> Iterator[str]:
    """What copying would change without a word."""
    import torch
    from torch.nn.parameter import is_lazy

    first: dict[Any, str] = {}
    for name, ours in wanted.items():
        theirs = state.get(name)
        if not isinstance(ours, torch.Tensor) or theirs is None or not _agree(ours, theirs):
            continue
        if not _fits(theirs, ours.dtype):
            yield f"{name} has numbers in the weights that {_kind(ours)} of the module cannot hold"
        if is_lazy(ours):
            continue
        other = first.setdefault((ours.data_ptr(), ours.shape, ours.stride()), name)
        if ours.numel() and not torch.equal(theirs.to(ours.dtype), state[other].to(ours.dtype)):
            yield f"{name} and {other} are one tensor in the module, but differ in the weights"


def _fits(value: Any, dtype: Any) -> bool:
    """Whether a cast keeps the numbers: floating ones but for rounding, others exactly."""
    if value.dtype == dtype:
        return True
    cast = value.to(dtype).to(value.dtype)
    if value.is_floating_point() or value.is_complex():
        return bool((cast.isfinite() == value.isfinite()).all())
    return bool((cast == value).all())


def _kind(value: Any) -> str:
    import torch
    from torch.nn.parameter import is_lazy

    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    shape = "without a shape yet" if is_lazy(value) else str(tuple(value.shape))
    return f"{str(value.dtype).removeprefix('torch.')} {shape}"
