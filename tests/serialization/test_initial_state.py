"""The training state beside a saved model: found from the model's place, whole or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.errors import ConfigError, StorageError
from sparkdl.serialization.initial_state import InitialState
from sparkdl.serialization.load import load_module
from sparkdl.serialization.saved_module import prepare_weights
from sparkdl.storage.storage import LocalStorage
from sparkdl.train.training_state import TrainingMethod, TrainingState
from tests.serialization.saving import save_module

METHOD = TrainingMethod(
    mode="gang", strategy="AllReduce()", optimizer="torch.optim.adam.Adam", scheduler=None,
    trained=("0.weight",), options=({"lr": 0.1, "betas": (0.9, 0.999)},),
)  # fmt: skip
STATE = TrainingState(
    epoch=2, step=8, rows_seen=40, method=METHOD,
    parts={"optimizer": {"state": {0: {"step": torch.tensor(8.0)}}, "param_groups": []}},
)  # fmt: skip


class Fitted:
    """Looks like a fitted model, without Spark."""

    def __init__(self, module: nn.Module, state: TrainingState | None) -> None:
        self.module, self.trainingState = module, state


def saved(path: Path, module: nn.Module, inside: str = "") -> str:
    storage = LocalStorage(path)
    folder = f"{inside}/model".lstrip("/")
    save_module(module, None, storage, folder, example_inputs=None, extra={})
    prepare_weights(STATE.tree()).write(storage, f"{inside}/training".lstrip("/"))
    return str(path)


def test_it_comes_from_a_model_in_memory() -> None:
    module = nn.Sequential(nn.Linear(2, 1))
    initial = InitialState.of(Fitted(module, STATE))
    weights, state = initial.read()
    assert state is STATE and weights["0.weight"] is not None
    assert InitialState.of(initial) is initial
    assert "tensor" not in repr(initial)  # a run's record shows it
    for wrong in (Fitted(module, None), module, 3):
        with pytest.raises(ConfigError, match="initialState"):
            InitialState.of(wrong)


@pytest.mark.parametrize("inside", ["", "stages/0_TorchClassifier_1"])
def test_it_comes_from_the_place_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    module = nn.Sequential(nn.Linear(2, 1))
    saved(tmp_path / "m", module, inside)
    monkeypatch.chdir(tmp_path)
    weights, state = InitialState.of(Path("m")).read()
    assert (state.epoch, state.step, state.method) == (2, 8, METHOD)
    optimizer: Any = state.parts["optimizer"]
    assert optimizer["state"][0]["step"].item() == 8
    assert torch.equal(weights["0.weight"], module[0].weight)  # type: ignore[arg-type]
    assert torch.equal(load_module("m")[0].weight, module[0].weight)  # type: ignore[index]


def test_without_a_state_or_with_a_damaged_one_there_is_a_remedy(tmp_path: Path) -> None:
    place = saved(tmp_path / "m", nn.Sequential(nn.Linear(2, 1)))
    file = tmp_path / "m" / "training" / "weights.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(StorageError, match="is damaged"):
        InitialState.of(place).read()
    (tmp_path / "m" / "training" / "module.json").unlink()
    with pytest.raises(StorageError, match="no training state; fit it with keepTrainingState=True"):
        InitialState.of(place).read()
