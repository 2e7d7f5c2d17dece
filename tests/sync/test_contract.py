"""What must every strategy do whose replicas train apart? One row per strategy and form."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
import torch

from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.comm.compression.onebit import OneBitCompression
from sparkdl.comm.compression.threshold import ThresholdCompression
from sparkdl.config import TrainConfig
from sparkdl.sync.averaging.block_momentum import BlockMomentum
from sparkdl.sync.averaging.diloco import DiLoCo
from sparkdl.sync.averaging.local_sgd import LocalSGD
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.sync.averaging.slowmo import SlowMo
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.sync.own_weights.elastic_averaging import ElasticAveraging
from sparkdl.sync.own_weights.gossip import Gossip
from sparkdl.sync.population.one_shot_averaging import OneShotAveraging
from sparkdl.sync.strategy import SyncStrategy
from tests.gang import Gang
from tests.sync.apart import (
    ROWS,
    SGD,
    SHAPES,
    assert_equal_bits,
    make_net,
    train_and_resume,
    train_on_rank,
)
from tests.train.runs import Keeper, but, make_data, run, weights

COARSE = ThresholdCompression(threshold=0.01, max_sparsity=0.5)
FORMS: dict[str, SyncStrategy] = {
    "parameter averaging": ParameterAveraging(averaging_period=2),
    "local sgd": LocalSGD(averaging_period=2),
    "local sgd, reset": LocalSGD(averaging_period=2, optimizer_state="reset"),
    "local sgd, warm": LocalSGD(averaging_period=2, warmup_steps=1000),
    "local sgd, warm until the checkpoint": LocalSGD(averaging_period=2, warmup_steps=3),
    "local sgd, warm before": LocalSGD(averaging_period=2, warmup_steps=1),
    "local sgd, adaptive": LocalSGD(averaging_period="adaptive", first_period=4),
    "local sgd, two periods": LocalSGD(averaging_period=(1, 2)),
    "block momentum": BlockMomentum(averaging_period=2),
    "slow momentum": SlowMo(averaging_period=2),
    "diloco": DiLoCo(averaging_period=2),
    "diloco, adam": DiLoCo(averaging_period=2, outer_optimizer="adam", outer_learning_rate=0.01),
    "streaming": DiLoCo(averaging_period=4, num_fragments=2, overlap_steps=3),
    "streaming, mixing": DiLoCo(averaging_period=3, num_fragments=2, mixing=0.3),
    "streaming, overlap": DiLoCo(averaging_period=4, overlap_steps=2, mixing=0.0),
    "elastic averaging": ElasticAveraging(averaging_period=2),
    "local sgd, fp16": LocalSGD(averaging_period=2, warmup_steps=1, compression="fp16"),
    "local sgd, threshold": LocalSGD(averaging_period=2, compression=COARSE),
    "local sgd, two periods, threshold": LocalSGD(averaging_period=(1, 2), compression=COARSE),
    "block momentum, onebit": BlockMomentum(
        averaging_period=2, compression=OneBitCompression(warmup_steps=1)
    ),
    "slow momentum, int8": SlowMo(averaging_period=2, compression="int8"),
    "diloco, threshold": DiLoCo(averaging_period=2, compression=COARSE),
    "streaming, threshold": DiLoCo(
        averaging_period=4, num_fragments=2, overlap_steps=3, compression=COARSE
    ),
    "elastic averaging, threshold": ElasticAveraging(averaging_period=2, compression=COARSE),
    "gossip": Gossip(probability=0.7),
    "one shot": OneShotAveraging(),
}
"""Name -> strategy, whose rounds are short."""

ADAM = but(SGD, optimizer="adam", learning_rate=0.01, epochs=3)
KEEPS_OWN = ("streaming", "elastic", "gossip", "one shot")
form = pytest.mark.parametrize("name", FORMS)


def config_of(name: str, config: TrainConfig = ADAM) -> TrainConfig:
    return but(config, sync_strategy=FORMS[name])


@form
@pytest.mark.gang
def test_resumed_run_has_the_same_bits(gang: Gang, name: str) -> None:
    """Weights, buffers, optimizers and everything else that the last checkpoint holds."""
    for step, whole, resumed in gang.run(train_and_resume, config_of(name), [22, 17], 3):
        assert step in ((3,) if name.startswith(KEEPS_OWN) else (3, 4))
        assert_equal_bits(whole, resumed)


@form
@pytest.mark.gang
@pytest.mark.parametrize("rows", [[22, 17], [0, 13], [1, 11], [9, 0]])
def test_replicas_agree_after_fit(gang: Gang, name: str, rows: list[int]) -> None:
    """Weights, buffers, loss; also where a shard is tiny or empty."""
    norm = 1 not in rows  # which torch refuses to train on one sample
    first, second = gang.run(train_on_rank, config_of(name), rows, norm)
    assert torch.equal(first[0], second[0])
    assert first[0].isfinite().all()
    assert_equal_bits(first[1]["rank"]["buffers"], second[1]["rank"]["buffers"])
    losses = [record["loss"] for record in first[1]["state"]["history"]]
    assert losses[-1] < losses[0]


@pytest.mark.gang
@pytest.mark.parametrize("compression", ["bf16", "int8", OneBitCompression(warmup_steps=0)])
@pytest.mark.parametrize("kind", [LocalSGD, BlockMomentum, SlowMo, DiLoCo, ElasticAveraging])
def test_bytes_of_compressed_rounds_are_those_of_the_formula(
    gang3: Gang, kind: Any, compression: Any
) -> None:
    strategy = kind(averaging_period=3, compression=compression)
    expected = strategy.bytes_per_step(SHAPES, 8, 3) * 9
    results = gang3.run(train_on_rank, but(SGD, sync_strategy=strategy), ROWS)
    assert [sent for _, _, sent in results] == [expected] * 3


@pytest.mark.gang
@pytest.mark.parametrize("bucket_bytes", [64, 1 << 20])
@pytest.mark.parametrize(
    "compression", [None, "fp16", "int8", "twobit", "powersgd", OneBitCompression(warmup_steps=0)]
)
@pytest.mark.parametrize("double_buffering", [False, True])
def test_bytes_of_gradients_are_those_of_the_formula(
    gang3: Gang, compression: Any, bucket_bytes: int, double_buffering: bool
) -> None:
    strategy = AllReduce(
        compression=compression, bucket_bytes=bucket_bytes, double_buffering=double_buffering
    )
    expected = strategy.bytes_per_step(SHAPES, 8, 3)
    assert expected is not None
    results = gang3.run(train_on_rank, but(SGD, sync_strategy=strategy), ROWS)
    assert [sent for _, _, sent in results] == [9 * expected] * 3


@form
@pytest.mark.gang
def test_the_same_run_gives_the_same_bits(gang: Gang, name: str) -> None:
    assert FORMS[name].deterministic
    runs = [gang.run(train_on_rank, config_of(name), [22, 17])[0][0] for _ in range(2)]
    assert torch.equal(*runs)


@form
def test_alone_it_trains(name: str) -> None:
    mine, state, sent = train_on_rank(LocalCommunicator(), config_of(name), [13])
    losses = [record["loss"] for record in state["state"]["history"]]
    assert losses[-1] < losses[0]
    assert mine.isfinite().all()
    assert sent == 0
    assert FORMS[name].bytes_per_step([(3, 4), (4,)], 4, 1) in (0, None)


@form
def test_alone_resumed_run_has_the_same_bits(name: str) -> None:
    _, whole, resumed = train_and_resume(LocalCommunicator(), config_of(name), [17], 3)
    assert_equal_bits(whole, resumed)


@form
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_alone_on_cuda_resumed_run_has_the_same_bits(name: str) -> None:
    """What was saved comes back from the CPU."""
    alone = LocalCommunicator()
    _, whole, resumed = train_and_resume(alone, config_of(name), [17], 3, "cuda")
    assert_equal_bits(whole, resumed)


@form
def test_strategies_are_picklable_and_pass_their_own_check(name: str) -> None:
    strategy = FORMS[name]
    assert pickle.loads(pickle.dumps(strategy)) == strategy
    strategy.check(SGD, 3)
    assert strategy.trains_apart


@form
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
