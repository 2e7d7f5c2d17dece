"""What do the benchmarks share? Synthetic images, one small network, medians, and the report."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).parent
ROOT = HERE.parent
DATA = ROOT / "data" / "benchmarks"
PEERS = HERE / "feeding_peers.py"

# One thread per process, as two workers on two cores have; before torch is imported.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
# Spark's workers and torchrun's find this module by the path.
_PATHS = (str(HERE), str(ROOT), os.environ.get("PYTHONPATH"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _PATHS))

import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PIXELS = 28 * 28
CLASSES = 10


class SmallCNN(nn.Module):
    """Two convolutions and a linear layer, for 28x28 images of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 7 * 7, CLASSES),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits ``(batch, 10)`` of images ``(batch, 784)`` or ``(batch, 1, 28, 28)``, uint8."""
        return self.layers(images.view(-1, 1, 28, 28).float() / 255)


def images(rows: int, *, as_floats: bool = False) -> Path:
    """A Parquet folder of four files: ``image`` (784 bytes) and ``label`` (0 to 9); made once.

    The label is the number of the brightest of ten bands of the image, so it can be learnt. With
    ``as_floats`` images are arrays of float, four times as large.
    """
    folder = DATA / f"{'floats' if as_floats else 'images'}-{rows}"
    if (folder / "_SUCCESS").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for part, start in enumerate(range(0, rows, -(-rows // 4))):
        count = min(-(-rows // 4), rows - start)
        labels = generator.integers(0, CLASSES, count)
        pixels = generator.integers(0, 200, (count, PIXELS), dtype=np.uint8)
        for label in range(CLASSES):
            pixels[labels == label, label * 78 : (label + 1) * 78] += 50
        offsets = np.arange(count + 1, dtype=np.int32) * np.int32(PIXELS)
        if as_floats:
            column = pa.ListArray.from_arrays(offsets, pixels.reshape(-1).astype(np.float32))
        else:
            column = pa.BinaryArray.from_buffers(
                pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(pixels)]
            )
        table = pa.table({"image": column, "label": pa.array(labels, pa.int64())})
        pq.write_table(table, folder / f"part-{part}.parquet", row_group_size=5000)
    (folder / "_SUCCESS").touch()
    return folder


def read_images(folder: Path, part: int = 0, parts: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """One of ``parts`` equal parts of the images in memory: ``(rows, 784)`` and ``(rows,)``."""
    table = pq.read_table(folder)
    table = table.slice(part * len(table) // parts, len(table) // parts).combine_chunks()
    column = table["image"].chunk(0)
    is_bytes = pa.types.is_binary(column.type)
    values = column.buffers()[2] if is_bytes else column.values.to_numpy()
    flat = np.frombuffer(values, dtype=np.uint8 if is_bytes else np.float32)
    start = column.offset * PIXELS
    pixels = flat[start : start + len(table) * PIXELS].reshape(-1, PIXELS).copy()
    return torch.from_numpy(pixels), torch.from_numpy(table["label"].to_numpy().copy())


def spark_session(slots: int = 2, daemon: str = "pyspark.daemon") -> SparkSession:
    """A classic session on this machine."""
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master(f"local[{slots}]")
        .appName("sparkdl benchmarks")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", str(slots))
        .config("spark.driver.memory", "2g")
        .config("spark.python.daemon.module", daemon)
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    return session


def arguments(runs: int, **options: tuple[int, str]) -> argparse.Namespace:
    """What the command line gives for the options of `parser`."""
    return parser(runs, **options).parse_args()


def parser(runs: int, **options: tuple[int, str]) -> argparse.ArgumentParser:
    """``--runs``, and one integer option per keyword: its default and what it is."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=runs, help="runs of which the median is taken")
    for name, (default, text) in options.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    parser.add_argument(
        "--patience", type=int, default=30, help="longest wait for idle CPUs before a measurement"
    )
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder of the JSON")
    return parser


def with_peers(parser: argparse.ArgumentParser, *names: str) -> argparse.ArgumentParser:
    """The same parser, which also takes Pythons of environments that have these packages."""
    for name in names:
        parser.add_argument(f"--{name}", type=Path, help=f"Python that can import {name}")
    return parser


def seconds(work: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def children_cpu_seconds() -> float:
    """CPU seconds of all processes below this one, with those that have ended and were waited for.

    Linux only.
    """
    found: dict[int, tuple[int, int, int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # one that has ended meanwhile
            words = path.read_text().rpartition(")")[2].split()
            own, ended = map(int, words[11:13]), map(int, words[13:15])
            found[int(path.parent.name)] = int(words[1]), sum(own), sum(ended)
    todo, ticks = [os.getpid()], found[os.getpid()][2]
    while todo:
        parent = todo.pop()
        for pid, (its_parent, own_ticks, ended_ticks) in found.items():
            if its_parent == parent:
                ticks += own_ticks + ended_ticks
                todo.append(pid)
    return ticks / os.sysconf("SC_CLK_TCK")


def wait_until_idle(patience: int) -> None:
    """Return when nobody else has used the CPUs for two seconds, or after ``patience`` seconds."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        before = _cpu_times()
        time.sleep(2)
        spent = _cpu_times() - before
        if spent[3] > 0.85 * spent.sum():  # the fourth is idle
            return


def _cpu_times() -> np.ndarray:
    return np.array(Path("/proc/stat").read_text().split("\n")[0].split()[1:9], dtype=np.int64)


class Measurements:
    """Values by name, several of each; medians of them are reported."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}
        self._load = [os.getloadavg()[0]]
        self._environment = environment()

    def add(self, name: str, value: float) -> None:
        """Note one value."""
        self._values.setdefault(name, []).append(value)
        self._load.append(os.getloadavg()[0])

    def names(self) -> list[str]:
        """What was noted, in that order."""
        return list(self._values)

    def median(self, name: str) -> float:
        """Median of the values of one name."""
        return statistics.median(self._values[name])

    def ratio(self, name: str, above: str, below: str) -> None:
        """Note the ratios of two measurements, run by run: what slows both cancels out."""
        pairs = zip(self._values[above], self._values[below], strict=True)
        self._values[name] = [a / b for a, b in pairs]

    def report(self, benchmark: str, options: argparse.Namespace) -> None:
        """Print the table and write ``<output>/<benchmark>.json``."""
        rows = [
            (name, f"{statistics.median(values):.4g}", f"{min(values):.4g}", f"{max(values):.4g}")
            for name, values in self._values.items()
        ]
        print(f"\n{benchmark}\n{table(('', 'median', 'least', 'most'), rows)}")
        report = {
            "benchmark": benchmark,
            "medians": {name: statistics.median(v) for name, v in self._values.items()},
            "values": self._values,
            "options": {k: v for k, v in vars(options).items() if not isinstance(v, Path)},
            "load average": {"least": min(self._load), "most": max(self._load)},
            **self._environment,
        }
        options.output.mkdir(parents=True, exist_ok=True)
        path = options.output / f"{benchmark}.json"
        path.write_text(json.dumps(report, indent=1) + "\n")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text, the first to the left, the others to the right."""
    lines = [tuple(head), *map(tuple, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def environment() -> Mapping[str, Any]:
    """Where and with what a benchmark ran."""
    from sparkdl.runtime.process import cpu_model

    packages = ("torch", "pyspark", "pyarrow", "numpy")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "git": _git("rev-parse", "--short", "HEAD"),
        "changed files": len(_git("status", "--porcelain", "--", "sparkdl").splitlines()),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "memory GiB": round(memory / 2**30),
        "python": platform.python_version(),
        "versions": {name: version for name in packages if (version := _version(name))},
    }


def _version(package: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _git(*words: str) -> str:
    if shutil.which("git") is None:
        return ""
    done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=False)
    return done.stdout.strip()
