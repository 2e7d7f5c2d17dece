"""A torch ``Dataset`` of the user's own as a source.

Workers make the dataset by calling the user's function. A map-style one is dealt to shards by index
and shuffled by sparkdl; an iterable one says itself what a shard holds, and in which order.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from sparkdl.data.plan import Shard, Split, SpoolColumn, TrainPlan
from sparkdl.data.source import Contents, Wanted, rows_of, with_shapes
from sparkdl.data.sources.dataset_rows import (
    Fields,
    Make,
    SampledRows,
    Sampler,
    as_given,
    by_index,
    check_kinds,
    column_of,
    named,
    schema_of,
)
from sparkdl.errors import ConfigError, DataError
from sparkdl.runtime.process import seeded

if TYPE_CHECKING:
    from sparkdl.data.source import ShardRows

Style = Literal["map", "iterable"]


@dataclass(frozen=True, kw_only=True)
class DatasetShard:
    """The part of the data that a `DatasetSource`'s function shall open."""

    shard_id: int
    """Number of the shard, from 0. Each belongs to one worker."""
    num_shards: int
    """Shards in all, as many as workers."""
    epoch: int
    """Number of the epoch, from 0."""
    seed: int
    """The estimator's."""


@dataclass(frozen=True)
class DatasetSource:
    """A torch ``Dataset`` or ``IterableDataset`` that workers make by calling ``factory``.

    Given to ``fit`` in place of a DataFrame::

        def make() -> Dataset:
            return ImageFolder("/mnt/images", transform=to_tensor)


        TorchClassifier(module=make_net, labelCol="label").fit(DatasetSource(make))

    A sample is a tensor, a tuple or a dict of tensors (or arrays, or numbers), all samples alike.
    The parts of a tuple are called by `names`, and Params such as ``featuresCol`` name them.

    A map-style dataset is exact in all respects: each index once an epoch, in an order that follows
    from seed and epoch; a resumed run goes on bit for bit. For that ``dataset[i]`` must depend on
    nothing but ``i``, the epoch and the seed; a worker reads ahead in another thread, so draws from
    torch's global generator do not repeat. An iterable dataset must give the same samples each time
    it is made for the same `DatasetShard`: a resumed run makes it anew and passes over those that
    were used. It is not shuffled.
    """

    factory: Callable[..., Any]
    """Makes the dataset. Called with a `DatasetShard`, once an epoch, if it takes an argument; an
    iterable dataset needs that, to read another part on each worker. The driver calls it too, to
    see the length and the first sample. What it draws at random while it makes the dataset follows
    from the estimator's seed, so all processes split alike."""
    _: KW_ONLY
    names: tuple[str, ...] = ("features", "label", "weight")
    """Names of the parts of tuples, in their order; of a lone tensor the first."""
    num_rows: int | None = None
    """Samples of an epoch over all workers, of an iterable dataset without ``len``: each worker
    uses the first of its share, and must give as many."""
    validation: Callable[..., Any] | None = None
    """Makes the dataset that is used for validation, as `factory` does."""
    num_validation_rows: int | None = None
    """As `num_rows`, of the dataset for validation."""
    version: str = ""
    """Change it when the data changes: checkpoints of another version are not continued."""

    def __post_init__(self) -> None:
        for name in ("factory", "validation"):
            value = getattr(self, name)
            if not callable(value) and (name == "factory" or value is not None):
                raise ConfigError(f"{name} must be a function; received {value!r}")
        object.__setattr__(self, "names", tuple(self.names))
        for name in ("num_rows", "num_validation_rows"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ConfigError(f"{name} must be at least 1; received {count}")
        if self.num_validation_rows is not None and self.validation is None:
            raise ConfigError("num_validation_rows needs a dataset for validation: validation=...")

    def schema(self) -> pa.Schema:
        alone = Wanted(columns=(), validation=None, num_shards=1)
        return schema_of(self._first(_part(0, alone)))

    def contents(self, wanted: Wanted) -> Contents:
        if wanted.validation is not None:
            raise ConfigError(
                "validationIndicatorCol needs a DataFrame or files; use "
                "DatasetSource(validation=...)"
            )
        check_kinds(wanted.columns)
        num_shards = wanted.num_shards
        train = _cut(self.factory, wanted, self.num_rows, "num_rows")
        held = replace(train, sizes=(0,) * num_shards)
        if self.validation is not None:
            option = "num_validation_rows"
            held = _cut(self.validation, wanted, self.num_validation_rows, option)
        sample = self._first(_part(0, wanted))
        columns = tuple(column_of(column, sample) for column in wanted.columns)
        content = self._content(sample, sum(train.sizes), sum(held.sizes))
        return Contents(
            columns=columns,
            shards=tuple(
                Shard(
                    shard_id=number,
                    num_rows=train.sizes[number],
                    num_validation_rows=held.sizes[number],
                    fingerprint=f"{content:016x}-{number}-{list(train.sizes)}",
                )
                for number in range(wanted.num_shards)
            ),
            content=content,
            reader=DatasetShards(
                splits={"train": train, "validation": held},
                names=self.names,
                wanted=with_shapes(wanted.columns, columns),
                seed=wanted.seed,
            ),
        )

    def _first(self, part: DatasetShard) -> Fields:
        dataset = make(self.factory, part)
        try:
            sample = dataset[0] if style_of(dataset) == "map" else next(iter(dataset))
        except (StopIteration, IndexError):
            raise DataError("the dataset has no samples") from None
        return named(sample, self.names)

    def _content(self, sample: Fields, train: int, held: int) -> int:
        digest = hashlib.blake2b(digest_size=8)
        names = [
            f"{getattr(f, '__module__', '')}:{getattr(f, '__qualname__', type(f).__qualname__)}"
            for f in (self.factory, self.validation)
        ]
        # Not the sample's values: the dataset may augment it by chance.
        parts = [[name, v.dtype.name, v.shape] for name, v in sorted(sample.items())]
        digest.update(json.dumps([names, train, held, self.version, parts]).encode())
        return int.from_bytes(digest.digest(), "big")


@dataclass(frozen=True, kw_only=True)
class DatasetSplit:
    """The dataset of a split."""

    factory: Callable[..., Any]
    style: Style
    sizes: tuple[int, ...]
    """Rows of each shard."""


@dataclass(frozen=True, kw_only=True)
class DatasetShards:
    """Opens shards of a dataset on a worker; see `source.ShardSource`."""

    splits: Mapping[Split, DatasetSplit]
    names: tuple[str, ...]
    wanted: tuple[SpoolColumn, ...]
    seed: int = 0
    """The estimator's."""
    _made: dict[Split, Any] = field(default_factory=dict, init=False, compare=False)
    """The dataset of a split that all of a rank's shards have in common."""

    def open(self, plan: TrainPlan, shard: Shard, split: Split) -> ShardRows:
        dataset = self.splits[split]
        if split not in self._made and not takes_part(dataset.factory):
            # Now, since a thread that reads ahead must not touch the generators of training.
            with seeded(self.seed):
                self._made[split] = dataset.factory()
        made = self._made.get(split)
        make_part = _maker(dataset.factory, made, shard.shard_id, len(dataset.sizes))
        num_rows = rows_of(shard, split)
        if dataset.style == "iterable":
            taker = as_given(make_part, shard.shard_id, num_rows)
        else:
            own = dealt(dataset.sizes, shard.shard_id)
            taker = by_index(make_part, own, shard.fingerprint)
        return SampledRows(Sampler(plan.columns, self.wanted, self.names), num_rows, taker)

    def is_here(self, shard: Shard) -> bool:
        """See `source.ShardSource.is_here`: the user's function is everywhere."""
        return True


def dealt(sizes: Sequence[int], number: int) -> np.ndarray:
    """Indices of shard ``number``: its part of a permutation that is always the same.

    Neighbours are often alike, such as images of one folder; each shard shall have some of all.
    """
    total = sum(sizes)
    order = np.random.Generator(np.random.PCG64(total)).permutation(total)
    start = sum(sizes[:number])
    return np.sort(order[start : start + sizes[number]])


def _maker(factory: Callable[..., Any], made: Any, shard_id: int, num_shards: int) -> Make:
    """Makes the dataset of a shard for an epoch; it is ``made`` if its function has no argument."""

    def make_part(epoch: int, seed: int) -> Any:
        if not takes_part(factory):
            return made
        return factory(
            DatasetShard(shard_id=shard_id, num_shards=num_shards, epoch=epoch, seed=seed)
        )

    return make_part


def make(factory: Callable[..., Any], part: DatasetShard) -> Any:
    """The dataset of a part; its function gets it if it takes an argument.

    Draws from the generators of torch, numpy and Python are those of every process with that seed,
    so that a function which splits at random gives all of them the same rows.
    """
    with seeded(part.seed):
        return factory(part) if takes_part(factory) else factory()


def takes_part(factory: Callable[..., Any]) -> bool:
    """Return True if a function takes an argument."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # some callables of C have no signature
        return False
    return any(p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters)


def style_of(dataset: Any) -> Style:
    """Return whether samples are had by index or by iteration.

    Raises:
        ConfigError: by neither.
    """
    from torch.utils.data import IterableDataset

    is_iterable = isinstance(dataset, IterableDataset)
    if not is_iterable and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return "map"
    if is_iterable or hasattr(dataset, "__iter__"):
        return "iterable"
    raise ConfigError(
        f"the factory of a DatasetSource must return a torch Dataset with len() or an "
        f"IterableDataset; it returned {type(dataset).__name__}"
    )


def _part(number: int, wanted: Wanted) -> DatasetShard:
    return DatasetShard(shard_id=number, num_shards=wanted.num_shards, epoch=0, seed=wanted.seed)


def _cut(
    factory: Callable[..., Any], wanted: Wanted, num_rows: int | None, option: str
) -> DatasetSplit:
    """Cut a dataset into shards; ``option`` is what the user calls ``num_rows``."""
    num_shards = wanted.num_shards
    dataset = make(factory, _part(0, wanted))
    style = style_of(dataset)
    if style == "iterable" and num_shards > 1 and not takes_part(factory):
        raise ConfigError(
            "the function of an iterable dataset must take an argument, a sparkdl.DatasetShard, "
            "and read only that part; otherwise all workers would train on the same samples"
        )
    if style == "map" and num_rows is not None:
        raise ConfigError(f"{option} is for iterable datasets; this one has a length")
    if style == "map" or num_rows is not None:
        total = len(dataset) if num_rows is None else num_rows
        upto = accumulate([1 / num_shards] * (num_shards - 1))
        bounds = [0, *(round(part * total) for part in upto), total]
        sizes = tuple(stop - start for start, stop in pairwise(bounds))
        return DatasetSplit(factory=factory, style=style, sizes=sizes)
    parts = [dataset, *(make(factory, _part(n, wanted)) for n in range(1, num_shards))]
    try:
        sizes = tuple(len(part) for part in parts)
    except TypeError as error:
        raise ConfigError(
            "the iterable dataset has no length; give it __len__ (the samples of its part), or "
            f"set DatasetSource({option}=...)"
        ) from error
    return DatasetSplit(factory=factory, style=style, sizes=sizes)
