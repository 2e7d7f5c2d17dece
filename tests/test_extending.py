"""The examples of docs/extending.md: what users write works like what the package has."""

from __future__ import annotations

import functools
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import types as T

from sparkdl import sync
from sparkdl.comm import compression
from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.data.batches import Batches
from sparkdl.data.collate import arguments, example_arguments
from sparkdl.data.column_readers import read_trained
from sparkdl.data.plan import Column, SpoolColumn, make_plan
from sparkdl.data.source import Contents, Wanted, open_shards
from sparkdl.data.spool.spool_source import SpoolSource
from sparkdl.data.spool.writer import SpoolWriter
from sparkdl.errors import ConfigError, DataError
from sparkdl.explain import comparison
from sparkdl.inputs import Named, Sequence
from sparkdl.serialization.json_objects import describe, restore
from sparkdl.spark.frames.prepare_columns import prepare
from sparkdl.spark.frames.user_data import require_data
from sparkdl.sync.gradients.allreduce import AllReduce
from tests.comm.compression.ranks import Exchanged, Threads, exchange, unsent
from tests.docs.blocks import blocks_of
from tests.explain.test_comparison import predictor
from tests.gang import Gang
from tests.sync.apart import SGD, train_on_rank
from tests.train.runs import but

TEXTS = {name: block.text for block in blocks_of("docs/extending.md")
         for name in ("SignVote", "Float8", "NpzSource", "Bits")
         if f"class {name}" in block.text}  # fmt: skip


@functools.cache
def module_of_a_user(name: str) -> Any:
    """The page's example of that name, in a module that this process can import."""
    module = ModuleType(f"module_of_a_user_{name.lower()}")
    sys.modules[module.__name__] = module
    exec(TEXTS[name], vars(module))
    return module


# --- a strategy ---------------------------------------------------------------------------------


def sign_vote() -> sync.SyncStrategy:
    return sync.resolve(f"{module_of_a_user('SignVote').__name__}:SignVote")


def train(comm: Any, rows: list[int]) -> tuple[torch.Tensor, list[float]]:
    config = but(SGD, learning_rate=0.01, epochs=3, sync_strategy=sign_vote())
    mine, final, _ = train_on_rank(comm, config, rows)
    return mine, [record["loss"] for record in final["state"]["history"]]


def test_a_strategy_trains_alone_and_travels() -> None:
    _, losses = train(LocalCommunicator(), [22])
    assert losses[-1] < losses[0]
    strategy = sign_vote()
    assert pickle.loads(pickle.dumps(strategy)) == strategy


@pytest.mark.gang
@pytest.mark.parametrize("rows", [[22, 17], [9, 0]])
def test_a_strategy_trains_in_a_gang(gang: Gang, rows: list[int]) -> None:
    (first, losses), (second, _) = gang.run(train, rows)
    assert torch.equal(first, second)
    assert losses[-1] < losses[0]


def test_a_strategy_is_explained() -> None:
    found = predictor()
    own, *others = comparison.strategies(found, sign_vote(), 8, in_rounds=False)
    assert (own.strategy, own.mode, own.why_not) == ("SignVote()", "gang", None)
    assert own.sent_bytes_per_step == pytest.approx(2 * 7 / 8 * 1_000_000)
    plain = next(row for row in others if row.strategy == "AllReduce()")
    assert plain.step_seconds is not None
    assert own.step_seconds is not None
    assert 0.064 < own.step_seconds < plain.step_seconds
    scaling = comparison.scaling(found, sign_vote(), (1, 8), in_rounds=False)
    assert [row.workers for row in scaling] == [1, 8]


# --- a compression ------------------------------------------------------------------------------


def float8() -> compression.Compression:
    found = compression.resolve(f"{module_of_a_user('Float8').__name__}:Float8")
    assert found is not None
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_compression_sends_less_and_keeps_the_rest(world_size: int) -> None:
    shapes = [(40, 33), (13,), (0, 4)]
    found: list[Exchanged] = Threads(world_size).run(exchange, float8(), shapes, torch.float32)
    expected = torch.stack([one.shares for one in found]).sum(0)
    sent = torch.stack(found[0].estimates).sum(0)
    assert not torch.allclose(sent, expected, rtol=0, atol=1e-3)
    kept = unsent(found, float8())
    torch.testing.assert_close(sent + kept, expected, rtol=0, atol=1e-5)
    for one in found:
        assert torch.equal(torch.stack(one.estimates), torch.stack(found[0].estimates))
        assert one.bytes_sent == float8().wire_bytes(shapes, 4, world_size)
    if world_size == 2:
        assert found[0].bytes_sent < 0.26 * 4 * (40 * 33 + 13)


def train_compressed(comm: Any, own: bool) -> tuple[torch.Tensor, list[float], int]:
    strategy = AllReduce(compression=float8() if own else None)
    config = but(SGD, epochs=3, sync_strategy=strategy)
    mine, final, num_bytes = train_on_rank(comm, config, [22, 17])
    return mine, [record["loss"] for record in final["state"]["history"]], num_bytes


@pytest.mark.gang
def test_a_compression_trains_in_a_gang(gang: Gang) -> None:
    (first, losses, num_bytes), (second, _, _) = gang.run(train_compressed, True)
    assert torch.equal(first, second)
    assert losses[-1] < losses[0]
    (_, plain_losses, plain_bytes), _ = gang.run(train_compressed, False)
    assert num_bytes < plain_bytes
    assert losses[-1] == pytest.approx(plain_losses[-1], rel=0.02)


# --- a source -----------------------------------------------------------------------------------

WANTED = (
    SpoolColumn(name="x", role="feature", dtype="float32"),
    SpoolColumn(name="label", role="label", dtype="int64", as_classes=True),
)


def folder_of_files(folder: Path) -> str:
    sizes = [7, 3, 11, 5, 9, 6, 8, 2]
    for number, (first, size) in enumerate(zip(np.cumsum([0, *sizes]), sizes, strict=False)):
        label = np.arange(first, first + size, dtype=np.int32)
        x = np.stack([label, -label], axis=1).astype(np.float64)
        np.savez(folder / f"part-{number}.npz", x=x, label=label)
    return str(folder)


def contents_of(folder: str, num_shards: int, **more: Any) -> Contents:
    source = module_of_a_user("NpzSource").NpzSource(folder)
    require_data(source)
    more = {"columns": WANTED, "validation": None, **more}
    return source.contents(Wanted(num_shards=num_shards, **more))


def epoch_of(contents: Contents, world_size: int, epoch: int, start: int = 0) -> list[list[int]]:
    """The labels of each step of each rank, from step ``start`` on."""
    plan = make_plan(columns=contents.columns, shards=contents.shards, world_size=world_size,
                     batch_size=4, epochs=3)  # fmt: skip
    reader, steps = pickle.loads(pickle.dumps(contents.reader)), []
    for rank in range(world_size):
        rows = open_shards(reader, plan, rank, "train")
        for batch in Batches(rows, plan, rank, seed=3, epoch=epoch, start_step=start):
            (x,) = batch.inputs
            assert isinstance(batch.target, torch.Tensor)
            assert (x.dtype, batch.target.dtype) == (torch.float32, torch.int64)
            assert torch.equal(x, torch.stack([batch.target, -batch.target], 1).float())
            steps.append(batch.target.tolist())
    return steps


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_source_gives_each_row_once_an_epoch(tmp_path: Path, world_size: int) -> None:
    folder = folder_of_files(tmp_path)
    contents = contents_of(folder, 3)
    epochs = [epoch_of(contents, world_size, epoch) for epoch in range(2)]
    for steps in epochs:
        assert sorted(label for step in steps for label in step) == list(range(51))
    assert epochs[0] != epochs[1]
    assert epoch_of(contents_of(folder, 3), world_size, 1) == epochs[1]


def test_a_source_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    contents = contents_of(folder_of_files(tmp_path), 1)
    whole = epoch_of(contents, 1, 2)
    for start in range(len(whole) + 1):
        assert epoch_of(contents, 1, 2, start) == whole[start:]


def test_a_source_tells_its_columns_and_changes(tmp_path: Path) -> None:
    folder = folder_of_files(tmp_path)
    schema = module_of_a_user("NpzSource").NpzSource(folder).schema()
    assert schema == pa.schema([("x", pa.list_(pa.float64())), ("label", pa.int32())])
    before = contents_of(folder, 2)
    assert before.content == contents_of(folder, 5).content
    (tmp_path / "part-0.npz").unlink()
    assert before.content != contents_of(folder, 2).content
    with pytest.raises(ConfigError, match="holds no rows back"):
        contents_of(folder, 2, validation="held")
    words = SpoolColumn(name="x", role="feature", dtype="int64", specification=Sequence("x"))
    with pytest.raises(ConfigError, match="only Tensor"):
        contents_of(folder, 2, columns=(words,))


# --- a kind of input ----------------------------------------------------------------------------


def bits() -> Any:
    return module_of_a_user("Bits").Bits("fingerprint")


@pytest.fixture
def no_jvm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expressions of columns are those of Spark Connect, which need no session."""
    monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")


def prepared(data_type: T.DataType) -> Any:
    schema = T.StructType([T.StructField("fingerprint", data_type)])
    entry = Named(argument="x", specification=bits())
    return prepare(schema, entry, "feature", float_dtype="float32")


@pytest.mark.usefixtures("no_jvm")
def test_spark_passes_the_column_as_it_is() -> None:
    found = prepared(T.BinaryType())
    assert (found.dtype, found.argument, found.specification) == ("uint8", "x", bits())
    assert str(found.expression) == "Column<'`fingerprint`'>"
    for wrong in (T.LongType(), T.ArrayType(T.ByteType()), VectorUDT()):
        with pytest.raises(DataError, match=r"Bits cannot be made; in Arrow it is .* none"):
            prepared(wrong)
    with pytest.raises(DataError, match="cannot be told apart"):
        prepared(T.MapType(T.StringType(), T.LongType()))
    with pytest.raises(DataError, match="Arrow has no such type"):
        prepared(T.CalendarIntervalType())


def spooled(directory: Path, rows: list[bytes | None]) -> Any:
    """What the writer of a spool says of these rows."""
    column = SpoolColumn(name="fingerprint", role="feature", dtype="uint8", specification=bits())
    hashes = pa.array(np.arange(len(rows)), pa.int64())
    with SpoolWriter(directory, [column], has_validation=False) as writer:
        writer.write(pa.record_batch([pa.array(rows, pa.binary()), hashes], names=["0", "1"]))
    return writer.summary()


def test_a_kind_of_input_is_spooled_and_put_together(tmp_path: Path) -> None:
    sizes, shards = [5, 0, 9], []
    values = [bytes([number, 255 - number]) for number in range(sum(sizes))]
    expected = [[int(bit) for byte in value for bit in f"{byte:08b}"] for value in values]
    first = 0
    for number, size in enumerate(sizes):
        summary = spooled(tmp_path / str(number), list(values[first : first + size]))
        assert summary.shard.num_bytes == 2 * size + 8 * (size + 1)
        assert (summary.columns[0].dtype, summary.columns[0].shape) == (
            ("uint8", (16,)) if size else (None, None)
        )
        shards.append(replace(summary.shard, shard_id=number))
        first += size
    column = Column(name="fingerprint", role="feature", dtype="uint8", shape=(16,), argument="x",
                    specification=bits())  # fmt: skip
    plan = make_plan(columns=[column], shards=shards, world_size=1, batch_size=4, epochs=1)
    rows = open_shards(SpoolSource(), plan, 0, "train")
    batches = [batch.map(torch.clone) for batch in Batches(rows, plan, 0, seed=0, epoch=0)]
    assert {batch.names for batch in batches} == {("x",)}
    together = torch.cat([batch.inputs[0] for batch in batches])
    assert together.dtype == torch.float32
    assert sorted(together.int().tolist()) == sorted(expected)
    # `transform` reads rows in the same way, and tries the module on zeros of the same shape.
    read = arguments([column], [read_trained(pa.array(values, pa.binary()), column)[0]])  # type: ignore[list-item]
    assert read.values[0].int().tolist() == expected
    (zeros,) = example_arguments([column]).values
    assert (zeros.shape, zeros.dtype) == ((2, 16), torch.float32)


def test_rows_that_a_kind_of_input_cannot_use_are_counted(tmp_path: Path) -> None:
    for number, rows in enumerate(([b"ab", None], [b"ab", b"abc"])):
        (stats,) = spooled(tmp_path / str(number), rows).columns
        assert stats.nulls_and_shapes


def test_a_kind_of_input_is_saved_and_travels() -> None:
    assert restore(describe(bits())) == pickle.loads(pickle.dumps(bits())) == bits()
