"""TorchRunner on Spark: what comes in, what comes back, and that nothing is left."""

from __future__ import annotations

import io
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import sparkdl
from sparkdl import Image, Mesh, Sequence, Tensor, TorchRunner
from sparkdl.errors import ClusterError, ConfigError, DataError, WorkerError
from sparkdl.spark.functions import run_function
from sparkdl.spark.session.compat import is_connect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.gang]

ROWS = 60


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    from pyspark.sql import functions as F

    x = F.array(*[((F.col("id") * k) % 7 - 3).cast("double") for k in (1, 2, 3)])
    return spark.range(0, ROWS, 1, 3).select(
        x.alias("x"), (x[0] + 2 * x[1] - x[2]).alias("y"), F.col("id")
    )


def persisted(spark: SparkSession) -> set[int]:
    """Numbers of the tables that Spark keeps; those of other tests' fixtures among them."""
    if is_connect(spark):
        return set()
    return set(spark.sparkContext._jsc.getPersistentRDDs())  # type: ignore[union-attr]


@pytest.fixture(autouse=True)
def nothing_is_left(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """After every run: no persisted table, no thread, no temporary folder."""
    (folder := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = persisted(spark)
    yield
    assert persisted(spark) <= before
    assert [t.name for t in threading.enumerate() if t.name.startswith("sparkdl-")] == []
    assert list(folder.glob("sparkdl-*")) == []


def train(epochs: int, rate: float = 0.05) -> dict[str, Any]:
    """What a user's script does."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    place = sparkdl.context()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 1).to(place.device))
    optimizer = torch.optim.SGD(model.parameters(), rate)
    first = 0
    if place.checkpoint is not None:
        model.load_state_dict(place.checkpoint["model"])
        first = place.checkpoint["epoch"]
    loader = place.loader(batch_size=10, columns=["x", "y"])
    for epoch in range(first, epochs):
        loader.set_epoch(epoch)
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x).squeeze(1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        state = {"model": model.state_dict(), "epoch": epoch + 1}
        place.report({"loss": loss.item()}, checkpoint=state)
    return {"first": first, "weight": model.module.weight.detach(), "rank": place.rank}


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [2, 0])
def test_a_function_trains_on_the_rows_of_a_data_frame(df: DataFrame, num_workers: int) -> None:
    runner = TorchRunner(num_workers=num_workers, data=df, verbose=0, results="all")
    found = runner.run(train, 12)
    assert [value["rank"] for value in found] == list(range(max(1, num_workers)))
    assert all(value["weight"].tolist() == found[0]["weight"].tolist() for value in found)
    assert found[0]["weight"][0].tolist() == pytest.approx([1, 2, -1], abs=0.05)
    assert [record["report"] for record in runner.history] == list(range(1, 13))
    assert runner.history[-1]["loss"] < runner.history[0]["loss"]


def rows(*names: str) -> dict[str, list[Any]]:
    """The numbers of the rows that this rank gets of each data set."""
    place = sparkdl.context()
    return {
        name: sorted(n for batch in place.loader(name, batch_size=8) for n in batch["id"].tolist())
        for name in names
    }


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [2, 0])
def test_several_data_sets_reach_the_same_workers(df: DataFrame, num_workers: int) -> None:
    sets = {"train": df.filter("id >= 20"), "test": df.filter("id < 20").select("id")}
    runner = TorchRunner(num_workers=num_workers, data=sets, verbose=0, results="all")
    found = runner.run(rows, "train", "test")
    assert len(found) == max(1, num_workers)
    assert all(len(part["train"]) > 10 and len(part["test"]) > 3 for part in found)
    assert sorted(n for part in found for n in part["train"]) == list(range(20, ROWS))
    assert sorted(n for part in found for n in part["test"]) == list(range(20))


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [2, 0])
def test_data_may_be_a_source_and_a_data_frame(
    df: DataFrame, tmp_path: Path, num_workers: int
) -> None:
    df.filter("id < 30").write.parquet(str(tmp_path / "p"))
    sets = {"files": sparkdl.ParquetSource(str(tmp_path / "p")), "rows": df.filter("id >= 30")}
    runner = TorchRunner(num_workers=num_workers, data=sets, verbose=0, results="all")
    found = runner.run(rows, "files", "rows")
    assert sorted(n for part in found for n in part["files"]) == list(range(30))
    assert sorted(n for part in found for n in part["rows"]) == list(range(30, ROWS))


@pytest.mark.slow
def test_ranks_along_tensor_read_all_rows_of_their_reader(df: DataFrame, tmp_path: Path) -> None:
    df.filter("id < 30").write.parquet(str(tmp_path / "p"))
    sets = {"files": sparkdl.ParquetSource(str(tmp_path / "p")), "rows": df.filter("id >= 30")}
    for num_shards in (None, 3):
        runner = TorchRunner(
            parallelism=Mesh(tensor=2), data=sets, verbose=0, results="all", num_shards=num_shards
        )
        first, second = runner.run(rows, "files", "rows")
        assert first == second  # in the same order
        assert sorted(first["files"]) == list(range(30))
        assert sorted(first["rows"]) == list(range(30, ROWS))


@pytest.mark.slow
def test_columns_become_what_is_asked_for(df: DataFrame) -> None:
    from pyspark.sql import functions as F

    def look() -> list[tuple[Any, ...]]:
        (batch,) = sparkdl.context().loader(batch_size=100, shuffle=False)
        return [(name, tuple(value.shape), str(value.dtype)) for name, value in batch.items()]

    ragged = df.select("id", F.slice("x", 1, F.col("id").cast("int") % 3 + 1).alias("words"))
    inputs = {"words": Sequence("words", mask="mask"), "number": Tensor("id")}
    runner = TorchRunner(num_workers=1, data=ragged, inputs=inputs, verbose=0)
    assert runner.run(look) == [
        ("words", (ROWS, 3), "torch.float32"),
        ("mask", (ROWS, 3), "torch.bool"),
        ("number", (ROWS,), "torch.int64"),
    ]


@pytest.mark.slow
def test_without_data(spark: SparkSession) -> None:
    def total() -> float:
        import torch
        import torch.distributed as dist

        value = torch.tensor([sparkdl.context().rank + 1.0])
        dist.all_reduce(value)
        return value.item()

    assert TorchRunner(num_workers=2, verbose=0, results="all").run(total) == [3.0, 3.0]


@pytest.mark.slow
def test_a_script_runs_on_every_rank(df: DataFrame, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, pathlib\nimport sparkdl\nplace = sparkdl.context()\n"
        "seen = sum(len(b['id']) for b in place.loader(batch_size=8))\n"
        "(pathlib.Path(sys.argv[1]) / str(place.rank)).write_text(str(seen))\n"
    )
    assert TorchRunner(num_workers=2, data=df, verbose=0).run(script, tmp_path) is None
    assert sum(int((tmp_path / str(rank)).read_text()) for rank in (0, 1)) == ROWS


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [2, 0])
def test_a_later_run_goes_on_if_it_is_told_to(
    df: DataFrame, tmp_path: Path, num_workers: int
) -> None:
    options: dict[str, Any] = {
        "num_workers": num_workers, "data": df, "verbose": 0, "checkpoint_dir": str(tmp_path / "c"),
    }  # fmt: skip
    whole = TorchRunner(num_workers=num_workers, data=df, verbose=0).run(train, 5)
    assert TorchRunner(**options).run(train, 3)["first"] == 0
    with pytest.raises(ConfigError, match="resume=True"):
        TorchRunner(**options).run(train, 5)
    runner = TorchRunner(**options, resume=True)
    found = runner.run(train, 5)
    assert found["first"] == 3
    assert found["weight"].tolist() == whole["weight"].tolist()
    assert [record["report"] for record in runner.history] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_run_that_restarts_goes_on_from_its_own_checkpoints(
    spark: SparkSession, tmp_path: Path
) -> None:
    directory = str(tmp_path / "c")

    def work() -> Any:
        import os

        from sparkdl.comm.channel import Hub
        from sparkdl.storage.checkpoint_format import Writer
        from sparkdl.storage.storage import open_storage
        from sparkdl.worker.function_rank import checkpoints

        place = sparkdl.context()
        if place.num_restarts == 0:
            for _ in range(2):  # when the second one begins, the first is whole
                place.report(checkpoint="its own")
            # Another run in the same folder is further.
            other = Writer(run_key="function", run_id="other", attempt=0)
            state = {"checkpoint": "another's", "history": [], "number": 9}
            storage = open_storage(directory)
            with checkpoints(storage, 2, other, Hub(), 99.0, is_required=True) as manager:
                manager.save(9, state, {})
            os._exit(1)
        return place.checkpoint

    runner = TorchRunner(num_workers=1, verbose=0, checkpoint_dir=directory, max_restarts=1)
    assert runner.run(work) == "its own"
    # The next one takes the newest there is, whoever wrote it.
    again = TorchRunner(num_workers=0, verbose=0, checkpoint_dir=directory, resume=True)
    assert again.run(lambda: sparkdl.context().checkpoint) == "another's"


def test_one_that_goes_on_beside_another_that_is_alive_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from sparkdl.storage.lease import Lease
    from sparkdl.storage.storage import open_storage

    options: dict[str, Any] = {"num_workers": 0, "verbose": 0, "checkpoint_dir": str(tmp_path)}
    TorchRunner(**options).run(lambda: sparkdl.context().report(checkpoint=1))
    with Lease(open_storage(str(tmp_path)), "function", "other"):
        found = TorchRunner(**options, resume=True).run(lambda: sparkdl.context().checkpoint)
    assert found == 1
    assert f"another run seems to be alive in {tmp_path} (run other on " in caplog.text
    caplog.clear()
    TorchRunner(**options, resume=True).run(print)
    assert "alive" not in caplog.text


@pytest.mark.slow
def test_an_error_comes_with_rank_and_traceback(df: DataFrame) -> None:
    def fail() -> None:
        if sparkdl.context().rank == 1:
            raise LookupError("no such layer")
        import torch.distributed as dist

        dist.barrier()

    with pytest.raises(WorkerError, match="no such layer") as caught:
        TorchRunner(num_workers=2, data=df, verbose=0).run(fail)
    assert caught.value.rank == 1
    assert "in fail" in caught.value.worker_traceback


@pytest.mark.slow
def test_what_a_function_leaves_in_its_process_reaches_nobody(df: DataFrame) -> None:
    from torch import nn

    def change() -> tuple[bool, str | None]:
        import os

        import torch

        found = (torch.is_grad_enabled(), os.environ.get("SPARKDL_LEFT"))
        torch.set_grad_enabled(False)
        os.environ["SPARKDL_LEFT"] = "yes"
        os.chdir("/")
        return found

    runner = TorchRunner(num_workers=1, verbose=0)
    assert [runner.run(change), runner.run(change)] == [(True, None), (True, None)]
    estimator = sparkdl.TorchRegressor(
        module=nn.Linear(3, 1), epochs=1, numWorkers=1, verbose=0, featuresCol="x", labelCol="y"
    )
    assert estimator.fit(df).summary.steps > 0


@pytest.mark.slow
def test_unequal_collectives_are_a_mistake_of_the_function(spark: SparkSession) -> None:
    def unequal() -> None:
        import torch
        import torch.distributed as dist

        for _ in range(2 - sparkdl.context().rank):
            dist.all_reduce(torch.ones(1))

    with pytest.raises(WorkerError, match="rank 1 had come to its end") as caught:
        TorchRunner(num_workers=2, verbose=0).run(unequal)
    assert "in unequal" in caught.value.worker_traceback


def test_the_reports_of_an_earlier_run_are_not_those_of_a_failed_one() -> None:
    def maybe(fails: bool) -> None:
        sparkdl.context().report({"loss": 1.0})
        if fails:
            raise LookupError

    runner = TorchRunner(num_workers=0, verbose=0)
    runner.run(maybe, False)
    assert len(runner.history) == 1
    with pytest.raises(LookupError):
        runner.run(maybe, True)
    assert runner.history == []


def test_in_the_driver_an_error_comes_as_it_is(df: DataFrame) -> None:
    def fail() -> None:
        raise LookupError("no such layer")

    with pytest.raises(LookupError, match="no such layer"):
        TorchRunner(num_workers=0, data=df, verbose=0).run(fail)


@pytest.mark.slow
def test_what_is_reported_is_shown(df: DataFrame, capsys: pytest.CaptureFixture[str]) -> None:
    TorchRunner(num_workers=1, data=df, verbose=1).run(train, 2)
    shown = capsys.readouterr().err
    assert "report 1: loss " in shown
    assert "report 2: loss " in shown


@pytest.mark.parametrize("num_workers", [1, 0])
def test_columns_that_are_no_tensors_are_refused(df: DataFrame, num_workers: int) -> None:
    texts = df.selectExpr("cast(id as string) as text")
    with pytest.raises(DataError, match='column "text" has type string'):
        TorchRunner(num_workers=num_workers, data=texts, verbose=0).run(rows, "train")


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 0])
def test_no_rows_and_nulls_are_refused(df: DataFrame, num_workers: int) -> None:
    sets = {"train": df, "test": df.filter("id < 0")}
    with pytest.raises(DataError, match="has no rows"):
        TorchRunner(num_workers=num_workers, data=sets, verbose=0).run(rows, "train")
    holes = df.selectExpr("if(id = 7, null, id) as id")
    with pytest.raises(DataError, match='"id" has 1 null'):
        TorchRunner(num_workers=num_workers, data=holes, verbose=0).run(rows, "train")


def png(text: str) -> bytes:
    from PIL import Image as Picture

    if text == "3":
        return b"no picture"
    buffer = io.BytesIO()
    Picture.new("L", (4, 4), int(text)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [2, 0])
def test_rows_that_are_left_out_are_told(
    spark: SparkSession, caplog: pytest.LogCaptureFixture, tmp_path: Path, num_workers: int
) -> None:
    pictures = spark.createDataFrame([(n, png(str(n))) for n in range(8)], ["id", "image"])
    inputs = {"id": "id", "image": Image("image", channels=1, on_error="skip")}
    options: dict[str, Any] = {"num_workers": num_workers, "inputs": inputs, "verbose": 0}
    runner = TorchRunner(data={"pictures": pictures}, results="all", **options)
    found = runner.run(rows_in_order, "pictures")
    assert sorted(n for part in found for n in part) == [0, 1, 2, 4, 5, 6, 7]
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "data set 'pictures' goes without 1 row(s): column \"image\"" in warning
    pictures.write.parquet(str(tmp_path / "p"))
    source = sparkdl.ParquetSource(str(tmp_path / "p"))
    with pytest.raises(ConfigError, match="data set 'train': on_error='skip'"):
        TorchRunner(data=source, **options).run(rows_in_order, "train")


def rows_in_order(name: str) -> list[int]:
    loader = sparkdl.context().loader(name, batch_size=3, shuffle=False)
    return [n for batch in loader for n in batch["id"].tolist()]


@pytest.mark.parametrize("num_workers", [1, 0])
def test_a_data_set_that_lacks_a_column_is_named(df: DataFrame, num_workers: int) -> None:
    options: dict[str, Any] = {"num_workers": num_workers, "verbose": 0}
    sets = {"train": df, "test": df.select("x")}
    with pytest.raises(DataError, match=r'data set .test.: .*"y"'):
        TorchRunner(data=sets, inputs={"x": "x", "y": "y"}, **options).run(rows, "train")
    with pytest.raises(DataError, match="data set 'train': there is no column"):
        TorchRunner(data=df.select(), **options).run(rows, "train")


@pytest.mark.slow
def test_arguments_of_any_size_arrive(spark: SparkSession) -> None:
    assert TorchRunner(num_workers=1, verbose=0).run(len, bytes(17 * 2**20)) == 17 * 2**20


def test_what_cannot_be_sent_is_refused_before_anything_runs(spark: SparkSession) -> None:
    runner = TorchRunner(num_workers=1, verbose=0)
    for thing in (threading.Lock(), spark.range(3), [spark]):
        with pytest.raises(ConfigError, match="cannot be sent to the workers"):
            runner.run(print, thing)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": -1}, "num_workers"),
        ({"num_workers": (0, 2)}, r"fewest \(at least 1\) and the most; received \(0, 2\)"),
        ({"num_workers": (3, 2)}, "fewest"),
        ({"num_workers": (1, 2, 3)}, "fewest"),
        ({"num_workers": (1, 3), "num_shards": 2}, "raise num_shards; received 2"),
        ({"num_shards": 0}, "raise num_shards; received 0"),
        ({"num_shards": 2}, "give data too"),
        ({"grow_after_seconds": -1.0}, "grow_after_seconds"),
        ({"device": "tpu"}, "device"),
        ({"max_restarts": -1}, "max_restarts"),
        ({"keep_checkpoints": 0}, "keep_checkpoints"),
        ({"results": "last"}, "results"),
        ({"resume": True}, "checkpoint_dir"),
        ({"data": [1, 2]}, "DataFrame of Spark or pandas, or a source"),
        ({"parallelism": 2}, r"parallelism must be a sparkdl\.Mesh"),
        ({"parallelism": Mesh(shard=2), "num_workers": 3}, "is made of 2 workers, and num_workers"),
        ({"parallelism": Mesh(shard=2), "num_workers": (1, 2)}, "gaps in a mesh"),
        ({"parallelism": Mesh(shard=2, smallest_unit=1)}, "has no effect on a function"),
        ({"parallelism": Mesh(shard=4, tensor=2), "num_shards": 3}, "raise num_shards"),
        ({"inputs": ["x"]}, "mapping by name"),
        ({"inputs": {"x": 3}}, "a column's name or"),
        ({"inputs": {"m": Tensor("x"), "s": Sequence("y", mask="m")}}, "twice"),
    ],
)
def test_wrong_options_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TorchRunner(**options)


@pytest.mark.classic
def test_errors_speak_of_the_arguments_of_the_runner(spark: SparkSession) -> None:
    with pytest.raises(ClusterError, match=r"num_workers=99 needs 99 free slots") as caught:
        TorchRunner(num_workers=99, verbose=0).run(train, 1)
    assert "set num_workers to at most 2" in str(caught.value)
    assert "numWorkers" not in str(caught.value)


def test_a_range_needs_to_know_the_slots(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_function, "is_connect", lambda _: True)
    with pytest.raises(ConfigError, match="needs classic Spark"):
        TorchRunner(num_workers=(1, 2), verbose=0).run(print)


@pytest.mark.parametrize("wrong", [2.5, True, "2", (True, 2), (1, 2.0), (2, 1), (0, 2), (1, 2, 3)])
def test_numbers_of_workers_are_whole(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="a number, or a pair"):
        TorchRunner(num_workers=wrong)
    if isinstance(wrong, tuple):
        return
    with pytest.raises(ConfigError, match="num_shards must be an integer"):
        TorchRunner(num_workers=1, num_shards=wrong)


def divide(steps: int) -> tuple[int, list[float]]:
    """A function that names all axes, as for many workers."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    place = sparkdl.context()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Tanh())
    parallelize_module(model, place.mesh["tensor"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=place.mesh["data", "shard"])
    state = {"model": model.state_dict(), "step": 0}
    if place.checkpoint is not None:
        place.load_checkpoint(state)
    first = state["step"]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(first, steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        state = {"model": model.state_dict(), "step": step + 1}
        place.report({"loss": 0.0}, checkpoint=state)
    return first, model[0].weight.full_tensor().flatten().tolist()


def test_a_function_along_a_mesh_can_be_debugged_in_the_driver(tmp_path: Path) -> None:
    """Twice in one process: torch remembers meshes by the names of their axes."""
    options = {"num_workers": 0, "parallelism": Mesh(shard=2, tensor=2), "verbose": 0}
    _, expected = TorchRunner(**options).run(divide, 4)
    kept = {**options, "checkpoint_dir": str(tmp_path / "kept")}
    TorchRunner(**kept).run(divide, 2)
    first, found = TorchRunner(**kept, resume=True).run(divide, 4)
    assert (first, found) == (2, expected)


def test_what_cannot_run_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="no such script"):
        TorchRunner(num_workers=0).run("nowhere.py")
    with pytest.raises(ConfigError, match="function or the path"):
        TorchRunner(num_workers=0).run(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="keyword"):
        TorchRunner(num_workers=0).run(__file__, fast=True)
