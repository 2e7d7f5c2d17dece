from __future__ import annotations

import os
import socket

import pytest
import torch

from sparkdl.runtime.hardware import hardware


def test_what_this_process_computes_on() -> None:
    found = hardware(torch.device("cpu"), 3)
    assert found["host"] == socket.gethostname()
    assert 1 <= found["cores"] <= (os.cpu_count() or 1)
    assert found["memory_bytes"] > 2**20
    assert (found["device"], found["threads"], found["process"]) == ("cpu", 3, os.getpid())
    assert found["cpu"]
    assert "gpu" not in found


def test_the_driver_has_no_device() -> None:
    assert not {"device", "threads"} & set(hardware())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_named() -> None:
    found = hardware(torch.device("cuda", 0))
    assert found["gpu"]
    assert found["gpu_memory_bytes"] > 2**30
