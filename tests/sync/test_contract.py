"""What every strategy promises that runs in a gang: it learns, replicas agree, a run resumes.

The strategies are those of `known_strategies`, in the first form that each lists as an example,
with short rounds. Forms that keep more in checkpoints follow.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch

from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.comm.compression.onebit import OneBitCompression
from sparkdl.comm.compression.threshold import ThresholdCompression
from sparkdl.config import TrainConfig
from sparkdl.sync import known_strategies
from sparkdl.sync.averaging.block_momentum import BlockMomentum
from sparkdl.sync.averaging.diloco import DiLoCo
from sparkdl.sync.averaging.local_sgd import LocalSGD
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.sync.averaging.slowmo import SlowMo
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.sync.own_weights.elastic_averaging import ElasticAveraging
from sparkdl.sync.strategy import SyncStrategy
from sparkdl.train.rank_state import ResumePoint
from sparkdl.train.training_state import TrainingState, left_by, method_of
from tests.gang import Gang
from tests.sync.apart import (
    ROWS,
    SGD,
    SHAPES,
    SHARE_BYTES,
    assert_equal_bits,
    bytes_by_pattern,
    gradient_bytes,
    make_net,
    train_and_resume,
    train_on_rank,
)
from tests.train.runs import Keeper, but, make_data, plan_for, run, weights

COARSE = ThresholdCompression(threshold=0.01, max_sparsity=0.5)
ADAM = but(SGD, optimizer="adam", learning_rate=0.01, epochs=3)


def shortened(strategy: SyncStrategy) -> SyncStrategy:
    """The strategy with rounds of two steps, and meetings that are likely."""
    short = {"averaging_period": 2, "probability": 0.7}
    named = {field.name for field in dataclasses.fields(strategy)}
    return dataclasses.replace(strategy, **{k: v for k, v in short.items() if k in named})


STRATEGIES = {
    type(first).__name__: shortened(first)
    for first in (kind.examples()[0] for kind in known_strategies())
    if first.why_not_gang() is None
}
FORMS: dict[str, SyncStrategy] = {
    "warm until the checkpoint": LocalSGD(averaging_period=2, warmup_steps=3),
    "warm before": LocalSGD(averaging_period=2, warmup_steps=1, compression="fp16"),
    "warm throughout": LocalSGD(averaging_period=2, warmup_steps=1000),
    "adaptive": LocalSGD(averaging_period="adaptive", first_period=4),
    "two periods": LocalSGD(averaging_period=(1, 2), compression=COARSE),
    "reset": LocalSGD(averaging_period=2, optimizer_state="reset"),
    "outer adam": DiLoCo(
        averaging_period=2, outer_optimizer="adam", outer_learning_rate=0.01, compression=COARSE
    ),
    "streaming": DiLoCo(averaging_period=4, num_fragments=2, overlap_steps=3, compression=COARSE),
    "streaming, mixing": DiLoCo(averaging_period=3, num_fragments=2, mixing=0.3),
    "onebit": BlockMomentum(averaging_period=2, compression=OneBitCompression(warmup_steps=1)),
    "int8": SlowMo(averaging_period=2, compression="int8"),
    "elastic threshold": ElasticAveraging(averaging_period=2, compression=COARSE),
}
strategy_name = pytest.mark.parametrize("name", STRATEGIES)


def config_of(name: str) -> TrainConfig:
    return but(ADAM, sync_strategy={**STRATEGIES, **FORMS}[name])


@pytest.mark.gang
@pytest.mark.parametrize("name", [*STRATEGIES, *FORMS])
def test_a_resumed_run_goes_on_as_if_nothing_had_happened(gang: Gang, name: str) -> None:
    """Weights, buffers, optimizers and everything else that the last checkpoint holds."""
    config = config_of(name)
    ranks = gang.run(train_and_resume, config, [22, 17], 3)
    for step, whole, resumed in ranks:
        assert step in (3, 4)
        if config.sync_strategy.deterministic:
            assert_equal_bits(whole, resumed)
    for one in (1, 2):
        assert_equal_bits(ranks[0][one]["net"], ranks[1][one]["net"])


@strategy_name
@pytest.mark.gang
def test_replicas_agree_where_a_shard_is_tiny_or_empty(gang: Gang, name: str) -> None:
    for rows in ([1, 11], [9, 0]):
        first, second = gang.run(train_on_rank, config_of(name), rows)
        assert torch.equal(first[0], second[0])
        assert first[0].isfinite().all()
        losses = [record["loss"] for record in first[1]["state"]["history"]]
        assert losses[-1] < losses[0]


@strategy_name
@pytest.mark.gang
def test_more_ranks_can_go_on(gang: Gang, gang3: Gang, name: str) -> None:
    """With another number of ranks there is no rank's own state; what all agree on is kept."""
    point = gang.run(checkpoint_of, config_of(name), [22, 17])[0]
    results = gang3.run(go_on_from, config_of(name), [13, 13, 13], point)
    assert all(torch.equal(results[0], other) for other in results)
    assert results[0].isfinite().all()


def checkpoint_of(comm: Any, config: TrainConfig, rows: list[int]) -> Any:
    sink = Keeper(steps=(5,))
    run(make_net(), config, make_data(rows), comm=comm, sink=sink)
    (point,) = sink.points.values()
    return point


def go_on_from(comm: Any, config: TrainConfig, rows: list[int], point: Any) -> torch.Tensor:
    net = make_net()
    resume = dataclasses.replace(point, rank_state=None)
    run(net, config, make_data(rows), comm=comm, resume=resume)
    return weights(net)


@strategy_name
@pytest.mark.gang
def test_another_fit_goes_on(gang: Gang, gang3: Gang, name: str) -> None:
    """With other rows, and another number of ranks, from what the first has left."""
    net, left = gang.run(fit_and_leave, config_of(name), [22, 17])[0]
    results = gang3.run(go_on_after, config_of(name), [13, 9, 0], net, left)
    assert all(torch.equal(results[0][0], other) for other, _ in results)
    assert results[0][0].isfinite().all()
    assert [record["epoch"] for record in results[0][1]] == [4, 5, 6]
    assert results[0][1][-1]["loss"] < 2 * results[0][1][0]["loss"]


def fit_and_leave(comm: Any, config: TrainConfig, rows: list[int]) -> Any:
    net = make_net()
    outcome = run(net, config, make_data(rows), comm=comm)
    return net.state_dict(), copy.deepcopy(left_by(outcome.final.shared))


def go_on_after(comm: Any, config: TrainConfig, rows: list[int], weights_: Any, left: Any) -> Any:
    net, data = make_net(), make_data(rows)
    net.load_state_dict(weights_)
    state = TrainingState(**left, method=method_of(config, make_net(), "gang"))
    plan = dataclasses.replace(
        plan_for(data, config, world_size=comm.world_size),
        first_epoch=state.epoch,
        first_step=state.step,
    )
    resume = ResumePoint(step=state.step, shared=state.shared(), rank_state=None)
    outcome = run(net, config, data, comm=comm, plan=plan, resume=resume)
    return weights(net), outcome.history


@pytest.mark.parametrize("name", [*STRATEGIES, *FORMS])
def test_alone_it_trains_and_resumes(name: str) -> None:
    config = config_of(name)
    strategy = config.sync_strategy
    assert pickle.loads(pickle.dumps(strategy)) == strategy
    strategy.check(SGD, 3)
    _, whole, resumed = train_and_resume(LocalCommunicator(), config, [17], 3)
    assert_equal_bits(whole, resumed)
    mine, state, sent = train_on_rank(LocalCommunicator(), config, [13])
    losses = [record["loss"] for record in state["state"]["history"]]
    assert losses[-1] < losses[0]
    assert mine.isfinite().all()
    assert sent == 0


@pytest.mark.parametrize("name", [*STRATEGIES, *FORMS])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_alone_on_cuda_resumed_run_has_the_same_bits(name: str) -> None:
    """What was saved comes back from the CPU."""
    if name == "Hogwild":
        pytest.skip("is for CPUs")
    alone = LocalCommunicator()
    _, whole, resumed = train_and_resume(alone, config_of(name), [17], 3, "cuda")
    assert_equal_bits(whole, resumed)


@pytest.mark.gang
@pytest.mark.parametrize(
    "kind", [ParameterAveraging, LocalSGD, BlockMomentum, SlowMo, DiLoCo, ElasticAveraging]
)
def test_bytes_of_rounds_are_those_of_the_formula(gang3: Gang, kind: Any) -> None:
    for compression in (None, "int8"):
        strategy = kind(averaging_period=3, compression=compression)
        told = 0 if kind is ElasticAveraging else SHARE_BYTES * 2
        expected = 9 * bytes_by_pattern(strategy, SHAPES, 3, more=told)
        results = gang3.run(train_on_rank, but(SGD, sync_strategy=strategy), ROWS)
        assert [sent for _, _, sent in results] == pytest.approx([expected] * 3)


@pytest.mark.gang
@pytest.mark.parametrize(
    "compression", [None, "fp16", "int8", "twobit", "powersgd", OneBitCompression(warmup_steps=0)]
)
def test_bytes_of_gradients_are_those_of_the_formula(gang3: Gang, compression: Any) -> None:
    for bucket_bytes, double_buffering in ((64, False), (1 << 20, True)):
        strategy = AllReduce(
            compression=compression, bucket_bytes=bucket_bytes, double_buffering=double_buffering
        )
        expected = 9 * gradient_bytes(strategy, SHAPES, 3)
        results = gang3.run(train_on_rank, but(SGD, sync_strategy=strategy), ROWS)
        assert [sent for _, _, sent in results] == pytest.approx([expected] * 3)
