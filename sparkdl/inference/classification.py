"""The task of telling classes apart: labels are class numbers, outputs are logits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from sparkdl.config import Task
from sparkdl.errors import ConfigError
from sparkdl.inference.evaluate_rows import Part
from sparkdl.inference.predict import class_probabilities, predicted_class
from sparkdl.inference.scores import NO_CLASS, ClassificationScores, classification_scores
from sparkdl.train.objective.loss import ELEMENTWISE_LOSSES
from sparkdl.train.objective.named_metrics import ACCURACY

logger = logging.getLogger(__name__)

_SMALLEST_PROBABILITY = 1e-15
"""A probability of 0 would make the log loss infinite; scikit-learn and Spark clip as well."""
_UNKNOWN = "rows without a class"
_STRANGE = "rows of another class"


@dataclass(frozen=True)
class Classification(Task):
    """The class of each row is learnt; the measures are those of scikit-learn."""

    name = "classification"
    has_one_label = True
    labels = "classes"
    gives_logits = True
    default_metrics = (ACCURACY,)
    compares = frozenset({"classes"})

    def check_loss(self, loss: Any) -> None:
        if isinstance(loss, ELEMENTWISE_LOSSES) and not isinstance(loss, nn.BCEWithLogitsLoss):
            raise ConfigError(
                f"{type(loss).__name__} compares numbers, but a classifier's outputs are taken as "
                "logits; use 'cross_entropy', or for one output 'bce_with_logits' on a module "
                "without a final Sigmoid"
            )

    def compared(
        self, output: torch.Tensor, target: torch.Tensor, predictions: Callable[[Any], Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if target.is_floating_point() and bool((target == target.long()).all()):
            target = target.long()
        return predictions(output), target

    def num_classes(self, output: Any) -> int:
        if not isinstance(output, torch.Tensor):
            remedy = "return the logits alone, or use TorchEstimator for other outputs"
            if output is None:
                remedy = "let forward return the logits"
            elif isinstance(output, np.ndarray):
                remedy = "let forward return the tensor itself, without numpy()"
            raise ConfigError(
                f"a classifier's module must return a tensor (batch, classes); it returned "
                f"{type(output).__name__}; {remedy}"
            )
        if not output.is_floating_point():
            raise ConfigError(
                "a classifier's module must return logits (batch, classes), of which a gradient "
                f"can be taken; it returned {str(output.dtype).removeprefix('torch.')}; leave "
                "argmax out: transform adds the class"
            )
        return 2 if output.ndim == 1 or output.shape[1] == 1 else int(output.shape[1])

    def add_rows(
        self,
        part: Part,
        predicted: torch.Tensor,
        target: torch.Tensor,
        weights: torch.Tensor,
        ignored: int,
    ) -> None:
        labels = target.cpu().long()
        counted = (labels != ignored) & (weights > 0)
        labels, weights = labels[counted], weights[counted]
        classes = predicted_class(predicted).nan_to_num(nan=NO_CLASS).long().cpu()[counted]
        chances = class_probabilities(predicted).cpu()[counted]
        num_classes = chances.shape[1]
        different, place = torch.unique(labels, return_inverse=True)
        part.add(_UNKNOWN, int((classes == NO_CLASS).sum()))
        part.add(_STRANGE, int((labels >= num_classes).sum()))
        width = num_classes + 1  # with `NO_CLASS`
        places = place * width + classes - NO_CLASS
        pairs, place = torch.unique(places, return_inverse=True)
        totals = torch.bincount(place, weights=weights, minlength=len(pairs))
        for pair, total in zip(pairs.tolist(), totals.tolist(), strict=True):
            part.add((int(different[pair // width]), pair % width + NO_CLASS), total)
        chance = chances.gather(1, labels.clamp(0, num_classes - 1)[:, None])[:, 0]
        chance = torch.where(labels < num_classes, chance, 0.0).clamp(min=_SMALLEST_PROBABILITY)
        part.add("log_loss", float((-chance.log() * weights).sum()))
        for number, table in part.curves.items():
            table.add(chances[:, number].numpy(), (labels == number).numpy(), weights.numpy())

    def scores(self, part: Part) -> ClassificationScores | None:
        pairs = {pair: weight for pair, weight in part.sums.items() if isinstance(pair, tuple)}
        if not sum(pairs.values()):
            return None
        if part.sums[_UNKNOWN]:
            logger.warning(
                "the module gives NaN for %d of the %d rows, which are taken for no class; see "
                "whether features are NaN",
                *(part.sums[_UNKNOWN], part.sums["rows"]),
            )
        if part.sums[_STRANGE]:
            logger.warning(
                "%d of the %d rows have a class that the module does not know, such as %d: their "
                "loss is infinite (log_loss counts a probability of 1e-15), and what it gives them "
                "is wrong; leave them out, or train a module with more outputs",
                *(part.sums[_STRANGE], part.sums["rows"], max(label for label, _ in pairs)),
            )
        return classification_scores(pairs, part.sums["log_loss"])


CLASSIFICATION = Classification()
