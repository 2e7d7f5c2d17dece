"""What the blocks of docs/tuning.md must reach."""

from __future__ import annotations

from typing import Any

from sparkdl import TorchClassifierModel


def check(names: dict[str, Any]) -> None:
    assert isinstance(names["best"], TorchClassifierModel)
    assert names["found"].best_value == names["table"]["val_loss"].min()
    assert len(names["table"]) == 5
    assert names["predictions"].count() == 178
    assert 1 <= len(names["choices"]) <= 2
