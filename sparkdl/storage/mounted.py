"""Storages within storages: one that is mounted into another, and a folder of one.

The driver's channel serves one storage. The driver mounts the other one into it, and workers see
its folder, so whatever the driver can write to, they can.
"""

from __future__ import annotations

import builtins

from sparkdl.errors import StorageError
from sparkdl.storage.storage import Data, Storage, checked


class _Forwarding:
    """A storage whose files lie in others."""

    def write(self, path: str, data: Data) -> None:
        storage, inside = self._find(path)
        storage.write(inside, data)

    def read(self, path: str) -> bytes:
        storage, inside = self._find(path)
        return storage.read(inside)

    def list(self, path: str) -> builtins.list[str]:
        storage, inside = self._find(path)
        return storage.list(inside)

    def remove(self, path: str) -> None:
        storage, inside = self._find(path)
        storage.remove(inside)

    def exists(self, path: str) -> bool:
        storage, inside = self._find(path)
        return storage.exists(inside)

    def _find(self, path: str) -> tuple[Storage, str]:
        """The storage that has a path, and the path in it."""
        raise NotImplementedError


class Mounted(_Forwarding):
    """A storage into which others can be mounted, as Unix mounts file systems.

    The names of mounted folders are not in lists.

    Args:
        base: where everything lies that is under no mounted folder.
    """

    def __init__(self, base: Storage) -> None:
        self._base = base
        self._mounted: dict[str, Storage] = {}

    def __str__(self) -> str:
        return str(self._base)

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


class Subfolder(_Forwarding):
    """A folder of a storage, as a storage.

    Args:
        storage: the whole.
        folder: relative path of the part.
        name: what to call it in errors and logs.
    """

    def __init__(self, storage: Storage, folder: str, name: str) -> None:
        self._storage = storage
        self._folder = checked(folder)
        self._name = name

    def __str__(self) -> str:
        return self._name

    def _find(self, path: str) -> tuple[Storage, str]:
        return self._storage, f"{self._folder}/{checked(path)}".rstrip("/")
