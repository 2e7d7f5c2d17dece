from __future__ import annotations

from typing import Any

import pytest
import torch

from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.errors import ConfigError
from sparkdl.sync.averaging.diloco import DiLoCo, fragments_of
from tests.gang import Gang
from tests.sync.apart import (
    ROWS,
    SGD,
    SHAPES,
    SHARE_BYTES,
    Replicas,
    assert_close,
    bytes_by_pattern,
    make_net,
    train_on_rank,
)
from tests.train.runs import Keeper, but, make_data, run, weights

MOMENTUM = but(SGD, optimizer_params={"momentum": 0.9})
LAYERS = (slice(0, 25), slice(25, 31))
"""Where the two layers are among all weights."""


@pytest.mark.parametrize(
    ("shapes", "num_fragments", "expected"),
    [
        ([(5, 4), (5,), (1, 5), (1,)], 1, [[0, 1, 2, 3]]),
        ([(5, 4), (5,), (1, 5), (1,)], 2, [[0, 1], [2, 3]]),
        ([(5, 4), (5,), (1, 5), (1,)], 3, [[0, 1], [2, 3]]),
        ([(7,), (7,), (5, 7), (5,)], 2, [[0, 1, 2, 3]]),
        ([(3, 3), (3, 3), (3,), (3,), (3, 3), (4, 3, 2, 2)], 2, [[0, 4], [1, 2, 3, 5]]),
        ([(), (3,)], 1, [[0, 1]]),
    ],
)
def test_layers_are_dealt_in_turn(
    shapes: list[tuple[int, ...]], num_fragments: int, expected: list[list[int]]
) -> None:
    assert fragments_of(shapes, num_fragments) == expected


@pytest.mark.gang
@pytest.mark.parametrize("rows", [ROWS, [9, 0, 33]])
@pytest.mark.parametrize(
    ("num_fragments", "overlap_steps", "mixing"),
    [(2, 1, 0.5), (2, 3, 0.3), (2, 0, 0.0), (1, 2, 0.5)],
)
def test_follows_the_paper(
    gang3: Gang, rows: list[int], num_fragments: int, overlap_steps: int, mixing: float
) -> None:
    """Douillard et al. 2025, algorithm 2, with four steps between two times of a fragment."""
    reference = Replicas(MOMENTUM, rows, momentum=0.9)
    agreed, velocity = reference.x[0].clone(), torch.zeros_like(reference.x[0])
    fragments = LAYERS if num_fragments == 2 else (slice(0, 31),)
    seen_before = [torch.zeros(3, dtype=torch.float64) for _ in fragments]
    sent: dict[int, tuple[int, torch.Tensor]] = {}
    for done in range(1, 10):
        reference.step()
        for number, part in enumerate(fragments):
            if done % 4 == number * 4 // num_fragments:
                seen = reference.rows - seen_before[number]
                seen_before[number] = reference.rows.clone()
                mean = (seen / seen.sum()) @ reference.x[:, part]
                sent[number] = (done + overlap_steps, agreed[part] - mean)
            if number in sent and sent[number][0] == done:
                gradient = sent.pop(number)[1]
                velocity[part] = 0.9 * velocity[part] + gradient
                agreed[part] -= 0.7 * (gradient + 0.9 * velocity[part])
                reference.x[:, part] *= mixing
                reference.x[:, part] += (1 - mixing) * agreed[part]
    own, expected = reference.x.clone(), reference.mean()
    strategy = DiLoCo(
        averaging_period=4,
        num_fragments=num_fragments,
        overlap_steps=overlap_steps,
        mixing=mixing,
    )
    results = gang3.run(train_on_rank, but(MOMENTUM, sync_strategy=strategy), rows)
    for rank, (mine, state, _) in enumerate(results):
        assert_close(mine, expected)
        kept = state["rank"]["strategy"].get("own")
        if kept is not None:
            assert_close(torch.cat([one.flatten() for one in kept]), own[rank])


@pytest.mark.gang
def test_one_fragment_that_is_there_at_once_is_the_plain_form(gang: Gang) -> None:
    plain = DiLoCo(averaging_period=3)
    streaming = _AlwaysStreaming(averaging_period=3)
    rows = [23, 21]  # six steps: the epoch ends with a round
    for (mine, _, _), (theirs, _, _) in zip(
        gang.run(train_on_rank, but(MOMENTUM, sync_strategy=streaming, epochs=2), rows),
        gang.run(train_on_rank, but(MOMENTUM, sync_strategy=plain, epochs=2), rows),
        strict=True,
    ):
        assert_close(mine, theirs)


class _AlwaysStreaming(DiLoCo):
    is_streaming = True


@pytest.mark.gang
@pytest.mark.parametrize("compression", [None, "fp16"])
def test_bytes_are_those_of_the_formula(gang3: Gang, compression: str | None) -> None:
    """Eight steps of rounds, and what is evaluated in the end."""
    strategy = DiLoCo(averaging_period=4, num_fragments=2, overlap_steps=1, compression=compression)
    num_bytes = 8 * sum(torch.Size(shape).numel() for shape in SHAPES)
    expected = bytes_by_pattern(strategy, SHAPES, 3, more=2 * SHARE_BYTES * 2) * 8
    agreed = 2 * 2 * num_bytes // 3 + SHARE_BYTES * 2
    results = gang3.run(train_on_rank, but(SGD, sync_strategy=strategy), [32, 30, 25])
    assert [sent for _, _, sent in results] == pytest.approx([expected + agreed] * 3)


@pytest.mark.gang
@pytest.mark.parametrize("due", range(1, 8))
def test_checkpoints_do_not_change_the_course(gang: Gang, due: int) -> None:
    """Written at any step, also while a fragment is under way."""
    strategy = DiLoCo(averaging_period=4, num_fragments=2, overlap_steps=3)
    config = but(MOMENTUM, sync_strategy=strategy)
    undisturbed = gang.run(train_on_rank, config, [32, 29])[0][0]
    mine, step, under_way = gang.run(train_with_checkpoint, config, [32, 29], due)[0]
    assert torch.equal(mine, undisturbed)
    assert step == due
    assert under_way == [4 <= due < 7, 2 <= due < 5 or due >= 6]


def train_with_checkpoint(
    comm: Any, config: Any, rows: list[int], due: int
) -> tuple[torch.Tensor, int, list[bool]]:
    sink, net = Keeper(steps=(due,)), make_net()
    run(net, config, make_data(rows), comm=comm, sink=sink)
    (point,) = sink.points.values()
    fragments = point.shared["strategy"]["fragments"]
    return weights(net), point.step, [fragment["sums"] is not None for fragment in fragments]


def test_more_fragments_than_layers_are_refused() -> None:
    config = but(SGD, sync_strategy=DiLoCo(num_fragments=3))
    with pytest.raises(ConfigError, match="2 layers"):
        train_on_rank(LocalCommunicator(), config, [9])
