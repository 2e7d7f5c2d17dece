"""How fast are random batches read from a spool that is larger than memory?

Each contender is a process of its own in a control group with a memory limit (version 1 or 2,
which takes root), after the spool was dropped from the page cache. Where no group can be made, the
spool is only dropped before, and the report says so: the machine's memory then holds what was read.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from common import DATA, PEERS, Measurements
from steady import watched

from sparkdl.data.batches import Batches
from sparkdl.data.plan import Column, Shard, TrainPlan, make_plan
from sparkdl.data.shuffle_windows import HostLoad, choose_windows
from sparkdl.data.spool.mapped import MappedRows
from sparkdl.data.spool.spool_source import open_spool
from sparkdl.data.spool.writer import column_path

PIXELS = 3072
ROW_BYTES = PIXELS + 8
MIB = 1 << 20
COLUMNS = (
    Column(name="image", role="feature", dtype="uint8", shape=(PIXELS,)),
    Column(name="label", role="label", dtype="int64", shape=()),
)
CONTENDERS = (
    "windows",
    "whole permutation",
    "DataLoader over memmap",
    "DataLoader over memmap, MADV_RANDOM",
    "one large read",
)


def main() -> None:
    """Measure, several times in turn."""
    if len(sys.argv) > 1 and sys.argv[1] == "read":
        contend(json.loads(sys.argv[2]))
        return
    options = arguments()
    directory, found = spool(options.spool * MIB // ROW_BYTES), Measurements()
    contenders = {name: [sys.executable, __file__, "read"] for name in CONTENDERS}
    contenders |= peers(directory, options)
    is_limited = False
    for _ in range(options.runs):
        for name, command in contenders.items():
            common.wait_until_idle(options.patience)
            drop(directory)
            with limited(options.limit * MIB) as group:
                is_limited = group is not None
                report = run(command, ordered(name, directory, options, group))
            found.add(f"{name}, MB/s", report["bytes"] / report["seconds"] / 1e6)
            found.add(f"{name}, slowest tenth / mean", report["slowest"])
            found.add(f"{name}, memory that is no file's MB", report["anonymous"] / 1e6)
            found.add(f"{name}, resident memory MB", report["resident"] / 1e6)
    for name in list(contenders)[1:]:
        found.ratio(f"windows / {name}", "windows, MB/s", f"{name}, MB/s")
    options.memory_is_limited = int(is_limited)
    options.read_ahead_kib = read_ahead_kib(directory)
    found.report("larger", options)


def arguments() -> argparse.Namespace:
    """The options of all benchmarks, and the Pythons of the peers."""
    parser = common.parser(
        3, spool=(4096, "MiB of rows"), limit=(1024, "MiB of memory"), batch=(64, "rows per batch"),
        seconds=(20, "after which a contender is stopped"),
    )  # fmt: skip
    return common.with_peers(parser, "petastorm", "streaming").parse_args()


def peers(directory: Path, options: argparse.Namespace) -> dict[str, list[str]]:
    """The commands of the peers whose Python is given, with their files written once."""
    found = {}
    for name in ("petastorm", "streaming"):
        if python := getattr(options, name):
            command = [str(python), "-W", "ignore", str(PEERS)]
            if not (directory / f"_{name}").exists():
                subprocess.run([*command, f"write-{name}", str(directory)], check=True)
                (directory / f"_{name}").touch()
            found[name] = [*command, f"watch-{name}"]
        else:
            print(f"{name} is left out: give --{name} the Python of an environment that has it")
    return found


def spool(num_rows: int) -> Path:
    """A spool of random bytes, as `SpoolWriter` leaves it; made once."""
    directory = DATA / f"larger-{num_rows}"
    if (directory / "_SUCCESS").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    with column_path(directory, "train", 0).open("wb") as file:
        for start in range(0, num_rows, 10_000):
            shape = (min(10_000, num_rows - start), PIXELS)
            generator.integers(0, 255, shape, dtype=np.uint8).tofile(file)
    np.arange(num_rows, dtype=np.int64).tofile(column_path(directory, "train", 1))
    (directory / "_SUCCESS").touch()
    return directory


def drop(directory: Path) -> None:
    """Take the files out of the page cache."""
    for path in filter(Path.is_file, directory.rglob("*")):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def limited(num_bytes: int) -> Iterator[Path | None]:
    """A control group of limited memory; None where that is not permitted."""
    root = Path("/sys/fs/cgroup")
    name = f"sparkdl-{os.getpid()}"
    group, limit = root / "memory" / name, "memory.limit_in_bytes"
    if not group.parent.is_dir():
        group, limit = root / name, "memory.max"
    try:
        group.mkdir()
        (group / limit).write_text(str(num_bytes))
    except OSError as error:
        print(f"memory is not limited: {error}")
        yield None
        return
    try:
        yield group
    finally:
        group.rmdir()


def ordered(
    name: str, directory: Path, options: argparse.Namespace, group: Path | None
) -> dict[str, Any]:
    """What one contender is told."""
    return {
        "name": name,
        "directory": str(directory),
        "batch": options.batch,
        "seconds": options.seconds,
        "row_bytes": ROW_BYTES,
        "limit": options.limit * MIB,
        "group": None if group is None else str(group),
    }


def run(command: list[str], order: dict) -> dict:
    """One contender's report."""
    command = [*command, json.dumps(order)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=600)
    return json.loads(done.stdout.splitlines()[-1])


def contend(order: dict) -> None:
    """Read, and print how that went."""
    torch.set_num_threads(1)
    directory = Path(order["directory"])
    num_rows = column_path(directory, "train", 1).stat().st_size // 8
    print(json.dumps(watched(reader(order, directory, num_rows), order)))


def reader(order: dict, directory: Path, num_rows: int) -> Iterator[int]:
    """Rows of each batch."""
    name = order["name"]
    if name == "one large read":
        yield from read_all(directory)
    elif name.startswith("DataLoader"):
        is_random = name.endswith("MADV_RANDOM")
        yield from from_loader(directory, num_rows, order["batch"], is_random=is_random)
    else:
        yield from from_spool(order, directory, num_rows)


def from_spool(order: dict, directory: Path, num_rows: int) -> Iterator[int]:
    """As a worker reads, in windows or in a permutation of all rows."""
    plan = planned(order, num_rows)
    shard = open_spool(directory, COLUMNS, num_rows=num_rows, split="train", fingerprint="larger")
    for batch in Batches([MappedRows(shard, plan)], plan, 0, seed=0, epoch=0):
        yield batch.num_rows


def planned(order: dict, num_rows: int) -> TrainPlan:
    """The plan, with the windows that a host of the limited memory gets."""
    size = num_rows * ROW_BYTES
    shard = Shard(
        shard_id=0, host="", path="", num_rows=num_rows, num_validation_rows=0,
        fingerprint="larger", num_bytes=size,
    )  # fmt: skip
    load = HostLoad(num_shards=1, num_bytes=size, memory_bytes=order["limit"])
    windows = choose_windows([load], bytes_by_shard=[size], row_bytes=ROW_BYTES, window_bytes=None)
    return make_plan(
        columns=COLUMNS, shards=[shard], world_size=1, batch_size=order["batch"], epochs=1,
        windows=windows if order["name"] == "windows" else None,
    )  # fmt: skip


def from_loader(
    directory: Path, num_rows: int, batch_size: int, *, is_random: bool
) -> Iterator[int]:
    """What most scripts do; with ``is_random`` the kernel reads no page but those asked for."""
    images = np.memmap(column_path(directory, "train", 0), np.uint8, "r", shape=(num_rows, PIXELS))
    labels = np.memmap(column_path(directory, "train", 1), np.int64, "r", shape=(num_rows,))
    if is_random:
        for mapped in (images, labels):
            mapped._mmap.madvise(mmap.MADV_RANDOM)

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return num_rows

        def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
            return torch.from_numpy(images[row].copy()), int(labels[row])

    loader = torch.utils.data.DataLoader(Rows(), batch_size=batch_size, shuffle=True)
    for _, batch_labels in loader:
        yield len(batch_labels)


def read_all(directory: Path) -> Iterator[int]:
    """The disk's own rate: the file of the images from begin to end, in pieces of 8 MiB."""
    buffer = bytearray(2730 * PIXELS)
    with column_path(directory, "train", 0).open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            yield count // PIXELS


def read_ahead_kib(directory: Path) -> int | None:
    """What the disk is set to read around a page that is missed; None: not known."""
    device = directory.stat().st_dev
    queue = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/queue/read_ahead_kb")
    return int(queue.read_text()) if queue.exists() else None


if __name__ == "__main__":
    main()
