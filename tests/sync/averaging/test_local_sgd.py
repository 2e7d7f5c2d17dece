from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.sync.averaging.block_momentum import BlockMomentum
from sparkdl.sync.averaging.diloco import DiLoCo
from sparkdl.sync.averaging.local_sgd import LocalSGD
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.sync.averaging.period import AdaptivePeriod, RoundReport
from sparkdl.sync.averaging.slowmo import SlowMo
from sparkdl.sync.gradients.allreduce import AllReduce
from tests.gang import Gang
from tests.sync.apart import (
    ROWS,
    SGD,
    SHAPES,
    SHARE_BYTES,
    Replicas,
    assert_close,
    assert_equal_bits,
    bytes_by_pattern,
    gradient_bytes,
    on_nodes,
    train_and_resume,
    train_on_nodes,
    train_on_rank,
)
from tests.train.runs import but

ADAM = but(SGD, optimizer="adam", learning_rate=0.01, epochs=2)
MOMENTUM = but(SGD, optimizer_params={"momentum": 0.9})
TWO_NODES = (0, 0, 1, 1)


def with_strategy(config: TrainConfig = SGD, **options: Any) -> TrainConfig:
    return but(config, sync_strategy=LocalSGD(**options))


@pytest.mark.gang
@pytest.mark.parametrize("rows", [ROWS, [9, 0, 33]])
def test_rounds_end_in_the_mean_and_momentum_stays(gang3: Gang, rows: list[int]) -> None:
    reference = Replicas(MOMENTUM, rows, momentum=0.9)
    for step in range(9):
        reference.step()
        if step % 3 == 2:
            reference.x[:] = reference.mean()
    config = with_strategy(MOMENTUM, averaging_period=3)
    for mine, _, _ in gang3.run(train_on_rank, config, rows):
        assert_close(mine, reference.x[0])


@pytest.mark.gang
def test_averaged_optimizer_is_parameter_averaging(gang: Gang) -> None:
    local = with_strategy(ADAM, averaging_period=3, optimizer_state="average")
    averaged = but(ADAM, sync_strategy=ParameterAveraging(averaging_period=3))
    for (mine, _, sent), (theirs, _, theirs_sent) in zip(
        gang.run(train_on_rank, local, [21, 17]),
        gang.run(train_on_rank, averaged, [21, 17]),
        strict=True,
    ):
        assert torch.equal(mine, theirs)
        assert sent == theirs_sent


@pytest.mark.gang
@pytest.mark.parametrize(
    "strategy",
    [
        BlockMomentum(averaging_period=2, block_momentum=0.0),
        BlockMomentum(averaging_period=2, block_momentum=0.0, nesterov=False),
        SlowMo(averaging_period=2, slow_momentum=0.0, optimizer_state="keep"),
        SlowMo(averaging_period=2, slow_momentum=0.0, optimizer_state="average"),
        SlowMo(averaging_period=2, slow_momentum=0.0),
        DiLoCo(averaging_period=2, outer_learning_rate=1.0, outer_params={}),
    ],
    ids=str,
)
def test_outer_steps_without_momentum_are_averaging(gang: Gang, strategy: Any) -> None:
    outer = but(MOMENTUM, sync_strategy=strategy, epochs=2)
    plain = LocalSGD(averaging_period=2, optimizer_state=strategy.optimizer_state)
    for (mine, _, sent), (theirs, _, theirs_sent) in zip(
        gang.run(train_on_rank, outer, [21, 17]),
        gang.run(train_on_rank, but(outer, sync_strategy=plain), [21, 17]),
        strict=True,
    ):
        assert_close(mine, theirs)
        assert sent == theirs_sent


@pytest.mark.gang
@pytest.mark.parametrize("rows", [[21, 17], [0, 13]])
def test_warmup_for_the_whole_run_is_allreduce(gang: Gang, rows: list[int]) -> None:
    warm = with_strategy(ADAM, averaging_period=3, warmup_steps=1000)
    plain = but(ADAM, sync_strategy=AllReduce())
    for (mine, state, sent), (theirs, expected, theirs_sent) in zip(
        gang.run(train_on_rank, warm, rows, True),
        gang.run(train_on_rank, plain, rows, True),
        strict=True,
    ):
        assert torch.equal(mine, theirs)
        assert_equal_bits(state["optimizer"], expected["optimizer"])
        assert_equal_bits(state["rank"]["buffers"], expected["rank"]["buffers"])
        assert sent == theirs_sent


@pytest.mark.gang
def test_after_the_warmup_replicas_train_apart(gang3: Gang) -> None:
    reference = Replicas(SGD, ROWS)
    for step in range(9):
        if step < 2:
            found = reference.gradients()
            gradient = sum(one for one, _ in found) / sum(rows for _, rows in found)
            reference.x -= SGD.learning_rate * gradient
        else:
            reference.step()
        if step in (5, 8):  # rounds of four steps, the last one cut short by the epoch's end
            reference.x[:] = reference.mean()
    config = with_strategy(averaging_period=4, warmup_steps=2)
    for mine, _, _ in gang3.run(train_on_rank, config, ROWS):
        assert_close(mine, reference.x[0])


@pytest.mark.gang
@pytest.mark.parametrize("warmup_steps", [3, 5, 6])
def test_buffers_agree_when_the_warmup_ends(gang: Gang, warmup_steps: int) -> None:
    """Also if it ends with an epoch, before any round."""
    config = with_strategy(but(SGD, epochs=2), averaging_period=2, warmup_steps=warmup_steps)
    first, second = gang.run(train_on_rank, config, [12, 9], True)
    assert_equal_bits(first[1]["rank"]["buffers"], second[1]["rank"]["buffers"])


@pytest.mark.gang
def test_bytes_are_those_of_the_formulae(gang: Gang) -> None:
    config = with_strategy(but(SGD, epochs=2), averaging_period=2, warmup_steps=4)
    strategy: LocalSGD = config.sync_strategy
    warm = gradient_bytes(AllReduce(), SHAPES, 2) * 4
    apart = bytes_by_pattern(strategy, SHAPES, 2, more=SHARE_BYTES) * 4
    assert [sent for _, _, sent in gang.run(train_on_rank, config, [16, 15])] == [warm + apart] * 2


@pytest.mark.gang
@pytest.mark.parametrize("nodes", [TWO_NODES, (0, 1, 1, 1)])
@pytest.mark.parametrize("optimizer_state", ["keep", "average", "reset"])
def test_equal_periods_are_one_period(
    gang4: Gang, nodes: tuple[int, ...], optimizer_state: str
) -> None:
    plain = with_strategy(ADAM, averaging_period=3, optimizer_state=optimizer_state)
    levels = with_strategy(ADAM, averaging_period=(3, 3), optimizer_state=optimizer_state)
    rows = [24, 19, 13, 22]
    for (mine, _, _), (theirs, _, _) in zip(
        gang4.run(train_on_nodes, nodes, levels, rows),
        gang4.run(train_on_rank, plain, rows),
        strict=True,
    ):
        assert_close(mine, theirs)


@pytest.mark.gang
def test_on_one_node_only_the_inner_period_matters(gang3: Gang) -> None:
    levels = with_strategy(MOMENTUM, averaging_period=[3, 9], optimizer_state="average")
    plain = with_strategy(MOMENTUM, averaging_period=3, optimizer_state="average")
    for (mine, state, _), (theirs, expected, _) in zip(
        gang3.run(train_on_nodes, (0, 0, 0), levels, ROWS),
        gang3.run(train_on_rank, plain, ROWS),
        strict=True,
    ):
        assert_close(mine, theirs)
        for place, values in state["optimizer"]["state"].items():
            expectation = expected["optimizer"]["state"][place]["momentum_buffer"]
            assert_close(values["momentum_buffer"], expectation)


@pytest.mark.gang
def test_nodes_agree_by_themselves_in_between(gang4: Gang) -> None:
    rows = [32, 32, 29, 30]
    reference = Replicas(SGD, rows)
    of_round = torch.zeros(4, dtype=torch.float64)
    for step in range(8):
        reference.step()
        if step % 2 == 1:
            for node in ([0, 1], [2, 3]):
                seen = reference.rows[node]
                reference.x[node] = seen / seen.sum() @ reference.x[node]
            of_round += reference.rows
            reference.rows.zero_()
        if step % 4 == 3:
            reference.x[:] = of_round / of_round.sum() @ reference.x
            of_round.zero_()
    config = with_strategy(averaging_period=(2, 4))
    for mine, _, _ in gang4.run(train_on_nodes, TWO_NODES, config, rows):
        assert_close(mine, reference.x[0])


@pytest.mark.gang
def test_bytes_of_two_levels_are_those_of_the_formula(gang4: Gang) -> None:
    config = with_strategy(averaging_period=(2, 4), topology="ring")
    num_bytes = 8 * sum(torch.Size(shape).numel() for shape in SHAPES)
    inside = 2 * num_bytes * 1 // 2 + 24
    between = 2 * num_bytes * 3 // 4 + 24 * 3
    results = gang4.run(train_on_nodes, TWO_NODES, config, [32, 32, 32, 31])
    assert [sent for _, _, sent in results] == [8 * (inside / 2 + between / 4)] * 4
    apart = gang4.run(train_on_nodes, (0, 1, 2, 3), config, [32, 32, 32, 31])
    expected = 8 * bytes_by_pattern(config.sync_strategy, SHAPES, 4, more=SHARE_BYTES * 3)
    assert [sent for _, _, sent in apart] == [expected] * 4


@pytest.mark.slow
@pytest.mark.gang
@pytest.mark.parametrize("topology", ["auto", "ring"])
def test_resumed_run_on_two_nodes_has_the_same_bits(gang4: Gang, topology: str) -> None:
    """The checkpoint waits until all ranks agree."""
    config = with_strategy(ADAM, averaging_period=(2, 4), topology=topology)
    for step, whole, resumed in gang4.run(resume_on_two_nodes, config, [32, 32, 29, 30]):
        assert step == 4
        assert_equal_bits(whole, resumed)


def resume_on_two_nodes(comm: Any, config: TrainConfig, rows: list[int]) -> Any:
    return train_and_resume(on_nodes(comm, TWO_NODES), config, rows, 1)


def report(loss: float, learning_rate: float) -> RoundReport:
    return RoundReport(
        steps=1, step_seconds=1.0, merge_seconds=1.0, loss=loss, learning_rate=learning_rate
    )


def test_adaptive_period_follows_loss_and_learning_rate() -> None:
    period = AdaptivePeriod(first=9)
    lengths = [period.steps(0)]
    losses = [(4.0, 0.1), (2.0, 0.1), (0.0, 0.1), (float("nan"), 0.1), (2.0, 0.05), (0.04, 0.1)]
    for loss, learning_rate in losses:
        period.observe(report(loss, learning_rate))
        lengths.append(period.steps(0))
    assert lengths == [9, 3, 2, 2, 2, 3, 1]
    again = AdaptivePeriod(first=9)
    again.load_state_dict(period.state_dict())
    period.observe(report(4.0, 1e-9))
    again.observe(report(4.0, 1e-9))
    assert again.steps(0) == period.steps(0) == 16


@pytest.mark.gang
def test_adaptive_rounds_are_those_of_the_rule(gang3: Gang) -> None:
    reference = Replicas(SGD, ROWS)
    lengths, left, first_loss = [4], 4, 0.0
    for _ in range(9):
        reference.step()
        left -= 1
        if left == 0:
            loss = reference.loss_sum / reference.rows.sum().item()
            reference.loss_sum = 0.0
            reference.x[:] = reference.mean()
            first_loss = first_loss or loss
            left = max(1, math.floor(math.sqrt(4 * loss / first_loss)))
            lengths.append(left)
    assert lengths[:2] == [4, 2]  # F is F0 at the end of the first round
    config = with_strategy(averaging_period="adaptive", first_period=4)
    assert config.sync_strategy.deterministic
    for mine, state, _ in gang3.run(train_on_rank, config, ROWS):
        assert state["strategy"]["period"]["length"] == lengths[-1]
        assert_close(mine, reference.x[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"averaging_period": 0}, "averaging_period"),
        ({"averaging_period": "auto"}, "'adaptive'"),
        ({"averaging_period": (2, 4, 8)}, "two"),
        ({"averaging_period": (2, 5)}, "multiple"),
        ({"averaging_period": (4, 2)}, "multiple"),
        ({"averaging_period": (0, 2)}, "at least 1"),
        ({"averaging_period": (2, "adaptive")}, "number of steps"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"first_period": 0}, "first_period"),
        ({"optimizer_state": "drop"}, "optimizer_state"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LocalSGD(**options)


def test_what_needs_a_gang() -> None:
    assert LocalSGD(optimizer_state="average").why_not_rounds() is None
    for options in (
        {"optimizer_state": "keep"},
        {"optimizer_state": "reset", "warmup_steps": 2},
        {"optimizer_state": "reset", "averaging_period": (2, 4)},
    ):
        assert LocalSGD(**options).why_not_rounds() is not None
