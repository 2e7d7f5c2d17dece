"""What the blocks of docs/streaming.md must reach."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparkdl import TorchClassifierModel


def check(names: dict[str, Any]) -> None:
    read, models = names["spark"].read, Path(names["lake"], "models")
    assert read.parquet(f"{names['lake']}/scores").count() == 60
    for batch_id, expected in ((0, 2), (7, 4)):
        names["learn"](read.parquet(f"{names['lake']}/incoming"), batch_id)
        model = TorchClassifierModel.load(str(models / f"batch-{batch_id:08d}"))
        assert model.trainingState is not None and model.trainingState.epoch == expected
    assert len(list(models.iterdir())) == 2
