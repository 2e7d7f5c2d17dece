"""A listener that logs a run to MLflow: its Params, its values by step, and its page."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sparkdl.errors import SparkDLError, import_or
from sparkdl.report.listeners.listener import Listener, RunListener, RunStart
from sparkdl.runtime.json_values import finite

if TYPE_CHECKING:
    from torch import nn

    from sparkdl.report.record.run_record import RunRecord

_LONGEST_VALUE = 500
"""Characters of a param's value; MLflow's own limit is larger, that of older servers is not."""
_LONGEST_TAG = 5000
"""Characters of a tag's value; the same."""


@dataclass(frozen=True, kw_only=True)
class MLflow(Listener):
    """Logs each run to MLflow, as a run of its own.

    Params are the fit's Params; metrics are ``step_loss`` and ``step_rows_per_second`` twice a
    second at most, every value of the history by its name, and the ``lowest_update_ratio`` and
    ``highest_update_ratio`` of all layers; artifacts are ``report.html`` and
    ``run.json``, and if asked for the trained weights, which ``initialWeights`` reads. Runs that
    MLflow has active are left alone.

    Example::

        tracker = MLflow(tracking_uri="http://mlflow:5000", experiment="digits")
        TorchClassifier(module=make_net, listeners=[tracker]).fit(df)

    Raises, when a fit begins:
        SparkDLError: the package mlflow or mlflow-skinny is not installed, or the server refuses.
    """

    tracking_uri: str | None = None
    """Place where runs are tracked; None: what MLflow itself is set to."""
    experiment: str = "sparkdl"
    """Name of the experiment; it is made if there is none."""
    tags: Mapping[str, str] = field(default_factory=dict)
    log_weights: bool = False
    """True if the trained weights are an artifact too: ``model/weights.safetensors``."""

    def start(self, run: RunStart) -> RunListener:
        missing = "listeners=[MLflow(...)] needs mlflow; install it on the driver with: "
        with import_or(SparkDLError(f"{missing}pip install mlflow-skinny")):
            from mlflow.entities import Param
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient
        try:
            client = MlflowClient(tracking_uri=self.tracking_uri)
            found = client.get_experiment_by_name(self.experiment)
            experiment = (
                client.create_experiment(self.experiment) if found is None else found.experiment_id
            )
            tags = {**self.tags, "sparkdl.run_id": run.run_id}
            tracked = client.create_run(
                experiment, run_name=run.run_name or run.folder, tags=tags
            ).info.run_id
            params = [Param(name, text[:_LONGEST_VALUE]) for name, text in run.params.items()]
            client.log_batch(tracked, params=params)
        except MlflowException as error:
            raise SparkDLError(
                f"MLflow refuses the run: {error}; check tracking_uri and experiment"
            ) from error
        return _InOneRun(client, tracked, self.log_weights)


@dataclass(frozen=True)
class _InOneRun(RunListener):
    client: Any
    run_id: str
    log_weights: bool

    def facts(self, facts: Mapping[str, Any]) -> None:
        from mlflow.entities import RunTag

        shown = [
            RunTag(f"sparkdl.{name}", str(value)[:_LONGEST_TAG]) for name, value in facts.items()
        ]
        self.client.log_batch(self.run_id, tags=shown)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._log(step, {f"step_{name}": value for name, value in values.items()})

    def epoch(self, step: int, record: Mapping[str, float]) -> None:
        self._log(step, record)

    def layers(self, step: int, found: Mapping[str, Any]) -> None:
        ratios = [r for r in found.get("ratios", {}).values() if r is not None]
        if ratios:
            self._log(
                step, {"lowest_update_ratio": min(ratios), "highest_update_ratio": max(ratios)}
            )

    def failure(self, reason: str) -> None:
        self.client.set_tag(self.run_id, "sparkdl.last_failure", reason[:_LONGEST_TAG])

    def end(self, record: RunRecord, module: nn.Module | None) -> None:
        from sparkdl.report.page.report_page import page

        is_good = record.status == "succeeded"
        try:
            self.client.log_text(self.run_id, page(record), "report.html")
            text = json.dumps(finite(record.to_dict()), default=str)
            self.client.log_text(self.run_id, text, "run.json")
            if self.log_weights and module is not None:
                from sparkdl.serialization.saved_module import prepare_weights
                from sparkdl.storage.storage import open_storage

                with tempfile.TemporaryDirectory(prefix="sparkdl-") as folder:
                    prepare_weights(module.state_dict()).write(open_storage(folder), "model")
                    self.client.log_artifacts(self.run_id, f"{folder}/model", "model")
        finally:
            self.client.set_terminated(self.run_id, "FINISHED" if is_good else "FAILED")

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        found = [
            Metric(name, float(value), now, step)
            for name, value in values.items()
            if name not in ("epoch", "report") and math.isfinite(value)
        ]
        self.client.log_batch(self.run_id, metrics=found)
