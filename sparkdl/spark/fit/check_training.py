"""Checks of a module with its configuration, of which the driver builds once what workers do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.runtime.process import borrowed_generator
from sparkdl.serialization.program.program_state import program_kept, whole_numbers
from sparkdl.serialization.travel.attributes import showing_weights
from sparkdl.serialization.travel.packed_module import overlapping, sharing_memory, travelled
from sparkdl.spark.fit.check_mesh import check_mesh_optimizer
from sparkdl.spark.run.run import FitRequest
from sparkdl.sync.asynchronous.async_sgd import AsyncSGD
from sparkdl.sync.asynchronous.hogwild import Hogwild
from sparkdl.sync.averaging.averaging import AveragingStrategy
from sparkdl.sync.averaging.diloco import DiLoCo
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.sync.own_weights.elastic_averaging import ElasticAveraging
from sparkdl.sync.population.population import Competition
from sparkdl.sync.sparse_gradients import sparse_parameters
from sparkdl.sync.strategy import SyncStrategy

if TYPE_CHECKING:
    import torch
    from torch import nn

    from sparkdl.train.objective.loss import LossFunction
    from sparkdl.train.optimizers.optimizers import Schedule

_MOST_COPIED = 1 << 26
"""Parameters of modules of which there is another copy to compare what optimizers do."""


def check_training(
    module: nn.Module, request: FitRequest, *, in_rounds: bool = False
) -> LossFunction:
    """Build once, on a copy of the module, what every worker will build, so that mistakes show now.

    Not the optimizer and its schedule where they are for CUDA, which the driver need not have,
    nor while the module is lazy. Raises ConfigError, or what the user's own callables raise.

    Returns:
        What the run minimizes, for all that the driver asks of it.
    """
    import torch
    from torch import nn

    from sparkdl.train.callbacks import steps_between
    from sparkdl.train.objective.metrics import check_metrics
    from sparkdl.train.objective.training_step import objective_of
    from sparkdl.train.optimizers import optimizers
    from sparkdl.train.optimizers.check_optimizer import (
        check_length,
        check_parameters,
        check_schedule,
        check_steps,
    )
    from sparkdl.train.optimizers.without_compiler import without_compiler

    config = request.config
    strategy: SyncStrategy = config.sync_strategy
    steps_between(config.callbacks)
    with (
        borrowed_generator(config.seed),
        without_compiler(),
        program_kept(vars(config)) as program,
    ):
        if isinstance(request.module, nn.Module):
            _check_ids(request.module, program.numbers)
        objective = objective_of(config, module)
        check_metrics(config, objective)
        is_lazy = any(nn.parameter.is_lazy(parameter) for parameter in module.parameters())
        if config.device == "cuda" or is_lazy:
            optimizers.resolve_optimizer(config, module)
            if isinstance(config.optimizer, str | type):
                stand_in = nn.Parameter(torch.zeros(1))
                strategy.check_optimizer(optimizers.resolve_optimizer(config)([stand_in]))
        else:
            own = travelled(module, copies=True)
            _require_training(list(own.parameters()))
            make = optimizers.resolve_optimizer(config, own)
            optimizer = make(own.parameters())
            check_parameters(optimizer, own)
            strategy.check_optimizer(optimizer)
            check_mesh_optimizer(config.parallelism, optimizer, make)
            schedule = optimizers.make_scheduler(config, optimizer, make, steps_per_epoch=1)
            if in_rounds:
                optimizers.require_steps(schedule)
            sparse = sparse_parameters(own).values()
            scheduler = None if schedule is None else schedule.scheduler
            again: Callable[[], torch.optim.Optimizer] = partial(make, own.parameters())
            if sum(parameter.numel() for parameter in own.parameters()) <= _MOST_COPIED:
                again = partial(_new_optimizer, module, config)
            check_steps(optimizer, scheduler, config, sparse, partial(program.again, again))
            if config.scheduler is not None and schedule is not None:
                check_schedule(optimizer, config.scheduler)
                fewest = config.epochs  # with one step each
                if config.max_steps >= 0:
                    fewest = min(config.max_steps, fewest)
                stepped = partial(stepped_schedule, module, config)
                check_length(schedule, fewest, config, partial(program.again, stepped))
    return objective


def _require_training(parameters: Sequence[nn.Parameter]) -> None:
    """Refuse to train nothing; raises ConfigError."""
    if not parameters:
        raise ConfigError(
            "the module has no parameters, so that nothing trains; layers in a list or dict count "
            "only if that is an nn.ModuleList or nn.ModuleDict"
        )
    if not any(parameter.requires_grad for parameter in parameters):
        raise ConfigError(
            f"none of the module's {len(parameters)} parameters trains: all have "
            "requires_grad=False; set it to True for those to train"
        )


def _check_ids(module: nn.Module, numbers: Collection[int]) -> None:
    """Refuse code that knows parameters by `id`: workers have others; raises ConfigError."""
    ids = {id(parameter): name for name, parameter in module.named_parameters()}
    for number in {*numbers, *whole_numbers(module)} & ids.keys():
        raise ConfigError(
            f"the program keeps the id() of the parameter {ids[number]!r}, and workers train "
            "another object; tell parameters by their names, as parameterGroups does, or by their "
            "shapes"
        )


def _new_optimizer(module: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of another copy of the module."""
    from sparkdl.train.optimizers import optimizers

    own = travelled(module, copies=True)
    return optimizers.resolve_optimizer(config, own)(own.parameters())


def stepped_schedule(module: nn.Module, config: TrainConfig, steps_per_epoch: int = 1) -> Schedule:
    """The schedule of an optimizer that has taken a step, on a copy of the module."""
    from sparkdl.train.optimizers import optimizers
    from sparkdl.train.optimizers.check_optimizer import step_once

    own = travelled(module, copies=True)
    make = optimizers.resolve_optimizer(config, own)
    optimizer = make(own.parameters())
    schedule = optimizers.make_scheduler(config, optimizer, make, steps_per_epoch)
    assert schedule is not None
    step_once(optimizer, sparse_parameters(own).values())
    return schedule


def check_lightning(module: nn.Module, config: TrainConfig, *, in_rounds: bool) -> bool:
    """True if the module may log values; raises ConfigError if the strategy does not take it."""
    from sparkdl.train.objective import lightning, manual
    from sparkdl.train.objective.training_step import logs

    if not logs(config, module):
        return False
    if in_rounds:
        lightning.check_in_rounds(module)
    if manual.is_manual(module):
        manual.check_manual(config, config.sync_strategy, type(module).__name__)
    if isinstance(config.sync_strategy, Competition) and lightning.is_overridden(
        module, "validation_step"
    ):
        raise ConfigError(
            f"{type(config.sync_strategy).__name__} compares members by the loss of the training "
            f"step; remove validation_step from {type(module).__name__}, or use another strategy"
        )
    return True


def check_sparse_gradients(module: nn.Module, config: TrainConfig, strategy: SyncStrategy) -> None:
    """Refuse sparse gradients with what would make them dense; raises ConfigError."""
    found = [name for name, p in sparse_parameters(module).items() if p.requires_grad]
    name = type(strategy).__name__
    asked = {
        f"parallelism=Mesh({config.parallelism}) cannot divide it": config.parallelism is not None,
        "elasticity='bits' adds whole gradients up": config.elasticity == "bits",
        f"{name} sends gradients to slices of the weights": isinstance(strategy, AsyncSGD),
        f"double_buffering of {name} keeps whole gradients": isinstance(strategy, AllReduce)
        and strategy.double_buffering,
        f"num_backup_workers of {name} keep whole gradients": isinstance(strategy, AllReduce)
        and strategy.num_backup_workers > 0,
    }
    for obstacle, is_asked in asked.items():
        if found and is_asked:
            raise ConfigError(
                f"the gradient of {found[0]} is sparse, and {obstacle}; make the layer with "
                "sparse=False, or use AllReduce() or a strategy that averages replicas"
            )


def check_memory_of_weights(module: nn.Module, config: TrainConfig, mode: str) -> None:
    """Refuse weights in shared memory where it is left, or each is moved by itself; ConfigError."""
    strategy, mesh = config.sync_strategy, config.parallelism
    name = type(strategy).__name__
    moves_each = isinstance(strategy, AsyncSGD | ElasticAveraging | Hogwild)
    if isinstance(strategy, AveragingStrategy) and mode == "gang":
        is_plain = isinstance(strategy, DiLoCo) and not strategy.is_streaming
        moves_each = strategy.make_outer(2) is not None and not is_plain
    if moves_each:
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        for names in overlapping(trained):
            raise ConfigError(
                f"{' and '.join(names)} share memory, and {name} moves each weight by itself; let "
                "them be one parameter, self.b.weight = self.a.weight, or use AllReduce or "
                "ParameterAveraging"
            )
    is_divided = mesh is not None and mesh.is_divided
    if is_divided or isinstance(strategy, Hogwild):
        for path, weight in showing_weights(module):
            raise ConfigError(
                f"the attribute {path} shows the memory of {weight}, which "
                f"{f'parallelism=Mesh({mesh})' if is_divided else name} moves elsewhere, so that "
                "it would stay what it is; take it from the weight in forward"
            )
        buffers = dict(module.named_buffers(remove_duplicate=False))
        parameters = dict(module.named_parameters(remove_duplicate=False))
        for names in sharing_memory({**parameters, **buffers}):
            shown = [name for name in names if name in buffers]
            if shown and parameters.keys() & names:
                raise ConfigError(
                    f"the buffer {shown[0]} shows the memory of a weight, which "
                    f"{f'parallelism=Mesh({mesh})' if is_divided else name} moves elsewhere; take "
                    "it from the weight in forward, or clone it"
                )


def check_max_norm(module: nn.Module) -> None:
    """Refuse layers whose weights follow from the rows that a worker reads; raises ConfigError."""
    from torch import nn

    for name, layer in module.named_modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.max_norm is not None:
            raise ConfigError(
                f"{name or type(layer).__name__}: max_norm={layer.max_norm} shortens the weights "
                "of the rows that are read, and each worker reads others, so replicas would come "
                "apart; leave max_norm out and let a callback's on_step_end limit all of them, or "
                "set numWorkers=1, or a strategy that averages replicas"
            )
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.scale_grad_by_freq:
            raise ConfigError(
                f"{name or type(layer).__name__}: scale_grad_by_freq divides gradients by how "
                "often an index is in the batch, and each worker sees a part of it; leave it out, "
                "or set numWorkers=1, or a strategy that averages replicas"
            )


def check_sync_batch_norm(
    module: nn.Module, config: TrainConfig, num_workers: int, mode: Literal["gang", "rounds"]
) -> None:
    """Refuse ``syncBatchNorm`` with what it does not fit, and torch's own layer without it.

    Raises ConfigError.
    """
    from torch import nn

    from sparkdl.train.modules import sync_batch_norm

    if config.sync_batch_norm:
        sync_batch_norm.batch_norms(module)
        sync_batch_norm.check_strategy(config.sync_strategy, num_workers)
        return
    for name, layer in module.named_modules():
        if isinstance(layer, nn.SyncBatchNorm) and mode == "gang" and num_workers > 1:
            raise ConfigError(
                f"the layer '{name}' is an nn.SyncBatchNorm, which looks for other workers by "
                "itself, and on GPUs only; set syncBatchNorm=True, which lets it see the rows of "
                "all workers, or use nn.BatchNorm1d, BatchNorm2d or BatchNorm3d there"
            )
