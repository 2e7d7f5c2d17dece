"""Ranks agree on metrics, early stopping and buffers, also where one has no rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.config import EarlyStopping, Task, TrainConfig
from sparkdl.errors import TrainingDiverged
from sparkdl.inference.classification import CLASSIFICATION
from sparkdl.inference.regression import REGRESSION
from sparkdl.train.rank_epoch import agree_on_buffers
from tests.gang import Gang
from tests.train.runs import NUM_FEATURES, Keeper, make_data, run, seeded, weights

pytestmark = pytest.mark.gang

FINE = {"epochs": 2, "batch_size": 4, "learning_rate": 0.05}


def linear(outputs: int) -> nn.Module:
    return seeded(lambda: nn.Linear(NUM_FEATURES, outputs, dtype=torch.float64))


def history_on_rank(
    comm: Any, options: dict[str, Any], rows: list[int], validation_rows: list[int], task: Task
) -> list[dict[str, float]]:
    config = TrainConfig(  # type: ignore[arg-type]
        **options, task=task, metrics=metrics_for(task), training_metrics=True
    )
    outcome = run(
        linear(3 if task == CLASSIFICATION else 1),
        config,
        make_data(rows, task=task),
        validation=make_data(validation_rows, task=task),
        comm=comm,
    )
    return without_seconds(outcome.history)


def metrics_for(task: Task) -> dict[str, Any]:
    import torchmetrics
    from torchmetrics import classification

    if task == REGRESSION:
        return {
            "mse": torchmetrics.MeanSquaredError,
            "pearson": torchmetrics.PearsonCorrCoef,
            "spearman": torchmetrics.SpearmanCorrCoef,
        }
    return {
        "accuracy": classification.MulticlassAccuracy(3, average="micro"),
        "auroc": classification.MulticlassAUROC(3),
        "binned": lambda: classification.MulticlassAUROC(3, thresholds=20),
    }


def without_seconds(history: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in record.items() if k != "seconds"} for record in history]


@pytest.mark.slow
@pytest.mark.parametrize("task", [CLASSIFICATION, REGRESSION])
@pytest.mark.parametrize("validation_rows", [[0, 40], [33, 7], [40, 0]])
@pytest.mark.filterwarnings("ignore:Metric `SpearmanCorrcoef` will save all targets")
def test_metrics_are_exact(gang: Gang, task: Task, validation_rows: list[int]) -> None:
    loss = "cross_entropy" if task == CLASSIFICATION else "mse"
    options = {**FINE, "loss": loss}
    ranks = gang.run(history_on_rank, options, [16, 5], validation_rows, task)
    assert ranks[0] == ranks[1]

    # The same model and validation rows in one process, whose training is equal to 1e-12.
    joined = [{**shard.columns} for shard in make_data(validation_rows, task=task)]
    x = torch.cat([columns["feature x"] for columns in joined])
    y = torch.cat([columns["label y"] for columns in joined])
    net = linear(3 if task == CLASSIFICATION else 1)
    final = gang.run(weights_on_rank, options, [16, 5], task)[0]
    nn.utils.vector_to_parameters(final, net.parameters())
    output = net(x).detach()
    for name, make in metrics_for(task).items():
        metric = make if isinstance(make, nn.Module) else make()
        seen = torch.softmax(output, 1) if task == CLASSIFICATION else output.squeeze(1)
        metric.update(seen, y)
        assert ranks[0][-1][f"val_{name}"] == pytest.approx(float(metric.compute()), abs=1e-6)
    expected = (
        nn.functional.cross_entropy(output, y)
        if task == CLASSIFICATION
        else nn.functional.mse_loss(output.squeeze(1), y)
    )
    assert set(metrics_for(task)) < set(ranks[0][-1])  # those of training batches
    assert ranks[0][-1]["val_loss"] == pytest.approx(expected.item(), abs=1e-12)


def weights_on_rank(
    comm: Any, options: dict[str, Any], rows: list[int], task: Task
) -> torch.Tensor:
    net = linear(3 if task == CLASSIFICATION else 1)
    run(net, TrainConfig(**options, task=task), make_data(rows, task=task), comm=comm)  # type: ignore[arg-type]
    return weights(net)


def test_ranks_stop_early_together(gang: Gang) -> None:
    (first, kept), (second, kept_too) = gang.run(stop_early_on_rank)
    assert first == second
    assert len(first) == 3  # the best epoch, and two without improvement
    assert torch.equal(kept, kept_too)


def stop_early_on_rank(comm: Any) -> tuple[list[dict[str, float]], torch.Tensor]:
    # Improvement is only counted above a margin that the second epoch cannot reach.
    stopping = EarlyStopping(patience=2, min_delta=1e6)
    config = TrainConfig(**FINE | {"epochs": 9}, early_stopping=stopping)  # type: ignore[arg-type]
    net = linear(1)
    outcome = run(net, config, make_data([9, 4]), validation=make_data([0, 6]), comm=comm)
    assert outcome.stopped_early
    return without_seconds(outcome.history), weights(net)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(NUM_FEATURES, dtype=torch.float64)
        self.last = nn.Linear(NUM_FEATURES, 1, dtype=torch.float64)
        self.register_buffer("mask", torch.tensor([float("-inf"), 0.0]))
        self.register_buffer("flag", torch.tensor([True, False]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(x))


@pytest.mark.parametrize("rows", [[12, 8], [0, 12]])
def test_buffers_agree(gang: Gang, rows: list[int]) -> None:
    first, second = gang.run(buffers_on_rank, rows)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name
    assert first["norm.num_batches_tracked"] == 6
    assert not torch.equal(first["norm.running_mean"], torch.zeros(NUM_FEATURES))
    assert first["mask"].tolist() == [float("-inf"), 0.0]
    assert first["flag"].tolist() == [True, False]


def buffers_on_rank(comm: Any, rows: list[int]) -> dict[str, torch.Tensor]:
    net = seeded(Normed)
    run(net, TrainConfig(**FINE), make_data(rows), comm=comm)  # type: ignore[arg-type]
    return dict(net.named_buffers())


def test_buffers_become_the_mean_of_ranks_with_rows(gang: Gang) -> None:
    assert gang.run(mean_of_buffers) == [([1.0, 0], [2.0, 1])] * 2


def mean_of_buffers(comm: Any) -> tuple[list[float], list[float]]:
    results = []
    for ranks in ([0, 1], [1]):
        net = nn.Module()
        net.register_buffer("value", torch.tensor(2.0 * comm.rank))
        net.register_buffer("count", torch.tensor(comm.rank))
        agree_on_buffers(net, comm, ranks)
        results.append([net.value.item(), net.count.item()])
    return results[0], results[1]


def test_ranks_diverge_together(gang: Gang) -> None:
    first, second = gang.run(diverge_on_rank)
    assert first == second
    assert "the loss is nan at step 1" in first
    assert 'Among the 8 training rows NaN or infinite values are in: feature "x" of 1;' in first
    assert "learning rate" not in first


def diverge_on_rank(comm: Any) -> str:
    shards = make_data([4, 4])
    shards[1].columns["feature x"][0, 0] = float("nan")  # one rank's rows alone
    with pytest.raises(TrainingDiverged) as caught:
        run(linear(1), TrainConfig(**FINE), shards, comm=comm)  # type: ignore[arg-type]
    return str(caught.value)


def test_resume_in_mid_epoch_is_bit_exact(gang: Gang) -> None:
    assert gang.run(resume_on_rank) == [True, True]


def resume_on_rank(comm: Any) -> bool:
    def make() -> nn.Module:
        return seeded(lambda: nn.Sequential(nn.Dropout(0.3), Normed()))

    # Evaluations at every step, before and after the checkpoint, also make buffers equal.
    config = TrainConfig(**FINE, optimizer="adam", validation_interval=1)  # type: ignore[arg-type]
    sink, validation = Keeper(steps=(2,)), make_data([0, 6])
    whole, resumed = make(), make()
    rows: dict[str, Any] = {"validation": validation, "comm": comm}
    expected = run(whole, config, make_data([13, 8]), **rows, sink=sink)
    got = run(resumed, config, make_data([13, 8]), **rows, resume=sink.points[2])
    assert any(record["epoch"] % 1 for record in expected.history)
    buffers = zip(whole.buffers(), resumed.buffers(), strict=True)
    return (
        torch.equal(weights(whole), weights(resumed))
        and without_seconds(expected.history) == without_seconds(got.history)
        and all(torch.equal(a, b) for a, b in buffers)
    )
