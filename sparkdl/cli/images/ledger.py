"""The records in the output's folder, which say what has been prepared already.

``_prepare/plan.json`` says what is being prepared; ``_prepare/done/<part>.json`` that a Parquet
file is in its place; ``prepare.json``, written last of all, that everything is. A record that is
not whole counts as none, so the storage need not write at one stroke.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sparkdl.cli.images.parts import ImagePart, difference
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
    """The result for the files of one part."""

    rows: int
    """In the Parquet file; there is no file without rows."""
    rows_by_label: Mapping[str, int] = field(default_factory=dict)
    """Class number -> rows; empty where labels are no classes."""
    bad: tuple[tuple[str, str], ...] = ()
    """Path and reason of each file that was skipped."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The results of a finished run; the contents of ``prepare.json``."""

    path: str
    files: Mapping[str, int]
    """Split -> Parquet files."""
    rows: Mapping[str, int]
    """Split -> rows."""
    rows_by_label: Mapping[str, Mapping[str, int]]
    """Split -> class -> rows."""
    bad: tuple[tuple[str, str], ...]
    """Path and reason of each file that was skipped."""


@dataclass(frozen=True)
class Ledger:
    """The records of one run."""

    storage: Storage
    """The output's folder."""
    plan: Mapping[str, Any]
    """Description that tells this run from others; see `parts.digest_of`."""

    def begin(self, *, overwrite: bool) -> Literal["new", "unfinished", "finished"]:
        """Make the folder this run's, if need be with ``overwrite``; raises ConfigError."""
        finished = self._read(FINISHED)
        before = finished["plan"] if finished is not None else self._read(_PLAN)
        ours = {WORK} if before is None else _OURS
        if strange := [name for name in self.storage.list("") if name not in ours]:
            raise ConfigError(
                f"{self.storage} holds other things ({', '.join(strange[:3])}); choose a new or "
                "empty folder for output.path"
            )
        if before is not None:
            changed = difference(before, self.plan)
            if changed is None and finished is None:
                return "unfinished"
            if changed is None:
                self.storage.remove(WORK)  # of a run that was killed at its very end
                return "finished"
            if not overwrite:
                raise ConfigError(
                    f"{self.storage} holds what another run has prepared: {changed}; choose "
                    "another output.path, or replace it with --set output.overwrite=true"
                )
            self._write(_PLAN, before)  # which tells whose the files are, until they are gone
            for name in (FINISHED, _DONE, LABELS, BAD_FILES, *SPLITS):
                self.storage.remove(name)
        self.storage.remove(WORK)
        self._write(_PLAN, self.plan)
        return "new"

    def done(self) -> dict[str, Record]:
        """The records by the part's name."""
        found = {}
        for name in self.storage.list(_DONE):
            values = self._read(f"{_DONE}/{name}")
            if values is not None:
                bad = tuple((path, why) for path, why in values["bad"])
                found[name.removesuffix(".json")] = Record(**{**values, "bad": bad})
        return found

    def write(self, part: ImagePart, record: Record) -> None:
        """Record a part whose file is in its place."""
        self._write(f"{_DONE}/{part.name}.json", vars(record))

    def finish(
        self, records: Mapping[str, Record], absent: Sequence[tuple[str, str]], names: Sequence[str]
    ) -> Report:
        """Write the summary, and remove what only an unfinished run needs.

        ``absent`` is path and reason of bad files that are in no part; ``names`` are the classes.
        """
        bad = sorted((*absent, *(entry for record in records.values() for entry in record.bad)))
        splits = {
            split: [record for name, record in records.items() if name.rsplit("-", 1)[0] == split]
            for split in SPLITS
        }
        made = {split: of for split, of in splits.items() if any(record.rows for record in of)}
        rows_by_label = {split: dict.fromkeys(names, 0) for split in made}
        for split, of in made.items():
            for record in of:
                for number, rows in record.rows_by_label.items():
                    rows_by_label[split][names[int(number)]] += rows
        summary = {
            "plan": self.plan,
            "files": {split: sum(record.rows > 0 for record in of) for split, of in made.items()},
            "rows": {split: sum(record.rows for record in of) for split, of in made.items()},
            "rows_by_label": rows_by_label,
            "bad": len(bad),
        }
        if names:
            self._write(LABELS, list(names))
        if bad:
            lines = (json.dumps({"path": path, "reason": why}) + "\n" for path, why in bad)
            self.storage.write(BAD_FILES, "".join(lines).encode())
        self._write(FINISHED, summary)
        self.storage.remove(WORK)
        return self.report()

    def report(self) -> Report:
        """Return the results of a finished run."""
        summary = self._read(FINISHED)
        assert summary is not None, "the run is not finished"
        lines = self.storage.read(BAD_FILES).decode().splitlines() if summary["bad"] else []
        bad = [json.loads(line) for line in lines]
        return Report(
            path=str(self.storage),
            files=summary["files"],
            rows=summary["rows"],
            rows_by_label=summary["rows_by_label"],
            bad=tuple((entry["path"], entry["reason"]) for entry in bad),
        )

    def _read(self, path: str) -> Any | None:
        """A file's JSON; None if there is none, or not the whole of it."""
        if not self.storage.exists(path):
            return None
        try:
            return json.loads(self.storage.read(path))
        except ValueError:
            return None

    def _write(self, path: str, value: Any) -> None:
        self.storage.write(path, json.dumps(value, indent=1).encode())
