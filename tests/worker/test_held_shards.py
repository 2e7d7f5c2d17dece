"""Ranks hold the shards that they can read, and fetch those that must move, once."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.data.plan import Column, Shard, TrainPlan, make_plan
from sparkdl.data.spool.spool_source import SpoolSource
from sparkdl.errors import CommunicationError, ShardLost
from sparkdl.worker import held_shards
from sparkdl.worker.held_shards import differing, found_here, hold_shards, host_speed
from tests.gang import Gang

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


class OfItsOwn:
    """The communicator of a rank with an address of its own."""

    def __init__(self, comm: Any) -> None:
        self._comm, self.address = comm, f"10.0.0.{comm.rank}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)


def hold(comm: Any, folder: str, places: list[int], hosts: Any = None, assigned: Any = None) -> Any:
    """What each rank holds of the plan, and the files of its own shards."""
    comm = OfItsOwn(comm)
    plan = plan_of(folder, places)
    plan = plan if assigned is None else plan.held_by(assigned)
    if hosts is not None:
        shards = [replace(s, hosts=tuple(hosts[s.shard_id])) for s in plan.shards]
        plan = replace(plan, shards=tuple(shards))
    disk = Path(folder) / f"disk{comm.rank}"
    os.environ["SPARK_LOCAL_DIRS"] = str(disk)
    told: list[dict[str, Any]] = []
    source = OnHosts("" if hosts is not None else str(disk))
    try:
        found = hold_shards(
            plan, source, comm, run_id="run", say=told.append,
            holding="near" if assigned is None else "planned",
        )  # fmt: skip
    except ShardLost as error:
        return str(error), told
    assert told == [{"kind": "held", "shards": found.shards_by_rank}] * (comm.rank == 0)
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
    for number in range(3):  # of a fetch that has failed
        part = tmp_path / "disk1" / "sparkdl-run" / f"fetched-{number:05}-print{number}.part"
        part.mkdir(parents=True)
        (part / "train-001.bin").touch()
    first = gang.run(hold, str(tmp_path), [0, 0, 0])
    (held, _, _), (_, read, paths) = first
    assert [len(own) for own in held] == [2, 1] and all("fetched" in path for path in paths)
    for number, files in read.items():
        assert files["train-000.bin"] == (LARGE + number, bytes([number]), bytes([number]))
        assert files["empty.bin"] == (0, b"", b"")
        assert len(files) == 2
    before = {path: Path(path).stat().st_ino for path in paths}
    assert gang.run(hold, str(tmp_path), [0, 0, 0]) == first  # after a restart they are there
    assert {path: Path(path).stat().st_ino for path in paths} == before


def test_what_nobody_can_read_is_told(gang: Gang, tmp_path: Path) -> None:
    write(tmp_path, [0, 1, 1])
    told = gang.run(hold, str(tmp_path), [0, 2, 2])
    assert told == [
        ("no worker can read the shards [1, 2]", [{"kind": "missing", "shards": [1, 2]}]),
        ("no worker can read the shards [1, 2]", []),
    ]


def test_a_copy_is_whole_and_of_these_very_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    first, second = plan_of("/nowhere", [0, 0]).shards
    (tmp_path / "sparkdl-run" / "fetched-00000-print0").mkdir(parents=True)
    (tmp_path / "sparkdl-run" / "fetched-00001-print1.part").mkdir()
    here = found_here(first, SpoolSource(), "run")
    assert here is not None and Path(here.path).is_dir()
    assert found_here(replace(first, fingerprint="other"), SpoolSource(), "run") is None
    assert found_here(second, SpoolSource(), "run") is None


def test_a_peer_names_files_of_the_shard_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    comm: Any = SimpleNamespace(receive_bytes=lambda peer: b'[["../../x", 1]]')
    with pytest.raises(CommunicationError, match="rank 1 has sent a file of the name"):
        held_shards._receive(plan_of("/nowhere", [0]).shards[0], comm, 1, "run")


def test_a_copy_belongs_to_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    messages = [b'[["rows", 3]]', b"abc"]
    comm: Any = SimpleNamespace(receive_bytes=lambda peer: messages.pop(0))
    umask = os.umask(0)
    try:
        shard = held_shards._receive(plan_of("/nowhere", [0]).shards[0], comm, 1, "run")
    finally:
        os.umask(umask)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert modes == {"sparkdl-run": 0o700, Path(shard.path).name: 0o700, "rows": 0o600}


def test_speeds_count_where_they_differ() -> None:
    assert differing([None, None], [1, 1]) is None
    assert differing([100.0, 110.0], [3, 1]) is None
    assert differing([100.0, 125.0], [1, 1]) == [100.0, 125.0]
    assert differing([300.0, None, 100.0], [1, 1, 1]) == [300.0, 200.0, 100.0]
    assert differing([None, None], [3, 1]) == [3, 1]
    assert differing([300.0, None, 100.0], [3, 0.5, 1]) == [300.0, 50.0, 100.0]


def test_the_first_pattern_that_fits_a_name_of_a_host_gives_its_speed() -> None:
    wished = {"gpu-1?.net": 4, "GPU-*": 3, "10.0.0.7": 0.5}
    names = ({"x", "gpu-12.net"}, {"gpu-1.net"}, {"Gpu-x", "y"}, {"node", "10.0.0.7"}, {"node"})
    assert [host_speed(wished, own) for own in names] == [4, 3, 3, 0.5, 1]


def hold_by_speed(
    comm: Any, folder: str, speeds: list[float], wished: dict[str, float] | None = None
) -> Any:
    """As `hold`, on two hosts of these speeds."""
    comm, host = OfItsOwn(comm), f"host{comm.rank}"
    known = {f"host{rank}": speed for rank, speed in enumerate(speeds)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held_shards.socket, "gethostname", lambda: host)
        patch.setattr(held_shards.socket, "getfqdn", lambda: f"{host}.net")
        plan = plan_of(folder, [0, 0, 0, 0])
        found = hold_shards(
            plan, SpoolSource(), comm, run_id="run", speeds=known, work_shares=wished,
            say=lambda _: None,
        )  # fmt: skip
    return found.shards_by_rank


def test_a_faster_host_gets_more_rows(gang: Gang, tmp_path: Path) -> None:
    write(tmp_path, [0, 0, 0, 0])
    for speeds, wished, rows in (
        ([100.0, 110.0], None, [11, 11]),
        ([100.0, 300.0], None, [5, 17]),
        ([], {"host1": 3.0}, [5, 17]),
        ([], {"10.0.0.1": 3.0}, [5, 17]),
        ([], {"*1.net": 3.0}, [5, 17]),
        ([300.0, 100.0], {"host1": 3.0}, [17, 5]),  # what was measured replaces it
    ):
        first, second = gang.run(hold_by_speed, str(tmp_path), speeds, wished)
        assert first == second
        assert [sum(4 + number for number in own) for own in first] == rows


def test_hosts_that_a_source_names_come_first(gang: Gang, tmp_path: Path) -> None:
    write(tmp_path, [0, 0])
    elsewhere = gang.run(hold, str(tmp_path), [0, 0], [["far"], ["away"]])
    assert elsewhere[0][0] == ((0,), (1,))  # all can be read over the network
    here = gang.run(hold, str(tmp_path), [0, 0], [["10.0.0.1"], ["far", "10.0.0.0"]])
    assert here[0][0] == ((1,), (0,))
