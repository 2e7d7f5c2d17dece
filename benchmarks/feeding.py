"""How fast do samples become shuffled batches? Against Arrow, DataLoader, petastorm, streaming.

One process with one thread makes batches of uint8 images and labels, and does nothing with them.
Every contender begins with the same rows in Parquet. Its first pass is all that it does once (for
`sparkdl` the spool that Spark writes) and its first epoch; later epochs come in random order.

The least that any loader must do is raw Arrow: a memory-mapped file, and `index_select` from it.
petastorm and MosaicML streaming run with Pythons of environments of their own, and are left out
where none is given.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import common
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from common import PEERS, PIXELS, Measurements, images, read_images, seconds
from data import from_spool, opened, prepared_table
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from sparkdl.data.plan import make_plan
from sparkdl.runtime.process import tuned_allocator


def main() -> None:
    """Measure, several times in turn."""
    options = arguments()
    torch.set_num_threads(1)
    folder = images(options.rows)
    found = Measurements()
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        contenders = {
            "sparkdl": FromSpool(folder, options),
            "raw Arrow": FromArrow(folder, place, options),
            "DataLoader, batch by batch": FromDataLoader(folder, options, whole=True),
            "DataLoader, sample by sample": FromDataLoader(folder, options, whole=False),
        }
        contenders |= peers(folder, place, options)
        for name, contender in contenders.items():
            common.wait_until_idle(options.patience)
            found.add(f"{name}: first pass rows/s", options.rows / contender.first())
        for _ in range(options.runs):
            for name, contender in contenders.items():
                common.wait_until_idle(options.patience)
                number = 1 if isinstance(contender, Peer) else options.epochs
                spent = contender.later(number) / number
                found.add(f"{name}: later epochs rows/s", options.rows / spent)
        contenders["sparkdl"].close()
    for name in contenders:
        if name != "sparkdl":
            ours, theirs = (f"{n}: later epochs rows/s" for n in ("sparkdl", name))
            found.ratio(f"sparkdl / {name}, later epochs", ours, theirs)
    found.report("feeding", options)


def arguments() -> argparse.Namespace:
    """The options of all benchmarks, and the Pythons of the peers."""
    parser = common.parser(
        3,
        rows=(240_000, "images"),
        batch=(64, "rows per batch"),
        epochs=(10, "epochs per measurement of what runs in this process"),
    )
    return common.with_peers(parser, "petastorm", "streaming").parse_args()


class FromSpool:
    """What a worker of `fit` does."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._options = argparse.Namespace(**vars(options), slots=1)
        self._spark = common.spark_session(2)
        self._df = self._spark.read.parquet(str(folder))
        self._number = 0

    def first(self) -> float:
        """Seconds of the spool (the session is warm) and the first epoch."""
        table, spool = prepared_table(self._df, self._options)
        spool()  # so that the session and its Python workers are warm
        table.close()
        self._table, spool = prepared_table(self._df, self._options)
        spent = seconds(spool)
        spooled = self._table.collect()
        self._plan = make_plan(
            columns=self._table.columns(spooled),
            shards=[part.shard for part in spooled],
            batch_size=self._options.batch,
            epochs=1,
            world_size=1,
        )
        self._shards = opened(self._plan)
        return spent + self.later(1)

    def later(self, number: int) -> float:
        """Seconds of so many epochs."""
        self._number += number
        epoch = partial(from_spool, self._shards, self._plan, prefetch=True)
        with tuned_allocator():  # as in a worker
            return sum(seconds(partial(epoch, self._number - i)) for i in range(number))

    def close(self) -> None:
        """Remove the spool, end the session."""
        self._table.close()
        self._spark.stop()


class FromArrow:
    """A memory-mapped file of fixed rows; batches by `index_select`."""

    def __init__(self, folder: Path, place: Path, options: argparse.Namespace) -> None:
        self._folder, self._file, self._options = folder, place / "rows.arrow", options

    def first(self) -> float:
        """Seconds to write the file, and of the first epoch."""
        started = time.perf_counter()
        pixels, labels = read_images(self._folder)
        image = pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(PIXELS), len(labels), [None, pa.py_buffer(pixels.numpy())]
        )
        table = pa.table({"image": image, "label": labels.numpy()})
        with pa.OSFile(str(self._file), "wb") as sink, pa.ipc.new_file(sink, table.schema) as out:
            out.write_table(table)
        mapped = pa.ipc.open_file(pa.memory_map(str(self._file))).read_all()
        self._pixels = self._tensor(mapped["image"], np.uint8)[: len(labels) * PIXELS]
        self._pixels = self._pixels.view(-1, PIXELS)
        self._labels = self._tensor(mapped["label"], np.int64)[: len(labels)]
        return time.perf_counter() - started + self.later(1)

    def later(self, number: int) -> float:
        """Seconds of so many epochs."""
        return sum(seconds(self._epoch) for _ in range(number))

    def _epoch(self) -> None:
        seen = 0
        for positions in torch.randperm(len(self._labels)).split(self._options.batch):
            picked = torch.index_select(self._pixels, 0, positions)
            seen += len(torch.index_select(self._labels, 0, positions))
            assert len(picked) <= self._options.batch
        assert seen == len(self._labels)

    def _tensor(self, column: pa.ChunkedArray, dtype: type) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the map is read-only, and only read
            return torch.from_numpy(np.frombuffer(column.chunk(0).buffers()[1], dtype))


class FromDataLoader:
    """Tensors in memory behind torch's loader, without worker processes."""

    def __init__(self, folder: Path, options: argparse.Namespace, *, whole: bool) -> None:
        self._folder, self._options, self._whole = folder, options, whole

    def first(self) -> float:
        """Seconds to read the Parquet files, and of the first epoch."""
        started = time.perf_counter()
        dataset = TensorDataset(*read_images(self._folder))
        batch = self._options.batch
        self._loader = DataLoader(dataset, batch_size=batch, shuffle=True)
        if self._whole:
            sampler = BatchSampler(RandomSampler(dataset), batch, drop_last=False)
            self._loader = DataLoader(dataset, sampler=sampler, batch_size=None)
        return time.perf_counter() - started + self.later(1)

    def later(self, number: int) -> float:
        """Seconds of so many epochs."""
        started = time.perf_counter()
        seen = sum(len(labels) for _ in range(number) for _, labels in self._loader)
        assert seen == number * self._options.rows
        return time.perf_counter() - started


class Peer:
    """Another package in a process of its own."""

    def __init__(self, python: Path, name: str, place: Path, batch: int, before: float) -> None:
        self._command = [str(python), str(PEERS), name, str(place), str(batch)]
        self._before = before

    def first(self) -> float:
        """Seconds of what is done once, and of the first epoch."""
        return self._before + self._epochs(1)[0]

    def later(self, number: int) -> float:
        """Seconds of so many epochs after the first."""
        return sum(self._epochs(1 + number)[1:])

    def _epochs(self, number: int) -> list[float]:
        done = run([*self._command, str(number)])
        return json.loads(done.splitlines()[-1])


def peers(folder: Path, place: Path, options: argparse.Namespace) -> dict[str, Peer]:
    """Those whose Python is given, with their files written."""
    found = {}
    pixels, labels = (column.numpy() for column in read_images(folder))
    (place / "rows").write_text(str(len(labels)))
    if options.petastorm is None:
        print("petastorm is left out: give --petastorm the Python of an environment that has it")
    else:
        (place / "list-column").mkdir()
        flat = pa.array(pixels.reshape(-1))
        image = pa.FixedSizeListArray.from_arrays(flat, PIXELS).cast(pa.list_(pa.uint8()))
        table = pa.table({"image": image, "label": labels})
        pq.write_table(table, place / "list-column" / "part-0.parquet", row_group_size=5000)
        for name in ("petastorm", "petastorm-memory"):
            found[name] = Peer(options.petastorm, name, place, options.batch, 0.0)
    if options.streaming is None:
        print("streaming is left out: give --streaming the Python of an environment that has it")
    else:
        np.savez(place / "rows.npz", pixels=pixels, labels=labels)
        writing = json.loads(run([str(options.streaming), str(PEERS), "write-mds", str(place)]))
        found["streaming"] = Peer(options.streaming, "streaming", place, options.batch, writing)
    return found


def run(command: list[str]) -> str:
    """What a program prints.

    Raises:
        SystemExit: it failed; with its last words.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
