"""How do tests place the ranks of a gang on nodes? By saying so: all run on one machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from sparkdl.comm.topology import arrange

CPU = torch.device("cpu")


@contextlib.contextmanager
def placed(comm: Any, nodes: Sequence[int] | None = None) -> Iterator[None]:
    """The ranks of ``comm`` on ``nodes``, or all on one, for the time of the block."""
    before, comm.nodes = comm.nodes, tuple(nodes or (0,) * comm.world_size)
    try:
        yield
    finally:
        comm.nodes = before


def arranged(comm: Any, topology: str, nodes: Sequence[int] | None = None) -> Any:
    """`arrange` for ranks on ``nodes``, or all on one."""
    with placed(comm, nodes):
        return arrange(comm, topology, device=CPU)
