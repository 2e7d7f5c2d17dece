"""Which Params say what goes into a module, and what its outputs are compared with?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyspark.ml.param import Params, TypeConverters
from pyspark.ml.param.shared import HasFeaturesCol, HasInputCols

from sparkdl.errors import ConfigError
from sparkdl.inputs import Named, check_names, named
from sparkdl.spark.params import converters
from sparkdl.spark.params.param_base import CheckedParams, declare


class InputParams(CheckedParams, HasFeaturesCol, HasInputCols):
    """The columns that go into the module."""

    inputs = declare(
        "inputs",
        "what goes into the module, in place of featuresCol and inputCols: a dict from the names "
        "of forward's arguments to columns or specifications (sparkdl.Tensor, Sequence, Image, "
        "Sparse), or a list of these by position.",
        converters.to_inputs,
    )

    def specified(self) -> tuple[Named, ...]:
        """What ``inputs`` names; empty if it is not set.

        Raises:
            ConfigError: other Params name inputs too, or an argument is named twice.
        """
        value = self.value("inputs")
        if value is None:
            return ()
        for name in ("featuresCol", "inputCols"):
            if self.isSet(name):
                raise ConfigError(f"set either inputs or {name}, not both")
        entries = named(value)
        if not entries:
            raise ConfigError("inputs is empty; name at least one column")
        check_names(entries)
        return entries

    def feature_columns(self) -> tuple[str, ...]:
        """The input columns, in the order of the module's arguments; none where ``inputs`` is set.

        Raises:
            ConfigError: both ``featuresCol`` and ``inputCols`` are set.
        """
        if self.specified():
            return ()
        several = self.value("inputCols")
        if several is None:
            return (self.value("featuresCol"),)
        if self.isSet("featuresCol"):
            raise ConfigError("set either featuresCol or inputCols, not both")
        if not several:
            raise ConfigError("inputCols is empty; name at least one column")
        return tuple(several)


class DataParams(InputParams):
    """What only training does with its columns."""

    inputShape = declare(
        "inputShape",
        "shape of one sample as the module expects it, such as (1, 28, 28); with several "
        "inputCols a list with a shape or None per column. None keeps the column's own shape.",
        converters.to_shapes,
    )
    augmentation = declare(
        "augmentation",
        "function that changes the inputs of each training batch, on the device: it gets the "
        "input tensor, a tuple of several, or a dict by name, and returns the same.",
        converters.to_callable,
    )
    groupByLength = declare(
        "groupByLength",
        "batches (>= 2) whose rows are sorted by length together, so that sequences are padded "
        "less; None: rows are in random order.",
        TypeConverters.toInt,
    )
    shuffleWindowBytes = declare(
        "shuffleWindowBytes",
        "bytes of rows (>= 1) that a worker mixes at a time, if its rows are more; it keeps twice "
        "as many in memory. None: all rows, unless those of a host are more than half of its free "
        "memory.",
        TypeConverters.toInt,
    )


class OptionalLabelParams(Params):
    """The label column of an estimator that can train without, or with several."""

    labels = declare(
        "labels",
        "several labels in place of labelCol: a dict from names to columns or specifications. The "
        "module returns a dict by these names, a tuple in their order, or one tensor for all.",
        converters.to_labels,
    )
    lossWeights = declare(
        "lossWeights",
        "by how much each label's loss counts in the sum: a dict by label; 1 where there is none.",
        converters.to_weights,
    )

    labelCol = declare(
        "labelCol",
        "label column name. If this is not set or empty, the loss is called with the inputs as "
        "target.",
        TypeConverters.toString,
    )


def labels_of(params: InputParams) -> tuple[Named, ...]:
    """What ``labels`` names; empty if it is not set.

    Raises:
        ConfigError: another Param names a label too, or a label has a mask.
    """
    value = params.value("labels") if params.hasParam("labels") else None
    if value is None:
        return ()
    if params.value("labelCol") is not None:
        raise ConfigError("set either labels or labelCol, not both")
    if not value:
        raise ConfigError("labels is empty; name at least one column")
    if any(getattr(entry, "mask", None) for entry in value.values()):
        raise ConfigError("a label has no mask; let padding_value be what the loss ignores (-100)")
    return named(value)


def loss_of_labels(params: InputParams) -> Any:
    """``loss``, with several labels as a dict by label unless it is a function for all.

    Raises:
        ConfigError: it has other names than the labels.
    """
    from sparkdl.train.objective.label_losses import for_each

    loss, labels = params.value("loss"), labels_of(params)
    if labels:
        return for_each(loss, tuple(str(entry.argument) for entry in labels))
    if isinstance(loss, Mapping):
        raise ConfigError("loss is a dict by label, but labels is not set")
    return loss


def loss_weights(params: InputParams) -> dict[str, float]:
    """``lossWeights``, checked.

    Raises:
        ConfigError: it names what is no label, or there is one loss for all.
    """
    weights = (params.value("lossWeights") if params.hasParam("lossWeights") else None) or {}
    unknown = set(weights) - {entry.argument for entry in labels_of(params)}
    if unknown:
        raise ConfigError(f"lossWeights names {sorted(unknown)}, which are not in labels")
    if weights and not isinstance(loss_of_labels(params), Mapping):
        raise ConfigError("lossWeights needs a loss for each label; weigh inside your own loss")
    return dict(weights)


def input_shapes(params: DataParams) -> tuple[Any, ...]:
    """A shape or None for each input column.

    Raises:
        ConfigError: their number is not that of the columns.
    """
    shapes = params.getOrDefault("inputShape")
    if shapes is not None and params.specified():
        raise ConfigError("inputShape goes with featuresCol and inputCols; use Tensor(shape=...)")
    try:
        return converters.shapes_by_input(shapes, len(params.feature_columns()))
    except TypeError as error:
        raise ConfigError(str(error)) from error
