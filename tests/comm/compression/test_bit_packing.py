from __future__ import annotations

import numpy as np
import pytest
import torch

from sparkdl.comm.compression.bit_packing import pack, packed_size, unpack


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_codes_come_back(bits: int) -> None:
    low, high = (0, 2) if bits == 1 else (-(1 << bits - 1), 1 << bits - 1)
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(low, high, (4096,), dtype=torch.int8, generator=generator)
    packed = torch.empty(packed_size(4096, bits), dtype=torch.uint8)
    pack(codes.clone(), bits, packed)
    found = torch.empty_like(codes)
    unpack(packed, bits, found)
    assert torch.equal(found, codes)


def test_the_first_code_has_the_lowest_bits() -> None:
    bits = torch.tensor([1, 0, 0, 0, 1, 1, 0, 1] * 3, dtype=torch.int8)
    packed = torch.empty(3, dtype=torch.uint8)
    pack(bits.clone(), 1, packed)
    assert packed.numpy().tolist() == np.packbits(bits.numpy(), bitorder="little").tolist()
    pack(torch.tensor([1, -1, 0, 1], dtype=torch.int8), 2, packed[:1])
    assert packed[0].item() == 0b01_00_11_01
    pack(torch.tensor([-7, 6], dtype=torch.int8), 4, packed[:1])
    assert packed[0].item() == 0b0110_1001


def test_sizes_are_rounded_up() -> None:
    assert [packed_size(n, 1) for n in (0, 1, 8, 9)] == [0, 1, 1, 2]
    assert [packed_size(n, 2) for n in (4, 5)] == [1, 2]
