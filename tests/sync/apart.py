"""What the tests of strategies that train apart share: a net, and replicas in one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sparkdl.comm.compression.compression import all_reduce_bytes
from sparkdl.config import TrainConfig
from sparkdl.data.batches import Batches
from sparkdl.data.spool.mapped import MappedRows
from sparkdl.storage.checkpoint_format import decode, encode
from sparkdl.storage.tensor_tree import snapshot
from sparkdl.sync.exchange_pattern import ModelSize
from sparkdl.sync.strategy import SyncStrategy
from sparkdl.train.rank_state import ResumePoint
from tests.train.runs import Keeper, make_data, plan_for, run, seeded, weights

SGD = TrainConfig(optimizer="sgd", learning_rate=0.05, batch_size=4, epochs=1, loss="mse")
ROWS = [36, 30, 25]
"""Nine steps of an epoch on three ranks."""


def make_net(norm: bool = False, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    def make() -> torch.nn.Module:
        layers = [torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)]
        if norm:
            layers.insert(1, torch.nn.BatchNorm1d(5))
        return torch.nn.Sequential(*layers).to(dtype)

    return seeded(make)


SHAPES = [tuple(parameter.shape) for parameter in make_net().parameters()]
SHARE_BYTES = 24
"""What a rank tells each other one before a mean: its weight, whether its optimizer has a state,
and its learning rate."""


def bytes_by_pattern(
    strategy: SyncStrategy, shapes: Sequence[tuple[int, ...]], world_size: int, *, more: float = 0
) -> float:
    """What a rank sends per step for float64 weights, and with each exchange so many bytes more."""
    size = ModelSize(
        shapes=tuple(shapes), element_size=8, replica_bytes=0, buffer_bytes=0, optimizer_bytes=0
    )
    pattern = strategy.pattern(size, world_size)
    sent = pattern.sent_bytes_per_step(world_size)
    assert sent is not None
    return sent + more / pattern.period


def gradient_bytes(
    strategy: SyncStrategy, shapes: Sequence[tuple[int, ...]], world_size: int
) -> float:
    """What a rank sends per step that sums gradients, sums of losses and weights, and marks."""
    sums = all_reduce_bytes(16 + 8 * len(shapes), world_size)
    return bytes_by_pattern(strategy, shapes, world_size, more=sums)


def train_on_rank(
    comm: Any, config: TrainConfig, rows: Sequence[int], norm: bool = False
) -> tuple[torch.Tensor, dict[str, Any], int]:
    """Weights, everything that the last checkpoint holds for this rank, and bytes sent."""
    net = make_net(norm)
    outcome = run(net, config, make_data(rows), comm=comm)
    final = {**outcome.final.shared, "rank": outcome.final.rank_state}
    return weights(net), copy.deepcopy(final), outcome.bytes_sent


def train_on_nodes(
    comm: Any, nodes: tuple[int, ...], config: TrainConfig, rows: Sequence[int]
) -> tuple[torch.Tensor, dict[str, Any], int]:
    """The same where the ranks are on several nodes."""
    return train_on_rank(on_nodes(comm, nodes), config, rows)


def on_nodes(comm: Any, nodes: tuple[int, ...]) -> Any:
    """The same communicator, but for where its ranks are."""
    placed = copy.copy(comm)
    placed.nodes = nodes
    return placed


def train_and_resume(
    comm: Any, config: TrainConfig, rows: Sequence[int], due: int, device: str = "cpu"
) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Step of the first checkpoint from ``due`` on; what undisturbed and resumed runs end with."""
    sink = Keeper(steps=(due,))
    net = make_net(norm=True)
    whole = run(net, config, make_data(rows), comm=comm, sink=sink, device=device)
    (point,) = sink.points.values()
    point = ResumePoint(
        step=point.step,
        shared=_written_and_read(point.shared),
        rank_state=_written_and_read(point.rank_state),
    )
    again = make_net(norm=True)
    resumed = run(again, config, make_data(rows), comm=comm, resume=point, device=device)
    return point.step, _all_of(net, whole), _all_of(again, resumed)


def _written_and_read(tree: Any) -> Any:
    return decode(b"".join(encode(snapshot(tree))), "the checkpoint")


def _all_of(net: torch.nn.Module, outcome: Any) -> dict[str, Any]:
    shared = {key: value for key, value in outcome.final.shared.items() if key != "state"}
    return copy.deepcopy({"net": net.state_dict(), **shared, "rank": outcome.final.rank_state})


def assert_equal_bits(first: Any, second: Any) -> None:
    """Compare trees of tensors."""
    if isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            assert_equal_bits(first[key], second[key])
    elif isinstance(first, list | tuple):
        assert len(first) == len(second)
        for mine, theirs in zip(first, second, strict=True):
            assert_equal_bits(mine, theirs)
    elif isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
    else:
        np.testing.assert_array_equal(first, second)


def assert_close(mine: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for rounding in float64."""
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)


class Replicas:
    """All replicas in one process, for references that follow a paper's formulae.

    Attributes:
        x: the replicas' weights, ``(world_size, num_weights)``; may be overwritten.
        rows: samples that each replica has seen since this was last set to zero.
        loss_sum: their losses.
        learning_rate: that of the next step.
    """

    def __init__(self, config: TrainConfig, rows: Sequence[int], momentum: float = 0.0) -> None:
        shards = make_data(rows)
        plan = plan_for(shards, config, world_size=len(rows))
        self.num_steps = plan.steps_per_epoch
        self._net = make_net()
        self.learning_rate = config.learning_rate
        self._momentum = momentum
        self._batches = [
            iter(
                Batches(
                    [MappedRows(shard, plan)], plan, rank, seed=config.seed, epoch=0, start_step=0
                )
            )
            for rank, shard in enumerate(shards)
        ]
        self.x = weights(self._net).repeat(len(rows), 1)
        self.velocity = torch.zeros_like(self.x)
        self.rows = torch.zeros(len(rows), dtype=torch.float64)
        self.loss_sum = 0.0

    def step(self) -> None:
        """One step of SGD on every replica's own batch."""
        for rank, (gradient, num_rows) in enumerate(self.gradients()):
            if num_rows == 0:
                continue
            self.velocity[rank] = self._momentum * self.velocity[rank] + gradient / num_rows
            self.x[rank] -= self.learning_rate * self.velocity[rank]
            self.rows[rank] += num_rows

    def gradients(self) -> list[tuple[torch.Tensor, int]]:
        """Each replica's gradient, summed over its next batch, and the size of that."""
        return [self._gradient(rank) for rank in range(len(self.x))]

    def _gradient(self, rank: int) -> tuple[torch.Tensor, int]:
        torch.nn.utils.vector_to_parameters(self.x[rank].clone(), self._net.parameters())
        batch = next(self._batches[rank])
        if batch.num_rows == 0:
            return torch.zeros_like(self.x[rank]), 0
        output = self._net(*batch.inputs).squeeze(1)
        loss = (output - batch.target).square().sum()
        self.loss_sum += loss.item()
        gradients = torch.autograd.grad(loss, list(self._net.parameters()))
        return torch.cat([one.flatten() for one in gradients]), batch.num_rows

    def mean(self) -> torch.Tensor:
        """That of all replicas, by the samples they have seen; these are counted anew."""
        shares = self.rows / self.rows.sum()
        self.rows.zero_()
        return shares @ self.x
