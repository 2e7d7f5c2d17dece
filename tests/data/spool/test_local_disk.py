from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from sparkdl.data.spool.local_disk import (
    DiskFull,
    disk_errors,
    free_bytes,
    full_disk,
    remove_spool,
    roomiest,
)
from sparkdl.errors import StorageError


def test_roomiest_and_remove(tmp_path: Path) -> None:
    assert roomiest(["/does/not/exist", str(tmp_path)]) == tmp_path
    with pytest.raises(StorageError, match="none of Spark's local directories"):
        roomiest(["/does/not/exist"])
    (tmp_path / "run" / "s").mkdir(parents=True)
    (tmp_path / "run" / "s" / "file").touch()
    assert remove_spool(tmp_path / "run" / "s")
    assert not remove_spool(tmp_path / "run" / "s")
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_removed_is_not_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run" / "s").mkdir(parents=True)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # as on a disk that is read-only
    assert not remove_spool(tmp_path / "run" / "s")


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull), (errno.EFBIG, StorageError)],
)
def test_errors_are_told_in_our_words(number: int, kind: type[StorageError]) -> None:
    expected = pytest.raises(StorageError, match="cannot write the spool a/b")
    with expected as caught, disk_errors(Path("a/b")):
        raise OSError(number, os.strerror(number))
    assert type(caught.value) is kind


def test_a_full_disk_is_told_with_its_remedy() -> None:
    error = full_disk(Path("/disk"), 3, needed=3 << 30, free=1 << 20)
    kept = full_disk(Path("/kept"), 3, needed=3 << 30, free=1 << 20, is_kept=True)
    assert "larger disk as cacheDir" in str(kept) and "spark.local.dir" not in str(kept)
    assert type(error) is StorageError
    for part in ("/disk is full", "shard 3 takes about 3,072.0 MiB", "1.0 MiB were free"):
        assert part in str(error)
    assert "spark.local.dir" in str(error)


def test_free_space_of_what_is_not_there(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) > 0
    with pytest.raises(StorageError, match="No such file"):
        free_bytes(tmp_path / "none")
