"""Parameter averaging in rounds: one plain Spark job per round, and the driver merges in between.

Deeplearning4j's shape: the state goes to every shard, each shard trains a round of steps from it,
the states come back as their weighted mean, in the order of shards. The driver holds the state of
the round's beginning, and the mean. Slots may be fewer than shards,
come and go, and run a task twice: a lost task gives the same bits when it is run again.
"""

from __future__ import annotations

import copy
import json
import math
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from sparkdl.data.plan import RoundPart
from sparkdl.errors import ConfigError
from sparkdl.spark.rounds.driver_memory import round_state_bytes
from sparkdl.spark.rounds.round_driver import RoundDone, run_rounds
from sparkdl.spark.rounds.round_jobs import RoundEvaluation, RoundJobs, encoded
from sparkdl.spark.rounds.round_stages import Merge, is_of_state, num_merge_tasks
from sparkdl.spark.run.run import Run, Trained
from sparkdl.storage.checkpoint_format import decode
from sparkdl.storage.stateful import Stateful
from sparkdl.sync.averaging.averaging import AveragingStrategy
from sparkdl.sync.averaging.mean import CHANGES, is_number, weighted_mean
from sparkdl.sync.module_tensors import no_mean, set_trains, shape_of, tensors_of, trains
from sparkdl.sync.population.hyperparameters import rescaled, set_present_rate
from sparkdl.train.rank_state import OWN_STATES
from sparkdl.train.state import Record, TrainState
from sparkdl.worker.round_task import ATTRIBUTES


def train_in_rounds(run: Run, strategy: AveragingStrategy) -> Trained:
    """Train, and give the weights to the run's module; raises what `run_rounds` raises."""
    return run_rounds(run, strategy.make_period(), lambda jobs: Averaged(run, strategy, jobs))


class Averaged(Stateful):
    """`Replicas` that begin each round from one state, the mean of what they came to before."""

    shared_state: ClassVar = ("round", "outer")

    def __init__(self, run: Run, strategy: AveragingStrategy, jobs: RoundJobs) -> None:
        self._strategy = strategy
        self._jobs = jobs
        self._num_shards = shards = run.plan.world_size
        state_bytes = round_state_bytes(
            run.module, run.config, keeps_optimizer=strategy.optimizer_state == "average"
        )
        num_tasks = num_merge_tasks(shards, state_bytes)
        self._merge = Merge(pieces=strategy.pieces(shards), num_tasks=num_tasks)
        self._outer = strategy.make_outer(run.plan.world_size)
        self._module = run.module
        self._round: dict[str, Any] = {"model": copy.deepcopy(tensors_of(run.module))}
        self._trained = [n for n, p in run.module.named_parameters() if p.requires_grad]
        first = {id(p): name for name, p in nn.Module.named_parameters(run.module)}
        named = nn.Module.named_parameters(run.module, remove_duplicate=False)
        self._aliases = {name: first[id(p)] for name, p in named if name != first[id(p)]}
        """Other name of a tied weight -> its first one."""

    @property
    def learning_rate(self) -> float:
        if "optimizer" not in self._round:
            return math.nan
        return float(self._round["optimizer"]["param_groups"][0].get("lr", math.nan))

    def set_learning_rate(self, rate: float) -> None:
        schedule = self._round["scheduler"]
        groups = self._round["optimizer"]["param_groups"]
        factor = set_present_rate(groups, rate, is_scheduled=schedule is not None)
        if schedule is not None:
            self._round["scheduler"] = rescaled(schedule, factor)

    def train(self, part: RoundPart) -> RoundDone:
        rows = self._jobs.run_on_all(part, partial(encoded, self._round), merge=self._merge)
        reports = {rank: json.loads(data) for rank, kind, data in rows if kind == "result"}
        assert len(reports) == self._num_shards
        found: dict[str, list[bytes]] = {}
        for _, kind, data in rows:
            if is_of_state(kind):
                found.setdefault(kind, []).append(data)
        if found:
            pieces = self._merge.pieces
            means = ((name, pieces.mean(name, parts)) for name, parts in found.items())
            mean = pieces.put_together(means)
            self._note_odd(mean["model"], reports)
            self._go_on_from(mean)
            # Not numbers of which there is a mean: those of the first shard.
            _, _, held = min(row for row in rows if row[1] == ATTRIBUTES)
            self.set_attributes(decode(held, "attributes of the module"))
        sent = {rank: report["bytes_sent"] for rank, report in reports.items()}
        return RoundDone(reports=reports, bytes_sent=sent)

    def _note_odd(self, model: dict[str, Any], reports: dict[int, Any]) -> None:
        """Take care of what `RoundReplica.odd` has found.

        What some replicas have changed that should stay, counts for the others as it was.

        Raises:
            ConfigError: a persistent buffer has other shapes in other replicas.
        """
        counting = {rank: r for rank, r in reports.items() if r["weight"] > 0}
        for name in sorted({name for report in counting.values() for name in report["shapes"]}):
            own = shape_of(self._round["model"][name])
            shapes = {rank: report["shapes"].get(name, own) for rank, report in counting.items()}
            if any(shape != shapes[min(shapes)] for shape in shapes.values()):
                raise no_mean(name, shapes)
        is_equal = self._merge.pieces.count_equally
        weights = {rank: 1.0 if is_equal else r["weight"] for rank, r in counting.items()}
        for name in sorted({name for report in counting.values() for name in report["moved"]}):
            ranks = [rank for rank, report in counting.items() if name in report["moved"]]
            share = sum(weights[rank] for rank in ranks) / sum(weights.values())
            before, now = self._round["model"][name], model[name]
            if share < 1 and before.shape == now.shape and is_number(now):
                model[name] = weighted_mean([before, now], [1 - share, share])

    def _go_on_from(self, mean: dict[str, Any]) -> None:
        """Begin the next round from what the strategy makes of the mean of the replicas."""
        made: dict[int, torch.Tensor] = {}
        for name, change in mean.pop(CHANGES, {}).items():
            if id(change) not in made:  # tied weights stay tied
                made[id(change)] = self._round["model"][name] + change
            mean["model"][name] = made[id(change)]
        # What does not train was not sent back.
        mean["model"] = {**self.model(), **mean["model"]}
        if self._outer is not None:
            learning_rate = float(mean["optimizer"]["param_groups"][0].get("lr", math.nan))
            anchor = [self._round["model"][name] for name in self._trained]
            self._outer.step(anchor, [mean["model"][name] for name in self._trained], learning_rate)
            for name, first in self._aliases.items():  # small ones have come apart in the mean
                mean["model"][name] = mean["model"][first]
        if self._strategy.optimizer_state == "reset":
            mean["optimizer"]["state"] = {}
        self._round = mean
        set_trains(self._module, mean["trains"])  # callbacks of tasks may have changed it

    def follow_freezing(self) -> None:
        """Train what the run's module trains now, which callbacks may have changed."""
        flags = trains(self._module)
        if self._outer is not None and flags != self._round.get("trains", flags):
            raise ConfigError(
                "a callback has changed requires_grad of parameters, which this strategy does not "
                "follow; use AllReduce or ParameterAveraging"
            )
        if "trains" in self._round:
            self._round["trains"] = flags

    def model(self) -> dict[str, Any]:
        model: dict[str, Any] = self._round["model"]
        return model

    def attributes(self) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self._round.get("attributes")
        return found

    def set_attributes(self, attributes: dict[str, Any]) -> None:
        kept = (self.attributes() or {}).get(OWN_STATES)  # callbacks on the driver do not change it
        self._round["attributes"] = {OWN_STATES: kept, **attributes}

    def set_tensors(self, tensors: dict[str, Any]) -> None:
        self._round["model"] = {**self.model(), **tensors}

    def evaluate(self, state: TrainState) -> RoundEvaluation:
        return self._jobs.measure(self.model(), self.attributes())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        given = {**self.state_dict(), **state, "round": {**self._round, **state["round"]}}
        super().load_state_dict(given)
        set_trains(self._module, self._round.get("trains", {}))

    def notes(self) -> list[Record]:
        return []
