"""Bytes of any size in chunks: files on the channel, and results of Spark tasks."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

RESULT_COLUMNS = "rank int, kind string, seq int, payload binary"
"""The columns of results, as Spark writes a schema."""
JobResults = list[tuple[int, str, bytes]]
"""Rank, kind and payload of everything that the tasks of a job have said, chunks joined."""
CHUNK_BYTES = 8 * 2**20


def cut(data: Any) -> list[Any]:
    """The chunks of a buffer in order, of which there is at least one."""
    return [data[at : at + CHUNK_BYTES] for at in range(0, max(1, len(data)), CHUNK_BYTES)]


def gathered(pieces: Iterable[Any]) -> bytes:
    """All pieces as one, put together piece by piece.

    ``bytes.join`` would hold Python's global lock all the while: seconds for a few GiB of buffers.
    """
    buffer = io.BytesIO()
    for piece in pieces:
        buffer.write(piece)
    return buffer.getvalue()


def result_batches(rank: int, kind: str, payload: bytes) -> Iterator[pa.RecordBatch]:
    """The record batches of what a task has to say, with the columns `RESULT_COLUMNS`."""
    import pyarrow as pa  # here, since the process beside a worker has no use for it

    schema = pa.schema(
        [("rank", pa.int32()), ("kind", pa.string()), ("seq", pa.int32()), ("payload", pa.binary())]
    )
    for number, chunk in enumerate(cut(payload)):
        columns = {"rank": [rank], "kind": [kind], "seq": [number], "payload": [chunk]}
        yield pa.RecordBatch.from_pydict(columns, schema=schema)


def joined_results(rows: Iterable[Any]) -> list[tuple[int, str, bytes]]:
    """Rank, kind and payload of the results in rows, which are Spark's or dicts, in any order."""
    chunks: dict[tuple[int, str], dict[int, bytes]] = {}
    for row in rows:
        chunks.setdefault((row["rank"], row["kind"]), {})[row["seq"]] = row["payload"]
    return [(rank, kind, joined(parts)) for (rank, kind), parts in chunks.items()]


def joined(chunks: Mapping[int, bytes]) -> bytes:
    """The chunks, which have numbers, put together again."""
    return b"".join(chunks[number] for number in sorted(chunks))
