"""A training function that divides its model along a mesh, and goes on along another."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.comm.communicator import Communicator, LocalCommunicator
from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.mesh import Mesh
from sparkdl.storage.checkpoint_format import CheckpointInfo, Writer, latest, load_shared
from sparkdl.storage.storage import open_storage
from sparkdl.worker.context import Context
from sparkdl.worker.divided_checkpoint import check_stages
from sparkdl.worker.function_mesh import check_axes, device_mesh
from sparkdl.worker.function_rank import checkpoints, in_turn, load_part, save_checkpoint
from tests.gang import Gang

NUM_ROWS, NUM_FEATURES = 12, 5
STEPS = 3


@pytest.mark.parametrize(
    ("mesh", "readers"),
    [
        (Mesh(tensor=2), [0, 0]),
        (Mesh(data=2, tensor=2), [0, 0, 1, 1]),
        (Mesh(data=2, shard=2), [0, 1, 2, 3]),
        (Mesh(data=2, shard=2, tensor=2), [0, 0, 1, 1, 2, 2, 3, 3]),
        (Mesh(data=2, pipeline=2, shard=2), [0, 1, 0, 1, 2, 3, 2, 3]),
    ],
    ids=str,
)
def test_ranks_along_tensor_read_the_same_rows(mesh: Mesh, readers: list[int]) -> None:
    assert [mesh.reader(rank) for rank in range(mesh.size)] == readers
    assert max(readers) + 1 == mesh.num_readers


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (2, r"a sparkdl\.Mesh or None; received 2"),
        (Mesh(tensor=2, layout={"a": "rows"}), r"Mesh\(layout={'a': 'rows'}\) has no effect"),
        (Mesh(data=2, shard_optimizer=True), "fully_shard"),
        (Mesh(shard=2, smallest_unit=1), "smallest_unit=1"),
        (Mesh(pipeline=2, micro_batches=3), "micro_batches=3"),
        (
            Mesh(shard=2, activation_checkpointing=True),
            "give axes only: data, pipeline, shard, tensor",
        ),
    ],
)
def test_a_functions_mesh_has_axes_only(mesh: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_axes(mesh)


def test_stages_give_their_tensors_names_of_their_own() -> None:
    check_stages([(0, ["a.weight", "step"]), (0, ["a.weight"]), (1, ["b.weight"])])
    with pytest.raises(CheckpointError, match="0 and 1 along pipeline both report a tensor as 'a'"):
        check_stages([(0, ["a"]), (1, ["b", "a"])])


class Block(nn.Module):
    """A pair of layers that ranks along ``tensor`` share, and a normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 6)
        self.second = nn.Linear(6, 7)
        self.norm = nn.LayerNorm(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.second(torch.tanh(self.first(x))))


class Net(nn.Module):
    """7 numbers cannot be shared evenly, and the last row not at all; the buffer counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(NUM_FEATURES, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(7, 1)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


@dataclass
class FileKeys:
    """Keys that the processes of a test share."""

    folder: Path

    def set(self, key: str, value: bytes) -> None:
        self.folder.mkdir(exist_ok=True)
        whole = self.folder / key.replace("/", "-")
        whole.with_suffix(".new").write_bytes(value)
        whole.with_suffix(".new").rename(whole)

    def get(self, key: str) -> bytes | None:
        path = self.folder / key.replace("/", "-")
        return path.read_bytes() if path.exists() else None

    def wait(self, keys: Sequence[str], timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        while any(self.get(key) is None for key in keys):
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(0.01)

    def delete(self, key: str) -> bool:
        (self.folder / key.replace("/", "-")).unlink(missing_ok=True)
        return True


def newest(folder: str) -> CheckpointInfo | None:
    return latest(open_storage(folder), "function")


def learn(comm: Communicator, mesh: Mesh | None, folder: str, end: int, run: int) -> dict[str, Any]:
    """What a user's function does, on one rank; it reports each step. Returns whole values."""
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    torch.set_default_dtype(torch.float64)
    place, manager = placed(comm, mesh, folder, run)
    with closing(manager):
        torch.manual_seed(0)
        x, y = torch.randn(NUM_ROWS, NUM_FEATURES), torch.randn(NUM_ROWS, 1)
        model = divided(Net(), place) if mesh is not None else Net()
        groups = [{"params": [*model.blocks.parameters()], "lr": 0.02}]
        groups += [{"params": [*model.into.parameters(), *model.out.parameters()]}]
        optimizer = torch.optim.Adam(groups, lr=0.01)
        first = 0
        if place.checkpoint is not None:
            optimizer_state = get_optimizer_state_dict(model, optimizer)
            state = {"model": model.state_dict(), "optimizer": optimizer_state, "step": -1}
            place.load_checkpoint(state)
            set_optimizer_state_dict(model, optimizer, optimizer_state)
            first = state["step"]
            assert first == place.checkpoint["step"]
        number, readers = (0, 1) if mesh is None else (mesh.reader(comm.rank), mesh.num_readers)
        for step in range(first, end):
            own = slice(number, NUM_ROWS - step, readers)
            losses = (model(x[own]) - y[own]).square().sum()
            optimizer.zero_grad()
            (losses * readers / (NUM_ROWS - step)).backward()
            optimizer.step()
            state = {
                "model": model.state_dict(),
                "optimizer": get_optimizer_state_dict(model, optimizer),
                "step": step + 1,
            }
            place.report({"loss": losses.item()}, checkpoint=state)
    torch.set_default_dtype(torch.float32)
    return {name: whole(value) for name, value in model.state_dict().items()}


def placed(comm: Communicator, mesh: Mesh | None, folder: str, run: int) -> tuple[Context, Any]:
    """The context of a rank that resumes from what lies in the folder."""
    device, found = torch.device("cpu"), newest(folder)
    comm.barrier()  # all have looked
    manager = checkpoints(
        open_storage(folder), 2, Writer(run_key="function", run_id=f"run{run}", attempt=0),
        FileKeys(Path(folder) / f"keys-{run}"), 30.0,
        is_required=True, rank=comm.rank, world_size=comm.world_size,
    )  # fmt: skip

    def parts() -> Any:
        assert found is not None
        return (load_part(found, rank) for rank in in_turn(found, comm.rank))

    place = Context(
        rank=comm.rank,
        nodes=(0,) * comm.world_size,
        device=device,
        num_restarts=0,
        sets={},
        resumed=None if found is None else load_shared(found),
        save=partial(save_checkpoint, manager),
        show=lambda record: None,
        gather=comm.all_gather_bytes,
        parts=parts,
        mesh=None if mesh is None else device_mesh(mesh, device, 30.0),
        reader=None if mesh is None else (mesh.reader(comm.rank), mesh.num_readers),
    )
    return place, manager


def divided(model: Net, place: Context) -> Net:
    """As a user does it: layers along tensor, then weights along shard, gradients along data."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    for block in model.blocks:
        plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
        parallelize_module(block, place.mesh["tensor"], plan)
        fully_shard(block, mesh=place.mesh["data", "shard"])
    fully_shard(model, mesh=place.mesh["data", "shard"])
    return model


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


def alone(folder: Path, end: int = STEPS, run: int = 0) -> dict[str, Any]:
    return learn(LocalCommunicator(), None, str(folder), end, run)


def written(folder: Path) -> list[int]:
    """Numbers in the regions that each rank's file of the newest checkpoint has."""
    info = newest(str(folder))
    assert info is not None
    parts = [load_part(info, rank) for rank in range(info.world_size)]
    return [sum(tensor.numel() for tensor in part.get("tensors", ())) for part in parts]


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.gang
def test_a_function_along_shard_learns_what_one_process_learns(gang: Gang, tmp_path: Path) -> None:
    expected = alone(tmp_path / "alone")
    mesh, folder = Mesh(shard=2), tmp_path / "divided"
    undisturbed = gang.run(learn, mesh, str(folder), STEPS, 0)
    for found in undisturbed:
        same(found, expected)
    numel = 3 * sum(value.numel() for name, value in expected.items() if name != "calls")
    ranks = written(folder)
    assert sum(ranks) == numel  # with both of Adam's, and each once
    assert max(ranks) < 0.7 * numel
    again = tmp_path / "again"
    gang.run(learn, mesh, str(again), 2, 0)
    resumed = gang.run(learn, mesh, str(again), STEPS, 1)
    torch.testing.assert_close(resumed, undisturbed, rtol=0, atol=0)  # the same bits
    again = tmp_path / "on one"
    gang.run(learn, mesh, str(again), 2, 0)
    same(alone(again, run=1), expected)
    again = tmp_path / "from one"
    alone(again, 2)
    same(gang.run(learn, Mesh(tensor=2), str(again), STEPS, 1)[1], expected)


@pytest.mark.gang
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(Mesh(data=2, shard=2), marks=pytest.mark.slow),
        pytest.param(Mesh(data=2, tensor=2), marks=pytest.mark.slow),
        Mesh(shard=2, tensor=2),
    ],
    ids=str,
)
def test_pairs_of_axes_and_a_resume_on_fewer_ranks(
    gang: Gang, gang4: Gang, tmp_path: Path, mesh: Mesh
) -> None:
    expected = alone(tmp_path / "alone")
    folder = tmp_path / "divided"
    gang4.run(learn, mesh, str(folder), 1, 0)
    numel = 3 * sum(value.numel() for name, value in expected.items() if name != "calls")
    assert sum(written(folder)) == numel
    gang.run(learn, Mesh(shard=2), str(folder), 2, 1)  # fewer
    for found in gang4.run(learn, mesh, str(folder), STEPS, 2):  # and more again
        same(found, expected)


def told(comm: Communicator, folder: str) -> list[str]:
    """The errors of what cannot be loaded."""
    place, manager = placed(comm, Mesh(shard=2), folder, 9)
    found = []
    with closing(manager):
        for state in (
            {"model": {"into.weight": torch.zeros(3, 3)}},
            {"model": {"none.weight": torch.zeros(3, 3)}},
            {"step": torch.zeros(())},
            {"optimizer": {}},
        ):
            try:
                place.load_checkpoint(state)
            except CheckpointError as error:
                found.append(str(error))
        model = divided(Net().double(), place)
        kept = model.state_dict()["into.weight"]
        before = whole(kept)
        place.load_checkpoint({"model": {"into.weight": kept}})  # some names
        assert not torch.equal(whole(model.into.weight.detach()), before)
        assert place.checkpoint["model"]["into.weight"].shape == (7, NUM_FEATURES)
        assert place.load_checkpoint({"step": 0}) == {"step": 1}
    return found


@pytest.mark.gang
def test_what_does_not_fit_is_named(gang: Gang, tmp_path: Path) -> None:
    gang.run(learn, Mesh(shard=2), str(tmp_path), 1, 0)
    for found in gang.run(told, str(tmp_path)):
        assert "model.into.weight has the shape (7, 5) in the checkpoint, and (3, 3)" in found[0]
        assert "lacks model.none.weight" in found[1]
        assert "step is int in the checkpoint, and a tensor" in found[2]
        assert "get_optimizer_state_dict" in found[3]
        assert len(found) == 4


def stages(comm: Communicator, folder: str) -> list[Any]:
    """Ranks that have other names, as the stages of a pipeline, and a sum in parts."""
    from torch.distributed.tensor import DTensor, Partial

    place, manager = placed(comm, Mesh(data=2), folder, 0)
    own = {f"layer{comm.rank}": {"weight": torch.full((2,), float(comm.rank))}}
    with closing(manager):
        place.report(checkpoint={"model": own, "rates": [comm.rank], f"note{comm.rank}": "x"})
        part = DTensor.from_local(torch.ones(2), place.mesh["data"], [Partial()])
        with pytest.raises(CheckpointError, match=r"sum is placed by .*redistribute"):
            place.report(checkpoint={"sum": part})
    comm.barrier()
    place, manager = placed(comm, Mesh(data=2), folder, 1)
    manager.close()
    state = {"model": {f"layer{n}": {"weight": torch.zeros(2)} for n in (1, 0)},
             "rates": [], "note1": None}  # fmt: skip
    place.load_checkpoint(state)
    return [state["model"]["layer1"]["weight"].tolist(), state["rates"], state["note1"]]


@pytest.mark.gang
def test_names_that_only_other_ranks_have_are_kept(gang: Gang, tmp_path: Path) -> None:
    assert gang.run(stages, str(tmp_path)) == [[[1.0, 1.0], [0], "x"]] * 2
