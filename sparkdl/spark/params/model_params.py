"""Which Params do models have: what goes in, what comes out, what predictions are measured by?"""

from __future__ import annotations

from pyspark.ml.param import TypeConverters
from pyspark.ml.param.shared import HasPredictionCol, HasWeightCol

from sparkdl.spark.params import converters
from sparkdl.spark.params.data_params import InputParams
from sparkdl.spark.params.param_base import CheckedParams, declare

INFERENCE_BATCH_SIZE = 512
"""Default of a model's batchSize: fills the arithmetic units; larger was not faster on CPUs."""

UNKNOWN_LOSS = ""
"""Loss of a model whose own could not be saved with it."""


class OutputParams(CheckedParams):
    """What becomes of what a model's module computes."""

    outputs = declare(
        "outputs",
        "output columns besides the prediction: dict from column name to sparkdl.Output(...), or "
        "to the key or index (or a tuple of them) of a part of what the module returns.",
        converters.to_outputs,
    )
    predictionOutput = declare(
        "predictionOutput",
        "the part of what the module returns of which the prediction is made: sparkdl.Output(...), "
        "a key, an index or a tuple of them; None: all of it.",
        converters.to_output,
    )
    preprocessing = declare(
        "preprocessing",
        "function called with the input tensors of a batch, on the device; it gives the module's "
        "argument, or a tuple of several.",
        converters.to_callable,
    )
    postprocessing = declare(
        "postprocessing",
        "function called with what the module returned for a batch, on the device; transform takes "
        "what it gives, with one row per sample, in its place.",
        converters.to_callable,
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(outputs={}, predictionOutput=None, preprocessing=None, postprocessing=None)


class EvaluateParams(CheckedParams, HasWeightCol):
    """What a model's predictions are compared with; a fitted model has its estimator's values."""

    labelCol = declare(
        "labelCol",
        "label column name, for evaluate and scores. If this is not set or empty, the loss is "
        "called with the inputs as target.",
        TypeConverters.toString,
    )
    loss = declare(
        "loss",
        "loss function, for evaluate and scores: a name ('cross_entropy', 'mse', ...), a torch "
        "loss module, or a callable (output, target) -> tensor; or a dict of these by label.",
        converters.to_losses,
    )
    labels = declare(
        "labels",
        "several labels in place of labelCol, for evaluate and scores: a dict from names to "
        "columns or specifications.",
        converters.to_labels,
    )
    lossWeights = declare(
        "lossWeights",
        "by how much each label's loss counts, for evaluate and scores: a dict by label; 1 where "
        "there is none.",
        converters.to_weights,
    )


class PredictParams(InputParams, OutputParams, EvaluateParams, HasPredictionCol):
    """Params that all models share."""

    batchSize = declare(
        "batchSize", "rows per forward pass of the module (>= 1).", TypeConverters.toInt
    )
    device = declare(
        "device", "where tasks predict: 'auto' (a GPU if the task has one), 'cpu' or 'cuda'.",
        TypeConverters.toString,
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(batchSize=INFERENCE_BATCH_SIZE, device="auto")
