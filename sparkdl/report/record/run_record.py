"""The record of a run: plain values, which follow from the events that its driver wrote down.

An event is a dict with ``kind`` and ``at``, the seconds since the run began.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sparkdl.errors import StorageError
from sparkdl.storage.storage import without_password

FORMAT = 1
"""Version of ``run.json``; raised when a reader of the last one could not make sense of it."""

Status = Literal["running", "succeeded", "failed", "lost"]
Event = Mapping[str, Any]

_MAX_LINES = 200
"""Warnings that are kept: the first ones, which say where trouble began."""
_MOST_ENTRIES = 4000
"""Longest list in a record, such as its history; more would only fill memory and the page."""
_MOST_LOOKS = 200
"""Looks at the layers that are kept, each of which has a number for every layer."""
_OF_THE_PAGE = (
    "params", "versions", "spark", "driver", "hardware", "laps", "steps", "spent", "logs",
    "confusion", "layers", "graph",
)  # fmt: skip
"""Fields that a list of runs does without."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """All that is known of one run. Times are seconds since it began, unless said otherwise."""

    run_id: str
    name: str
    """Name of what was run, such as ``TorchClassifier``."""
    started: float
    """Seconds since the epoch."""
    run_name: str = ""
    """Name that the user gave the run; empty: none."""
    status: Status = "running"
    seconds: float = 0.0
    """Time that it has taken so far, or took."""
    silence_seconds: float = 0.0
    """Time that its driver may be silent before the run counts as lost."""
    heard: float = 0.0
    """Time of its driver's last sign of life: seconds since the epoch, by its own clock."""
    params: list[dict[str, Any]] = field(default_factory=list)
    """``name``, ``value`` as text, ``is_set``: True if the user gave it."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts that were found out before it began: rows, steps, parameters, mode."""
    versions: dict[str, str] = field(default_factory=dict)
    spark: dict[str, Any] = field(default_factory=dict)
    driver: dict[str, Any] = field(default_factory=dict)
    """The driver's `hardware`."""
    hardware: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Rank -> that of its worker."""
    laps: dict[str, float] = field(default_factory=dict)
    """Phase of the fit on the driver -> seconds, in order."""
    phase: str = ""
    """Activity that is going on now; empty when the run has ended."""
    attempts: list[dict[str, Any]] = field(default_factory=list)
    """``number``, ``at``, ``start_step``, which is None where it failed before that was known."""
    failures: list[dict[str, Any]] = field(default_factory=list)
    """``at``, ``reason``: why an attempt ended."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """Measurements: a record per epoch, or per report of a function."""
    weights: str = ""
    """Description of the model's weights: ``epoch 7 (best val_loss 0.123), of 10 epochs``."""
    kept: dict[str, Any] = field(default_factory=dict)
    """The history's record of when the model had these weights; empty: there is no model yet."""
    steps: list[list[float | None]] = field(default_factory=list)
    """``[at, step, loss, rows per second of rank 0]``, sampled."""
    spent: dict[str, list[list[Any]]] = field(default_factory=dict)
    """Rank -> ``[begin, end, {what: seconds}]``, one after the other; see `train.time_spent`."""
    logs: list[dict[str, Any]] = field(default_factory=list)
    """``at``, ``rank``, ``level``, ``line``: warnings of the workers."""
    num_logs: int = 0
    """Number of warnings."""
    confusion: dict[str, Any] | None = None
    """``epoch``, and ``counts``: label by prediction, over the validation rows."""
    layers: list[dict[str, Any]] = field(default_factory=list)
    """``step``, and ``ratios``: layer -> mean magnitude of its update over that of its parameters.
    """
    graph: dict[str, Any] | None = None
    """The module, see `module_graph`."""
    error: dict[str, str] | None = None
    """``type``, ``message``, and perhaps ``traceback``: what ended a run that failed."""

    @property
    def title(self) -> str:
        """The user's name for the run, or what was run."""
        return self.run_name or self.name

    @property
    def measured(self) -> dict[str, Any]:
        """The values measured of the model; until there is one, the last record of the history."""
        return self.kept or (self.history[-1] if self.history else {})

    @property
    def restarts(self) -> int:
        """Number of times that the run was started again."""
        return max((attempt["number"] for attempt in self.attempts), default=0)

    def totals(self) -> dict[str, dict[str, float]]:
        """Rank -> what its time was spent on, over all attempts, in seconds."""
        return {rank: added(spans) for rank, spans in self.spent.items()}

    def to_dict(self) -> dict[str, Any]:
        """As plain values, with the format's number."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, values: Any) -> RunRecord:
        """Rebuild what `to_dict` gave; raises StorageError if it is none, or of a later version."""
        if not isinstance(values, Mapping):
            raise StorageError(f"this is not the record of a run, but a {type(values).__name__}")
        if values.get("format") != FORMAT:
            raise StorageError(
                f"this is not the record of a run, or one of another version: format "
                f"{values.get('format')!r}, known: {FORMAT}; read it with the sparkdl that wrote it"
            )
        missing = [name for name in ("run_id", "name", "started") if name not in values]
        if missing:
            raise StorageError(f"the record of this run has no {', '.join(missing)}")
        usual = dataclasses.asdict(cls(run_id="", name="", started=0.0))
        given = {name: value for name, value in values.items() if name in usual}
        for name, value in given.items():
            kind = dict | None if usual[name] is None else type(usual[name])
            if not isinstance(value, float | int if kind is float else kind):
                raise StorageError(
                    f"the record of this run is damaged: its {name} is a {type(value).__name__}"
                )
            # The page of more entries than a run leaves would take hours.
            by_rank = value if name == "spent" and isinstance(value, dict) else {"": value}
            for entries in by_rank.values():
                if isinstance(entries, list):
                    thin(entries, _MOST_LOOKS if name == "layers" else _MOST_ENTRIES)
        return cls(**given)


def outline(record: RunRecord) -> RunRecord:
    """Return a record without what only the page of the run shows."""
    bare = RunRecord(run_id="", name="", started=0.0)
    return dataclasses.replace(record, **{name: getattr(bare, name) for name in _OF_THE_PAGE})


def count_of(record: Mapping[str, Any]) -> float | None:
    """Return the number of the epoch or report that a history's record is of.

    Reports may have an ``epoch``, too.
    """
    number: float | None = record.get("report", record.get("epoch"))
    return number


def add_record(history: list[dict[str, Any]], record: Mapping[str, Any]) -> None:
    """Add a record to a history; after a restart epochs come again, in their order."""
    number = count_of(record)
    while number is not None and history and (count_of(history[-1]) or 0) >= number:
        history.pop()
    history.append(dict(record))
    thin(history)


def thin(entries: list[Any], most: int = _MOST_ENTRIES) -> None:
    """Take out every second entry but the first and the last, once there are too many to show."""
    while len(entries) > most:
        del entries[1:-1:2]


_COUNTS = ("epoch", "report", "steps")
_COSTS = ("gradient_norm", "learning_rate", "seconds")


def curve_names(history: Iterable[Mapping[str, Any]], *, has_costs: bool = False) -> list[str]:
    """The values of a history that are drawn, in their order; with ``has_costs`` costs at last."""
    names = dict.fromkeys(name for record in history for name in record if name not in _COUNTS)
    own = [name for name in names if name not in _COSTS]
    return own + [name for name in _COSTS if has_costs and name in names]


Line = tuple[list[float], list[float]]
"""Positions, and the values there."""


def curve_panels(
    history: Sequence[Mapping[str, Any]], *, has_costs: bool = False
) -> dict[str, dict[str, Line]]:
    """Panel -> line -> values by epoch or report; ``loss`` and ``val_loss`` share a panel."""
    numbers = [count_of(record) for record in history]
    positions = [float(k + 1 if n is None else n) for k, n in enumerate(numbers)]
    lines: dict[str, Line] = {name: ([], []) for name in curve_names(history, has_costs=has_costs)}
    for x, record in zip(positions, history, strict=True):
        for name in record.keys() & lines.keys():
            lines[name][0].append(x)
            lines[name][1].append(record[name])
    panels: dict[str, dict[str, Line]] = {}
    for name, line in lines.items():
        panels.setdefault(name.removeprefix("val_"), {})[name] = line
    return panels


def added(spans: Iterable[Sequence[Any]]) -> dict[str, float]:
    """Add up what was spent in these spans of a rank, by what it was for; see `RunRecord.spent`."""
    total: dict[str, float] = {}
    for _, _, seconds in spans:
        for name, value in seconds.items():
            total[name] = total.get(name, 0.0) + value
    return total


class RecordBuilder:
    """A record that grows, event by event."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = dataclasses.asdict(
            RunRecord(run_id="", name="", started=0.0)
        )

    def take(self, event: Event) -> None:
        """Add an event; a kind that is not known, of a later version, is passed over."""
        values = self._values
        values["seconds"] = max(values["seconds"], event["at"])
        rest = {name: value for name, value in event.items() if name != "kind"}
        match event["kind"]:
            case "begin":
                values.update({name: value for name, value in rest.items() if name != "at"})
            case "lap":
                before = values["laps"].get(event["name"], 0.0)
                values["laps"][event["name"]] = before + event["seconds"]
            case "phase":
                values["phase"] = event["name"]
            case "facts":
                values["facts"].update(event["facts"])
            case "graph":
                values["graph"] = event["graph"]
            case "hardware":
                values["hardware"][str(event["rank"])] = event["hardware"]
            case "attempt":
                attempts = values["attempts"]
                if attempts and attempts[-1]["number"] == event["number"]:
                    attempts.pop()  # it was announced before it began
                attempts.append(rest)
                thin(attempts)
            case "failure":
                values["failures"].append(rest)
                thin(values["failures"])
            case "epoch":
                add_record(values["history"], event["record"])
            case "step":
                names = ("at", "step", "loss", "rows_per_second")
                values["steps"].append([event[name] for name in names])
                thin(values["steps"])
            case "spent":
                span = [event["begin"], event["end"], event["seconds"]]
                spans = values["spent"].setdefault(str(event["rank"]), [])
                spans.append(span)
                thin(spans)
            case "log":
                values["num_logs"] += 1
                if len(values["logs"]) < _MAX_LINES:
                    values["logs"].append(rest)
            case "confusion":
                values["confusion"] = {"epoch": event["epoch"], "counts": event["counts"]}
            case "layers":
                looks = values["layers"]
                while looks and looks[-1]["step"] >= event["step"]:  # after a restart
                    looks.pop()
                looks.append({"step": event["step"], "ratios": event["ratios"]})
                thin(looks, _MOST_LOOKS)
            case "alive":
                values["silence_seconds"] = event["silence_seconds"]
                values["heard"] = event.get("wall", values["started"] + event["at"])
            case "end":
                values.update(status=event["status"], error=event.get("error"), phase="")
                values["seconds"] = event["at"]
                values["history"] = event.get("history") or values["history"]
                values["weights"] = event.get("weights", "")
                values["kept"] = event.get("kept", {})

    def record(self) -> RunRecord:
        """Return what is known so far; raises StorageError if the events were not of a run."""
        return RunRecord.from_dict({"format": FORMAT, **copy.deepcopy(self._values)})


def presentable(value: Any) -> Any:
    """A plain value whose texts have no passwords of URLs, nor lone surrogates of file names."""
    if isinstance(value, str):
        return without_password(value).encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, Mapping):
        return {name: presentable(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [presentable(entry) for entry in value]
    return value
