"""What the blocks of docs/reports.md must leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def check(names: dict[str, Any]) -> None:
    path = Path(names["model"].summary.report_path)
    assert path.parent.parent.resolve() == Path("runs").resolve()
    assert path.is_file() and Path("report.html").is_file()
    assert len(list(Path("runs").iterdir())) == 3
    assert list(Path("tb").rglob("events*"))
