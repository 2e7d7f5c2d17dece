"""The records in the output's folder, which say what has been prepared already.

``_prepare/plan.json`` says what is being prepared; ``_prepare/done/<part>.json`` that a Parquet
file is in its place, with its counts and the bad files that it lacks; ``prepare.json``, written
last of all, that everything is. A record that is not whole counts as none, so the storage need
not write at one stroke.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sparkdl.cli.images.parts import Part, difference
from sparkdl.cli.job_files.prepare_file import SPLITS
from sparkdl.errors import ConfigError
from sparkdl.storage.storage import Storage

FINISHED, LABELS, BAD_FILES = "prepare.json", "labels.json", "bad_files.jsonl"
WORK = "_prepare"
"""Folder of an unfinished run; its name begins as Spark's readers pass over."""
_PLAN, _DONE = f"{WORK}/plan.json", f"{WORK}/done"
_OURS = {FINISHED, LABELS, BAD_FILES, WORK, *SPLITS}


@dataclass(frozen=True, kw_only=True)
class Record:
    """What became of the files of one part."""

    rows: int
    """In the Parquet file; there is no file without rows."""
    rows_by_label: Mapping[str, int] = field(default_factory=dict)
    """Class number -> rows; empty where labels are no classes."""
    bad: tuple[tuple[str, str], ...] = ()
    """Path and reason of each file that was skipped."""

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Record:
        """Inverse of `to_dict`."""
        return cls(**{**values, "bad": tuple((path, why) for path, why in values["bad"])})


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a finished run has made; the contents of ``prepare.json``."""

    path: str
    files: Mapping[str, int]
    """Split -> Parquet files."""
    rows: Mapping[str, int]
    """Split -> rows."""
    rows_by_label: Mapping[str, Mapping[str, int]]
    """Split -> class -> rows."""
    bad: tuple[tuple[str, str], ...]
    """Path and reason of each file that was skipped."""


class Ledger:
    """The records of one run.

    Args:
        storage: the output's folder.
        plan: what tells this run from others; see `parts.digest_of`.
    """

    def __init__(self, storage: Storage, plan: Mapping[str, Any]) -> None:
        self._storage = storage
        self._plan = plan

    def begin(self, *, overwrite: bool) -> Literal["new", "unfinished", "finished"]:
        """See what is there, and make the folder this run's.

        Args:
            overwrite: whether what another run has left there is removed.

        Raises:
            ConfigError: the folder holds another run, or something else.
        """
        finished = self._read(FINISHED)
        before = finished["plan"] if finished is not None else self._read(_PLAN)
        self._refuse_others({WORK} if before is None else _OURS)
        changed = None if before is None else difference(before, self._plan)
        if before is not None and changed is None:
            if finished is not None:
                self._storage.remove(WORK)  # of a run that was killed at its very end
            return "unfinished" if finished is None else "finished"
        if before is not None:
            if not overwrite:
                raise ConfigError(
                    f"{self._storage} holds what another run has prepared: {changed}; choose "
                    "another output.path, or replace it with --set output.overwrite=true"
                )
            self._forget(before)
        self._storage.remove(WORK)
        self._write(_PLAN, self._plan)
        return "new"

    def done(self) -> dict[str, Record]:
        """The records by the part's name."""
        found = {}
        for name in self._storage.list(_DONE):
            values = self._read(f"{_DONE}/{name}")
            if values is not None:
                found[name.removesuffix(".json")] = Record.from_dict(values)
        return found

    def write(self, part: Part, record: Record) -> None:
        """Record a part whose file is in its place."""
        self._write(f"{_DONE}/{part.name}.json", record.to_dict())

    def finish(
        self, records: Mapping[str, Record], absent: Sequence[tuple[str, str]], names: Sequence[str]
    ) -> Report:
        """Write the summary, and remove what only an unfinished run needs.

        Args:
            records: of all parts, by name.
            absent: path and reason of bad files that are in no part.
            names: the classes.
        """
        bad = sorted((*absent, *(entry for record in records.values() for entry in record.bad)))
        summary = {
            "plan": self._plan,
            "files": _by_split(records, lambda record: int(record.rows > 0)),
            "rows": _by_split(records, lambda record: record.rows),
            "rows_by_label": _labels_by_split(records, names),
            "bad": len(bad),
        }
        if names:
            self._write(LABELS, list(names))
        if bad:
            lines = (json.dumps({"path": path, "reason": why}) + "\n" for path, why in bad)
            self._storage.write(BAD_FILES, "".join(lines).encode())
        self._write(FINISHED, summary)
        self._storage.remove(WORK)
        return self.report()

    def report(self) -> Report:
        """What a finished run has made."""
        summary = self._read(FINISHED)
        assert summary is not None, "the run is not finished"
        lines = self._storage.read(BAD_FILES).decode().splitlines() if summary["bad"] else []
        bad = [json.loads(line) for line in lines]
        return Report(
            path=str(self._storage),
            files=summary["files"],
            rows=summary["rows"],
            rows_by_label=summary["rows_by_label"],
            bad=tuple((entry["path"], entry["reason"]) for entry in bad),
        )

    def _forget(self, before: Mapping[str, Any]) -> None:
        """Remove another run's files, the plan that tells whose they are last of all."""
        self._write(_PLAN, before)
        for name in (FINISHED, _DONE, LABELS, BAD_FILES, *SPLITS):
            self._storage.remove(name)

    def _refuse_others(self, ours: set[str]) -> None:
        strange = [name for name in self._storage.list("") if name not in ours]
        if strange:
            raise ConfigError(
                f"{self._storage} holds other things ({', '.join(strange[:3])}); choose a new or "
                "empty folder for output.path"
            )

    def _read(self, path: str) -> Any | None:
        """A file's JSON; None if there is none, or not the whole of it."""
        if not self._storage.exists(path):
            return None
        try:
            return json.loads(self._storage.read(path))
        except ValueError:
            return None

    def _write(self, path: str, value: Any) -> None:
        self._storage.write(path, json.dumps(value, indent=1).encode())


def _by_split(records: Mapping[str, Record], count: Any) -> dict[str, int]:
    totals = dict.fromkeys(SPLITS, 0)
    for name, record in records.items():
        totals[_split_of(name)] += count(record)
    return {split: total for split, total in totals.items() if total}


def _labels_by_split(
    records: Mapping[str, Record], names: Sequence[str]
) -> dict[str, dict[str, int]]:
    totals: dict[str, dict[str, int]] = {split: dict.fromkeys(names, 0) for split in SPLITS}
    for part, record in records.items():
        for number, rows in record.rows_by_label.items():
            totals[_split_of(part)][names[int(number)]] += rows
    return {split: totals[split] for split in _by_split(records, lambda record: record.rows)}


def _split_of(name: str) -> Any:
    return name.rsplit("-", 1)[0]
