"""The formulae of the cost model agree with steps that are played one by one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from sparkdl.explain.cost_model import (
    Calibration,
    Compute,
    Gang,
    Layout,
    Network,
    NetworkLink,
    StageCosts,
)
from sparkdl.explain.predict_times import Steps
from sparkdl.sync.asynchronous.async_sgd import AsyncSGD
from sparkdl.sync.exchange_pattern import ModelSize, Pattern
from sparkdl.sync.own_weights.gossip import Gossip
from tests.explain.simulate import Cluster, simulate

# A network of 10 Gbit/s, and shared memory.
NETWORK = Network(
    messages=NetworkLink(latency_seconds=5e-5, byte_seconds=1 / 1.2e9),
    shared=NetworkLink(latency_seconds=2e-5, byte_seconds=1 / 8e9),
    shared_ranks=8,
)
STAGES = StageCosts(fixed_seconds=0.2, byte_seconds=1 / 500e6)
COMPUTE = Compute(
    threads=1, fixed_seconds=0.01, row_seconds=0.001, step_spread=0.1, rank_spread=0.03
)  # fmt: skip
ROWS = 64
MIB = 1 << 20
SIZE = ModelSize(
    shapes=((10 * MIB // 4,),), element_size=4, replica_bytes=10 * MIB, buffer_bytes=0,
    optimizer_bytes=0,
)  # fmt: skip


def compared(
    pattern: Pattern, world_size: int, *, num_nodes: int | None = None, topology: str = "ring",
    compute: Compute = COMPUTE, num_slots: int | None = None, num_steps: int = 48,
) -> float:  # fmt: skip
    """Seconds of a step by formula over those of the simulation, mean of some seeds."""
    layout = Layout(world_size=world_size, num_nodes=num_nodes or world_size, num_slots=num_slots)
    pattern = replace(pattern, topology=topology)
    calibration = Calibration(
        gang=Gang(levels={}, network=NETWORK),
        levels={1: compute},
        task_levels={1: compute},
        stages=STAGES,
    )
    steps = Steps(calibration=calibration, pattern=pattern, layout=layout, rows=ROWS)
    cluster = Cluster(compute=compute, network=NETWORK, layout=layout, stages=STAGES)
    if pattern.period == 1 and world_size > 100:  # many workers make up for few steps
        num_steps = 8 if pattern.num_messages > 1 else 16
    played = [
        simulate(cluster, pattern, topology, rows=ROWS, num_steps=num_steps, seed=seed)
        for seed in range(1 if world_size > 100 else 3)
    ]
    return steps.seconds() / (sum(played) / len(played))


@pytest.mark.parametrize("topology", ["ring", "tree"])
def test_a_sum_at_every_step(topology: str) -> None:
    for world_size, num_bytes in ((8, MIB // 4), (64, 100 * MIB), (1000, 100 * MIB)):
        found = compared(Pattern(num_bytes=num_bytes), world_size, topology=topology)
        assert found == pytest.approx(1, abs=0.1), world_size


def test_buckets_hide_behind_the_backward_pass() -> None:
    for world_size, num_messages, num_bytes in ((8, 2, 8), (64, 8, 200), (250, 8, 8)):
        pattern = Pattern(
            num_bytes=num_bytes * MIB, num_messages=num_messages, hidden_share=1 - 1 / num_messages
        )
        assert compared(pattern, world_size) == pytest.approx(1, abs=0.1), world_size


@pytest.mark.parametrize("world_size", [8, 250])
def test_machines_with_eight_workers_each(world_size: int) -> None:
    topology = "shared" if world_size == 8 else "hierarchical"
    pattern = Pattern(num_bytes=50 * MIB, in_place=True)
    num_nodes = math.ceil(world_size / 8)
    found = compared(pattern, world_size, num_nodes=num_nodes, topology=topology)
    assert found == pytest.approx(1, abs=0.1)


def test_averaging_waits_less_the_longer_the_rounds() -> None:
    for world_size, period, spread in ((8, 4, 0.4), (64, 16, 0.05), (1000, 16, 0.4)):
        pattern = Pattern(num_bytes=20 * MIB, period=period, num_messages=2)
        compute = replace(COMPUTE, step_spread=spread)
        found = compared(pattern, world_size, compute=compute)
        assert found == pytest.approx(1, abs=0.1), world_size


def test_sums_over_machines() -> None:
    pattern = Pattern(num_bytes=20 * MIB, period=4, between_nodes=True)
    assert compared(pattern, 64, num_nodes=8) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("bound", [0, 4, None])
def test_parameter_server(bound: int | None) -> None:
    for world_size in (8, 250):
        pattern = AsyncSGD(staleness_bound=bound).pattern(SIZE, world_size)
        found = compared(replace(pattern, copies=0), world_size, num_steps=96)
        assert found == pytest.approx(1, abs=0.2), world_size


def test_backup_workers_gossip_and_rounds_on_stages() -> None:
    for world_size in (8, 250):
        backup = Pattern(num_bytes=MIB, num_backup_workers=world_size // 8)
        assert compared(backup, world_size) == pytest.approx(1, abs=0.2)
        gossip = replace(Gossip().pattern(SIZE, world_size), copies=0)
        assert compared(gossip, world_size, num_steps=200) == pytest.approx(1, abs=0.25)
        stages = Pattern(kind="stages", num_bytes=4 * MIB, period=16)
        for slots in (world_size, world_size // 4):
            assert compared(stages, world_size, num_slots=slots) == pytest.approx(1, abs=0.15)


def test_the_same_seed_gives_the_same_seconds() -> None:
    layout = Layout(world_size=8, num_nodes=8)
    cluster = Cluster(compute=COMPUTE, network=NETWORK, layout=layout)
    pattern = Pattern(num_bytes=MIB)
    found = [
        simulate(cluster, pattern, "ring", rows=ROWS, num_steps=8, seed=seed) for seed in (1, 1, 2)
    ]
    assert found[0] == found[1] != found[2]
