"""The checks of a fit whose model is divided along a mesh, before its first job."""

from __future__ import annotations

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
from sparkdl.report.page.html import size
from sparkdl.runtime.process import borrowed_generator
from sparkdl.spark.cluster.cluster_info import Get, parse_bytes
from sparkdl.spark.run.run import FitRequest
from sparkdl.sync.gradients.allreduce import AllReduce

if TYPE_CHECKING:
    import torch
    from torch import nn

_ELEMENTWISE = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD",
)  # fmt: skip
"""Torch's optimizers that treat each number of a parameter by itself."""


def check_mesh(request: FitRequest, module: nn.Module, mode: str, *, has_logs: bool) -> None:
    """Refuse a mesh that does not fit the request or the module; raises ConfigError.

    ``has_logs``: the module is a LightningModule.
    """
    from sparkdl.sync.divided.dividing import recomputed
    from sparkdl.sync.divided.layout import divided_layers

    mesh, config = request.config.parallelism, request.config
    if mesh is None:
        return
    if not isinstance(mesh, Mesh):
        raise ConfigError(f"parallelism must be a sparkdl.Mesh or None; received {mesh!r}")
    workers = request.num_workers
    if workers not in (None, mesh.size):
        raise ConfigError(
            f"parallelism=Mesh({mesh}) is made of {mesh.size} workers, and numWorkers is "
            f"{workers}; leave numWorkers unset, or choose axes whose product it is"
        )
    strategy = config.sync_strategy
    plain = isinstance(strategy, AllReduce) and not (
        strategy.double_buffering or strategy.num_backup_workers or strategy.work_shares
    )
    remedies = {
        "executionMode must be 'gang': the workers of a mesh need each other at every step": (
            mode != "gang"
        ),
        f"syncStrategy must be AllReduce() without double_buffering, num_backup_workers and "
        f"work_shares; received {strategy!r}": not plain,
        "topology must be 'auto' or 'ring': sums are formed between parts of the mesh": (
            plain and strategy.topology not in ("auto", "ring")
        ),
        "minWorkers must be unset: the product of the axes is the number of workers": (
            request.min_workers is not None
        ),
        "elasticity must be 'rounding'": config.elasticity != "rounding",
        "the module must not be a LightningModule, whose hooks see whole parameters": has_logs,
        "compile must be False: compiled code of divided layers has not been tried": config.compile,
        "syncBatchNorm must be False": config.sync_batch_norm,
        "precision must be 'fp32' or 'bf16': no rank sees whether the gradients of all overflow": (
            config.precision == "fp16"
        ),
        "memoryFormat must be 'contiguous': parameters are cut along their first dimension": (
            config.memory_format != "contiguous"
        ),
        f"Params cannot be 'auto'; set {', '.join(request.automatic)}": bool(request.automatic),
        "initialState and keepTrainingState must be unset": (
            request.initial_state is not None or request.keep_training_state
        ),
    }
    for remedy, is_wrong in remedies.items():
        if is_wrong:
            raise ConfigError(f"parallelism=Mesh({mesh}): {remedy}")
    scalars = [name for name, parameter in module.named_parameters() if parameter.dim() == 0]
    if scalars and mesh.num_shards > 1:
        raise ConfigError(
            f"parallelism=Mesh({mesh}): the parameter {scalars[0]!r} is a single number without a "
            "dimension, which cannot be divided; give it the shape (1,)"
        )
    if mesh.activation_checkpointing and not recomputed(module):
        raise ConfigError(
            f"parallelism=Mesh({mesh}): activation_checkpointing needs layers that are made of "
            "layers, without BatchNorm, and the module has none; leave it False"
        )
    divided_layers(mesh, module)


def check_mesh_optimizer(mesh: Mesh | None, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that looks at whole parameters, of which a rank has parts only.

    Raises:
        ConfigError: it is none of those that are known not to.
    """
    if mesh is not None and not _is_elementwise(optimizer):
        raise ConfigError(
            f"parallelism=Mesh({mesh}): {type(optimizer).__name__} may look at whole parameters, "
            f"of which a worker has a part only; use one of {', '.join(_ELEMENTWISE)}"
        )


def _is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    kind = type(optimizer)
    return kind.__module__.partition(".")[0] == "torch" and kind.__name__ in _ELEMENTWISE


def kept_state(module: nn.Module, config: TrainConfig) -> Mapping[str, StateSize]:
    """What the optimizer of a fit keeps of each trained parameter of ``module``.

    Nothing is counted of optimizers that may treat numbers otherwise than one by one.
    """
    from sparkdl.train.optimizers.optimizers import resolve_optimizer

    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    with borrowed_generator(config.seed):
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
    module: nn.Module, config: TrainConfig, master: str, get: Get, most_workers: int
) -> None:
    """Refuse what cannot fit into the memory that Spark grants a Python worker.

    Only where that is a limit which the kernel keeps: ``spark.executor.pyspark.memory``, of
    executors that are processes of their own, on CPUs. Spark divides it among an executor's cores;
    here a worker may have all of it. Counted are parameters, gradients and optimizer state only.

    Raises:
        ClusterError: these do not fit, with the mesh along which they do.
    """
    from torch import nn

    granted = get("spark.executor.pyspark.memory")
    is_lazy = any(nn.parameter.is_lazy(parameter) for parameter in module.parameters())
    is_plain = config.parallelism is not None or isinstance(config.sync_strategy, AllReduce)
    if not granted or master.startswith("local") or config.device != "cpu":
        return
    limit = parse_bytes(granted, unit=2**20)
    if not limit or is_lazy or not is_plain:
        return
    now = mesh_memory(module, kept_state(module, config), config.parallelism)
    if now.kept_bytes <= limit:
        return
    best = smallest_that_fits(table_of(module, config, most_workers, limit))
    remedy = "no mesh of as many workers as there are slots would fit"
    if best is not None:
        remedy = f"set parallelism=Mesh({best.mesh})"
    raise ClusterError(
        f"parameters, gradients and optimizer state take {size(now.kept_bytes)} of a worker, and "
        f"spark.executor.pyspark.memory is {granted}; {remedy}, or raise that entry"
    )
