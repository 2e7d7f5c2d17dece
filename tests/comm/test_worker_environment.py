"""A worker's place in the gang."""

from __future__ import annotations

from sparkdl.comm.worker_environment import local_rank, numbered


def test_nodes_are_numbered_by_their_first_rank() -> None:
    nodes = numbered(["b", "a", "b", "a", "a", "c"])
    assert nodes == (0, 1, 0, 1, 1, 2)
    assert [local_rank(nodes, rank) for rank in range(6)] == [0, 0, 1, 1, 2, 0]
