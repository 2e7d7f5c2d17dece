"""The checks of a fit whose model is divided along a mesh, before its first job."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sparkdl.config import TrainConfig
from sparkdl.errors import ClusterError, ConfigError
from sparkdl.explain.mesh_memory import (
    MeshMemory,
    StateSize,
    memory_table,
    mesh_memory,
    smallest_that_fits,
    state_sizes,
)
from sparkdl.mesh import Mesh
from sparkdl.report.page.formats import size
from sparkdl.runtime.process import borrowed_generator
from sparkdl.serialization.program.program_state import program_kept
from sparkdl.spark.cluster.cluster_info import INTERPRETER_BYTES, ClusterInfo, Get, parse_bytes
from sparkdl.spark.run.run import FitRequest
from sparkdl.sync.collective import CollectiveStrategy
from sparkdl.sync.gradients.allreduce import AllReduce

if TYPE_CHECKING:
    import torch
    from torch import nn

    from sparkdl.sync.strategy import MakeOptimizer

logger = logging.getLogger(__name__)

_ELEMENTWISE = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD",
)  # fmt: skip
"""Torch's optimizers that treat each number of a parameter by itself."""


def check_mesh(request: FitRequest, module: nn.Module, mode: str, *, has_logs: bool) -> None:
    """Refuse a mesh that does not fit the request or the module; raises ConfigError.

    ``has_logs``: the module is a LightningModule.
    """
    mesh, config = request.config.parallelism, request.config
    if mesh is None:
        return
    # Later: they import torch's compiler, which takes seconds.
    import torch
    from torch import nn
    from torch.nn.modules.batchnorm import _NormBase
    from torch.nn.modules.instancenorm import _InstanceNorm
    from torch.nn.parameter import is_lazy

    from sparkdl.serialization.travel.packed_module import num_hooks, sharing_memory
    from sparkdl.sync.divided.dividing import recomputed
    from sparkdl.sync.divided.layout import divided_layers
    from sparkdl.sync.divided.stages import cut_layers

    if not isinstance(mesh, Mesh):
        raise ConfigError(f"parallelism must be a sparkdl.Mesh or None; received {mesh!r}")
    workers = request.num_workers
    if workers not in (None, mesh.size):
        raise ConfigError(
            f"parallelism=Mesh({mesh}) is made of {mesh.size} workers, and numWorkers is "
            f"{workers}; leave numWorkers unset, or choose axes whose product it is"
        )
    lazy = next((name for name, p in module.named_parameters() if is_lazy(p)), None)
    if lazy is not None and mesh.num_shards * mesh.tensor * mesh.pipeline > 1:
        raise ConfigError(
            f"parallelism=Mesh({mesh}): {lazy} is lazy, and what has no shape cannot be divided; "
            "run the module once on some rows before the fit, or name the sizes, as in "
            "nn.Linear(8, 4) for nn.LazyLinear(4)"
        )
    strategy = config.sync_strategy
    obstacle = strategy.why_not_divided(mesh)
    parts = dict(module.named_parameters()) if mesh.is_divided else {}
    sharing = next((" and ".join(names) for names in sharing_memory(parts)), "")
    hooked = next((name for name, parameter in parts.items() if num_hooks(parameter)), "")
    scripts = (n for n, m in module.named_modules() if isinstance(m, torch.jit.ScriptModule))
    scripted = next((name or type(module).__name__ for name in scripts), "")
    summed = isinstance(strategy, CollectiveStrategy)
    shown = {id(parameter) for parameter in module.parameters()}
    hidden = [n for n, p in nn.Module.named_parameters(module) if id(p) not in shown]
    remedies = {
        f"parameters() of the module must not leave out {hidden[:1]}; use frozenLayers": (
            bool(hidden)
        ),
        "executionMode must be 'gang': the workers of a mesh need each other at every step": (
            mode != "gang"
        ),
        f"syncStrategy cannot be {strategy!r}: {obstacle}": obstacle is not None,
        "topology must be 'auto' or 'ring': sums are formed between parts of the mesh": (
            summed and strategy.topology not in ("auto", "ring")
        ),
        "minWorkers must be unset: the product of the axes is the number of workers": (
            request.min_workers is not None
        ),
        "elasticity must be 'rounding'": config.elasticity != "rounding",
        "the module must not be a LightningModule, whose hooks see whole parameters": has_logs,
        "compile must be False: the stages of a pipeline leave the forward pass where they end": (
            mesh.pipeline > 1 and config.compile
        ),
        "compile must be False: torch.compile cannot follow layers that are divided along tensor": (
            mesh.tensor > 1 and config.compile
        ),
        "syncBatchNorm must be False": config.sync_batch_norm,
        "precision must be 'fp32' or 'bf16': no rank sees whether the gradients of all overflow": (
            config.precision == "fp16"
        ),
        "memoryFormat must be 'contiguous': parameters are cut along their first dimension": (
            config.memory_format != "contiguous"
        ),
        "trainingStep must be unset: along a pipeline no worker computes the whole module": (
            mesh.pipeline > 1 and config.training_step is not None
        ),
        "augmentation must be unset: the workers of a pipeline would draw other numbers": (
            mesh.pipeline > 1 and config.augmentation is not None
        ),
        "the module must have no BatchNorm, which would count the rows that fill up the parts of a "
        "batch along a pipeline; use GroupNorm or LayerNorm": (
            mesh.pipeline > 1
            and any(
                isinstance(part, _NormBase)
                and (part.track_running_stats or not isinstance(part, _InstanceNorm))
                for part in module.modules()
            )
        ),
        "numWorkers cannot be 'auto'; leave it unset": "numWorkers" in request.automatic,
        f"Params cannot be 'auto'; set {', '.join(request.automatic)}": bool(request.automatic),
        f"{sharing} must not share memory, of which each would get a copy; let them be one "
        "parameter, self.b.weight = self.a.weight": bool(sharing),
        f"{hooked} must have no hook: parameters are cut into parts; use optimizer=, or "
        "trainingStep=": bool(hooked),
        f"{scripted} must not be scripted or traced, since torch divides no such layer; give the "
        "layer as it was before": bool(scripted) and mesh.is_divided,
        "initialState and keepTrainingState must be unset": (
            request.initial_state is not None or request.keep_training_state
        ),
    }
    for remedy, is_wrong in remedies.items():
        if is_wrong:
            raise ConfigError(f"parallelism=Mesh({mesh}): {remedy}")
    if mesh.num_shards > 1:
        _check_sharded(module, mesh)
    if mesh.activation_checkpointing and not recomputed(module):
        raise ConfigError(
            f"parallelism=Mesh({mesh}): activation_checkpointing needs layers that are made of "
            "layers, without BatchNorm, and the module has none; leave it False"
        )
    if mesh.pipeline > 1:
        logger.info("Mesh: stages begin with the layers %s", ", ".join(cut_layers(mesh, module)))
    layers = divided_layers(mesh, module)
    if layers:
        logger.info("Mesh: layers divided along tensor=%d: %s", mesh.tensor, layers)


def _check_sharded(module: nn.Module, mesh: Mesh) -> None:
    """Refuse parameters that cannot be cut, or gathered together; raises ConfigError."""
    from sparkdl.sync.divided.dividing import units
    from sparkdl.sync.divided.stages import cut_layers

    for name, parameter in module.named_parameters():
        if parameter.dim() == 0 or parameter.is_complex():
            what, remedy = "a single number without a dimension", "give it the shape (1,)"
            if parameter.is_complex():
                what, remedy = "complex", "keep its torch.view_as_real, or use data or tensor"
            raise ConfigError(
                f"parallelism=Mesh({mesh}): the parameter {name!r} is {what}, which cannot be "
                f"divided; {remedy}"
            )
    cuts = () if mesh.pipeline == 1 else cut_layers(mesh, module)
    own = [] if mesh.shard_optimizer else units(module, mesh.smallest_unit, cuts)
    unit_of = {id(p): number for number, unit in enumerate(own) for p in unit.parameters()}
    first: dict[int | None, tuple[str, torch.Tensor]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            other, like = first.setdefault(unit_of.get(id(parameter)), (name, parameter))
            if like.dtype != parameter.dtype:
                raise ConfigError(
                    f"parallelism=Mesh({mesh}): {other!r} is {like.dtype} and {name!r} is "
                    f"{parameter.dtype}, and both are gathered together, for which they need one "
                    "dtype; give them one, or use data or tensor"
                )


def check_mesh_optimizer(
    mesh: Mesh | None, optimizer: torch.optim.Optimizer, make: MakeOptimizer | None = None
) -> None:
    """Refuse an optimizer that looks at whole parameters, of which a rank has parts only.

    Raises:
        ConfigError: it is none of those that are known not to, it has hooks, or ``make``, which has
            made it, looks at their numbers.
    """
    from sparkdl.train.optimizers.nested_states import is_known

    if mesh is None:
        return
    if not _is_elementwise(optimizer):
        raise ConfigError(
            f"parallelism=Mesh({mesh}): {type(optimizer).__name__} may look at whole parameters, "
            f"of which a worker has a part only; use one of {', '.join(_ELEMENTWISE)}"
        )
    is_divided = mesh.num_shards * mesh.tensor * mesh.pipeline > 1
    if is_divided and not is_known(optimizer):
        raise ConfigError(
            f"parallelism=Mesh({mesh}): hooks of {type(optimizer).__name__}, or a step of its own, "
            "may look at whole parameters and gradients, of which a worker has a part only; clip "
            "by gradientClipNorm, or leave parallelism out"
        )
    if make is not None:
        from torch import empty_like, nn

        from sparkdl.sync.divided.mesh_synchronizer import whole_groups

        every = [p for group in optimizer.param_groups for p in group["params"]]
        whole = {str(n): nn.Parameter(empty_like(p, device="meta")) for n, p in enumerate(every)}
        whole_groups(make, whole)


def _is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    kind = type(optimizer)
    return kind.__module__.partition(".")[0] == "torch" and kind.__name__ in _ELEMENTWISE


def kept_state(module: nn.Module, config: TrainConfig) -> Mapping[str, StateSize]:
    """Return the sizes of what a fit's optimizer keeps of each trained parameter of ``module``.

    Nothing is counted of optimizers that may treat numbers otherwise than one by one.
    """
    from sparkdl.train.optimizers.optimizers import resolve_optimizer

    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    with borrowed_generator(config.seed), program_kept(module, vars(config)):
        optimizer = resolve_optimizer(config, module)(trained.values())
    if _is_elementwise(optimizer):
        return state_sizes(optimizer, module)
    return dict.fromkeys(trained, StateSize(0, 0))


def table_of(
    module: nn.Module, config: TrainConfig, most_workers: int, limit: int | None
) -> tuple[MeshMemory, ...]:
    """Meshes for a fit, see `memory_table`; ``limit`` is in bytes."""
    each = 2 if config.precision == "bf16" else None
    sizes, mesh = kept_state(module, config), config.parallelism
    return memory_table(
        module, sizes, mesh, most_workers=most_workers, compute_bytes=each, limit=limit
    )


def check_worker_memory(
    module: nn.Module, config: TrainConfig, cluster: ClusterInfo, get: Get, most_workers: int
) -> None:
    """Refuse what cannot fit into the memory that Spark grants a Python worker.

    Only where that is a limit which the kernel keeps: ``spark.executor.pyspark.memory``, of
    executors that are processes of their own, on CPUs. Spark divides it among an executor's cores;
    here a worker may have all of it. Counted are Python with torch, parameters, gradients and
    optimizer state.

    Raises:
        ClusterError: these do not fit, with the mesh along which they do.
    """
    from torch import nn

    granted = get("spark.executor.pyspark.memory")
    is_lazy = any(nn.parameter.is_lazy(parameter) for parameter in module.parameters())
    is_plain = config.parallelism is not None or isinstance(config.sync_strategy, AllReduce)
    on_cpus = config.device == "cpu" or (config.device == "auto" and not cluster.gpus_per_executor)
    if not granted or cluster.is_one_process or not on_cpus:
        return
    limit = parse_bytes(granted, unit=2**20)
    if not limit or is_lazy or not is_plain:
        return
    room = limit - INTERPRETER_BYTES
    now = mesh_memory(module, kept_state(module, config), config.parallelism)
    if now.kept_bytes <= room:
        return
    best = smallest_that_fits(table_of(module, config, most_workers, room))
    remedy = f"with the {most_workers} slots there are, no mesh would fit: raise that entry"
    if best is not None:
        remedy = f"set parallelism=Mesh({best.mesh}), or raise that entry"
    raise ClusterError(
        f"parameters, gradients and optimizer state take {size(now.kept_bytes)} of a worker, "
        f"besides {size(INTERPRETER_BYTES)} for Python and torch, and "
        f"spark.executor.pyspark.memory is {granted}; {remedy}"
    )
