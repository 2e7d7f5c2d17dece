"""A run of months: its checkpoints leave as many as were asked for, and nothing else."""

from __future__ import annotations

import sys

import pytest
import torch

from sparkdl.comm.channel import Hub
from sparkdl.config import CheckpointConfig
from sparkdl.storage.checkpoint_format import Writer, folders, latest, load_shared
from sparkdl.storage.checkpoint_writer import CheckpointManager
from sparkdl.storage.lease import Lease
from tests.soak.usage import SHARE, Usage, usage
from tests.storage.memory import MemoryStorage

NUM_CHECKPOINTS = round(60_000 * SHARE)
PER_ATTEMPT = 2_000
MARKS = (NUM_CHECKPOINTS // 5, NUM_CHECKPOINTS * 3 // 5, NUM_CHECKPOINTS)
KEEP = 3
MOST_BLOCKS = 1_000
"""Of Python's memory may come to more between two marks, where one object kept of each checkpoint
would be 24,000."""
MEMORY_MIB = 8.0
"""The same of all memory, which swings by some MiB as tables inside of Python are made anew."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_checkpoints_need_does_not_grow_with_their_number() -> None:
    storage, hub = MemoryStorage(), Hub()
    weights = torch.zeros(4)
    found: list[Usage] = []
    blocks: list[int] = []
    with Lease(storage, "run", "a") as lease:
        for attempt in range(NUM_CHECKPOINTS // PER_ATTEMPT):
            lease.begin(attempt, None)
            first = attempt * PER_ATTEMPT + 1
            with CheckpointManager(
                storage,
                CheckpointConfig(keep=KEEP, interval=1),
                rank=0,
                world_size=1,
                writer=Writer(run_key="run", run_id="a", attempt=attempt),
                environment={},
                signal=hub,
            ) as manager:
                for step in range(first, first + PER_ATTEMPT):
                    weights.fill_(step)
                    manager.save(step, {"weights": weights}, {"rank": 0})
                    if step in MARKS:
                        found.append(usage())
                        blocks.append(sys.getallocatedblocks())
    first, second, last = found
    assert last.grown(first, memory_mib=float("inf")) == []  # files, threads and ports
    assert max(blocks[1] - blocks[0], blocks[2] - blocks[1]) <= MOST_BLOCKS, blocks
    spans = second.memory_mib - first.memory_mib, last.memory_mib - second.memory_mib
    assert min(spans) <= MEMORY_MIB, found
    steps = [folder.step for folder in folders(storage, "run")]
    assert steps == list(range(NUM_CHECKPOINTS - KEEP + 1, NUM_CHECKPOINTS + 1))
    assert len(storage.list("run")) == 1  # the folder of the last attempt; the lease is gone
    newest = latest(storage, "run")
    assert newest is not None
    assert load_shared(newest)["weights"].tolist() == [float(NUM_CHECKPOINTS)] * 4
    print(f"\n{NUM_CHECKPOINTS} checkpoints: {first} -> {second} -> {last}")
