"""What is wrong is told before the data set is read."""

from __future__ import annotations

import contextlib
import copy
import io
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from pyspark.sql import functions as F
from torch import nn

from sparkdl import TorchClassifier, TorchRegressor
from sparkdl.errors import ClusterError, ConfigError, DataError
from sparkdl.spark.fit import check_rows
from sparkdl.spark.frames.first_rows import is_answered_early, is_shown_narrow
from tests.serialization.programs import program

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.classic, pytest.mark.slow]
ROWS = 4000


class Counted:
    """Rows of four numbers and a label; counts those that are computed."""

    def __init__(self, spark: SparkSession) -> None:
        self.num_rows = counter = spark.sparkContext.accumulator(0)

        @partial(F.udf, returnType="array<float>", useArrow=False)
        def features(number: int) -> list[float]:
            counter.add(1)
            return [number % 7 + 1.0] * 4

        rows = spark.range(0, ROWS, 1, 8)
        label = (F.col("id") % 3).alias("label")
        self.df = rows.select(features("id").alias("features"), label)


@pytest.fixture(scope="module")
def counted(spark: SparkSession) -> Counted:
    return Counted(spark)


def fit(df: DataFrame, module: Any, **params: Any) -> Any:
    made = {"numWorkers": 2, "maxSteps": 2, "verbose": 0, **params}
    return TorchClassifier(module=module, **made).fit(df)


def test_a_mistake_that_the_first_rows_show(counted: Counted) -> None:
    before = counted.num_rows.value
    with pytest.raises(ConfigError, match=r"Linear\(in_features=5.*got float32 \(batch, 4\)"):
        fit(counted.df, nn.Linear(5, 3))
    with pytest.raises(ConfigError, match="has one output"):
        fit(counted.df, nn.Linear(4, 1))
    with pytest.raises(DataError, match=r"label\(s\) outside the 2 classes") as caught:
        fit(counted.df, nn.Linear(4, 2))
    told = str(caught.value)
    (looked,) = (
        int(part) for part in re.findall(r"in the first (\d+) rows alone, where 2 is", told)
    )
    assert f"has {sum(number % 3 == 2 for number in range(looked))} label(s)" in told
    with pytest.raises(ConfigError, match=r"use squeeze\(-1\)"):
        TorchRegressor(module=nn.Sequential(nn.Linear(4, 1), Squeezed()), verbose=0).fit(counted.df)
    assert counted.num_rows.value - before < ROWS / 8  # of four looks


def test_rows_that_cannot_be_used_among_the_first(counted: Counted) -> None:
    """They are told of without a look at the others."""
    before = counted.num_rows.value
    alone = r" \(counted in the first 8 rows alone\)$"
    by_id = counted.df.withColumn("label", F.lit(1.0))
    bad = {
        "null": F.when(F.col("label") > 5, F.col("features")),
        "null inside": F.array(F.lit(1.0), F.lit(None).cast("double")),
        "ragged": F.slice("features", 1, F.array_position("features", 7.0).cast("int") % 4 + 1),
    }
    for words, features in bad.items():
        with pytest.raises(DataError, match=f'column "features" .*{words.split()[0]}.*{alone}'):
            fit(by_id.withColumn("features", features), nn.Linear(4, 2))
    for value in ("nan", "-1", "0.5"):
        with pytest.raises(
            DataError, match=f'column "label" must hold whole.*8 rows do not.*{alone}'
        ):
            fit(by_id.withColumn("label", F.lit(float(value))), nn.Linear(4, 2))
    for value in ("nan", "-inf"):
        features = F.array(F.lit(1.0), F.lit(float(value)))
        with pytest.raises(
            DataError,
            match=(
                r"^the loss is nan at step 1. Among the first 8 rows NaN or infinite values are "
                r'in: feature "features" of 8; drop or mend these rows, as by df.where\("forall'
            ),
        ):
            fit(by_id.withColumn("features", features), nn.Linear(2, 2))
    with pytest.raises(DataError, match=r'as by df.where\("abs\(x\) < '):
        df = by_id.withColumn("x", F.lit(float("nan")))
        fit(df, TakesOne(), inputs=["features", "x"])
    weighted = by_id.withColumn("w", F.when(F.col("label") > 5, 1.0).otherwise(0.0))
    with pytest.raises(DataError, match=r'column "w" is 0 in all rows') as caught:  # of all
        fit(weighted, nn.Linear(4, 2), weightCol="w")
    assert "alone" not in str(caught.value)
    assert counted.num_rows.value - before < 2 * ROWS


def test_nan_in_rows_for_validation_alone(
    counted: Counted, caplog: pytest.LogCaptureFixture
) -> None:
    """Training goes on, and what is said of it is true, wherever the row lies."""
    for place in (3, 3000):
        held = (F.col("id") == place) | (F.col("id") > 3500)
        df = counted.df.sparkSession.range(ROWS).withColumn("held", held)
        value = F.when(F.col("id") == place, float("nan")).otherwise(F.col("id") % 5)
        df = df.select("held", F.array(value.cast("float")).alias("features"), "id")
        df = df.withColumn("label", F.col("id") % 2)
        caplog.clear()
        model = fit(df, nn.Linear(1, 2), validationIndicatorCol="held")
        (told,) = [text for text in caplog.messages if "for validation" in text]
        assert "or the module or the loss gives NaN for some of them" in told
        assert model.summary.history[-1]["val_accuracy"] > 0


class OfBoth(nn.Linear):
    """Takes what is not finite for zeros."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.nan_to_num(0.0, 0.0, 0.0))


def test_nan_is_not_blamed_for_a_loss_that_wants_all_classes(spark: SparkSession) -> None:
    rows = [([1.0 * i, float("nan") if i == 0 else 1.0], int(i >= 32)) for i in range(64)]
    df = spark.createDataFrame(rows, "features array<float>, label int").coalesce(1)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        each = nn.functional.cross_entropy(output, target, reduction="none")
        return each[target == 0].mean() + each[target == 1].mean()

    model = fit(df, OfBoth(2, 2), loss=loss, numWorkers=1, batchSize=64)
    assert all(parameter.isfinite().all() for parameter in model.module.parameters())


class TakesOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)

    def forward(self, features: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(torch.cat([features, x[:, None]], dim=1))
        return out


class Squeezed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.squeeze()


CALLS_IT = """
import of_the_driver
from torch import nn

class Own(nn.Linear):
    def forward(self, x):
        return of_the_driver.half(super().forward(x))

def loss(output, target):
    return nn.functional.cross_entropy(of_the_driver.half(output), target)
"""


def test_what_executors_lack(
    counted: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "from torch import nn\nclass Net(nn.Linear): ...\ndef half(x): return x / 2\n"
    (tmp_path / "of_the_driver.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    import of_the_driver  # type: ignore[import-not-found]

    before = counted.num_rows.value
    with pytest.raises(ClusterError, match=r"cannot import of_the_driver.Net .* --py-files"):
        fit(counted.df, of_the_driver.Net(4, 3))
    with program(CALLS_IT) as made:
        with pytest.raises(ClusterError, match=r"import of_the_driver \(ModuleNot.* --py-files"):
            fit(counted.df, made.Own(4, 3))
        with pytest.raises(ClusterError, match=r"import of_the_driver \(ModuleNot.* --py-files"):
            fit(counted.df, nn.Linear(4, 3), loss=made.loss)
    if not torch.cuda.is_available():
        with pytest.raises(ClusterError, match=r"finds no CUDA device .*set device=.cpu"):
            fit(counted.df, nn.Linear(4, 3), device="cuda")
    assert counted.num_rows.value - before < ROWS / 8
    del sys.modules["of_the_driver"]


class Prices(nn.Module):
    """Takes the rows that there are, and no zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not (x > 0).all():
            raise ValueError("prices are positive")
        out: torch.Tensor = self.layer(x.log())
        return out


def test_rows_behind_a_shuffle_are_computed_once(counted: Counted) -> None:
    df = counted.df.repartition(4, "label")
    assert is_answered_early(counted.df)
    assert not is_answered_early(df)
    before = counted.num_rows.value
    model = fit(df, Prices)
    assert counted.num_rows.value - before == ROWS
    assert model.summary.steps == 2
    assert len(model.transform(counted.df).limit(3).collect()) == 3
    assert 0 <= model.evaluate(counted.df)["accuracy"] <= 1


def test_a_mistake_behind_a_shuffle_is_told_while_shards_are_written(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, own = list[int](), check_rows.check_rows

    def look(*given: Any, **named: Any) -> Any:
        running.append(len(counted.df.sparkSession.sparkContext.statusTracker().getActiveJobsIds()))
        return own(*given, **named)

    monkeypatch.setattr(check_rows, "check_rows", look)
    df = counted.df.repartition(4, "label")
    many = {"numWorkers": 40, "executionMode": "rounds", "syncStrategy": "ParameterAveraging"}
    with pytest.raises(ConfigError, match=r"Linear\(in_features=5.*got float32 \(batch, 4\)"):
        fit(df, nn.Linear(5, 3), **many)
    assert running == [1]  # the job that writes them


def test_rows_that_cannot_be_used_behind_a_shuffle(counted: Counted) -> None:
    """The first shards tell, and name a row once the job that writes the others has ended."""
    label = F.col("id") % 3
    df = counted.df.sparkSession.range(0, ROWS, 1, 8).select(
        F.array(F.col("id") * 1.0, F.when(label < 2, 2.0)).alias("features"), label.alias("label")
    )
    many = {"numWorkers": 40, "executionMode": "rounds", "syncStrategy": "ParameterAveraging"}
    bad = {
        r'"features" has \d+ rows? with a null': df.repartition(4, "label"),
        '"label" must hold whole': df.withColumn("label", F.lit(0.5)).repartition(4, "features"),
    }
    for words, rows in bad.items():
        with pytest.raises(DataError, match=words) as caught:
            fit(rows, nn.Linear(2, 3), **many)
        told = str(caught.value)
        assert "(such as " in told
        assert "the row with label=" in told
        looked = int(re.findall(r"counted in the first (\d+) rows alone", told)[0])
        assert 0 < looked < ROWS


def test_a_module_of_half_precision_gets_features_of_its_own(counted: Counted) -> None:
    first = nn.Linear(4, 3).bfloat16()
    given = {
        "numWorkers": 1,
        "optimizer": "sgd",
        "learningRate": 0.02,
        "batchSize": 4000,
        "epochs": 2,
    }
    model = fit(counted.df, first, **given)
    rows = torch.tensor([[number % 7 + 1.0] * 4 for number in range(ROWS)]).bfloat16()
    labels, own = torch.arange(ROWS) % 3, copy.deepcopy(first)
    for _ in range(2):
        loss = nn.functional.cross_entropy(own(rows).float(), labels)
        grads = torch.autograd.grad(loss, list(own.parameters()))
        with torch.no_grad():
            for parameter, grad in zip(own.parameters(), grads, strict=True):
                parameter -= 0.02 * grad
    for trained, expected in zip(model.module.parameters(), own.parameters(), strict=True):
        assert trained.dtype == torch.bfloat16
        assert torch.allclose(trained.float(), expected.float(), atol=0.02)
    assert not torch.equal(model.module.weight, first.weight)
    assert model.transform(counted.df).where("prediction >= 0").count() == ROWS
    two = fit(counted.df, first, **{**given, "numWorkers": 2})
    assert torch.allclose(two.module.weight.float(), own.weight.float(), atol=0.02)


def test_rows_of_which_none_counts(counted: Counted, caplog: pytest.LogCaptureFixture) -> None:
    weighted = counted.df.withColumn("w", F.lit(0.5).cast("int"))
    with pytest.raises(DataError, match=r'column "w" is 0 in all rows'):
        fit(weighted, nn.Linear(4, 3), weightCol="w")
    held = counted.df.withColumn("held", F.col("label") == 0).withColumn("one", F.lit(1))
    loss = nn.CrossEntropyLoss(ignore_index=0)
    model = fit(held, nn.Linear(4, 3), loss=loss, validationIndicatorCol="held")
    assert "for validation is NaN: none of them has counted" in caplog.text
    assert model.summary.history[-1]["loss"] > 0
    ignored = counted.df.withColumn("label", F.col("label") * 0)
    for mode in ("gang", "rounds"):
        strategy = {"executionMode": mode, "syncStrategy": "parameteraveraging"}
        with pytest.raises(DataError, match="no row has counted in training"):
            fit(ignored, nn.Linear(4, 3), loss=loss, **strategy)
        with pytest.raises(DataError, match=r"no row of epoch 1 counts"):
            fit(ignored, nn.Linear(4, 3), loss=loss, maxSteps=-1, batchSize=500, **strategy)


@pytest.mark.parametrize("ignored", [-100, -1, 255])
def test_labels_that_the_loss_leaves_out(counted: Counted, ignored: int) -> None:
    """They may be no classes; history and evaluate say the same as torch's mean."""
    label = F.when(F.col("label") == 2, ignored).otherwise(F.col("label")).alias("label")
    df = counted.df.select("features", label).limit(400).coalesce(2)
    first = nn.Linear(4, 2).double()
    loss = nn.CrossEntropyLoss(ignore_index=ignored)
    given = {"optimizer": "sgd", "learningRate": 0.1, "batchSize": 400, "maxSteps": -1}
    model = fit(df, first, **given, epochs=3, loss=loss)
    pairs = [(row["features"], row["label"]) for row in df.collect()]
    rows, labels = (torch.tensor(part) for part in zip(*pairs, strict=True))
    assert 0 < int((labels == ignored).sum()) < 400
    own = copy.deepcopy(first)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    for record in model.summary.history:
        output = own(rows.double())
        value = loss(output, labels)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        assert record["loss"] == pytest.approx(value.item(), rel=1e-10)
    assert torch.allclose(model.module.weight, own.weight, rtol=1e-10, atol=0)
    found, output = model.evaluate(df), own(rows.double())
    right = (output.argmax(1) == labels)[labels != ignored].double().mean().item()
    assert found["loss"] == pytest.approx(loss(output, labels).item(), rel=1e-10)
    assert found["accuracy"] == pytest.approx(right, rel=1e-10)
    with pytest.raises(DataError, match=r"label\(s\) outside|whole, non-negative class"):
        fit(df, first, loss=nn.CrossEntropyLoss(ignore_index=0))


def shown(df: DataFrame) -> str:
    """The plan as Spark prints it."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        df.explain()
    return text.getvalue()


def test_which_plans_answer_a_few_rows_at_once(spark: SparkSession, tmp_path: Path) -> None:
    numbers = spark.range(8).withColumn("x", F.col("id") * 2)
    (numbers.write.parquet(str(tmp_path / "p")))
    files = spark.read.parquet(str(tmp_path / "p"))
    cached = numbers.orderBy("x").cache()
    wide = [
        files.orderBy("x"), files.groupBy("x").count(), files.join(numbers, "id"),
        files.distinct(), files.repartition(3), files.orderBy("x").limit(3),
        files.where(F.col("x") > numbers.agg(F.max("id")).scalar()),
    ]  # fmt: skip
    narrow = [
        files.limit(5).select("x"),
        files, numbers, cached, files.where("x > 3").select("x"), files.union(files),
        files.coalesce(1), files.sample(0.5),
        spark.createDataFrame([(1,)], "a int"),
        files.selectExpr("explode(array(x, id)) AS y"),
        files.mapInPandas(lambda parts: parts, files.schema),
        spark.createDataFrame(numbers.rdd, numbers.schema),
    ]  # fmt: skip
    assert [is_answered_early(df) for df in narrow] == [True] * len(narrow)
    assert [is_answered_early(df) for df in wide] == [False] * len(wide)
    # On Spark Connect there is the text only, which shows a limit as a shuffle to one partition.
    assert [is_shown_narrow(shown(df)) for df in narrow[1:]] == [True] * len(narrow[1:])
    assert [is_shown_narrow(shown(df)) for df in wide] == [False] * len(wide)
    cached.unpersist()


def test_a_schedule_that_ends_before_the_run(counted: Counted) -> None:
    short = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=50)
    with pytest.raises(ConfigError, match="OneCycleLR fails within the 96 steps"):
        fit(counted.df, nn.Linear(4, 3), maxSteps=-1, batchSize=32, scheduler=short)


def test_a_schedule_takes_what_the_program_gives_it_first(spark: SparkSession) -> None:
    """Optimizer and schedule are made several times before training begins with the first value."""
    values: dict[str, Iterator[Any]] = {}
    rates: list[list[float]] = []

    def made(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=next(values["rate"]))

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, next(values["steps"]))

    df = spark.createDataFrame(
        [([1.0, 2.0], 0), ([2.0, 1.0], 1)], "features array<float>, label int"
    )
    for steps in ([3, 1, 1], [3]):
        values.update(rate=iter([0.5, 0.1]), steps=iter(steps))
        given = {"module": nn.Linear(2, 2), "optimizer": made, "scheduler": schedule}
        model = TorchClassifier(**given, numWorkers=1, epochs=5, verbose=0).fit(df)
        rates.append([epoch["learning_rate"] for epoch in model.summary.history])
        assert [*values["rate"]] == [0.5, 0.1] and [*values["steps"]] == steps
    plain = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    steps_of_plain, expected = torch.optim.lr_scheduler.StepLR(plain, 3), []
    for _ in range(5):
        plain.step()
        steps_of_plain.step()
        expected.append(plain.param_groups[0]["lr"])
    assert rates == [pytest.approx(expected)] * 2


def test_labels_from_one_that_leave_a_class_out_are_told(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    for first in (0, 1):
        rows = [([float(i)], first + i % 2) for i in range(16)]
        df = spark.createDataFrame(rows, "features array<float>, label int")
        caplog.clear()
        TorchClassifier(module=nn.Linear(1, 3), numWorkers=1, maxSteps=1, verbose=0).fit(df)
        told = [text for text in caplog.messages if "if labels begin at 1" in text]
        assert len(told) == first
