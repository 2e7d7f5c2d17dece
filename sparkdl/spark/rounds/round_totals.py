"""What the rounds of a run have brought and cost, added up."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

_PHASES = ("rounds: slowest task", "rounds: everything else", "evaluate", "checkpoint")


@dataclass(frozen=True, kw_only=True)
class RoundDone:
    """What a round has brought."""

    reports: dict[int, Any]
    """Shard -> what its task reports: ``rows``, ``seconds``, ``loss_sum``, ``weight``,
    ``label_sums``."""
    bytes_sent: dict[int, int]
    """Shard -> bytes of the states that its task has sent."""

    @property
    def rows(self) -> int:
        """Samples of the round."""
        return sum(report["rows"] for report in self.reports.values())

    @property
    def sums(self) -> tuple[float, ...]:
        """Weighted losses and weights of the samples of the round, then each label's losses."""
        reports = list(self.reports.values())
        # A replica that has diverged reports nothing of its labels.
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


class Totals:
    """What tasks have reported so far, by shard; ``report`` gets what time was spent on."""

    def __init__(
        self,
        num_shards: int,
        labels: Sequence[str],
        report: Callable[[int, Mapping[str, float]], None],
    ) -> None:
        self.rows = [0] * num_shards
        self.seconds = [0.0] * num_shards
        self.bytes_sent = [0] * num_shards
        self.epoch_sums = [0.0] * (2 + len(labels))
        """Weighted losses and weights of the samples of the epoch, and each label's losses."""
        self.began = time.perf_counter()
        """When training began, by `time.perf_counter`."""
        self._report = report
        self._phases = dict.fromkeys(_PHASES, 0.0)
        self._spent: list[dict[str, float]] = [{} for _ in range(num_shards)]

    def add(self, done: RoundDone) -> None:
        """Take note of a round."""
        for shard_id, report in done.reports.items():
            self.rows[shard_id] += report["rows"]
            self.seconds[shard_id] += report["seconds"]
        for shard_id, num_bytes in done.bytes_sent.items():
            self.bytes_sent[shard_id] += num_bytes
        for position, value in enumerate(done.sums):
            self.epoch_sums[position] += value

    def begin_epoch(self) -> None:
        """Forget the sums of the epoch that has ended."""
        self.epoch_sums = [0.0] * len(self.epoch_sums)

    def spend_round(self, done: RoundDone, overhead: float) -> None:
        """Take note of what a round's time was spent on, by shard.

        A shard waits from its own end to that of the slowest. What the round has taken besides,
        for Spark's scheduling, for states on their way and their mean, is communication.
        """
        self._phases["rounds: slowest task"] += done.seconds
        self._phases["rounds: everything else"] += overhead
        for shard_id, spent in enumerate(self._spent):
            report = done.reports.get(shard_id, {"spent": {}})
            own = dict(report["spent"])
            own["waiting"] = max(0.0, done.seconds - sum(own.values()))
            own["communication"] = max(0.0, overhead)
            _add(spent, own)
        self._report_all()

    def spend(self, what: Literal["evaluate", "checkpoint"], seconds: float) -> None:
        """Take note of what the driver did while all shards waited for it."""
        for spent in (self._phases, *self._spent):
            _add(spent, {what: seconds})
        self._report_all()

    def _report_all(self) -> None:
        """What is not accounted for, such as callbacks on the driver, is spent on other things."""
        elapsed = time.perf_counter() - self.began
        for shard_id, own in enumerate(self._spent):
            rest = max(0.0, elapsed - sum(own.values()))
            self._report(shard_id, {**own, "other": own.get("other", 0.0) + rest})

    def phases(self) -> dict[str, float]:
        """Phase -> seconds."""
        return dict(self._phases)

    def throughput(self) -> list[float]:
        """Samples per second of each shard while it was trained on."""
        return [
            rows / seconds if seconds > 0 else 0.0
            for rows, seconds in zip(self.rows, self.seconds, strict=True)
        ]


def _add(total: dict[str, float], seconds: Mapping[str, float]) -> None:
    for what, value in seconds.items():
        total[what] = total.get(what, 0.0) + value
