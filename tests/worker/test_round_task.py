"""A task's part in a round, without Spark: a spool written by hand, a state, what is yielded."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.comm.access import Address
from sparkdl.comm.channel import ChannelClient
from sparkdl.config import TrainConfig
from sparkdl.data.plan import RoundPart, TrainPlan
from sparkdl.errors import ShardLost
from sparkdl.runtime.versions import versions
from sparkdl.serialization.travel.packed_module import pack
from sparkdl.storage.checkpoint_format import decode, encode
from sparkdl.storage.tensor_tree import snapshot
from sparkdl.sync.averaging.state_pieces import Pieces
from sparkdl.worker import round_task
from sparkdl.worker.kept import KEPT
from sparkdl.worker.round_task import RoundOrder, RoundPlace
from tests.worker import test_training
from tests.worker.test_training import CONFIG, Driver

# Fixtures of the worker's tests: a shard on disk, and a channel.
plan, driver = test_training.plan, test_training.driver

TRAIN = partial(round_task.train_or_evaluate, pieces=Pieces.of(1))
PART = RoundPart(epoch=0, step_in_epoch=1, step=1, num_steps=2)


@pytest.fixture(autouse=True)
def cold() -> Iterator[None]:
    KEPT.release()
    yield
    KEPT.release()


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 3))


class Break(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise SystemExit("enough")


def order(
    plan: TrainPlan, module: nn.Module, config: TrainConfig = CONFIG, **changes: Any
) -> RoundOrder:
    packed = pack(module)
    values: dict[str, Any] = {
        "run_id": "run", "attempt": 0, "plan": plan, "part": PART, "threads": 1,
        "payload": round_task.pack_payload(config, packed.skeleton, packed.tensors),
        "versions": versions(), "work": TRAIN,
    }  # fmt: skip
    return RoundOrder(**{**values, **changes})


def place(plan: TrainPlan, channel: Address | None = None, **changes: Any) -> RoundPlace:
    shard = dataclasses.replace(plan.shards[0], **changes)
    return RoundPlace(shard=shard, gpu_addresses=(), channel=channel)


def start() -> bytes:
    torch.manual_seed(3)
    return b"".join(encode(snapshot({"model": Net().state_dict()})))


def work(where: RoundPlace, what: RoundOrder) -> dict[str, bytes]:
    return dict(round_task.run(where, what, start()))


def test_a_task_trains_its_steps_and_gives_its_state(plan: TrainPlan, driver: Driver) -> None:
    found = work(place(plan, driver.server.address), order(plan, Net()))
    report = json.loads(found["result"])
    sent = decode(found["state"], "state")  # small tensors are in the frame of the state
    expected = plan.rows_by_rank(1)[0] + plan.rows_by_rank(2)[0]
    assert report["rows"] == report["weight"] == sent["weight"] == expected
    assert sent["state"].keys() == {"model", "optimizer", "scheduler", "scaler", "trains"}
    assert sent["state"]["optimizer"]["state"][0]["step"] == 2
    assert driver.events("done") != []


def test_a_warm_process_gives_the_bits_of_a_cold_one(plan: TrainPlan) -> None:
    wanted = order(plan, Net())
    cold = work(place(plan), wanted)["state"]
    replica = KEPT.value.replica
    other = dataclasses.replace(PART, step_in_epoch=0, step=0)
    work(place(plan), dataclasses.replace(wanted, part=other))
    assert work(place(plan), wanted)["state"] == cold
    assert KEPT.value.replica is replica
    work(place(plan), dataclasses.replace(wanted, run_id="another"))
    assert KEPT.value.replica is not replica
    KEPT.release()
    assert KEPT.value is None


def test_only_where_no_driver_listens_a_task_that_hangs_is_ended_on_its_host(
    plan: TrainPlan, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def noted(timeout_seconds: float) -> contextlib.nullcontext[None]:
        asked.append(timeout_seconds)
        return contextlib.nullcontext()

    monkeypatch.setattr(round_task, "ended_when_hung", noted)
    for channel in (driver.server.address, None):
        work(place(plan, channel), order(plan, Net(), heartbeat_timeout_seconds=7.0))
    assert asked == [7.0]


def test_an_evaluation_gives_sums_and_metrics(plan: TrainPlan) -> None:
    found = work(place(plan), order(plan, Net(), part=None))
    assert found.keys() == {"result", "metrics"}
    assert json.loads(found["result"])["weight"] == plan.num_validation_rows


def test_what_the_user_raises_is_reported_not_raised(plan: TrainPlan, driver: Driver) -> None:
    found = work(place(plan, driver.server.address), order(plan, Break()))
    failure = json.loads(found["error"])
    assert (failure["kind"], failure["type"], failure["rank"]) == ("user", "SystemExit", 0)
    assert [event["failure"] for event in driver.events("error")] == [failure]


def test_a_shard_that_is_not_here_sends_the_task_elsewhere(plan: TrainPlan) -> None:
    with pytest.raises(ShardLost, match="shard 0 is not at /nowhere"):
        work(place(plan, path="/nowhere"), order(plan, Net()))


@pytest.mark.slow
def test_a_copy_waits_while_the_original_works_elsewhere(
    plan: TrainPlan, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_task, "_SILENT_SECONDS", 1.0)
    address = driver.server.address
    with contextlib.closing(ChannelClient(address)) as client:
        report = partial(client.report, attempt=0, rank=0, events=[])
        timers = [threading.Timer(seconds, report) for seconds in (0.7, 1.4, 2.1)]
        report()
        for timer in timers:
            timer.start()
        started = time.monotonic()
        with pytest.raises(ShardLost):
            work(place(plan, address, path="/nowhere"), order(plan, Net()))
        assert time.monotonic() - started > 3.0
        for timer in timers:
            timer.join()
        started = time.monotonic()
        with pytest.raises(ShardLost):  # nobody works on it in this attempt
            work(place(plan, address, path="/nowhere"), order(plan, Net(), attempt=1))
        assert time.monotonic() - started < 2.5


def test_another_source_is_an_error(plan: TrainPlan) -> None:
    failure = json.loads(work(place(plan, fingerprint="other"), order(plan, Net()))["error"])
    assert failure["type"] == "DataError"
    assert "holds other rows" in failure["message"]


def test_other_versions_are_refused(plan: TrainPlan) -> None:
    wanted = order(plan, Net(), versions={**versions(), "torch": "0.1"})
    failure = json.loads(work(place(plan), wanted)["error"])
    assert failure["type"] == "ClusterError"
    assert "torch" in failure["message"]
