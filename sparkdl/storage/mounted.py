"""Storages within storages: one that is mounted into another, and a folder of one.

The driver's channel serves one storage. The driver mounts the other one into it, and workers see
its folder, so whatever the driver can write to, they can.
"""

from __future__ import annotations

import builtins
from typing import Any

from sparkdl.errors import StorageError
from sparkdl.storage.storage import Data, Storage, checked


class Forwarding:
    """A storage whose files lie in others, by default all in ``base``."""

    def __init__(self, base: Storage) -> None:
        self._base = base

    def __str__(self) -> str:
        return str(self._base)

    def write(self, path: str, data: Data) -> None:
        self._ask("write", path, data)

    def read(self, path: str) -> bytes:
        return bytes(self._ask("read", path))

    def list(self, path: str) -> builtins.list[str]:
        return list(self._ask("list", path))

    def remove(self, path: str) -> None:
        self._ask("remove", path)

    def exists(self, path: str) -> bool:
        return bool(self._ask("exists", path))

    def _ask(self, method: str, path: str, *arguments: Any) -> Any:
        """Have the storage that has a path do what was asked."""
        storage, inside = self._find(path)
        return getattr(storage, method)(inside, *arguments)

    def _find(self, path: str) -> tuple[Storage, str]:
        """The storage that has a path, and the path in it."""
        return self._base, path


class Mounted(Forwarding):
    """A storage into which others can be mounted, as Unix mounts file systems.

    What is under no mounted folder lies in ``base``. Names of mounted folders are not in lists.
    """

    def __init__(self, base: Storage) -> None:
        super().__init__(base)
        self._mounted: dict[str, Storage] = {}

    def mount(self, folder: str, storage: Storage) -> None:
        """Let ``folder``, one name, be the root of ``storage`` from now on."""
        self._mounted[folder] = storage

    def remove(self, path: str) -> None:
        if checked(path) in self._mounted:
            raise StorageError(f"{path!r} is where another storage is mounted, and stays there")
        super().remove(path)

    def _find(self, path: str) -> tuple[Storage, str]:
        first, _, rest = checked(path).partition("/")
        return (self._mounted[first], rest) if first in self._mounted else (self._base, path)


class Subfolder(Forwarding):
    """The folder of a storage, as a storage of a ``name`` for errors and logs."""

    def __init__(self, base: Storage, folder: str, name: str) -> None:
        super().__init__(base)
        self._folder = checked(folder)
        self._name = name

    def __str__(self) -> str:
        return self._name

    def _find(self, path: str) -> tuple[Storage, str]:
        return self._base, f"{self._folder}/{checked(path)}".rstrip("/")
