"""What the blocks of docs/gpus.md must reach."""

from __future__ import annotations

from typing import Any


def check(names: dict[str, Any]) -> None:
    assert names["classifier"].getGpusPerWorker() == 1.0
