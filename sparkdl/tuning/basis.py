"""The basis of a study: what its trials have in common, without which they cannot be compared."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from torch import nn

from sparkdl.data.source import Wanted
from sparkdl.serialization.identity import identity
from sparkdl.spark.frames.columns import has_hash, resolve, schema_of
from sparkdl.spark.params import param_table

if TYPE_CHECKING:
    import torch
    from pyspark.sql import DataFrame

    from sparkdl.estimator import _TorchEstimator
    from sparkdl.spark.frames.user_data import UserData

logger = logging.getLogger(__name__)

_LEFT_OUT = {
    "cacheDir", "callbacks", "checkpointDir", "checkpointInterval", "cpusPerWorker", "device",
    "gpusPerWorker", "keepTrainingState", "listeners", "maxRestarts", "predictionCol",
    "probabilityCol", "rawPredictionCol", "reportDir", "runName", "verbose",
}  # fmt: skip
"""Params that change nothing of what a trial learns: where it trains, what is shown and kept."""
_READABLE = (type(None), bool, int, float, str)


def params_in_common(estimator: _TorchEstimator, searched: Collection[str]) -> dict[str, Any]:
    """Return a value or a digest of each Param that trials do not vary, equal in each process.

    Args:
        estimator: one with the values of a trial, the same in each process.
        searched: the Params that trials vary. Of one of which only a part is varied, such as
            ``module.width``, the rest counts.

    The parameters of a module that the user has made do not count: they are mostly random.
    """
    names = [param.name for param in estimator.params]
    wanted = [name for name in names if name not in _LEFT_OUT and name not in searched]
    return {name: _described(estimator.value(name)) for name in wanted}


def _described(value: Any) -> Any:
    if type(value) in _READABLE:
        return value
    return {"digest": _digest(identity(value, _any_parameter))}


def _any_parameter(tensor: torch.Tensor) -> str | None:
    return "any" if isinstance(tensor, nn.Parameter) else None


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def digest_of_rows(estimator: _TorchEstimator, data: UserData) -> dict[str, Any] | None:
    """Return a digest of the rows that the estimator trains on; None: a source cannot tell.

    A DataFrame is read once, by Spark alone; the order and the partitions of rows do not count.
    """
    if data.source is None:
        return {"digest": _digest(_summed(data.frame, _columns(estimator)))}
    marker = estimator.value("validationIndicatorCol")
    wanted = Wanted(columns=(), validation=marker, num_shards=1)
    try:
        contents = data.source.contents(wanted)
    except Exception as error:  # whatever a source of the user's raises without columns
        logger.info("the rows of %s are not compared with earlier ones: %s", data.source, error)
        return None
    return {"digest": _digest([contents.content, identity(contents.transform)])}


def _columns(estimator: _TorchEstimator) -> set[str]:
    """Return the columns that training reads."""
    labels = param_table.labels_of(estimator)
    named = [entry.specification for entry in (*param_table.specified_inputs(estimator), *labels)]
    several = [name for specification in named for name in specification.columns]
    params = ("weightCol", "validationIndicatorCol", *(() if labels else ("labelCol",)))
    alone = [estimator.value(name) for name in params]
    return {*several, *param_table.feature_columns(estimator), *filter(None, alone)}


def _summed(frame: DataFrame, names: set[str]) -> list[Any]:
    """Return the types of the columns, and the number of rows with the sum of their hashes."""
    from pyspark.sql import functions as F

    schema = schema_of(frame)
    found = [resolve(schema, name) for name in sorted(names)]
    hashed = [
        column if has_hash(field.dataType) else F.to_json(F.struct(column))
        for field, column in found
    ]
    total = F.sum(F.xxhash64(*hashed).cast("decimal(20,0)"))
    row = frame.agg(F.count("*"), total).first()
    assert row is not None  # an aggregate without groups has one row
    types = [field.dataType.simpleString() for field, _ in found]
    return [sorted(names), types, *map(str, row)]
