"""How does a file travel in record batches, so that half of it is never taken for the whole?

Each batch holds a chunk; the last one holds a null, which says that nothing is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from sparkdl.errors import CommunicationError

SCHEMA = pa.schema([("data", pa.binary())])
_CHUNK_BYTES = 8 * 2**20


def sent(parts: Iterable[Any]) -> Iterator[pa.RecordBatch]:
    """The record batches of a file.

    Args:
        parts: its bytes, in any pieces.
    """
    for part in parts:
        view = memoryview(part).cast("B")
        for at in range(0, len(view), _CHUNK_BYTES):
            yield _batch(view[at : at + _CHUNK_BYTES])
    yield _batch(None)


def received(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Buffer]:
    """The chunks of a file.

    Raises:
        CommunicationError: its end is missing.
    """
    for batch in batches:
        chunk = batch.column(0)[0]
        if not chunk.is_valid:
            return
        yield chunk.as_buffer()
    raise CommunicationError("the file broke off on its way")


def _batch(chunk: memoryview | None) -> pa.RecordBatch:
    return pa.record_batch([pa.array([chunk], pa.binary())], schema=SCHEMA)
