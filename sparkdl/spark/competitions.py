"""What does the driver do between the rounds of each kind of population?"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from sparkdl.data.plan import RoundPart
from sparkdl.spark.populations import CompetitionDriver, Parts, PopulationDriver
from sparkdl.spark.rounddriver import run_rounds
from sparkdl.spark.run import Run, Trained
from sparkdl.sync.averaging.merge import merge
from sparkdl.sync.averaging.period import FixedPeriod
from sparkdl.sync.population.hyperparameters import first_values
from sparkdl.sync.population.one_shot_averaging import OneShotAveraging
from sparkdl.sync.population.population import PopulationStrategy
from sparkdl.sync.population.population_based_training import PopulationBasedTraining
from sparkdl.sync.population.tournament import Tournament
from sparkdl.train.objective.divergence import LossWatch
from sparkdl.train.optimizers.optimizers import resolve_optimizer
from sparkdl.train.state import Record
from sparkdl.worker.population_member import RIVAL_MODEL, RIVAL_REST, decoded


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
