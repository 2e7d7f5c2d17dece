"""The header of a safetensors file, accepted exactly where the format's own library accepts it.

A file is eight bytes with the length of the header, the header, which is a JSON object, and the
tensors' bytes. Each byte of these belongs to one tensor: no holes, no overlaps, nothing behind the
last one. The library checks this too, but only together with a copy of all tensors.
See https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparkdl.storage.tensor_tree import DTYPES

_MAX_HEADER_BYTES = 100_000_000
"""The library's limit."""
_SIZES = {name: dtype.itemsize for dtype, name in DTYPES.items()}
_METADATA = "__metadata__"


@dataclass(frozen=True)
class TensorEntry:
    """What the header says of a tensor."""

    dtype: str
    shape: list[int]
    begin: int
    """Of its bytes, counted from the end of the header."""
    end: int


@dataclass(frozen=True)
class Header:
    """A header that has been checked."""

    metadata: Mapping[str, str]
    tensors: Mapping[str, TensorEntry]


def parsed(data: bytes) -> tuple[Header, memoryview]:
    """The header of a file, and the bytes behind it.

    Raises:
        ValueError: the file is not one of this format.
    """
    if len(data) < 8:
        raise ValueError("it is shorter than the length of a header")
    (size,) = struct.unpack("<Q", data[:8])
    if size > min(_MAX_HEADER_BYTES, len(data) - 8):
        raise ValueError(f"its header cannot have {size} bytes")
    text = bytes(data[8 : 8 + size]).decode("utf-8")
    if not text.startswith("{"):
        raise ValueError("its header does not begin with a brace")
    try:
        header = json.loads(
            text,
            object_pairs_hook=_without_duplicates,
            parse_constant=_refuse,
            parse_float=_refuse,
            parse_int=_natural,
        )
    except RecursionError as error:
        raise ValueError("its header is too deep") from error
    metadata = header.pop(_METADATA, {})
    if type(metadata) is not dict or any(type(value) is not str for value in metadata.values()):
        raise ValueError(f"{_METADATA} is not a table of texts")
    body = memoryview(data)[8 + size :]
    tensors = {name: _entry(name, value) for name, value in header.items()}
    _require_cover(tensors, len(body))
    return Header(metadata, tensors), body


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("its header has a name twice")
    for name in found:
        name.encode("utf-8")  # half a surrogate pair is no text
    return found


def _refuse(text: str) -> Any:
    raise ValueError(f"its header has the number {text}")


def _natural(text: str) -> int:
    if text.startswith("-") or len(text) > 20:
        _refuse(text)
    return int(text)


def _entry(name: str, value: Any) -> TensorEntry:
    if type(value) is not dict or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the entry of {name!r} is malformed")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if type(dtype) is not str or dtype not in _SIZES:
        raise ValueError(f"{name!r} has the unknown dtype {dtype!r}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{name!r} has malformed sizes")
    begin, end = offsets
    if end - begin != math.prod(shape) * _SIZES[dtype]:
        raise ValueError(f"{name!r} has {end - begin} bytes, which do not fit its shape {shape}")
    return TensorEntry(dtype, shape, begin, end)


def _are_sizes(value: Any) -> bool:
    """True for a list of numbers that the library can hold."""
    return type(value) is list and all(type(one) is int and one < 1 << 64 for one in value)


def _require_cover(tensors: Mapping[str, TensorEntry], num_bytes: int) -> None:
    """Raise unless each byte of the body belongs to one tensor."""
    covered = 0
    for entry in sorted(tensors.values(), key=lambda one: (one.begin, one.end)):
        if entry.begin != covered:
            raise ValueError(f"its tensors overlap, or leave a hole, at byte {covered}")
        covered = entry.end
    if covered != num_bytes:
        raise ValueError(f"its tensors have {covered} bytes, and the file has {num_bytes}")
