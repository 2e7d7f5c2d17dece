"""How are files kept in memory? A storage for tests, which also misbehaves in subclasses."""

from __future__ import annotations

import builtins
import errno
import threading

from sparkdl.storage.storage import Data, checked, failure, pieces, require_size


class MemoryStorage:
    """A folder in this process's memory."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return "memory"

    @property
    def url(self) -> str:
        """See `Folder.url`."""
        return "memory"

    def size(self, path: str) -> int:
        """See `Folder.size`."""
        return len(self.read(path))

    def part(self, path: str, begin: int, end: int) -> bytes:
        """See `Folder.part`."""
        content = self.read(path)
        require_size(min(len(content), end) - begin, end - begin, path)
        return content[begin:end]

    def write(self, path: str, data: Data) -> None:
        """See `Storage.write`."""
        content = b"".join(pieces(data))
        with self._lock:
            self._files[checked(path)] = content

    def read(self, path: str) -> bytes:
        """See `Storage.read`."""
        with self._lock:
            content = self._files.get(checked(path))
        if content is None:
            raise failure("read", path, FileNotFoundError(errno.ENOENT, "no such file"))
        return content

    def list(self, path: str) -> builtins.list[str]:
        """See `Storage.list`."""
        folder = checked(path)
        prefix = f"{folder}/" if folder else ""
        with self._lock:
            inside = [name[len(prefix) :] for name in self._files if name.startswith(prefix)]
        return sorted({name.split("/", 1)[0] for name in inside})

    def remove(self, path: str) -> None:
        """See `Storage.remove`."""
        gone = checked(path)
        with self._lock:
            for name in [n for n in self._files if n == gone or n.startswith(f"{gone}/")]:
                del self._files[name]

    def move(self, source: str, target: str) -> None:
        """See `Folder.move`."""
        content = self.read(source)
        with self._lock:
            self._files[checked(target)] = content
            del self._files[checked(source)]

    def exists(self, path: str) -> bool:
        """See `Storage.exists`."""
        with self._lock:
            content = checked(path) in self._files
        return content or bool(self.list(path))
