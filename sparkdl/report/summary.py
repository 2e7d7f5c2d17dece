"""The summary of a fit: plain values, kept with the fitted model.

The driver makes it from what the ranks reported; it is saved as JSON next to the model. It needs
neither torch nor pyspark.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.errors import SparkDLError, StorageError, import_or
from sparkdl.report.page.report_page import page
from sparkdl.report.record.run_record import Line, RunRecord, curve_panels
from sparkdl.runtime.json_values import finite

if TYPE_CHECKING:
    import matplotlib.figure
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class TrainingSummary:
    """The record of one fit: learning curves, times, rows, restarts."""

    history: list[dict[str, float]]
    """One record per epoch: ``epoch``, ``loss``, and ``val_loss`` and metrics where computed. With
    ``validationInterval`` also those of evaluations within epochs, over the epoch so far; ``epoch``
    is then a fraction, such as 1.25 after a quarter of the second one."""
    phase_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds spent in each phase of the fit, in the order of the phases."""
    restarts: int = 0
    """How often the gang was started again after the loss of a worker."""
    rows: int = 0
    """Training rows."""
    validation_rows: int = 0
    skipped_rows: int = 0
    """Rows that were left out, since ``on_error="skip"`` asks for that."""
    steps: int = 0
    """Optimizer steps of each rank."""
    world_size: int = 1
    throughput_by_rank: list[float] = field(default_factory=list)
    """Training rows per second of each rank while it trained."""
    bytes_sent_by_rank: list[int] = field(default_factory=list)
    """What each rank sent to others to agree with them, in the last attempt."""
    seconds: float = 0.0
    """Wall-clock seconds of the whole fit."""
    population: list[dict[str, float]] = field(default_factory=list)
    """What was seen of members that compete: ``step``, ``member``, and ``val_loss``, metrics,
    hyperparameters and contests where there were any."""
    report_path: str | None = None
    """Where the fit has left its page; None: nowhere."""
    record: RunRecord | None = field(default=None, repr=False, compare=False)
    """All that is known of the fit; not saved with the model."""

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values; numbers that JSON cannot hold become None."""
        own = [entry.name for entry in dataclasses.fields(self) if entry.name != "record"]
        return dict(finite({name: getattr(self, name) for name in own}))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainingSummary:
        """Rebuild a summary from `to_dict`.

        Raises:
            StorageError: the values are not those of a summary of this version.
        """
        known = {entry.name for entry in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown or "history" not in values:
            raise StorageError(
                f"these are not the values of a training summary: unknown keys {unknown}, "
                f"known keys {sorted(known)}"
            )
        records = {
            name: [
                {key: math.nan if value is None else value for key, value in record.items()}
                for record in values.get(name, [])
            ]
            for name in ("history", "population")
        }
        return cls(**{**values, **records})

    def to_pandas(self) -> pd.DataFrame:
        """The history as a pandas DataFrame, one row per record."""
        import pandas as pd

        return pd.DataFrame(self.history)

    def plot(self, path: str | Path | None = None) -> matplotlib.figure.Figure:
        """Draw the learning curves: the loss, and every metric in a panel of its own.

        Args:
            path: file to write (the suffix chooses the format); None writes none.

        Returns:
            The matplotlib figure.

        Raises:
            SparkDLError: matplotlib is not installed.
        """
        remedy = "plot() needs matplotlib; install it with: pip install 'sparkdl-torch[plot]'"
        with import_or(SparkDLError(remedy)):
            from matplotlib.figure import Figure
        panels = self.curves()
        figure = Figure(figsize=(5.0 * len(panels), 3.5), layout="constrained")
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axis, (title, lines) in zip(axes, panels.items(), strict=True):
            for label, (epochs, values) in lines.items():
                axis.plot(epochs, values, marker="o", markersize=3, label=label)
            axis.set(title=title, xlabel="epoch")
            axis.legend()
        if path is not None:
            figure.savefig(path)
        return figure

    def write_report(self, path: str | Path) -> Path:
        """Write the fit's page to a file of this host.

        The page of a model that was saved and loaded has its curves and numbers, but not the
        course of its training, which is in ``reportDir``.

        Returns:
            The path.

        Raises:
            StorageError: it cannot be written.
        """
        target = Path(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(page(self.record or self._as_record()), encoding="utf-8")
        except OSError as error:
            raise StorageError(f"cannot write {target}: {error}; choose another path") from error
        return target

    def _as_record(self) -> RunRecord:
        """What a saved model still knows of the fit that made it."""
        return RunRecord(
            run_id="of a saved model",
            name="fit",
            started=0.0,
            status="succeeded",
            seconds=self.seconds,
            facts={
                "workers": self.world_size,
                "rows": self.rows,
                "validation_rows": self.validation_rows,
                "steps": self.steps,
            },
            laps={
                name.removeprefix("fit: "): seconds
                for name, seconds in self.phase_seconds.items()
                if name.startswith("fit: ")
            },
            history=[dict(record) for record in self.history],
        )

    def curves(self) -> dict[str, dict[str, Line]]:
        """Panel -> line -> (epochs, values): ``loss`` and ``val_loss`` share a panel, and so on."""
        return {"loss": {}, **curve_panels(self.history, has_costs=True)}

    def __repr__(self) -> str:
        return "TrainingSummary:\n" + "\n".join(
            f"  {name:<16} {value}" for name, value in self._lines()
        )

    def _repr_html_(self) -> str:
        """The summary as notebooks show it: the facts, then the last epochs of the history."""
        facts = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
            f"<td style='text-align:left'>{html.escape(value)}</td></tr>"
            for name, value in self._lines()
        )
        table: str = self.to_pandas().tail(20).to_html(index=False, float_format="%.5g")
        return f"<table>{facts}</table>{table}"

    def _lines(self) -> list[tuple[str, str]]:
        phases = ", ".join(f"{name} {spent:.1f}" for name, spent in self.phase_seconds.items())
        rows = f"{self.rows:,} training, {self.validation_rows:,} validation"
        epochs = self.history[-1]["epoch"] if self.history else 0
        lines = [
            ("rows", rows + f", {self.skipped_rows:,} skipped" * bool(self.skipped_rows)),
            ("epochs", f"{epochs:.4g}, {self.steps:,} steps on {self.world_size} worker(s)"),
            ("restarts", str(self.restarts)),
            ("seconds", f"{self.seconds:.1f} ({phases})"),
            ("rows/s by rank", ", ".join(f"{rate:,.0f}" for rate in self.throughput_by_rank)),
        ]
        if self.history:
            last = [f"{k} {value:.5g}" for k, value in self.history[-1].items() if k != "epoch"]
            lines.append(("last epoch", ", ".join(last)))
        return lines
