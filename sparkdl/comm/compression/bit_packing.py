"""Small whole numbers as bits, several to a byte, and back.

The codes are int8. The eight (four, two) codes that share a byte are read as one int64 (int32,
int16) and multiplied by a number that moves each code's low bits to its place in the highest
byte; other products of the multiplication do not meet there. All steps are torch's own vector
operations, on any device. Like nearly all of today's machines, they are little-endian.
"""

from __future__ import annotations

import functools

import torch

_WORDS = {1: torch.int64, 2: torch.int32, 4: torch.int16}
"""Bits per code -> a number as wide as the codes of one byte."""


def packed_size(num_codes: int, bits: int) -> int:
    """Bytes that ``num_codes`` codes of ``bits`` bits take."""
    return -(-num_codes * bits // 8)


def pack(codes: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    """Write the low ``bits`` bits of each code; single bits must be 0 or 1.

    Args:
        codes: int8, ``(num_codes,)``, a multiple of ``8 / bits`` of them, contiguous, at an address
            that is a multiple of 8; overwritten.
        bits: 1, 2 or 4.
        out: uint8, ``(num_codes * bits / 8,)``.
    """
    mask, factor, top = _numbers(bits)
    words = codes.view(_WORDS[bits])
    if bits > 1:
        words.bitwise_and_(mask)
    words.mul_(factor).bitwise_right_shift_(top)
    out.copy_(words)  # keeps the lowest byte of each word


def unpack(packed: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    """Read codes as numbers with a sign, but single bits as 0 and 1.

    Args:
        packed: uint8, ``(num_codes * bits / 8,)``.
        bits: 1, 2 or 4.
        out: int8, as ``codes`` of `pack`.
    """
    table = _table(bits, packed.device)
    torch.index_select(table, 0, packed.to(torch.int32), out=out.view(_WORDS[bits]))


@functools.cache
def _numbers(bits: int) -> tuple[int, int, int]:
    """What `pack` masks and multiplies words with, and where the highest byte begins."""
    word, places = _WORDS[bits], range(8 // bits)
    top = 8 * (len(places) - 1)
    mask = sum(((1 << bits) - 1) << 8 * i for i in places)
    factor = sum(1 << top - (8 - bits) * i for i in places)
    return _signed(mask, word), _signed(factor, word), top


@functools.cache
def _table(bits: int, device: torch.device) -> torch.Tensor:
    """For each byte its codes, as one word."""
    shifts = torch.arange(0, 8, bits)
    codes = (torch.arange(256).unsqueeze(1) >> shifts) & ((1 << bits) - 1)
    if bits > 1:
        codes = torch.where(codes >= 1 << bits - 1, codes - (1 << bits), codes)
    return codes.to(torch.int8).contiguous().view(_WORDS[bits]).flatten().to(device)


def _signed(number: int, word: torch.dtype) -> int:
    """The number of the same bits that fits into ``word``."""
    size = torch.iinfo(word).bits
    return number - (1 << size) if number >> size - 1 & 1 else number
