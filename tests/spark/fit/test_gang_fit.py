"""What a gang that failed leaves behind is mended before the next one starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.spark.cluster.attempt import Attempt
from sparkdl.spark.fit.gang_fit import _heal


@pytest.mark.parametrize(("kind", "rebuilt"), [("ShardLost", 1), ("CommunicationError", 0)])
def test_lost_shards_are_written_anew(kind: str, rebuilt: int) -> None:
    calls: list[int] = []
    run: Any = SimpleNamespace(table=SimpleNamespace(rebuild=lambda: calls.append(1)))
    failures = [{"rank": 1, "type": "CommunicationError"}, {"rank": 0, "type": kind}]
    _heal(run, Attempt(number=0, world_size=2, submitted=0, failures=failures))
    assert len(calls) == rebuilt
