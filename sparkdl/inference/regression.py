"""The task of predicting one number per row."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sparkdl.config import Task
from sparkdl.errors import ConfigError
from sparkdl.inference.evaluate_rows import Part, united_moments
from sparkdl.inference.scores import RegressionScores
from sparkdl.train.objective.loss import CLASS_LOSSES


@dataclass(frozen=True)
class Regression(Task):
    """One number per row is learnt; the measures are those of scikit-learn."""

    name = "regression"
    has_one_label = True
    labels = "numbers"
    compares = frozenset({"numbers"})

    def check_loss(self, loss: Any) -> None:
        if isinstance(loss, CLASS_LOSSES):
            raise ConfigError(
                f"{type(loss).__name__} compares class numbers, which a regression has not; "
                "use 'mse' or another loss of numbers"
            )

    def compared(
        self, output: torch.Tensor, target: torch.Tensor, predictions: Callable[[Any], Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return output, target

    def add_rows(
        self,
        part: Part,
        predicted: torch.Tensor,
        target: torch.Tensor,
        weights: torch.Tensor,
        ignored: int,
    ) -> None:
        counted = weights > 0
        weights = weights[counted]
        labels = target.double().cpu().reshape(-1)[counted]
        errors = predicted.double().cpu().reshape(-1)[counted] - labels
        weight = float(weights.sum())
        part.add("squared_error", float((weights * errors**2).sum()))
        part.add("absolute_error", float((weights * errors.abs()).sum()))
        mean = float((weights * labels).sum()) / weight if weight else 0.0
        moments = weight, mean, float((weights * (labels - mean) ** 2).sum())
        part.labels = united_moments(part.labels, moments)

    def scores(self, part: Part) -> RegressionScores | None:
        weight, _, squares = part.labels
        if not weight:
            return None
        return RegressionScores(
            rmse=math.sqrt(part.sums["squared_error"] / weight),
            mae=part.sums["absolute_error"] / weight,
            r2=1 - part.sums["squared_error"] / squares if squares > 0 else math.nan,
        )


REGRESSION = Regression()
