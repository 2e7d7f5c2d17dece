from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from sparkdl.config import EarlyStopping, TrainConfig
from sparkdl.errors import CheckpointError
from sparkdl.storage.tensor_tree import pack
from sparkdl.sync.divided_state import whole_part
from tests.train.runs import NUM_FEATURES, Keeper, make_data, run, seeded


def test_every_state_fits_into_a_checkpoint() -> None:
    """No pickle: whatever optimizer, schedule and random streams remember is plain."""
    config = TrainConfig(
        epochs=2,
        batch_size=5,
        optimizer="adamw",
        precision="fp16",
        scheduler=lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.LinearLR(o, total_iters=2),
                torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=4),
            ],
            milestones=[2],
        ),
        early_stopping=EarlyStopping(),
    )
    net = seeded(
        lambda: nn.Sequential(nn.Linear(NUM_FEATURES, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    )
    data = make_data([10], dtype=torch.float32)
    outcome = run(net, config, data, validation=data)
    for part in (outcome.final.shared, outcome.final.rank_state):
        value, tensors = pack(part)
        assert json.dumps(value)
        assert tensors


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(NUM_FEATURES, 8, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x.unsqueeze(1))[1][0][0])  # type: ignore[no-any-return]


def test_weights_of_other_sizes_than_their_lstm_has_are_refused() -> None:
    """Its kernel would read memory behind them."""
    data, sink = make_data([10], dtype=torch.float32), Keeper(steps=(2,))
    config = TrainConfig(epochs=1, batch_size=4)
    run(seeded(Recurrent), config, data, sink=sink)
    point = sink.points[2]
    weights = point.shared["model"]["lstm.weight_hh_l0"]
    point.shared["model"]["lstm.weight_hh_l0"] = weights[:, :1].clone()
    with pytest.raises(CheckpointError, match="gives the layer 'lstm' sizes that its weights lack"):
        run(seeded(Recurrent), config, data, resume=point)


def test_sizes_are_looked_at_after_a_checkpoint_of_a_mesh_too() -> None:
    """Its weights have their shapes; the attributes of a file may not fit them."""
    data, sink = make_data([10], dtype=torch.float32), Keeper(steps=(2,))
    config = TrainConfig(epochs=1, batch_size=4)
    run(seeded(Recurrent), config, data, sink=sink)
    part = whole_part(sink.points[2].shared)
    point = replace(sink.points[2], parts=lambda: iter([part]))
    run(seeded(Recurrent), config, data, resume=point)
    other = seeded(Recurrent)
    other.lstm.hidden_size = 800
    with pytest.raises(CheckpointError, match="gives the layer 'lstm' sizes that its weights lack"):
        run(other, config, data, resume=point)
