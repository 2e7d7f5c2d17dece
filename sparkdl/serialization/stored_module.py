"""A module whose weights lie in a storage, and which nobody holds whole until it is asked for.

The rest of the module, buffers included, is small and travels with it. Its parameters are named
only, and whoever needs it gives them values: those of the files, or none at all.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from sparkdl.errors import ConfigError, StorageError
from sparkdl.mesh import Mesh
from sparkdl.serialization.travel.packed_module import PackedModule, pack, unpack
from sparkdl.storage.sharded_weights import ShardedWeights
from sparkdl.storage.storage import Folder, open_storage, without_password
from sparkdl.storage.tensor_tree import DTYPES
from sparkdl.sync.frozen_layers import evaluating

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class WeightsAt:
    """The place of weights, for whatever process. Picklable and small."""

    url: str
    """A path or URL; see `Folder.url`. It may hold a password."""
    path: str
    """The folder in it."""

    def __str__(self) -> str:
        return f"{without_password(self.url).rstrip('/')}/{self.path}"

    @property
    def digest(self) -> str:
        """Names the place."""
        return hashlib.sha256(f"{self.url}\n{self.path}".encode()).hexdigest()

    def open(self, folder: Folder | None = None) -> ShardedWeights:
        """The weights, as an executor reaches them; StorageError if they are not there, or damaged.

        ``folder``: the storage, if this process reaches it another way.
        """
        try:
            return ShardedWeights(folder or open_storage(self.url), self.path)
        except StorageError as error:
            raise StorageError(
                f"the weights of the model cannot be read from {self}: {error}; they must stay "
                "there while the model, or a DataFrame that it has transformed, is used; "
                "model.save(path) copies them"
            ) from error


@dataclass(frozen=True, kw_only=True)
class StoredModule:
    """A module and the place of its weights. Runs on the driver."""

    packed: PackedModule
    """The module without its weights; see `pack`."""
    weights: ShardedWeights = field(compare=False)
    """As the driver reaches them."""
    at: WeightsAt
    """The same for other processes."""
    mesh: Mesh | None = None
    """Along which the model was trained."""
    is_reached: bool | None = None
    """True if executors open the place by themselves, as a fit has seen; None: not known."""
    _whole: dict[str, weakref.ref[nn.Module]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @classmethod
    def of(cls, module: nn.Module, folder: Folder, path: str, **others: Any) -> StoredModule:
        """A module of which the folder has the weights, and the values of the buffers.

        Args:
            module: whatever values its parameters have, on the meta device too. Its buffers get
                theirs, and it is in evaluation mode then.
            folder: the storage, as the driver reaches it.
            path: in it.
            others: fields.

        Raises:
            StorageError: the files are damaged, or lack a tensor of the module.
        """
        weights = ShardedWeights(folder, path)
        give_buffers(evaluating(module), weights)
        packed = pack(module, with_weights=False)
        at = WeightsAt(url=folder.url, path=path)
        return cls(packed=packed, weights=weights, at=at, **others)

    def check(self) -> None:
        """See that the weights are still there; raises StorageError."""
        self.at.open(self.weights.folder)

    @property
    def blank(self) -> nn.Module:
        """The module, whose parameters are on the meta device; a new one each time."""
        return unpack(self.packed.skeleton, self.packed.tensors, self.weights.blank)

    @property
    def module(self) -> nn.Module:
        """The module with its weights, on the CPU; the same one as long as somebody holds it."""
        known = self._whole.get("module")
        module = None if known is None else known()
        if module is None:
            module = _filled(self.packed, self.weights)
            self._whole["module"] = weakref.ref(module)
        return module

    def shown(self) -> nn.Module:
        """The module with `FakeTensor` for weights, which computes shapes and types only."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        blank = self.blank
        with FakeTensorMode(allow_non_fake_inputs=True):
            memo: dict[int, Any] = {
                id(p): nn.Parameter(torch.empty(p.shape, dtype=p.dtype), p.requires_grad)
                for p in blank.parameters()
            }
        twin: nn.Module = copy.deepcopy(blank, memo)
        return twin


def seen(module: nn.Module | StoredModule, look: Callable[[nn.Module], T]) -> T:
    """Return what ``look`` finds when it runs a module on zeros, for shapes and types only.

    The weights are not read for that, unless the module does not run without.
    """
    if isinstance(module, nn.Module):
        return look(module)
    try:
        return look(module.shown())
    except ConfigError as error:
        if error.__cause__ is None:  # an output that the module does not have, or the like
            raise
        return look(module.module)
    except Exception:  # whatever a module, or what is made of its outputs, may ask of it
        logger.info("the module does not run without its weights, which are read therefore")
        return look(module.module)


def with_values(blank: nn.Module, weights: ShardedWeights) -> nn.Module:
    """A module whose parameters are on the meta device, with those of the files.

    Those of a local file are its pages until they are written to.
    """
    return _filled(pack(blank, with_weights=False), weights)


def _filled(packed: PackedModule, weights: ShardedWeights) -> nn.Module:
    return unpack(packed.skeleton, packed.tensors, weights.read)


def give_buffers(module: nn.Module, weights: ShardedWeights) -> None:
    """Give a module the buffers that are in the files; StorageError if these are of another one."""
    parameters = dict(nn.Module.named_parameters(module, remove_duplicate=False))
    for name, value in module.state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise StorageError(
                f"{name} is no tensor, so files of weights have none; save the model again"
            )
        found = weights.blank(name) if name in weights else None
        if found is None or found.shape != value.shape or found.dtype != value.dtype:
            raise StorageError(
                f"{weights.path} has {'no tensor' if found is None else _kind(found)} for {name}, "
                f"which is {_kind(value)} in the module; use the files and the code of one model"
            )
        if name not in parameters:
            value.copy_(weights.read(name))


def _kind(value: torch.Tensor) -> str:
    return f"{value.dtype} {tuple(value.shape)}"


def can_be_stored(module: nn.Module) -> bool:
    """True if its state dict is made of tensors only, which files of weights can hold."""
    return all(
        isinstance(value, torch.Tensor)
        and not is_lazy(value)
        and value.layout is torch.strided
        and value.dtype in DTYPES
        for value in module.state_dict().values()
    )


@contextmanager
def without_values() -> Iterator[None]:
    """Modules that this thread makes meanwhile have their parameters on the meta device."""
    own = threading.get_ident()
    made: Any = WeakIdKeyDictionary()

    def moved(module: nn.Module, name: str, parameter: Any) -> Any:
        if parameter is None or threading.get_ident() != own:
            return parameter
        if parameter.is_meta or is_lazy(parameter):
            return parameter
        if parameter not in made:  # one that is registered twice stays one
            blank = torch.empty_like(parameter, device="meta")
            made[parameter] = nn.Parameter(blank, parameter.requires_grad)
        return made[parameter]

    hook = register_module_parameter_registration_hook(moved)
    try:
        yield
    finally:
        hook.remove()
