"""Kept spools: whole shards are found again, others are not, and the folder is bounded."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from sparkdl.data.column_stats import SpooledShard
from sparkdl.data.plan import SpoolColumn
from sparkdl.data.spool import kept_spools
from sparkdl.data.spool.kept_spools import ROW, Keep, clean, held
from sparkdl.data.spool.mapped import MappedFile
from sparkdl.data.spool.writer import SpoolWriter
from sparkdl.errors import StorageError

NUM_BYTES = 800
"""Of the values of a shard of 100 rows."""


def digits(name: str, number: int) -> str:
    """So many hexadecimal digits, as keys and runs have them."""
    return hashlib.md5(name.encode()).hexdigest()[:number]


RUN = f"sparkdl-{digits('run', 12)}"
KEPT = f"sparkdl-kept-{digits('a', 32)}"


def keep(directory: Path, key: str = "a", limit_bytes: int | None = 1 << 20) -> Keep:
    return Keep(directory=str(directory), key=digits(key, 32), limit_bytes=limit_bytes)


def write(directory: Path, shard_id: int = 0, run_id: str = "run", first: int = 0) -> SpooledShard:
    """A shard of 100 rows as a task leaves it in the folder of its run."""
    column = SpoolColumn(name="x", role="feature", dtype="float64")
    rows = range(first, first + 100)
    batch = pa.RecordBatch.from_pydict(
        {"c0": pa.array(rows, pa.float64()), "hash": pa.array(rows, pa.int64())}
    )
    place = directory / f"sparkdl-{digits(run_id, 12)}" / str(shard_id)
    with SpoolWriter(place, [column], has_validation=False) as writer:
        writer.write(batch)
    found = writer.summary()
    return replace(found, shard=replace(found.shard, shard_id=shard_id))


def put(own: Keep, shard_id: int = 0, *, used: float | None = None) -> SpooledShard:
    """Keep a shard, which was used so many seconds ago."""
    found = own.put(write(Path(own.directory), shard_id, run_id=f"of-{own.key}"))
    if used is not None:
        when = time.time() - used
        os.utime(own.folder, (when, when))
        os.utime(Path(found.shard.path) / ROW, (when, when))
    return found


def test_a_kept_shard_is_found_with_all_that_was_noted_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append(os.fstat(file).st_ino))
    own = keep(tmp_path / "new" / "cache")
    assert own.root().stat().st_mode & 0o777 == 0o700
    assert own.find() == []
    before = write(own.root(), 3)
    after = own.put(before)
    assert after.shard.path == str(own.folder / "00003")
    assert not Path(before.shard.path).exists()
    assert own.find() == [after]
    assert replace(after, shard=before.shard) == before
    assert keep(own.root(), "b").find() == []
    files = list(Path(after.shard.path).iterdir())
    assert sorted(flushed) == sorted(path.stat().st_ino for path in files)
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert own.folder.stat().st_mode & 0o777 == 0o700
    with pytest.raises(StorageError, match="No such file"):
        own.put(before)


def test_shards_that_are_not_whole_are_not_used_and_are_replaced(tmp_path: Path) -> None:
    own = keep(tmp_path)
    write(tmp_path, 5)  # a task that was killed leaves it in the folder of its run
    places = [Path(put(own, number).shard.path) for number in range(5)]
    os.truncate(places[0] / "train-000.bin", 8)
    (places[1] / "train-000.bin").unlink()
    (places[2] / ROW).write_text(json.dumps({"files": {}})[:5])
    (places[4] / "train-001.bin").touch()
    assert [part.shard.shard_id for part in own.find()] == [3]
    assert put(own, 0).shard.path == str(places[0])
    assert [part.shard.shard_id for part in own.find()] == [0, 3]


def test_of_equal_shards_the_first_is_kept_and_other_rows_stay_apart(tmp_path: Path) -> None:
    own = keep(tmp_path)
    first = put(own)
    inode = (Path(first.shard.path) / ROW).stat().st_ino
    again = write(tmp_path)
    assert own.put(again) == first and not Path(again.shard.path).exists()
    other = write(tmp_path, first=50)
    assert own.put(other) == other and Path(other.shard.path).is_dir()
    assert (Path(first.shard.path) / ROW).stat().st_ino == inode


def test_what_was_not_used_for_longest_makes_way(tmp_path: Path) -> None:
    for key, used in (("old", 90.0), ("used", 60.0), ("new", 30.0)):
        put(keep(tmp_path, key), used=used)
    assert keep(tmp_path, "old").find()  # which counts as used
    limit = sum(kept_spools._size(keep(tmp_path, key).folder) for key in ("old", "new"))
    last = write(tmp_path, run_id="of-last")
    limit += kept_spools._size(Path(last.shard.path))  # no byte is left
    keep(tmp_path, "last", limit_bytes=limit).put(last)
    there = {key for key in ("old", "used", "new", "last") if keep(tmp_path, key).find()}
    assert there == {"old", "new", "last"}


def test_what_dead_runs_have_left_does_not_count(tmp_path: Path) -> None:
    old = write(tmp_path, run_id="dead")
    os.utime(Path(old.shard.path).parent, (1, 1))
    young = Path(write(tmp_path, run_id="young").shard.path)
    os.utime(young.parent, (time.time() - 60, time.time() - 60))
    put(keep(tmp_path, "old"), used=9.0)
    own = keep(tmp_path, limit_bytes=kept_spools._size(keep(tmp_path, "old").folder) + 9)
    put(own)
    assert not Path(old.shard.path).exists()
    assert own.find() and not keep(tmp_path, "old").find() and young.is_dir()


@pytest.mark.parametrize("limit_bytes", [2 * NUM_BYTES, None])
def test_what_is_more_than_the_limit_stays_with_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_bytes: int | None
) -> None:
    disk = SimpleNamespace(total=8 * NUM_BYTES)  # of which a quarter may be used
    monkeypatch.setattr(kept_spools.shutil, "disk_usage", lambda _: disk)
    own = keep(tmp_path, limit_bytes=limit_bytes)
    assert Path(put(own, 0).shard.path).parent == own.folder
    assert Path(put(own, 1).shard.path).parent != own.folder
    assert [part.shard.shard_id for part in own.find()] == [0]


def test_a_full_disk_has_others_make_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, used in (("oldest", 12.0), ("old", 9.0), ("new", 1.0)):
        put(keep(tmp_path, key), used=used)
    own = keep(tmp_path, "own")
    own.make_space(100)
    assert keep(tmp_path, "old").find()
    free = iter([0, kept_spools._SPARE_BYTES + 99, kept_spools._SPARE_BYTES + 100])
    monkeypatch.setattr(kept_spools, "free_bytes", lambda _: next(free))
    os.utime(Path(put(keep(tmp_path, "old"), used=9.0).shard.path))
    own.make_space(100)
    there = [key for key in ("oldest", "old", "new") if keep(tmp_path, key).find()]
    assert there == ["new"]


def test_what_is_mapped_or_being_written_is_not_removed(tmp_path: Path) -> None:
    mapped, idle = put(keep(tmp_path, "mapped")), put(keep(tmp_path, "idle"))
    file = MappedFile(Path(mapped.shard.path) / "train-000.bin", NUM_BYTES)
    column = SpoolColumn(name="x", role="feature", dtype="float64")
    folder = tmp_path / RUN
    with SpoolWriter(folder / "0", [column], has_validation=False):
        size = kept_spools._size(Path(idle.shard.path))
        rest = kept_spools._size(Path(mapped.shard.path))
        assert clean(str(tmp_path)) == (size, kept_spools._size(tmp_path))
        assert keep(tmp_path, "mapped").find() and folder.is_dir()
    assert file.values("float64")[-1] == 99
    del file
    assert clean(str(tmp_path), older_than_seconds=3600) == (0, rest)
    assert clean(str(tmp_path)) == (rest, 0)
    assert not list(tmp_path.iterdir())


def test_what_waits_to_be_kept_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = keep(tmp_path)
    monkeypatch.setattr(kept_spools, "_flush", lambda _: clean(str(tmp_path)))
    with held(tmp_path / RUN):
        written = [write(tmp_path, number) for number in range(2)]
        found = [own.put(spooled) for spooled in written]
    assert own.find() == found[1:]  # the first one was kept, and not in use


def test_a_folder_is_not_removed_before_its_first_shard_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = Keep._named
    monkeypatch.setattr(Keep, "_named", lambda *shard: (clean(str(tmp_path)), name(*shard))[1])
    with held(tmp_path / RUN):
        found = keep(tmp_path).put(write(tmp_path))
    assert keep(tmp_path).find() == [found]


def test_a_folder_that_is_removed_while_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, lock, times = tmp_path / RUN, fcntl.flock, itertools.count()

    def locked(descriptor: int, kind: int) -> None:
        if (number := next(times)) < 2:
            folder.rmdir()
        if number == 1:
            folder.mkdir()  # by another process
        lock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", locked)
    opened = len([*Path("/proc/self/fd").iterdir()])
    with held(folder):
        assert clean(str(tmp_path)) == (0, 0) and folder.is_dir()
    assert len([*Path("/proc/self/fd").iterdir()]) == opened
    clean(str(tmp_path))
    assert not folder.exists()


def test_a_folder_is_as_young_as_the_youngest_of_its_shards(tmp_path: Path) -> None:
    keys = [keep(tmp_path, key) for key in "ab"]
    for number, own in enumerate(keys):
        places = [Path(put(own, shard_id).shard.path) for shard_id in range(2)]
        os.utime(own.folder, (1, 1))
        os.utime(places[number] / ROW, (1, 1))
    assert clean(str(tmp_path), older_than_seconds=3600)[0] == 0
    assert [len(own.find()) for own in keys] == [2, 2]


def test_what_is_removed_goes_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (Path(put(keep(tmp_path)).shard.path) / ROW).unlink()
    gone, remove = list[Path](), shutil.rmtree

    def rmtree(place: Path, **options: Any) -> None:
        gone.append(place)
        assert (place.parent, place.name[:13]) == (tmp_path, "sparkdl-gone-")
        remove(place, **options)

    monkeypatch.setattr(kept_spools.shutil, "rmtree", rmtree)
    put(keep(tmp_path))
    assert len(gone) == 1
    clean(str(tmp_path))
    assert len(gone) == 3  # the key, and the folder of the run


def test_what_another_process_has_removed_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(keep(tmp_path))
    size = kept_spools._size

    def lose(folder: Path) -> int:
        num_bytes = size(folder)
        with open_folder(folder) as descriptor, pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # nobody can use it any more
        folder.rename(tmp_path / "elsewhere")
        return num_bytes

    monkeypatch.setattr(kept_spools, "_size", lose)
    assert clean(str(tmp_path)) == (0, 0)


@contextlib.contextmanager
def open_folder(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def test_a_folder_that_vanishes_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = put(keep(tmp_path))
    listed = os.scandir

    def scandir(place: str | Path) -> object:
        if str(place) == found.shard.path:
            Path(place).rename(tmp_path / "elsewhere")
        return listed(place)

    monkeypatch.setattr(os, "scandir", scandir)
    assert clean(str(tmp_path))[1] == 0


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    """Also where the disk is full, and folders have not been used for long."""
    theirs, place = tmp_path / "theirs", tmp_path / "cache"
    for folder in (theirs, place / "mine", place / "sparkdl-models" / "0", place / "sparkdl-2026"):
        folder.mkdir(parents=True)
        (folder / "file").write_text("mine")
    (place / "sparkdl-notes.txt").write_text("mine")
    (place / KEPT).symlink_to(theirs)
    for folder in place.iterdir():
        os.utime(folder, (1, 1), follow_symlinks=False)
    before = sorted(tmp_path.rglob("*"))
    assert clean(str(place)) == (0, 0)
    keep(place, "b").make_space(1 << 60)
    assert sorted(tmp_path.rglob("*")) == before
    assert clean(str(tmp_path / "none")) == (0, 0)


def test_what_others_have_put_into_a_folder_is_neither_opened_nor_followed(tmp_path: Path) -> None:
    """Pipes and sockets would wait for ever, and a link to a device would never end."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "file").write_text("mine")
    odd: list[Callable[[Path], Any]] = [
        os.mkfifo,
        lambda place: place.symlink_to("/dev/zero"),
        lambda place: place.symlink_to("/dev/tty"),
        lambda place: place.symlink_to(place.name),
        lambda place: place.symlink_to(theirs),
        lambda place: place.symlink_to(theirs / "file"),
        lambda place: socket.socket(socket.AF_UNIX).bind(str(place)),
    ]
    for name in (ROW, "train-000.bin"):
        for make in odd:
            place = tmp_path / "c"
            shard = place / KEPT / "00000"
            shard.mkdir(parents=True)
            with contextlib.chdir(shard), warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)
                make(Path(name))
            assert keep(place).find() == []
            assert clean(str(place))[1] == 0
            assert list(place.iterdir()) == []
            assert (theirs / "file").read_text() == "mine"


def _race(directory: str, number: int) -> None:
    """Keep and find shards, and have two keys push each other out."""
    for turn in range(1, 31):
        own = keep(Path(directory), str(turn % 2), limit_bytes=4 * NUM_BYTES)
        run_id = f"{number}-{turn}"
        with held(Path(directory) / f"sparkdl-{digits(run_id, 12)}"):
            found = own.put(write(Path(directory), turn % 3, run_id=run_id))
        assert found.shard.num_rows == 100
        for part in own.find():
            assert part.shard.num_rows == 100
        if turn % 7 == 0:
            clean(directory)


@pytest.mark.slow
def test_folders_of_any_depth_are_removed(tmp_path: Path) -> None:
    own = keep(tmp_path)
    put(own)
    deepest = own.folder
    for _ in range(1500):
        deepest /= "d"
        deepest.mkdir()
    (deepest / "file").write_bytes(b"1234")
    removed, left = clean(str(tmp_path))
    assert removed > 4
    assert left == 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_any_depth_is_removed_without_following_links(tmp_path: Path) -> None:
    """Its owner may put a link in the place of a folder meanwhile."""
    victim, folder = tmp_path / "victim", tmp_path / "sparkdl-gone"
    (victim / "deep").mkdir(parents=True)
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "c").symlink_to(victim)
    (folder / "d").symlink_to(victim)
    rename, moved = os.rename, []

    def swapped(source: Any, target: Any, **where: Any) -> None:
        rename(source, target, **where)
        rename(folder / target, tmp_path / "away")
        (folder / target).symlink_to(victim)
        moved.append(source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", swapped)
        kept_spools._flatten(folder)
    assert moved == ["b"]
    assert (victim / "deep").is_dir()


def test_rows_of_another_user_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever can write into the directory may make the folder of a key beforehand."""
    own = keep(tmp_path)
    put(own)
    assert len(own.find()) == 1
    with monkeypatch.context() as patch, open_folder(own.folder) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert own.find() == []
        assert not Path(put(own, 1).shard.path).is_relative_to(own.folder)
    assert "is not a folder of this user" in caplog.text
    own.folder.rename(tmp_path / "elsewhere")
    own.folder.symlink_to(tmp_path / "elsewhere")
    assert own.find() == []
    assert not Path(put(own, 2).shard.path).is_relative_to(own.folder)


def test_a_folder_may_go_just_when_it_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = os.mkdir

    def too_late(path: Path, *mode: int) -> None:
        monkeypatch.setattr(os, "mkdir", make)
        raise FileExistsError(17, "File exists", str(path))

    monkeypatch.setattr(os, "mkdir", too_late)
    with held(tmp_path / KEPT):
        assert (tmp_path / KEPT).is_dir()


def test_a_file_of_the_name_of_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / KEPT).write_text("mine")
    with pytest.raises(StorageError, match="Not a directory"), held(tmp_path / KEPT):
        pass


@pytest.mark.slow
def test_two_processes_do_not_break_each_other(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=_race, args=(str(tmp_path), n)) for n in range(2)]
    for other in others:
        other.start()
    for other in others:
        other.join(100)
    assert [other.exitcode for other in others] == [0, 0]
    clean(str(tmp_path))
    assert not list(tmp_path.iterdir())
