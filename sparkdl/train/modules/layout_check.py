"""Sees that a divided module computes what a whole one does, before the first step.

A layout by names cannot tell where a layer's output goes. One that divides the wrong layers
would mostly end in an error of shapes, but may also compute something else, or give a parameter
between two of them the gradient of one worker's part.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sparkdl.data.batches import Batch, cut, sequential_batches
from sparkdl.data.collate import no_rows
from sparkdl.data.plan import TrainPlan
from sparkdl.data.source import ShardRows
from sparkdl.errors import CommunicationError, ConfigError
from sparkdl.sync.divided.channels import CHANNELS
from sparkdl.sync.divided.dividing import local
from sparkdl.sync.divided.dropout import draw_whole_masks, dropout_shapes
from sparkdl.sync.divided.layout import cut_parameters
from sparkdl.sync.divided.mesh_ranks import MeshRanks
from sparkdl.sync.divided.pipeline import Pipeline
from sparkdl.sync.divided.sequence import SEQUENCE, part_of, stacks, undone, whole_of
from sparkdl.sync.frozen_layers import evaluation_mode
from sparkdl.train.modules.restore import restored

_ROWS = 4
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest difference of outputs, as a part of the largest number, by their dtype."""
_GRADIENTS = 0.05
"""Largest norm of a difference of gradients, as a part of the norm. A worker that has the gradient
of its own part only is off by at least a half, somewhere along ``tensor``."""
_NO_GRADIENT = 0.01
"""Part of `_TOLERANCE`: a norm below it, as a part of that of all gradients, may be rounding."""


def check_layout_on_rows(
    module: nn.Module,
    layers: Mapping[str, str],
    ranks: MeshRanks,
    pipeline: Pipeline | None,
    *,
    shards: Sequence[ShardRows],
    plan: TrainPlan,
    device: torch.device,
) -> None:
    """Compute some rows twice, once with whole values between the divided layers, and compare.

    Outputs are compared, and the gradients of a weighted sum of them. No rank needs whole weights
    for it: a layer's outputs are gathered, and a layer has its part of whole inputs, so all else
    computes what it would compute without a mesh. The comparison also shows which Dropouts get a
    part of their values, see `draw_whole_masks`. Collective.

    Args:
        module: divided, with its weights.
        layers: those of the layout, and how each is cut.
        ranks: the mesh.
        pipeline: whose stages this rank has; each is compared by itself.
        shards: training rows; ranks along ``tensor`` have the same.
        plan: of the run.
        device: where the module is.

    Raises:
        ConfigError: they differ, on all ranks together.
    """
    batch = next(iter(sequential_batches(shards, plan)), None)
    if batch is None:
        (batch,) = cut(plan, {column.key: no_rows(column) for column in plan.columns}, [0])
    batch = batch.rows(0, min(_ROWS, batch.num_rows)).map(lambda value: value.to(device))
    with _whole_between(module, layers, ranks), dropout_shapes(module) as whole_shapes:
        outputs, gradients = _computed(module, batch, pipeline)
    remedy = (
        "let layers by columns be followed by layers by rows, with nothing between them but "
        "what treats each number by itself and has no parameters; and let the module take "
        "sizes from its tensors"
    )
    try:
        with dropout_shapes(module) as shapes:
            found, found_gradients = _computed(module, batch, pipeline)
    except (CommunicationError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        reason, *_ = str(error).splitlines() or [type(error).__name__]
        raise ConfigError(
            f"Mesh: {_layer_of(error, module)} cannot compute with this layout: {reason}; {remedy}"
        ) from error
    is_other = torch.tensor([float(not all(map(_is_same, found, outputs)))], device=device)
    ranks.shards.all_reduce(is_other)
    ranks.tensors.all_reduce(is_other)
    if is_other.item():
        raise ConfigError(f"Mesh: with this layout the module computes something else; {remedy}")
    name = _differing(gradients, found_gradients, cut_parameters(layers, module), ranks, device)
    if name is not None:
        raise ConfigError(f"Mesh: with this layout {name!r} gets another gradient; {remedy}")
    draw_whole_masks(module, whole_shapes, shapes, ranks.tensors)


def _layer_of(error: Exception, module: nn.Module) -> str:
    """Name the layer that has raised an error, by its traceback."""
    names, found = {part: name for name, part in module.named_modules()}, ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        layer = frame.f_locals.get("self")
        if isinstance(layer, nn.Module):
            found = names.get(layer, "") or found
    return f"the layer {found!r}" if found else "the module"


@contextlib.contextmanager
def _whole_between(
    module: nn.Module, layers: Mapping[str, str], ranks: MeshRanks
) -> Iterator[None]:
    """Let what comes out of a divided layer be whole, and what goes into one."""
    mesh = ranks.tensor_mesh
    assert mesh is not None

    within = stacks(ranks.mesh, module, layers)

    def own_input(layer: nn.Module, dimension: int) -> Any:
        def hook(_: nn.Module, inputs: Any) -> Any:
            return (part_of(inputs[0], mesh, dimension), *inputs[1:])

        return layer.register_forward_pre_hook(hook, prepend=True)

    def whole_output(layer: nn.Module, dimension: int) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> Any:
            return whole_of(output, mesh, dimension)

        return layer.register_forward_hook(hook)

    def by_position(name: str, _: nn.Module, inputs: Any) -> None:
        if not inputs:
            raise ConfigError(
                f"Mesh: the layer {name!r} of the layout is called by keyword; call it by "
                "position, as in self.layer(x)"
            )

    hooks: list[Any] = []
    for name, how in layers.items():
        layer = module.get_submodule(name)
        is_in_stack = any(stack.has(name) for stack in within)
        dimension = -1 if isinstance(layer, nn.Linear | nn.Embedding) else CHANNELS
        if how == "sequence" or (is_in_stack and how == "columns"):
            hooks.append(own_input(layer, SEQUENCE))
        # ids of an Embedding are whole
        if how == "channels" or (how == "rows" and not isinstance(layer, nn.Embedding)):
            hooks.append(own_input(layer, dimension))
        if how == "sequence" or (is_in_stack and how == "rows"):
            hooks.append(whole_output(layer, SEQUENCE))
        if how in ("columns", "channels"):
            hooks.append(whole_output(layer, dimension))
        by_name = partial(by_position, name)
        hooks.append(layer.register_forward_pre_hook(by_name, prepend=True))
    for stack in within:
        hooks += undone(stack, module, mesh)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _differing(
    expected: Mapping[str, torch.Tensor],
    found: Mapping[str, torch.Tensor],
    cut_names: Collection[str],
    ranks: MeshRanks,
    device: torch.device,
) -> str | None:
    """A parameter whose gradient differs, equal on all ranks; None: there is none. Collective."""
    names = list(expected)
    squares = torch.zeros(3, len(names), dtype=torch.float64, device=device)
    for number, name in enumerate(names):
        whole, own = expected[name].double(), found[name].double()
        squares[0, number] = torch.linalg.vector_norm(own - whole) ** 2
        squares[1, number] = torch.linalg.vector_norm(whole) ** 2
        squares[2, number] = name in cut_names
    is_cut = squares[2] > 0
    norms = squares[:2]
    ranks.shards.all_reduce(norms)
    of_parts = norms.clone()
    ranks.tensors.all_reduce(of_parts)
    norms = torch.where(is_cut, of_parts, norms).sqrt()
    everything = torch.linalg.vector_norm(norms[1]).item()
    tolerances = [_NO_GRADIENT * _TOLERANCE[expected[name].dtype] for name in names]
    rounding = torch.tensor(tolerances, dtype=torch.float64, device=device) * everything
    differs = (norms[0] > _GRADIENTS * norms[1] + rounding).double()
    ranks.tensors.all_reduce(differs)
    return next((name for name, one in zip(names, differs.tolist(), strict=True) if one), None)


def _is_same(found: torch.Tensor, whole: torch.Tensor) -> bool:
    if found.shape != whole.shape:
        return False
    if not whole.numel() or not whole.is_floating_point():
        return torch.equal(found, whole)
    difference = (found - whole).abs().max().item()
    return difference <= _TOLERANCE[whole.dtype] * max(1e-30, whole.abs().max().item())


def _computed(
    module: nn.Module, batch: Batch, pipeline: Pipeline | None
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """The outputs, and what lies on this rank of the gradient of each parameter, by its name."""
    # cuDNN has no backward pass of recurrent layers in evaluation mode
    with (
        restored(module),
        torch.enable_grad(),
        evaluation_mode(module),
        torch.backends.cudnn.flags(enabled=False),
    ):
        arguments = batch.arguments
        output = arguments.call(module) if pipeline is None else pipeline.alone(arguments)
        outputs = list(_tensors(output))
        sums = [_weighted_sum(value) for value in outputs if value.requires_grad]
        if sums:
            torch.autograd.backward(torch.stack(sums).sum())
    gradients = {}
    for name, parameter in module.named_parameters():
        grad, parameter.grad = parameter.grad, None
        if grad is None:
            continue
        if isinstance(grad, DTensor):
            assert isinstance(parameter, DTensor)
            if grad.placements != parameter.placements:
                grad = grad.redistribute(placements=parameter.placements)
        gradients[name] = local(grad).detach()
    return [value.detach().clone() for value in outputs], gradients


def _weighted_sum(values: torch.Tensor) -> torch.Tensor:
    """A sum that says something also of outputs whose plain sum is constant, as of a softmax."""
    weights = torch.arange(values.numel(), device=values.device, dtype=torch.float64).cos()
    return (values.flatten().double() * weights).sum()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a module's output."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
