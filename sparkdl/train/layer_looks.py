"""Looks at the layers of rank 0's replica now and then, for reports: nothing of training changes.

Of a large tensor evenly spaced numbers are looked at, so a look costs about the same for all
modules, and what is reported is small.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import math
import time
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from sparkdl.config import Looks
from sparkdl.data.batches import Batch
from sparkdl.data.plan import TrainPlan
from sparkdl.train.callbacks import Observer
from sparkdl.train.objective.part import Part

logger = logging.getLogger(__name__)

_MOST_NUMBERS = 2**14
"""Most numbers of a tensor that are looked at."""
_MOST_TENSORS = 200
"""Most tensors of a module that are looked at; if there are more, evenly spaced ones."""
_LOOKS_PER_RUN, _FEWEST_STEPS = 20, 25
"""Fewest looks in a run, and the steps that must be between two looks."""
_BUCKETS = 40
_HISTOGRAM_SECONDS = 0.5
"""Shortest time between two histograms: they are the larger part of what is sent."""
_LARGEST_IMAGE = 128
"""Pixels of a side; larger images are sent smaller."""


class LayerLooks(Part):
    """Looks at some steps.

    Nothing that only shows may end what trains: whatever goes wrong here is logged once, and then
    nobody looks any more.
    """

    def __init__(self, looks: Looks, module: nn.Module, plan: TrainPlan) -> None:
        """Look at what trains in ``module``, as often as ``looks`` says, in a run of ``plan``."""
        self._module = module
        self._looks = looks
        usual = min(plan.steps_per_epoch, plan.total_steps // _LOOKS_PER_RUN)
        self._every = looks.every or max(usual, _FEWEST_STEPS)
        self._last_step = plan.first_step + plan.total_steps
        self._images = looks.images
        self._histograms_at = -math.inf
        self._has_failed = False
        self._parameters: dict[str, nn.Parameter] = {}
        self._before: list[torch.Tensor] = []
        self._found: dict[str, Any] = {}

    def see(self, batch: Batch) -> None:
        """See the inputs of a step; of the first one that has images, these are kept."""
        if self._images == 0 or batch.num_rows == 0:
            return
        with self._whatever_happens():
            for place, value in enumerate(batch.inputs):
                if _has_images(value):
                    name = batch.names[place] if batch.names else None
                    found = _pictures(value[: self._images])
                    self._found["images"] = {"name": name or f"input {place + 1}", **found}
                    break
        self._images = 0

    def before_update(self, step: int) -> None:
        """Look at weights and gradients before the optimizer's step ``step``, if one is due."""
        self._before = []
        is_due = (step + 1) % self._every == 0 or step + 1 == self._last_step
        if self._has_failed or not is_due:
            return
        with self._whatever_happens():
            self._parameters = self._parameters or _trained(self._module)
            self._before = [_sample(p).clone() for p in self._parameters.values()]
            now = time.monotonic()
            if self._looks.histograms and now - self._histograms_at >= _HISTOGRAM_SECONDS:
                self._histograms_at = now
                self._found["histograms"] = self._histograms()

    def after_update(self) -> None:
        """Look at what the step has changed; if that is nothing, `after_step` looks again."""
        if not self._before:
            return
        with self._whatever_happens():
            after = [_sample(p) for p in self._parameters.values()]
            moved = _sizes([*torch._foreach_sub(after, self._before)])
            if any(moved):
                self._found["ratios"] = self._ratios(moved, _sizes(self._before))
                self._before = []

    def after_step(self, step: int, observer: Observer) -> None:
        """After step number ``step``, with what the strategy made of it: report what was seen."""
        self.after_update()  # optimizers whose weights are served elsewhere take effect here
        self._before = []
        if self._found:
            observer.layers(step + 1, self._found)
            self._found = {}

    @contextlib.contextmanager
    def _whatever_happens(self) -> Iterator[None]:
        try:
            with torch.no_grad():
                yield
        except Exception as error:
            self._before, self._found, self._images = [], {}, 0
            self._has_failed = True
            logger.warning("reports have no more of the layers: %s", error, exc_info=True)

    def _ratios(self, moved: list[float], sizes: list[float]) -> dict[str, float | None]:
        """Return, by layer, the ratios of the magnitudes of the sampled numbers."""
        sums: dict[str, list[float]] = {}
        for (name, p), now, size, values in zip(
            self._parameters.items(), moved, sizes, self._before, strict=True
        ):
            layer = name.rpartition(".")[0] or type(self._module).__name__
            of = sums.setdefault(layer, [0.0, 0.0])
            of[0] += now * p.numel() / len(values)
            of[1] += size * p.numel() / len(values)
        return {
            layer: _short(change / size) if size else (None if change else 0.0)
            for layer, (change, size) in sums.items()
        }

    def _histograms(self) -> dict[str, Any]:
        found = {}
        has_stepped = any(parameter.grad is not None for parameter in self._parameters.values())
        for (name, parameter), values in zip(self._parameters.items(), self._before, strict=True):
            found[f"weights/{name}"] = _histogram(values)
            if has_stepped:  # what no step uses has none
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                found[f"gradients/{name}"] = _histogram(_sample(gradient))
        return {name: of for name, of in found.items() if of is not None}


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters to look at, by name."""
    trained = [
        (name, p)
        for name, p in module.named_parameters()
        if p.requires_grad and p.is_floating_point() and p.numel()
    ]
    return dict(trained[:: math.ceil(len(trained) / _MOST_TENSORS) or 1])


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Evenly spaced numbers of a tensor, at an odd distance, so that they are of many columns."""
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    flat = tensor.detach().reshape(-1)
    return flat[:: math.ceil(len(flat) / _MOST_NUMBERS) | 1].float()


def _sizes(tensors: list[torch.Tensor]) -> list[float]:
    """The sum of the magnitudes of each tensor; waits for the device once."""
    sizes: list[float] = torch.stack(list(torch._foreach_norm(tensors, 1))).tolist()
    return sizes


def _short(value: float) -> float | None:
    return float(f"{value:.3e}") if math.isfinite(value) else None


def _histogram(values: torch.Tensor) -> dict[str, Any] | None:
    """Counts in equal buckets from ``low`` to ``high``; None if there is nothing to count."""
    values = values.cpu()  # on CUDA histc is not deterministic
    values = values[values.isfinite()]
    if not len(values):
        return None
    low, high = (float(value) for value in values.aminmax())
    counts = [len(values)]
    if low < high:
        counts = [int(n) for n in values.histc(_BUCKETS, low, high).tolist()]
    return {
        "low": low,
        "high": high,
        "counts": counts,
        "sum": _short(values.sum(dtype=torch.float64).item()),
        "sum_squares": _short(values.double().square().sum().item()),
    }


def _has_images(value: torch.Tensor) -> bool:
    """Return True if an input is a batch of images: gray or in colour, at least 8 pixels a side."""
    if value.layout != torch.strided or value.dim() != 4:
        return False
    _, channels, *sides = value.shape
    return channels in (1, 3) and min(sides) >= 8


def _pictures(images: torch.Tensor) -> dict[str, Any]:
    """Images as bytes, from the smallest value, which is black, to the largest."""
    values = images.detach().float().cpu().nan_to_num(0.0, 0.0, 0.0)
    largest = max(values.shape[2:])
    if largest > _LARGEST_IMAGE:
        size = [max(1, side * _LARGEST_IMAGE // largest) for side in values.shape[2:]]
        values = nn.functional.interpolate(values, size=size, mode="area")
    black, white = values.aminmax()
    shades = (values - black) / (white - black).clamp_min(1e-30) * 255
    data = shades.round().to(torch.uint8).numpy().tobytes()
    packed = base64.b64encode(zlib.compress(data)).decode()
    return {"shape": list(values.shape), "data": packed}
