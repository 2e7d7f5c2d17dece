from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from sparkdl.errors import SparkDLError
from sparkdl.report.listeners.listener import RunStart
from sparkdl.report.listeners.mlflow import MLflow
from sparkdl.serialization.initial_weights import InitialWeights
from sparkdl.serialization.json_objects import describe, restore
from tests.report.runs import record

START = RunStart(
    run_id="r1", name="Test", folder="20260101-000000-Test-r1",
    params={"epochs": "3", "m": "x" * 900},
)  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A tracking store in files, which needs no server."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return (tmp_path / "mlruns").as_uri()


def tracked(place: str) -> Any:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=place)
    experiment = client.get_experiment_by_name("digits")
    assert experiment is not None
    return client, client.search_runs([experiment.experiment_id])


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_mlflow_has_what_was_logged(place: str, tmp_path: Path) -> None:
    options = MLflow(tracking_uri=place, experiment="digits", tags={"team": "a"}, log_weights=True)
    net = nn.Linear(2, 1)
    run = options.start(START)
    run.facts({"rows": 10, "rows_by_rank": list(range(10_000))})
    run.step(5, {"loss": 0.5})
    run.epoch(10, {"epoch": 1, "loss": 0.4, "val_loss": float("inf")})
    run.epoch(20, {"epoch": 2, "loss": 0.2, "val_loss": 0.3})
    run.failure("a worker was lost" + 9000 * ".")
    run.end(record(), net)

    client, (found,) = tracked(place)
    assert found.info.status == "FINISHED"
    assert found.info.run_name == START.folder
    assert found.data.params["epochs"] == "3"
    assert len(found.data.params["m"]) == 500
    assert found.data.tags["team"] == "a"
    assert found.data.tags["sparkdl.rows"] == "10"
    assert len(found.data.tags["sparkdl.rows_by_rank"]) == 5000
    assert found.data.tags["sparkdl.last_failure"].startswith("a worker was lost")
    history = client.get_metric_history(found.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(10, 0.4), (20, 0.2)]
    assert [m.step for m in client.get_metric_history(found.info.run_id, "val_loss")] == [20]
    folder = Path(client.download_artifacts(found.info.run_id, "", str(tmp_path)))
    assert "Where the time went" in (folder / "report.html").read_text(encoding="utf-8")
    assert json.loads((folder / "run.json").read_text())["status"] == "succeeded"
    weights = InitialWeights(source=str(folder / "model" / "weights.safetensors"))
    again = nn.Linear(2, 1)
    from sparkdl.serialization.initial_weights import load_initial_weights

    load_initial_weights(again, weights)
    assert torch.equal(again.weight, net.weight)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_runs_of_an_experiment_stand_beside_each_other(place: str) -> None:
    from dataclasses import replace

    options = MLflow(tracking_uri=place, experiment="digits")
    options.start(replace(START, run_name="digits, wide")).end(record(), None)
    options.start(START).end(replace(record(), status="failed"), None)
    _, runs = tracked(place)
    assert sorted(run.info.status for run in runs) == ["FAILED", "FINISHED"]


def test_without_the_package_the_remedy_is_named() -> None:
    hidden = {"mlflow.tracking": None, "mlflow.entities": None}
    with (
        mock.patch.dict(sys.modules, hidden),
        pytest.raises(SparkDLError, match="pip install mlflow-skinny"),
    ):
        MLflow().start(START)


def test_options_can_be_saved() -> None:
    options = MLflow(tracking_uri="http://x", tags={"a": "b"})
    assert restore(describe(options)) == options
