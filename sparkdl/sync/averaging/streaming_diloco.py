"""Streaming DiLoCo: a model is agreed on in fragments, each while training goes on.

Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv 2501.18512. Fragment
``p`` of ``P`` is sent at steps ``p H / P``, ``p H / P + H``, ... of the run (the first fragment
from ``H`` on), arrives a fixed number of steps later, and is then mixed with what the replica has
made of it meanwhile. What arrives when follows from the step alone, so that bits repeat. Ranks wait
for each other when a fragment is sent (a message of a few bytes says what each replica counts), not
while it travels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sparkdl.errors import ConfigError
from sparkdl.sync.apart import OwnWeightsSynchronizer
from sparkdl.sync.averaging.mean import MeanOfReplicas
from sparkdl.sync.strategy import SetupArguments
from sparkdl.sync.weight_changes import Changes

if TYPE_CHECKING:
    from sparkdl.comm.compression.compression import Compression, Shapes
    from sparkdl.sync.averaging.outer_step import OuterRule


def fragments_of(shapes: Shapes, num_fragments: int) -> list[list[int]]:
    """Which parameters make up each fragment, given all shapes in the model's order.

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


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """The options of `DiLoCo` that its streaming form needs."""

    averaging_period: int
    num_fragments: int
    overlap_steps: int
    kept: float
    """Part of its own weights that a replica keeps when a fragment arrives."""
    compression: Compression | None
    make_outer: Callable[[int], OuterRule]
    """Makes the outer optimizer of one fragment, given the number of ranks."""


class _Fragment:
    """Some parameters, what all replicas agree on about them, and what is under way."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], offset: int, changes: Changes, outer: OuterRule
    ) -> None:
        self.parameters = parameters
        self.offset = offset
        self.changes = changes
        self.outer = outer
        self.anchor = [parameter.detach().clone() for parameter in parameters]
        self.due: int | None = None
        """Completed steps at which what is under way arrives; None: nothing is."""
        self.seen = 0.0
        """Weight of this rank's samples when the fragment was last sent."""

    def state_dict(self) -> dict[str, Any]:
        """Equal on all ranks; what is under way must have been waited for."""
        return {
            "anchor": self.anchor,
            "due": self.due,
            "sums": None if self.due is None else self.changes.sums(),
            "outer": self.outer.state_dict(),
            "changes": self.changes.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        for begin, value in zip(self.anchor, state["anchor"], strict=True):
            begin.copy_(value)
        self.due = state["due"]
        if state["sums"] is not None:
            self.changes.set_sums(state["sums"])
        self.outer.load_state_dict(state["outer"])
        self.changes.load_state_dict(state["changes"])

    def rank_state_dict(self) -> dict[str, Any]:
        """What only this rank knows."""
        return {"seen": self.seen, "changes": self.changes.rank_state_dict()}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `rank_state_dict` gave."""
        self.seen = state["seen"]
        self.changes.load_rank_state_dict(state["changes"])


class StreamingSynchronizer(OwnWeightsSynchronizer):
    """See `DiLoCo`. What all replicas agree on is their mean, by the samples each has seen."""

    def __init__(self, *setup: *SetupArguments, options: Streaming) -> None:
        super().__init__(*setup)
        self._options = options
        self._mean = MeanOfReplicas(self.model, self.optimizer, self._comm, None)
        self._fragments = self._make_fragments()

    def after_step(self, step: int) -> bool:
        done = step + 1
        for fragment in self._fragments:
            if fragment.due == done:
                self._arrive(fragment)
            if done % self._options.averaging_period == fragment.offset:
                self._send(fragment, done)
        return True

    def show_agreed(self) -> None:
        """See `OwnWeightsSynchronizer.show_agreed`; what is under way arrives at its own time."""
        for fragment in self._fragments:
            fragment.changes.wait()
        shares = self._mean.shares(self.round_sums[1].item())
        if any(shares):
            self._mean.tensors(self.parameters, shares)

    def state_dict(self) -> dict[str, Any]:
        return {"fragments": [fragment.state_dict() for fragment in self._fragments]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for fragment, values in zip(self._fragments, state["fragments"], strict=True):
            fragment.load_state_dict(values)

    def rank_state_dict(self) -> dict[str, Any]:
        return {
            **super().rank_state_dict(),
            "fragments": [fragment.rank_state_dict() for fragment in self._fragments],
        }

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        super().load_rank_state_dict(state)
        for fragment, values in zip(self._fragments, state["fragments"], strict=True):
            fragment.load_rank_state_dict(values)

    def _send(self, fragment: _Fragment, done: int) -> None:
        """Start to sum what the fragment has moved since all replicas agreed on it."""
        seen = self.round_sums[1].item()
        shares = self._mean.shares(seen - fragment.seen)
        fragment.seen = seen
        if not any(shares):
            return
        fragment.changes.take(fragment.parameters, fragment.anchor)
        fragment.changes.start_all(shares[self._comm.rank])
        fragment.due = done + self._options.overlap_steps
        if self._options.overlap_steps == 0:
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
            parameter.lerp_(value, 1 - self._options.kept)
            begin.copy_(value)

    def _make_fragments(self) -> list[_Fragment]:
        wanted = self._options.num_fragments
        places = fragments_of([tuple(p.shape) for p in self.parameters], wanted)
        if len(places) < wanted:
            raise ConfigError(
                f"num_fragments is {wanted}, but the model has {len(places)} layers with trained "
                "weights; use fewer fragments"
            )
        return [
            self._make_fragment([self.parameters[i] for i in some], number)
            for number, some in enumerate(places)
        ]

    def _make_fragment(self, parameters: Sequence[nn.Parameter], number: int) -> _Fragment:
        options = self._options
        return _Fragment(
            parameters,
            number * options.averaging_period // options.num_fragments,
            Changes(parameters, self._comm, options.compression),
            options.make_outer(self._comm.world_size),
        )
