"""How fast do compressions encode and decode? Against a copy of the same float32 bytes.

One rank, one thread, normal random gradients in a matrix of rows of 1024. Encoding includes the
residual. Times are the thread's CPU seconds, as nothing here waits. A buffer of 4 MB is copied
within the processor's cache, one of 100 MB in memory: "/ copy" compares with the copy of the same
size, "/ memory" with that of 100 MB.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import common
import torch
from common import Measurements

from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.comm.compression import threshold
from sparkdl.comm.compression.compression import Compression
from sparkdl.comm.compression.dense_reduce_scatter import Codec
from sparkdl.comm.compression.int8 import Int8Codec
from sparkdl.comm.compression.onebit import OneBitCodec
from sparkdl.comm.compression.powersgd import PowerSGD
from sparkdl.comm.compression.topk import TopKCompression
from sparkdl.comm.compression.twobit import CountCodec, TwoBitCodec

COLUMNS = 1024
SIZES = {4: 1024, 100: 25 * 1024}
"""MB -> rows."""


@dataclass
class Work:
    """What is measured of one compression."""

    encode: Callable[[], object]
    decode: Callable[[], object]
    ratio: float
    """Bytes of the values over those of the message."""
    prepare: Callable[[], object] = lambda: None
    """What comes before each turn, and is not measured."""


def main() -> None:
    """Measure, several times in turn."""
    options = common.arguments(11)
    torch.set_num_threads(1)
    found = Measurements()
    contenders = {size: make_all(rows) for size, rows in SIZES.items()}
    copies = {size: copy(rows) for size, rows in SIZES.items()}
    for _ in range(options.runs):
        common.wait_until_idle(options.patience)
        for size, works in contenders.items():
            found.add(f"{size} MB copy GB/s", measure(size, copies[size])[0])
            for name, work in works.items():
                encode, decode = measure(size, work)
                found.add(f"{size} MB {name} encode GB/s", encode)
                found.add(f"{size} MB {name} decode GB/s", decode)
    memory = f"{max(SIZES)} MB copy GB/s"
    for size, works in contenders.items():
        for name, work in works.items():
            found.add(f"{size} MB {name}: values / message", work.ratio)
            for what in ("encode", "decode"):
                rate = f"{size} MB {name} {what} GB/s"
                found.ratio(f"{size} MB {name} {what} / copy", rate, f"{size} MB copy GB/s")
                if size < max(SIZES):
                    found.ratio(f"{size} MB {name} {what} / memory", rate, memory)
    found.report("compression", options)


def measure(size: int, work: Work) -> tuple[float, float]:
    """GB/s of values, encoding and decoding; small buffers take several turns."""
    repeats = max(SIZES) // size
    encode = decode = 0.0
    for _ in range(repeats):
        work.prepare()
        encode += seconds(work.encode)
        decode += seconds(work.decode)
    gigabytes = SIZES[size] * COLUMNS * 4 * repeats / 1e9
    return gigabytes / encode, gigabytes / decode


def seconds(work: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    started = time.thread_time()
    work()
    return time.thread_time() - started


def copy(rows: int) -> Work:
    """The plain copy: memory to memory that is there already."""
    source, target = torch.randn(rows * COLUMNS), torch.zeros(rows * COLUMNS)
    return Work(lambda: target.copy_(source), lambda: None, 1)


def make_all(rows: int) -> dict[str, Work]:
    """The compressions, each in the state that it is in after many steps."""
    values = torch.randn(rows * COLUMNS)
    counts = torch.randint(-2, 3, values.shape).float()
    out = torch.zeros_like(values)
    shapes = [(rows, COLUMNS)]
    found = {name: cast(values, out, getattr(torch, name)) for name in ("float16", "bfloat16")}
    for name, codec in (
        ("int8", Int8Codec.of_slices(shapes, 1, torch.float32)[0]),
        ("onebit", OneBitCodec.of_slices(shapes, 1, torch.float32)[0]),
        ("twobit", TwoBitCodec(len(values), 2.0, 1)),
    ):
        found[name] = dense(codec, values, out)
    found["twobit's sums"] = dense(CountCodec(len(values), 0.5, 2), counts, out)
    # A value of the mean size 0.8 reaches the threshold once in this many steps.
    for name, steps, is_dense in (("threshold, 1 %", 100, False), ("threshold, 20 %", 5, True)):
        found[name] = sparse(values, out, 0.8 * steps, is_dense)
    for name, compression in (
        ("topk, 0.1 %", TopKCompression(density=0.001)),
        ("topk, 1 %", TopKCompression(density=0.01)),
        ("topk, 0.1 %, momentum", TopKCompression(density=0.001, momentum=0.9)),
        ("powersgd, rank 2", PowerSGD(rank=2)),
    ):
        found[name] = whole(compression, values, rows)
    return found


def cast(values: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> Work:
    """A change of type."""
    small = values.to(dtype)
    return Work(lambda: small.copy_(values), lambda: out.copy_(small), 2)


def dense(codec: Codec, values: torch.Tensor, out: torch.Tensor) -> Work:
    """A codec of the exchange in two stages."""
    residual = torch.zeros_like(values)
    message = torch.zeros(codec.message_bytes, dtype=torch.uint8)
    for _ in range(3):
        codec.encode(values, residual, message)
    return Work(
        lambda: codec.encode(values, residual, message),
        lambda: codec.decode_add(message, out),
        values.nbytes / len(message),
    )


def sparse(values: torch.Tensor, out: torch.Tensor, limit: float, is_dense: bool) -> Work:
    """Messages of what reaches a threshold; the residual begins as it is in the long run."""
    residual = torch.rand_like(values).mul_(limit).copysign_(values)
    message = threshold.encode(values, 1, residual, limit, is_dense)
    return Work(
        lambda: threshold.encode(values, 1, residual, limit, is_dense),
        lambda: threshold.decode_add(message, 1, out),
        values.nbytes / len(message),
    )


def whole(compression: Compression, values: torch.Tensor, rows: int) -> Work:
    """Everything before the first collective, and everything after it."""
    compressor = compression.make([values.view(rows, COLUMNS)], LocalCommunicator())
    flat = values.clone()
    pending = []
    sent = compression.wire_bytes([(rows, COLUMNS)], 4, 2)
    assert sent is not None
    return Work(
        lambda: pending.append(compressor.start(flat)),
        lambda: pending.pop().wait(),
        values.nbytes / sent,
        lambda: flat.copy_(values),  # what was decoded is there
    )


if __name__ == "__main__":
    main()
