"""Spark's GPU addresses become CUDA's indices."""

from __future__ import annotations

import pytest
import torch

from sparkdl.errors import ClusterError
from sparkdl.runtime.hardware import choose_device, device_index


@pytest.mark.parametrize(
    ("addresses", "visible", "num_devices", "local_rank", "index"),
    [
        ((), None, 4, 1, 1),
        ((), None, 2, 3, 1),
        (("2",), None, 4, 0, 2),
        (("3",), "1,3", 2, 0, 1),
        (("3",), " 3 , 1 ", 2, 1, 0),
        (("1",), "5,6", 2, 0, 1),
        (("GPU-b",), "GPU-a,GPU-b", 2, 0, 1),
        (("1", "0"), None, 2, 0, 1),
    ],
)
def test_index(
    addresses: tuple[str, ...], visible: str | None, num_devices: int, local_rank: int, index: int
) -> None:
    assert device_index(addresses, visible, num_devices, local_rank) == index


@pytest.mark.parametrize(
    ("addresses", "visible"), [(("4",), None), (("GPU-z",), "GPU-a"), (("7",), "0,1")]
)
def test_an_address_that_cuda_does_not_show(addresses: tuple[str, ...], visible: str) -> None:
    with pytest.raises(ClusterError, match=f"assigned GPU '{addresses[0]}'.*CUDA_VISIBLE_DEVICES"):
        device_index(addresses, visible, 2, 0)


def test_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", ("0",), 0, {}) == torch.device("cpu")
    assert choose_device("cpu", (), 0, {}) == torch.device("cpu")
    with pytest.raises(ClusterError, match='device="cuda", but torch finds no CUDA device'):
        choose_device("cuda", ("0",), 0, {})


def test_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto", ("1",), 0, {}) == torch.device("cuda", 1)
    assert choose_device("cuda", ("7",), 0, {"CUDA_VISIBLE_DEVICES": "6,7"}) == torch.device(
        "cuda", 1
    )
    assert choose_device("auto", (), 1, {}) == torch.device("cuda", 1)
    assert choose_device("cpu", ("1",), 0, {}) == torch.device("cpu")
