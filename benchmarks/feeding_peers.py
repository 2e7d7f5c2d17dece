"""What do petastorm and MosaicML streaming feed? Run with their own Pythons.

By `feeding.py`, which gets the seconds of every epoch; start-up is not counted::

    python feeding_peers.py petastorm|petastorm-memory|streaming FOLDER BATCH_ROWS EPOCHS
    python feeding_peers.py write-mds FOLDER

By `larger.py`, which gets the report of `steady.watched`::

    python feeding_peers.py write-petastorm|write-streaming FOLDER
    python feeding_peers.py watch-petastorm|watch-streaming ORDER
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import types
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from steady import watched

MIXED_ROWS = 20_000
"""Rows among which petastorm draws a batch; MosaicML streaming has its own default."""
GROUP_ROWS = 1000
"""Rows of a row group for `larger.py`: petastorm holds some fifty row groups in memory."""
IMAGE_BYTES = 3072


def main() -> None:
    """Feed epoch after epoch, or write the files."""
    task, *rest = sys.argv[1:]
    torch.set_num_threads(1)
    if task == "write-mds":
        arrays = np.load(Path(rest[0]) / "rows.npz")
        print(write_mds(Path(rest[0]), [(arrays["pixels"], arrays["labels"])]))
    elif task.startswith("write-"):
        {"petastorm": write_parquet, "streaming": write_mds}[task[6:]](
            Path(rest[0]), spooled(Path(rest[0]))
        )
    elif task.startswith("watch-"):
        watch(task[6:], json.loads(rest[0]))
    else:
        feed = {"petastorm": petastorm, "petastorm-memory": memory, "streaming": streaming}
        print(json.dumps(feed[task](Path(rest[0]), int(rest[1]), int(rest[2]))))


def petastorm(folder: Path, batch_rows: int, epochs: int) -> list[float]:
    """Parquet to batches anew in every epoch; a reader for each, as its documentation has it."""

    def epoch() -> float:
        with petastorm_loader(folder, batch_rows) as loader:
            return spent(loader)

    return [epoch() for _ in range(epochs)]


@contextlib.contextmanager
def petastorm_loader(folder: Path, batch_rows: int) -> Iterator[Iterable[dict[str, Any]]]:
    """One epoch's batches."""
    from petastorm import make_batch_reader
    from petastorm.pytorch import BatchedDataLoader

    url = (folder / "list-column").as_uri()
    with make_batch_reader(url, num_epochs=1, shuffle_row_groups=True) as reader:
        yield BatchedDataLoader(reader, batch_size=batch_rows, shuffling_queue_capacity=MIXED_ROWS)


def memory(folder: Path, batch_rows: int, epochs: int) -> list[float]:
    """Parquet into memory in the first epoch, random batches of it in the others: petastorm."""
    from petastorm import make_batch_reader
    from petastorm.pytorch import InMemBatchedDataLoader

    url, rows = (folder / "list-column").as_uri(), num_rows(folder)
    found: list[float] = []
    with make_batch_reader(url, num_epochs=1) as reader:
        started, seen = time.perf_counter(), 0
        loader = InMemBatchedDataLoader(
            reader, batch_size=batch_rows, num_epochs=epochs, rows_capacity=rows, shuffle=True
        )
        for batch in loader:
            seen += len(batch["label"])
            if seen >= rows:
                now = time.perf_counter()
                found.append(now - started)
                started, seen = now, seen - rows
    return found


def streaming(folder: Path, batch_rows: int, epochs: int) -> list[float]:
    """Shuffled samples, put together by a DataLoader in the same process."""
    loader = streaming_loader(folder, batch_rows)
    return [spent(loader) for _ in range(epochs)]


def streaming_loader(folder: Path, batch_rows: int) -> Iterable[dict[str, Any]]:
    """Batches, epoch after epoch."""
    without_torchvision()
    from streaming import StreamingDataset

    dataset = StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=batch_rows)
    return torch.utils.data.DataLoader(dataset, batch_size=batch_rows)


def watch(name: str, order: dict[str, Any]) -> None:
    """An epoch of files larger than memory."""
    folder, batch_rows = Path(order["directory"]), order["batch"]
    with contextlib.ExitStack() as stack:
        if name == "petastorm":
            loader = stack.enter_context(petastorm_loader(folder, batch_rows))
        else:
            loader = streaming_loader(folder, batch_rows)
        report = watched((len(batch["label"]) for batch in loader), order)
    print(json.dumps(report))


def spooled(folder: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The rows of `larger.py`'s files, in pieces of a row group."""
    labels = np.memmap(folder / "train-001.bin", np.int64, "r")
    shape = (len(labels), IMAGE_BYTES)
    pixels = np.memmap(folder / "train-000.bin", np.uint8, "r", shape=shape)
    for start in range(0, len(labels), GROUP_ROWS):
        yield pixels[start : start + GROUP_ROWS], labels[start : start + GROUP_ROWS]


def write_parquet(folder: Path, pieces: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
    """Write a row group per piece; images are lists of bytes."""
    import pyarrow as pa
    from pyarrow import parquet

    (folder / "list-column").mkdir(exist_ok=True)
    schema = pa.schema({"image": pa.list_(pa.uint8()), "label": pa.int64()})
    with parquet.ParquetWriter(folder / "list-column" / "part-0.parquet", schema) as writer:
        for pixels, labels in pieces:
            flat = pa.array(pixels.reshape(-1))
            image = pa.FixedSizeListArray.from_arrays(flat, pixels.shape[1]).cast(schema.types[0])
            writer.write_table(pa.table({"image": image, "label": labels}, schema))


def write_mds(folder: Path, pieces: Iterable[tuple[np.ndarray, np.ndarray]]) -> float:
    """Write the same rows in MosaicML's format; the seconds that it takes."""
    without_torchvision()
    from streaming import MDSWriter

    started, pieces = time.perf_counter(), iter(pieces)
    first = next(pieces)
    columns = {"image": f"ndarray:uint8:{first[0].shape[1]}", "label": "int"}
    with MDSWriter(out=str(folder / "mds"), columns=columns) as writer:
        for pixels, labels in (first, *pieces):
            for image, label in zip(pixels, labels.tolist(), strict=True):
                writer.write({"image": image, "label": label})
    return time.perf_counter() - started


def without_torchvision() -> None:
    """Let `streaming` be imported where torchvision is not: only its image classes need it."""
    parts = {"datasets": "VisionDataset", "transforms.functional": "to_tensor"}
    for name in ("", ".datasets", ".transforms", ".transforms.functional"):
        module = types.ModuleType(f"torchvision{name}")
        module.__path__ = []
        module.__spec__ = ModuleSpec(module.__name__, None)
        if name[1:] in parts:
            setattr(module, parts[name[1:]], object)
        sys.modules[module.__name__] = module


def spent(loader: Iterable[dict[str, Any]]) -> float:
    """Seconds of one pass over a loader."""
    started = time.perf_counter()
    assert sum(len(batch["label"]) for batch in loader) > 0
    return time.perf_counter() - started


def num_rows(folder: Path) -> int:
    """Rows of the folder's data set."""
    return int((folder / "rows").read_text())


if __name__ == "__main__":
    main()
