"""Row groups of one host go to one shard, as far as equal shards allow."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from sparkdl.data.source import Contents
from sparkdl.data.sources.parquet import ParquetSource
from sparkdl.storage.blocks import Block, Blocks
from tests.data.sources.test_parquet import epoch_of, joined, labels, plan_of, wanted, write


def contents_on(
    folder: Path, hosts: Mapping[int, Sequence[str]], num_shards: int = 2, **changes: object
) -> Contents:
    """Those of files whose blocks, by the file's number, lie on hosts."""

    def locate(url: str, paths: tuple[str, ...]) -> Blocks:
        assert url == str(folder)
        numbers = {path: int(path.rpartition("-")[2].removesuffix(".parquet")) for path in paths}
        return {
            path: [Block(0, 1 << 40, tuple((host, f"{host}.net") for host in hosts[number]))]
            for path, number in numbers.items()
            if number in hosts
        }

    return ParquetSource(folder).contents(wanted(num_shards=num_shards, locate=locate, **changes))


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


def test_copied_blocks_make_other_shards_of_the_same_rows(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", [20] * 4)
    hosts = {number: ["ab"[number % 2]] for number in range(4)}
    before, again = (contents_on(folder, hosts) for _ in range(2))
    moved = contents_on(folder, {**hosts, 0: ["b"], 1: ["a"]})
    assert prints(before) == prints(again) != prints(moved)
    assert before.content == moved.content


def test_a_row_group_over_two_blocks_belongs_to_who_has_most(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", [40], group=40)
    last = pq.read_metadata(folder / "part-0.parquet").row_group(0).column(2)
    stop = last.data_page_offset + last.total_compressed_size

    def locate(url: str, paths: tuple[str, ...]) -> Blocks:
        cut = stop // 3
        return {paths[0]: [Block(0, cut, (("a",),)), Block(cut, 2 * stop, (("b",), ("c",)))]}

    contents = ParquetSource(folder).contents(wanted(num_shards=1, locate=locate))
    assert contents.shards[0].hosts == ("b", "c")
