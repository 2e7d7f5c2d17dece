"""What do petastorm and MosaicML streaming feed? Run by `feeding.py` with their own Pythons.

    python feeding_peers.py petastorm|streaming FOLDER BATCH_ROWS EPOCHS

Prints the seconds of every epoch as JSON; start-up is not counted. The folder is that of
`feeding.py`, with the same rows for each: ``list-column`` (Parquet) and ``mds``.
"""

from __future__ import annotations

import json
import sys
import time
import types
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import torch

MIXED_ROWS = 20_000
"""Rows among which petastorm draws a batch; MosaicML streaming has its own default."""


def main() -> None:
    """Feed epoch after epoch."""
    name, folder, batch, epochs = sys.argv[1:]
    torch.set_num_threads(1)
    feed = {"petastorm": petastorm, "petastorm-memory": petastorm_memory, "streaming": streaming}
    print(json.dumps(feed[name](Path(folder), int(batch), int(epochs))))


def petastorm(folder: Path, batch_rows: int, epochs: int) -> list[float]:
    """Parquet to batches anew in every epoch; a reader for each, as its documentation has it."""
    from petastorm import make_batch_reader
    from petastorm.pytorch import BatchedDataLoader

    def epoch() -> float:
        url = (folder / "list-column").as_uri()
        with make_batch_reader(url, num_epochs=1, shuffle_row_groups=True) as reader:
            loader = BatchedDataLoader(
                reader, batch_size=batch_rows, shuffling_queue_capacity=MIXED_ROWS
            )
            return spent(loader, lambda batch: len(batch["label"]))

    return [epoch() for _ in range(epochs)]


def petastorm_memory(folder: Path, batch_rows: int, epochs: int) -> list[float]:
    """Parquet into memory in the first epoch, random batches of it in the others."""
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
    without_torchvision()
    from streaming import StreamingDataset

    dataset = StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=batch_rows)
    loader = torch.utils.data.DataLoader(dataset, batch_size=batch_rows)
    return [spent(loader, lambda batch: len(batch["label"])) for _ in range(epochs)]


def write_mds(folder: Path, pixels: np.ndarray, labels: np.ndarray) -> float:
    """Write the same rows in MosaicML's format; the seconds that it takes."""
    without_torchvision()
    from streaming import MDSWriter

    started = time.perf_counter()
    columns = {"image": f"ndarray:uint8:{pixels.shape[1]}", "label": "int"}
    with MDSWriter(out=str(folder / "mds"), columns=columns) as writer:
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


def spent(loader: Iterable, size: Callable[[dict], int]) -> float:
    """Seconds of one pass over a loader."""
    started, seen = time.perf_counter(), 0
    for batch in loader:
        seen += size(batch)
    assert seen > 0
    return time.perf_counter() - started


def num_rows(folder: Path) -> int:
    """Rows of the folder's data set."""
    return int((folder / "rows").read_text())


if __name__ == "__main__":
    if sys.argv[1] == "write-mds":
        arrays = np.load(Path(sys.argv[2]) / "rows.npz")
        print(write_mds(Path(sys.argv[2]), arrays["pixels"], arrays["labels"]))
    else:
        main()
