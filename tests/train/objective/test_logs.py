"""What two ranks log is what one would; the module needs nothing of Lightning's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

from sparkdl.config import TrainConfig
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from tests.gang import Gang
from tests.train.runs import NUM_FEATURES, but, make_data, run, seeded

CONFIG = TrainConfig(epochs=2, batch_size=4, optimizer="auto", seed=4)


class Duck(nn.Module):
    """Has a LightningModule's methods, and logs numbers and metrics."""

    log: Any

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(NUM_FEATURES, 1, dtype=torch.float64)
        self.mae = torchmetrics.MeanAbsoluteError()
        self.all = torchmetrics.MetricCollection(
            {"mse": torchmetrics.MeanSquaredError(), "r2": torchmetrics.R2Score()}, prefix="val_"
        )

    def training_step(self, batch: Any) -> torch.Tensor:
        output, y = self.layer(batch[0]).squeeze(1), batch[1]
        loss = (output - y).square().mean()
        self.mae(output, y)
        for name, value in (("mae", self.mae), ("mine", loss)):
            self.log(name, value)
        self.log("rows", len(y), reduce_fx="sum")
        self.log("highest", y.max(), reduce_fx="max")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        output, y = self.layer(batch[0]).squeeze(1), batch[1]
        self.all.update(output, y)
        for name, value in self.all.items():
            self.log(name, value)
        return (output - y).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02)


def history(rows: list[int], held: list[int], **options: Any) -> list[dict[str, float]]:
    config = but(CONFIG, sync_strategy=options.pop("strategy", None))
    data, validation = make_data(rows), make_data(held)
    found = run(seeded(Duck), config, data, validation=validation, **options).history
    return [{k: v for k, v in record.items() if k != "seconds"} for record in found]


def in_gang(comm: Any, strategy: Any) -> list[dict[str, float]]:
    return history([13, 5], [7, 0], comm=comm, strategy=strategy)


def test_one_rank() -> None:
    for record in history([18], [7]):
        assert record["mine"] == pytest.approx(record["loss"], rel=1e-12)
        assert record["val_mse"] == pytest.approx(record["val_loss"], rel=1e-6)
        assert record["rows"] == 18


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [None, ParameterAveraging(averaging_period=2)])
def test_two_ranks_log_what_one_logs(gang: Gang, strategy: Any) -> None:
    first, second = gang.run(in_gang, strategy)
    assert first == second
    for record in first:
        assert record["mine"] == pytest.approx(record["loss"], rel=1e-12)
        assert record["val_mse"] == pytest.approx(record["val_loss"], rel=1e-6)
        assert record["rows"] == 18
        assert record["highest"] == max(
            float(d.columns["label y"].max()) for d in make_data([13, 5])
        )
    one = history([18], [7])
    assert one[0].keys() - first[0].keys() <= {"gradient_norm"}  # apart they have none in common
    assert first[0].keys() <= one[0].keys()
    assert first[1]["mae"] < first[0]["mae"]
