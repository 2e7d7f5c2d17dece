"""Prints what losses at each moment have cost: ``python -m tests.cluster.every_step_table``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

MEASURED = Path(__file__).parent.parent.parent / "build" / "every_step.jsonl"
"""A line of JSON for each case of `test_every_step`."""


def rows(cases: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """For each way to train and to lose a worker: cases, equal bits, restarts, seconds."""
    cases = list(cases)
    found = []
    for pair in dict.fromkeys((case["mode"], case["kind"]) for case in cases):
        same = [case for case in cases if (case["mode"], case["kind"]) == pair]
        seconds = [case["seconds"] for case in same]
        restarts = sorted({case["restarts"] for case in same})
        good = sum(not case["problem"] for case in same)
        numbers = [len(same), good, " or ".join(map(str, restarts))]
        numbers += [f"{median(seconds):.1f}", f"{max(seconds):.1f}"]
        found.append([*pair, *map(str, numbers)])
    return found


def main() -> None:
    """Print a table of Markdown."""
    if not MEASURED.exists():
        return
    cases = map(json.loads, MEASURED.read_text(encoding="utf-8").splitlines())
    head = ["mode", "loss", "moments", "equal", "restarts", "median s", "longest s"]
    for row in (head, ["---"] * len(head), *rows(cases)):
        print("|", " | ".join(row), "|")


if __name__ == "__main__":
    main()
