"""Gradients that are rows and values, such as those of ``nn.Embedding(sparse=True)``.

They travel as they are, so that a step costs what the rows of its batch cost, not what the table
does, and optimizers get what a plain loop gives them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from sparkdl.comm.communicator import Communicator

_NONE, _DENSE = -1, -2
"""In place of a number of rows: there is no gradient, or it is a dense one."""


def sparse_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters whose gradients may be sparse, by name: weights of layers with ``sparse=True``."""
    found: dict[str, nn.Parameter] = {}
    known: set[int] = set()
    for name, layer in module.named_modules():
        if getattr(layer, "sparse", None) is not True:
            continue
        # Not the attribute: a parametrized layer computes it, which may change its buffers.
        weight = dict(layer.named_parameters(recurse=False)).get("weight")
        if weight is not None and id(weight) not in known:
            known.add(id(weight))
            found[f"{name}.weight".lstrip(".")] = weight
    return found


def sum_gradients(parameters: Sequence[nn.Parameter], comm: Communicator) -> None:
    """Let each parameter's gradient be the sum over ranks. Collective.

    It is None where no rank has one, and dense where some rank's is.
    """
    sums = summed([parameter.grad for parameter in parameters], parameters, comm)
    for parameter, gradient in zip(parameters, sums, strict=True):
        parameter.grad = gradient


def summed(
    own: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor], comm: Communicator
) -> list[torch.Tensor | None]:
    """The sums over ranks of sparse tensors, or of what is in their place. Collective.

    ``like`` are dense tensors of the same shapes, dtypes and devices.
    """
    if not like:
        return []
    ready = [_with_rows(tensor) for tensor in own]
    sizes = torch.tensor([_size(tensor) for tensor in ready], device=like[0].device)
    all_sizes = comm.all_gather(sizes).t().tolist()
    return [
        _summed(tensor, one, counts, comm)
        for tensor, one, counts in zip(ready, like, all_sizes, strict=True)
    ]


def values_of(gradients: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the values of gradients; of those that are sparse, what is not zero."""
    for gradient in gradients:
        yield gradient.coalesce().values() if gradient.is_sparse else gradient


def _with_rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A sparse tensor with each row once; a dense one if what it has are no rows."""
    if tensor is None or tensor.layout is torch.strided:
        return tensor
    is_rows = tensor.is_sparse and tensor.sparse_dim() == 1
    return tensor.coalesce() if is_rows else tensor.to_dense()


def _size(tensor: torch.Tensor | None) -> int:
    if tensor is None:
        return _NONE
    return len(tensor.values()) if tensor.is_sparse else _DENSE


def _summed(
    own: torch.Tensor | None, like: torch.Tensor, counts: Sequence[int], comm: Communicator
) -> torch.Tensor | None:
    if _DENSE in counts:
        dense = torch.zeros_like(like, memory_format=torch.contiguous_format)
        if own is not None:
            dense += own
        comm.all_reduce(dense)
        return dense
    most = max(counts)
    if most == _NONE:
        return None
    indices = torch.zeros(most, dtype=torch.int64, device=like.device)
    values = like.new_zeros((most, *like.shape[1:]))
    if own is not None:
        indices[: len(own.values())], values[: len(own.values())] = own.indices()[0], own.values()
    every = [
        torch.cat([part[:count] for part, count in zip(parts, counts, strict=True) if count > 0])
        if most
        else parts[0]
        for parts in (comm.all_gather(indices), comm.all_gather(values))
    ]
    return torch.sparse_coo_tensor(
        every[0][None], every[1], like.shape, check_invariants=False
    ).coalesce()
