"""Image files become rows: encoded bytes, or Spark's image struct. Executors do this."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.cli.job_files.prepare_file import QUALITY, ImageSection
from sparkdl.data.images import BadImage, in_mode, opened, require_pillow

STRUCT = pa.struct(
    [
        ("origin", pa.string()),
        ("height", pa.int32()),
        ("width", pa.int32()),
        ("nChannels", pa.int32()),
        ("mode", pa.int32()),
        ("data", pa.binary()),
    ]
)
"""Spark's image struct; ``mode`` is OpenCV's number for the type of its pixels."""
_OPENCV = {1: 0, 3: 16, 4: 24}
"""Channels -> number of 8-bit pixels of that many."""
_FLUSH_BYTES = 32 << 20
"""Rows are handed to Spark when their images reach this size."""
_BYTES_OF_MODE = {"L": 1, "RGB": 3, "RGBA": 4}


def arrow_type(options: ImageSection) -> pa.DataType:
    """Type of the column ``image``."""
    return STRUCT if options.encoding == "struct" else pa.binary()


def convert(data: bytes, options: ImageSection, origin: str = "") -> Any:
    """The column ``image`` for a file's bytes, a struct with its ``origin``; raises BadImage."""
    with opened(data) as image:
        if options.encoding == "file":
            image.load()  # to the last byte: a truncated file has a sound header
            in_mode(image, "RGB")
            return data
        from PIL import ImageOps

        # Turned as its EXIF data say, which encoding anew leaves out.
        image = in_mode(ImageOps.exif_transpose(image), options.mode or "RGB")
        size = _size(image.width, image.height, options)
        if size != image.size:
            image = image.resize(size, require_pillow().Resampling.BILINEAR)
        if options.encoding == "struct":
            return _struct(image, origin)
        buffer = io.BytesIO()
        if options.encoding == "jpeg":
            image.save(buffer, "JPEG", quality=options.quality or QUALITY)
        else:
            image.save(buffer, "PNG")
        return buffer.getvalue()


def reason(data: bytes, options: ImageSection) -> str:
    """Why a file holds no image that can be used."""
    try:
        convert(data, options)
    except BadImage as error:
        return str(error)
    return "could not be read at first, but could later; run again"


def _size(width: int, height: int, options: ImageSection) -> tuple[int, int]:
    if options.size is not None:
        return options.size[1], options.size[0]
    if options.shorter_side is None:
        return width, height
    # Half a pixel is rounded up, in whole numbers: equal on every machine.
    shorter, longer = min(width, height), max(width, height)
    other = (2 * longer * options.shorter_side + shorter) // (2 * shorter)
    return (options.shorter_side, other) if width <= height else (other, options.shorter_side)


def _struct(image: Any, origin: str) -> dict[str, Any]:
    pixels = np.asarray(image, dtype=np.uint8)
    channels = _BYTES_OF_MODE[image.mode]
    if channels > 1:  # OpenCV's order: blue, green, red
        pixels = pixels[:, :, [2, 1, 0, 3][:channels]]
    return {
        "origin": origin,
        "height": image.height,
        "width": image.width,
        "nChannels": channels,
        "mode": _OPENCV[channels],
        "data": pixels.tobytes(),
    }


def convert_rows(
    batches: Iterator[pa.RecordBatch], options: ImageSection
) -> Iterator[pa.RecordBatch]:
    """Turn rows with ``content`` and ``path`` into rows with ``image``; leave bad ones out."""
    for batch in batches:
        images: list[Any] = []
        rows: list[int] = []
        num_bytes = 0
        for row, (data, path) in enumerate(zip(batch["content"], batch["path"], strict=True)):
            try:
                images.append(convert(data.as_py(), options, path.as_py()))
            except BadImage:
                continue
            rows.append(row)
            made = images[-1]
            num_bytes += len(made["data"] if isinstance(made, dict) else made)
            if num_bytes >= _FLUSH_BYTES:
                yield _made(batch, rows, images, options)
                images, rows, num_bytes = [], [], 0
        if rows:
            yield _made(batch, rows, images, options)


def _made(
    batch: pa.RecordBatch, rows: list[int], images: list[Any], options: ImageSection
) -> pa.RecordBatch:
    kept = batch.drop_columns(["content"]).take(pa.array(rows, pa.int64()))
    arrays = [pa.array(images, arrow_type(options)), *kept.columns]
    return pa.RecordBatch.from_arrays(arrays, names=["image", *kept.schema.names])


def explain_rows(
    batches: Iterator[pa.RecordBatch], options: ImageSection
) -> Iterator[pa.RecordBatch]:
    """Give rows with ``path`` and ``reason``, why it cannot be used, for files."""
    for batch in batches:
        reasons = [reason(data.as_py(), options) for data in batch["content"]]
        arrays = [batch["path"], pa.array(reasons, pa.string())]
        yield pa.RecordBatch.from_arrays(arrays, names=["path", "reason"])
