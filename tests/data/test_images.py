"""Do images become tensors of the right pixels, and are bad ones reported?"""

from __future__ import annotations

import io
import struct
import tracemalloc
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image as pillow

from sparkdl.data.arrow_arrays import NotUniform
from sparkdl.data.images import decode_rows, read_images
from sparkdl.inputs import Image

RGB = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)


def read(*arguments: Any, **options: Any) -> Any:
    rows, _, _ = read_images(*arguments, **options)
    return rows


def png(pixels: np.ndarray, form: str = "PNG") -> bytes:
    file = io.BytesIO()
    pillow.fromarray(pixels).save(file, form)
    return file.getvalue()


def spark_image(pixels: np.ndarray, **changes: Any) -> dict[str, Any]:
    height, width, channels = pixels.shape
    order = [2, 1, 0, 3][:channels] if channels > 1 else [0]
    return {
        "origin": "file:/a.png", "height": height, "width": width, "nChannels": channels,
        "mode": 16, "data": pixels[:, :, order].tobytes(), **changes,
    }  # fmt: skip


def refused(array: pa.Array, specification: Image) -> str:
    with pytest.raises(NotUniform) as caught:
        read(array, specification, where=" of partition 1", first_row=5)
    assert caught.value.findings is not None
    return caught.value.findings.message("photo")


def test_encoded_and_spark_images_give_the_same_pixels() -> None:
    wanted = RGB.transpose(2, 0, 1)[None]
    assert (read(pa.array([png(RGB)]), Image("x")) == wanted).all()
    assert (read(pa.array([spark_image(RGB)]), Image("x")) == wanted).all()


def test_channels_and_sizes_are_converted() -> None:
    for array in (pa.array([png(RGB)]), pa.array([spark_image(RGB)])):
        grey = read(array, Image("x", size=(5, 3), channels=1))
        assert grey.shape == (1, 1, 5, 3) and grey.dtype == np.uint8
    clear = np.dstack([RGB, np.full((2, 4), 9, np.uint8)])
    both = [png(clear)], [spark_image(clear)]
    found = [read(pa.array(rows), Image("x", channels=4)) for rows in both]
    assert (found[0] == found[1]).all() and (found[0][0, 3] == 9).all()


def test_kept_images_are_decoded_later() -> None:
    array = pa.array([png(RGB), png(RGB[::-1])])
    rows = read(array, Image("x", decode="batch"))
    assert rows.shape == (3, 2, 4) and rows.num_bytes == sum(len(v.as_py()) for v in array)
    later = decode_rows(rows[1:], Image("x", decode="batch"), (3, 2, 4))
    assert (later == read(array, Image("x"))[1:]).all()


def test_bad_images_are_counted_by_cause() -> None:
    whole = png(RGB)
    said = refused(pa.array([whole, b"no image", None, whole[:50], b"nor this"]), Image("x"))
    assert 'column "photo" has 2 bad rows: cannot be decoded (Unidentified' in said
    assert "(first: row 6 of partition 1)" in said
    assert "1 null (first: row 7 of partition 1)" in said
    said = refused(pa.array([png(RGB), png(RGB[:1])]), Image("x"))
    assert "most rows have shape (3, 2, 4), but 1 do not" in said


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_grey_of_16_bits_keeps_its_upper_8(form: str) -> None:
    deep = np.array([[0, 255, 256, 30000, 65535]], dtype=np.uint16)
    for channels in (1, 3):
        found = read(pa.array([png(deep, form)]), Image("x", channels=channels))
        assert found[0, -1].tolist() == [[0, 0, 1, 117, 255]]


@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_pixels_of_unknown_range_are_refused(dtype: str) -> None:
    said = refused(pa.array([png(RGB), png(RGB[..., 0].astype(dtype), "TIFF")]), Image("x"))
    assert "1 bad row: pixels of 32 bits (mode " in said
    assert "whose range is not known" in said


@pytest.mark.parametrize("error", [struct.error, KeyError, TypeError, ZeroDivisionError])
def test_whatever_a_decoder_raises_is_a_bad_image(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fuzzed TIFF, WebP and GIF files have given all of these."""

    def decode(*_: Any) -> Any:
        raise error("what it ran into")

    monkeypatch.setattr(pillow, "open", decode)
    said = refused(pa.array([b"a file"]), Image("x"))
    assert f"1 bad row: cannot be decoded ({error.__name__}: " in said


def test_a_lack_of_memory_is_not_the_images_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(pillow, "open", decode)
    with pytest.raises(MemoryError):
        read(pa.array([b"a file"]), Image("x"))


@pytest.mark.parametrize("field", ["height", "width", "nChannels"])
def test_spark_images_without_a_size_are_bad(field: str) -> None:
    bad = spark_image(RGB, **{field: None})
    said = refused(pa.array([spark_image(RGB), bad]), Image("x"))
    assert "1 bad row: no image that Spark could read" in said


def test_images_that_spark_could_not_read_tell_their_files() -> None:
    bad = spark_image(RGB, height=-1, width=-1, nChannels=-1, data=b"")
    said = refused(pa.array([spark_image(RGB), bad]), Image("x"))
    assert (
        "bad row: no image that Spark could read (first: row 6 of partition 1, file:/a.png)" in said
    )
    said = refused(pa.array([spark_image(RGB, data=b"123")]), Image("x"))
    assert "not as many bytes as height, width and channels say" in said


def huge(width: int, height: int) -> bytes:
    """A picture of 35 bytes that is decoded to as many pixels as it says."""
    size = struct.pack("<HH", width, height)
    colours, pixel = b"\x80\x00\x00" + b"\x00\x00\x00\xff\xff\xff", b"\x02\x02\x44\x01\x00"
    return b"GIF89a" + size + colours + b"," + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + pixel + b";"


@pytest.mark.parametrize("first", [[png(RGB)], []])
def test_pictures_that_say_to_be_huge_are_not_held_together(first: list[bytes]) -> None:
    """Those that are refused, since they differ, and those that are kept as they are."""
    array = pa.array([*first, *[huge(2000, 2000)] * 6], pa.binary())
    tracemalloc.start()
    try:
        if first:
            assert "most rows have shape (3, 2000, 2000), but 1 do not" in refused(
                array, Image("x")
            )
        else:
            assert len(read(array, Image("x", decode="batch"))) == 6
        assert tracemalloc.get_traced_memory()[1] < 5 * 3 * 2000**2
    finally:
        tracemalloc.stop()


def test_pictures_beyond_pillows_limit_and_programs_are_bad() -> None:
    postscript = (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 2 2\n%%EndComments\nshowpage\n%%EOF\n"
    )
    for data, why in ((huge(65535, 65535), "DecompressionBomb"), (postscript, "is PostScript")):
        assert why in refused(pa.array([data]), Image("x", size=(2, 2)))
