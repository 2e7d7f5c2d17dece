"""Images in a column as uint8 tensors, and which of them are bad.

Channels first, red, green, blue. Pillow decodes and scales; Spark's image structs that need no
scaling are only transposed.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.data.arrow_arrays import Findings, NotUniform
from sparkdl.data.ragged import Array, Ragged, offsets_of
from sparkdl.errors import ConfigError
from sparkdl.inputs import Image

_BYTES_LEFT = re.compile(r" \(\d+ bytes not processed\)")
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""Channels -> Pillow's name."""


class BadImage(ValueError):
    """An image that cannot be used; says why."""


def read_images(
    array: pa.Array,
    specification: Image,
    *,
    skip_bad: bool = False,
    where: str = "",
    first_row: int = 0,
) -> tuple[Array | Ragged, Array, Findings]:
    """Decode a column of encoded images, or of Spark's image structs.

    Those that are decoded for each batch are kept as they are, after decoding each once to see that
    it can be.

    Args:
        array: the column.
        specification: what the images shall become.
        skip_bad: leave out images that are null or cannot be decoded.
        where: suffix of a row's description.
        first_row: number of the first row.

    Returns:
        The good rows, uint8 ``(rows, channels, height, width)`` or encoded; which these are, bool
        ``(rows,)``; what is wrong with the others.

    Raises:
        NotUniform: images differ in size, or are bad and not to be left out; says which.
    """
    rows: list[Array] = []
    is_kept_encoded = specification.num_parts > 0
    kept = np.zeros(len(array), dtype=bool)
    findings = Findings()
    for row, value in enumerate(array):
        place = f"row {first_row + row}{where}"
        if not value.is_valid:
            findings.note_null(place)
            continue
        try:
            image = _image(value, specification)
        except BadImage as error:
            is_spark = pa.types.is_struct(value.type) and "origin" in value
            origin = value["origin"].as_py() if is_spark else None
            findings.note_cause(str(error), ", ".join(filter(None, [place, origin])))
            continue
        kept[row] = True
        findings.note_shape(image.shape, place)
        if len(findings.shapes) > 1:
            rows = []  # an error: a few bytes may be a very large image
        elif not is_kept_encoded or not rows:
            rows.append(image)
    sizes = Findings(shapes=findings.shapes, first_of_shape=findings.first_of_shape)
    refused = sizes if skip_bad else findings
    if refused:
        raise NotUniform(refused)
    findings.shapes = Counter()
    if is_kept_encoded:
        shape = rows[0].shape if rows else None
        return _as_they_are(array.filter(pa.array(kept)), shape), kept, findings
    none = np.empty((0, specification.channels, *(specification.size or (0, 0))), dtype=np.uint8)
    return np.stack(rows) if rows else none, kept, findings


def _as_they_are(array: pa.Array, shape: tuple[int, ...] | None) -> Ragged:
    data = [np.frombuffer(value.as_buffer(), dtype=np.uint8) for value in array]
    lengths = np.array([len(part) for part in data], dtype=np.int64)
    flat = np.concatenate(data) if data else np.empty(0, dtype=np.uint8)
    return Ragged((flat,), offsets_of(lengths), shape)


def decode_rows(rows: Ragged, specification: Image, shape: tuple[int, ...]) -> Array:
    """Decode the images that `read_images` has kept encoded: uint8 ``(rows, *shape)``."""
    (flat,) = rows.parts
    images = np.empty((len(rows), *shape), dtype=np.uint8)
    bounds = rows.offsets.tolist()
    for row, (start, stop) in enumerate(pairwise(bounds)):
        images[row] = _decode(flat[start:stop].data, specification)
    return images


def require_pillow() -> Any:
    """Pillow's module ``Image``.

    Raises:
        ConfigError: Pillow is not installed.
    """
    try:
        from PIL import Image as pillow
    except ImportError as error:
        raise ConfigError(
            "images need Pillow: run 'pip install pillow' where the driver and the executors run"
        ) from error
    return pillow


def _image(value: pa.Scalar, specification: Image) -> Array:
    """Pixels of an encoded image, or of one of Spark's structs."""
    if not pa.types.is_struct(value.type):
        return _decode(value.as_buffer(), specification)
    height, width, channels = (value[name].as_py() for name in ("height", "width", "nChannels"))
    data = value["data"].as_buffer() if value["data"].is_valid else b""
    flat = np.frombuffer(data, dtype=np.uint8)
    if not flat.size or None in (height, width, channels) or height < 1:
        raise BadImage("no image that Spark could read")
    if channels not in _MODES or flat.size != height * width * channels:
        raise BadImage("not as many bytes as height, width and channels say")
    pixels = flat.reshape(height, width, channels)
    if channels > 1:  # OpenCV's order: blue, green, red
        pixels = pixels[:, :, [2, 1, 0, 3][:channels]]
    if channels == specification.channels and specification.size in (None, (height, width)):
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))
    pixels = np.ascontiguousarray(pixels[:, :, 0] if channels == 1 else pixels)
    return _fitted(require_pillow().fromarray(pixels), specification)


def _decode(data: Any, specification: Image) -> Array:
    with opened(data) as image:
        return _fitted(image, specification)


@contextlib.contextmanager
def opened(data: Any) -> Iterator[Any]:
    """An encoded image as Pillow's object; what is done with it inside is part of decoding it.

    Raises:
        BadImage: it cannot be decoded.
    """
    pillow = require_pillow()
    try:
        with pillow.open(io.BytesIO(data)) as image:
            if image.format == "EPS":
                raise BadImage("is PostScript, a program, which is not run; convert it")
            yield image
    except (BadImage, MemoryError):
        raise
    except Exception as error:  # Pillow raises what its code runs into: struct.error, KeyError, ...
        # Without addresses and numbers of bytes, which Pillow's messages have: equal causes count.
        text = _BYTES_LEFT.sub("", str(error).split(" <_io.")[0])
        raise BadImage(f"cannot be decoded ({type(error).__name__}: {text})") from None


def in_mode(image: Any, mode: str) -> Any:
    """The image in ``L``, ``RGB`` or ``RGBA``: of 16 bits a channel the upper 8 are kept.

    So Pillow does with colours, but not with grey, which it cuts off at 255.

    Raises:
        BadImage: its pixels are of 32 bits, of which nothing says what is white.
    """
    if image.mode in ("I", "F"):
        raise BadImage(
            f"pixels of 32 bits (mode {image.mode}), whose range is not known; store them with 8 "
            "or 16"
        )
    if image.mode.startswith("I;16"):
        grey = (np.asarray(image) >> 8).astype(np.uint8)
        image = require_pillow().fromarray(grey)
    return image if image.mode == mode else image.convert(mode)


def _fitted(image: Any, specification: Image) -> Array:
    """Pixels ``(channels, height, width)`` in the wanted channels and size."""
    image = in_mode(image, _MODES[specification.channels])
    if specification.size is not None and (image.height, image.width) != specification.size:
        height, width = specification.size
        image = image.resize((width, height), require_pillow().Resampling.BILINEAR)
    pixels = np.asarray(image, dtype=np.uint8)
    if pixels.ndim == 2:
        return pixels[None]
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))
