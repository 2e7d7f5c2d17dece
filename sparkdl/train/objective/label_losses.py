"""The losses of several labels: one sum to minimize, and a history of each.

The loss of a sample is the weighted sum of its losses on the labels, so that the mean over samples
adds up over micro-batches and ranks as that of a single loss does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sparkdl.config import CUSTOM, Task
from sparkdl.errors import ConfigError
from sparkdl.train.objective.loss import (
    CallableLoss,
    ClassLoss,
    LossFunction,
    LossRows,
    Sums,
    resolve_loss,
    rows_of,
)


def loss_of(
    loss: Any, task: Task, weights: Mapping[str, float], *, copies: bool = True
) -> LossFunction:
    """The loss: one, or with a mapping by label their sum, by ``weights``, 1 where there is none.

    Errors, and ``copies``, are those of `resolve_loss`.
    """
    if not isinstance(loss, Mapping):
        return resolve_loss(loss, task, copies=copies)
    parts = {name: resolve_loss(part, task, copies=copies) for name, part in loss.items()}
    return LossSum(parts, weights)


def for_each(loss: Any, labels: tuple[str, ...]) -> Any:
    """Return what ``loss`` means for several labels.

    A mapping must have a loss for each label, and no other (ConfigError). A name, or a loss of
    torch's kind, is taken for each. Any other function is called once, with the module's output and
    a dict of all labels.
    """
    if isinstance(loss, Mapping):
        if set(loss) != set(labels):
            raise ConfigError(
                f"loss must have an entry for each of the labels {list(labels)}; received "
                f"{list(loss)}"
            )
        return {name: loss[name] for name in labels}
    is_torch = hasattr(loss, "reduction") or (
        isinstance(loss, type) and issubclass(loss, nn.Module)
    )
    return dict.fromkeys(labels, loss) if isinstance(loss, str) or is_torch else loss


def class_labels(loss: Any) -> set[str]:
    """The labels whose losses compare class numbers."""
    if not isinstance(loss, Mapping):
        return set()
    return {
        name for name, part in loss.items() if isinstance(resolve_loss(part, CUSTOM), ClassLoss)
    }


def ignored_class(loss: Any, task: Task) -> int | None:
    """The class number that a loss leaves out; None: it knows none."""
    if loss is None:
        return None
    found = resolve_loss(loss, task, copies=False)
    return found.ignore_index if isinstance(found, ClassLoss) else None


class LossSum:
    """The weighted sum of a loss per label, as a `LossFunction`.

    The module returns a dict by the labels' names, a tuple in the labels' order, or one tensor,
    which then goes to every loss. A label alone has torch's mean. Of several, class weights weigh
    the losses of their samples but do not enter the mean, and targets that are ignored count as no
    loss: the denominator is that of all labels. ``parts`` has the label's losses, ``weights`` by
    how much they count, 1 where none was given.
    """

    def __init__(self, parts: Mapping[str, LossFunction], weights: Mapping[str, float]) -> None:
        self.parts = dict(parts)
        for part in self.parts.values():
            if isinstance(part, CallableLoss | ClassLoss):
                part.counts_alike = len(self.parts) > 1
        self.weights = {name: float(weights.get(name, 1.0)) for name in parts}

    def to(self, device: torch.device) -> None:
        for part in self.parts.values():
            part.to(device)

    @property
    def own(self) -> Any:
        """See `LossFunction.own`."""
        return self.parts

    def predictions(self, output: Any) -> dict[str, Any]:
        """Return the predictions of each label, as its metrics see them."""
        return {name: part.predictions(value) for name, part, value in self.pairs(output)}

    def __call__(self, output: Any, target: Any, weight: torch.Tensor | None) -> Sums:
        loss_sum, weight_sum, _ = self.apart(output, target, weight)
        return loss_sum, weight_sum

    def rows(self, output: Any, target: Mapping[str, torch.Tensor]) -> LossRows | None:
        weighted, counts = [], None
        for name, part, value in self.pairs(output):
            rows = part.rows(value, target[name])
            if rows is None:
                return None
            losses, counts = rows  # counts are those of a label alone
            weighted.append(self.weights[name] * losses)
        return torch.stack(weighted).sum(0), counts

    def apart(
        self, output: Any, target: Mapping[str, torch.Tensor], weight: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | float, tuple[torch.Tensor, ...]]:
        """As `__call__`, and the sum of each label's losses, without its weight."""
        pairs = self.pairs(output)
        both = [part(value, target[name], weight) for name, part, value in pairs]
        sums = [loss_sum for loss_sum, _ in both]
        total = torch.stack([w * s for w, s in zip(self.weights.values(), sums, strict=True)])
        if len(both) == 1:
            return total.sum(), both[0][1], tuple(sums)
        weight_sum = float(rows_of(target)) if weight is None else weight.sum()
        return total.sum(), weight_sum, tuple(sums)

    def pairs(self, output: Any) -> list[tuple[str, LossFunction, Any]]:
        """Each label with its loss, and the part of the module's output that it is compared with.

        ConfigError if the module returned none for some.
        """
        names = list(self.parts)
        return [(name, part, of_label(output, name, names)) for name, part in self.parts.items()]


def of_label(output: Any, label: str, labels: Sequence[str]) -> Any:
    """The part of a module's output that is compared with a label; ConfigError: there is none."""
    if isinstance(output, Mapping) and label in output:
        return output[label]
    if isinstance(output, (tuple, list)) and len(output) == len(labels):
        return output[list(labels).index(label)]
    if isinstance(output, torch.Tensor):
        return output
    got = list(output) if isinstance(output, Mapping) else type(output).__name__
    raise ConfigError(
        f"the module must return a dict with the labels {list(labels)}, a tuple of {len(labels)} "
        f"in their order, or one tensor for all; it returned {got}"
    )


def sums_of(
    loss: LossFunction, output: Any, target: Any, weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | float, tuple[torch.Tensor, ...]]:
    """Sum of losses, sum of weights, and the sums of the labels' losses where there are several."""
    if isinstance(loss, LossSum):
        return loss.apart(output, target, weight)
    return (*loss(output, target, weight), ())


def part_names(loss: LossFunction) -> tuple[str, ...]:
    """The labels whose losses `sums_of` tells apart."""
    return tuple(loss.parts) if isinstance(loss, LossSum) else ()


def no_sums(loss: LossFunction, device: torch.device) -> torch.Tensor:
    """Zeros for losses, weights and the losses of each label, float64."""
    return torch.zeros(2 + len(part_names(loss)), dtype=torch.float64, device=device)


def loss_record(sums: list[float], names: tuple[str, ...], prefix: str = "") -> dict[str, float]:
    """The history's entries: ``loss``, and ``loss_<label>`` where there are several ``names``.

    ``sums`` are of losses, weights, then the losses of each label; an evaluation's ``prefix`` is
    ``val_``.
    """
    loss_sum, weight_sum, *parts = sums
    divisor = weight_sum if weight_sum > 0 else float("nan")
    by_label = {
        f"{prefix}loss_{name}": part / divisor for name, part in zip(names, parts, strict=True)
    }
    return {f"{prefix}loss": loss_sum / divisor, **by_label}
