"""The format of a checkpoint on a storage, and the checks that it is whole.

A checkpoint is a folder ``<run key>/<run id>-<attempt>/step-00000120``, or
``step-00000120-final`` for the last one of a run, with ``shared.safetensors`` (equal on all ranks),
``rank-00000.safetensors`` for each rank, and ``manifest.json``, written last. Each data file is one
safetensors file; the JSON half of the tree is its metadata. A folder is a checkpoint only if the
manifest is there and size and SHA-256 of every file in it match: a killed writer or a truncated
file leaves no checkpoint, never a wrong one. SHA-256 costs 0.6 s per GB on CPUs with SHA
instructions, off the training thread; CRC-32 would be twice as fast but misses what 32 bits miss.

Each attempt of each run writes into a folder of its own, so no two of them ever write to one file:
neither two fits of one run key, nor what is left of an attempt that was given up. They read each
other's: equal run keys stand for equal bits.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from sparkdl.config import require
from sparkdl.errors import CheckpointError, StorageError
from sparkdl.storage.storage import Storage, is_definite
from sparkdl.storage.tensor_tree import DTYPES, Snapshot, unpack

logger = logging.getLogger(__name__)

VERSION = 1
_MOST_READS = 16
_MOST_READ_BYTES = 256 * 2**20
"""Files that are read at a time, and their bytes: an answer of S3 takes a tenth of a second."""
MANIFEST = "manifest.json"
SHARED = "shared.safetensors"

_FOLDER = re.compile(r"step-(\d{8,})(-final)?")
_WRITER = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*)-(\d+)")
_RUN_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_CHUNK_BYTES = 8 << 20
_TORCH = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class FileRecord:
    """Size and checksum of a file."""

    size_bytes: int
    sha256: str

    def check(self, data: bytes, place: str, remedy: str) -> bytes:
        """Return ``data`` if it is what was recorded; CheckpointError if not."""
        self.check_pieces([data], place, remedy)
        return data

    def check_pieces(self, pieces: Iterable[bytes | memoryview], place: str, remedy: str) -> None:
        """Raise CheckpointError if pieces are not those of the file that was recorded."""
        digest, size = hashlib.sha256(), 0
        for piece in pieces:
            digest.update(piece)
            size += len(piece)
        self.check_size(size, place, remedy)
        if digest.hexdigest() != self.sha256:
            raise CheckpointError(
                f"{place} is damaged: its {size} bytes do not have the SHA-256 {self.sha256}; "
                f"{remedy}"
            )

    def check_size(self, size: int, place: str, remedy: str) -> None:
        """Raise CheckpointError if the file that was recorded has another size."""
        if size != self.size_bytes:
            raise CheckpointError(
                f"{place} is damaged: {size} bytes, expected {self.size_bytes} with SHA-256 "
                f"{self.sha256}; {remedy}"
            )


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """A whole checkpoint: what its manifest says, and where it lies."""

    storage: Storage = field(compare=False, repr=False)
    path: str
    step: int
    """Optimizer steps taken when it was written."""
    world_size: int
    run_key: str
    complete: bool
    """True if this is the end of the run, not a stop on the way."""
    environment: Mapping[str, str]
    """Versions, CPU type and threads of the run that wrote it."""
    files: Mapping[str, FileRecord]


@dataclass(frozen=True, kw_only=True)
class Writer:
    """The writer of checkpoints: an attempt of a run."""

    run_key: str
    """Names what is trained; equal for equal fits."""
    run_id: str
    """Names the run, and no other."""
    attempt: int

    def __post_init__(self) -> None:
        check_run_key(self.run_key)
        check_run_key(self.run_id)

    @property
    def path(self) -> str:
        """Its folder."""
        return f"{self.run_key}/{self.run_id}-{self.attempt}"


@dataclass(frozen=True, kw_only=True)
class StepFolder:
    """The folder of a checkpoint, which may be whole or not."""

    writer: Writer
    step: int
    is_final: bool

    @property
    def order(self) -> tuple[int, bool, str, int]:
        """The larger, the newer; of equal steps of one run that of the later attempt is newer."""
        return *self.age, self.writer.run_id, self.writer.attempt

    @property
    def name(self) -> str:
        """Names sort in the order of writing."""
        return f"step-{self.step:08d}{'-final' if self.is_final else ''}"

    @property
    def path(self) -> str:
        """Relative to the storage."""
        return f"{self.writer.path}/{self.name}"

    @property
    def age(self) -> tuple[int, bool]:
        """The larger, the further the training was."""
        return self.step, self.is_final


def rank_file(rank: int) -> str:
    """Name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


def check_run_key(run_key: str) -> str:
    """Return a run's key or id that is fit to be the name of a folder; ConfigError if it is not."""
    rule = "a run key names a folder: use letters, digits, '_', '-' and '.'"
    require(_RUN_KEY.fullmatch(run_key) is not None, rule, run_key)
    return run_key


def encode(
    state: Snapshot, whole: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach
) -> Iterator[bytes | memoryview]:
    """A snapshot as the pieces of a safetensors file; tensors are not copied.

    ``whole`` gets the values of a tensor whose turn it is.
    """
    yield from safetensors_of(state.tensors, {"tree": json.dumps(state.value)}, whole)


def safetensors_of(
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    whole: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
) -> Iterator[bytes | memoryview]:
    """The pieces of a safetensors file with these tensors, see `encode`."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    # Large elements first keeps every tensor aligned, as the format's own writer does.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    for name, tensor in ordered:
        end = offset + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        entry = {"dtype": DTYPES[tensor.dtype], "shape": shape, "data_offsets": [offset, end]}
        header[name] = entry
        offset = end
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for _, tensor in ordered:
        yield from _chunks(whole(tensor))


def _chunks(tensor: torch.Tensor) -> Iterator[memoryview]:
    if not tensor.numel():
        return
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    data = flat.numpy().data
    for start in range(0, len(data), _CHUNK_BYTES):
        yield data[start : start + _CHUNK_BYTES]


def decode(data: bytes, place: str) -> Any:
    """The tree in a file that `encode` made; CheckpointError, with ``place``, if it is damaged."""
    return _decoded(data, place, bytearray)


def views(data: bytes, place: str) -> Any:
    """Like `decode`, but the tensors are views of ``data``: to be copied from, never written to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return _decoded(data, place, lambda part: part)


def _decoded(data: bytes, place: str, keep: Callable[[memoryview], Any]) -> Any:
    """The tree, with tensors in what ``keep`` makes of their bytes."""
    try:
        (size,) = struct.unpack_from("<Q", data)
        header, body = json.loads(data[8 : 8 + size]), memoryview(data)[8 + size :]
        tree = json.loads(header.pop("__metadata__")["tree"])
        pairs = [entry["data_offsets"] for entry in header.values()]
        if sum(end - begin for begin, end in pairs) > len(body):  # each would be copied
            raise ValueError("its tensors overlap")
        tensors = {name: _tensor(entry, body, keep) for name, entry in header.items()}
        return unpack(tree, tensors)
    except (
        struct.error, ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError,
    ) as error:  # fmt: skip # RecursionError is a RuntimeError
        raise CheckpointError(f"{place} is damaged: {error!r}; use an older one") from error


def _tensor(
    entry: Mapping[str, Any], body: memoryview, keep: Callable[[memoryview], Any]
) -> torch.Tensor:
    """A tensor of the file, given its entry in the header and the bytes behind the header."""
    begin, end = entry["data_offsets"]
    if not 0 <= begin <= end <= len(body):
        raise ValueError(f"a tensor has the bytes {begin} to {end} of {len(body)}")
    dtype, data = _TORCH[entry["dtype"]], keep(body[begin:end])
    flat = torch.frombuffer(data, dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)
    return flat.reshape(entry["shape"])


def write_file(storage: Storage, path: str, data: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a file in pieces, which are counted and hashed on their way to the storage."""
    digest, size = hashlib.sha256(), 0

    def watched() -> Iterator[bytes | memoryview]:
        nonlocal size
        for piece in data:
            digest.update(piece)
            size += len(piece)
            yield piece

    storage.write(path, watched())
    return FileRecord(size, digest.hexdigest())


def write_manifest(info: CheckpointInfo) -> None:
    """Make the folder a checkpoint; all other files must be there."""
    manifest = {
        "version": VERSION,
        "step": info.step,
        "world_size": info.world_size,
        "run_key": info.run_key,
        "complete": info.complete,
        "environment": dict(info.environment),
        "files": {name: asdict(record) for name, record in info.files.items()},
    }
    info.storage.write(f"{info.path}/{MANIFEST}", json.dumps(manifest, indent=1).encode())


def read_manifest(storage: Storage, path: str) -> CheckpointInfo:
    """Read a folder's manifest; the files themselves are not looked at.

    CheckpointError if there is none, or it is damaged or of a later version; StorageError if the
    storage failed, in a way that may pass.
    """
    place = f"{path}/{MANIFEST}"
    try:
        data = storage.read(place) if storage.exists(place) else None
    except StorageError as error:
        if not is_definite(error):
            raise
        data = None  # it was removed meanwhile
    if data is None:
        raise CheckpointError(f"{path} has no {MANIFEST}: its writing was interrupted")
    try:
        manifest = json.loads(data)
        if manifest["version"] != VERSION:
            raise CheckpointError(
                f"{path} has format version {manifest['version']}; this sparkdl reads {VERSION}"
            )
        info = CheckpointInfo(
            storage=storage,
            path=path,
            step=int(manifest["step"]),
            world_size=int(manifest["world_size"]),
            run_key=str(manifest["run_key"]),
            complete=bool(manifest["complete"]),
            environment=dict(manifest["environment"]),
            files={
                name: FileRecord(int(record["size_bytes"]), str(record["sha256"]))
                for name, record in manifest["files"].items()
            },
        )
        if info.step < 0 or info.world_size < 1:
            raise ValueError(f"step {info.step} of {info.world_size} ranks")
        if not all(isinstance(text, str) for text in info.environment.values()):
            raise ValueError(f"environment {info.environment}")
        return info
    except (
        ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError,
    ) as error:  # fmt: skip
        raise CheckpointError(f"{place} is damaged: {error!r}") from error


def read_file(info: CheckpointInfo, name: str) -> bytes:
    """A file of a checkpoint, after its size and checksum were compared with the manifest.

    CheckpointError if it is not in the manifest, missing, truncated or changed; StorageError if the
    storage failed, in a way that may pass.
    """
    place = f"{info.path}/{name}"
    if name not in info.files:
        raise CheckpointError(f"the checkpoint {info.path} has no file {name}")
    try:
        data = info.storage.read(place)
    except StorageError as error:
        if not is_definite(error):
            raise
        raise CheckpointError(f"the checkpoint {info.path} cannot be read: {error}") from error
    return info.files[name].check(data, place, "use an older checkpoint")


def load_shared(info: CheckpointInfo) -> Any:
    """The state that is equal on all ranks; CheckpointError if the file is damaged."""
    return _state(info, SHARED)


def load_rank(info: CheckpointInfo, rank: int) -> Any:
    """The state of one rank; CheckpointError if it is damaged, or there were fewer ranks."""
    if not 0 <= rank < info.world_size:
        raise CheckpointError(
            f"the checkpoint {info.path} was written by {info.world_size} ranks; "
            f"it has no state of rank {rank}"
        )
    return _state(info, rank_file(rank))


def _state(info: CheckpointInfo, name: str) -> dict[str, Any]:
    found = decode(read_file(info, name), f"{info.path}/{name}")
    if not isinstance(found, dict):
        raise CheckpointError(f"{info.path}/{name} holds no state, but a {type(found).__name__}")
    return found


def writers(names: Iterable[str], run_key: str) -> list[Writer]:
    """The attempts of runs that have a folder, given the names in that of a run key."""
    found = filter(None, map(_WRITER.fullmatch, names))
    return [Writer(run_key=run_key, run_id=match[1], attempt=int(match[2])) for match in found]


def steps_of(storage: Storage, writers: Iterable[Writer]) -> list[StepFolder]:
    """The checkpoint folders of some attempts, whole or not, oldest first."""
    found = [
        StepFolder(writer=writer, step=int(match[1]), is_final=match[2] is not None)
        for writer in writers
        for match in filter(None, map(_FOLDER.fullmatch, storage.list(writer.path)))
    ]
    return sorted(found, key=lambda folder: folder.order)


def folders(storage: Storage, run_key: str) -> list[StepFolder]:
    """The checkpoint folders of a run key, whoever wrote them, whole or not, oldest first."""
    return steps_of(storage, writers(storage.list(check_run_key(run_key)), run_key))


def latest(
    storage: Storage,
    run_key: str,
    fits: Callable[[Any], bool] | None = None,
    *,
    is_wanted: Callable[[StepFolder], bool] | None = None,
    is_last_try: bool = False,
) -> CheckpointInfo | None:
    """The newest whole checkpoint of a run key, or None; reads it through to be sure.

    Folders that are not whole, or vanish meanwhile, are passed over with a line in the log, and so
    are those whose state that is equal on all ranks does not pass ``fits``. Folders that are not
    ``is_wanted`` are not looked at. StorageError if the storage failed, in a way that may pass;
    with ``is_last_try`` that is passed over as well.
    """
    for folder in reversed(folders(storage, run_key)):
        if is_wanted is not None and not is_wanted(folder):
            continue
        try:
            info = read_manifest(storage, folder.path)
            _read_ranks(info)
            shared = load_shared(info)
            is_fit = fits is None or fits(shared)
        except StorageError as error:
            if not isinstance(error, CheckpointError) and not is_last_try:
                raise
            logger.warning("passed over %s: %s", folder.path, error)
            continue
        if is_fit:
            return info
        logger.warning("passed over %s: this fit ends before step %d", folder.path, info.step)
    return None


def _read_ranks(info: CheckpointInfo) -> None:
    """See that the files of all ranks are whole: many at a time, but few bytes."""
    most = _MOST_READ_BYTES // max([1, *(record.size_bytes for record in info.files.values())])
    names = [rank_file(rank) for rank in range(min(info.world_size, len(info.files)))]
    with ThreadPoolExecutor(max(1, min(_MOST_READS, most))) as pool:
        for _ in pool.map(lambda name: len(read_file(info, name)), names):
            pass


def has_other_runs(storage: Storage, run_key: str) -> bool:
    """Return True if checkpoints of other run keys lie beside those of this one."""
    return any(folders(storage, name) for name in run_keys(storage) if name != run_key)


def run_keys(storage: Storage) -> list[str]:
    """Names in a storage that may be run keys."""
    return [name for name in storage.list("") if _RUN_KEY.fullmatch(name)]
