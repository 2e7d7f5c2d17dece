"""Bytes of any size in record batches of chunks: files on the channel, results of Spark tasks.

Of a file, each batch holds a chunk, and the last one a null: so half of a file is never taken for
the whole. Spark itself sees to it that no row of a result is missing.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from sparkdl.errors import CommunicationError

SCHEMA = pa.schema([("data", pa.binary())])
RESULT_COLUMNS = "rank int, kind string, seq int, payload binary"
"""The columns of results, as Spark writes a schema."""
CHUNK_BYTES = 8 * 2**20

_RESULT_SCHEMA = pa.schema(
    [("rank", pa.int32()), ("kind", pa.string()), ("seq", pa.int32()), ("payload", pa.binary())]
)


def cut(data: Any) -> list[Any]:
    """The chunks of a buffer in order, of which there is at least one."""
    return [data[at : at + CHUNK_BYTES] for at in range(0, max(1, len(data)), CHUNK_BYTES)]


def sent(parts: Iterable[Any]) -> Iterator[pa.RecordBatch]:
    """The record batches of a file, whose bytes come in any pieces."""
    for part in parts:
        for chunk in cut(memoryview(part).cast("B")):
            yield _batch(chunk)
    yield _batch(None)


def received(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Buffer]:
    """The chunks of a file; CommunicationError if its end is missing."""
    for batch in batches:
        chunk = batch.column(0)[0]
        if not chunk.is_valid:
            return
        yield chunk.as_buffer()
    raise CommunicationError("the file broke off on its way")


def gathered(pieces: Iterable[Any]) -> bytes:
    """All pieces as one, put together piece by piece.

    ``bytes.join`` would hold Python's global lock all the while: seconds for a few GiB of buffers.
    """
    buffer = io.BytesIO()
    for piece in pieces:
        buffer.write(piece)
    return buffer.getvalue()


def _batch(chunk: memoryview | None) -> pa.RecordBatch:
    return pa.record_batch([pa.array([chunk], pa.binary())], schema=SCHEMA)


def result_batches(rank: int, kind: str, payload: bytes) -> Iterator[pa.RecordBatch]:
    """The record batches of what a task has to say, with the columns `RESULT_COLUMNS`."""
    for number, chunk in enumerate(cut(payload)):
        columns = {"rank": [rank], "kind": [kind], "seq": [number], "payload": [chunk]}
        yield pa.RecordBatch.from_pydict(columns, schema=_RESULT_SCHEMA)


def joined_results(rows: Iterable[Any]) -> list[tuple[int, str, bytes]]:
    """Rank, kind and payload of the results in rows, which are Spark's or dicts, in any order."""
    chunks: dict[tuple[int, str], dict[int, bytes]] = {}
    for row in rows:
        chunks.setdefault((row["rank"], row["kind"]), {})[row["seq"]] = row["payload"]
    return [(rank, kind, joined(parts)) for (rank, kind), parts in chunks.items()]


def joined(chunks: Mapping[int, bytes]) -> bytes:
    """The chunks, which have numbers, put together again."""
    return b"".join(chunks[number] for number in sorted(chunks))
