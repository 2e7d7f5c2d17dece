"""Computes metrics over all ranks, exactly, also where a rank has no rows.

torchmetrics' own synchronization mixes in the empty states of ranks without rows, and needs the
same number of states on every rank. Here each rank's states are gathered once, ranks that saw no
row are left out, and the states are reduced in rank order by the metric's own rules.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from sparkdl.comm.communicator import Communicator
from sparkdl.config import Task, TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.train.objective.label_losses import of_label
from sparkdl.train.objective.loss import LossFunction
from sparkdl.train.objective.metric_states import (
    State,
    each_tensor,
    give,
    listed_bytes,
    merged,
    packed,
    scalar,
    seen_by,
    states_of,
    sum_of_ranks,
    united,
    values_of,
)
from sparkdl.train.objective.named_metrics import (
    ACCURACY,
    NamedMetric,
    check_names,
    default_metrics,
    flat,
)
from sparkdl.train.objective.training_step import StepLoss

if TYPE_CHECKING:
    from torchmetrics import Metric


MOST_CLASSES = 100
"""With more, nobody could read the matrix, and it would travel for nothing."""
_COUNTS = ""
"""Name of the `ClassCounts` among the metrics."""


class ClassCounts:
    """Counts a classifier's predictions; has what `metric_states` wants of a torchmetrics.Metric.

    Attributes:
        hits: rows that were taken for what they are, and all rows, or the sums of their weights.
        places: rows by label and prediction; without entries if there are more than `MOST_CLASSES`.

    They are float64, which counts exactly.
    """

    _reductions: ClassVar = {"hits": sum_of_ranks, "places": sum_of_ranks}

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.reset()

    def reset(self) -> None:
        """Forget all rows."""
        self._update_count = 0
        self.hits = torch.zeros(2, dtype=torch.float64, device=self.device)
        self.places = torch.zeros(0, 0, dtype=torch.float64, device=self.device)

    def update(self, probabilities: Any, target: Any, weight: torch.Tensor | None = None) -> None:
        """Count a batch, unless it is no classification of rows.

        Args:
            probabilities: ``(batch, classes)``, or of class 1 alone, ``(batch,)``, ``(batch, 1)``.
                A row with NaN is taken for no class.
            target: ``(batch,)`` or ``(batch, 1)``; labels that are no class do not count.
            weight: by how much each row counts, ``(batch,)``; None: all alike.
        """
        both = (probabilities, target)
        if not all(isinstance(v, torch.Tensor) and v.dim() in (1, 2) for v in both):
            return
        if target.dim() == 2 and target.shape[1] == 1:
            target = target[:, 0]
        single = probabilities.dim() == 1 or probabilities.shape[1] == 1
        num_classes = 2 if single else probabilities.shape[1]
        if target.dim() != 1:
            return
        predicted = probabilities.flatten() > 0.5 if single else probabilities.argmax(1)
        label, predicted = target.long(), predicted.long()
        known = (label >= 0) & (label < num_classes)
        has_class = ~probabilities[:, None].flatten(1).isnan().any(1)
        counted = torch.ones_like(label, dtype=torch.float64)
        counted = (counted if weight is None else weight.double()).masked_fill(~known, 0.0)
        right = (predicted == label) & has_class
        self.hits = self.hits + torch.stack([counted[right].sum(), counted.sum()])
        if num_classes <= MOST_CLASSES:
            has_place = known & has_class
            places = (label * num_classes + predicted)[has_place]
            counts = torch.bincount(places, counted[has_place], minlength=num_classes**2)
            counts = counts.view(num_classes, num_classes)
            self.places = self.places + counts if self._update_count else counts
        self._update_count += 1

    def compute(self) -> torch.Tensor:
        """The accuracy; NaN without rows."""
        return self.hits[0] / self.hits[1]


class Metrics:
    """A rank's share of the metrics of one evaluation.

    Rows count by their weights in metrics that have names, and not in those of torchmetrics. A
    classifier's metrics see ``(probabilities, class numbers)``, a regression's
    ``(output, target)`` of equal shape, a custom task's whatever the module and the loss exchange.
    """

    def __init__(
        self,
        metrics: Mapping[str, Callable[[], Any] | Any],
        task: Task,
        predictions: Callable[[Any], Any],
        device: torch.device,
        *,
        is_double: bool = False,
        counts_classes: bool = False,
    ) -> None:
        """Make this rank's own copies, on ``device``.

        ``metrics`` are, by name, a `NamedMetric`, a torchmetrics.Metric, or a callable without
        arguments that makes one; or, by label, such mappings, whose metrics see that label and
        its output. ``predictions`` turns a classifier's output into probabilities. With
        ``is_double`` states and all floating values that torchmetrics see become float64, but for
        metrics with weights of their own. With ``counts_classes`` a classifier's `confusion` is
        counted. ConfigError if something is not a single metric, or its name is taken.
        """
        made = {name: metric for name, _, metric in flat(metrics)}
        self._labels = {name: label for name, label, _ in flat(metrics) if label is not None}
        self._named = {n: m for n, m in made.items() if isinstance(m, NamedMetric)}
        counts_classes = counts_classes and task.gives_logits
        self._names = tuple(made)
        self._metrics: dict[str, Any] = {
            name: metric.make(device)
            if isinstance(metric, NamedMetric)
            else _make_metric(name, metric).to(device)
            for name, metric in made.items()
            if not (counts_classes and name in self._named and metric.name == ACCURACY)
        }
        self._task = task
        self._predictions = predictions
        self._double = frozenset(
            name
            for name, metric in self._metrics.items()
            if is_double and name not in self._named and not any(True for _ in metric.parameters())
        )
        for name in self._double:
            self._metrics[name].set_dtype(torch.float64)
        if counts_classes:
            self._metrics[_COUNTS] = ClassCounts(device)
        self.confusion: list[list[float]] | None = None
        """Label by prediction, in what was computed last; None: nothing was counted."""

    @classmethod
    def of(cls, config: TrainConfig, loss: LossFunction, device: torch.device) -> Metrics:
        """Make a run's metrics; count a classifier's rows, unless a training step hides them."""
        counts_classes = not isinstance(loss, StepLoss)
        metrics = config.metrics
        if metrics is None:
            metrics = default_metrics(config.task, loss)
        return cls(metrics, config.task, loss.predictions, device, counts_classes=counts_classes)

    def __bool__(self) -> bool:
        """True if there are any."""
        return bool(self._metrics)

    def reset(self) -> None:
        """Forget all samples."""
        for metric in self._metrics.values():
            metric.reset()

    forget = reset  # an epoch is over; a `TrainerStandIn` knows metrics that outlive it

    def update(self, output: Any, target: Any, weight: torch.Tensor | None = None) -> None:
        """Take note of a batch; ``weight`` is ``(batch,)``."""
        plain = wide = output, target
        if self._double:
            wide = _widened(output), _widened(target)
        for name, metric in self._metrics.items():
            if name in self._named:
                metric.update(*self._for_metric(name, output, target), weight)
            elif name != _COUNTS:
                metric.update(*self._for_metric(name, *(wide if name in self._double else plain)))
            elif isinstance(output, torch.Tensor):
                metric.update(self._predictions(_full_precision(output)), target, weight)

    def compute(self, comm: Communicator) -> dict[str, float]:
        """The values over the samples of all ranks; equal on all. Collective."""
        if not self:
            return {}
        return self.compute_over(comm.all_gather_bytes(self.packed()))

    def packed(self) -> bytes:
        """Pack what this rank's metrics have seen, for `compute_over`."""
        return packed({}, {name: (name, metric) for name, metric in self._metrics.items()})

    def metric(self, name: str) -> Any:
        """The metric of a name in what `packed` gives."""
        return self._metrics[name]

    def state_dict(self) -> dict[str, State]:
        """Return what each metric has seen, on the CPU."""
        return {name: seen_by(metric) for name, metric in self._metrics.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        for name, seen in state.items():
            give(self._metrics[name], seen)

    def joined(self, states: Sequence[Mapping[str, Any]]) -> dict[str, State]:
        """Join what several ranks' `state_dict` returned."""
        return {
            name: seen_by(merged(metric, [state[name] for state in states]))
            for name, metric in self._metrics.items()
        }

    def listed_bytes(self) -> dict[str, int]:
        """Size of the states that grow by the sample, by metric."""
        return {name: listed_bytes(states_of(metric)) for name, metric in self._metrics.items()}

    def united(self, name: str, parts: Sequence[State]) -> list[State]:
        """Several parts' states of a metric in as few as its rules allow; see `united`."""
        return united(self._metrics[name], parts)

    def value(self, name: str, parts: Sequence[State]) -> Any:
        """A metric's value over several parts: a number, or (nested) lists of numbers.

        ConfigError if the metric takes means over ranks, which are none over samples.
        """
        metric = self._metrics[name]
        if name in self._named:
            return _plain(merged(metric, parts).compute())
        from torchmetrics.utilities.data import dim_zero_mean

        for key, rule in metric._reductions.items():
            states = [states[key] for count, states in parts if count > 0]
            if rule is dim_zero_mean and any(not torch.equal(states[0], s) for s in states[1:]):
                raise ConfigError(
                    f"metric {name!r} ({type(metric).__name__}) takes means over ranks of its "
                    f"state {key!r}, which depend on the partitions; use a metric that sums"
                )
        return _plain(merged(metric, parts).compute())

    def compute_over(self, parts: Iterable[bytes]) -> dict[str, float]:
        """The values over the samples of several ranks, given what they `packed` in rank order."""
        _, metrics = values_of(parts, self.metric)
        counts: Any = metrics.get(_COUNTS)
        has_places = counts is not None and counts.places.numel() > 0
        self.confusion = None
        if has_places:
            is_whole = bool((counts.places == counts.places.round()).all())
            self.confusion = (counts.places.long() if is_whole else counts.places).tolist()
        return {name: scalar(name, metrics.get(name, counts).compute()) for name in self._names}

    def _for_metric(self, name: str, output: Any, target: Any) -> tuple[Any, Any]:
        """Return what one metric sees: all, or a label and its output."""
        label, named = self._labels.get(name), self._named.get(name)
        if label is not None:
            predictions = self._predictions(_full_precision(output))
            seen = _matched(of_label(predictions, label, list(target)), target[label])
        else:
            seen = self._for_task(output, target, is_named=named is not None)
        is_of_classes = named is not None and named.num_classes is not None
        return named.sees(*seen) if named is not None and is_of_classes else seen

    def _for_task(self, output: Any, target: Any, *, is_named: bool) -> tuple[Any, Any]:
        if isinstance(output, torch.Tensor):
            output = _full_precision(output)
        if isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor):
            compared = self._task.compared(output, target, self._predictions)
            if compared is not None:
                return _matched(*compared)
        if is_named and not self._task.has_one_label:
            return _matched(self._predictions(_full_precision(output)), target)
        return output, target


def detached(output: Any) -> Any:
    """Detach what a module returned in training, so that metrics may keep it."""
    return each_tensor(output, torch.Tensor.detach)


def check_metrics(config: TrainConfig, loss: LossFunction) -> None:
    """Refuse what cannot be the metrics of a run, without knowing what its module returns.

    ConfigError if a name is unknown, or something is not a single metric.
    """
    check_names(config.metrics, config.task, loss)
    if config.training_metrics and isinstance(loss, StepLoss):
        raise ConfigError(
            "trainingMetrics see what the module returns, and a training step gives the loss "
            "alone; leave them out"
        )
    made = {name: m for name, _, m in flat(config.metrics or {}) if not isinstance(m, str)}
    Metrics(made, config.task, loss.predictions, torch.device("cpu"))


def _matched(output: Any, target: Any) -> tuple[Any, Any]:
    is_plain = isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)
    if is_plain and output.shape != target.shape:
        return _without_last(output), _without_last(target)
    return output, target


def _full_precision(value: Any) -> Any:
    narrow = (torch.bfloat16, torch.float16)
    return each_tensor(value, lambda t: t.float() if t.dtype in narrow else t)


def _make_metric(name: str, value: Any) -> Metric:
    from torchmetrics import Metric

    wanted = f"metric {name!r} must be a torchmetrics.Metric or a callable that makes one"
    metric = value
    if callable(value) and not isinstance(value, torch.nn.Module):
        try:
            inspect.signature(value).bind()
        except ValueError:  # of one written in C, which has no signature
            pass
        except TypeError as error:
            raise ConfigError(
                f"{wanted}; {value!r} cannot be called without arguments ({error}); of a function "
                "of predictions and labels make a subclass of torchmetrics.Metric"
            ) from error
        try:
            metric = value()
        except Exception as error:  # whatever the user's class or function raises
            kind = getattr(value, "__name__", repr(value))
            raise ConfigError(
                f"metric {name!r} cannot be made: {kind}() raised {type(error).__name__}: {error}; "
                f"pass an object of it, {kind}(...), or the name of a metric, such as 'accuracy'"
            ) from error
    if not isinstance(metric, Metric):
        raise ConfigError(f"{wanted}; received {value!r}")
    if any(isinstance(child, Metric) for child in metric.modules() if child is not metric):
        raise ConfigError(
            f"metric {name!r} ({type(metric).__name__}) is made of other metrics; pass those by "
            "names of their own"
        )
    if name == "loss":
        raise ConfigError(f"a metric cannot be called {name!r}: the history has that name already")
    return copy.deepcopy(metric)


def _without_last(value: torch.Tensor) -> torch.Tensor:
    return value.squeeze(-1) if value.dim() > 1 and value.shape[-1] == 1 else value


def _widened(value: Any) -> Any:
    return each_tensor(value, lambda t: t.double() if t.is_floating_point() else t)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else value.detach().cpu().tolist()
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, (tuple, list)) else value
