"""How much of a divided model a rank holds at any moment of a step."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from sparkdl.comm.communicator import Communicator
from sparkdl.config import TrainConfig
from sparkdl.data.spool.mapped import MappedRows
from sparkdl.inference.regression import REGRESSION
from sparkdl.mesh import Mesh
from sparkdl.train.callbacks import Callback, CallbackState, NullObserver
from sparkdl.train.loop import train
from tests.gang import Gang
from tests.train.runs import NUM_FEATURES, make_data, plan_for, seeded

pytestmark = pytest.mark.gang

WIDTH = 256
LAYERS = 12
LARGEST = 4 * (WIDTH + 1) * WIDTH
"""Bytes of the largest layer's weights; those of activations are a hundredth of it."""
STATE = 4 * (LAYERS * LARGEST + 4 * ((NUM_FEATURES + 1) * WIDTH + WIDTH + 1))
"""Bytes of weights, gradients and Adam's two moments of the whole model."""
CASES = {
    # one that computes and the next one, as they came and as weights, and gradients
    "shard": (Mesh(shard=2, smallest_unit=1), 2, 4.5),
    "shard, activations again": (
        Mesh(shard=2, smallest_unit=1, activation_checkpointing=True), 2, 4.5,
    ),
    "pipeline": (Mesh(pipeline=2, micro_batches=2), 2, 1.5),
    "data": (Mesh(data=2), 1, 1.5),
}  # fmt: skip
"""Mesh, parts of the state, and how many of the largest layers a rank may have besides its part."""
SHARDS_OF_FOUR = (Mesh(shard=4, smallest_unit=1), 4, 4.5)


class Net(nn.Module):
    """Layers whose weights are much more than what they compute of two rows."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(NUM_FEATURES, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.out(x)


class Tracked(TorchDispatchMode):
    """Counts the memory of all tensors that operators get and give, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def look(self) -> None:
        """See what is there."""
        gc.collect()
        for value in gc.get_objects():
            if issubclass(type(value), torch.Tensor) and value.device.type == "cpu":
                self._see(value)
        self.peak = sum(one.nbytes() for one in self._living())

    def _living(self) -> list[Any]:
        living = {key: ref() for key, ref in self._storages.items()}
        self._storages = {
            key: self._storages[key] for key, one in living.items() if one is not None
        }
        return [one for one in living.values() if one is not None]

    def _see(self, value: torch.Tensor) -> None:
        local = value._local_tensor if isinstance(value, DTensor) else value
        storage = local.untyped_storage()
        if storage.device.type == "cpu":  # that of a fake tensor is none
            self._storages[storage._cdata] = weakref.ref(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves((args, kwargs, result)):
            if isinstance(value, torch.Tensor):
                self._see(value)
        self.peak = max(self.peak, sum(one.nbytes() for one in self._living()))
        return result


class Track(Callback):
    """Has the third step tracked, when the optimizer has its state."""

    def __init__(self) -> None:
        self.tracked = Tracked()

    def on_step_end(self, state: CallbackState) -> None:
        if state.step == 2:
            self.tracked.look()
            self.tracked.__enter__()
        elif state.step == 3:
            self.tracked.__exit__(None, None, None)


def peak_of_a_step(comm: Communicator, mesh: Mesh) -> int:
    """Most bytes that this rank's tensors have together, without those of earlier tests."""
    before = Tracked()
    before.look()
    seen = Track()
    config = TrainConfig(
        task=REGRESSION, loss="mse", optimizer="adamw", optimizer_params={"fused": True},
        learning_rate=1e-3, batch_size=2, epochs=1, parallelism=mesh, callbacks=(seen,),
    )  # fmt: skip
    data = make_data([8] * mesh.num_readers, dtype=torch.float32)
    plan = plan_for(data, config, world_size=mesh.num_readers)
    train(
        module=seeded(Net), config=config, plan=plan, comm=comm, device=torch.device("cpu"),
        shards=[MappedRows(data[s.shard_id], plan) for s in plan.shards_of(mesh.reader(comm.rank))],
        validation=[], checkpoints=None, resume=None, observer=NullObserver(),
    )  # fmt: skip
    return seen.tracked.peak - before.peak


def check(gang: Gang, mesh: Mesh, parts: int, layers: float) -> None:
    for peak in gang.run(peak_of_a_step, mesh):
        assert STATE / parts <= peak <= STATE / parts + layers * LARGEST


@pytest.mark.parametrize("case", CASES)
def test_a_rank_holds_its_part_and_the_layers_that_compute(gang: Gang, case: str) -> None:
    check(gang, *CASES[case])


@pytest.mark.slow
def test_a_rank_of_four_holds_a_quarter(gang4: Gang) -> None:
    check(gang4, *SHARDS_OF_FOUR)
