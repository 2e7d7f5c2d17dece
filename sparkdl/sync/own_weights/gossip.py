"""Gossip: now and then two replicas meet and take their mean; nobody waits for all.

Blot et al., "Gossip training for deep learning", 2016 (GoSGD), on the sums and weights of Kempe,
Dobra & Gehrke, "Gossip-Based Computation of Aggregate Information", FOCS 2003. There a replica
pushes half of its weight to a peer of its choice at any time; here the pairs of a step follow from
seed and step, and both push at once, so that bits repeat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from sparkdl.config import require
from sparkdl.mesh import Mesh
from sparkdl.sync.apart import OWN_WEIGHTS, OwnWeightsSynchronizer, why_not_apart
from sparkdl.sync.averaging.mean import MeanOfReplicas, by_kind, fill, flat_of
from sparkdl.sync.exchange_pattern import ModelSize, Pattern
from sparkdl.sync.strategy import SetupArguments, SyncStrategy


@dataclass(frozen=True, kw_only=True)
class Gossip(SyncStrategy):
    """After each step, pairs of ranks swap their weights with some probability.

    Each replica has a weight in the whole, which begins with its first sample; two that meet take
    the mean by these weights and share their sum. What is evaluated, kept in checkpoints and
    returned is the mean of all by these weights; each replica then goes on from its own. It sends
    uncompressed: what two peers send each other is no sum over all ranks.
    """

    probability: float = 0.1
    """Probability with which a pair of a step meets."""
    seed: int = 0
    """Seed from which the pairs are drawn."""

    def __post_init__(self) -> None:
        require(0 < self.probability <= 1, "probability must be in (0, 1]", self.probability)
        require(self.seed >= 0, "seed must not be negative", self.seed)

    trains_apart = True

    def why_not_rounds(self) -> str | None:
        return OWN_WEIGHTS

    def why_not_divided(self, mesh: Mesh) -> str | None:
        return why_not_apart(mesh)

    def pairs(self, step: int, world_size: int) -> list[tuple[int, int]]:
        """The ranks that meet after ``step``; the same wherever it is asked. No rank is twice."""
        generator = np.random.default_rng((self.seed, step))
        order = generator.permutation(world_size).tolist()
        meets = generator.random(world_size // 2) < self.probability
        pairs = zip(order[0::2], order[1::2], strict=False)  # an odd one out stays alone
        return [pair for pair, does in zip(pairs, meets.tolist(), strict=True) if does]

    def pattern(self, size: ModelSize, world_size: int) -> Pattern:
        """See `SyncStrategy.pattern`: now and then a message to one other rank.

        Besides, the whole model travels when an epoch ends or a checkpoint is written.
        """
        return Pattern(
            kind="messages",
            num_bytes=size.gradient_bytes,
            period=1 / self.probability,
            copies=3,
            latency_rounds=1,
            exchanged_bytes=size.gradient_bytes,
            sent_bytes=2 * (world_size // 2) / world_size * size.gradient_bytes,
            in_pairs=True,
        )

    def setup(self, *setup: *SetupArguments) -> GossipSynchronizer:
        return GossipSynchronizer(*setup, strategy=self)


class GossipSynchronizer(OwnWeightsSynchronizer):
    """See `Gossip`."""

    rank_state: ClassVar = (*OwnWeightsSynchronizer.rank_state, "weight", "has_trained")

    def __init__(self, *setup: *SetupArguments, strategy: Gossip) -> None:
        super().__init__(*setup)
        self._strategy = strategy
        self._mean = MeanOfReplicas(self.model, self.optimizer, self._comm)
        self._weight = 0.0
        self._has_trained = False

    def after_step(self, step: int) -> bool:
        if not self._has_trained and self.round_sums[1].item() > 0:
            self._has_trained = True
            self._weight += 1.0
        for pair in self._strategy.pairs(step, self._comm.world_size):
            if self._comm.rank in pair:
                self._meet(sum(pair) - self._comm.rank)
        return True

    def show_agreed(self) -> None:
        shares = self._mean.shares(self._weight)
        if any(shares):
            self._mean.tensors(self.parameters, shares)

    @torch.no_grad()
    def _meet(self, peer: int) -> None:
        """Take the mean with ``peer``, and half of both weights."""
        mine = torch.tensor([self._weight], dtype=torch.float64, device=self.parameters[0].device)
        total = self._weight + self._comm.exchange(mine, peer).item()
        share = self._weight / total if total > 0 else 0.5
        self._weight = total / 2
        for group in by_kind(self.parameters):
            flat = flat_of(group)
            theirs = self._comm.exchange(flat, peer)
            # The same sum on both sides, but for the order of its two terms.
            flat.mul_(share).add_(theirs.mul_(1 - share))
            fill(group, flat)
