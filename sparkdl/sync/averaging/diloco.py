"""DiLoCo: replicas train apart for long; what they have moved is a gradient of an outer optimizer.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023; in
fragments, and with overlap: Douillard et al., "Streaming DiLoCo with overlapping communication",
arXiv 2501.18512. Fragment ``p`` of ``P`` is sent at steps ``p H / P``, ``p H / P + H``, ... of the
run (the first fragment from ``H`` on), arrives a fixed number of steps later, and is then mixed
with what the replica has made of it meanwhile. So bits repeat. Ranks wait for each other when a
fragment is sent (a message of a few bytes says what each replica counts), not while it travels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from sparkdl.comm.communicator import Communicator
from sparkdl.comm.compression.compression import Shapes
from sparkdl.config import require
from sparkdl.errors import ConfigError
from sparkdl.mesh import Mesh
from sparkdl.storage.stateful import Stateful
from sparkdl.sync.apart import OwnWeightsSynchronizer
from sparkdl.sync.averaging.averaging import AveragingStrategy, OptimizerState
from sparkdl.sync.averaging.mean import MeanOfReplicas
from sparkdl.sync.averaging.outer_step import OuterOptimizer
from sparkdl.sync.averaging.period import check_period
from sparkdl.sync.gradient_buckets import Changes
from sparkdl.sync.strategy import SetupArguments, Synchronizer


@dataclass(frozen=True, kw_only=True)
class DiLoCo(AveragingStrategy):
    """Rounds of many steps, after which an outer optimizer steps along the replicas' mean change.

    Each replica keeps its own (inner) optimizer's state; the paper's is AdamW. With the outer
    optimizer SGD, learning rate 1 and no momentum it is `LocalSGD`.

    With several fragments, or steps that overlap, it is Streaming DiLoCo: each fragment is agreed
    on at a time of its own, while training goes on. Then replicas keep weights of their own
    throughout, epochs end no rounds, and what is evaluated and returned is the replicas' mean.
    """

    averaging_period: int = 100
    """Steps between two agreements on the same weight (the paper: 500 for language models)."""
    outer_optimizer: str = "sgd"
    """Name of a class of torch.optim, in any case."""
    outer_learning_rate: float = 0.7
    """Learning rate of the outer optimizer, which steps along the mean change of a round."""
    outer_params: Mapping[str, Any] | None = None
    """Further options of the outer optimizer; None: the paper's momentum of 0.9 in Nesterov's form
    for SGD, torch's own defaults for others."""
    num_fragments: int = 1
    """Parts of the model that are agreed on one after the other, in equal distances."""
    overlap_steps: int = 0
    """Steps that are trained while a fragment travels."""
    mixing: float | None = None
    """Part of its own weights that a replica keeps when a fragment arrives; None: 0.5 if steps
    overlap, as in the paper, otherwise 0, which forgets nothing but what differs."""

    def __post_init__(self) -> None:
        check_period(self.averaging_period)
        check_period(self.num_fragments, name="num_fragments")
        if self.num_fragments > self.averaging_period:
            raise ConfigError(
                f"num_fragments ({self.num_fragments}) must not exceed averaging_period "
                f"({self.averaging_period}): at most one fragment is sent in a step"
            )
        if not 0 <= self.overlap_steps < self.averaging_period:
            raise ConfigError(
                f"overlap_steps must be in [0, averaging_period); received {self.overlap_steps}: "
                "a fragment must have arrived before it is sent again"
            )
        mixing, rate = self.mixing, self.outer_learning_rate
        rule = "mixing must be in [0, 1): with 1 replicas never agree"
        require(mixing is None or 0 <= mixing < 1, rule, mixing)
        require(rate > 0, "outer_learning_rate must be positive", rate)
        self.make_outer(1)

    @property
    def optimizer_state(self) -> OptimizerState:
        return "keep"

    @property
    def kept(self) -> float:
        """The value of ``mixing``, or the default that None stands for."""
        if self.mixing is not None:
            return self.mixing
        return 0.5 if self.overlap_steps else 0.0

    @property
    def is_streaming(self) -> bool:
        """True if there are no rounds that all weights share."""
        return self.num_fragments > 1 or self.overlap_steps > 0 or self.kept > 0

    def make_outer(self, world_size: int) -> OuterOptimizer:
        options = self.outer_params
        if options is None:
            is_sgd = self.outer_optimizer.lower() == "sgd"
            options = {"momentum": 0.9, "nesterov": True} if is_sgd else {}
        if "lr" in options:
            raise ConfigError("outer_params holds 'lr'; set outer_learning_rate instead")
        return OuterOptimizer(self.outer_optimizer, {"lr": self.outer_learning_rate, **options})

    def why_not_divided(self, mesh: Mesh) -> str | None:
        if self.is_streaming and mesh.pipeline > 1:
            return (
                "fragments are made of the layers of the whole model, of which a stage has some; "
                "use num_fragments=1 without overlap_steps and mixing"
            )
        return super().why_not_divided(mesh)

    def messages(self, shapes: Shapes, element_size: int) -> Sequence[Shapes]:
        fragments = fragments_of(shapes, self.num_fragments)
        return [[shapes[place] for place in places] for places in fragments]

    def setup(self, *setup: *SetupArguments) -> Synchronizer:
        """See `SyncStrategy.setup`; ConfigError if the model has fewer layers than fragments."""
        if self.is_streaming:
            return StreamingSynchronizer(*setup, strategy=self)
        return super().setup(*setup)


class _Fragment(Stateful):
    """Some parameters, what all replicas agree on about them, and what is under way."""

    shared_state: ClassVar = ("anchor", "due", "outer", "changes")
    rank_state: ClassVar = ("seen", "changes")

    def __init__(
        self, parameters: Sequence[nn.Parameter], offset: int, comm: Communicator, strategy: DiLoCo
    ) -> None:
        self.parameters = parameters
        self.offset = offset
        self.changes = Changes(parameters, comm, strategy.resolved_compression())
        self.outer = strategy.make_outer(comm.world_size)
        self.anchor = [parameter.detach().clone() for parameter in parameters]
        self.due: int | None = None
        """Completed steps at which what is under way arrives; None: nothing is."""
        self.seen = 0.0
        """Weight of this rank's samples when the fragment was last sent."""

    def state_dict(self) -> dict[str, Any]:
        """See `Stateful.state_dict`; what is under way must have been waited for."""
        sums = None if self.due is None else self.changes.sums()
        return {**super().state_dict(), "sums": sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if state["sums"] is not None:
            self.changes.set_sums(state["sums"])


class StreamingSynchronizer(OwnWeightsSynchronizer):
    """See `DiLoCo`. What all replicas agree on is their mean, by the samples each has seen."""

    shared_state: ClassVar = ("fragments",)
    rank_state: ClassVar = (*OwnWeightsSynchronizer.rank_state, "fragments")

    def __init__(self, *setup: *SetupArguments, strategy: DiLoCo) -> None:
        super().__init__(*setup)
        self._strategy = strategy
        self._mean = MeanOfReplicas(self.model, self.optimizer, self._comm)
        self._fragments = self._make_fragments()

    def after_step(self, step: int) -> bool:
        done = step + 1
        for fragment in self._fragments:
            if fragment.due == done:
                self._arrive(fragment)
            if done % self._strategy.averaging_period == fragment.offset:
                self._send(fragment, done)
        return True

    def show_agreed(self) -> None:
        """See `OwnWeightsSynchronizer.show_agreed`; what is under way arrives at its own time."""
        for fragment in self._fragments:
            fragment.changes.wait()
        shares = self._mean.shares(self.round_sums[1].item())
        if any(shares):
            self._mean.tensors(self.parameters, shares)

    def begin(self) -> None:
        super().begin()
        self._fragments = self._make_fragments()

    def _send(self, fragment: _Fragment, done: int) -> None:
        """Start to sum what the fragment has moved since all replicas agreed on it."""
        seen = self.round_sums[1].item()
        shares = self._mean.shares(seen - fragment.seen)
        fragment.seen = seen
        if not any(shares):
            return
        fragment.changes.take(fragment.parameters, fragment.anchor)
        fragment.changes.start_all(shares[self._comm.rank])
        fragment.due = done + self._strategy.overlap_steps
        if self._strategy.overlap_steps == 0:
            self._arrive(fragment)

    @torch.no_grad()
    def _arrive(self, fragment: _Fragment) -> None:
        """Let the outer optimizer step, and mix its result into the replica's weights."""
        fragment.changes.wait()
        fragment.due = None
        agreed = torch._foreach_add(fragment.anchor, fragment.changes.tensors)
        fragment.outer.step(fragment.anchor, agreed, self.learning_rate())
        for parameter, begin, value in zip(
            fragment.parameters, fragment.anchor, agreed, strict=True
        ):
            parameter.lerp_(value, 1 - self._strategy.kept)
            begin.copy_(value)

    def _make_fragments(self) -> list[_Fragment]:
        strategy, wanted = self._strategy, self._strategy.num_fragments
        places = fragments_of([tuple(p.shape) for p in self.parameters], wanted)
        if len(places) < wanted:
            raise ConfigError(
                f"num_fragments is {wanted}, but the model has {len(places)} layers with trained "
                "weights; use fewer fragments"
            )
        return [
            _Fragment(
                [self.parameters[place] for place in some],
                number * strategy.averaging_period // wanted,
                self._comm,
                strategy,
            )
            for number, some in enumerate(places)
        ]


def fragments_of(shapes: Shapes, num_fragments: int) -> list[list[int]]:
    """Return which parameters make up each fragment, given all shapes in the model's order.

    A layer begins with each parameter of two or more dimensions; those of fewer that follow it,
    such as its bias, belong to it. Layers are dealt to fragments in turn (the paper's strided
    pattern). There are fewer fragments if there are fewer layers.
    """
    layers: list[list[int]] = [[]]
    for place, shape in enumerate(shapes):
        if len(shape) >= 2 and any(len(shapes[i]) >= 2 for i in layers[-1]):
            layers.append([])
        layers[-1].append(place)
    dealt = [layers[number::num_fragments] for number in range(num_fragments)]
    return [[place for layer in some for place in layer] for some in dealt if some]
