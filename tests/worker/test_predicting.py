"""A gang predicts in step what one process predicts, however many rows each rank has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from torch import nn

from sparkdl.comm.communicator import Communicator
from sparkdl.data.plan import Column
from sparkdl.errors import ConfigError
from sparkdl.inference.outputs import Forward, Output
from sparkdl.inference.predict import Leaf, PredictTask
from sparkdl.mesh import Mesh
from sparkdl.serialization.stored_module import StoredModule
from sparkdl.serialization.travel.packed_module import PackedModule
from sparkdl.worker.predicting import divided_module, in_step
from tests.gang import Gang
from tests.serialization.test_stored_module import store, trained

pytestmark = pytest.mark.gang

LAYOUT = {"into": "columns", "back": "rows"}
X = torch.arange(60.0, dtype=torch.float64).reshape(20, 3).sin()


class Net(nn.Module):
    """A pair of layers to divide, a tied one, statistics, and a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(3, 8, dtype=torch.float64)
        self.back = nn.Linear(8, 3, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)
        self.out = nn.Linear(3, 3, dtype=torch.float64)
        self.again = nn.Linear(3, 3, dtype=torch.float64)
        self.again.weight = self.out.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.back(self.into(x).tanh()))
        out: torch.Tensor = self.again(self.out(hidden).relu())
        return out


class PackedAs:
    """Gives a packed module; a class, so that it can be pickled."""

    def __init__(self, packed: PackedModule) -> None:
        self.packed = packed

    def __call__(self) -> PackedModule:
        return self.packed


def task_of(stored: StoredModule, layers: tuple[str, ...] = ()) -> PredictTask:
    column = Column(name="x", dtype="float64", shape=(3,), role="feature")
    leaves = [
        Leaf(
            name=f"_{number}",
            output=Output(layer=layer),
            make="array",
            arrow_type=pa.list_(pa.float64()),
        )
        for number, layer in enumerate((None, *layers))
    ]
    return PredictTask(
        digest="m",
        fetch=PackedAs(stored.packed),
        columns=(column,),
        batch_size=4,
        device="cpu",
        forward=Forward(layers=layers),
        weights=stored.at,
        leaves=tuple(leaves),
    )


def arrays(first: int, last: int) -> Sequence[pa.Array]:
    return [pa.array(X[first:last].tolist(), pa.list_(pa.float64()))]


def predicted(
    comm: Communicator, task: PredictTask, mesh: Mesh, rows: list[list[tuple[int, int]]]
) -> tuple[list[list[float]], int]:
    """What a rank gives for its batches, and the numbers of the module that it holds."""
    device = torch.device("cpu")
    module, ranks = divided_module(task, mesh, comm, device)
    own: Iterator[Sequence[pa.Array]] = (arrays(*batch) for batch in rows[comm.rank])
    found = list(in_step(module, ranks, comm, task, device, own))
    given = [row for array in found for row in array.field(0).to_pylist()]
    return given, sum(p.to_local().numel() for p in module.parameters() if hasattr(p, "to_local"))


@pytest.mark.parametrize(
    "mesh", [Mesh(shard=2, smallest_unit=1), Mesh(tensor=2, layout=LAYOUT)], ids=str
)
def test_rows_of_ranks(gang: Gang, tmp_path: Path, mesh: Mesh) -> None:
    net = trained(Net)
    stored = store(net, tmp_path)
    with torch.no_grad():
        expected = net(X)
    for rows in (
        [[(0, 10), (10, 13)], [(13, 14), (14, 14), (14, 20)]],
        [[], [(0, 20)]],  # a rank without rows
        [[(0, 1)], []],  # fewer rows than ranks
        [[], []],
    ):
        results = gang.run(predicted, task_of(stored), mesh, rows)
        for (given, own), batches in zip(results, rows, strict=True):
            wanted = [row for first, last in batches for row in expected[first:last].tolist()]
            assert len(given) == len(wanted)
            if wanted:
                assert torch.allclose(
                    torch.tensor(given, dtype=torch.float64),
                    torch.tensor(wanted, dtype=torch.float64),
                    rtol=0,
                    atol=1e-12,
                )
            assert 0 < own < sum(p.numel() for p in net.parameters())


@pytest.mark.slow
def test_both_axes_and_replicas(gang4: Gang, tmp_path: Path) -> None:
    net = trained(Net)
    stored = store(net, tmp_path)
    with torch.no_grad():
        expected = net(X)
    for mesh in (
        Mesh(shard=2, tensor=2, layout=LAYOUT, smallest_unit=1),
        Mesh(data=2, shard=2, smallest_unit=1),
    ):
        rows = [[(0, 3)], [(3, 14)], [], [(14, 20)]]
        results = gang4.run(predicted, task_of(stored), mesh, rows)
        given = [row for found, _ in results for row in found]
        assert torch.allclose(
            torch.tensor(given, dtype=torch.float64), expected, rtol=0, atol=1e-12
        )


def too_many(output: torch.Tensor) -> torch.Tensor:
    """What the user's own function may do to one rank."""
    if len(output) == 3:
        raise ValueError("three rows")
    return output


def failing(comm: Communicator, task: PredictTask, mesh: Mesh) -> tuple[int, str]:
    device = torch.device("cpu")
    module, ranks = divided_module(task, mesh, comm, device)
    own = iter([arrays(0, 4), arrays(4, 7 if comm.rank else 8), arrays(8, 12)])
    given, reason = 0, ""
    try:
        for array in in_step(module, ranks, comm, task, device, own):
            given += len(array)
    except Exception as error:
        reason = str(error)
    return given, reason


@pytest.mark.parametrize(
    "mesh", [Mesh(shard=2, smallest_unit=1), Mesh(tensor=2, layout=LAYOUT)], ids=str
)
def test_all_ranks_end_together_where_one_fails(gang: Gang, tmp_path: Path, mesh: Mesh) -> None:
    task = task_of(store(trained(Net), tmp_path))
    task = replace(task, forward=Forward(postprocessing=too_many))
    (given, reason), (of_other, same) = gang.run(failing, task, mesh)
    assert (given, of_other) == (8, 4)
    assert reason == same and "ValueError: three rows" in reason


def outputs_of_layers(comm: Communicator, task: PredictTask, mesh: Mesh) -> list[list[float]]:
    device = torch.device("cpu")
    module, ranks = divided_module(task, mesh, comm, device)
    own = iter([arrays(0, 5)] if comm.rank else [])
    found = in_step(module, ranks, comm, task, device, own)
    return [row for array in found for row in array.field(1).to_pylist()]


def test_outputs_of_a_layer(gang: Gang, tmp_path: Path) -> None:
    net = trained(Net)
    task = task_of(store(net, tmp_path), layers=("into",))
    first, second = gang.run(outputs_of_layers, task, Mesh(shard=2, smallest_unit=1))
    assert first == []
    with torch.no_grad():
        wanted = net.into(X[:5])
    assert torch.allclose(torch.tensor(second, dtype=torch.float64), wanted, rtol=0, atol=1e-12)


class Choosing(Net):
    """Lets its rows decide which of two layers they go through."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (self.out if x[0, 0] > 0 else self.again)(x)
        return out


def test_ranks_that_call_different_layers_do_not_mix_them_up(gang: Gang, tmp_path: Path) -> None:
    net = trained(Choosing)
    net.again.weight = nn.Parameter(net.again.weight.detach().clone() + 1)
    task = task_of(store(net, tmp_path))
    rows = [[(1, 2)], [(2, 3)]]
    assert X[1, 0] > 0 > X[2, 0]
    for found in gang.run(reason_of, task, Mesh(shard=2, smallest_unit=1), rows):
        assert "'again' and 'out'" in found or "'out' and 'again'" in found
    given, _ = gang.run(predicted, task, Mesh(shard=2), rows)[0]
    with torch.no_grad():
        assert torch.allclose(torch.tensor(given, dtype=torch.float64), net(X[1:2]))


def reason_of(
    comm: Communicator, task: PredictTask, mesh: Mesh, rows: list[list[tuple[int, int]]]
) -> str:
    try:
        predicted(comm, task, mesh, rows)
    except ConfigError as error:
        return str(error)
    return ""
