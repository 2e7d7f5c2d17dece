"""A listener that writes the curves of a run for TensorBoard, on the driver."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkdl.errors import SparkDLError, import_or
from sparkdl.report.listeners.listener import Listener, RunListener, RunStart

if TYPE_CHECKING:
    from torch import nn

    from sparkdl.report.record.run_record import RunRecord


@dataclass(frozen=True, kw_only=True)
class TensorBoard(Listener):
    """Writes each run's values for TensorBoard, into a folder of its own below ``log_dir``.

    Scalars by step: ``step/loss`` and ``step/rows_per_second`` twice a second at most, and
    ``epoch/<name>`` for every value of the history. Texts: Params, facts, failures.

    Example::

        TorchClassifier(module=make_net, listeners=[TensorBoard(log_dir="tb")]).fit(df)
        # tensorboard --logdir tb

    Raises, when a fit begins:
        SparkDLError: the package tensorboard is not installed.
    """

    log_dir: str = "runs/tensorboard"
    """A directory of the driver, or a URL that TensorBoard's own files can be written to."""
    flush_seconds: float = 5.0
    """How long values may wait before they are written."""

    def start(self, run: RunStart) -> RunListener:
        missing = "listeners=[TensorBoard(...)] needs tensorboard; install it on the driver with: "
        with import_or(SparkDLError(f"{missing}pip install tensorboard")):
            from torch.utils.tensorboard import SummaryWriter
        folder = f"{self.log_dir.rstrip('/')}/{run.folder}"
        writer = SummaryWriter(folder, flush_secs=max(1, round(self.flush_seconds)))
        writer.add_text("params", _as_table(run.params))
        return _InOneRun(writer)


class _InOneRun(RunListener):
    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._num_failures = 0

    def facts(self, facts: Mapping[str, Any]) -> None:
        self._writer.add_text("facts", _as_table(facts))

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._add("step", step, values)

    def epoch(self, step: int, record: Mapping[str, float]) -> None:
        own = {k: v for k, v in record.items() if k not in ("epoch", "report", "steps")}
        self._add("epoch", step, own)

    def failure(self, reason: str) -> None:
        self._num_failures += 1
        self._writer.add_text("failures", reason, self._num_failures)

    def end(self, record: RunRecord, module: nn.Module | None) -> None:
        self._writer.add_text("status", record.status)
        self._writer.close()

    def _add(self, group: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if math.isfinite(value):
                self._writer.add_scalar(f"{group}/{name}", value, step)


def _as_table(values: Mapping[str, Any]) -> str:
    """A table in Markdown."""
    rows = [f"| {_cell(name)} | {_cell(value)} |" for name, value in values.items()]
    return "\n".join(["| name | value |", "|---|---|", *rows])


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
