"""The mean of several replicas' states, as a pure function.

The mean of means is the mean: a tree of merges gives what one merge gives, up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_PIECE = 1 << 16
"""Numbers that are summed at a time: their float64 sums stay in the cache."""
STEP = "step"
"""Key under which torch's optimizers count their steps; a count is no quantity to average."""


def merge(states: Sequence[Any], weights: Sequence[float]) -> Any:
    """Weighted mean of ``states``, taken in their order; the inputs stay as they are.

    Floating tensors become their weighted mean, formed in float64 and kept in their own dtype. A
    number called ``step`` becomes the largest. Integer tensors, such as BatchNorm's count of
    batches, and everything else that is no tensor, are those of the first state with a positive
    weight. Keys that a state lacks (an optimizer that never stepped) count for the others only.

    Args:
        states: trees of dicts, lists and tuples, of equal shape but for missing keys.
        weights: one per state, not negative, such as the numbers of samples they have seen.

    Raises:
        ValueError: no weight is positive.
    """
    kept = [(s, w) for s, w in zip(states, weights, strict=True) if w > 0]
    if not kept:
        raise ValueError("no state has a positive weight")
    return _merge([state for state, _ in kept], [weight for _, weight in kept])


def _merge(states: list[Any], weights: list[float], key: Any = None) -> Any:
    first = states[0]
    if isinstance(first, dict):
        return _merge_dicts(states, weights)
    if isinstance(first, list | tuple):
        merged = [_merge(list(items), weights) for items in zip(*states, strict=True)]
        return type(first)(merged) if type(first) in (list, tuple) else first
    if key == STEP:
        return max(states, key=float)
    if isinstance(first, torch.Tensor) and first.is_floating_point():
        return weighted_mean(states, weights)
    return first


def _merge_dicts(states: list[dict[Any, Any]], weights: list[float]) -> dict[Any, Any]:
    merged = {}
    for key in dict.fromkeys(key for state in states for key in state):
        having = [(s[key], w) for s, w in zip(states, weights, strict=True) if key in s]
        merged[key] = _merge([value for value, _ in having], [w for _, w in having], key)
    return merged


def weighted_mean(tensors: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """``sum(w * t) / sum(w)`` in the dtype of the first tensor, formed in float64."""
    total = sum(weights)
    mean = torch.empty_like(tensors[0], memory_format=torch.contiguous_format)
    flat = mean.view(-1)
    parts = [tensor.detach().reshape(-1) for tensor in tensors]
    wide = torch.empty(min(_PIECE, len(flat)), dtype=torch.float64, device=mean.device)
    for start in range(0, len(flat), _PIECE):
        stop = min(start + _PIECE, len(flat))
        piece = wide[: stop - start].zero_()
        for part, weight in zip(parts, weights, strict=True):
            piece.add_(part[start:stop], alpha=weight / total)
        flat[start:stop] = piece
    return mean
