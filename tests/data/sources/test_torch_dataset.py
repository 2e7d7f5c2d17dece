from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, random_split

from sparkdl.data.batches import Batch, sequential_batches
from sparkdl.data.plan import SpoolColumn
from sparkdl.data.source import Contents, Source, Wanted, open_shards
from sparkdl.data.sources.torch_dataset import DatasetShard, DatasetSource
from sparkdl.errors import ConfigError, DataError
from sparkdl.inputs import Sequence
from sparkdl.runtime.process import seeded
from tests.data.sources import test_parquet
from tests.data.sources.test_parquet import labels, plan_of

FEATURES = SpoolColumn(name="features", role="feature", dtype="float32")
LABEL = SpoolColumn(name="label", role="label", dtype="int64", as_classes=True)


def tensors(count: int = 30) -> TensorDataset:
    y = torch.arange(count)
    return TensorDataset(torch.stack([y, -y], 1).double(), y)


class Stream(IterableDataset[tuple[torch.Tensor, int]]):
    """Every so-manieth number of a range, in an order of the epoch."""

    def __init__(self, part: DatasetShard, count: int = 31, has_length: bool = True) -> None:
        self.numbers = list(range(part.shard_id, count, part.num_shards))
        np.random.default_rng([part.seed, part.epoch]).shuffle(self.numbers)
        self.has_length = has_length

    def __len__(self) -> int:
        if not self.has_length:
            raise TypeError
        return len(self.numbers)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        for number in self.numbers:
            yield torch.tensor([number, -number], dtype=torch.float64), number


def wanted(*columns: SpoolColumn, **changes: Any) -> Wanted:
    return test_parquet.wanted(*(columns or (FEATURES, LABEL)), **changes)


def epoch_of(contents: Contents, rank: int, **changes: Any) -> list[Batch]:
    return test_parquet.epoch_of(contents, plan_of(contents), rank, **changes)


@pytest.mark.parametrize("make", [tensors, Stream])
def test_the_ranks_use_every_sample_once(make: Callable[..., Any]) -> None:
    contents = DatasetSource(make).contents(wanted())
    seen = [batch for rank in (0, 1) for batch in epoch_of(contents, rank)]
    assert sorted(labels(seen)) == list(range(sum(s.num_rows for s in contents.shards)))
    for batch in seen:
        assert batch.inputs[0].dtype == torch.float32
        assert torch.equal(batch.inputs[0][:, 1], -batch.target.float())


@pytest.mark.parametrize("make", [tensors, Stream])
def test_a_resumed_epoch_goes_on_where_it_was(make: Callable[..., Any]) -> None:
    contents = DatasetSource(make).contents(wanted())
    whole = epoch_of(contents, 1, epoch=2)
    for start in range(len(whole)):
        assert labels(epoch_of(contents, 1, epoch=2, start_step=start)) == labels(whole[start:])
    assert labels(epoch_of(contents, 1, epoch=3)) != labels(whole)


def by_torch() -> Dataset[Any]:
    return random_split(tensors(50), [40, 10])[0]


def by_numpy() -> Dataset[Any]:
    return Subset(tensors(50), np.random.permutation(50)[:40].tolist())


def by_python() -> Dataset[Any]:
    return Subset(tensors(50), random.sample(range(50), 40))


@pytest.mark.parametrize("make", [by_torch, by_numpy, by_python])
def test_a_split_at_random_is_the_same_in_all_processes(make: Callable[..., Any]) -> None:
    """Each process has drawn other things before it makes the dataset."""
    torch.manual_seed(1)
    states = torch.get_rng_state(), random.getstate()
    contents = DatasetSource(make).contents(wanted(seed=5))
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    seen: list[int] = []
    for rank in (0, 1):
        torch.manual_seed(10 + rank)
        np.random.seed(10 + rank)
        random.seed(10 + rank)
        seen += labels(epoch_of(pickle.loads(cloudpickle.dumps(contents)), rank))
    with seeded(5):
        chosen = make()
    assert sorted(seen) == sorted(int(chosen[index][1]) for index in range(40))
    others = DatasetSource(make).contents(wanted(seed=6))
    assert sorted(labels(epoch_of(others, 0)) + labels(epoch_of(others, 1))) != sorted(seen)


def test_a_map_style_dataset_is_mixed_over_shards_and_within() -> None:
    contents = DatasetSource(lambda: tensors(4000)).contents(wanted())
    order = labels(epoch_of(contents, 0))
    assert 0.9 < np.mean(order) / 2000 < 1.1
    assert abs(np.corrcoef(order, np.arange(len(order)))[0, 1]) < 0.1


def test_samples_are_asked_for_together_where_the_dataset_can() -> None:
    class Together(Dataset[Any]):
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> Any:
            assert index == 0, "only the driver's look at the first"
            return torch.zeros(2), 0

        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [(torch.full((2,), index), index) for index in indices]

    contents = DatasetSource(Together).contents(wanted())
    assert sorted(labels(epoch_of(contents, 0)) + labels(epoch_of(contents, 1))) == list(range(10))


def test_validation_is_another_dataset() -> None:
    source = DatasetSource(tensors, validation=Stream)
    contents = source.contents(wanted())
    plan = plan_of(contents)
    assert [shard.num_validation_rows for shard in contents.shards] == [16, 15]
    for rank, expected in ((0, range(0, 31, 2)), (1, range(1, 31, 2))):
        rows = open_shards(contents.reader, plan, rank, "validation")
        assert sorted(labels(list(sequential_batches(rows, plan)))) == list(expected)


def test_without_a_length_the_number_of_samples_is_given() -> None:
    def endless(part: DatasetShard) -> Stream:
        return Stream(part, count=1000, has_length=False)

    with pytest.raises(ConfigError, match="the iterable dataset has no length"):
        DatasetSource(endless).contents(wanted())
    contents = DatasetSource(endless, num_rows=25).contents(wanted())
    assert [len(labels(epoch_of(contents, rank))) for rank in (0, 1)] == [12, 13]
    short = DatasetSource(lambda part: Stream(part, 9), num_rows=25).contents(wanted())
    with pytest.raises(DataError, match="shard 0 gave 5 samples in epoch 1, but 12 are wanted"):
        epoch_of(short, 0)


def test_datasets_for_validation_without_a_length() -> None:
    def endless(part: DatasetShard) -> Stream:
        return Stream(part, count=1000, has_length=False)

    with pytest.raises(ConfigError, match=r"set DatasetSource\(num_validation_rows=\.\.\.\)"):
        DatasetSource(tensors, validation=endless).contents(wanted())
    source = DatasetSource(tensors, validation=endless, num_validation_rows=9)
    contents = source.contents(wanted())
    assert [shard.num_validation_rows for shard in contents.shards] == [4, 5]
    plan = plan_of(contents)
    rows = open_shards(contents.reader, plan, 1, "validation")
    assert len(labels(list(sequential_batches(rows, plan)))) == 5
    with pytest.raises(ConfigError, match="needs a dataset for validation"):
        DatasetSource(tensors, num_validation_rows=9)


def test_errors_of_the_users_function_are_its_own() -> None:
    def broken(part: DatasetShard) -> Stream:
        if part.shard_id:
            raise TypeError("the user's")
        return Stream(part)

    with pytest.raises(TypeError, match="the user's"):
        DatasetSource(broken).contents(wanted())


def test_a_dataset_that_augments_at_random_is_the_same_after_a_restart() -> None:
    def noisy() -> list[Any]:
        return [(torch.rand(2), 0)] * 3

    first, again = (DatasetSource(noisy).contents(wanted()) for _ in range(2))
    assert first.content == again.content
    assert [s.fingerprint for s in first.shards] == [s.fingerprint for s in again.shards]

    def wider() -> list[Any]:
        return [(torch.rand(3), 0)] * 3

    wider.__qualname__ = noisy.__qualname__
    assert DatasetSource(wider).contents(wanted()).content != first.content


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (torch.ones(1, dtype=torch.uint8), torch.tensor([300])),
        (torch.ones(1, dtype=torch.int8), torch.tensor([-129])),
        (torch.ones(1, dtype=torch.bool), torch.tensor([2])),
        (torch.tensor([1]), torch.tensor([1.5])),
        (torch.ones(1, dtype=torch.uint8), torch.tensor([-1], dtype=torch.int8)),
    ],
)
@pytest.mark.parametrize("role", ["feature", "label"])
def test_values_that_would_be_lost_are_refused(
    first: torch.Tensor, then: torch.Tensor, role: Any
) -> None:
    column = SpoolColumn(name="features", role=role, dtype=np.asarray(first).dtype.name)
    contents = DatasetSource(lambda: [first, then]).contents(wanted(column, num_shards=1))
    with pytest.raises(DataError, match=r'column "features" is .*, which cannot hold the'):
        epoch_of(contents, 0)


def test_values_that_fit_are_taken() -> None:
    samples = [(torch.tensor([1.0]), 1), (torch.tensor([2]), 2.0)]
    contents = DatasetSource(lambda: samples).contents(wanted(num_shards=1))
    (batch,) = epoch_of(contents, 0)
    assert sorted(batch.inputs[0].tolist()) == [[1.0], [2.0]]
    assert sorted(batch.target.tolist()) == [1, 2]
    small = [torch.tensor([1], dtype=torch.uint8), torch.tensor([255])]
    column = SpoolColumn(name="features", role="feature", dtype="int16")
    contents = DatasetSource(lambda: small).contents(wanted(column, num_shards=1))
    assert sorted(int(x) for x in epoch_of(contents, 0)[0].inputs[0]) == [1, 255]


def test_an_iterable_dataset_must_know_its_part() -> None:
    part = DatasetShard(shard_id=0, num_shards=1, epoch=0, seed=0)
    with pytest.raises(ConfigError, match="must take an argument"):
        DatasetSource(lambda: Stream(part)).contents(wanted())
    alone = DatasetSource(lambda: Stream(part)).contents(wanted(num_shards=1))
    assert len(labels(epoch_of(alone, 0))) == 31


def test_parts_of_samples_have_names_and_keep_their_types() -> None:
    sample = {"image": torch.zeros(3, 4, 4, dtype=torch.uint8), "age": 3, "kind": np.int32(1)}
    source = DatasetSource(lambda: [sample] * 5)
    assert source.schema().names == ["image", "age", "kind"]
    columns = [
        SpoolColumn(name="image", role="feature", dtype="int16"),
        SpoolColumn(name="age", role="feature", dtype="int64"),
        SpoolColumn(name="kind", role="label", dtype="int64"),
    ]
    contents = source.contents(wanted(*columns, num_shards=1))
    batch = epoch_of(contents, 0)[0]
    assert [(value.dtype, value.shape[1:]) for value in batch.inputs] == [
        (torch.uint8, (3, 4, 4)),
        (torch.int64, ()),
    ]
    assert DatasetSource(lambda: [torch.ones(2)]).schema().names == ["features"]
    with pytest.raises(ConfigError, match="samples have 4 parts, but names has 3"):
        DatasetSource(lambda: [(1, 2, 3, 4)]).schema()
    with pytest.raises(DataError, match='part "label" of a sample is str'):
        DatasetSource(lambda: [(1.0, "dog")]).schema()


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ((torch.zeros(3), 0), r'"features" is ragged: sample 2 has shape \(3,\), others \(2,\)'),
        ((torch.zeros(1, 2), 0), r"is ragged: sample 2 has shape \(1, 2\), others \(2,\)"),
        ((torch.zeros(2), -1), r"class indices .* \(first: -1 in sample 2\)"),
        ({"features": torch.zeros(2)}, 'sample 2 has no part "label"'),
    ],
)
def test_samples_unlike_the_others_are_named(odd: Any, message: str) -> None:
    samples = [(torch.zeros(2), 0)] * 5
    contents = DatasetSource(lambda: [*samples[:2], odd, *samples[2:]]).contents(
        wanted(num_shards=1)
    )
    with pytest.raises(DataError, match=message):
        epoch_of(contents, 0)


def test_what_a_dataset_cannot_do_is_refused() -> None:
    assert isinstance(DatasetSource(tensors), Source)
    with pytest.raises(ConfigError, match="factory must be a function"):
        DatasetSource(tensors())
    with pytest.raises(ConfigError, match="num_rows must be at least 1"):
        DatasetSource(tensors, num_rows=0)
    with pytest.raises(ConfigError, match="this one has a length"):
        DatasetSource(tensors, num_rows=3).contents(wanted())
    with pytest.raises(ConfigError, match="use DatasetSource"):
        DatasetSource(tensors).contents(wanted(validation="held"))
    with pytest.raises(DataError, match="no samples"):
        DatasetSource(list).schema()
    with pytest.raises(ConfigError, match="it returned int"):
        DatasetSource(lambda: 3).contents(wanted())
    column = replace(FEATURES, specification=Sequence("features"))
    with pytest.raises(ConfigError, match="this source gives tensors"):
        DatasetSource(tensors).contents(wanted(column, LABEL))


def test_checkpoints_know_the_version_of_the_data() -> None:
    first = DatasetSource(tensors).contents(wanted())
    assert first.content == DatasetSource(tensors).contents(wanted(num_shards=3)).content
    assert first.content != DatasetSource(tensors, version="2").contents(wanted()).content
