"""Do the formulae of the cost model agree with steps that are played one by one?"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from sparkdl.explain.cost_model import Calibration, Compute, Layout, Level, Link, Network, Stages
from sparkdl.explain.predict_times import step_time
from sparkdl.explain.simulate import Cluster, simulate
from sparkdl.explain.traffic import Pattern

# A network of 10 Gbit/s, and shared memory.
NETWORK = Network(
    messages=Link(latency_seconds=5e-5, byte_seconds=1 / 1.2e9),
    shared=Link(latency_seconds=2e-5, byte_seconds=1 / 8e9),
    staged=Link(latency_seconds=4e-5, byte_seconds=1 / 3e9),
    shared_ranks=8,
)
STAGES = Stages(fixed_seconds=0.2, byte_seconds=1 / 500e6)
COMPUTE = Compute(fixed_seconds=0.01, row_seconds=0.001, step_spread=0.1, rank_spread=0.03)
WORKERS = (8, 64, 250, 1000)
ROWS = 64
MIB = 1 << 20


def compared(
    pattern: Pattern, world_size: int, *, num_nodes: int | None = None, topology: str = "ring",
    compute: Compute = COMPUTE, num_slots: int | None = None, num_steps: int = 48,
) -> float:  # fmt: skip
    """Seconds of a step by formula over those of the simulation, mean of some seeds."""
    layout = Layout(world_size=world_size, num_nodes=num_nodes or world_size)
    pattern = replace(pattern, topology=topology)
    calibration = Calibration(
        levels=(Level(ranks_per_node=1, threads=1, compute=compute),),
        stage_levels=(Level(ranks_per_node=1, threads=1, compute=compute),),
        network=NETWORK,
        stages={world_size: STAGES},
    )
    predicted = step_time(calibration, pattern, layout, ROWS, num_slots=num_slots).seconds
    cluster = Cluster(
        compute=compute, network=NETWORK, layout=layout, stages=STAGES, num_slots=num_slots
    )
    if pattern.period == 1 and world_size > 100:  # many workers make up for few steps
        num_steps = 8 if pattern.num_messages > 1 else 16
    played = [
        simulate(cluster, pattern, topology, rows=ROWS, num_steps=num_steps, seed=seed)
        for seed in range(1 if world_size > 100 else 3)
    ]

    return predicted / (sum(played) / len(played))


@pytest.mark.parametrize("world_size", WORKERS)
@pytest.mark.parametrize("num_bytes", [MIB // 4, 100 * MIB])
@pytest.mark.parametrize("topology", ["ring", "tree"])
def test_a_sum_at_every_step(world_size: int, num_bytes: int, topology: str) -> None:
    pattern = Pattern(kind="sum", num_bytes=num_bytes)
    assert compared(pattern, world_size, topology=topology) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("world_size", WORKERS)
@pytest.mark.parametrize("num_messages", [2, 8])
@pytest.mark.parametrize("num_bytes", [8 * MIB, 200 * MIB])
def test_buckets_hide_behind_the_backward_pass(
    world_size: int, num_messages: int, num_bytes: int
) -> None:
    pattern = Pattern(
        kind="sum", num_bytes=num_bytes, num_messages=num_messages,
        hidden_share=1 - 1 / num_messages,
    )  # fmt: skip
    assert compared(pattern, world_size) == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("world_size", WORKERS)
def test_machines_with_eight_workers_each(world_size: int) -> None:
    pattern = Pattern(kind="sum", num_bytes=50 * MIB, in_place=True)
    topology = "shared" if world_size == 8 else "hierarchical"
    num_nodes = math.ceil(world_size / 8)
    found = compared(pattern, world_size, num_nodes=num_nodes, topology=topology)
    assert found == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("world_size", WORKERS)
@pytest.mark.parametrize("period", [4, 16])
@pytest.mark.parametrize("spread", [0.05, 0.4])
def test_averaging_waits_less_the_longer_the_rounds(
    world_size: int, period: int, spread: float
) -> None:
    pattern = Pattern(kind="sum", num_bytes=20 * MIB, period=period, num_messages=2)
    compute = replace(COMPUTE, step_spread=spread)
    assert compared(pattern, world_size, compute=compute) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("world_size", WORKERS)
@pytest.mark.parametrize("lead", [0, 4, math.inf])
def test_parameter_server(world_size: int, lead: float) -> None:
    pattern = Pattern(kind="server", num_bytes=10 * MIB, lead=lead)
    found = compared(pattern, world_size, num_steps=96)
    assert found == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("world_size", WORKERS)
def test_backup_workers(world_size: int) -> None:
    pattern = Pattern(kind="sum", num_bytes=MIB, num_backup_workers=world_size // 8)
    assert compared(pattern, world_size) == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("world_size", WORKERS)
def test_gossip(world_size: int) -> None:
    pattern = Pattern(kind="pairs", num_bytes=10 * MIB, period=10)
    assert compared(pattern, world_size, num_steps=200) == pytest.approx(1, abs=0.25)


@pytest.mark.parametrize("world_size", WORKERS)
@pytest.mark.parametrize("slots_share", [1, 0.25])
def test_rounds_on_stages(world_size: int, slots_share: float) -> None:
    pattern = Pattern(kind="stages", num_bytes=4 * MIB, period=16)
    slots = max(1, int(world_size * slots_share))
    assert compared(pattern, world_size, num_slots=slots) == pytest.approx(1, abs=0.15)


def test_the_same_seed_gives_the_same_seconds() -> None:
    layout = Layout(world_size=8, num_nodes=8)
    cluster = Cluster(compute=COMPUTE, network=NETWORK, layout=layout)
    pattern = Pattern(kind="sum", num_bytes=MIB)
    found = [
        simulate(cluster, pattern, "ring", rows=ROWS, num_steps=8, seed=seed) for seed in (1, 1, 2)
    ]
    assert found[0] == found[1] != found[2]
