from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from sparkdl.config import Looks, TrainConfig
from sparkdl.data.batches import Batch
from sparkdl.errors import SparkDLError
from sparkdl.report.listeners.listener import RunStart, wanted_looks
from sparkdl.report.listeners.mlflow import MLflow
from sparkdl.report.listeners.tensorboard import TensorBoard
from sparkdl.serialization.json_objects import describe, restore
from sparkdl.train.layer_looks import LayerLooks
from tests.report.runs import GRAPH, record
from tests.train.runs import make_data, plan_for

START = RunStart(run_id="r1", name="Test", folder="20260101-000000-Test-r1", params={"a|b": "1"})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.compat.proto.graph_pb2 import GraphDef

    run = TensorBoard(log_dir=str(tmp_path)).start(START)
    run.facts({"rows": 10})
    run.step(5, {"loss": 0.5, "rows_per_second": 100.0})
    run.step(9, {"loss": float("nan")})
    run.epoch(10, {"epoch": 1, "steps": 10, "loss": 0.4, "val_loss": 0.45})
    run.epoch(20, {"epoch": 2, "steps": 10, "loss": 0.2, "val_loss": 0.25})
    run.graph(GRAPH)
    run.layers(10, {"ratios": {"body.conv1": 1e-3, "head": 0.0, "pool": None}})
    run.layers(20, looked_at())
    run.failure("a worker was lost")
    run.end(record(), None)

    found = EventAccumulator(str(tmp_path / START.folder))
    found.Reload()
    assert set(found.Tags()["scalars"]) == {
        "step/loss", "step/rows_per_second", "epoch/loss", "epoch/val_loss",
        "update_ratio/body.conv1",
    }  # fmt: skip
    assert found.Scalars("update_ratio/body.conv1")[0].value == pytest.approx(-3)
    (histogram,) = found.Histograms("weights/head.weight")
    values = histogram.histogram_value
    assert (histogram.step, values.num, values.min, values.max) == (20, 4, -1, 1)
    filled = [edge for edge, n in zip(values.bucket_limit, values.bucket, strict=True) if n]
    assert filled == [pytest.approx(-0.95), 1.0]  # -1, and three at the upper end
    (picture,) = found.Images("batch/input 1")
    assert (picture.step, picture.width, picture.height) == (20, 24, 8)  # two, side by side
    graph = GraphDef.FromString(found.Graph().SerializeToString())
    nodes = {node.name: node for node in graph.node}
    assert list(nodes["body/add"].input) == ["body/relu", "body/conv2"]
    assert nodes["body/conv1"].op == "Conv2d"
    assert b"kernel_size" in nodes["body/conv1"].attr["detail"].s
    values = [(event.step, event.value) for event in found.Scalars("epoch/loss")]
    assert values == [(10, pytest.approx(0.4)), (20, pytest.approx(0.2))]
    assert len(found.Scalars("step/loss")) == 1  # what is not finite is left out
    texts = {
        tag: found.Tensors(f"{tag}/text_summary")[0].tensor_proto.string_val[0].decode()
        for tag in ("params", "facts", "failures", "status")
    }
    assert "| a | 1 |" not in texts["params"] and "a\\|b" in texts["params"]
    assert texts["failures"] == "a worker was lost"
    assert texts["status"] == "succeeded"


def looked_at() -> dict[str, Any]:
    """What rank 0 sends of a layer of four weights and of a batch."""
    net = nn.Sequential(OrderedDict(head=nn.Linear(2, 2, bias=False)))
    net[0].weight.data = torch.tensor([[-1.0, 1.0], [1.0, 1.0]])
    options = TensorBoard(images=2)
    looks = LayerLooks(options.looks, net, plan_for(make_data([50]), TrainConfig(max_steps=1)))
    images = torch.rand(5, 1, 8, 12)
    looks.see(Batch((images,), images, None, 5))
    looks.before_update(0)
    found: dict[str, Any] = {}
    observer = mock.Mock(layers=lambda step, seen: found.update(seen))
    looks.after_step(0, observer)
    return found


def test_without_the_package_the_remedy_is_named(tmp_path: Path) -> None:
    hidden = {"torch.utils.tensorboard": None}
    with (
        mock.patch.dict(sys.modules, hidden),
        pytest.raises(SparkDLError, match="pip install tensorboard"),
    ):
        TensorBoard(log_dir=str(tmp_path)).start(START)


def test_options_can_be_saved() -> None:
    options = TensorBoard(log_dir="x", flush_seconds=2.0, histograms=False, layer_interval=5)
    assert restore(describe(options)) == options
    assert options.looks == Looks(every=5, images=8)
    assert wanted_looks([options, MLflow(), TensorBoard()]) == Looks(
        every=5, histograms=True, images=8
    )
    assert wanted_looks([]) == Looks()
