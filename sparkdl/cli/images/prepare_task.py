"""What do executors do with image files? Turn their bytes into rows, or say why they cannot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from sparkdl.cli.images.image_bytes import arrow_type, convert, reason
from sparkdl.cli.images.options import ImageSection
from sparkdl.data.images import BadImage

_FLUSH_BYTES = 32 << 20
"""Rows are handed to Spark when their images reach this size."""


@dataclass(frozen=True)
class ConvertTask:
    """Turns rows with ``content`` and ``path`` into rows with ``image``; leaves bad ones out.

    All other columns are passed on.
    """

    options: ImageSection

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Convert one partition."""
        for batch in batches:
            images: list[Any] = []
            rows: list[int] = []
            num_bytes = 0
            for row, (data, path) in enumerate(zip(batch["content"], batch["path"], strict=True)):
                try:
                    images.append(convert(data.as_py(), self.options, path.as_py()))
                except BadImage:
                    continue
                rows.append(row)
                num_bytes += _size(images[-1])
                if num_bytes >= _FLUSH_BYTES:
                    yield self._made(batch, rows, images)
                    images, rows, num_bytes = [], [], 0
            if rows:
                yield self._made(batch, rows, images)

    def _made(self, batch: pa.RecordBatch, rows: list[int], images: list[Any]) -> pa.RecordBatch:
        kept = batch.drop_columns(["content"]).take(pa.array(rows, pa.int64()))
        arrays = [pa.array(images, arrow_type(self.options)), *kept.columns]
        return pa.RecordBatch.from_arrays(arrays, names=["image", *kept.schema.names])


@dataclass(frozen=True)
class ExplainTask:
    """Says of each file, given by ``content`` and ``path``, why it cannot be used."""

    options: ImageSection

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield rows with ``path`` and ``reason``."""
        for batch in batches:
            reasons = [reason(data.as_py(), self.options) for data in batch["content"]]
            arrays = [batch["path"], pa.array(reasons, pa.string())]
            yield pa.RecordBatch.from_arrays(arrays, names=["path", "reason"])


def _size(image: Any) -> int:
    return len(image["data"] if isinstance(image, dict) else image)
