"""What makes the trials of a study comparable, and is the same in each process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from sparkdl import ParquetSource, TorchRegressor
from sparkdl.errors import ConfigError
from sparkdl.spark.frames.user_data import UserData
from sparkdl.storage.storage import open_storage
from sparkdl.tuning.basis import digest_of_rows, params_in_common
from sparkdl.tuning.study import StudyOptions, open_study

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPACE = {"learningRate": [0.1, 0.2]}
PROGRAM = """
import json
from torch import nn
from sparkdl import TorchRegressor
from sparkdl.tuning.basis import params_in_common
class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layer = nn.Linear(width, 1)
    def forward(self, x):
        return self.layer(x) * {factor}
loss = lambda output, label: (output - label).abs().mean()
for module in (Net, Net()):
    estimator = TorchRegressor(module=module, loss=loss, optimizerParams=dict(momentum=0.5))
    print(json.dumps(params_in_common(estimator, ["learningRate"])))
"""


class Net(nn.Linear):
    """A line of four features."""

    def __init__(self) -> None:
        super().__init__(4, 1)


class Halved(Net):
    """Computes something else."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) / 2


def estimator(**changes: Any) -> TorchRegressor:
    given: Any = {"module": Net, "epochs": 2, "learningRate": 0.1, **changes}
    return TorchRegressor(**given)


def opened(path: Path, changed: TorchRegressor) -> Any:
    basis = params_in_common(changed, SPACE)
    return open_study(StudyOptions(), SPACE, open_storage(str(path)), basis)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"epochs": 9}, r"another epochs \(2, now 9\)"),
        ({"epochs": 9, "seed": 3}, r"another epochs \(2, now 9\), another seed \(0, now 3\)"),
        ({"module": Halved}, "another module,"),
        ({"module": nn.Linear(4, 1)}, "another module,"),
        ({"loss": "l1"}, "another loss"),
        ({"loss": nn.HuberLoss()}, "another loss"),
        ({"optimizer": "sgd"}, r"another optimizer \('auto', now 'sgd'\)"),
        ({"optimizerParams": {"weight_decay": 0.1}}, "another optimizerParams"),
        ({"featuresCol": "x"}, r"another featuresCol \('features', now 'x'\)"),
        ({"initialWeights": Net().state_dict()}, "another initialWeights"),
    ],
)
def test_other_params_are_refused(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    opened(tmp_path, estimator())
    with pytest.raises(ConfigError, match=rf"was begun with {what}.*storage.*remove the old one"):
        opened(tmp_path, estimator(**changes))


def test_params_that_do_not_change_what_is_learnt_may_change(tmp_path: Path) -> None:
    opened(tmp_path, estimator())
    opened(
        tmp_path,
        estimator(learningRate=0.7, verbose=0, device="cpu", checkpointDir=str(tmp_path / "kept")),
    )


def test_a_study_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    open_study(StudyOptions(), SPACE, open_storage(str(tmp_path)))
    opened(tmp_path, estimator())


@pytest.mark.slow
def test_the_params_of_equal_programs_are_equal_in_each_process() -> None:
    def said(factor: str) -> str:
        program = PROGRAM.replace("{factor}", factor)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
        return done.stdout.decode()

    first = said("1")
    assert first.count("digest") > 2
    assert said("1") == first  # also of a module with random parameters
    assert said("2") != first


def test_files_with_other_rows_are_others(tmp_path: Path) -> None:
    def digest(values: list[float], folder: str = "rows") -> Any:
        (tmp_path / folder).mkdir(exist_ok=True)
        table = pa.table({"features": values, "label": values})
        pq.write_table(table, tmp_path / folder / "part.parquet")
        source = ParquetSource(str(tmp_path / folder))
        data = UserData(spark=None, frame=None, source=source)  # type: ignore[arg-type]
        return digest_of_rows(estimator(), data)

    first = digest([1.0, 2.0])
    assert first is not None and digest([1.0, 2.0], "copy") == first
    assert digest([1.0, 3.0]) != first


@pytest.mark.spark
def test_rows_are_told_apart_by_what_is_read(spark: SparkSession) -> None:
    from pyspark.sql import functions as F

    rows = spark.range(20).select(
        F.array("id", "id").alias("features"), F.col("id").alias("label"), F.rand().alias("other")
    )

    def digest(frame: Any, **params: Any) -> Any:
        return digest_of_rows(estimator(**params), UserData(spark=spark, frame=frame))

    first = digest(rows)
    assert digest(rows.repartition(3).orderBy(F.col("label").desc())) == first
    assert digest(rows.withColumnRenamed("label", "Label")) == first
    assert digest(rows.limit(10)) != first
    assert digest(rows.union(rows.limit(1))) != first
    assert digest(rows.withColumn("label", F.col("label") + 1)) != first
    nested = rows.select(F.struct("features", "label").alias("s"), F.create_map("label", "label"))
    names = {"featuresCol": "s.features", "labelCol": "s.label"}
    assert digest(nested, **names) == digest(nested.coalesce(1), **names)
    mapped = nested.withColumnRenamed("map(label, label)", "m")
    names["weightCol"] = "m"  # a type that Spark has no hash of
    assert digest(mapped, **names) == digest(mapped.coalesce(1), **names)
