"""How does a storage that only the driver can open serve the workers too? As a folder of another.

The driver's channel serves one storage. The driver mounts the other one into it, and workers see
its folder, so whatever the driver can write to, they can.
"""

from __future__ import annotations

import builtins

from sparkdl.storage.storage import Data, Storage, checked


class Mounted:
    """A storage into which others can be mounted, as Unix mounts file systems.

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

    def write(self, path: str, data: Data) -> None:
        storage, inside = self._find(path)
        storage.write(inside, data)

    def read(self, path: str) -> bytes:
        storage, inside = self._find(path)
        return storage.read(inside)

    def list(self, path: str) -> builtins.list[str]:
        """See `Storage.list`; mounted folders are not among the names."""
        storage, inside = self._find(path)
        return storage.list(inside)

    def remove(self, path: str) -> None:
        storage, inside = self._find(path)
        storage.remove(inside)

    def exists(self, path: str) -> bool:
        storage, inside = self._find(path)
        return storage.exists(inside)

    def _find(self, path: str) -> tuple[Storage, str]:
        first, _, rest = checked(path).partition("/")
        return (self._mounted[first], rest) if first in self._mounted else (self._base, path)


class Subfolder:
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

    def write(self, path: str, data: Data) -> None:
        self._storage.write(self._at(path), data)

    def read(self, path: str) -> bytes:
        return self._storage.read(self._at(path))

    def list(self, path: str) -> builtins.list[str]:
        return self._storage.list(self._at(path))

    def remove(self, path: str) -> None:
        self._storage.remove(self._at(path))

    def exists(self, path: str) -> bool:
        return self._storage.exists(self._at(path))

    def _at(self, path: str) -> str:
        return f"{self._folder}/{checked(path)}".rstrip("/")
