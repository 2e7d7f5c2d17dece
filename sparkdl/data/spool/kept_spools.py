"""Spools that outlive their fit: shards under a key, in a folder of this host.

A shard lies in ``<directory>/sparkdl-kept-<key>/<number>``, beside its files `ROW`, which says what
it holds and how long they are. It is written elsewhere in the directory and gets its name when it
is whole. Who reads or writes a file has a shared lock on it (`local_disk.lock`), who keeps shards
has one on their folder (`held`), and what is locked is not removed. Locks end with their processes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparkdl.data.column_stats import SpooledShard
from sparkdl.data.spool.local_disk import disk_errors, free_bytes, make_private, open_private
from sparkdl.errors import StorageError
from sparkdl.storage.storage import LocalStorage

logger = logging.getLogger(__name__)

ROW = "shard.json"
_OURS = "sparkdl-"
_KEPT = f"{_OURS}kept-"
_NAMES = re.compile(rf"{_KEPT}[0-9a-f]{{32}}|{_OURS}(gone-)?[0-9a-f]{{12}}")
"""Folders of keys, of runs, and what is being removed. Others are not ours, such as the user's
``sparkdl-models``."""
_PART_OF_DISK = 4
"""Kept spools take this part of the disk at most, unless a limit is set."""
_SPARE_BYTES = 256 << 20
"""Free space from which on nothing is removed while a shard is written."""
_ABANDONED_SECONDS = 3600.0
"""Age of a folder that is not kept and that nobody has a lock on, from which on its run is over."""


@dataclass(frozen=True, kw_only=True)
class Keep:
    """The directory where the shards of a table are kept, and their key."""

    directory: str
    key: str
    limit_bytes: int | None = None
    """Most bytes of all keys in the directory of a host; None: a part of its disk."""

    @property
    def folder(self) -> Path:
        """The key's."""
        return Path(self.directory) / f"{_KEPT}{self.key}"

    def root(self) -> Path:
        """The directory, which is made if it is not there; raises StorageError."""
        root = Path(self.directory)
        with disk_errors(root), contextlib.suppress(FileExistsError):  # of another task as well
            make_private(root)
        return root

    def find(self) -> list[SpooledShard]:
        """The whole shards of the key on this host, which count as used now."""
        found: list[SpooledShard] = []
        if self._is_anothers():
            return found
        for place in sorted(self.folder.glob("[0-9]*")):
            spooled = _read(place)
            if spooled is not None:
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    os.utime(place / ROW)
                    found.append(spooled)
        return found

    def put(self, spooled: SpooledShard) -> SpooledShard:
        """Keep a shard that lies in the directory; returns it where it lies then.

        It stays where it is if the limit has no room for it, if another user has taken the name of
        the key's folder, or if others have kept other rows under the key. Of equal shards, the one
        that was there first is kept.

        Raises:
            StorageError: the disk cannot be written.
        """
        source = Path(spooled.shard.path)
        with disk_errors(source):
            files = {path.name: path.stat().st_size for path in source.iterdir()}
            if not self._make_room(sum(files.values())):
                return spooled
            row = {"files": files, "shard": spooled.to_dict()}
            with open(source / ROW, "w", opener=open_private) as file:
                json.dump(row, file)
            for name in (*files, ROW):
                _flush(source / name)  # a length alone does not show what a crash has lost
            if self._is_anothers():  # who might hold it, so that we would wait for ever
                return spooled
            with held(self.folder):
                return self._named(spooled, self.folder / f"{spooled.shard.shard_id:05d}")

    def _is_anothers(self) -> bool:
        """True if what has the name of the key's folder is not this user's, or leads elsewhere."""
        try:
            found = self.folder.lstat()
        except FileNotFoundError:
            return False
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            return False
        logger.warning(
            "%s is not a folder of this user, and its rows are not used: choose another cacheDir, "
            "where others cannot write",
            self.folder,
        )
        return True

    def _named(self, spooled: SpooledShard, place: Path) -> SpooledShard:
        """Give a whole shard its name, unless another has it."""
        source = Path(spooled.shard.path)
        while True:
            try:
                source.rename(place)
                return _at(spooled, place)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            first = _read(place)
            if first is None:  # damaged
                _remove(place)
            elif first.shard.fingerprint != spooled.shard.fingerprint:
                return spooled
            else:
                shutil.rmtree(source, ignore_errors=True)
                return _at(spooled, place)

    def make_space(self, num_bytes: int) -> None:
        """Remove other keys, those first that were not used for longest, if the disk is full."""
        root = Path(self.directory)
        for folder in self._others():
            if free_bytes(root) >= num_bytes + _SPARE_BYTES:
                return
            _remove_unused(folder)

    def _make_room(self, num_bytes: int) -> bool:
        """Remove such keys until the limit has room for so many bytes; whether it has."""
        root = Path(self.directory)
        limit = self.limit_bytes
        if limit is None:
            limit = shutil.disk_usage(root).total // _PART_OF_DISK
        total = num_bytes + sum(map(_size, root.glob(f"{_KEPT}*")))
        for folder in self._others():
            if total <= limit:
                break
            removed = _remove_unused(folder)
            if folder.name.startswith(_KEPT):  # others do not count
                total -= removed
        return total <= limit

    def _others(self) -> Iterator[Path]:
        """Folders of other keys, and what runs have left that were killed; the oldest first."""
        now = time.time()
        folders = [folder for folder in _folders(self.directory) if folder != self.folder]
        by_age = sorted((_last_use(folder), folder) for folder in folders)
        for used, folder in by_age:
            if folder.name.startswith(_KEPT) or now - used > _ABANDONED_SECONDS:
                yield folder


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Have a folder in the directory, which is made if it is not there, be in use in the block.

    Raises:
        StorageError: the disk cannot be written.
    """
    with disk_errors(folder):
        descriptor = _locked(folder)
    try:
        yield
    finally:
        os.close(descriptor)


def _locked(folder: Path) -> int:
    """An open descriptor of a folder that is made: again, where others remove it meanwhile."""
    while True:
        with contextlib.suppress(
            FileExistsError
        ):  # exist_ok would raise it where it is gone by now
            folder.mkdir(mode=0o700)
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # who removes it has it alone until it is gone
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), folder.stat()):
                return descriptor
        os.close(descriptor)


def clean(directory: str, older_than_seconds: float = 0.0) -> tuple[int, int]:
    """Remove what is in the directory of this host, unless it is in use.

    Args:
        directory: the folder that fits were given.
        older_than_seconds: what was used since stays; 0: nothing does.

    Returns:
        Bytes that were removed, and bytes that are left.
    """
    removed, oldest = 0, time.time() - older_than_seconds
    for folder in _folders(directory):
        if not older_than_seconds or _last_use(folder) <= oldest:
            removed += _remove_unused(folder)
    return removed, sum(map(_size, _folders(directory)))


def _folders(directory: str) -> list[Path]:
    return [
        folder
        for folder in Path(directory).glob(f"{_OURS}*")
        if _NAMES.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink()
    ]


def _read(place: Path) -> SpooledShard | None:
    """The shard in a folder; None if it is not whole: files are as long as when it was written."""
    try:
        row: dict[str, Any] = json.loads(LocalStorage(place).read(ROW))
        sizes = {path.name: path.stat().st_size for path in place.iterdir() if path.name != ROW}
        if sizes != row["files"]:
            return None
        return _at(SpooledShard.from_dict(row["shard"]), place)
    except (OSError, StorageError, ValueError, KeyError, TypeError):
        return None  # removed meanwhile, or damaged


def _at(spooled: SpooledShard, place: Path) -> SpooledShard:
    return replace(spooled, shard=replace(spooled.shard, path=str(place)))


def _files(folder: Path) -> list[Path]:
    """All files that are there still: other processes may be removing them."""
    found, folders = [], [str(folder)]
    while folders:  # up to Python 3.11 os.walk fails at a thousand levels
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    found.append(Path(entry.path))
    return found


def _size(folder: Path) -> int:
    total = 0
    for path in _files(folder):
        try:
            total += path.lstat().st_size
        except FileNotFoundError:  # another process removes it
            continue
    return total


def _last_use(folder: Path) -> float:
    """Time at which the folder was written or found."""
    used = 0.0
    for path in (folder, *(path for path in _files(folder) if path.name == ROW)):
        try:
            used = max(used, path.lstat().st_mtime)
        except FileNotFoundError:  # as above
            continue
    return used


def _remove_unused(folder: Path) -> int:
    """Remove a folder unless it, or a file of it, is locked; returns how many bytes it had."""
    with contextlib.ExitStack() as stack:
        if not _is_free(folder, stack):
            return 0
        for path in _files(folder):
            with contextlib.ExitStack() as own:
                if not _is_free(path, own):
                    return 0
        num_bytes = _size(folder)
        return num_bytes if _remove(folder) else 0


def _is_free(path: Path, stack: contextlib.ExitStack) -> bool:
    """Return True if nobody has a lock on a path; nobody else then gets one until the stack ends.

    What this user may not read counts as in use. Links, pipes, sockets and devices, which are none
    of ours, are not opened: that may wait for ever.
    """
    try:
        if stat.S_IFMT(path.lstat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
            return True
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
        descriptor = os.open(path, flags)
    except FileNotFoundError:  # another process removes it
        return True
    except PermissionError:
        return False
    stack.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(folder: Path) -> bool:
    """Remove a folder, of which nobody sees a part.

    False if another process was first, or this user may not.
    """
    root = folder.parent if folder.name.startswith(_OURS) else folder.parent.parent
    gone = root / f"{_OURS}gone-{uuid.uuid4().hex[:12]}"
    try:
        folder.rename(gone)
    except (FileNotFoundError, PermissionError):
        return False
    _remove_tree(gone)
    return True


def _remove_tree(folder: Path) -> None:
    """Remove a folder of any depth."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:  # up to Python 3.12, at a thousand levels: bring them up
        _flatten(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _flatten(folder: Path) -> None:
    """Bring all folders in a folder to its top; it may be a stranger's, who puts links there."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    top = os.open(folder, flags)
    try:
        places = _folders_in(top)
        for place in places:
            with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
                inner = os.open(place, flags, dir_fd=top)
                stack.callback(os.close, inner)
                for name in _folders_in(inner):
                    places.append(uuid.uuid4().hex)
                    os.rename(name, places[-1], src_dir_fd=inner, dst_dir_fd=top)
    finally:
        os.close(top)


def _folders_in(descriptor: int) -> list[str]:
    with os.scandir(descriptor) as entries:
        return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
