"""Turns a loss into two sums, so that it means the same on any number of ranks.

A mean over the global batch is (sum of losses) / (sum of weights), and both sums add up over
micro-batches and ranks. So every loss is asked for the losses of the single samples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, cast

import torch
from torch import nn

from sparkdl.config import Task
from sparkdl.errors import ConfigError, unknown

Sums = tuple[torch.Tensor, torch.Tensor | float]
LossRows = tuple[torch.Tensor, torch.Tensor | None]

LOSSES: dict[str, type[nn.Module]] = {
    "bce": nn.BCELoss,
    "bce_with_logits": nn.BCEWithLogitsLoss,
    "cross_entropy": nn.CrossEntropyLoss,
    "hinge_embedding": nn.HingeEmbeddingLoss,
    "huber": nn.HuberLoss,
    "kl_div": nn.KLDivLoss,
    "l1": nn.L1Loss,
    "mse": nn.MSELoss,
    "nll": nn.NLLLoss,
    "poisson_nll": nn.PoissonNLLLoss,
    "smooth_l1": nn.SmoothL1Loss,
    "soft_margin": nn.SoftMarginLoss,
}
"""Names that ``loss`` accepts. Instances of other classes with a ``reduction`` work too."""

CLASS_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss)
ELEMENTWISE_LOSSES = (*(set(LOSSES.values()) - set(CLASS_LOSSES)), nn.MultiLabelSoftMarginLoss)
"""Losses that compare each number of the output with one of the target."""


class LossFunction(Protocol):
    """A loss as two sums over samples."""

    def __call__(self, output: Any, target: Any, weight: torch.Tensor | None) -> Sums:
        """Sum of the weighted losses of a batch, and sum of the weights.

        The quotient of the two, each summed over all micro-batches and ranks, is the loss of the
        union of these. ``weight`` is ``(batch,)``; None counts every sample once.
        """

    def rows(self, output: Any, target: Any) -> LossRows | None:
        """The losses of a batch's samples, and by how much each counts; both ``(batch,)``.

        No counts means that all count once. ``__call__`` gives the sums of both, times the
        weights. None: the loss knows sums only.
        """

    def predictions(self, output: Any) -> Any:
        """Return a classifier's output for metrics: probabilities, where the loss says how."""

    def to(self, device: torch.device) -> None:
        """Move what the loss holds (class weights, parameters, which are not trained)."""

    @property
    def own(self) -> Any:
        """The user's own callable, which may keep something between calls; of several the parts."""


def resolve_loss(loss: Any, task: Task, *, copies: bool = True) -> LossFunction:
    """Make a `LossFunction` of what the user gave.

    Args:
        loss: one of

            - a name of `LOSSES`, or a class or instance with a ``reduction`` of ``"mean"``,
              ``"none"`` or ``"batchmean"`` like those of ``torch.nn``. The loss of a sample is the
              mean over its other dimensions; class weights and ``ignore_index`` act exactly as in
              torch's mean.
            - a callable ``(output, target)``, also a module without ``reduction``, that gives
              the losses of the samples, ``(batch, ...)``; or a pair (sum of losses, sum of
              weights); or a scalar, which is taken as the mean over the batch. A column of
              weights needs the first kind.
        task: what is learnt, which says whether the loss fits.
        copies: whether a copy of a module is used; else it is moved, and keeps what it counts, as
            others that hold it see.

    Raises:
        ConfigError: the name is unknown, or the loss cannot be used.
    """
    if isinstance(loss, str):
        if loss.lower() not in LOSSES:
            raise unknown("loss", loss, LOSSES)
        loss = LOSSES[loss.lower()]
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        loss = loss()
    task.check_loss(loss)
    if isinstance(loss, nn.Module):
        _check_parameters(loss)
        loss = copy.deepcopy(loss) if copies else loss
    if isinstance(loss, nn.Module) and hasattr(loss, "reduction"):
        return ClassLoss(loss) if isinstance(loss, CLASS_LOSSES) else ModuleLoss(loss)
    if callable(loss):
        return CallableLoss(loss, gives_logits=task.gives_logits)
    raise ConfigError(f"loss must be a name, an nn.Module or a callable; received {loss!r}")


class ModuleLoss:
    """A module of torch's kind, with a ``reduction``."""

    def __init__(self, module: nn.Module) -> None:
        if module.reduction not in ("mean", "none", "batchmean"):
            raise ConfigError(
                f"{type(module).__name__}(reduction={module.reduction!r}) grows with the number "
                "of samples, hence of workers; use reduction='mean', or with one worker a function "
                "that returns the sum"
            )
        self._reduction = module.reduction
        self._sums_dimensions = module.reduction == "batchmean"
        self._module = cast(Any, module)

    def to(self, device: torch.device) -> None:
        self._module.to(device)

    @property
    def own(self) -> Any:
        """The user's own callable."""
        return self._module

    def predictions(self, output: Any) -> Any:
        return torch.sigmoid(output) if isinstance(self._module, nn.BCEWithLogitsLoss) else output

    def __call__(self, output: Any, target: Any, weight: torch.Tensor | None) -> Sums:
        return _summed(*self.rows(output, target), weight)

    def rows(self, output: Any, target: Any) -> LossRows:
        output = _full_precision(output)
        if isinstance(self._module, ELEMENTWISE_LOSSES):
            output, target = match_shapes(output, target)
            target = target.to(output.dtype)
        return _per_sample(self._of_each(output, target), self._sums_dimensions), None

    def _of_each(self, output: Any, target: Any) -> torch.Tensor:
        """The losses of the samples; raises ConfigError if there are others."""
        self._module.reduction = "none"
        try:
            losses = self._module(output, target)
        finally:
            self._module.reduction = self._reduction
        if not isinstance(losses, torch.Tensor) or losses.shape[:1] != (rows_of(target),):
            is_tensor = isinstance(losses, torch.Tensor)
            shown = (tuple(losses.shape) or "a scalar") if is_tensor else type(losses)
            raise ConfigError(
                f"{type(self._module).__name__}(reduction='none') returned {shown} for "
                f"{rows_of(target)} samples; it must return the loss of each sample"
            )
        return losses

    def own_value(self, output: Any, target: Any) -> torch.Tensor | None:
        """Return the value of a user's own module as it was passed; None: it is one of torch's."""
        if type(self._module).__module__.startswith("torch.nn.") or self._reduction == "none":
            return None
        value = copy.deepcopy(self._module)(_full_precision(output), target)
        return value if isinstance(value, torch.Tensor) and value.dim() == 0 else None


class ClassLoss(ModuleLoss):
    """Cross entropy and negative log-likelihood: class weights and ignored targets count."""

    counts_alike = False
    """True if every sample counts once, by the mean over its own targets that are not ignored;
    class weights weigh the losses then, but not the mean."""

    def predictions(self, output: Any) -> Any:
        # Torchmetrics guesses from each batch's values whether they are logits.
        if isinstance(self._module, nn.CrossEntropyLoss):
            return torch.softmax(output, dim=1)
        return torch.exp(output)

    @property
    def has_weights(self) -> bool:
        """True if classes weigh differently in the mean."""
        return self._module.weight is not None and not self.counts_alike

    @property
    def ignore_index(self) -> int:
        """The class number of samples that count for nothing."""
        return int(self._module.ignore_index)

    def rows(self, output: Any, target: Any) -> LossRows:
        losses, classes = self._losses(output, target)
        if classes is None:
            return _per_sample(losses), None
        if not self.counts_alike:  # sums, since other batches may be padded to another length
            counts = self._counts(classes, losses.dtype)
            return _per_sample(losses, True), _per_sample(counts, True)
        counted = (classes != self.ignore_index).to(losses.dtype)
        num_counted = _per_sample(counted, sums_dimensions=True).clamp(min=1)
        return _per_sample(losses, sums_dimensions=True) / num_counted, None

    def _losses(self, output: Any, target: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The losses ``(batch, ...)`` and the class numbers; None: targets are probabilities."""
        output = _full_precision(output)
        _check_tensors(output, target)
        if target.shape == output.shape and target.is_floating_point():
            return self._of_each(output, target.to(output.dtype)), None
        classes = _class_numbers(output, target)
        return self._of_each(output, classes), classes

    def _counts(self, target: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight of each target in torch's mean."""
        counted = target != self.ignore_index
        class_weight: torch.Tensor | None = self._module.weight
        if class_weight is None:
            return counted.to(dtype)
        weights = class_weight.to(dtype)[torch.where(counted, target, 0)]
        return torch.where(counted, weights, 0)


def _check_parameters(module: nn.Module) -> None:
    """Refuse a loss with parameters that would train; raises ConfigError."""
    if own := [name for name, p in module.named_parameters() if p.requires_grad]:
        raise ConfigError(
            f"the loss {type(module).__name__} has parameters that train, such as {own[0]!r}, and "
            "the optimizer has those of the module only; let forward of the module compute what "
            "they are for, or call requires_grad_(False) on the loss if they shall stay as they are"
        )


class CallableLoss:
    """A function of the user's, or a module without ``reduction``."""

    counts_alike = False
    """True if it is the loss of one of several labels, in whose sum every sample counts once."""

    def __init__(self, function: Callable[[Any, Any], Any], *, gives_logits: bool = False) -> None:
        """Take the function; of a classifier the output ``gives_logits``, as for ``transform``."""
        self._function = function
        self._gives_logits = gives_logits

    def to(self, device: torch.device) -> None:
        if isinstance(self._function, nn.Module):
            self._function.to(device)

    @property
    def own(self) -> Any:
        """The user's own callable."""
        return self._function

    def predictions(self, output: Any) -> Any:
        if not self._gives_logits or not isinstance(output, torch.Tensor):
            return output
        is_single = output.dim() == 1 or output.shape[1] == 1
        return torch.sigmoid(output) if is_single else torch.softmax(output, dim=1)

    def __call__(self, output: Any, target: Any, weight: torch.Tensor | None) -> Sums:
        rows, sums = self.rows_or_sums(output, target, weight)
        if rows is not None:
            return _summed(*rows, weight)
        assert sums is not None
        return sums

    def rows(self, output: Any, target: Any) -> LossRows | None:
        return self.rows_or_sums(output, target, None)[0]

    def rows_or_sums(
        self, output: Any, target: Any, weight: torch.Tensor | None
    ) -> tuple[LossRows, None] | tuple[None, Sums]:
        """Call the function once: see `rows`; of one that knows sums only, see `__call__`."""
        result = self._function(_full_precision(output), target)
        if not _is_sum(result):
            return (self._checked(result, target), None), None
        is_pair = _is_pair(result)
        if weight is not None:
            raise ConfigError(
                "with a weight column the loss must return the loss of each sample, (batch,) "
                f"or (batch, ...); it returned {'a pair' if is_pair else 'a scalar'}"
            )
        if is_pair:
            self._check_pair(result[1])
        num_rows = rows_of(target)
        return None, (result if is_pair else (result * num_rows, float(num_rows)))

    def _check_pair(self, weights: Any) -> None:
        if self.counts_alike:
            raise ConfigError(
                "the loss of one of several labels must return the loss of each sample, or their "
                "mean, since all labels are divided by the number of samples; it returned a pair "
                "(sum of losses, sum of weights)"
            )
        if isinstance(weights, torch.Tensor) and weights.requires_grad:
            raise ConfigError(
                "the loss returned a pair, which means (sum of losses, sum of weights), and its "
                "second value has a gradient; return one tensor, such as the sum of two losses, or "
                "detach() the weights"
            )

    def _checked(self, result: Any, target: Any) -> torch.Tensor:
        num_rows = rows_of(target)
        if not isinstance(result, torch.Tensor) or len(result) != num_rows:
            what = f"{type(result).__name__}; let it return what torch computes, without item()"
            if isinstance(result, torch.Tensor):
                what = str(tuple(result.shape))
            raise ConfigError(
                f"the loss of a batch of {num_rows} samples must be a tensor without dimensions or "
                f"of shape ({num_rows}, ...), or a pair (sum of losses, sum of weights); received "
                f"{what}"
            )
        return _per_sample(result)


def _is_pair(result: Any) -> bool:
    is_of_two = isinstance(result, tuple) and len(result) == 2
    return is_of_two and all(
        value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, int | float)
        for value in result
    )


def _is_sum(result: Any) -> bool:
    return _is_pair(result) or (isinstance(result, torch.Tensor) and result.dim() == 0)


def rows_of(target: Any) -> int:
    """Samples of a target: a tensor, or several in a tuple or dict."""
    if isinstance(target, Mapping):
        target = next(iter(target.values()))
    return len(target if isinstance(target, torch.Tensor) else target[0])


def shape_text(shape: Iterable[object]) -> str:
    """A shape in a message, such as ``(batch, 3)``."""
    return str(tuple(shape)).replace("'", "")


def match_shapes(output: Any, target: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Make ``(batch, 1)`` and ``(batch,)`` equal, and refuse whatever else would broadcast.

    ConfigError if the shapes differ otherwise, or one of the two is not a tensor.
    """
    _check_tensors(output, target)
    shapes = [tuple(output.shape), tuple(target.shape)]
    if shapes[0][:1] == shapes[1][:1]:  # the number of rows says nothing
        shapes = [("batch", *shape[1:]) for shape in shapes]
    first, second = map(shape_text, shapes)
    if output.dim() == target.dim() + 1 and output.shape[-1] == 1:
        output = output.squeeze(-1)
    elif target.dim() == output.dim() + 1 and target.shape[-1] == 1:
        target = target.squeeze(-1)
    if output.shape != target.shape:
        raise ConfigError(
            f"the module's output has shape {first} but the target has shape {second}; "
            f"{_width_wanted(output, target)}"
        )
    return output, target


def _width_wanted(output: torch.Tensor, target: torch.Tensor) -> str:
    """Say how many numbers the last layer should give, where that is all that differs."""
    if output.dim() == 2 and target.dim() == 1:
        several = f"an array of {output.shape[1]} numbers as the label of a TorchRegressor"
        return (
            "give its last layer 1 output, or for classes use loss='cross_entropy' in a "
            f"TorchClassifier, or {several}"
        )
    if target.dim() == 2 and output.dim() in (1, 2):
        return f"give its last layer {target.shape[1]} outputs, one for each number of the label"
    return "change the module, or the loss, so that they are equal"


def _check_tensors(output: Any, target: Any) -> None:
    if not (isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)):
        raise ConfigError(
            f"the loss compares one tensor with one; the module's output is {type(output)} and "
            f"the target is {type(target)}; pass a loss of your own, (output, target)"
        )


def _class_numbers(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if target.dim() == output.dim() and target.shape[1:] == (1,):
        target = target.squeeze(-1)
    expected = (output.shape[0], *output.shape[2:])
    if output.dim() < 2 or tuple(target.shape) != expected or target.is_floating_point():
        raise ConfigError(
            "a loss of class numbers needs output (batch, classes, ...) and integer target "
            f"(batch, ...); received output {tuple(output.shape)} and target "
            f"{tuple(target.shape)} of {target.dtype}"
        )
    return target.long()


def _full_precision(output: Any) -> Any:
    """Losses are computed in float32 at least, whatever autocast made of the output."""
    if isinstance(output, torch.Tensor):
        return output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
    if type(output) in (tuple, list):
        return type(output)(_full_precision(value) for value in output)
    if type(output) is dict:
        return {name: _full_precision(value) for name, value in output.items()}
    return output


def _per_sample(values: torch.Tensor, sums_dimensions: bool = False) -> torch.Tensor:
    if values.dim() == 1:
        return values
    flat = values.flatten(1)
    return flat.sum(1) if sums_dimensions else flat.mean(1)


def _summed(losses: torch.Tensor, counts: torch.Tensor | None, weight: torch.Tensor | None) -> Sums:
    if weight is None:
        return losses.sum(), float(len(losses)) if counts is None else counts.sum()
    weight = weight.to(losses.dtype)
    return (losses * weight).sum(), (weight if counts is None else counts * weight).sum()
