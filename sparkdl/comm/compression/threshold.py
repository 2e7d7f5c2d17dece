"""The threshold compression: places and signs of the values that have reached a threshold.

Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing", Interspeech 2015,
with the adaptive threshold, residual clipping and dense messages of Deeplearning4j's gradient
sharing. Unlike there, what all ranks get is the mean over ranks, both signs are treated alike in
dense messages, and what has not been sent survives epochs and checkpoints.

A message is int32 words: how many values were sent, whether it is dense, the threshold as a
float64; then either place + 1 of each value, negative for a negative one, or 2 bits for every
value, whichever is shorter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from sparkdl.comm.communicator import Communicator, Pending
from sparkdl.comm.compression.bit_packing import BITS, Ternary, nonzero, packed_place, packed_size
from sparkdl.comm.compression.compression import (
    After,
    Compression,
    Compressor,
    Shapes,
    check_places,
    count,
    shapes_of,
)
from sparkdl.config import require
from sparkdl.errors import ConfigError

HEADER_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class ThresholdCompression(Compression):
    """Send the values that have reached a threshold, which follows the wanted sparsity.

    Each is sent as the threshold itself; what is beyond it waits for the next step. The defaults
    are Deeplearning4j's, but for the threshold: what travels there are updates, which have the
    learning rate in them.
    """

    threshold: float | None = None
    """The first one, in units of what travels. None: such that ``max_sparsity`` of the first values
    reach it, on the average of the ranks."""
    min_sparsity: float = 1e-4
    """The part of all values that is sent at least; if less, the threshold falls."""
    max_sparsity: float = 1e-2
    """The part that is sent at most; if more, the threshold rises. 0 and 1 keep the threshold."""
    decay: float = 0.5 ** (1 / 20)
    """Factor by which the threshold is multiplied, or divided, after a step."""
    residual_clip: float | None = 5.0
    """Thresholds to which what waits is cut, lest it dominates later; None: never."""
    clip_every: int = 5
    """Steps from one such cut to the next."""

    def __post_init__(self) -> None:
        first, least, most = self.threshold, self.min_sparsity, self.max_sparsity
        rule = "threshold must be positive, or None"
        require(first is None or 0 < first < math.inf, rule, first)
        rule = "min_sparsity must be less than max_sparsity, both between 0 and 1"
        require(0 <= least < most <= 1, rule, (least, most))
        if self.threshold is None and self.max_sparsity == 1:
            raise ConfigError(
                "with max_sparsity=1 the threshold never rises, and no first one can be found; "
                "give threshold"
            )
        clip, every = self.residual_clip, self.clip_every
        require(0 < self.decay < 1, "decay must be between 0 and 1", self.decay)
        rule = "residual_clip must be at least 1 threshold, or None"
        require(clip is None or clip >= 1, rule, clip)
        require(every >= 1, "clip_every must be at least 1", every)

    def make(self, views: Sequence[torch.Tensor], comm: Communicator) -> Compressor:
        numel = count(shapes_of(views))
        check_places(numel)
        return ThresholdCompressor(self, comm, views[0].new_zeros(numel))

    def wire_bytes(self, shapes: Shapes, element_size: int, world_size: int) -> None:
        """None: it depends on the data."""
        return None

    def adapted(self, threshold: float, sparsity: float) -> float:
        """The threshold of the next step after one in which a part of all values was sent."""
        if sparsity < self.min_sparsity:
            return threshold * self.decay
        if sparsity > self.max_sparsity:
            return threshold / self.decay
        return threshold


class ThresholdCompressor(Compressor):
    """See `ThresholdCompression`; the threshold is equal on all ranks."""

    shared_state: ClassVar = ("step", "threshold")
    rank_state: ClassVar = ("residual",)

    def __init__(
        self, options: ThresholdCompression, comm: Communicator, residual: torch.Tensor
    ) -> None:
        self._options = options
        self._comm = comm
        self._residual = residual
        self._threshold = options.threshold
        self._step = 0
        # A guess that saves time; messages of both kinds decode to the same bits.
        self._was_dense = False

    def start(self, flat: torch.Tensor) -> Pending:
        if not len(flat):
            return After([], lambda: None)
        self._step += 1
        message = self._encode(flat)
        size = torch.tensor([len(message)], device=message.device)
        sizes = size.new_empty(self._comm.world_size, 1)
        pending = self._comm.all_gather_async(size, sizes)
        return After([pending], lambda: self._finish(flat, message, sizes.flatten().tolist()))

    def _encode(self, flat: torch.Tensor) -> torch.Tensor:
        threshold = self._threshold
        if threshold is None:
            threshold = self._comm.world_size * reached_by(flat, self._options.max_sparsity)
            if threshold == 0:
                return _message(flat, 0, 0, 0.0, 0)
        message = encode(flat, self._comm.world_size, self._residual, threshold, self._was_dense)
        num_sent, is_dense, _ = read_header(message)
        self._was_dense = bool(is_dense) and 4 * num_sent >= packed_size(len(flat), BITS)
        clip = self._options.residual_clip
        if clip is not None and self._step % self._options.clip_every == 0:
            self._residual.clamp_(-clip * threshold, clip * threshold)
        return message

    def _finish(self, flat: torch.Tensor, message: torch.Tensor, sizes: list[int]) -> None:
        """Exchange the messages, padded to one size, and add them up.

        All ranks add in rank order, so that their sums have equal bits.
        """
        padded = message.new_zeros(max(sizes))
        padded[: len(message)] = message
        rows = zip(self._comm.all_gather(padded), sizes, strict=True)
        messages = [row[:size] for row, size in rows]
        flat.zero_()
        num_sent = sum(decode_add(message, 1 / len(messages), flat) for message in messages)
        if self._threshold is None:
            used = [one for one in (read_header(message)[2] for message in messages) if one > 0]
            self._threshold = sum(used) / len(used) if used else None
        if self._threshold is not None:
            sparsity = num_sent / (len(messages) * len(flat))
            self._threshold = self._options.adapted(self._threshold, sparsity)


def reached_by(values: torch.Tensor, sparsity: float) -> float:
    """The size that a part of all values has at least, and at least one; 0 if all are zero."""
    sizes = values.abs()
    limit = torch.topk(sizes, max(1, round(sparsity * len(values)))).values[-1].item()
    return limit or sizes.max().item()


def encode(
    values: torch.Tensor,
    scale: float,
    residual: torch.Tensor,
    threshold: float,
    is_dense: bool = False,
) -> torch.Tensor:
    """Say which of ``scale * values + residual``, ``(numel,)``, have reached the threshold.

    ``residual`` is what earlier messages left out, and afterwards what this one leaves out. With
    ``is_dense`` a sparse message is unlikely to be shorter, so that none is tried. The message is
    uint8, a multiple of 8 of them; if some value is not finite it says that nothing is.
    """
    ternary = Ternary(len(values), values)
    limit = 0 if is_dense else packed_size(len(values), BITS) // 4
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    num_found = 0
    total = values.new_zeros(())
    for start, stop in ternary.blocks:
        block = residual[start:stop].add_(values[start:stop], alpha=scale)
        total += block.sum()
        if num_found < limit:
            places, signs = nonzero(ternary.codes(block, threshold), limit - num_found)
            found.append((places + start, signs))
            num_found += len(places)
    if not total.isfinite():
        return _message(values, 0, 0, math.nan, 0)
    if num_found < limit:
        return _sparse(residual, threshold, found)
    return _dense(ternary, residual, threshold)


def decode_add(message: torch.Tensor, scale: float, out: torch.Tensor) -> int:
    """Add ``scale`` times what a message says to ``out``; returns how many values were sent."""
    num_sent, is_dense, threshold = read_header(message)
    if math.isnan(threshold):
        out.fill_(math.nan)
    elif is_dense:
        ternary = Ternary(len(out), out)
        for start, stop in ternary.blocks:
            codes = message[HEADER_BYTES:][packed_place(start, stop)]
            out[start:stop].add_(ternary.steps(codes, stop - start), alpha=scale * threshold)
    else:
        words = message[HEADER_BYTES : HEADER_BYTES + 4 * num_sent].view(torch.int32)
        steps = words.sign().to(out.dtype)
        out.index_add_(0, words.abs() - 1, steps, alpha=scale * threshold)
    return num_sent


def read_header(message: torch.Tensor) -> tuple[int, int, float]:
    """Read how many values were sent, whether the message is dense, and the threshold."""
    num_sent, is_dense = message[:8].view(torch.int32).tolist()
    return num_sent, is_dense, message[8:HEADER_BYTES].view(torch.float64).item()


def _sparse(
    residual: torch.Tensor, threshold: float, found: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    places = torch.cat([places for places, _ in found])
    signs = torch.cat([signs for _, signs in found])
    residual.index_add_(0, places, signs.to(residual.dtype), alpha=-threshold)
    message = _message(residual, len(places), 0, threshold, 4 * len(places))
    words = message[HEADER_BYTES : HEADER_BYTES + 4 * len(places)].view(torch.int32)
    words.copy_((places + 1) * signs)
    return message


def _dense(ternary: Ternary, residual: torch.Tensor, threshold: float) -> torch.Tensor:
    message = _message(residual, 0, 1, threshold, packed_size(len(residual), BITS))
    num_sent = residual.new_zeros((), dtype=torch.float64)
    for start, stop in ternary.blocks:
        codes = message[HEADER_BYTES:][packed_place(start, stop)]
        num_sent += ternary.take(residual[start:stop], threshold, codes)
    message[:4].view(torch.int32).copy_(num_sent)
    return message


def _message(
    like: torch.Tensor, num_sent: int, is_dense: int, threshold: float, num_bytes: int
) -> torch.Tensor:
    size = -(-(HEADER_BYTES + num_bytes) // 8) * 8
    message = torch.zeros(size, dtype=torch.uint8, device=like.device)
    message[:8].view(torch.int32).copy_(torch.tensor([num_sent, is_dense]))
    message[8:HEADER_BYTES].view(torch.float64).fill_(threshold)
    return message
