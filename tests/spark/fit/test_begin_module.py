"""A factory's module that a mesh divides has its parameters on the meta device on the driver."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from sparkdl.data.plan import Column
from sparkdl.errors import ConfigError
from sparkdl.mesh import Mesh
from sparkdl.serialization.initial_weights import InitialWeights
from sparkdl.serialization.travel.packed_module import pack, unpack
from sparkdl.spark.fit.begin_module import begin_module
from sparkdl.spark.fit.check_request import CheckedValues, check_values
from sparkdl.spark.fit.check_rows import CheckedRows, check_rows
from sparkdl.spark.run.resume import run_key
from tests.spark.fit.requests import request

COLUMNS = (
    Column(name="x", role="feature", dtype="float32", shape=(4,)),
    Column(name="y", role="label", dtype="int64", shape=()),
)
SHARD = Mesh(shard=2)


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def by_memory() -> nn.Module:
    layer = nn.Linear(4, 3)
    assert layer.weight.data_ptr()
    return layer


def key(values: CheckedValues) -> str:
    return run_key(values.module, COLUMNS, values.config, "rows", values.weights)


def test_a_fit_along_a_mesh_finds_the_checkpoints_of_one_without() -> None:
    alone = check_values(request(make))
    assert alone.weights is None
    for mesh in (SHARD, Mesh(tensor=3), Mesh(data=2, shard_optimizer=True)):
        divided = check_values(request(make, parallelism=mesh))
        assert all(parameter.is_meta for parameter in divided.module.parameters())
        assert key(divided) == key(alone)
    assert key(check_values(request(make, parallelism=SHARD, seed=4))) != key(alone)


def test_what_the_driver_holds_whole_says_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sparkdl")
    for module, mesh in ((make(), SHARD), (make, None), (make, Mesh(data=2))):
        begun = begin_module(request(module, parallelism=mesh))
        made, weights = begun.module, begun.weights
        assert weights is None
        assert not any(parameter.is_meta for parameter in made.parameters())
    assert not caplog.records
    torch.manual_seed(9)
    begun = begin_module(request(by_memory, parallelism=SHARD))
    made, weights = begun.module, begun.weights
    assert torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(9))
    assert weights is None
    assert len(caplog.messages) == 1
    assert "looks at a tensor's memory (data_ptr)" in caplog.text
    assert torch.equal(made.weight, begin_module(request(by_memory)).module.weight)  # type: ignore[arg-type]


def checked_rows(values: CheckedValues, sink: Any = None) -> CheckedRows:
    cluster = SimpleNamespace(gpus_per_executor=0)
    slots = SimpleNamespace(cluster=cluster, max_workers=None, num_workers=2)
    checked: Any = SimpleNamespace(**vars(values), config=values.config, slots=slots)
    table = MagicMock()
    table.columns.return_value = COLUMNS
    table.labels_outside.return_value = None
    table.rows_at_hand.return_value = table.read_rows.return_value = None
    return check_rows(checked, table, [], sink)


def test_it_runs_on_rows_of_zeros() -> None:
    values, graphs = check_values(request(make, parallelism=SHARD)), []
    assert checked_rows(values, graphs.append).trial.num_classes == 3
    alone: list[Any] = []
    checked_rows(check_values(request(make)), alone.append)
    assert graphs == alone
    assert all(parameter.is_meta for parameter in values.module.parameters())
    with pytest.raises(ConfigError) as divided:
        checked_rows(check_values(request(lambda: nn.Linear(5, 3), parallelism=SHARD)))
    with pytest.raises(ConfigError) as whole:
        checked_rows(check_values(request(lambda: nn.Linear(5, 3))))
    assert str(divided.value) == str(whole.value)


class Outside(nn.Module):
    """Uses a layer's weight without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.layer.weight.t()


def test_a_weight_that_is_used_outside_its_layer_is_refused() -> None:
    values = check_values(request(Outside, parallelism=Mesh(shard=2, smallest_unit=1)))
    with pytest.raises(ConfigError, match=r"t uses 'layer.weight' outside the forward pass of"):
        checked_rows(values)


def test_initial_weights_are_read_for_a_module_that_is_not_there(tmp_path: Path) -> None:
    save_file(nn.ModuleDict({"0": nn.Linear(4, 6)}).state_dict(), tmp_path / "w.safetensors")
    initial = InitialWeights(source=tmp_path / "w.safetensors", skip=("2",))
    values = check_values(request(make, parallelism=SHARD, initial_weights=initial))
    assert all(parameter.is_meta for parameter in values.module.parameters())
    assert checked_rows(values).trial.num_classes == 3
    assert key(values) == key(check_values(request(make, initial_weights=initial)))
    assert key(values) != key(check_values(request(make)))


class ByNumpy(nn.Module):
    """Leaves torch with its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = np.asarray(_hidden(self.layer.weight))
        return x @ torch.from_numpy(weight).t()


def _hidden(tensor: torch.Tensor) -> Any:
    """As code does that torch's modes do not see."""
    with torch._C.DisableTorchFunction():
        return tensor.numpy()


def test_code_that_needs_weights_beside_torch_has_them(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sparkdl")
    values = check_values(request(ByNumpy, parallelism=SHARD))
    assert checked_rows(values).trial.num_classes == 3
    assert "the driver makes the whole module to run it: can't convert meta" in caplog.text
    alone, packed = check_values(request(ByNumpy)), pack(values.module, values.weights)
    assert not packed.recipe
    assert key(values) == key(alone)
    for own, other in zip(unpack(packed.skeleton, packed.tensors).parameters(),
                          alone.module.parameters(), strict=True):  # fmt: skip
        assert torch.equal(own, other)
