"""The recorder writes down on the driver what happens in a run, and calls the run's listeners.

It keeps everything in memory, with long lists thinned; another thread writes it to the storage. If
that fails, the run goes on without a report, with one warning.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparkdl.errors import SparkDLError, WorkerError
from sparkdl.report.listeners.listener import Listener, Listeners, RunStart
from sparkdl.report.live.progress import Progress, View
from sparkdl.report.live.views import Views
from sparkdl.report.page.report_page import page
from sparkdl.report.record.run_folder import RunFolder, folder_name
from sparkdl.report.record.run_record import Event, RecordBuilder, RunRecord, presentable, thin
from sparkdl.report.record.time_spans import Spans
from sparkdl.runtime.activity import shown_by
from sparkdl.storage.storage import Storage, without_password

if TYPE_CHECKING:
    from torch import nn

    from sparkdl.data.plan import TrainPlan
    from sparkdl.report.summary import WeightsOf

logger = logging.getLogger(__name__)

_IN_WORDS = {
    "preflight": ("checking what is asked for", True),
    "choose": ("choosing the values that are automatic", True),
    "wait": ("waiting for other fits to leave slots", False),
    "first rows": ("trying the module on the first rows", True),
    "executors": ("checking the executors", True),
    "spool": ("writing the rows for the workers", True),
    "train": ("starting workers", False),
    "clean up": ("cleaning up", False),
}
"""Phases of a run, as views show them, and whether Spark's tasks say how far they are."""
_WRITE_SECONDS = 1.0
_SLOWER_BY = 0.01
"""Pause as a part of a run's age: files are written more seldom later, lest they become many."""
_SILENT_WRITES = 10
"""Pauses that its driver may be silent for, and half a minute, before a run counts as lost."""
_STEPS_KEPT = 500
_USUAL_STEPS = 10
"""Steps of an epoch that are proposed where it has but one."""
_MOST_WAITING = 100_000
"""Events that may wait for a storage that stalls; the record at the end has those beyond, too."""


class Recorder(View):
    """Writes down one run, and passes it on to its views. Made by `recording`."""

    def __init__(
        self,
        folder: RunFolder | None,
        began: Mapping[str, Any],
        views: Views | None = None,
    ) -> None:
        """Begin, with the known fields of `RunRecord`; without a folder only memory has it."""
        self._clock = time.perf_counter()
        self._phase, self._phase_began = "", 0.0
        self._laps: dict[str, float] = {}
        self._builder = RecordBuilder()
        self._waiting: list[Event] = []
        self._lock = threading.Lock()
        self._folder = folder
        self.listeners = Listeners()
        self._views = Views() if views is None else views
        self._spans = Spans(1)
        self._world_size = 1
        self._steps_per_epoch = self._first_epoch = self._first_step = 0
        self._step = 0
        self._step_noted = -1.0
        self._unnoted: dict[str, Any] | None = None
        self._rows: tuple[float, float] | None = None
        self._history: list[dict[str, float]] = []
        self._module: nn.Module | None = None
        self._weights: WeightsOf | None = None
        self._stop = threading.Event()
        self._writer = threading.Thread(target=self._keep_writing, name="sparkdl-record")
        self._writer.daemon = True
        self._note("begin", started=time.time(), **began)
        if self._folder is not None:
            self._folder.append(self._taken())  # a place that cannot be written to ends the fit
            self._writer.start()

    def show(self, make: Callable[[], View]) -> None:
        """Make a view, and have it show the run; an error ends neither, but see `View.ends_run`."""
        self._views.open(make)

    def doing(self, what: str, detail: str | None = None) -> None:
        """Show what the driver does within the present phase; it is not recorded."""
        self._views.activity(what, detail)

    # --- called by the fit ---------------------------------------------------------------------

    def phase(self, name: str) -> None:
        """Another phase of the run begins on the driver, and the one before it ends."""
        self.end_phase()
        self._phase, self._phase_began = name, self._now()
        self._note("phase", name=name)
        words, has_tasks = _IN_WORDS.get(name, (name, True))
        self.doing(words, None if has_tasks else "")

    def end_phase(self) -> Mapping[str, float]:
        """The phase that goes on ends; returns phase -> seconds, in order, of all that did."""
        if self._phase:
            seconds = self._now() - self._phase_began
            self._laps[self._phase] = self._laps.get(self._phase, 0.0) + seconds
            self._note("lap", name=self._phase, seconds=seconds)
            self._phase = ""
        return self._laps

    def facts(self, *, world_size: int, **facts: Any) -> None:
        """Record what is known before training begins; ``world_size`` ranks will report."""
        self._world_size = world_size
        self._steps_per_epoch = int(facts.get("steps_per_epoch", 0))
        self._first_epoch = int(facts.get("first_epoch", 0))
        self._first_step = int(facts.get("first_step", 0))
        shown = presentable({"workers": world_size, **facts})
        self._note("facts", facts=shown)
        self.listeners.call(lambda listener: listener.facts(shown))

    def planned(self, plan: TrainPlan) -> None:
        """Show the steps of a fit, and warn if an epoch has but one where it could have more."""
        self._views.call(lambda view: view.planned(plan))
        most = max(plan.rows_of(rank) for rank in range(plan.world_size))
        if 1 < most < plan.batch_size:
            choice = max(1, most // _USUAL_STEPS)
            logger.warning(
                "batchSize=%d is more than the %d rows that a worker has, so an epoch is a single "
                "step on all rows; for %d steps choose batchSize=%d",
                *(plan.batch_size, most, -(-most // choice), choice),
            )

    def graph(self, graph: Mapping[str, Any]) -> None:
        """Record what the module is made of; see `record.module_graph`."""
        self._note("graph", graph=graph)
        self.listeners.call(lambda listener: listener.graph(graph))

    # --- called by the supervisor -------------------------------------------------------------

    def attempt(self, number: int, start_step: int, workers: int | None = None) -> None:
        self._views.call(lambda view: view.attempt(number, start_step, workers))
        self._flush()
        self._spans = Spans(self._world_size)
        self._rows = None
        self._step = start_step
        told = {} if workers is None else {"workers": workers}
        self._note("attempt", number=number, start_step=start_step, **told)

    def begun_again(self, number: int, step: int | None) -> None:
        self._views.call(lambda view: view.begun_again(number, step))
        self._note("attempt", number=number, start_step=step)

    def failure(self, reason: str) -> None:
        self._flush()
        shown = presentable(reason)
        self._note("failure", reason=shown)
        self.listeners.call(lambda listener: listener.failure(shown))

    def progress(self, rank: int, progress: Progress) -> None:
        self._views.call(lambda view: view.progress(rank, progress))
        if progress.seconds:
            self.spent(rank, progress.seconds)
        if rank == 0 and progress.step > self._step:
            self._take_step(progress.step, progress.loss, progress.rows)

    def spent(self, rank: int, totals: Mapping[str, float]) -> None:
        self._note_spans(self._spans.take(rank, totals, self._now()))

    def fact(self, rank: int, body: Mapping[str, Any]) -> None:
        if body["kind"] == "hardware":
            self._note("hardware", rank=rank, hardware=body["hardware"])
        elif body["kind"] == "confusion":
            self._note("confusion", epoch=body["epoch"], counts=body["counts"])
        elif body["kind"] == "layers":
            step = int(body["step"])
            if ratios := body.get("ratios"):
                self._note("layers", step=step, ratios=ratios)
            self.listeners.layers(step, body)

    def epoch(self, record: Mapping[str, float]) -> None:
        self._views.call(lambda view: view.epoch(record))
        self._note("epoch", record=dict(record))
        if "report" in record:
            step = int(record["report"])
        else:
            epoch = math.ceil(record["epoch"]) - 1 - self._first_epoch
            step = int(self._first_step + epoch * self._steps_per_epoch + record["steps"])
        self.listeners.call(lambda listener: listener.epoch(step, record))

    def log(self, rank: int, line: str, level: int) -> None:
        """Pass the line on; warnings are kept."""
        self._views.call(lambda view: view.log(rank, line, level))
        if level >= logging.WARNING:
            self._note("log", rank=rank, level=logging.getLevelName(level), line=line)

    def done(self, steps: int, *, stopped_early: bool) -> None:
        self._views.call(lambda view: view.done(steps, stopped_early=stopped_early))
        self._flush()
        if steps > self._step:  # the last ones came between two reports
            self._note("step", step=steps, loss=None, rows_per_second=None)

    # --- the end ------------------------------------------------------------------------------

    def succeeded(
        self,
        history: Sequence[Mapping[str, float]],
        module: nn.Module | None = None,
        weights: WeightsOf | None = None,
    ) -> None:
        """Keep what came of the run: a record per epoch or report, the module, and its weights."""
        self._history, self._module = [dict(record) for record in history], module
        self._weights = weights
        thin(self._history)

    def end(self, error: BaseException | None) -> None:
        """The run has ended; leave its record. Called by `recording`, once."""
        if isinstance(error, Exception):  # and not because the user wanted it
            kind = "" if isinstance(error, SparkDLError) else f"{type(error).__name__}: "
            reason = kind + described(error)["message"].strip().partition("\n")[0]
            self._views.call(lambda view: view.failed(reason))
        self._flush()
        self.end_phase()
        self._note(
            "end",
            status="succeeded" if error is None else "failed",
            error=None if error is None else described(error),
            history=self._history,
            weights=str(self._weights or ""),
            kept={} if self._weights is None else presentable(self._weights.values),
        )
        record = self.record()
        self._stop.set()
        if self._writer.is_alive():
            self._writer.join(timeout=60)
        if self._folder is not None:
            try:
                self._folder.finish(record, page(record))
            except Exception as failure:
                self._give_up(failure)
        if self.listeners:
            self.doing("waiting for listeners", "")
        self.listeners.end(record, self._module)

    @property
    def page_path(self) -> str | None:
        """The place of the page, when the run has ended; None: nowhere."""
        return None if self._folder is None else without_password(self._folder.page_path)

    def record(self) -> RunRecord:
        """Return what is known so far."""
        with self._lock:
            return self._builder.record()

    # --- how it is kept -----------------------------------------------------------------------

    def _now(self) -> float:
        return time.perf_counter() - self._clock

    def _note(self, kind: str, **values: Any) -> None:
        event = {"kind": kind, "at": round(self._now(), 3), **presentable(values)}
        try:
            with self._lock:
                self._builder.take(event)
                if self._folder is not None and len(self._waiting) < _MOST_WAITING:
                    self._waiting.append(event)
        except Exception as error:
            self._give_up(error)

    def _taken(self) -> list[Event]:
        """Take what waits to be written, and add how long there may be nothing else."""
        silence = round(_SILENT_WRITES * self._pause() + 30, 1)
        at, wall = round(self._now(), 3), round(time.time(), 3)
        alive = {"kind": "alive", "at": at, "wall": wall, "silence_seconds": silence}
        with self._lock:
            events, self._waiting = self._waiting, []
        return [*events, alive]

    def _pause(self) -> float:
        return max(_WRITE_SECONDS, _SLOWER_BY * self._now())

    def _keep_writing(self) -> None:
        while not self._stop.wait(self._pause()) and self._folder is not None:
            try:
                self._folder.append(self._taken())
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        if self._folder is not None:
            self._folder = None
            shown = error if isinstance(error, SparkDLError) else f"{type(error).__name__}: {error}"
            logger.warning("the run leaves no report: %s", shown)

    def _take_step(self, step: int, loss: float, rows: float) -> None:
        now = self._now()
        self._step = step
        before, self._rows = self._rows, (now, rows)
        speed = None
        if before is not None and now > before[0] and rows >= before[1]:
            speed = (rows - before[1]) / (now - before[0])
        values = {"loss": loss} | ({} if speed is None else {"rows_per_second": speed})
        self.listeners.step(step, values)
        self._unnoted = {"step": step, "loss": loss, "rows_per_second": speed}
        if now - self._step_noted >= now / _STEPS_KEPT:
            self._step_noted = now
            self._note_step()

    def _note_step(self) -> None:
        """Note the newest step, if it is not noted yet."""
        values, self._unnoted = self._unnoted, None
        if values is not None:
            self._note("step", **values)

    def _flush(self) -> None:
        """Note what is known but is only noted now and then."""
        self._note_step()
        self._note_spans(self._spans.rest())

    def _note_spans(self, spans: Iterable[Event]) -> None:
        for span in spans:
            self._note("spent", **span)


def described(error: BaseException) -> dict[str, str]:
    """An exception as a record holds it; the traceback is the worker's, where it has one."""
    found = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, WorkerError):
        head, _, _ = str(error).partition("\n\nTraceback of rank")
        found |= {"message": head, "traceback": error.worker_traceback}
    elif isinstance(error, KeyboardInterrupt):
        found["message"] = str(error) or "interrupted"
    elif not isinstance(error, SparkDLError):
        found["traceback"] = "".join(traceback.format_exception(error))
    return {name: presentable(text) for name, text in found.items()}


@contextlib.contextmanager
def recording(
    *,
    run_id: str,
    name: str,
    run_name: str | None = None,
    params: Sequence[Mapping[str, Any]],
    storage: Storage | None,
    listeners: Sequence[Listener],
    is_interrupted: Callable[[], bool] = lambda: False,
    ask_tasks: Callable[[], str] | None = None,
    **known: Any,
) -> Iterator[Recorder]:
    """Record what happens in the block, which calls `Recorder.succeeded` if all goes well.

    The record is left in ``storage``, or nowhere; ``known`` are other fields of `RunRecord`. When
    the block has failed, ``is_interrupted`` is asked whether the user wanted that; ``ask_tasks`` is
    as for `Views`. Raises StorageError, and what a listener raises when the run begins.
    """
    start = RunStart(
        run_id=run_id,
        name=name,
        run_name=run_name or "",
        folder=folder_name(run_name or name, run_id, time.time()),
        params=presentable({param["name"]: param["value"] for param in params}),
    )
    own = {"run_id": run_id, "name": name, "run_name": start.run_name}
    began = {**own, "params": [dict(p) for p in params], **known}
    folder = None if storage is None else RunFolder(storage, start.folder)
    with contextlib.closing(Views(ask_tasks)) as views:
        recorder = Recorder(folder, began, views)
        try:
            recorder.listeners.start(start, listeners)
            with shown_by(recorder.doing):
                yield recorder
        except BaseException as error:
            recorder.end(KeyboardInterrupt() if is_interrupted() else error)
            raise
        recorder.end(None)
