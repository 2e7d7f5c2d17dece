"""Populations in rounds: the driver holds each member's state and sends it to the member's task.

A round is one plain Spark job in which every member trains on one shard. The driver holds states
as bytes that it never looks into, and twice while a checkpoint is written.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch

from sparkdl.comm.file_chunks import JobResults
from sparkdl.data.plan import RoundPart
from sparkdl.errors import CheckpointError, ConfigError, TrainingDiverged
from sparkdl.serialization.travel.packed_module import travelled
from sparkdl.spark.rounds.round_driver import RoundDone, run_rounds
from sparkdl.spark.rounds.round_jobs import RoundEvaluation, RoundJobs
from sparkdl.spark.rounds.round_stages import run_member_stage
from sparkdl.spark.run.run import Run, Trained
from sparkdl.storage.stateful import Stateful
from sparkdl.sync.averaging.mean import merge
from sparkdl.sync.averaging.period import FixedPeriod, Period
from sparkdl.sync.module_tensors import tensors_of
from sparkdl.sync.population.hyperparameters import first_values
from sparkdl.sync.population.one_shot_averaging import OneShotAveraging
from sparkdl.sync.population.population import (
    Competition,
    PopulationStrategy,
    best_first,
    members_of,
)
from sparkdl.sync.population.population_based_training import PopulationBasedTraining
from sparkdl.sync.population.tournament import Tournament
from sparkdl.train.objective.divergence import LossWatch
from sparkdl.train.optimizers.optimizers import resolve_optimizer
from sparkdl.train.state import Record, TrainState
from sparkdl.worker import population_member
from sparkdl.worker.population_member import (
    MODEL,
    OPTIONS,
    REST,
    RIVAL_MODEL,
    RIVAL_REST,
    decoded,
    encoded,
    pack_parts,
)
from sparkdl.worker.round_task import RoundOrder

_MEASURED_BYTES = 64 << 20
"""Models that are sent together to all shards to be measured: executors must have room for them,
and some ways to send them end at 128 MB."""

Parts = dict[str, bytes]


def train_population(run: Run, strategy: PopulationStrategy) -> Trained:
    """Train, and give the result to the run's module; raises what `run_rounds` raises."""
    if isinstance(strategy, OneShotAveraging):
        return run_rounds(run, FixedPeriod(sys.maxsize), lambda jobs: _OneShot(run, strategy, jobs))
    if isinstance(strategy, Tournament):
        period = AlignedPeriod(strategy.period)
        return run_rounds(run, period, lambda jobs: _Tournament(run, strategy, jobs))
    assert isinstance(strategy, PopulationBasedTraining)
    period = AlignedPeriod(strategy.period)
    return run_rounds(
        run,
        period,
        lambda jobs: _PopulationBased(run, strategy, jobs),
        watch=LossWatch(None),  # who runs away is replaced
    )


@dataclass(frozen=True, kw_only=True)
class MemberState:
    """A member's state, as its task encoded it."""

    model: bytes
    rest: bytes = b""
    """Optimizer, schedule and scaler; nothing: they begin anew."""
    weight: float = 0.0
    """Weights of the samples it has been trained on; their number where there are no weights."""
    learning_rate: float = math.nan


class Population:
    """The members of a run, and the jobs that train and measure them."""

    def __init__(self, run: Run, jobs: RoundJobs) -> None:
        self._run = run
        self._jobs = jobs
        self.shards = members_of(run.plan)
        first = MemberState(model=encoded({"model": tensors_of(run.module)}))
        self.members = [first] * len(self.shards)
        self._notes: dict[tuple[int, int], Record] = {}
        """(step, member) -> what was seen of the member when it had taken so many steps."""

    def train_members(
        self, part: RoundPart, shards: Sequence[int], parts: Sequence[Parts]
    ) -> RoundDone:
        """Let each member train the steps of ``part`` on its shard; raises TrainingDiverged.

        ``parts`` has what the task of each member gets; see `parts_of`.
        """
        by_shard = dict(zip(shards, parts, strict=True))

        def stage(order: RoundOrder) -> JobResults:
            return run_member_stage(self._run, order, by_shard)

        results: dict[int, Parts] = {shard: {} for shard in by_shard}
        for shard, kind, data in self._jobs.run(part, population_member.work, stage):
            results[shard][kind] = data
        reports = {shard: json.loads(found["result"]) for shard, found in results.items()}
        self.members = [
            _after(member, results[shard], reports[shard])
            for member, shard in zip(self.members, shards, strict=True)
        ]
        if all("diverged" in report for report in reports.values()):
            raise TrainingDiverged(f"all members: {reports[shards[0]]['diverged']}")
        return RoundDone(
            reports=reports,
            bytes_sent={
                shard: len(found.get(MODEL, b"")) + len(found.get(REST, b""))
                for shard, found in results.items()
            },
        )

    def set_learning_rate(self, rate: float) -> None:
        """Raise ConfigError: members have rates of their own."""
        raise ConfigError(
            f"a callback asked for the learning rate {rate:g}, but each member of a population has "
            "its own; use another strategy, or PopulationBasedTraining with mutations"
        )

    @property
    def result(self) -> MemberState:
        """The member whose module has the attributes of the result."""
        return self.members[0]

    def attributes(self) -> dict[str, Any] | None:
        """See `Replicas.attributes`."""
        found: dict[str, Any] | None = decoded(self.result.model).get("attributes")
        return found

    def set_attributes(self, attributes: dict[str, Any]) -> None:
        """Raise ConfigError: members are trained apart from the run's module."""
        raise ConfigError(
            "a callback has changed attributes of the module, but each member of a population has "
            "a module of its own; use another strategy, or change them in on_step_end"
        )

    def set_tensors(self, tensors: dict[str, Any]) -> None:
        """Raise ConfigError, likewise."""
        raise ConfigError(
            f"a callback has changed weights of the module ({', '.join([*tensors][:5])}), but each "
            "member of a population has a module of its own; use another strategy, or change them "
            "in on_step_end"
        )

    def follow_freezing(self) -> None:
        """Nothing: members are trained apart from the run's module."""

    def measure(self) -> list[Record]:
        """Each member's entries of the history, over the validation rows of all shards."""
        models = [member.model for member in self.members]
        records: dict[int, Record] = {}
        for group in grouped([len(model) for model in models], _MEASURED_BYTES):
            pack = partial(pack_parts, {str(number): models[number] for number in group})
            rows = self._jobs.run_on_all(None, pack, work=population_member.work)
            reports = [json.loads(data) for _, kind, data in rows if kind == "result"]
            for number in group:
                records[number] = self._jobs.evaluation(
                    [report[str(number)] for report in reports],
                    [data for _, kind, data in rows if kind == f"metrics {number}"],
                ).record
        return [records[number] for number in range(len(models))]

    def note(self, step: int, member: int, **values: float) -> None:
        """Add to what is known of ``member`` when it has taken ``step`` steps."""
        key = (step, member)
        self._notes.setdefault(key, {"step": step, "member": member}).update(values)

    def notes(self) -> list[Record]:
        """Return what is known of the members, by step and member."""
        return [self._notes[key] for key in sorted(self._notes)]

    def state_dict(self) -> dict[str, Any]:
        """See `Replicas.state_dict`."""
        return {
            "members": [
                {
                    **vars(member),
                    "model": _as_tensor(member.model),
                    "rest": _as_tensor(member.rest),
                }
                for member in self.members
            ],
            "notes": self.notes(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave; raises CheckpointError if members have come or gone."""
        found = state["members"]
        if len(found) != len(self.members):
            raise CheckpointError(
                f"the checkpoint holds a population of {len(found)}, and there are "
                f"{len(self.members)} shards with training rows: set numWorkers as it was, or "
                "another checkpointDir to begin anew"
            )
        self.members = [
            replace(
                MemberState(**one),
                model=one["model"].numpy().tobytes(),
                rest=one["rest"].numpy().tobytes(),
            )
            for one in found
        ]
        self._notes = {(note["step"], note["member"]): note for note in state["notes"]}


class _OneShot(Population):
    """`Replicas` for `OneShotAveraging`. A round is what is left of an epoch."""

    def __init__(self, run: Run, strategy: OneShotAveraging, jobs: RoundJobs) -> None:
        super().__init__(run, jobs)
        self._strategy = strategy

    @property
    def learning_rate(self) -> float:
        rates = [member.learning_rate for member in self.members if member.weight > 0]
        return rates[0] if rates else math.nan

    def train(self, part: RoundPart) -> RoundDone:
        return self.train_members(part, self.shards, [parts_of(one) for one in self.members])

    def model(self) -> dict[str, Any]:
        weights = [member.weight for member in self.members]
        if self._strategy.weighting == "equal":
            weights = [float(weight > 0) for weight in weights]
        models = [decoded(member.model)["model"] for member in self.members]
        merged: dict[str, Any] = merge(models, weights) if any(weights) else models[0]
        return merged

    def evaluate(self, state: TrainState) -> RoundEvaluation:
        return self._jobs.measure(self.model(), self.attributes())


class _Competition(Population, Stateful, ABC):
    """`Replicas` whose members are measured against each other; the best is the result."""

    shared_state: ClassVar[tuple[str, ...]] = ("best_member", "values")

    def __init__(self, run: Run, strategy: Competition, jobs: RoundJobs) -> None:
        super().__init__(run, jobs)
        self._judge = strategy
        self._best_member = 0
        module = travelled(run.module, copies=True)
        optimizer = resolve_optimizer(run.config, module)(module.parameters())
        self._own = first_values(optimizer, strategy.mutations)
        self._values = [
            strategy.first(member, self._own, run.config.seed)
            for member in range(len(self.members))
        ]
        """Hyperparameters of each member."""
        self._measured: tuple[int, list[Record]] | None = None
        """Steps, and what the members were worth after them."""

    @property
    def learning_rate(self) -> float:
        return self.result.learning_rate

    @property
    def result(self) -> MemberState:
        return self.members[self._best_member]

    @abstractmethod
    def train(self, part: RoundPart) -> RoundDone:
        """See `Replicas.train`."""

    def describe(self, member: int, step: int) -> Record:
        """Return what else to note of ``member`` when it is measured after ``step`` steps."""
        return self._values[member]

    def scores(self, step: int) -> list[Record]:
        """Every member's entries of the history after ``step`` steps, which are the present."""
        if self._measured is None or self._measured[0] != step:
            records = self.measure()
            self._measured = step, records
            for number, record in enumerate(records):
                self.note(step, number, **record, **self.describe(number, step))
        return self._measured[1]

    def model(self) -> dict[str, Any]:
        model: dict[str, Any] = decoded(self.result.model)["model"]
        return model

    def evaluate(self, state: TrainState) -> RoundEvaluation:
        records = self.scores(state.step)
        costs = [self._judge.cost(record) for record in records]
        order = best_first(costs)
        self._best_member = order[0]
        record = {
            **records[order[0]],
            f"{self._judge.monitor}_spread": costs[order[-1]] - costs[order[0]],
            "best_member": order[0],
            "learning_rate": self.learning_rate,
        }
        return RoundEvaluation(record=record, confusion=None)

    def state_dict(self) -> dict[str, Any]:
        return {**Population.state_dict(self), **Stateful.state_dict(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        Population.load_state_dict(self, state)
        Stateful.load_state_dict(self, state)


class _Tournament(_Competition):
    """`Replicas` for `Tournament`. Contests are part of the job that trains the winners."""

    def __init__(self, run: Run, strategy: Tournament, jobs: RoundJobs) -> None:
        super().__init__(run, strategy, jobs)
        self._strategy = strategy

    def train(self, part: RoundPart) -> RoundDone:
        run, members = self._run, self.members
        rivals = self._strategy.rivals(run.plan, run.config.seed, part.step)
        parts = [parts_of(*one) for one in zip(members, self._values, strict=True)]
        for member, rival in rivals.items():
            parts[member] = {
                **parts_of(members[member], self._values[member], rival=self._values[rival]),
                RIVAL_MODEL: members[rival].model,
            }
            if self._strategy.exchange == "all":
                parts[member][RIVAL_REST] = members[rival].rest
        done = self.train_members(part, self.shards, parts)
        name, before = self._strategy.monitor.removeprefix("val_"), list(self._values)
        for member, rival in rivals.items():
            contest = done.reports[self.shards[member]]["contest"]
            if contest["is_lost"]:
                self._values[member] = before[rival]
            values = {
                "rival": rival,
                f"tournament_{name}": contest["value"],
                f"rival_{name}": contest["rival_value"],
                "is_lost": float(contest["is_lost"]),
            }
            self.note(part.step, member, **values)
        return done

    def evaluate(self, state: TrainState) -> RoundEvaluation:
        found = super().evaluate(state)
        notes = [n for n in self.notes() if n["step"] >= state.step - state.step_in_epoch]
        takeovers = sum(note.get("is_lost", 0.0) for note in notes)
        return replace(found, record={**found.record, "takeovers": takeovers})


class _PopulationBased(_Competition):
    """`Replicas` for `PopulationBasedTraining`."""

    shared_state: ClassVar = ("best_member", "values", "has_diverged")

    def __init__(self, run: Run, strategy: PopulationBasedTraining, jobs: RoundJobs) -> None:
        super().__init__(run, strategy, jobs)
        self._strategy = strategy
        self._has_diverged = [False] * len(self.members)

    def train(self, part: RoundPart) -> RoundDone:
        """See `Replicas.train`; bad members first copy good ones."""
        if self._strategy.is_due(part.step):
            self._exploit(part.step)
        shards = [
            self._strategy.shard_of(self._run.plan, member, part.step)
            for member in range(len(self.members))
        ]
        parts = [
            parts_of(member, values, may_diverge=True)
            for member, values in zip(self.members, self._values, strict=True)
        ]
        done = self.train_members(part, shards, parts)
        for member, shard in enumerate(shards):
            self._has_diverged[member] |= "diverged" in done.reports[shard]
        return done

    def _exploit(self, step: int) -> None:
        """Let bad members go on from good ones, with other hyperparameters."""
        strategy, seed, members = self._strategy, self._run.config.seed, self.members
        costs = [
            math.nan if diverged else strategy.cost(record)
            for record, diverged in zip(self.scores(step), self._has_diverged, strict=True)
        ]
        for member, donor in strategy.donors(costs, seed, step).items():
            self.note(step, member, donor=donor)
            members[member] = members[donor]
            self._values[member] = strategy.explored(
                self._values[donor], self._own, seed=seed, step=step, member=member
            )
            self._has_diverged[member] = False

    def describe(self, member: int, step: int) -> Record:
        return {
            "shard": self._strategy.shard_of(self._run.plan, member, max(0, step - 1)),
            "has_diverged": float(self._has_diverged[member]),
            **self._values[member],
        }


class AlignedPeriod(Period):
    """Rounds end when the steps of the run are a multiple of ``period``, whatever cut one short."""

    def __init__(self, period: int) -> None:
        self._period = period

    def steps(self, step: int) -> int:
        return self._period - step % self._period


def grouped(sizes: Iterable[int], limit: int) -> list[list[int]]:
    """Positions in runs whose sizes add up to ``limit`` at most, or that are of one."""
    groups: list[list[int]] = []
    total = 0
    for position, size in enumerate(sizes):
        if not groups or total + size > limit:
            groups.append([])
            total = 0
        groups[-1].append(position)
        total += size
    return groups


def parts_of(
    member: MemberState,
    hyperparameters: Mapping[str, float] | None = None,
    *,
    rival: Mapping[str, float] | None = None,
    may_diverge: bool = False,
) -> Parts:
    """Return what a member's task gets, with the hyperparameters that are not what the user set.

    ``rival`` is what it trains with if it loses to the member with which it competes first.
    """
    options = {
        "hyperparameters": dict(hyperparameters or {}),
        "rival": dict(rival or {}),
        "may_diverge": may_diverge,
    }
    return {MODEL: member.model, REST: member.rest, OPTIONS: json.dumps(options).encode()}


def _after(member: MemberState, found: Parts, report: Any) -> MemberState:
    """The member after a round; as it was before, if it has diverged."""
    if MODEL not in found:
        return member
    rate = report["learning_rate"]
    return MemberState(
        model=found[MODEL],
        rest=found[REST],
        weight=member.weight + report["weight"],
        learning_rate=math.nan if rate is None else rate,
    )


def _as_tensor(data: bytes) -> torch.Tensor:
    """The same memory, for a checkpoint; nobody may write to it."""
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(data, dtype=torch.uint8)
