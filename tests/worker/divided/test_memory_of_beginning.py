"""Neither the driver nor a rank ever has a whole model that a mesh divides, measured by the kernel.

A fresh process each, because what a process has had at most cannot be set back.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from sparkdl.comm.communicator import Communicator
from sparkdl.config import CUSTOM
from sparkdl.data.plan import Column
from sparkdl.mesh import Mesh
from sparkdl.serialization.travel.packed_module import PackedModule, pack
from sparkdl.sync.divided.dividing import divide
from sparkdl.sync.divided.mesh_ranks import MeshRanks
from sparkdl.worker.divided.sent_weights import MadeWeights
from tests.gang import started_gang

pytestmark = [pytest.mark.gang, pytest.mark.slow, pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the kernel does not tell a process's memory"
)]  # fmt: skip

WIDTH, DEPTH, TINY = 2048, 12, 8
TENSOR = WIDTH * WIDTH * 4
WHOLE = DEPTH * TENSOR
CONSTANT = 12 << 20
"""What a process may take besides, such as for code that it has not run before."""
LAYOUT = {f"{number}": ("columns", "rows")[number % 2] for number in range(DEPTH)}


class Net(nn.Sequential):
    """Layers of 16 MiB, initialized in several ways."""

    def __init__(self, width: int = WIDTH) -> None:
        layers = [nn.Linear(width, width) for _ in range(DEPTH)]
        nn.init.trunc_normal_(layers[1].weight, std=0.02)
        nn.init.xavier_normal_(layers[2].weight)
        super().__init__(*layers)


def tiny() -> Net:
    return Net(TINY)


def kib(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def extra_bytes(before: int) -> int:
    """What the process has had at most, beyond what it had ``before``."""
    return (kib("VmHWM") - before) << 10


def packed_by_driver(comm: Communicator, factories: list[Any]) -> tuple[PackedModule, int]:
    """What the driver does until workers have the module, with each factory; the bytes it took."""
    from sparkdl.spark.cluster.cluster_info import ClusterInfo
    from sparkdl.spark.cluster.slots import Slots
    from sparkdl.spark.fit.check_request import check_values
    from sparkdl.spark.fit.check_rows import check_rows
    from sparkdl.spark.run.resume import run_key
    from tests.spark.fit.requests import request

    before = 0
    for factory in factories:
        before = kib("VmRSS")
        values = check_values(request(factory, parallelism=Mesh(shard=2), task=CUSTOM))
        width = values.module[0].in_features  # type: ignore[index, union-attr]
        columns = (Column(name="x", role="feature", dtype="float32", shape=(int(width),)),)
        cluster = ClusterInfo(master="local[2]", num_executors=1, cores_per_executor=2)
        slots = Slots(num_workers=2, threads=1, cluster=cluster)
        checked: Any = SimpleNamespace(**vars(values), config=values.config, slots=slots)
        table = MagicMock()
        table.columns.return_value = columns
        table.rows_at_hand.return_value = None
        check_rows(checked, table, [], None)
        run_key(values.module, columns, values.config, "", values.weights)
        packed = pack(values.module, values.weights)
    return packed, extra_bytes(before)


def filled_on_rank(comm: Communicator, packed: list[PackedModule], mesh: Mesh) -> tuple[float, int]:
    """A number of the weights, and the bytes that a rank took at most for the last module."""
    before = 0
    for one in packed:
        before = kib("VmRSS")
        unfilled = MadeWeights(one.skeleton, one.tensors, one.recipe, comm)
        regions = divide(unfilled.module, MeshRanks.of(mesh, comm, torch.device("cpu")))
        unfilled.fill(unfilled.module, regions, torch.device("cpu"))
    taken = extra_bytes(before)
    last: Any = list(unfilled.module.parameters())[-2]
    return float(last.full_tensor().detach().double().sum()), taken


def test_the_driver_has_one_tensor_at_a_time_and_a_rank_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # glibc gives back at once what is freed, so what the kernel counts is what is held.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 20))
    with started_gang(tmp_path, 1) as driver:
        ((packed, bytes_of_driver),) = driver.run(packed_by_driver, [tiny, Net])
        ((small, _),) = driver.run(packed_by_driver, [tiny])
    assert bytes_of_driver < TENSOR + CONSTANT
    assert len(packed.tensors) + len(packed.recipe) < 1 << 20
    torch.manual_seed(3)
    expected = float(list(Net().parameters())[-2].detach().double().sum())
    for number, mesh in enumerate((Mesh(shard=2), Mesh(tensor=2, layout=LAYOUT))):
        folder = tmp_path / str(number)
        folder.mkdir()
        with started_gang(folder, 2) as gang:
            for found, bytes_of_rank in gang.run(filled_on_rank, [small, packed], mesh):
                assert found == expected
                assert bytes_of_rank < WHOLE / 2 + TENSOR + CONSTANT < WHOLE * 0.8, mesh
