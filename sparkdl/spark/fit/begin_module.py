"""The module that a fit starts from: one of our own, made or taken from the user."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.mesh import Mesh
from sparkdl.runtime.arguments import takes
from sparkdl.runtime.process import borrowed_generator
from sparkdl.runtime.tracebacks import arose_in
from sparkdl.serialization.initial_weights import load_initial_weights
from sparkdl.serialization.program.shared_objects import shared_values
from sparkdl.serialization.travel.packed_module import travelled
from sparkdl.serialization.travel.shared_values import SharedValue
from sparkdl.spark.fit.check_travels import check_travels
from sparkdl.spark.run.run import FitRequest
from sparkdl.storage.tensor_tree import pack

if TYPE_CHECKING:
    from torch import nn

    from sparkdl.serialization.recorded.recipe import RecordedWeights

logger = logging.getLogger(__name__)

HALF = ("bfloat16", "float16")
"""dtypes that floating features have in ``forward`` only."""


@dataclass(frozen=True, kw_only=True)
class BegunModule:
    """A module to start from."""

    module: nn.Module
    """A module of our own, on the CPU."""
    weights: RecordedWeights | None = None
    """Values of its parameters if these are on the meta device; None: they have their values."""
    shared: tuple[SharedValue, ...] = ()
    """The objects that it and what else is in the configuration had in common."""

    @property
    def float_dtype(self) -> str:
        """The dtype of floating features."""
        return floating_dtype(self.module)


def begin_module(request: FitRequest) -> BegunModule:
    """Make the module to start from; see `make_module`.

    Where a mesh divides what a factory makes, its parameters are on the meta device, and their
    weights beside it: the driver never has all of them.
    """
    from torch import nn

    from sparkdl.serialization.recorded.recipe import NotRecorded
    from sparkdl.serialization.recorded.recording import recorded

    mesh, reason = request.config.parallelism, None
    is_factory = not isinstance(request.module, nn.Module) and callable(request.module)
    if is_factory and isinstance(mesh, Mesh) and mesh.is_divided:
        try:
            with borrowed_generator(request.config.seed):
                module, weights = recorded(request.module)
            check_travels(vars(request.config), module)
            shared = shared_values(module, vars(request.config))
            module = travelled(module, weights, copies=False)
        except Exception as error:  # also what the factory raises only here
            reason = f"{type(error).__name__}: {error}"
        else:
            try:
                if request.initial_weights is not None:
                    load_initial_weights(module, request.initial_weights, weights=weights)
                return BegunModule(module=module, weights=weights, shared=shared)
            except NotRecorded as error:
                reason = str(error)
    made = make_module(request)
    if reason is not None:
        logger.info("the driver makes the whole module before it is divided: %s", reason)
    return made


def make_module(request: FitRequest) -> BegunModule:
    """Make a module of our own, on the CPU, to start from.

    Raises:
        ConfigError: it is no module, it cannot be made, or the weights are not of this one.
        StorageError: the weights cannot be read.
    """
    from torch import nn

    from sparkdl.serialization.initial_weights import load_initial_weights

    owners = vars(request.config)
    if isinstance(request.module, nn.Module):
        shared = shared_values(request.module, owners)
        module = travelled(request.module, copies=True)
    else:
        try:
            with borrowed_generator(request.config.seed):
                module = request.module()
        except Exception as error:  # whatever the user's class or function raises
            name = getattr(request.module, "__qualname__", repr(request.module))
            remedy = "correct the arguments (model.args in a job file), or what makes it"
            if isinstance(request.module, type) and not takes(request.module):
                remedy = (
                    f"pass {name}(...) or functools.partial({name}, ...) (in a job file model.args)"
                )
            elif type(request.module).__module__.startswith("torch.export"):
                name = type(request.module).__name__
                remedy = "give the module that was exported, which can train"
            elif not takes(request.module):
                remedy = "it is called without arguments: give it these by functools.partial"
            elif "before Module.__init__() call" in str(error):
                remedy = "begin its __init__ with super().__init__()"
            elif arose_in(error, "torch.cuda"):
                remedy = "make it on the CPU: each worker moves it to its own device"
            raise ConfigError(
                f"module cannot be made: {name} raised {type(error).__name__}: {error}; {remedy}"
            ) from error
        if not isinstance(module, nn.Module):
            shown, remedy = type(module).__name__, ""
            if isinstance(module, type):
                shown, name = f"the class {module.__name__}", module.__name__
                remedy = f"; pass module={name}, or let it return {name}()"
            raise ConfigError(
                "module must be a torch.nn.Module or a callable that returns one; it returned "
                f"{shown}{remedy}"
            )
        check_travels(owners, module)  # it may be one that is kept
        shared = shared_values(module, owners)
        module = travelled(module, copies=False)
    _require_values(module)
    module = module.cpu()  # also what a class of its own keeps
    if request.initial_weights is not None:
        load_initial_weights(module, request.initial_weights)
    return BegunModule(module=module, shared=shared)


def floating_dtype(module: nn.Module) -> str:
    """The dtype of most of a module's floating values, in which it gets floating features.

    Complex values count as their parts.
    """
    import torch
    from torch import nn

    counts: Counter[str] = Counter()
    for tensor in [*module.parameters(), *module.buffers()]:
        is_known = tensor.is_floating_point() or tensor.is_complex()
        if is_known and not nn.parameter.is_lazy(tensor):
            part = torch.empty((), dtype=tensor.dtype, device="meta").real.dtype
            counts[str(part).removeprefix("torch.")] += tensor.numel()
    found = counts.most_common(1)[0][0] if counts else "float32"
    return found if found in ("float64", *HALF) else "float32"


def _require_values(module: nn.Module) -> None:
    """Refuse a module on the meta device, or one that cannot come back; raises ConfigError."""
    from torch.nn.parameter import is_lazy

    for name, value in [*module.named_parameters(), *module.named_buffers()]:
        if value.is_meta:
            raise ConfigError(
                f"the module is on the meta device: {name} has a shape, but no numbers; make it "
                "without torch.device('meta') and torch.set_default_device('meta'), or give it "
                "weights with to_empty and load_state_dict"
            )
    if any(is_lazy(value) for value in module.parameters()):
        return
    try:
        pack(dict(module.state_dict()))
    except CheckpointError as error:
        raise ConfigError(
            f"the weights of the module cannot be sent back from the workers: {error}"
        ) from error
