"""What the ranks have measured becomes the model's numbers."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from sparkdl.explain.calibrate import found_by, spreads
from sparkdl.explain.cost_model import Layout, ring_seconds
from sparkdl.explain.cost_model import NetworkLink as LinkCost

PLACES = ((2, 1), (1, 2))
"""Workers of a machine at work, and their threads."""


def step(rows: int, seconds: float, spread: float, generator: random.Random) -> dict[str, Any]:
    times = [seconds * math.exp(spread * generator.gauss(0, 1)) for _ in range(40)]
    return {"rows": rows, "seconds": times}


def report(rank: int, *, world_size: int = 2, **changes: Any) -> dict[str, Any]:
    """Of a rank whose steps take 10 ms and 1 ms a row, or twice that with both at work."""
    generator = random.Random(rank)
    message = LinkCost(latency_seconds=1e-4, byte_seconds=1e-9)
    memory = LinkCost(latency_seconds=1e-5, byte_seconds=1e-10)
    sizes = (8, 64 << 10, 1 << 20, 8 << 20)
    full = [step(rows, 2 * (0.01 + 0.001 * rows), 0.05, generator) for rows in (64, 32, 16)]
    alone = [step(64, 0.01 + 0.001 * 64, 0.05, generator)] if rank == 0 else []
    values = {
        "node": 0,
        "device": "cpu",
        "levels": [full, alone],
        "optimizer_bytes": 500,
        "peak_bytes": 1 << 20,
        "topology": "shared",
        "ring": [[n, ring_seconds(message, n, world_size)] for n in sizes],
        "shared": [[n, memory.seconds(n)] for n in sizes],
        "codecs": {"BF16Compression": 0.002 + 1e-5},
        "copy": 1e-10,
        "seconds": 3.0 + rank,
    }
    return {**values, **changes}


def test_levels_and_links_come_back() -> None:
    found = found_by([report(0), report(1)], PLACES, 6.5)
    both, alone = found.levels[2, 1], found.levels[1, 2]
    assert (both.threads, alone.threads) == (1, 2)
    assert both.fixed_seconds == pytest.approx(0.02, rel=0.2)
    assert both.row_seconds == pytest.approx(0.002, rel=0.05)
    assert both.step_spread == pytest.approx(0.05, rel=0.3)
    assert alone.median_seconds(64) == pytest.approx(0.074, rel=0.03)
    assert alone.median_seconds(16) == pytest.approx(0.026, rel=0.15)
    network = found.network
    assert network is not None
    assert network.shared is not None
    assert network.messages.latency_seconds == pytest.approx(1e-4, rel=0.01)
    assert network.messages.byte_seconds == pytest.approx(1e-9, rel=0.01)
    layout = Layout(world_size=2, num_nodes=1)
    assert network.sum_seconds(8 << 20, layout, "shared") == pytest.approx(
        1e-5 + 1e-10 * (8 << 20), rel=0.01
    )
    assert found.codec_seconds["BF16Compression"] == pytest.approx(0.002)
    assert (found.optimizer_bytes, found.launch_seconds, found.num_ranks) == (500, 2.5, 2)


def test_a_rank_without_rows_says_nothing_of_steps() -> None:
    found = found_by([report(0), report(1, levels=[[], []], optimizer_bytes=0)], PLACES, 5.0)
    assert found.levels[2, 1].row_seconds == pytest.approx(0.002, rel=0.1)
    assert found.levels[2, 1].rank_spread == 0
    assert found.optimizer_bytes == 500


def test_one_rank_has_no_network() -> None:
    alone = report(0)
    for name in ("ring", "shared", "codecs", "topology"):
        del alone[name]
    found = found_by([alone], PLACES, 5.0)
    assert found.network is None
    assert found.codec_seconds == {}


def test_machines_apart_have_no_shared_memory() -> None:
    found = found_by([report(0, topology="ring"), report(1, node=1, topology="ring")], PLACES, 5.0)
    assert found.num_nodes == 2
    assert found.network is not None
    assert found.network.shared is None


def test_a_pause_of_the_machine_is_no_spread() -> None:
    generator = random.Random(3)
    seconds = [math.exp(0.05 * generator.gauss(0, 1)) for _ in range(50)]
    seconds[7] = 30.0
    step_spread, rank_spread = spreads([seconds, [1.1 * one for one in seconds]])
    assert step_spread == pytest.approx(0.05, rel=0.5)
    assert rank_spread == pytest.approx(0.0674, rel=0.01)  # of two numbers that differ by 10 %
