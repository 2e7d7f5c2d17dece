from __future__ import annotations

import math

import pytest
import torch

from sparkdl.comm.compression.topk import WIDE, Peaks, num_largest


def found(values: torch.Tensor, k: int, block: int = 10 * WIDE) -> list[int]:
    peaks = Peaks(values, k, torch.empty(min(block, len(values)), dtype=values.dtype))
    for start in range(0, len(values), block):
        peaks.add(start, min(start + block, len(values)))
    return sorted(peaks.largest().tolist())


@pytest.mark.parametrize("numel", [1, 31, 32, 33, 1000, 5000, 64 * 200 + 17])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.4])
def test_as_sorting_would(numel: int, density: float) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    k = num_largest(numel, density)
    expected = values.abs().argsort(descending=True)[:k]
    assert found(values, k) == sorted(expected.tolist())


@pytest.mark.parametrize("k", [3, 50])
@pytest.mark.parametrize("at", [0, 700, 1999])
def test_nan_is_largest(at: int, k: int) -> None:
    values = torch.randn(2000, generator=torch.Generator().manual_seed(0))
    values[at] = math.nan
    assert at in found(values, k)
    values[:] = math.nan
    assert len(set(found(values, k))) == k


def test_equal_values_are_found_once_each() -> None:
    for k in (7, 100):
        assert len(set(found(torch.zeros(5000), k))) == k
        assert len(set(found(torch.ones(5000), k))) == k


def test_numbers() -> None:
    assert [num_largest(n, 0.01) for n in (1, 100, 250, 1000)] == [1, 1, 2, 10]
