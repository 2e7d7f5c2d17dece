"""The value that ``explain`` returns, with text, HTML and JSON."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sparkdl.explain.mesh_memory import MeshMemory, smallest_that_fits
from sparkdl.explain.predict_times import Prediction
from sparkdl.report.page.formats import size
from sparkdl.report.page.render import render
from sparkdl.runtime.json_values import finite
from sparkdl.sync.strategy import SyncStrategy

_WIDTH = 80
"""Columns of a terminal."""

Table = Sequence[tuple[str, ...]]
"""Rows of cells."""


class _Section(NamedTuple):
    """A part of the explanation as it is shown."""

    title: str
    rows: Table = ()
    points: Sequence[str] = ()
    has_head: bool = False
    """True if the first row names the columns; otherwise rows are names and texts."""


@dataclass(frozen=True, kw_only=True)
class PlanFacts:
    """Describes what a fit would do, without times."""

    master: str
    slots: int | None
    """Workers of this kind that the cluster has room for; None: not known."""
    num_workers: int
    threads: int
    mode: str
    """``gang`` or ``rounds``."""
    device: str
    strategy: str
    rows: int
    validation_rows: int
    rows_by_shard: tuple[int, ...]
    batch_size: int
    epochs: int
    steps_per_epoch: int
    total_steps: int
    parameters: int
    replica_bytes: int
    optimizer_bytes: int
    worker_bytes: int
    """Tensors of a worker: replica, gradients, optimizer, and a checkpoint's copies of these."""
    process_bytes: int
    """A worker's tensors, and Python with torch; without the activations of a batch."""
    peak_bytes: int | None
    """Measured with the largest batch that was tried, Python included; None: not measured."""
    spool_bytes: int
    """Bytes of the spool of the fullest worker, on its disk."""
    sent_bytes_per_step: float | None
    """Bytes that each worker sends in a step; None: it depends on the data."""
    checkpoint_bytes: int
    checkpoint_interval: int
    shard_choice: str = ""
    """Description of what makes a shard, and why."""
    kept: str = ""
    """Text that says whether the spool is there already, if it is to be kept."""

    @property
    def skew(self) -> float:
        """Rows of the fullest shard over the mean."""
        mean = self.rows / max(1, len(self.rows_by_shard))
        return max(self.rows_by_shard, default=0) / mean if mean else 1.0


@dataclass(frozen=True, kw_only=True)
class ScalingRow(Prediction):
    """A fit with one number of workers."""

    speedup: float
    """Speedup of an epoch, over that with one worker."""
    same_global_batch_seconds: float | None
    """An epoch with batches so much smaller that all workers together use as many samples per
    step as the plan; None: that would be less than one sample each."""


@dataclass(frozen=True, kw_only=True)
class StrategyRow:
    """A strategy with the plan's number of workers."""

    strategy: str
    mode: str
    period: float | None = None
    step_seconds: float | None = None
    exchange_share: float | None = None
    sent_bytes_per_step: float | None = None
    epoch_seconds: float | None = None
    total_seconds: float | None = None
    why_not: str | None = None
    """Why it cannot be used; then it has no numbers."""


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The settings that are recommended, and the reasons."""

    num_workers: int
    strategy: str
    """As a user writes it."""
    sync_strategy: SyncStrategy = field(repr=False)
    """The same, as ``syncStrategy`` takes it."""
    averaging_period: int | None
    """Steps of a round; None: the strategy has no rounds of several steps."""
    total_seconds: float
    is_one_machine_faster: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The plan of a fit, what it would take, and what would be better.

    Example::

        explanation = estimator.explain(df)
        print(explanation)
        model = explanation.recommended.fit(df)
    """

    plan: PlanFacts
    scaling: tuple[ScalingRow, ...] = ()
    """Empty without calibration."""
    strategies: tuple[StrategyRow, ...] = ()
    meshes: tuple[MeshMemory, ...] = ()
    """Memory of workers along meshes; empty without ``parallelism``."""
    recommendation: Recommendation | None = None
    chosen: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Params that are ``"auto"``; see `TrainingSummary.chosen`."""
    recommended: Any = field(default=None, repr=False, compare=False)
    """A copy of the estimator with what is recommended, which can be fitted; None where there is
    no recommendation."""
    notes: tuple[str, ...] = ()
    """Notes on what was estimated, from what, and what the numbers do not hold for."""
    measured: tuple[tuple[str, str], ...] = ()
    """Measurements, as name and text."""
    explain_seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return what is shown, as plain values; numbers that JSON cannot hold become None."""
        values = dataclasses.asdict(dataclasses.replace(self, recommended=None))
        del values["recommended"]
        if values["recommendation"] is not None:
            del values["recommendation"]["sync_strategy"]
        plain: dict[str, Any] = finite(values)
        return plain

    def lines(self) -> list[str]:
        """The explanation as text of at most 80 columns."""
        found: list[str] = []
        for section in self._sections():
            rows = _table(section.rows) if section.has_head else _aligned(section.rows)
            found += ["", *_wrapped(section.title, "  ", ""), *rows]
            for point in section.points:
                found += _wrapped(point, "    ", "  - ")
        return found[1:]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        return str(render("explanation.html", sections=list(self._sections())))

    def _sections(self) -> Iterator[_Section]:
        yield _Section("plan", self._facts())
        if self.chosen:
            yield _Section(
                "chosen",
                [(name, f"{c['value']}: {c['reason']}") for name, c in self.chosen.items()],
            )
        if self.scaling:
            title = f"{self.plan.strategy}, by number of workers"
            yield _Section(title, self._scaling(), has_head=True)
        if self.strategies:
            title = f"strategies, {self._workers()}"
            yield _Section(title, self._strategies(), has_head=True)
        if self.meshes:
            title = "memory per worker, and sent per step along each axis"
            yield _Section(title, self._meshes(), [*self._mesh_points()], has_head=True)
        if self.recommendation is not None:
            yield _Section("recommended", self._recommended(), self.recommendation.reasons)
        if self.measured:
            yield _Section(f"measured in {self.explain_seconds:.0f} s", self.measured)
        if self.notes:
            yield _Section("notes", points=self.notes)

    def _workers(self) -> str:
        return f"{self.plan.num_workers} worker" + "s" * (self.plan.num_workers > 1)

    def _facts(self) -> list[tuple[str, str]]:
        plan = self.plan
        slots = "not known" if plan.slots is None else str(plan.slots)
        last = f", every {plan.checkpoint_interval} steps" * (plan.checkpoint_interval > 0)
        sent = plan.sent_bytes_per_step
        return [
            ("cluster", f"{plan.master}, slots: {slots}"),
            ("workers", f"{self._workers()} of {plan.threads} thread"
                        f"{'s' * (plan.threads != 1)}, {plan.mode}, {plan.device}"),
            ("strategy", plan.strategy),
            ("rows", f"{plan.rows:,} training, {plan.validation_rows:,} validation"),
            ("shards", f"{len(plan.rows_by_shard)}, the fullest {max(plan.rows_by_shard):,} rows "
                       f"({plan.skew:.2f} of the mean)"
                       + f"; made of {plan.shard_choice}" * bool(plan.shard_choice)),
            ("steps", f"{plan.steps_per_epoch:,} per epoch, {plan.total_steps:,} in "
                      f"{plan.epochs} epoch{'s' * (plan.epochs != 1)}, batches of up to "
                      f"{plan.batch_size} per shard"),
            ("parameters", f"{plan.parameters:,}"),
            ("memory per worker", f"{size(plan.process_bytes)} "
                                  f"({size(plan.worker_bytes)} of tensors)"
                                  + ("" if plan.peak_bytes is None
                                     else f", measured: {size(plan.peak_bytes)}")),
            ("spool per worker", size(plan.spool_bytes) + f"; {plan.kept}" * bool(plan.kept)),
            ("sent per step", "depends on the data" if sent is None
                              else f"{size(sent)} by each worker"),
            ("checkpoint", f"{size(plan.checkpoint_bytes)}{last}"),
        ]  # fmt: skip

    def _scaling(self) -> Table:
        head = ("workers", "nodes", "steps", "step", "agree", "wait", "epoch", "speed-up",
                "epoch, same global batch", "whole fit")  # fmt: skip
        rows = [
            (
                f"{one.workers:,}",
                f"{one.nodes:,}",
                f"{one.steps_per_epoch:,}",
                seconds_text(one.step_seconds),
                f"{one.exchange_share:.0%}",
                f"{one.waiting_share:.0%}",
                seconds_text(one.epoch_seconds),
                f"{one.speedup:.2f}",
                _or_dash(one.same_global_batch_seconds),
                seconds_text(one.total_seconds),
            )
            for one in self.scaling
        ]
        return [head, *rows]

    def _strategies(self) -> Table:
        head = ("strategy", "mode", "round", "step", "agree", "sent per step", "epoch",
                "whole fit")  # fmt: skip
        return [head, *map(_strategy_cells, self.strategies)]

    def _meshes(self) -> Table:
        head = ("mesh", "weights", "gradients", "optimizer", "gathered", "in all", "data", "shard")
        rows = [
            (
                f"{one.mesh} ({one.workers})",
                size(one.parameter_bytes),
                size(one.gradient_bytes),
                size(one.optimizer_bytes),
                size(one.gathered_bytes),
                size(one.total_bytes),
                size(one.data_bytes),
                size(one.shard_bytes),
            )
            for one in self.meshes
        ]
        return [head, *rows]

    def _mesh_points(self) -> Iterator[str]:
        best = smallest_that_fits(self.meshes)
        if any(one.fits is None for one in self.meshes):
            yield "the memory of a worker is not known, so no mesh is recommended"
        elif best is None:
            yield "none of these fits into the memory of a worker"
        else:
            what = "no mesh is needed" if best.mesh == "none" else f"Mesh({best.mesh})"
            yield f"recommended, as the smallest that fits: {what}"
        if any(one.sends_activations for one in self.meshes):
            yield (
                "what is sent along tensor and pipeline depends on the rows of a batch and is not "
                "shown"
            )
        yield "activations are not counted; times of a mesh are not predicted, only these bytes"

    def _recommended(self) -> list[tuple[str, str]]:
        best = self.recommendation
        assert best is not None
        rows = [("numWorkers", str(best.num_workers)), ("syncStrategy", best.strategy)]
        if best.averaging_period is not None:
            rows.append(("averaging_period", str(best.averaging_period)))
        return [*rows, ("whole fit", f"about {seconds_text(best.total_seconds)}")]


def seconds_text(seconds: float) -> str:
    """A duration as people say it."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    if seconds < 6000:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h"


def _strategy_cells(row: StrategyRow) -> tuple[str, ...]:
    if row.why_not is not None:
        return (row.strategy, row.mode, f"not possible: {row.why_not}")
    sent = row.sent_bytes_per_step
    return (
        row.strategy,
        row.mode,
        f"{row.period:,.0f}",
        _or_dash(row.step_seconds),
        f"{row.exchange_share:.0%}",
        "?" if sent is None else size(sent),
        _or_dash(row.epoch_seconds),
        _or_dash(row.total_seconds),
    )


def _or_dash(seconds: float | None) -> str:
    return "-" if seconds is None else seconds_text(seconds)


def _wrapped(text: str, indent: str, first: str | None = None) -> list[str]:
    """Text in lines of a terminal; the ``first`` begins otherwise than the others."""
    begin = indent if first is None else first
    return textwrap.wrap(  # paths stay whole
        text, _WIDTH, initial_indent=begin, subsequent_indent=indent, break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip


def _aligned(rows: Table) -> list[str]:
    width = max((len(name) for name, _ in rows), default=0)
    lines = []
    for name, text in rows:
        lines += _wrapped(text, " " * (width + 4), f"  {name:<{width}}  ")
    return lines


def _table(rows: Table) -> list[str]:
    """Columns of text, the first to the left, the others to the right.

    A first cell that leaves the others no room has a line of its own. The last cell of a row that
    has fewer runs on.
    """
    head, *body = rows
    full = [cells[1:] for cells in body if len(cells) == len(head)]
    longest = [max(map(len, title.replace("-", "- ").split())) for title in head[1:]]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)] or longest
    widths = [max(pair) for pair in zip(widths, longest, strict=True)]
    gap = "  " if sum(widths) + 2 * len(head) + len(head[0]) <= _WIDTH else " "
    room = _WIDTH - 2 - sum(widths) - len(gap) * len(widths)
    left = max(len(cells[0]) for cells in rows if len(cells[0]) <= room)

    def line(first: str, others: Sequence[str]) -> str:
        cells = map(str.rjust, others, widths)
        return gap.join([f"  {first:<{left}}", *cells]).rstrip()

    titles = [textwrap.wrap(title, width) for title, width in zip(head[1:], widths, strict=True)]
    height = max(map(len, titles))
    titles = [[""] * (height - len(title)) + title for title in titles]
    *above, last = zip(*titles, strict=True)
    lines = [*(line("", title) for title in above), line(head[0], last)]
    for first, *others in body:
        if len(others) < len(widths):
            lines += _wrapped("  ".join([first, *others]), " " * 6, "  ")
        elif len(first) <= left:
            lines.append(line(first, others))
        else:
            lines += [*_wrapped(first, "      ", "  "), line("", others)]
    return lines
