"""Ranks hold the shards that they can read, and fetch those that must move, once."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from sparkdl.data.plan import Column, Shard, TrainPlan, make_plan
from sparkdl.data.spool.spool_source import SpoolSource
from sparkdl.errors import ShardLost
from sparkdl.worker import held_shards
from sparkdl.worker.held_shards import differing, hold_shards
from tests.gang import Gang

pytestmark = pytest.mark.gang

LARGE = 20 << 20
"""Bytes of a file: it travels in pieces."""


@dataclass(frozen=True)
class OnHosts(SpoolSource):
    """Each rank has a disk of its own."""

    disk: str = ""

    def is_here(self, shard: Shard) -> bool:
        return shard.path.startswith(self.disk) and Path(shard.path).is_dir()


def plan_of(folder: str, places: list[int]) -> TrainPlan:
    shards = [
        Shard(
            shard_id=number, path=f"{folder}/disk{rank}/shard-{number}", num_rows=4 + number,
            num_validation_rows=0, fingerprint=f"print{number}",
        )
        for number, rank in enumerate(places)
    ]  # fmt: skip
    column = Column(name="x", role="feature", dtype="float32", shape=(1,))
    return make_plan(columns=[column], shards=shards, world_size=1, batch_size=4, epochs=1)


def hold(comm: Any, folder: str, places: list[int], hosts: Any = None, assigned: Any = None) -> Any:
    """What each rank holds of the plan, and the files of its own shards."""
    plan = plan_of(folder, places)
    plan = plan if assigned is None else plan.held_by(assigned)
    if hosts is not None:
        shards = [replace(s, hosts=tuple(hosts[s.shard_id])) for s in plan.shards]
        plan = replace(plan, shards=tuple(shards))
    disk = Path(folder) / f"disk{comm.rank}"
    os.environ["SPARK_LOCAL_DIRS"] = str(disk)
    missing: list[list[int]] = []
    source = OnHosts("" if hosts is not None else str(disk))
    try:
        found = hold_shards(
            plan, source, comm, run_id="run", is_assigned=assigned is not None,
            say_missing=missing.append,
        )  # fmt: skip
    except ShardLost as error:
        return str(error), missing
    read = {
        shard.shard_id: {
            path.name: (len(data := path.read_bytes()), data[:1], data[-1:])
            for path in sorted(Path(shard.path).iterdir())
        }
        for shard in found.shards_of(comm.rank)
    }
    return found.shards_by_rank, read, [shard.path for shard in found.shards_of(comm.rank)]


def write(folder: Path, places: list[int]) -> None:
    for number, rank in enumerate(places):
        path = folder / f"disk{rank}" / f"shard-{number}"
        path.mkdir(parents=True)
        (path / "train-000.bin").write_bytes(bytes([number]) * (LARGE + number))
        (path / "empty.bin").touch()
    for rank in range(3):
        (folder / f"disk{rank}").mkdir(exist_ok=True)


def test_what_lies_on_a_ranks_disk_is_its_own(gang: Gang, tmp_path: Path) -> None:
    write(tmp_path, [1, 1, 0, 0])
    for held, _, paths in gang.run(hold, str(tmp_path), [1, 1, 0, 0]):
        assert held == ((2, 3), (0, 1))
        assert not [path for path in paths if "fetched" in path]


def test_what_is_assigned_stays_so_wherever_it_lies(gang: Gang, tmp_path: Path) -> None:
    write(tmp_path, [1, 1, 0, 0])
    assigned = ((0, 2), (1, 3))
    for rank, found in enumerate(gang.run(hold, str(tmp_path), [1, 1, 0, 0], None, assigned)):
        held, read, paths = found
        assert held == assigned and tuple(read) == assigned[rank]
        assert sum("fetched" in path for path in paths) == 1


def test_with_one_shard_each_ranks_keep_theirs_and_so_the_bits(gang: Gang, tmp_path: Path) -> None:
    write(tmp_path, [1, 0])
    for held, read, paths in gang.run(hold, str(tmp_path), [1, 0]):
        assert held == ((0,), (1,))
        ((number, files),) = read.items()
        assert files["train-000.bin"] == (LARGE + number, bytes([number]), bytes([number]))
        assert "fetched" in paths[0]


def test_a_rank_without_shards_fetches_some_once(gang: Gang, tmp_path: Path) -> None:
    write(tmp_path, [0, 0, 0])
    first = gang.run(hold, str(tmp_path), [0, 0, 0])
    (held, _, _), (_, read, paths) = first
    assert [len(own) for own in held] == [2, 1] and all("fetched" in path for path in paths)
    for number, files in read.items():
        assert files["train-000.bin"] == (LARGE + number, bytes([number]), bytes([number]))
        assert files["empty.bin"] == (0, b"", b"")
    before = {path: Path(path).stat().st_ino for path in paths}
    assert gang.run(hold, str(tmp_path), [0, 0, 0]) == first  # after a restart they are there
    assert {path: Path(path).stat().st_ino for path in paths} == before


def test_what_nobody_can_read_is_told(gang: Gang, tmp_path: Path) -> None:
    write(tmp_path, [0, 1, 1])
    told = gang.run(hold, str(tmp_path), [0, 2, 2])
    assert told == [
        ("no worker can read the shards [1, 2]", [[1, 2]]),
        ("no worker can read the shards [1, 2]", []),
    ]


def test_speeds_count_where_they_differ() -> None:
    assert differing([None, None]) is None
    assert differing([100.0, 110.0]) is None
    assert differing([300.0, None, 100.0]) == [300.0, 200.0, 100.0]


def hold_by_speed(comm: Any, folder: str, speeds: list[float]) -> Any:
    """As `hold`, on two hosts of these speeds."""
    host = f"host{comm.rank}"
    known = {f"host{rank}": speed for rank, speed in enumerate(speeds)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held_shards.socket, "gethostname", lambda: host)
        plan = plan_of(folder, [0, 0, 0, 0])
        found = hold_shards(
            plan, SpoolSource(), comm, run_id="run", speeds=known, say_missing=lambda _: None
        )
    return found.shards_by_rank


def test_a_faster_host_gets_more_rows(gang: Gang, tmp_path: Path) -> None:
    write(tmp_path, [0, 0, 0, 0])
    for speeds, rows in (([100.0, 110.0], [11, 11]), ([100.0, 300.0], [5, 17])):
        first, second = gang.run(hold_by_speed, str(tmp_path), speeds)
        assert first == second
        assert [sum(4 + number for number in own) for own in first] == rows


def test_hosts_that_a_source_names_come_first(gang: Gang, tmp_path: Path) -> None:
    write(tmp_path, [0, 0])
    elsewhere = gang.run(hold, str(tmp_path), [0, 0], [["far"], ["away"]])
    assert elsewhere[0][0] == ((0,), (1,))  # all can be read over the network
    here = gang.run(hold, str(tmp_path), [0, 0], [["127.0.0.1"], ["far", "127.0.0.1"]])
    assert here[0][0] == ((0,), (1,))
