from __future__ import annotations

import json

import torch
from torch import nn

from sparkdl.config import EarlyStopping, TrainConfig
from sparkdl.storage.tensor_tree import pack
from tests.train.runs import NUM_FEATURES, make_data, run, seeded


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
