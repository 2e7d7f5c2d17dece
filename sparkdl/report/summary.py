"""The summary of a fit: plain values, which are saved as JSON next to the model."""

from __future__ import annotations

import dataclasses
import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_origin, get_type_hints

from sparkdl.errors import StorageError, did_you_mean
from sparkdl.report.live.learning_curves import Curves, draw
from sparkdl.report.page.report_page import page
from sparkdl.report.record.run_record import Line, RunRecord, curve_names, curve_panels
from sparkdl.runtime.json_values import finite, fits

if TYPE_CHECKING:
    import matplotlib.figure
    import pandas as pd

_WIDTH = 80
"""Columns of a terminal."""
_IN_WORDS = {"preflight": "checks", "spool": "writing rows to local disks"}
"""Phases as the text of a summary names them; all others have their own names."""
_LEAST_SECONDS = 0.05
"""Shortest phase that is shown; shorter ones are in ``other``."""
_MOST_RANKS = 8
"""Ranks up to which each is shown."""


_PLAIN = {
    *("history", "phase_seconds", "restarts", "rows", "validation_rows", "skipped_rows", "shards"),
    *("mesh", "steps", "first_step", "world_size", "gang_sizes", "throughput_by_rank"),
    *("bytes_sent_by_rank", "population", "chosen"),
}
"""The values of a summary that are what JSON has, and never None."""


@dataclass(frozen=True, kw_only=True)
class WeightsOf:
    """Names a fitted model's weights; as text ``epoch 7 (best val_loss 0.1), of 10 epochs``."""

    values: dict[str, float]
    """The history's record of then: ``epoch``, ``loss``, and what else was measured."""
    best: str | None = None
    """The value for which they were chosen (`EarlyStopping.monitor`); None: they are the last."""
    planned_epochs: int
    last_epoch: float
    """The last one that was trained; a fraction if training ended within it."""
    stopped_early: bool = False
    """True if training was ended before its last planned epoch."""

    @property
    def epoch(self) -> float:
        """Epochs after which the model had them; a fraction if it was measured within an epoch."""
        return self.values["epoch"]

    def __str__(self) -> str:
        text = f"epoch {self.epoch:.4g}"
        if self.best is not None:
            text += f" (best {self.best} {self.values[self.best]:.4g})"
        text += f", of {self.planned_epochs} epoch{'s' * (self.planned_epochs != 1)}"
        return text + f"; stopped early after epoch {self.last_epoch:.4g}" * self.stopped_early

    def values_text(self) -> str:
        """Return what was measured then, as text, but for counts and costs."""
        names = curve_names([self.values])
        return ", ".join(f"{name} {self.values[name]:.5g}" for name in names)


@dataclass(frozen=True, kw_only=True)
class TrainingSummary:
    """The record of one fit: learning curves, times, rows, restarts."""

    history: list[dict[str, float]]
    """One record per epoch: ``epoch``, ``loss``, and ``val_loss`` and metrics where computed. With
    ``validationInterval`` also those of evaluations within epochs, over the epoch so far; ``epoch``
    is then a fraction, such as 1.25 after a quarter of the second one. ``learning_rate`` is that of
    the next step."""
    phase_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by phase: ``fit: <phase>`` on the driver, in their order, which add up to `seconds`;
    and ``rank 0: <what>``, on what rank 0 spent its time in the phase ``train``."""
    restarts: int = 0
    """Number of times that the gang was started again after the loss of a worker."""
    rows: int = 0
    """Training rows."""
    validation_rows: int = 0
    """Rows set aside for validation."""
    skipped_rows: int = 0
    """Rows that were left out, since ``on_error="skip"`` asks for that."""
    shards: str = ""
    """Number of parts that the rows had, and their origin: ``8 shards (own partitions)``, ``4
    shards (with those of an earlier fit)``; empty: of a summary of an older version."""
    mesh: str = ""
    """The mesh of workers that share the model, such as ``data=2, shard=2``; empty: none."""
    steps: int = 0
    """Optimizer steps of each rank."""
    first_step: int = 0
    """Step where this fit began: that of the checkpoint, or of the earlier fit, that it went on
    from; 0 if there was none."""
    world_size: int = 1
    """Workers in the end."""
    gang_sizes: list[list[int]] = field(default_factory=list)
    """``[step, workers]`` for each time that a gang began: with how many workers, and where."""
    throughput_by_rank: list[float] = field(default_factory=list)
    """Training rows per second of each rank while it trained."""
    bytes_sent_by_rank: list[int] = field(default_factory=list)
    """Bytes that each rank sent to others to agree with them, in the last attempt."""
    seconds: float = 0.0
    """Wall-clock seconds of the whole fit."""
    population: list[dict[str, float]] = field(default_factory=list)
    """Records of members that compete: ``step``, ``member``, and ``val_loss``, metrics,
    hyperparameters and contests where there were any."""
    run_name: str | None = None
    """Name that the user gave the run."""
    weights_of: WeightsOf | None = None
    """Epoch whose weights the model has, and why it has these; None: of a summary of an older
    version."""
    chosen: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Params that were ``"auto"`` -> ``value``, and ``reason`` with the numbers; the seconds that
    choosing took are those of the phase ``fit: choose``."""
    report_path: str | None = None
    """Path of the page that the fit has left; None: it has left none."""
    record: RunRecord | None = field(default=None, repr=False, compare=False)
    """All that is known of the fit; not saved with the model."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Say where a number is, or which name is meant."""
            if name.startswith("_"):
                return object.__getattribute__(self, name)  # raises its own error
            remedy = did_you_mean(name, [one for one in dir(self) if one[0] != "_"])
            if any(name in record for record in self.history):
                remedy = f"; each epoch has one: history[-1][{name!r}] is that of the last"
            raise AttributeError(f"TrainingSummary has no {name!r}{remedy}", name=name, obj=None)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values; numbers that JSON cannot hold become None."""
        own = [entry.name for entry in dataclasses.fields(self) if entry.name != "record"]
        values = {name: getattr(self, name) for name in own}
        if self.weights_of is not None:
            values["weights_of"] = dataclasses.asdict(self.weights_of)
        return dict(finite(values))

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
        hints = {name: get_origin(hint) or hint for name, hint in get_type_hints(cls).items()}
        odd = [name for name in values.keys() & _PLAIN if not fits(values[name], hints[name])]
        if odd:
            raise StorageError(f"the values {sorted(odd)} of a training summary are of other types")
        records: dict[str, Any] = {
            name: [_with_nan(record) for record in values.get(name, [])]
            for name in ("history", "population")
        }
        if (weights := values.get("weights_of")) is not None:
            records["weights_of"] = WeightsOf(**{**weights, "values": _with_nan(weights["values"])})
        return cls(**{**values, **records})

    def to_pandas(self) -> pd.DataFrame:
        """The history as a pandas DataFrame, one row per record."""
        import pandas as pd

        return pd.DataFrame(self.history)

    def plot(self, path: str | Path | None = None) -> matplotlib.figure.Figure:
        """Draw the learning curves: the loss, and every metric in a panel of its own.

        Args:
            path: file to write (the suffix chooses the format); None writes none.

        Raises:
            SparkDLError: matplotlib is not installed.
        """
        figure = draw([Curves(name="fit", history=self.history, has_costs=True)])
        if path is not None:
            figure.savefig(path)
        return figure

    def write_report(self, path: str | Path) -> Path:
        """Write the fit's page to a file of this host.

        The page of a model that was saved and loaded has its curves and numbers, but not the
        course of its training, which is in ``reportDir``.

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
        """Return what a saved model still knows of the fit that made it."""
        return RunRecord(
            run_id="of a saved model",
            name="fit",
            run_name=self.run_name or "",
            started=0.0,
            status="succeeded",
            seconds=self.seconds,
            facts={
                "workers": self.world_size,
                "rows": self.rows,
                "validation_rows": self.validation_rows,
                **({"shards": self.shards} if self.shards else {}),
                **({"mesh": self.mesh} if self.mesh else {}),
                "steps": self.steps,
                **({"chosen": self.chosen} if self.chosen else {}),
            },
            laps={
                name.removeprefix("fit: "): seconds
                for name, seconds in self.phase_seconds.items()
                if name.startswith("fit: ")
            },
            history=[dict(record) for record in self.history],
            weights=str(self.weights_of or ""),
            kept={} if self.weights_of is None else dict(self.weights_of.values),
        )

    def curves(self) -> dict[str, dict[str, Line]]:
        """Panel -> line -> (epochs, values): ``loss`` and ``val_loss`` share a panel, and so on."""
        return {"loss": {}, **curve_panels(self.history, has_costs=True)}

    def __repr__(self) -> str:
        lines = []
        for name, value in self._lines():
            wrapped = textwrap.wrap(value, _WIDTH - 19) or [""]
            lines += [f"  {n:<16} {v}" for n, v in zip_longest([name], wrapped, fillvalue="")]
        return "\n".join(["TrainingSummary:", *lines])

    def _repr_html_(self) -> str:
        import pandas as pd

        with pd.option_context("display.max_colwidth", None):
            facts = pd.DataFrame(self._lines()).to_html(index=False, header=False, justify="left")
        table: str = self.to_pandas().tail(20).to_html(index=False, float_format="%.5g")
        return f"{facts}{table}"

    @property
    def workers_text(self) -> str:
        """The number of workers, such as ``2 workers, 1 from step 30`` if that changed."""
        first = self.gang_sizes[0][1] if self.gang_sizes else self.world_size
        text, size = f"{first} worker" + "s" * (first != 1), first
        for step, later in self.gang_sizes[1:]:
            if later != size:
                text += f", {later} from step {step:,}"
            size = later
        return text

    def _lines(self) -> list[tuple[str, str]]:
        rows = f"{self.rows:,} training, {self.validation_rows:,} validation"
        rows += f", {self.skipped_rows:,} skipped" * bool(self.skipped_rows)
        groups: dict[str, dict[str, float]] = {}
        for name, seconds in self.phase_seconds.items():
            where, _, what = name.rpartition(": ")
            groups.setdefault("" if where == "fit" else where, {})[what] = seconds
        numbers = [record["epoch"] for record in self.history] or [0]
        epochs = numbers[-1] - math.ceil(numbers[0]) + bool(self.history)
        mesh = f", along {self.mesh}" * bool(self.mesh)
        lines = [
            ("rows", rows + f", in {self.shards}" * bool(self.shards)),
            ("epochs", f"{epochs:.4g}, {self.steps:,} steps on {self.workers_text}{mesh}"),
        ]
        if self.first_step:
            lines.append(("went on from", f"step {self.first_step:,}"))
        if self.run_name:
            lines.insert(0, ("name", self.run_name))
        lines += [
            (name, f"{choice['value']}: {choice['reason']}") for name, choice in self.chosen.items()
        ]
        if self.weights_of is not None:
            lines.append(("weights of", str(self.weights_of)))
            lines.append(("", self.weights_of.values_text()))
        lines.append(("restarts", str(self.restarts)))
        phases = groups.pop("", {})
        lines.append(("seconds", f"{self.seconds:.1f} ({_phases_text(phases)})"))
        start = "starting" if not self.restarts else "starting and what was lost"
        for where, spent in groups.items():
            before = {start: phases.get("train", 0.0) - sum(spent.values())}
            lines.append((f"of train, {where}", _phases_text({**before, **spent})))
        lines.append(("rows/s by rank", _rates_text(self.throughput_by_rank)))
        if self.history and (self.weights_of is None or self.weights_of.best is not None):
            last = [f"{k} {value:.5g}" for k, value in self.history[-1].items() if k != "epoch"]
            lines.append(("last epoch", ", ".join(last)))
        return lines


def _with_nan(record: Mapping[str, Any]) -> dict[str, Any]:
    """Restore the NaN that JSON had to leave out."""
    return {key: math.nan if value is None else value for key, value in record.items()}


def _phases_text(seconds: Mapping[str, float]) -> str:
    """Phases that can be seen, and the rest as ``other``, so that they add up."""
    shown = {k: v for k, v in seconds.items() if v >= _LEAST_SECONDS and k != "other"}
    rest = sum(seconds.values()) - sum(shown.values())
    if rest >= _LEAST_SECONDS:
        shown["other"] = rest
    return ", ".join(f"{_IN_WORDS.get(k, k)} {value:.1f}" for k, value in shown.items()) or "0"


def _rates_text(rates: Sequence[float]) -> str:
    if len(rates) <= _MOST_RANKS:
        return ", ".join(f"{rate:,.0f}" for rate in rates)
    found = f"{min(rates):,.0f} to {max(rates):,.0f}, median {statistics.median(rates):,.0f}"
    return f"{found}, of {len(rates)} ranks"
