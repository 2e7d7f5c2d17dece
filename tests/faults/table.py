"""Prints what the faults of the last runs have cost: ``python -m tests.faults.table``.

A row for each fault, from the measurements that `oracle.trained` has written down; where a fault
was tried several times, the median of each number.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from tests.faults.oracle import MEASURED

COLUMNS = ("restarts", "steps_lost", "notice", "relaunch", "reload", "replay", "seconds")


def rows(outcomes: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """Name of the fault, how often it was survived, and the columns."""
    outcomes = list(outcomes)
    found = []
    for name in dict.fromkeys(outcome["name"] for outcome in outcomes):
        same = [outcome for outcome in outcomes if outcome["name"] == name]
        found.append([name, str(len(same)), *(_median(same, column) for column in COLUMNS)])
    return found


def _median(outcomes: Iterable[Mapping[str, Any]], column: str) -> str:
    known = [outcome[column] for outcome in outcomes if outcome[column] is not None]
    if not known:
        return ""
    return f"{median(known):.1f}".removesuffix(".0")


def main() -> None:
    """Print a table of Markdown."""
    if not MEASURED.exists():
        return  # no test was run that measures
    outcomes = map(json.loads, MEASURED.read_text(encoding="utf-8").splitlines())
    head = ["fault", "times", *COLUMNS]
    for row in (head, ["---"] * len(head), *rows(outcomes)):
        print("|", " | ".join(row), "|")


if __name__ == "__main__":
    main()
