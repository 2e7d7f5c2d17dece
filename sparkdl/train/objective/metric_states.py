"""The values that training has seen of samples; they add up over batches, ranks and rounds.

These are numbers, such as a LightningModule logs, and states of torchmetrics. A rank packs what it
has seen as bytes, which `added` puts together and `values_of` computes.
"""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from sparkdl.errors import ConfigError

if TYPE_CHECKING:
    from torchmetrics import Metric

State = tuple[int, dict[str, Any]]
"""Number of updates of a metric, and its states by name: tensors or lists of tensors."""


REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "mean": lambda a, b: a + b,  # of value times weight
    "sum": lambda a, b: a + b,
    "min": min,
    "max": max,
}
Number = tuple[str, Any, float]
"""Name of the reduction; the values so far, with their weights for a mean; the weights."""
Find = Callable[[str], Any]
"""Gives the metric of a path, such as ``get_submodule`` of a module."""


def with_number(before: Number | None, new: Number) -> Number:
    """A number that was seen before, with what was seen now."""
    reduce, value, weight = new
    if before is None:
        return new
    return reduce, REDUCTIONS[reduce](before[1], value), before[2] + weight


def packed(numbers: Mapping[str, Number], metrics: Mapping[str, tuple[str, Metric]]) -> bytes:
    """Pack what a rank has seen: numbers, and metrics with their paths, by the history's names."""
    seen = {name: (path, [seen_by(metric)]) for name, (path, metric) in metrics.items()}
    return _bytes(dict(numbers), seen)


def added(parts: Iterable[bytes], find: Find) -> bytes:
    """Add up what several ranks, or several rounds, have seen; ``parts`` in rank order."""
    numbers, metrics = _together(parts)
    united_metrics = {
        name: (path, united(find(path), states)) for name, (path, states) in metrics.items()
    }
    return _bytes(numbers, united_metrics)


def values_of(parts: Iterable[bytes], find: Find) -> tuple[dict[str, float], dict[str, Metric]]:
    """The numbers that all ranks have seen, and metrics that have seen what theirs have."""
    numbers, metrics = _together(parts)
    values = {
        name: value / weight if reduce == "mean" else value
        for name, (reduce, value, weight) in numbers.items()
    }
    return values, {name: merged(find(path), states) for name, (path, states) in metrics.items()}


def _together(
    parts: Iterable[bytes],
) -> tuple[dict[str, Number], dict[str, tuple[str, list[State]]]]:
    numbers: dict[str, Number] = {}
    metrics: dict[str, tuple[str, list[State]]] = {}
    for data in parts:
        new, seen = torch.load(io.BytesIO(data), weights_only=True)
        for name, number in new.items():
            numbers[name] = with_number(numbers.get(name), number)
        for name, (path, states) in seen.items():
            metrics.setdefault(name, (path, []))[1].extend(states)
    return numbers, metrics


def _bytes(numbers: Mapping[str, Number], metrics: Mapping[str, tuple[str, list[State]]]) -> bytes:
    buffer = io.BytesIO()
    torch.save((numbers, metrics), buffer)
    return buffer.getvalue()


def merged(metric: Metric, gathered: Sequence[State]) -> Metric:
    """A metric that has seen what several ranks have: their numbers of updates, and states."""
    seen = [states for count, states in gathered if count > 0]
    result = copy.deepcopy(metric)
    result.sync_on_compute = result._to_sync = False
    result._computed = None
    result._update_count = sum(count for count, _ in gathered)
    reductions: dict[str, Any] = metric._reductions
    for name, reduce in reductions.items() if seen else ():
        values = [states[name] for states in seen]
        setattr(result, name, _reduced(values, reduce, metric.device))
    return result


def seen_by(metric: Metric) -> State:
    """Return what a metric has seen, on the CPU; what it sees later does not change that."""
    seen = metric._update_count, each_tensor(states_of(metric), lambda t: t.detach().cpu())
    give(metric, seen)
    return seen


def give(metric: Metric, seen: State) -> None:
    """Have a metric go on from what `seen_by` gave, with tensors of its own, and no caches."""
    metric.reset()
    metric._update_count = seen[0]
    for name, value in each_tensor(seen[1], lambda t: t.to(metric.device, copy=True)).items():
        setattr(metric, name, value)


def united(metric: Metric, parts: Sequence[State]) -> list[State]:
    """Several parts' states of a metric in as few as its rules allow, for a later `merged`.

    Sums, extremes and lists may be united in groups; whatever else a metric does with the states
    of all ranks, it must do with all at once.
    """
    parts = [part for part in parts if part[0] > 0]
    rules: dict[str, Any] = metric._reductions
    in_groups: list[Any] = [sum_of_ranks, spread_of_ranks]
    if "torchmetrics" in sys.modules:
        from torchmetrics.utilities import data

        in_groups += [data.dim_zero_sum, data.dim_zero_max, data.dim_zero_min]
    can_unite = len(parts) > 1 and all(
        rule in in_groups or isinstance(parts[0][1][key], list) for key, rule in rules.items()
    )
    if not can_unite:
        return parts
    cpu = torch.device("cpu")
    states = {key: _reduced([s[key] for _, s in parts], rules[key], cpu) for key in rules}
    return [(sum(count for count, _ in parts), states)]


def sum_of_ranks(values: torch.Tensor) -> torch.Tensor:
    """The rule of states that add up."""
    return values.sum(0)


def spread_of_ranks(values: torch.Tensor) -> torch.Tensor:
    """The rule of counts, weights, and means with sums of squares about them (Chan et al., 1979).

    Sums of squares about 0 would lose the digits of labels that are far from it, such as times.
    ``values`` are ``(ranks, 2 + 2 n, columns)``: rows, weight, and n times a mean and its spread.
    """
    counts, weight = values[:, :2].sum(0), values[:, 1]
    shares = weight / counts[1].where(counts[1] > 0, 1.0)
    parts = [*counts]
    for mean, spread in zip(values[:, 2::2].unbind(1), values[:, 3::2].unbind(1), strict=True):
        together = (shares * mean).sum(0)
        parts += [together, (spread + weight * (mean - together) ** 2).sum(0)]
    return torch.stack(parts)


def each_tensor(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A value, or several in tuples, lists or mappings, with other tensors."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {name: each_tensor(part, change) for name, part in value.items()}
    if type(value) in (tuple, list):
        return type(value)(each_tensor(part, change) for part in value)
    return value


def _reduced(values: list[Any], reduce: Callable[[Any], Any] | None, device: torch.device) -> Any:
    if isinstance(values[0], list):  # states that grow by the sample: as if all had been seen here
        return [value.to(device) for ranks_values in values for value in ranks_values]
    values = [value.to(device) for value in values]
    if len(values) == 1:
        return values[0]
    stacked = torch.stack(values)
    return stacked if reduce is None else reduce(stacked)


def scalar(name: str, value: Any) -> float:
    """Return what a metric has computed, as a number; ConfigError if it is no single one."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    what = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value)
    raise ConfigError(f"metric {name!r} must compute one number (see its average); got {what}")


def states_of(metric: Metric) -> dict[str, Any]:
    """The present states of a metric by name."""
    return {name: getattr(metric, name) for name in metric._reductions}


def listed_bytes(states: Mapping[str, Any]) -> int:
    """Size of those states of a metric that grow by the sample."""
    lists = [value for value in states.values() if isinstance(value, list)]
    return sum(item.nbytes for value in lists for item in value)
