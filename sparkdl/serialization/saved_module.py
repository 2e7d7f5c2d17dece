"""A fitted module as a folder of files, loaded without unpickling anything.

``module.json`` says how to make the module (a factory, a description, or an exported program).
``weights.safetensors`` holds the state dict. ``unlisted.safetensors`` is there only if the factory
makes what a state dict leaves out otherwise than it is (see `find_unlisted`). ``program.pt2`` is
there only if neither a factory nor a description could be written. `atomic_folder` checks that the
folder is whole before anything in it is used. Whoever can write the folder can also name another
factory, but only one in code that `trust` admits.

No copy of all weights is made to save them. To load them takes the file in memory beside the
module. Weights that lie in a storage already are copied file by file, see
`storage.sharded_weights`, and are read tensor by tensor when they are needed.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from sparkdl.errors import CheckpointError, ConfigError, SparkDLError, StorageError
from sparkdl.runtime.process import borrowed_generator, default_dtype
from sparkdl.serialization.compare_modules import (
    CODE,
    find_difference,
    is_equal,
    repeated_attributes,
    slots_of,
    state_of,
)
from sparkdl.serialization.example_inputs import Given
from sparkdl.serialization.exported_program import read_program, write_program
from sparkdl.serialization.json_objects import DescribeError, check_name, describe, restore
from sparkdl.serialization.stored_module import (
    StoredModule,
    give_buffers,
    with_values,
    without_values,
)
from sparkdl.serialization.trust import INDEX, USUAL, Trust
from sparkdl.storage import sharded_weights
from sparkdl.storage.atomic_folder import REMEDY, read_files, read_index, write_folder
from sparkdl.storage.checkpoint_format import decode, encode, views
from sparkdl.storage.sharded_weights import ShardedWeights
from sparkdl.storage.storage import Data, Folder, Storage, without_password
from sparkdl.storage.tensor_tree import Snapshot, pack
from sparkdl.sync.frozen_layers import evaluating
from sparkdl.sync.module_tensors import misfit

VERSION = 3
"""Version of the layout. 1 had no sum of the index itself, 2 no weights in several files; every
version that there was is read."""
_WRITTEN, _SHARDED = 2, 3
"""Versions that are written: of weights in one file, which earlier ones read, and in several."""
WEIGHTS = "weights.safetensors"
_UNLISTED = "unlisted.safetensors"
_PROGRAM = "program.pt2"
_WAYS = ("factory", "module", "program", "weights")
_QUOTES = frozenset("\"'\\")
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32,
           "float64": torch.float64}  # fmt: skip
"""Names of what torch's default dtype may have been; files of earlier versions have none."""
_LAZY = "a tensor without a shape yet"
_MISSING = object()
_OWN = {*vars(nn.Module()), "_compiled_call_impl"}
"""Attributes that torch keeps in each module: registers, hooks, the mode, a compiled twin."""


@dataclass(frozen=True, kw_only=True)
class PreparedModule:
    """A module that can be saved; what could fail on the driver has been done."""

    index: Mapping[str, Any]
    weights: Snapshot | ShardedWeights
    """The module's own tensors, or the files that have them."""
    unlisted: Snapshot | None = None
    """More of them, which the state dict does not list."""
    others: Mapping[str, bytes]
    """The other files by name."""

    def write(self, storage: Storage, path: str) -> None:
        """Write the folder ``path`` in pieces, the index last; StorageError if that fails."""
        files: dict[str, Data] = {}
        if isinstance(self.weights, Snapshot):
            files[WEIGHTS] = encode(self.weights)
        else:
            files |= {name: self.weights.pieces(name) for name in self.weights.files}
            files[sharded_weights.INDEX] = self.weights.index
        files |= self.others
        if self.unlisted is not None:
            files[_UNLISTED] = encode(self.unlisted)
        write_folder(storage, path, INDEX, self.index, files)


@dataclass(frozen=True, kw_only=True)
class SavedModule:
    """A saved module whose files were read and found whole; nothing was made of them."""

    place: str
    """Its folder, for messages."""
    index: Mapping[str, Any]
    files: Mapping[str, bytes] = field(repr=False)
    trust: Trust = USUAL
    """The code that may be imported and called to make it."""
    sharded: ShardedWeights | None = None
    """The weights, if they lie in several files, which are not in ``files``."""

    def make(self) -> nn.Module:
        """The module, in evaluation mode on the CPU.

        StorageError if the exported program holds what could run code while it is read; ConfigError
        if the code that makes the module is not importable here, or has changed, or is not trusted.
        """
        recipe = self.index["recipe"]
        if "weights" in recipe:
            raise StorageError(f"{self.place} holds weights only; load them into a module")
        if "program" in recipe:
            return read_program(self.files[_PROGRAM], self.trust)
        if self.sharded is not None:
            return with_values(self.make_blank(), self.sharded)
        with self._odd_values():
            module = self._made()
            _load_weights(module, self.weights(), recipe)
            return self._completed(module).cpu()

    def make_blank(self) -> nn.Module:
        """The module of which ``sharded`` has the weights, with its parameters on the meta device.

        Errors are those of `make`.
        """
        assert self.sharded is not None
        with self._odd_values():
            with without_values():
                module = self._made()
            state = module.state_dict()
            names = [*self.sharded.names, *self.sharded.ties]
            _check_kinds(state, {name: self.sharded.blank(name) for name in names})
            _freeze(module, self.index["recipe"])
            give_buffers(module, self.sharded)
            return self._completed(module)

    @contextlib.contextmanager
    def _odd_values(self) -> Iterator[None]:
        """Raise what the code that makes the module raises, given the file's values, as our own."""
        try:
            yield
        except SparkDLError:
            raise
        except Exception as error:  # constructors and torch raise whatever they like
            remedy = ""
            if isinstance(error, FileNotFoundError):
                remedy = "; its code reads a file: let it name the whole path, or hold the contents"
            raise ConfigError(
                f"{self.place} holds a module that cannot be made: {type(error).__name__}: {error}"
                f"{remedy}"
            ) from error

    def _made(self) -> nn.Module:
        """The module as its code makes it."""
        recipe = self.index["recipe"]
        described = recipe["factory"] if "factory" in recipe else recipe["module"]
        with default_dtype(_DTYPES.get(recipe.get("dtype"), torch.get_default_dtype())):
            restored = restore(described, self.trust)
            module = _make(restored) if "factory" in recipe else restored
        if not isinstance(module, nn.Module):
            raise StorageError(f"{self.place}/{INDEX} describes no module, but a {type(module)}")
        _check_names(module)
        return module

    def _completed(self, module: nn.Module) -> nn.Module:
        """The module with what its weights lack."""
        if _UNLISTED in self.files:
            give_unlisted(module, decode(self.files[_UNLISTED], f"{self.place}/{_UNLISTED}"))
            name = misfit(module)
            if name is not None:
                raise ConfigError(
                    f"a saved file gives the layer {name!r} sizes that its weights lack"
                )
        return evaluating(module)

    def weights(self) -> dict[str, Any]:
        """The state dict; its tensors are views of the file and must not be written to."""
        if self.sharded is not None:
            return {n: self.sharded.read(n) for n in (*self.sharded.names, *self.sharded.ties)}
        weights = views(self.files[WEIGHTS], f"{self.place}/{WEIGHTS}")
        if not isinstance(weights, dict):
            raise StorageError(f"{self.place}/{WEIGHTS} holds no state dict; save it again")
        return weights

    def extra(self) -> dict[str, Any]:
        """Return what was saved along with the module; imports what it names."""
        extra: dict[str, Any] = restore(self.index["extra"], self.trust)
        return extra


def prepare_module(
    module: nn.Module,
    factory: Any | None,
    *,
    example_inputs: Given | None,
    extra: Mapping[str, Any],
    others: Mapping[str, bytes] | None = None,
) -> PreparedModule:
    """Find out how a module on the CPU can be made again, and do all of saving but the writing.

    The module is left as it was, and must be left until it is written. ``factory``, if there is
    one, is an importable callable without arguments (or `functools.partial`) that makes such a
    module; ``example_inputs`` are needed for an exported program only, see `write_program`;
    `SavedModule.extra` gives ``extra`` back, see `json_objects.describe`; ``others`` are further
    files by name. ConfigError, with causes and remedies, if the module cannot be made again in any
    of the three ways, or ``factory`` makes another one.
    """
    recipe, files, unlisted = _find_way(module, factory, example_inputs)
    # Plain dicts: names and tensors are all that another reader of safetensors needs.
    return replace(
        prepare_weights(dict(module.state_dict())),
        index={"version": _WRITTEN, "extra": describe(dict(extra)), "recipe": recipe},
        unlisted=Snapshot(*pack(unlisted)) if unlisted else None,
        others={**(others or {}), **files},
    )


def why_not_saved(module: nn.Module, factory: Any | None) -> str | None:
    """Why `prepare_module` will refuse a module, as far as that shows without trying to export it.

    None: it may well be saved.
    """
    reason = None
    for name, part in module.named_modules():
        keys = [key for key, value in vars(part).items() if isinstance(value, torch.Generator)]
        if isinstance(part, torch.jit.ScriptModule):
            reason = f"{f'its layer {name}' if name else 'it'} is scripted"
        elif keys:
            reason = f"its attribute {f'{name}.{keys[0]}'.lstrip('.')} is a torch.Generator"
    if reason is None:
        return None
    try:
        describe(module if factory is None else factory)
    except DescribeError as error:
        return f"{reason}, which torch.export refuses, and {error}"
    return None


def is_described(module: nn.Module, factory: Any | None) -> bool:
    """True if a file of code has what makes a module, so that it needs not be exported."""
    for one in (factory, module):
        with contextlib.suppress(DescribeError):
            if one is not None:
                describe(one)
                return True
    return False


def prepare_stored(
    stored: StoredModule,
    factory: Any | None,
    *,
    example_inputs: Given | None,
    extra: Mapping[str, Any],
    others: Mapping[str, bytes],
) -> PreparedModule:
    """Like `prepare_module`, for a module whose weights lie in a storage, without reading them.

    If it can only be saved as an exported program, its weights are read, all of them.
    """
    module = stored.blank
    try:
        with without_values():
            recipe, files, unlisted = _find_way(module, factory, None)
    except ConfigError:
        return prepare_module(
            stored.module, factory, example_inputs=example_inputs, extra=extra, others=others
        )
    return PreparedModule(
        index={"version": _SHARDED, "extra": describe(dict(extra)), "recipe": recipe},
        weights=stored.weights,
        unlisted=Snapshot(*pack(unlisted)) if unlisted else None,
        others={**others, **files},
    )


def prepare_weights(state: Mapping[str, Any]) -> PreparedModule:
    """Prepare a state dict, of which `SavedModule.weights` can be asked, but no module."""
    tensors = {n: v.detach().cpu() for n, v in state.items() if isinstance(v, torch.Tensor)}
    return PreparedModule(
        index={"version": _WRITTEN, "extra": describe({}), "recipe": {"weights": WEIGHTS}},
        weights=Snapshot(*pack({**state, **tensors})),
        others={},
    )


def prepare_program(
    module: nn.Module, *, example_inputs: Given, extra: Mapping[str, Any]
) -> PreparedModule:
    """Prepare a module as an exported program, which needs none of the module's own code.

    ``extra`` is what `SavedModule.extra` gives back, described already; the rest, and errors, are
    those of `exported_program.write_program`.
    """
    archive = write_program(module, example_inputs)
    index = {"version": _WRITTEN, "extra": extra, "recipe": {"program": _PROGRAM}}
    return replace(
        prepare_weights(dict(module.state_dict())), index=index, others={_PROGRAM: archive}
    )


def open_module(
    storage: Folder, path: str, trust: Trust = USUAL, *, is_lazy: bool = False
) -> SavedModule:
    """Read a saved module through; nothing is imported or run.

    Of weights in several files one piece at a time is in memory; with ``is_lazy`` only their sizes
    are looked at. StorageError if a file is missing, damaged or of a later version.
    """
    index, trust = read_module_index(storage, path), trust.reading(storage.url)
    place = without_password(str(storage) if path == "." else f"{storage}/{path}")
    if sharded_weights.INDEX not in index["files"]:
        files = read_files(storage, path, index)
        return SavedModule(place=place, index=index, files=files, trust=trust)
    sharded = ShardedWeights(storage, path)
    records = index["files"]
    for name in sharded.files:
        record = records.get(name)
        check = record and (record.check_size if is_lazy else record.check_pieces)
        if check is None:
            raise StorageError(f"{path}/{INDEX} is damaged: it does not know of {name}")
        check(sharded.size(name) if is_lazy else sharded.pieces(name), f"{path}/{name}", REMEDY)
    small = {name: record for name, record in records.items() if name not in sharded.files}
    files = read_files(storage, path, {"files": small})
    return SavedModule(place=place, index=index, files=files, trust=trust, sharded=sharded)


def read_module_index(storage: Folder, path: str) -> dict[str, Any]:
    """Read what ``module.json`` says; the other files are not looked at.

    StorageError if it is missing, damaged or of a later version.
    """
    index = read_index(storage, path, INDEX, range(1, VERSION + 1))
    recipe, files = index.get("recipe"), index["files"]
    ways = set(_WAYS) & set(recipe if isinstance(recipe, dict) else ())
    needed = {sharded_weights.INDEX if index["version"] == _SHARDED else WEIGHTS}
    if "program" in ways:
        needed.add(_PROGRAM)
    if len(ways) != 1 or not needed <= set(files) or "extra" not in index:
        raise StorageError(f"{path}/{INDEX} is damaged: it does not say how to make the module")
    return index


_Way = tuple[Mapping[str, Any], Mapping[str, bytes], Mapping[str, Any]]
"""The way to make a module again: the recipe, files for it, and what `find_unlisted` found."""


def _find_way(module: nn.Module, factory: Any | None, example_inputs: Given | None) -> _Way:
    """The first of the three ways that will do."""
    dtype = _default_dtype_of(module, factory)
    with default_dtype(dtype):
        way = _way_of_code(module, factory)
    if not isinstance(way, DescribeError):
        recipe, others, unlisted = way
        return {**recipe, "dtype": str(dtype).removeprefix("torch.")}, others, unlisted
    try:
        if example_inputs is None:
            raise ConfigError("an exported program needs example inputs, and there are none")
        return {"program": _PROGRAM}, {_PROGRAM: write_program(module, example_inputs)}, {}
    except ConfigError as error:
        raise ConfigError(
            f"the module cannot be saved without pickle: {way}. Nor as an exported "
            f"program, which needs no class: {error}"
        ) from error


def _default_dtype_of(module: nn.Module, factory: Any | None) -> torch.dtype:
    """Return torch's default dtype under which the code makes such a module: mostly that of now.

    Under another one the code may make weights of other dtypes.
    """
    now = torch.get_default_dtype()
    values = module.state_dict().values()
    own = {v.dtype for v in values if isinstance(v, torch.Tensor) and not is_lazy(v)}
    others = [dtype for dtype in (torch.float32, torch.float64) if dtype in own - {now}]
    for dtype in (now, *others) if others else ():
        with default_dtype(dtype), contextlib.suppress(ConfigError):
            if not isinstance(_way_of_code(module, factory), DescribeError):
                return dtype
    return now


def _way_of_code(module: nn.Module, factory: Any | None) -> _Way | DescribeError:
    """The way by the factory or by a description, or the reason why neither can be written.

    ConfigError if the factory makes a module of another structure.
    """
    causes = []  # that of the factory is told before that of the module, which mostly is the same
    if factory is not None:
        try:
            return _factory_way(module, factory)
        except DescribeError as error:
            causes.append(error)
    try:
        return {"module": describe(module)}, {}, {}
    except DescribeError as error:
        causes.append(error)
    if factory is None:  # its class may make it, but for attributes that training has changed
        with contextlib.suppress(ConfigError, TypeError):
            return _factory_way(module, type(module))
    return causes[0]


def _factory_way(module: nn.Module, factory: Any) -> _Way:
    """The factory, and what it makes otherwise.

    DescribeError if it cannot be written, or something of the module's cannot; ConfigError if it
    makes a module of another structure.
    """
    described = describe(factory)
    again = _make(factory)
    difference = find_difference(module, again)
    if difference is not None:
        raise ConfigError(
            f"the factory makes another module than the fitted one: it differs in {difference}; "
            f"pass the factory that made it, with all its arguments"
        )
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    return {"factory": described, "frozen": frozen}, {}, find_unlisted(module, again)


def _make(factory: Any) -> nn.Module:
    if not callable(factory):
        raise ConfigError(f"a factory must be callable; received {factory!r}")
    # What it draws at random is the same when it is compared, to be saved, and when it is loaded.
    with borrowed_generator(seed=0):
        module = factory()
    if not isinstance(module, nn.Module):
        raise ConfigError(f"a factory must make an nn.Module; {factory!r} made {type(module)}")
    return module


def _check_names(module: nn.Module) -> None:
    """Raise ConfigError if a part has a name that would end a string in Python source.

    What makes a module may take names from the file, as ``nn.ModuleDict`` does.
    """
    for part in module.modules():
        for name in (*part._modules, *part._parameters, *part._buffers):
            if not name.isprintable() or not _QUOTES.isdisjoint(name):
                check_name(name)


def _load_weights(module: nn.Module, weights: Mapping[str, Any], recipe: Any) -> None:
    """Copy the weights in; unlike torch, refuse to convert their dtypes."""
    _check_kinds(module.state_dict(), weights)
    # Those are copied; what a module makes of its extra state is its own business.
    copied = {
        *dict(nn.Module.named_parameters(module, remove_duplicate=False)),
        *dict(module.named_buffers()),
    }
    module.load_state_dict(
        {name: value if name in copied else _own(value) for name, value in weights.items()}
    )
    _settle(module)
    _freeze(module, recipe)


def _settle(module: nn.Module) -> None:
    """Let lazy layers whose weights have been loaded be what their first batch makes of them."""
    for part in module.modules():
        lazy: Any = part
        if isinstance(part, LazyModuleMixin) and not lazy.has_uninitialized_params():
            for hook in ("_initialize_hook", "_load_hook"):
                vars(part).pop(hook).remove()
            if lazy.cls_to_become is not None:
                lazy.__class__ = lazy.cls_to_become


def _freeze(module: nn.Module, recipe: Mapping[str, Any]) -> None:
    for name in recipe.get("frozen", ()):
        module.get_parameter(name).requires_grad_(False)


def _check_kinds(state: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
    """Raise ConfigError if weights are not of the module that has ``state``."""
    for name in sorted(state.keys() | weights.keys()):
        ours, theirs = _kind(state.get(name)), _kind(weights.get(name))
        if ours != theirs and ours != _LAZY:
            one, other = state.get(name), weights.get(name)
            cause = "the code that makes the module has changed since it was saved"
            remedy = "use the version that saved it"
            if one is not None and other is not None and _differ_in_precision(one, other):
                cause = "the code that makes the module makes one of another dtype than was saved"
                remedy = (
                    "if the dtype follows from torch's default, call "
                    f"torch.set_default_dtype({other.dtype}) before; else {remedy}"
                )
            raise ConfigError(f"{cause}: {name} is {ours}, saved was {theirs}; {remedy}")


def _differ_in_precision(one: Any, other: Any) -> bool:
    """True of floating tensors of one shape."""
    are_floats = all(isinstance(v, torch.Tensor) and v.is_floating_point() for v in (one, other))
    return are_floats and one.shape == other.shape


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _LAZY if is_lazy(value) else f"{value.dtype} {tuple(value.shape)}"
    return "absent" if value is None else type(value).__name__


def find_unlisted(module: nn.Module, again: nn.Module) -> dict[str, Any]:
    """Find what ``module`` holds otherwise than a module of the same structure that was made anew.

    The result is ``{"buffers": {name: tensor}, "attributes": [(part's name, attribute, value),
    ...]}``, a tree for `tensor_tree.pack` with the module's own tensors; empty if nothing differs.
    Objects of which nobody knows how they compare (functions, locks, generators) are taken for
    equal where both modules hold one of the same type. DescribeError names an attribute that
    differs and cannot be written.
    """
    ours, theirs = _buffers(module), _buffers(again)
    registered = {**_registered(module), **_registered(again)}
    buffers = {n: value for n, value in ours.items() if not is_equal(value, theirs.get(n), {})}
    attributes = list(_attributes(module, again, registered))
    return {"buffers": buffers, "attributes": attributes} if buffers or attributes else {}


def give_unlisted(module: nn.Module, unlisted: Mapping[str, Any]) -> None:
    """Give a module made anew what `find_unlisted` has found; it keeps these very values."""
    for name, value in unlisted["buffers"].items():
        part, _, buffer = name.rpartition(".")
        module.get_submodule(part)._buffers[check_name(buffer)] = value
    for part, key, value in unlisted["attributes"]:
        owner: Any = module.get_submodule(part)
        path = key.split(".")
        if path[0] in _OWN:
            raise ConfigError(f"a saved file sets {key!r}, which is torch's own in each module")
        if any(path[0] in names for names in (owner._parameters, owner._buffers, owner._modules)):
            raise ConfigError(f"a saved file sets {key!r}, which the module has registered")
        for step in path[:-1]:
            owner = vars(owner)[step]
            if isinstance(owner, (nn.Module, *CODE)):
                raise ConfigError(f"a saved file sets {key!r}, which is no attribute of an object")
        if check_name(path[-1]) in slots_of(owner):
            object.__setattr__(owner, path[-1], value)
        else:
            vars(owner)[path[-1]] = value


def _buffers(module: nn.Module) -> dict[str, Any]:
    """The buffers that the state dict leaves out, by name."""
    return {
        f"{name}.{key}".lstrip("."): part._buffers[key]
        for name, part in module.named_modules()
        for key in sorted(part._non_persistent_buffers_set)
    }


def _registered(module: nn.Module) -> dict[int, str]:
    """Return names, by identity, of what comes back by itself wherever a module refers to it."""
    kinds = (module.named_parameters(), module.named_buffers(), module.named_modules())
    return {id(value): name for kind in kinds for name, value in kind}


def _attributes(
    module: nn.Module, again: nn.Module, registered: Mapping[int, str]
) -> Iterator[tuple[str, str, Any]]:
    others = dict(again.named_modules())
    for name, part in module.named_modules():
        ours, made = state_of(part), state_of(others[name]) if name in others else {}
        for key in sorted(ours.keys() - _OWN - repeated_attributes(part)):
            named = f"{name}.{key}".lstrip(".")
            for path, value in _others(ours[key], made.get(key, _MISSING), named, registered):
                yield name, ".".join([key, *path]), value


def _others(
    value: Any,
    made: Any,
    named: str,
    registered: Mapping[int, str],
    seen: frozenset[int] = frozenset(),
) -> Iterator[tuple[list[str], Any]]:
    """Yield what of a value differs from the factory's: the value, or attributes of the object."""
    if id(value) in seen or is_equal(value, made, registered):
        return
    try:
        pack(value)
    except CheckpointError as error:
        ours, theirs = getattr(value, "__dict__", {}), getattr(made, "__dict__", {})
        is_alike = type(value) is type(made) and not isinstance(value, nn.Module)
        has_all = ours.keys() == state_of(value).keys() and not theirs.keys() - ours.keys()
        if not (is_alike and has_all and ours):
            raise DescribeError(
                f"the attribute {named} is not what the factory makes and cannot be written, being "
                f"of {type(value)}; set it in the factory, or register it as a buffer"
            ) from error
        seen |= {id(value)}
        for key in sorted(ours):
            own, other = f"{named}.{key}", theirs.get(key, _MISSING)
            for path, one in _others(ours[key], other, own, registered, seen):
                yield [key, *path], one
    else:
        yield [], value
