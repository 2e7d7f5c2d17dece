"""How does a run train in rounds? One plain Spark job per round; the driver merges in between.

Deeplearning4j's shape: the state goes to every shard, each shard trains a round of steps from it,
the states come back as their weighted mean, summed in the order of shards. No gang is needed: slots
may be fewer than shards, come and go, and run a task twice. A lost task is run again by Spark, and
gives the same bits.
"""

from __future__ import annotations

import copy
import json
import math
from typing import Any

from sparkdl.data.plan import RoundPart
from sparkdl.spark.rounds.round_driver import RoundsDriver, run_rounds
from sparkdl.spark.rounds.round_stages import STATE, merge_states
from sparkdl.spark.rounds.round_totals import RoundDone
from sparkdl.spark.run.run import Run, Trained
from sparkdl.sync.averaging.averaging import AveragingStrategy
from sparkdl.train.state import Record


def train_in_rounds(run: Run, strategy: AveragingStrategy) -> Trained:
    """Train, and give the weights to the run's module; raises what `run_rounds` raises."""
    return run_rounds(_Averaging(run, strategy))


class _Averaging(RoundsDriver):
    """All replicas of a round begin from one state, which is the mean of what they come to."""

    def __init__(self, run: Run, strategy: AveragingStrategy) -> None:
        super().__init__(run, strategy.make_period())
        self._strategy = strategy
        self._outer = strategy.make_outer(run.plan.world_size)
        self._state: dict[str, Any] = {"model": copy.deepcopy(run.module.state_dict())}
        self._trained = [n for n, p in run.module.named_parameters() if p.requires_grad]

    def _round(self, part: RoundPart) -> RoundDone:
        """See `RoundsDriver._round`."""
        rows = self._job_over_all(part, self._state, depth=self._strategy.merge_depth)
        reports = {rank: json.loads(data) for rank, kind, data in rows if kind == "result"}
        assert len(reports) == self._run.plan.world_size
        payloads = {rank: data for rank, kind, data in rows if kind == STATE}
        return RoundDone(
            reports=reports,
            bytes_sent={rank: len(data) for rank, data in payloads.items()},
            learning_rate=self._merge(list(payloads.values()))
            if payloads
            else self._learning_rate(),
        )

    def _merge(self, payloads: list[bytes]) -> float:
        """Take the mean of the replicas, and what the strategy makes of it."""
        _, mean = merge_states(payloads)
        # What does not train was not sent back.
        mean["model"] = {n: mean["model"].get(n, value) for n, value in self._model().items()}
        learning_rate = float(mean["optimizer"]["param_groups"][0].get("lr", math.nan))
        if self._outer is not None:
            anchor = [self._state["model"][name] for name in self._trained]
            self._outer.step(anchor, [mean["model"][name] for name in self._trained], learning_rate)
        if self._strategy.optimizer_state == "reset":
            mean["optimizer"]["state"] = {}
        self._state = mean
        return learning_rate

    def _model(self) -> dict[str, Any]:
        """See `RoundsDriver._model`."""
        model: dict[str, Any] = self._state["model"]
        return model

    def _learning_rate(self) -> float:
        """See `RoundsDriver._learning_rate`."""
        if "optimizer" not in self._state:
            return math.nan
        return float(self._state["optimizer"]["param_groups"][0].get("lr", math.nan))

    def _evaluate(self) -> Record:
        """See `RoundsDriver._evaluate`."""
        return self._evaluate_model(self._model())

    def _states(self) -> dict[str, Any]:
        """See `RoundsDriver._states`."""
        outer = None if self._outer is None else self._outer.state_dict()
        return {"round": self._state, "outer": outer}

    def _load_states(self, states: dict[str, Any]) -> None:
        """See `RoundsDriver._load_states`."""
        self._state = states["round"]
        if self._outer is not None:
            self._outer.load_state_dict(states["outer"])
