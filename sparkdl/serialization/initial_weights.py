"""The weights of another training, from which a training starts."""

from __future__ import annotations

import difflib
import io
import json
import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from sparkdl.config import require
from sparkdl.errors import ConfigError, StorageError
from sparkdl.runtime.name_patterns import check_fit, fits_any, renamed, some_of
from sparkdl.storage.hadoop_storage import open_parent, open_place
from sparkdl.storage.storage import absolute, scheme_of, without_password

if TYPE_CHECKING:
    from torch import nn

    from sparkdl.serialization.recorded.recipe import RecordedWeights
    from sparkdl.storage.sharded_weights import SafetensorsFiles
    from sparkdl.storage.storage import Folder

_SUFFIX = ".safetensors"
_INDEX = ".safetensors.index.json"
_SAVED = "module.json"
"""File that the folder of a saved module has; its reader checks more than that of bare weights."""
_MOST_STARS = 3
"""In a part of a name: the time to compare with another grows with that power of its length."""
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
    """A fitted model, a module, a state dict, or the path or URL of a saved model, of a
    ``.safetensors`` file, of the ``.safetensors.index.json`` of several ones or of a folder that
    holds it as ``model.safetensors.index.json``, or with ``weights_only`` of a file of
    ``torch.save``."""
    skip: tuple[str, ...] = ()
    """Patterns (see `runtime.name_patterns`) of names that may be missing, left over or of another
    shape: the module keeps its own values there. All other names and shapes must agree."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of layers or parameters in the source -> in the module, such as ``{"encoder.layer.*":
    "blocks.*"}``; ``*`` stands for one part of a name, such as a number. An empty name is the whole
    module: ``{"module": ""}`` takes a prefix away. Of several that fit, the longest counts."""
    weights_only: bool = False
    """True if the source is a file of ``torch.save`` (``.pt``, ``.pth``, ``.bin``, ``.ckpt``). It
    is read with torch's restricted unpickler, which makes tensors and plain values only."""
    key: str = ""
    """Entry of that file that holds the state dict, such as ``state_dict``; empty: it is one."""

    def __post_init__(self) -> None:
        skip: Any = self.skip
        are_patterns = not isinstance(skip, str) and all(isinstance(one, str) for one in skip)
        require(are_patterns, "skip must be a tuple of patterns", skip)
        object.__setattr__(self, "skip", tuple(skip))  # lists, from files
        names: Any = self.names
        pairs = names.items() if isinstance(names, Mapping) else [(names, None)]
        for old, new in pairs:
            if not isinstance(old, str) or not isinstance(new, str):
                raise ConfigError(f"names must be a dict from names to names; received {names!r}")
            if old.count("*") != new.count("*"):
                raise ConfigError(f"names: {old!r} and {new!r} must have as many *")
            if max(part.count("*") for part in old.split(".")) > _MOST_STARS:
                raise ConfigError(f"names: {old!r} has more than {_MOST_STARS} * between two dots")
        object.__setattr__(self, "names", dict(names))
        object.__setattr__(self, "source", _source(self.source, self.weights_only))
        if (self.weights_only and self.is_in_memory) or (self.key and not self.weights_only):
            raise ConfigError(
                "weights_only=True, and key with it, are for the path of a file of torch.save; "
                f"received {_shown(self.source)}, weights_only={self.weights_only}"
            )

    @property
    def is_in_memory(self) -> bool:
        """True if the source is a state dict; otherwise it is a path."""
        return not isinstance(self.source, str)


def load_initial_weights(
    module: nn.Module,
    initial: InitialWeights,
    what: str = "initialWeights",
    weights: RecordedWeights | None = None,
) -> None:
    """Give the weights to ``module``, on the CPU, in its dtype; errors call them ``what``.

    ``weights`` are those of its parameters that are on the meta device, which then come from the
    source; safetensors files are read tensor by tensor for them.

    ConfigError lists which names, shapes or kinds differ, which numbers do not fit into the
    module's dtype, and which tensors are one in the module but several different ones in the
    weights. StorageError if the file or folder cannot be read, or is damaged.
    """
    import torch

    files = None if weights is None else _files(initial)
    found = _state(initial) if files is None else {n: files.blank(n) for n in files.names}
    origin = renamed({name: name for name in found}, initial.names)
    state = {name: found[old] for name, old in origin.items()}
    own = module.state_dict(keep_vars=True)

    def read(name: str) -> Any:
        return found[origin[name]] if files is None else files.read(origin[name])

    check_fit(initial.skip, [*own, *state], "initialWeights.skip")
    state = {name: value for name, value in state.items() if not fits_any(initial.skip, name)}
    wanted = {name: value for name, value in own.items() if not fits_any(initial.skip, name)}
    # Files of safetensors have what is one tensor in the module under one of its names only.
    given = {id(wanted[name]) for name in wanted.keys() & state.keys()}
    wanted = {n: value for n, value in wanted.items() if n in state or id(value) not in given}
    missing, superfluous = wanted.keys() - state.keys(), state.keys() - wanted.keys()
    differences = [
        *(f"{name} is not in the weights" for name in missing),
        *(f"{name} is not in the module" for name in superfluous),
        *(
            f"{name} is {_kind(wanted[name])} in the module, {_kind(state[name])} in the weights"
            for name in wanted.keys() & state.keys()
            if not _agree(wanted[name], state[name])
        ),
        *_lost(wanted, state, read),
    ]
    if differences:
        shown = "; ".join(sorted(differences)[:5])
        shown += "; ..." * (len(differences) > 5) + _alike(sorted(missing), sorted(superfluous))
        raise ConfigError(
            f"{what} differ from the module in {len(differences)} place(s): {shown}; "
            "use the module that they are of, or InitialWeights(source=..., skip=(patterns of "
            'names to leave aside,), names={"name in the weights": "name in the module"})'
        )
    if weights is None:
        with torch.no_grad():
            module.load_state_dict(state, strict=False)
        return
    _require_plain(module, wanted)
    for name, value in wanted.items():
        if weights.place(value) is not None:
            weights.take(value, partial(read, name))
        else:
            with torch.no_grad():
                value.copy_(read(name))


def _require_plain(module: nn.Module, wanted: Mapping[str, Any]) -> None:
    """See that loading a state dict does nothing but copy tensors; raises NotRecorded."""
    import torch

    from sparkdl.serialization.recorded.recipe import NotRecorded

    for name, part in module.named_modules():
        owners = [type(part)._load_from_state_dict, type(part).load_state_dict]
        are_torchs = all(one.__module__.startswith("torch.nn.modules.") for one in owners)
        if not are_torchs or part._load_state_dict_pre_hooks or part._load_state_dict_post_hooks:
            raise NotRecorded(f"{name or type(part).__name__} has a way of its own to load weights")
    if not all(isinstance(value, torch.Tensor) for value in wanted.values()):
        raise NotRecorded("its state dict holds more than tensors")


def _source(value: Any, weights_only: bool) -> Any:
    """Return what is kept of what the user gave: a path, or a plain state dict."""
    if isinstance(value, str | os.PathLike):
        path = os.fspath(value)
        if path.endswith(_PICKLED) and not weights_only:
            if scheme_of(path) is None and not os.path.lexists(path):
                raise ConfigError(f"there is no file {path}")
            raise ConfigError(
                f"{without_password(path)} is a pickle, which can run code; pass "
                "InitialWeights(source=..., weights_only=True), which reads nothing but tensors "
                "and plain values of it"
            )
        return absolute(path)
    from torch import nn

    module = value if isinstance(value, nn.Module) else getattr(value, "module", None)
    state = module.state_dict() if isinstance(module, nn.Module) else value
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise ConfigError(
            "initialWeights must be a fitted model, a module, a state dict, or the path of a saved "
            f"model or {_SUFFIX} file; received {type(value).__name__}"
        )
    return dict(state)


def _shown(source: Any) -> str:
    return without_password(source) if isinstance(source, str) else "weights in memory"


def _state(initial: InitialWeights) -> dict[str, Any]:
    source = initial.source
    if not isinstance(source, str):
        return dict(source)
    if initial.weights_only:
        return _of_torch_save(source, initial.key)
    file = _safetensors(source)
    if file is None:
        from sparkdl.serialization.load import open_saved

        return open_saved(source).weights()
    from safetensors import SafetensorError
    from safetensors.torch import load

    storage, names = _named_files(file)
    found: dict[str, Any] = {}
    for name in names:
        try:
            found |= load(storage.read(name))
        except SafetensorError as error:
            name = without_password(file.removesuffix(file.rpartition("/")[2]) + name)
            raise StorageError(f"{name} is no whole file of safetensors: {error}") from error
    return found


def _files(initial: InitialWeights) -> SafetensorsFiles | None:
    """The source, to be read tensor by tensor; None: it is no file of safetensors."""
    source = initial.source
    file = _safetensors(source) if isinstance(source, str) and not initial.weights_only else None
    if file is None:
        return None
    from sparkdl.storage.sharded_weights import SafetensorsFiles

    storage, names = _named_files(file)
    return SafetensorsFiles(storage, "", names)


def _safetensors(source: str) -> str | None:
    """The file of safetensors, or index of such files, that a source means; None: another kind."""
    if source.endswith((_SUFFIX, _INDEX)):
        return source
    folder, name = open_place(source), f"model{_INDEX}"
    is_bare = folder.exists(name) and not folder.exists(_SAVED)
    return f"{source.rstrip('/')}/{name}" if is_bare else None


def _named_files(source: str) -> tuple[Folder, list[str]]:
    """The files of a source of safetensors: itself, or those that an index names."""
    storage, name = open_parent(source)
    if not name.endswith(_INDEX):
        return storage, [name]
    try:
        names = sorted(set(json.loads(storage.read(name))["weight_map"].values()))
        if not all(isinstance(one, str) and "/" not in one for one in names):
            raise ValueError("weight_map must name files beside it")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(
            f"{without_password(source)} is no index of safetensors files: "
            f"{type(error).__name__}: {error}"
        ) from error
    return storage, names


def _of_torch_save(path: str, key: str) -> dict[str, Any]:
    """The state dict in a file of ``torch.save``, read without running anything of it.

    ConfigError if it holds more than tensors and plain values, or no state dict; StorageError if it
    cannot be read.
    """
    import torch

    shown = without_password(path)
    storage, name = open_parent(path)
    try:
        found = torch.load(io.BytesIO(storage.read(name)), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = re.search(r"Unsupported (?:global|class|operand)[^.]*\S*", str(error))
        raise ConfigError(
            f"{shown} is refused by torch's restricted unpickler"
            f"{f' ({reason[0]})' if reason else ''}: it holds more than tensors and plain values, "
            "or is none of torch.save; save the state dict alone, with "
            "torch.save(module.state_dict(), path)"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        first = str(error).partition("\n")[0]
        raise StorageError(f"{shown} is no whole file of torch.save: {first}") from error
    entries = found if isinstance(found, Mapping) else {}
    chosen = entries.get(key, {}) if key else entries
    if not isinstance(chosen, Mapping) or not _is_state(chosen):
        raise ConfigError(
            f"{shown} has the entries {some_of(list(map(str, entries))) or '(none)'}, and "
            f"{f'key={key!r}' if key else 'it'} is no state dict; name the entry that is one: "
            "InitialWeights(source=..., weights_only=True, key=...)"
        )
    return dict(chosen)


def _is_state(value: Mapping[Any, Any]) -> bool:
    """Return True if it is flat and has a tensor."""
    import torch

    is_flat = all(isinstance(k, str) and not isinstance(v, Mapping) for k, v in value.items())
    return is_flat and any(isinstance(v, torch.Tensor) for v in value.values())


def _alike(missing: Sequence[str], superfluous: Sequence[str]) -> str:
    """Say which of the weights' names are like those that the module misses."""
    pairs = [(name, difflib.get_close_matches(name, superfluous, n=1)) for name in missing[:5]]
    shown = [f"{close[0]} for {name}" for name, close in pairs if close]
    if shown or not missing or not superfluous:
        return f"; alike are {', '.join(shown)}" if shown else ""
    return f"; the weights have {some_of(superfluous)}"


def _agree(ours: Any, theirs: Any) -> bool:
    import torch
    from torch.nn.parameter import is_lazy

    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return type(ours) is type(theirs)
    is_same_kind = ours.is_floating_point() == theirs.is_floating_point()
    return is_same_kind and (is_lazy(ours) or ours.shape == theirs.shape)


def _lost(
    wanted: Mapping[str, Any], state: Mapping[str, Any], read: Callable[[str], Any]
) -> Iterator[str]:
    """Yield a message for each thing that copying would change silently."""
    import torch
    from torch.nn.parameter import is_lazy

    first: dict[Any, str] = {}
    for name, ours in wanted.items():
        theirs = state.get(name)
        if not isinstance(ours, torch.Tensor) or theirs is None or not _agree(ours, theirs):
            continue
        if theirs.dtype != ours.dtype and not _fits(read(name), ours.dtype):
            yield f"{name} has numbers in the weights that {_kind(ours)} of the module cannot hold"
        if is_lazy(ours):
            continue
        memory = ours.untyped_storage()._cdata, ours.storage_offset()
        other = first.setdefault((memory, ours.shape, ours.stride()), name)
        if other == name or not ours.numel():
            continue
        if not torch.equal(read(name).to(ours.dtype), read(other).to(ours.dtype)):
            yield f"{name} and {other} are one tensor in the module, but differ in the weights"


def _fits(value: Any, dtype: Any) -> bool:
    """Return True if a cast keeps the numbers: floating ones but for rounding, others exactly."""
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
