"""What do the tests of reports share? The events of a run that had something of everything."""

from __future__ import annotations

import math
import random
from typing import Any

from sparkdl.report.record.run_record import RecordBuilder, RunRecord

GRAPH = {
    "nodes": [
        {"name": "input 1", "op": "input", "shape": [1, 28, 28]},
        {"name": "body.conv1", "op": "Conv2d", "shape": [16, 28, 28], "parameters": 160,
         "detail": "1, 16, kernel_size=(3, 3), padding=(1, 1)"},
        {"name": "body.relu", "op": "ReLU", "shape": [16, 28, 28], "parameters": 0, "detail": ""},
        {"name": "body.conv2", "op": "Conv2d", "shape": [16, 28, 28], "parameters": 2320,
         "detail": "16, 16, kernel_size=(3, 3), padding=(1, 1)"},
        {"name": "body.add", "op": "add", "shape": [16, 28, 28]},
        {"name": "body.norm", "op": "BatchNorm2d", "shape": [16, 28, 28], "parameters": 32,
         "detail": "16"},
        {"name": "pool", "op": "AdaptiveAvgPool2d", "shape": [16, 1, 1], "parameters": 0,
         "detail": "output_size=1"},
        {"name": "head", "op": "Linear", "shape": [10], "parameters": 170, "detail": "16, 10"},
        {"name": "output", "op": "output", "shape": [10]},
    ],
    "edges": [[0, 1], [1, 2], [2, 3], [2, 4], [3, 4], [4, 5], [5, 6], [6, 7], [7, 8]],
    "classes": {"body": "Block"},
}  # fmt: skip


def events(*, ended: bool = True, num_ranks: int = 4) -> list[dict[str, Any]]:
    """A run of 62 s with a restart, as its driver wrote it down."""
    chance = random.Random(7)
    found: list[dict[str, Any]] = [
        {"kind": "begin", "at": 0.0, "run_id": "0123456789ab", "name": "TorchClassifier",
         "started": 1.7e9, "phase": "preflight", "params": [
             {"name": "epochs", "value": "12", "is_set": True},
             {"name": "syncStrategy", "value": "allreduce", "is_set": False},
             {"name": "module", "value": "<script>alert(1)</script>", "is_set": True}],
         "versions": {"sparkdl": "0.1", "python": "3.12.4"}, "spark": {"version": "4.1.0"},
         "driver": machine("driver-host")},
        {"kind": "lap", "at": 2.1, "name": "preflight", "seconds": 2.1},
        {"kind": "lap", "at": 5.0, "name": "spool", "seconds": 2.9},
        {"kind": "phase", "at": 5.0, "name": "train"},
        {"kind": "facts", "at": 5.1, "facts": {
            "workers": num_ranks, "mode": "gang", "strategy": "AllReduce()", "rows": 60_000,
            "validation_rows": 10_000, "epochs": 12, "steps_per_epoch": 235, "steps": 2820,
            "batch_size": 64, "parameters": 2682, "parameter_bytes": 10_728}},
        {"kind": "graph", "at": 5.1, "graph": GRAPH},
        {"kind": "attempt", "at": 5.2, "number": 0, "start_step": 0},
    ]  # fmt: skip
    for rank in range(num_ranks):
        host = f"worker-{rank // 2}"
        found.append({"kind": "hardware", "at": 6.0, "rank": rank, "hardware": machine(host)})
    for second in range(6, 60):
        if 30 <= second < 36:  # nobody trains between the failure and the restart
            continue
        for rank in range(num_ranks):
            found.append(spent(second, rank, num_ranks, chance))
        loss = 2.3 * math.exp(-second / 14) + 0.06 + chance.random() * 0.12
        found.append(
            {"kind": "step", "at": second + 0.5, "step": (second - 5) * 52, "loss": loss,
             "rows_per_second": 12_000.0}
        )  # fmt: skip
        if second % 4 == 0:
            found.append(layers(second))
        if second % 4 == 1:
            found.append(epoch(second, (second - 5) // 4 + 1, chance))
        if second == 29:
            found.append(
                {"kind": "failure", "at": 30.0, "reason": "a worker was lost (executor 1 <lost>)"}
            )
            found.append({"kind": "attempt", "at": 35.4, "number": 1, "start_step": 1000})
    found.append({"kind": "log", "at": 40.0, "rank": 1, "level": "WARNING", "line": "beware & see"})
    found.append({"kind": "confusion", "at": 59.0, "epoch": 12, "counts": confusion(10, chance)})
    if ended:
        found += [
            {"kind": "lap", "at": 60.5, "name": "train", "seconds": 55.5},
            {"kind": "lap", "at": 62.0, "name": "clean up", "seconds": 1.5},
            {"kind": "end", "at": 62.0, "status": "succeeded", "error": None, "history": []},
        ]
    return found


def spent(second: int, rank: int, num_ranks: int, chance: random.Random) -> dict[str, Any]:
    """What a rank did in a second; the last one is slow, and the others wait for it."""
    data, communication = 0.04 + 0.02 * chance.random(), 0.10 + 0.03 * chance.random()
    waiting = 0.02 if rank == num_ranks - 1 else 0.12 + 0.12 * chance.random()
    evaluate = 0.3 if second % 4 == 0 else 0.0
    checkpoint = 0.15 if second % 9 == 0 else 0.0
    rest = 1.0 - data - communication - waiting - evaluate - checkpoint - 0.01
    return {
        "kind": "spent", "at": second + 1.0, "rank": rank, "begin": float(second),
        "end": second + 1.0, "seconds": {
            "data": data, "compute": rest, "communication": communication, "waiting": waiting,
            "evaluate": evaluate, "checkpoint": checkpoint, "other": 0.01}}  # fmt: skip


def epoch(second: int, number: int, chance: random.Random) -> dict[str, Any]:
    loss = 2.0 * math.exp(-number / 3.5) + 0.08
    return {
        "kind": "epoch", "at": float(second), "record": {
            "epoch": number, "steps": 235, "loss": loss, "learning_rate": 0.002 * 0.9**number,
            "seconds": 3.6 + 0.4 * chance.random(), "val_loss": loss * 1.08 + 0.02,
            "val_accuracy": 0.985 - 0.6 * math.exp(-number / 2.5)}}  # fmt: skip


def layers(second: int) -> dict[str, Any]:
    """A look at which one layer is well, one does not move, and one moves ever faster."""
    ratios = {"body.conv1": 2e-3, "body.norm": 0.0, "head": 10 ** (second / 20 - 3.5)}
    return {"kind": "layers", "at": float(second), "step": (second - 5) * 52, "ratios": ratios}


def confusion(size: int, chance: random.Random) -> list[list[int]]:
    rows = [[int(max(0, chance.gauss(4, 5))) for _ in range(size)] for _ in range(size)]
    for label in range(size):
        rows[label][label] = 900 + chance.randrange(90)
    return rows


def machine(host: str) -> dict[str, Any]:
    return {
        "host": host, "cpu": "Some Processor 8375C @ 2.90GHz", "cores": 16, "threads": 4,
        "memory_bytes": 64 * 2**30, "device": "cpu"}  # fmt: skip


def record(**options: Any) -> RunRecord:
    """What these events amount to."""
    builder = RecordBuilder()
    for event in events(**options):
        builder.take(event)
    return builder.record()
