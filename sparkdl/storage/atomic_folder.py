"""A folder of files that shows whether it is whole before anything in it is used.

An index, a JSON file that is written last, lists size and SHA-256 of every other file, and holds
the SHA-256 of itself. So a missing, truncated or changed byte anywhere is found before a name in
the index is imported, a tensor is made or a program is read. The sums find damage, not malice:
whoever can write the folder can also write new sums.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sparkdl.errors import StorageError
from sparkdl.storage.checkpoint_format import FileRecord, write_file
from sparkdl.storage.storage import Data, Folder, Storage, pieces

_SUM = "sha256"
_MOST_BYTES = 1 << 28
"""Most bytes of an index: JSON takes many times its size in memory."""
REMEDY = "save it again, or take an intact copy"


def write_folder(
    storage: Storage,
    path: str,
    index_name: str,
    index: Mapping[str, Any],
    files: Mapping[str, Data],
) -> None:
    """Write the folder ``path``; until its index is there, which comes last, it counts as damaged.

    The index gets ``files`` and ``sha256`` besides what it holds. StorageError if the storage
    cannot be written.
    """
    storage.remove(f"{path}/{index_name}")  # a folder half written must not look whole
    records = {
        name: asdict(write_file(storage, f"{path}/{name}", map(memoryview, pieces(data))))
        for name, data in files.items()
    }
    body = {**index, "files": records}
    storage.write(f"{path}/{index_name}", _text({**body, _SUM: digest(body)}))


def read_index(storage: Folder, path: str, index_name: str, versions: range) -> dict[str, Any]:
    """Read an index of one of ``versions``; ``files`` becomes a dict of `FileRecord`.

    StorageError if it is missing, damaged, or of another version, of which 1 had no sum of itself.
    """
    place = f"{path}/{index_name}"
    size = storage.size(place)
    if size > _MOST_BYTES:
        raise StorageError(f"{place} is damaged: {size:,} bytes are no index; {REMEDY}")
    data = storage.read(place)
    try:
        index = json.loads(data)
        version = index["version"]
        if type(version) is int and version >= versions.stop:
            raise StorageError(
                f"{place} has version {version}; this sparkdl reads up to {versions[-1]}; use the "
                "sparkdl that saved it, or a newer one"
            )
        if version not in versions or (version > 1 and not _is_intact(index, data)):
            raise StorageError(f"{place} is damaged: it is not what was written; {REMEDY}")
        index["files"] = {
            _plain_name(name): FileRecord(int(record["size_bytes"]), str(record["sha256"]))
            for name, record in index["files"].items()
        }
    except (
        ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError,
    ) as error:  # fmt: skip
        raise StorageError(f"{place} is damaged: {error!r}; {REMEDY}") from error
    return dict(index)


def read_files(storage: Folder, path: str, index: Mapping[str, Any]) -> dict[str, bytes]:
    """All files of an index, compared with size and sum; StorageError if one is not intact."""
    files = {}
    for name, record in index["files"].items():
        place = f"{path}/{name}"
        record.check_size(storage.size(place), place, REMEDY)
        files[name] = record.check(storage.read(place), place, REMEDY)
    return files


def digest(value: Any) -> str:
    """SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _plain_name(name: str) -> str:
    """The name, unless it leads out of the folder, or is none to be shown."""
    if "/" in name or "\\" in name or name in ("", ".", "..") or not name.isprintable():
        raise ValueError(f"a file called {name!r}")
    return name


def _is_intact(index: Mapping[str, Any], data: bytes) -> bool:
    """Return True if the sum is right and not a byte differs, not even one without meaning."""
    body = {key: value for key, value in index.items() if key != _SUM}
    return index.get(_SUM) == digest(body) and data == _text({**body, _SUM: index[_SUM]})


def _text(index: Mapping[str, Any]) -> bytes:
    return json.dumps(index, indent=1).encode()
