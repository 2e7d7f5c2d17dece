"""Row groups of one host go to one shard, as far as equal shards allow."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from sparkdl.data.source import Contents
from sparkdl.data.sources.locality import Places
from sparkdl.data.sources.parquet import ParquetSource
from sparkdl.data.sources.parquet_files import DataFile, RowGroup
from sparkdl.data.sources.row_groups import deal_both
from sparkdl.errors import CheckpointError
from sparkdl.storage.blocks import Blocks, FileBlock
from tests.data.sources.test_parquet import epoch_of, joined, labels, plan_of, wanted, write


def contents_on(
    folder: Path,
    hosts: Mapping[int, Sequence[str]],
    num_shards: int = 2,
    source: ParquetSource | None = None,
    **changes: object,
) -> Contents:
    """Those of files whose blocks, by the file's number, lie on hosts."""

    def locate(url: str, paths: tuple[str, ...]) -> Blocks:
        assert url == str(folder)
        numbers = {path: int(path.rpartition("-")[2].removesuffix(".parquet")) for path in paths}
        return {
            path: [FileBlock(0, 1 << 40, tuple((host, f"{host}.net") for host in hosts[number]))]
            for path, number in numbers.items()
            if number in hosts
        }

    source = source or ParquetSource(folder)
    return source.contents(wanted(num_shards=num_shards, locate=locate, **changes))


def local_share(contents: Contents, hosts: Mapping[int, Sequence[str]], shard: int) -> float:
    """The part of a shard's rows that lie on the host that is named first."""
    best = contents.shards[shard].hosts[0]
    rows = {True: 0, False: 0}
    for piece in contents.reader.pieces[shard]["train"]:
        number = int(piece.group.file.name.rpartition("-")[2].removesuffix(".parquet"))
        rows[best in hosts[number]] += piece.num_rows
    return rows[True] / sum(rows.values())


def prints(contents: Contents) -> list[str]:
    return [shard.fingerprint for shard in contents.shards]


def test_a_shard_has_the_rows_of_one_host(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", [20] * 6)
    hosts = {number: ["ab"[number % 2]] for number in range(6)}
    contents = contents_on(folder, hosts)
    assert [shard.hosts for shard in contents.shards] == [("a", "a.net"), ("b", "b.net")]
    assert [local_share(contents, hosts, shard) for shard in (0, 1)] == [1, 1]
    plan = plan_of(contents)
    seen = [labels(epoch_of(contents, plan, rank)) for rank in (0, 1)]
    assert sorted(joined(seen)) == list(range(120))
    assert [len(rows) for rows in seen] == [60, 60]
    assert contents.content == ParquetSource(folder).contents(wanted()).content


def test_hosts_that_all_have_everything_change_nothing(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", [20, 31, 7])
    everywhere = contents_on(folder, {number: ["a", "b"] for number in range(3)})
    unknown = ParquetSource(folder).contents(wanted())
    assert prints(everywhere) == prints(unknown)
    assert [shard.hosts for shard in everywhere.shards] == [(), ()]


@pytest.mark.parametrize(("num_shards", "least"), [(4, 0.9), (8, 0.9), (2, 0.65)])
def test_copies_make_room_for_balance(tmp_path: Path, num_shards: int, least: float) -> None:
    folder = write(tmp_path / "data", [20] * 48)
    chosen = random.Random(0)
    hosts = {number: chosen.sample("abcd", 2) for number in range(48)}
    contents = contents_on(folder, hosts, num_shards)
    sizes = [shard.num_rows for shard in contents.shards]
    assert max(sizes) - min(sizes) <= 1
    assert min(local_share(contents, hosts, n) for n in range(num_shards)) >= least


def test_balance_comes_first(tmp_path: Path) -> None:
    """Where one host has most, others read of it; what lies nowhere fills what is empty."""
    folder = write(tmp_path / "data", [10] * 10)
    hosts = {number: ["a" if number < 6 else "b"] for number in range(9)}
    contents = contents_on(folder, hosts)
    assert [shard.num_rows for shard in contents.shards] == [50, 50]
    assert contents.shards[0].hosts == ("a", "a.net")
    assert contents.shards[1].hosts == ("b", "b.net")


@pytest.mark.parametrize("fraction", [0, 0.3])
def test_blocks_that_move_between_two_fits(tmp_path: Path, fraction: float) -> None:
    """A fit that goes on has the same shards; each goes to the host that has most of it now."""
    folder = write(tmp_path / "data", [20] * 8)
    source = ParquetSource(folder, validation_fraction=fraction)
    hosts = {number: ["ab"[number % 2]] for number in range(8)}
    swapped = {number: ["ba"[number % 2]] for number in range(8)}
    moved = {**hosts, 0: ["b"], 1: ["a"], 5: ["c"]}
    before, again = (contents_on(folder, hosts, source=source) for _ in range(2))
    anew = contents_on(folder, moved, source=source)
    assert before.content == anew.content
    assert prints(before) == prints(again) != prints(anew)
    plan = plan_of(before)
    for later in (swapped, moved, {}):
        kept = contents_on(folder, later, source=source, homes=before.homes)
        assert kept.homes == before.homes
        assert prints(kept) == prints(before)
        assert [kept.reader.pieces[n] for n in (0, 1)] == [before.reader.pieces[n] for n in (0, 1)]
        assert {shard.hosts[:1] for shard in kept.shards} <= {("a",), ("b",), ()}
        orders = [[labels(epoch_of(c, plan, rank)) for rank in (0, 1)] for c in (before, kept)]
        assert orders[0] == orders[1], "the cursor of one is that of the other"
        assert len(set(joined(orders[1]))) == len(joined(orders[1])) == plan.num_rows
    there = contents_on(folder, swapped, source=source, homes=before.homes)
    assert [s.hosts[0] for s in before.shards] == [s.hosts[0] for s in there.shards][::-1]


def test_validation_has_homes_too(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", [20] * 8, group=20)
    source = ParquetSource(folder, validation_fraction=0.3)
    hosts = {number: ["ab"[number % 2]] for number in range(8)}
    train, held = json.loads(contents_on(folder, hosts, source=source).homes or "")
    assert (len(train), len(held)) == (5, 3)
    validation = [
        [shard["validation"] for shard in found.reader.pieces]
        for homes in ([0, 1, 0], [1, 0, 1])
        for found in [contents_on(folder, hosts, source=source, homes=json.dumps([train, homes]))]
    ]
    assert validation[0] != validation[1]


def test_homes_of_other_files_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", [20] * 4)
    for homes in (
        "[[0,1],[]]",
        "[[0,1,0,1]]",
        "[[0,1,0,1,0,1,0,1]]",
        "[[0,1,0,1,0,1,0,1,0],[]]",
        "half a text",
        '{"a": 1}',
    ):
        with pytest.raises(CheckpointError, match="homes of row groups"):
            contents_on(folder, {}, homes=homes)


def test_a_row_group_over_two_blocks_belongs_to_who_has_most(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", [40], group=40)
    last = pq.read_metadata(folder / "part-0.parquet").row_group(0).column(2)
    stop = last.data_page_offset + last.total_compressed_size

    def locate(url: str, paths: tuple[str, ...]) -> Blocks:
        cut = stop // 3
        return {
            paths[0]: [FileBlock(0, cut, (("a",),)), FileBlock(cut, 2 * stop, (("b",), ("c",)))]
        }

    contents = ParquetSource(folder).contents(wanted(num_shards=1, locate=locate))
    assert contents.shards[0].hosts == ("b", "c")


def group(number: int, num_rows: int = 10) -> RowGroup:
    return RowGroup(DataFile(path="/f", digest="", constants={}), number, num_rows)


def places(*held: Mapping[str, int]) -> Places:
    """Of each row group the bytes that hosts have."""
    return Places(
        {("/f", n): {(host,): count for host, count in of.items()} for n, of in enumerate(held)}
    )


def test_a_block_counts_for_the_part_of_a_row_group_that_it_has() -> None:
    listing: Any = SimpleNamespace(
        url="u", files=[group(0).file], row_groups=lambda: [group(0)],
        byte_range=lambda _: (100, 200),
    )  # fmt: skip
    a, b, c = ("a",), ("b",), ("c",)
    located = [FileBlock(0, 130, (a,)), FileBlock(130, 170, (a, b)), FileBlock(170, 300, (b,))]
    found = Places.of(listing, lambda *_: {"/f": [*located, FileBlock(300, 400, (c,))]})
    assert found.num_bytes["/f", 0] == {a: 70, b: 70, c: 0}


def test_row_groups_go_to_the_host_that_has_most_and_then_has_fewest_rows() -> None:
    known = places({"a": 9, "b": 4}, {"a": 9, "b": 9}, {"a": 9, "b": 9}, {"b": 9})
    groups = [group(0, 30), group(1, 10), group(2, 10), group(3, 25)]
    assert known.homes(groups) == [0, 1, 0, 1]
    little = places({"a": 9, "b": 4}, {"a": 9})  # of what b has, it would read less than half
    assert little.homes(groups[:2]) == []


def test_row_groups_are_dealt_in_random_order() -> None:
    given: Any = SimpleNamespace(homes=None, num_shards=1)
    (shard,), _ = deal_both([group(n) for n in range(16)], [group(99)], given, places())
    numbers = [piece.group.number for piece in shard["train"]]
    assert sorted(numbers) == list(range(16)) != numbers


def test_the_hosts_of_a_shard_are_those_of_what_it_reads() -> None:
    known = places({"a": 100}, {"b": 80})
    assert known.hosts_of([(group(0), 0.1), (group(1), 1.0)]) == ("b",)
    five = places({"a": 100, "b": 99, "c": 98, "d": 97}, {"e": 1})
    assert five.hosts_of([(group(0), 1.0)]) == ("a", "b", "c")
