"""What have the rounds of a run brought and cost, added up?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RoundDone:
    """What a round has brought."""

    reports: dict[int, Any]
    """Shard -> what its task tells: ``rows``, ``seconds``, ``loss_sum``, ``weight``,
    ``label_sums``."""
    bytes_sent: dict[int, int]
    """Shard -> bytes of the states that its task has sent."""
    learning_rate: float

    @property
    def rows(self) -> int:
        """Samples of the round."""
        return sum(report["rows"] for report in self.reports.values())

    @property
    def sums(self) -> tuple[float, ...]:
        """Weighted losses and weights of the samples of the round, then each label's losses."""
        reports = list(self.reports.values())
        # A replica that has diverged tells nothing of its labels.
        labels = [r["label_sums"] for r in reports if r["label_sums"]]
        return (
            sum(r["loss_sum"] for r in reports),
            sum(r["weight"] for r in reports),
            *(sum(values) for values in zip(*labels, strict=True)),
        )

    @property
    def seconds(self) -> float:
        """Those of the slowest task's steps."""
        return max(float(report["seconds"]) for report in self.reports.values())


@dataclass(kw_only=True)
class Totals:
    """What the tasks have reported so far; lists are by shard."""

    rows: list[int]
    seconds: list[float]
    bytes_sent: list[int]
    epoch_sums: list[float]
    """Weighted losses and weights of the samples of the present epoch, and each label's losses."""
    steps: float = 0.0
    """Seconds of the slowest task of each round, summed."""
    overhead: float = 0.0
    """The rest of the rounds' seconds."""
    evaluate: float = 0.0
    checkpoint: float = 0.0

    def add(self, done: RoundDone) -> None:
        """Take note of a round."""
        for shard_id, report in done.reports.items():
            self.rows[shard_id] += report["rows"]
            self.seconds[shard_id] += report["seconds"]
        for shard_id, num_bytes in done.bytes_sent.items():
            self.bytes_sent[shard_id] += num_bytes
        for position, value in enumerate(done.sums):
            self.epoch_sums[position] += value

    def phases(self) -> dict[str, float]:
        """Phase -> seconds."""
        return {
            "rounds: slowest task": self.steps,
            "rounds: everything else": self.overhead,
            "evaluate": self.evaluate,
            "checkpoint": self.checkpoint,
        }

    def throughput(self) -> list[float]:
        """Samples per second of each shard while it was trained on."""
        return [
            rows / seconds if seconds > 0 else 0.0
            for rows, seconds in zip(self.rows, self.seconds, strict=True)
        ]
