from __future__ import annotations

import pytest
import torch

from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.comm.compression.cast import BF16Compression, FP16Compression
from tests.comm.compression.ranks import Threads, random_share


@pytest.mark.parametrize(
    "compression, dtype", [(FP16Compression(), torch.float16), (BF16Compression(), torch.bfloat16)]
)
def test_shares_are_rounded_and_summed_in_the_small_type(compression, dtype) -> None:  # type: ignore[no-untyped-def]
    found = Threads(2).run(exchanged, compression)
    shares = [share.to(dtype) for _, share in found]
    for estimate, _ in found:
        assert torch.equal(estimate, (shares[0] + shares[1]).float())


def exchanged(comm, compression):  # type: ignore[no-untyped-def]
    share = random_share(comm, 0, 50, torch.float32)
    flat = share.clone()
    compression.make([flat], comm).start(flat).wait()
    return flat, share


def test_weights_of_a_small_type_can_be_cast_too() -> None:
    flat = torch.tensor([1.0, 3.0], dtype=torch.bfloat16)
    FP16Compression().make([flat], LocalCommunicator()).start(flat).wait()
    assert flat.tolist() == [1.0, 3.0] and flat.dtype is torch.bfloat16


def test_bytes_are_those_of_an_all_reduce() -> None:
    assert BF16Compression().wire_bytes([(10, 10), (3,)], 4, 4) == 2 * 3 * 206 // 4
