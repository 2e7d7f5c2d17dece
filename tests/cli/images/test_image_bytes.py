from __future__ import annotations

import io
import re
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.cli.images.image_bytes import arrow_type, convert, reason
from sparkdl.cli.job_files.prepare_file import ImageSection
from sparkdl.data.images import BadImage, read_images
from sparkdl.inputs import Image

pillow = pytest.importorskip("PIL.Image")

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 4, 3), dtype=np.uint8)


def encoded(pixels: np.ndarray = PIXELS, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    pillow.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


def pixels_of(value: Any, options: ImageSection, channels: int = 3) -> np.ndarray:
    """As training reads them: ``(channels, height, width)``."""
    array = pa.array([value], arrow_type(options))
    images, _, _ = read_images(array, Image("x", channels=channels))
    return np.asarray(images)[0]


def test_a_files_bytes_are_kept() -> None:
    assert convert(encoded(), ImageSection()) == encoded()


@pytest.mark.parametrize("encoding", ["png", "struct"])
def test_pixels_survive_what_loses_none(encoding: Any) -> None:
    options = ImageSection(encoding=encoding)
    value = convert(encoded(), options, "a/b.png")
    assert np.array_equal(pixels_of(value, options), PIXELS.transpose(2, 0, 1))
    if encoding == "struct":
        assert (value["origin"], value["height"], value["width"]) == ("a/b.png", 6, 4)
        assert (value["nChannels"], value["mode"]) == (3, 16)


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"size": (5, 7)}, (5, 7)),
        ({"shorter_side": 8}, (12, 8)),
        ({"shorter_side": 3}, (5, 3)),
        ({"shorter_side": 4}, (6, 4)),
    ],
)
def test_sizes(options: dict[str, Any], size: tuple[int, int]) -> None:
    section = ImageSection(encoding="png", **options)
    assert pixels_of(convert(encoded(), section), section).shape == (3, *size)
    turned = encoded(PIXELS.transpose(1, 0, 2).copy())
    if "shorter_side" in options:
        assert pixels_of(convert(turned, section), section).shape == (3, *size[::-1])


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3), ("RGBA", 4)])
def test_modes(mode: Any, channels: int) -> None:
    for encoding in ("png", "struct"):
        options = ImageSection(encoding=encoding, mode=mode)  # type: ignore[arg-type]
        expected = np.asarray(pillow.fromarray(PIXELS).convert(mode)).reshape(6, 4, channels)
        found = pixels_of(convert(encoded(), options), options, channels)
        assert np.array_equal(found, expected.transpose(2, 0, 1))


@pytest.mark.parametrize("encoding", ["png", "struct"])
def test_grey_of_16_bits_keeps_its_upper_8(encoding: Any) -> None:
    deep = PIXELS[..., 0].astype("uint16") * 256 + 200
    options = ImageSection(encoding=encoding, mode="L")
    assert (pixels_of(convert(encoded(deep), options), options, 1)[0] == PIXELS[..., 0]).all()
    assert convert(encoded(deep), ImageSection()) == encoded(deep)


def test_jpeg_has_the_quality_that_was_asked_for() -> None:
    good, usual, poor = (
        len(convert(encoded(), ImageSection(encoding="jpeg", quality=q))) for q in (95, None, 5)
    )
    assert good == usual > poor


def test_images_are_turned_upright_before_their_exif_data_go() -> None:
    exif = pillow.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    file = encoded(kind="PNG", exif=exif)
    options = ImageSection(encoding="png")
    assert pixels_of(convert(file, options), options).shape == (3, 4, 6)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "cannot be decoded .UnidentifiedImageError"),
        (b"no image", "cannot be decoded .UnidentifiedImageError"),
        (encoded()[:-30], "cannot be decoded"),
        (encoded(PIXELS, "JPEG")[:-200], "cannot be decoded .OSError"),
        (encoded(PIXELS[..., 0].astype("float32"), "TIFF"), "^pixels of 32 bits .mode F."),
    ],
)
@pytest.mark.parametrize("encoding", ["file", "struct"])
def test_bad_files_are_told_with_their_reason(data: bytes, why: str, encoding: Any) -> None:
    with pytest.raises(BadImage):
        convert(data, ImageSection(encoding=encoding))
    assert re.search(why, reason(data, ImageSection(encoding=encoding)))
