"""How does the driver keep a population? It holds each member's state and sends it to its task.

A round is one plain Spark job in which every member trains on one shard. The driver holds the
newest state of every member as bytes that it never looks into: one times members times the size of
weights and optimizer state, and once more while a checkpoint is written.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sparkdl.data.plan import RoundPart
from sparkdl.errors import CheckpointError, TrainingDiverged
from sparkdl.spark.rounds.round_driver import RoundsDriver, run_rounds
from sparkdl.spark.rounds.round_stages import Rows, run_member_stage, run_stage
from sparkdl.spark.rounds.round_totals import RoundDone
from sparkdl.spark.run.run import Run, Trained
from sparkdl.sync.averaging.merge import merge
from sparkdl.sync.averaging.period import FixedPeriod, Period
from sparkdl.sync.population.hyperparameters import first_values
from sparkdl.sync.population.one_shot_averaging import OneShotAveraging
from sparkdl.sync.population.population import PopulationStrategy, best_first, members_of
from sparkdl.sync.population.population_based_training import PopulationBasedTraining
from sparkdl.sync.population.tournament import Tournament
from sparkdl.train.objective.divergence import LossWatch
from sparkdl.train.optimizers.optimizers import resolve_optimizer
from sparkdl.train.state import Record
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


@dataclass(frozen=True, kw_only=True)
class Member:
    """A member's state, as its task encoded it."""

    model: bytes
    rest: bytes = b""
    """Optimizer, schedule and scaler; nothing: they begin anew."""
    weight: float = 0.0
    """Weights of the samples it has been trained on; their number where there are no weights."""
    learning_rate: float = math.nan


class PopulationDriver(RoundsDriver):
    """The driver's side of a run of several members, each of which has a state of its own."""

    may_diverge = False
    """Whether a member may, and goes on from where its round began."""

    def __init__(self, run: Run, period: Period) -> None:
        super().__init__(run, period)
        self._shards = members_of(run.plan)
        first = Member(model=encoded({"model": run.module.state_dict()}))
        self._members = [first] * len(self._shards)
        self._notes: dict[tuple[int, int], Record] = {}
        """(step, member) -> what was seen of the member when it had taken so many steps."""

    # --- rounds -------------------------------------------------------------------------------

    def _prepare(self, part: RoundPart) -> list[Parts]:
        """What each member's task needs besides its state, before the steps of ``part``."""
        return [{} for _ in self._members]

    def _hyperparameters(self, member: int) -> Mapping[str, float]:
        """What ``member`` trains with where it is not what the user said."""
        return {}

    def _shard_of(self, member: int, step: int) -> int:
        """Where ``member`` takes step number ``step``."""
        return self._shards[member]

    def _take(self, part: RoundPart, reports: Sequence[Any]) -> None:
        """Take note of what the members report of a round."""

    def _round(self, part: RoundPart) -> RoundDone:
        """See `RoundsDriver._round`."""
        extra = self._prepare(part)  # may change members
        shards = [self._shard_of(member, part.step) for member in range(len(self._members))]
        parts = {
            shard: {**self._state_of(number), **extra[number]}
            for number, shard in enumerate(shards)
        }
        results: dict[int, Parts] = {shard: {} for shard in shards}
        for shard, kind, data in self._train_members(part, parts):
            results[shard][kind] = data
        reports = {shard: json.loads(found["result"]) for shard, found in results.items()}
        for number, shard in enumerate(shards):
            self._members[number] = _after(self._members[number], results[shard], reports[shard])
        if all("diverged" in report for report in reports.values()):
            raise TrainingDiverged(f"all members: {reports[shards[0]]['diverged']}")
        self._take(part, [reports[shard] for shard in shards])
        return RoundDone(
            reports=reports,
            bytes_sent={
                shard: len(found.get(MODEL, b"")) + len(found.get(REST, b""))
                for shard, found in results.items()
            },
            learning_rate=self._learning_rate(),
        )

    def _state_of(self, number: int) -> Parts:
        member = self._members[number]
        options = {
            "hyperparameters": dict(self._hyperparameters(number)),
            "may_diverge": self.may_diverge,
        }
        return {MODEL: member.model, REST: member.rest, OPTIONS: json.dumps(options).encode()}

    def _train_members(self, part: RoundPart, parts: dict[int, Parts]) -> Rows:
        run = self._run

        def stage(order: RoundOrder) -> Rows:
            return run_member_stage(
                run.table.df, order, parts, link=run.link, profile=run.slots.profile
            )

        return self._job(part, stage)

    # --- measuring ----------------------------------------------------------------------------

    def _measure(self, models: Sequence[bytes]) -> list[Record]:
        """Each model's entries of the history, over the validation rows of all shards."""
        records: dict[int, Record] = {}
        for group in grouped([len(model) for model in models], _MEASURED_BYTES):
            rows = self._measure_together({str(number): models[number] for number in group})
            reports = [json.loads(data) for _, kind, data in rows if kind == "result"]
            for number in group:
                records[number] = self._combined(
                    [report[str(number)] for report in reports],
                    [data for _, kind, data in rows if kind == f"metrics {number}"],
                )
        return [records[number] for number in range(len(models))]

    def _measure_together(self, parts: Parts) -> Rows:
        run, data = self._run, pack_parts(parts)

        def stage(order: RoundOrder) -> Rows:
            return run_stage(
                run.table.df,
                replace(order, is_population=True),
                data,
                depth=1,
                channel=run.link.channel,
                profile=run.slots.profile,
            )

        return self._job(None, stage)

    def _note(self, member: int, **values: float) -> None:
        """Add to what is known of ``member`` at the present step."""
        step = self._progress.step
        key = (step, member)
        self._notes.setdefault(key, {"step": step, "member": member}).update(values)

    # --- what stays ---------------------------------------------------------------------------

    def _states(self) -> dict[str, Any]:
        """See `RoundsDriver._states`."""
        return {
            "members": [
                {
                    "model": _as_tensor(member.model),
                    "rest": _as_tensor(member.rest),
                    "weight": member.weight,
                    "learning_rate": member.learning_rate,
                }
                for member in self._members
            ],
            "notes": self._sorted_notes(),
        }

    def _load_states(self, states: dict[str, Any]) -> None:
        """See `RoundsDriver._load_states`."""
        found = states["members"]
        if len(found) != len(self._members):
            raise CheckpointError(
                f"the checkpoint holds a population of {len(found)}, and there are "
                f"{len(self._members)} shards with training rows: set numWorkers as it was, or "
                "another checkpointDir to begin anew"
            )
        self._members = [
            Member(
                **{**member, "model": _as_bytes(member["model"]), "rest": _as_bytes(member["rest"])}
            )
            for member in found
        ]
        self._notes = {(note["step"], note["member"]): note for note in states["notes"]}

    def _sorted_notes(self) -> list[Record]:
        return [self._notes[key] for key in sorted(self._notes)]

    def _outcome(self) -> Trained:
        return replace(super()._outcome(), population=self._sorted_notes())


class CompetitionDriver(PopulationDriver):
    """Members are measured against each other; the best is the result."""

    def __init__(self, run: Run, period: int) -> None:
        super().__init__(run, AlignedPeriod(period))
        self._best_member = 0
        self._measured: tuple[int, list[Record]] | None = None

    def _describe(self, member: int) -> Record:
        """What else to note of ``member`` whenever it is measured."""
        return {}

    def _scores(self) -> list[Record]:
        """Every member's entries of the history, at the present step."""
        step = self._progress.step
        if self._measured is None or self._measured[0] != step:
            records = self._measure([member.model for member in self._members])
            self._measured = step, records
            for number, record in enumerate(records):
                self._note(number, **record, **self._describe(number))
        return self._measured[1]

    def _evaluate(self) -> Record:
        """See `RoundsDriver._evaluate`."""
        records = self._scores()
        self._confusion = None  # that of the member which was measured last
        losses = [record["val_loss"] for record in records]
        order = best_first(losses)
        self._best_member = order[0]
        return {
            **records[order[0]],
            "val_loss_spread": losses[order[-1]] - losses[order[0]],
            "best_member": order[0],
            "learning_rate": self._learning_rate(),
        }

    def _model(self) -> dict[str, Any]:
        """See `RoundsDriver._model`."""
        model: dict[str, Any] = decoded(self._members[self._best_member].model)["model"]
        return model

    def _learning_rate(self) -> float:
        """See `RoundsDriver._learning_rate`; that of the best member."""
        return self._members[self._best_member].learning_rate

    def _states(self) -> dict[str, Any]:
        """See `RoundsDriver._states`."""
        return {**super()._states(), "best_member": self._best_member}

    def _load_states(self, states: dict[str, Any]) -> None:
        """See `RoundsDriver._load_states`."""
        super()._load_states(states)
        self._best_member = states["best_member"]


class AlignedPeriod(Period):
    """Rounds end when the steps of the run are a multiple of ``period``, whatever cut one short."""

    def __init__(self, period: int) -> None:
        self._period = period

    def steps(self, step: int) -> int:
        """See `Period.steps`."""
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


def _after(member: Member, found: Parts, report: Any) -> Member:
    """The member after a round; as it was before, if it has diverged."""
    if MODEL not in found:
        return member
    rate = report["learning_rate"]
    return Member(
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


def _as_bytes(tensor: torch.Tensor) -> bytes:
    array: np.ndarray[Any, Any] = tensor.numpy()
    return array.tobytes()


def train_population(run: Run, strategy: PopulationStrategy) -> Trained:
    """Train, and give the result to the run's module; raises what `run_rounds` raises."""
    if isinstance(strategy, OneShotAveraging):
        return run_rounds(_OneShot(run, strategy))
    if isinstance(strategy, Tournament):
        return run_rounds(_Tournament(run, strategy))
    assert isinstance(strategy, PopulationBasedTraining)
    return run_rounds(_PopulationBased(run, strategy))


class _OneShot(PopulationDriver):
    """See `OneShotAveraging`. A round is what is left of an epoch."""

    def __init__(self, run: Run, strategy: OneShotAveraging) -> None:
        super().__init__(run, FixedPeriod(sys.maxsize))
        self._strategy = strategy

    def _model(self) -> dict[str, Any]:
        """See `RoundsDriver._model`."""
        weights = [member.weight for member in self._members]
        if self._strategy.weighting == "equal":
            weights = [float(weight > 0) for weight in weights]
        models = [decoded(member.model)["model"] for member in self._members]
        merged: dict[str, Any] = merge(models, weights) if any(weights) else models[0]
        return merged

    def _evaluate(self) -> Record:
        """See `RoundsDriver._evaluate`."""
        return self._evaluate_model(self._model())

    def _learning_rate(self) -> float:
        """See `RoundsDriver._learning_rate`."""
        rates = [member.learning_rate for member in self._members if member.weight > 0]
        return rates[0] if rates else math.nan


class _Tournament(CompetitionDriver):
    """See `Tournament`. Contests are part of the job that trains the winners."""

    def __init__(self, run: Run, strategy: Tournament) -> None:
        super().__init__(run, strategy.period)
        self._strategy = strategy
        self._rivals: dict[int, int] = {}

    def _prepare(self, part: RoundPart) -> list[Parts]:
        """See `PopulationDriver._prepare`."""
        run = self._run
        self._rivals = self._strategy.rivals(run.plan, run.config.seed, part.step)
        parts: list[Parts] = [{} for _ in self._members]
        for member, rival in self._rivals.items():
            parts[member][RIVAL_MODEL] = self._members[rival].model
            if self._strategy.exchange == "all":
                parts[member][RIVAL_REST] = self._members[rival].rest
        return parts

    def _take(self, part: RoundPart, reports: Sequence[Any]) -> None:
        """See `PopulationDriver._take`."""
        for member, rival in self._rivals.items():
            contest = reports[member]["contest"]
            self._note(
                member,
                rival=rival,
                tournament_loss=contest["loss"],
                rival_loss=contest["rival_loss"],
                is_lost=float(contest["is_lost"]),
            )

    def _evaluate(self) -> Record:
        """See `RoundsDriver._evaluate`."""
        progress = self._progress
        began = progress.step - progress.step_in_epoch
        notes = [note for (step, _), note in self._notes.items() if step >= began]
        takeovers = sum(note.get("is_lost", 0.0) for note in notes)
        return {**super()._evaluate(), "takeovers": takeovers}


class _PopulationBased(CompetitionDriver):
    """See `PopulationBasedTraining`."""

    may_diverge = True

    def __init__(self, run: Run, strategy: PopulationBasedTraining) -> None:
        super().__init__(run, strategy.period)
        self._strategy = strategy
        self._watch = LossWatch(None)  # a member whose loss runs away is replaced
        module = copy.deepcopy(run.module)
        optimizer = resolve_optimizer(run.config, module)(
            [parameter for parameter in module.parameters() if parameter.requires_grad]
        )
        self._own = first_values(optimizer, strategy.mutations)
        self._values = [
            strategy.first(member, self._own, run.config.seed)
            for member in range(len(self._members))
        ]
        self._has_diverged = [False] * len(self._members)

    def _prepare(self, part: RoundPart) -> list[Parts]:
        """See `PopulationDriver._prepare`; let bad members copy good ones."""
        strategy, seed = self._strategy, self._run.config.seed
        if strategy.is_due(part.step):
            losses = [
                math.nan if diverged else record["val_loss"]
                for record, diverged in zip(self._scores(), self._has_diverged, strict=True)
            ]
            for member, donor in strategy.donors(losses, seed, part.step).items():
                self._note(member, donor=donor)
                self._members[member] = self._members[donor]
                self._values[member] = strategy.explored(
                    self._values[donor], self._own, seed=seed, step=part.step, member=member
                )
                self._has_diverged[member] = False
        return super()._prepare(part)

    def _hyperparameters(self, member: int) -> Mapping[str, float]:
        """See `PopulationDriver._hyperparameters`."""
        return self._values[member]

    def _shard_of(self, member: int, step: int) -> int:
        """See `PopulationDriver._shard_of`."""
        return self._strategy.shard_of(self._run.plan, member, step)

    def _take(self, part: RoundPart, reports: Sequence[Any]) -> None:
        """See `PopulationDriver._take`."""
        for member, report in enumerate(reports):
            self._has_diverged[member] |= "diverged" in report

    def _describe(self, member: int) -> Record:
        """See `CompetitionDriver._describe`."""
        return {
            "shard": self._shard_of(member, max(0, self._progress.step - 1)),
            "has_diverged": float(self._has_diverged[member]),
            **self._values[member],
        }

    def _states(self) -> dict[str, Any]:
        """See `RoundsDriver._states`."""
        return {
            **super()._states(),
            "values": self._values,
            "has_diverged": self._has_diverged,
        }

    def _load_states(self, states: dict[str, Any]) -> None:
        """See `RoundsDriver._load_states`."""
        super()._load_states(states)
        self._values = states["values"]
        self._has_diverged = states["has_diverged"]
