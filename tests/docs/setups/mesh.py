"""What the meshes of docs/mesh.md must do."""

from __future__ import annotations

from collections import Counter
from typing import Any

from sparkdl.models import TransformerNet
from sparkdl.sync.divided.layout import divided_layers


def check(names: dict[str, Any]) -> None:
    assert names["estimator"].getParallelism().size == 8
    hierarchical = names["hierarchical"]
    strategy = hierarchical.getSyncStrategy()
    assert strategy.why_not_divided(hierarchical.getParallelism()) is None
    assert names["model"].summary.world_size == 2
    divided = divided_layers(names["tensor"], TransformerNet(num_outputs=2, num_tokens=10))
    assert names["model"].getParallelism() is None
    assert Counter(divided.values()) == {"columns": 2 * 4, "rows": 2 * 2}  # of two layers
