"""Topologies: the ways along which a sum over all ranks is formed, one file each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sparkdl.errors import ConfigError, unknown

if TYPE_CHECKING:
    import torch

    from sparkdl.comm.communicator import Communicator

__all__ = ["TOPOLOGIES", "arrange", "check", "choose"]

TOPOLOGIES = ("auto", "ring", "tree", "hierarchical", "shared")
"""Topologies that a user may ask for; ``ring`` is what gloo and NCCL do by themselves."""


def arrange(comm: Communicator, topology: str, *, device: torch.device) -> Communicator:
    """``comm``, but with sums along ``topology`` and a count of bytes of its own. Collective.

    It must be closed; ``comm`` stays open. ``auto`` is shared memory for CPU ranks of one node,
    hierarchical for several nodes of several CPU ranks each, and otherwise a ring; ``device`` is
    where the tensors are. Where ranks of one node cannot share memory, all ranks go other ways and
    rank 0 says so. ConfigError if there is no such topology, or the ranks are not where it needs
    them.
    """
    from sparkdl.comm.communicator import ProcessGroupCommunicator, Topology, counting_anew
    from sparkdl.comm.topology import hierarchical
    from sparkdl.comm.topology.shared_memory import NoSharedMemory, say
    from sparkdl.comm.topology.shared_sum import Shared, SharedSum
    from sparkdl.comm.topology.tree import Tree

    chosen = choose(topology, comm.nodes, device.type)
    arranged = counting_anew(comm)
    if not isinstance(arranged, ProcessGroupCommunicator):
        return arranged
    arranged.topology = Tree() if chosen == "tree" else Topology()
    try:
        if chosen == "shared":
            arranged.topology = Shared(SharedSum(comm, comm, ranks=range(comm.world_size)))
        elif chosen == "hierarchical":
            inside, between = hierarchical.groups_of(comm.nodes)
            local, across = arranged.split(inside), arranged.split(between)
            is_even = hierarchical.is_even(comm.nodes)
            arranged.topology = hierarchical.HierarchicalMessages(local, across, is_even=is_even)
            if device.type == "cpu":
                ranks = next(group for group in inside if comm.rank in group)
                node = SharedSum(local, comm, ranks=ranks, first_takes_all=not is_even)
                arranged.topology = hierarchical.HierarchicalShared(node, across)
    except NoSharedMemory as error:
        text = "the workers of a node cannot share memory (%s); they send messages instead"
        say(comm, text, error)
    return arranged


def check(topology: str) -> None:
    """Raise ConfigError for what is none of `TOPOLOGIES`; the driver knows no more."""
    if topology not in TOPOLOGIES:
        raise unknown("topology", topology, TOPOLOGIES)


def choose(topology: str, nodes: Sequence[int], device_type: str) -> str:
    """Return what `arrange` makes of ``topology`` for ranks on ``nodes``; raises what it raises."""
    check(topology)
    num_nodes = len(set(nodes))
    if topology == "shared" and device_type != "cpu":
        raise ConfigError(
            f"topology 'shared' sums in the CPU's memory, and the workers use {device_type}; "
            "use 'ring'"
        )
    if topology == "shared" and num_nodes > 1:
        raise ConfigError(
            f"topology 'shared' needs all workers on one node, and they are on {num_nodes}; "
            "use 'hierarchical' or 'auto'"
        )
    if len(nodes) == 1:
        return "ring"
    if topology != "auto":
        return topology
    if device_type == "cpu" and num_nodes == 1:
        return "shared"
    if device_type == "cpu" and all(list(nodes).count(node) > 1 for node in nodes):
        return "hierarchical"
    return "ring"
