"""Does training on rows of different lengths, with augmentation, repeat and resume bit for bit?"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sparkdl.config import TrainConfig
from sparkdl.data.batches import Batches
from sparkdl.data.plan import Column, Shard, TrainPlan, make_plan
from sparkdl.data.ragged import Ragged, offsets_of
from sparkdl.data.shuffle_windows import Windows
from sparkdl.data.spool.mapped import MappedRows, ShardData
from sparkdl.inputs import Sequence
from tests.train.runs import Keeper, but, run, seeded, weights

ROWS = (23, 14)
COLUMNS = (
    Column(name="t", role="feature", dtype="int64", shape=(), argument="tokens",
           specification=Sequence("t", mask="mask")),
    Column(name="y", role="label", dtype="float32", shape=()),
)  # fmt: skip


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(4, 1))

    def forward(self, *, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        vectors = self.embed(tokens) * mask[..., None]
        return self.head(vectors.sum(1) / mask.sum(1, keepdim=True).clamp(min=1))


def lose_tokens(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    kept = torch.rand(inputs["mask"].shape) < 0.8
    return {**inputs, "mask": inputs["mask"] & kept}


def data() -> list[ShardData]:
    random = np.random.default_rng(2)
    shards = []
    for number, rows in enumerate(ROWS):
        lengths = random.integers(0, 9, rows)
        tokens = Ragged((random.integers(0, 9, lengths.sum()),), offsets_of(lengths), ())
        y = torch.from_numpy(lengths / 9).float()
        shards.append(ShardData(f"shard {number}", {"feature tokens": tokens, "label y": y}))
    return shards


def plan(config: TrainConfig) -> TrainPlan:
    shards = [
        Shard(shard_id=i, host="", path="", num_rows=rows, num_validation_rows=0,
              fingerprint=f"shard {i}", num_bytes=0)
        for i, rows in enumerate(ROWS)
    ]  # fmt: skip
    return make_plan(
        columns=COLUMNS, shards=shards, world_size=1, batch_size=config.batch_size,
        epochs=config.epochs,
    )  # fmt: skip


CONFIG = TrainConfig(
    loss="mse", optimizer="adam", learning_rate=0.05, epochs=3, batch_size=5,
    augmentation=lose_tokens, group_by_length=3, gradient_accumulation_steps=2,
)  # fmt: skip


def train(module: nn.Module, config: TrainConfig = CONFIG, **options: Any) -> Any:
    return run(module, config, data(), plan=plan(config), **options)


@pytest.mark.parametrize("step", [3, 8, 13])
def test_a_resumed_run_has_the_bits_of_the_whole_one(step: int) -> None:
    whole, resumed = seeded(Net), seeded(Net, seed=8)
    sink = Keeper(steps=(step,))
    wanted = train(whole, sink=sink)
    got = train(resumed, resume=sink.points[step])
    assert torch.equal(weights(whole), weights(resumed))
    assert [r["loss"] for r in got.history] == [r["loss"] for r in wanted.history]


def test_augmentation_takes_part_in_training_only() -> None:
    with_it, without = seeded(Net), seeded(Net)
    train(with_it)
    train(without, but(CONFIG, augmentation=None))
    assert not torch.equal(weights(with_it), weights(without))


def test_micro_batches_of_padded_rows_give_the_same_gradient() -> None:
    one, two = seeded(Net), seeded(Net)
    config = but(CONFIG, augmentation=None, optimizer="sgd")
    for module in (one, two):
        module.head[0].p = 0.0  # type: ignore[index, union-attr]
    train(one, but(config, gradient_accumulation_steps=1))
    train(two, but(config, gradient_accumulation_steps=2))
    torch.testing.assert_close(weights(one), weights(two))


def targets(found: list[tuple[int, list[float], int]]) -> list[float]:
    return sorted(y for _, batch, _ in found for y in batch)


@pytest.mark.parametrize("windows", [None, Windows(group_rows=2, groups_together=3)])
@pytest.mark.parametrize("epoch", [0, 1])
def test_grouped_batches_hold_every_row_once_and_pad_less(
    epoch: int, windows: Windows | None
) -> None:
    shards, numbers = data(), dataclasses.replace(plan(CONFIG), windows=windows)

    def batches(
        num_together: int | None, start_step: int = 0
    ) -> list[tuple[int, list[float], int]]:
        source = Batches(
            [MappedRows(shard, numbers) for shard in shards], numbers, 0, seed=1, epoch=epoch,
            num_together=num_together, start_step=start_step,
        )  # fmt: skip
        return [
            (b.num_rows, sorted(b.target.tolist()), b.inputs[0].numel())  # type: ignore[union-attr]
            for b in source
        ]

    grouped, plain = batches(4), batches(None)
    assert [rows for rows, *_ in grouped] == [rows for rows, *_ in plain]
    assert targets(grouped) == targets(plain)
    assert sum(size for *_, size in grouped) < sum(size for *_, size in plain)
    assert all(grouped[step:] == batches(4, step) for step in range(len(grouped)))
