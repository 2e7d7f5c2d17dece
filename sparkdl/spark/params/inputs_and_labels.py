"""What several Params say together: the inputs, the labels, and the losses of these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from sparkdl.errors import ConfigError
from sparkdl.inputs import Named, check_names, named
from sparkdl.spark.params import converters


class ParamValues(Protocol):
    """What the functions of this file need of an estimator or a model."""

    def value(self, name: str, /) -> Any:
        """The Param's value; None if it has none, or if there is no such Param."""
        ...

    def isSet(self, name: str, /) -> bool:
        """True if the user has set it."""
        ...


def specified_inputs(params: ParamValues) -> tuple[Named, ...]:
    """What ``inputs`` names; empty if it is not set; raises ConfigError."""
    value = params.value("inputs")
    if value is None:
        return ()
    for name in ("featuresCol", "inputCols"):
        if params.isSet(name):
            raise ConfigError(f"set either inputs or {name}, not both")
    entries = named(value)
    if not entries:
        raise ConfigError("inputs is empty; name at least one column")
    check_names(entries)
    return entries


def feature_columns(params: ParamValues) -> tuple[str, ...]:
    """The input columns in the module's order; none if ``inputs`` is set; raises ConfigError."""
    if specified_inputs(params):
        return ()
    several = params.value("inputCols")
    if several is None:
        return (params.value("featuresCol"),)
    if params.isSet("featuresCol"):
        raise ConfigError("set either featuresCol or inputCols, not both")
    if not several:
        raise ConfigError("inputCols is empty; name at least one column")
    return tuple(several)


def input_shapes(params: ParamValues) -> tuple[Any, ...]:
    """A shape or None for each input column; raises ConfigError."""
    shapes = params.value("inputShape")
    if shapes is not None and specified_inputs(params):
        raise ConfigError("inputShape goes with featuresCol and inputCols; use Tensor(shape=...)")
    return converters.shapes_by_input(shapes, len(feature_columns(params)))


def labels_of(params: ParamValues) -> tuple[Named, ...]:
    """What ``labels`` names; empty if it is not set; raises ConfigError."""
    value = params.value("labels")
    if value is None:
        return ()
    if params.value("labelCol") is not None:
        raise ConfigError("set either labels or labelCol, not both")
    if not value:
        raise ConfigError("labels is empty; name at least one column")
    if any(getattr(entry, "mask", None) for entry in value.values()):
        raise ConfigError("a label has no mask; let padding_value be what the loss ignores (-100)")
    return named(value)


def loss_of_labels(params: ParamValues) -> Any:
    """``loss``, of several labels a dict unless it is one for all; raises ConfigError."""
    from sparkdl.train.objective.label_losses import for_each

    loss, labels = params.value("loss"), labels_of(params)
    if labels:
        return for_each(loss, tuple(str(entry.argument) for entry in labels))
    if isinstance(loss, Mapping):
        raise ConfigError("loss is a dict by label, but labels is not set")
    return loss


def loss_weights(params: ParamValues) -> dict[str, float]:
    """``lossWeights``, checked; raises ConfigError."""
    weights = params.value("lossWeights") or {}
    unknown = set(weights) - {entry.argument for entry in labels_of(params)}
    if unknown:
        raise ConfigError(f"lossWeights names {sorted(unknown)}, which are not in labels")
    if weights and not isinstance(loss_of_labels(params), Mapping):
        raise ConfigError("lossWeights needs a loss for each label; weigh inside your own loss")
    return dict(weights)
