"""What the blocks of docs/models.md must reach."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def check(names: dict[str, Any]) -> None:
    assert Path("curves.png").is_file()
    assert names["worst"].columns == ["id", "loss"]
    assert names["worst"].count() == 20
