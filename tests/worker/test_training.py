"""One rank's life without Spark: a channel in this process, a spool written by hand."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

from sparkdl.comm.channel import ChannelServer, Hub
from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.comm.worker_environment import WorkerEnvironment
from sparkdl.config import CheckpointConfig, EarlyStopping, TrainConfig
from sparkdl.data.plan import Column, SpoolColumn, TrainPlan, make_plan
from sparkdl.data.shuffle_windows import WINDOWS, Windows
from sparkdl.data.spool.writer import SpoolWriter
from sparkdl.errors import CheckpointLost, CommunicationError, ConfigError, StorageError
from sparkdl.inference.classification import CLASSIFICATION
from sparkdl.runtime.versions import versions
from sparkdl.serialization.travel.packed_module import PackedModule, pack
from sparkdl.storage.checkpoint_format import decode, latest
from sparkdl.storage.storage import Data, LocalStorage, open_storage
from sparkdl.train.callbacks import Callback, CallbackState
from sparkdl.worker import training

ROWS = 40
COLUMNS = (
    Column(name="x", role="feature", dtype="float32", shape=(3,)),
    Column(name="y", role="label", dtype="int64", shape=()),
)
CONFIG = TrainConfig(
    task=CLASSIFICATION, loss="cross_entropy", optimizer="adam", learning_rate=0.05, epochs=3,
    batch_size=8, seed=5, checkpoint=CheckpointConfig(interval=4),
)  # fmt: skip


@dataclass
class Driver:
    """The driver's side of a channel."""

    hub: Hub
    server: ChannelServer
    folder: Path

    def events(self, kind: str) -> list[dict[str, Any]]:
        found = []
        while not self.hub.events.empty():
            found.append(dict(self.hub.events.get().body))
        return [body for body in found if body["kind"] == kind]


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    folder = tmp_path / "driver"
    hub = Hub()
    files = open_storage(str(folder))
    server = ChannelServer(hub, bind="127.0.0.1", announce="127.0.0.1", files=files)
    yield Driver(hub, server, folder)
    server.shutdown()


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> TrainPlan:
    directory = tmp_path_factory.mktemp("spool") / "shard"
    generator = np.random.default_rng(1)
    x = generator.normal(size=(ROWS, 3)).astype(np.float32)
    batch = pa.record_batch(
        [
            pa.array(x.tolist(), pa.list_(pa.float32())),
            pa.array(x.argmax(1), pa.int64()),
            pa.array([row % 5 == 0 for row in range(ROWS)], pa.bool_()),
            pa.array(np.arange(ROWS), pa.int64()),
        ],
        names=["x", "y", "validation", "hash"],
    )
    columns = [SpoolColumn(name=c.name, role=c.role, dtype=c.dtype) for c in COLUMNS]
    with SpoolWriter(directory, columns, has_validation=True) as out:
        out.write(batch)
    shards = [out.summary().shard]
    return make_plan(columns=COLUMNS, shards=shards, world_size=1, batch_size=8, epochs=3)


@pytest.fixture(scope="module")
def packed() -> PackedModule:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return pack(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 3)))


def environment(driver: Driver, **changes: Any) -> WorkerEnvironment:
    values = {
        "rank": 0, "world_size": 1, "address": "127.0.0.1", "gpu_addresses": (),
        "channel": driver.server.address.of_rank(changes.get("rank", 0)),
    }  # fmt: skip
    return WorkerEnvironment(**{**values, **changes})


def run(driver: Driver, its_order: training.WorkOrder) -> Iterator[tuple[str, bytes]]:
    driver.hub.begin(its_order.attempt)
    return training.run(environment(driver), its_order)


def order(plan: TrainPlan, packed: PackedModule, config: TrainConfig = CONFIG, **changes: Any):  # type: ignore[no-untyped-def]
    values: dict[str, Any] = {
        "run_id": "run", "run_key": "0123456789abcdef", "attempt": 0, "plan": plan,
        "device": config.device,
        "payload": cloudpickle.dumps((None, config, packed.skeleton, ())),
        "weights": packed.tensors,
        "relays": False,
        "storage_url": None, "driver_hosts_channel": True, "resume_path": None, "threads": 1,
        "versions": versions(), "start_timeout_seconds": 10.0, "collective_timeout_seconds": 10.0,
    }  # fmt: skip
    return training.WorkOrder(**{**values, **changes})


def failure(results: list[tuple[str, bytes]]) -> dict[str, Any]:
    ((kind, payload),) = results
    assert kind == "error"
    found = json.loads(payload)
    assert isinstance(found, dict)
    return found


def test_training_delivers_result_and_weights_and_is_heard(
    driver: Driver, plan: TrainPlan, packed: PackedModule
) -> None:
    open_storage(str(driver.folder)).write(training.INITIAL, packed.tensors)
    results = list(run(driver, order(plan, packed, weights=None)))
    ((kind, payload),) = results
    assert kind == "result"
    report = json.loads(payload)
    assert report["steps"] == plan.total_steps == 12
    assert [record["epoch"] for record in report["history"]] == [1, 2, 3]
    assert report["history"][-1]["loss"] < report["history"][0]["loss"]
    assert "val_loss" in report["history"][0]
    assert report["rows_per_second"] > 0
    assert report["seconds"]["checkpoint stall"] >= 0
    trained = decode((driver.folder / training.FINAL).read_bytes(), training.FINAL)
    assert set(trained) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    heard = []
    while not driver.hub.events.empty():
        heard.append(driver.hub.events.get())
    kinds = {event.body["kind"] for event in heard}
    assert {"heartbeat", "epoch", "done"} <= kinds
    assert "error" not in kinds
    assert {(event.attempt, event.rank) for event in heard} == {(0, 0)}
    # the driver keeps checkpoints too, but needs none of the end: it has the weights
    found = latest(open_storage(str(driver.folder)), "0123456789abcdef")
    assert found is not None
    assert found.step == 8


def test_weights_come_as_rows_when_the_driver_hosts_no_channel(
    driver: Driver, plan: TrainPlan, packed: PackedModule
) -> None:
    over_channel = list(run(driver, order(plan, packed)))
    assert [kind for kind, _ in over_channel] == ["result"]
    expected = (driver.folder / training.FINAL).read_bytes()
    results = list(run(driver, order(plan, packed, driver_hosts_channel=False, attempt=1)))
    assert [kind for kind, _ in results] == ["result", "weights", "attributes"]
    assert results[1][1] == expected


@dataclass
class Break(Callback):
    """Raises something at a step."""

    step: int
    error: BaseException

    def on_step_end(self, state: CallbackState) -> None:
        if state.step == self.step:
            raise self.error


def breaking(error: BaseException, step: int = 2) -> TrainConfig:
    return dataclasses.replace(CONFIG, callbacks=(Break(step, error),))


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "type_name", "message"),
    [
        (ZeroDivisionError("their mistake"), "ZeroDivisionError", "their mistake"),
        (SystemExit(3), "SystemExit", "3"),
        (KeyboardInterrupt(), "KeyboardInterrupt", ""),
        (MemoryError("large"), "MemoryError", "large"),
        (Unprintable(), "Unprintable", "(no message: its __str__ failed)"),
    ],
)
def test_an_error_of_the_user_is_one_row_and_one_event(
    driver: Driver, plan: TrainPlan, packed: PackedModule, error: BaseException, type_name: str,
    message: str,
) -> None:  # fmt: skip
    results = list(run(driver, order(plan, packed, breaking(error))))
    found = failure(results)
    assert (found["rank"], found["kind"], found["type"]) == (0, "user", type_name)
    assert found["message"].partition(";")[0] == message
    assert "in on_step_end" in found["traceback"]
    assert found["traceback"].startswith("Traceback (most recent call last):")
    (event,) = driver.events("error")
    assert event["failure"] == found
    assert not (driver.folder / training.FINAL).exists()


def test_a_lost_shard_may_be_healed(driver: Driver, plan: TrainPlan, packed: PackedModule) -> None:
    shard = dataclasses.replace(plan.shards[0], path="/nowhere")
    lost = dataclasses.replace(plan, shards=(shard,))
    found = failure(list(run(driver, order(lost, packed))))
    assert (found["kind"], found["type"]) == ("gang", "ShardLost")
    assert "/nowhere" in found["message"]


def test_peers_that_do_not_come_may_be_healed(
    driver: Driver, plan: TrainPlan, packed: PackedModule
) -> None:
    alone = environment(driver, rank=1, world_size=2)
    found = failure(list(training.run(alone, order(plan, packed, start_timeout_seconds=0.3))))
    assert (found["rank"], found["kind"], found["type"]) == (1, "gang", "CommunicationError")
    assert found["message"].startswith("not all workers started in time: not all 2 ranks")


def test_other_versions_are_refused_with_the_remedy(
    driver: Driver, plan: TrainPlan, packed: PackedModule
) -> None:
    there = order(plan, packed, versions={**versions(), "torch": "1.0"})
    found = failure(list(run(driver, there)))
    assert (found["kind"], found["type"]) == ("sparkdl", "ClusterError")
    assert found["message"] == (
        f"rank 0 on 127.0.0.1 has torch {versions()['torch']}, the driver has torch 1.0; "
        "install the same version on both sides"
    )


def test_our_own_errors_keep_their_type(
    driver: Driver, plan: TrainPlan, packed: PackedModule
) -> None:
    config = dataclasses.replace(CONFIG, early_stopping=EarlyStopping(monitor="val_absent"))
    found = failure(list(run(driver, order(plan, packed, config))))
    assert (found["kind"], found["type"]) == ("sparkdl", ConfigError.__name__)
    assert "val_absent" in found["message"]


def test_a_cuda_device_that_is_not_there(
    driver: Driver, plan: TrainPlan, packed: PackedModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = dataclasses.replace(CONFIG, device="cuda")
    found = failure(list(run(driver, order(plan, packed, config))))
    assert (found["kind"], found["type"]) == ("sparkdl", "ClusterError")


@pytest.mark.parametrize("keeper", ["driver", "directory"])
def test_a_run_goes_on_from_its_checkpoint_with_the_same_bits(
    driver: Driver, plan: TrainPlan, packed: PackedModule, tmp_path: Path, keeper: str
) -> None:
    url = str(tmp_path / "checkpoints") if keeper == "directory" else None
    storage = open_storage(url or str(driver.folder))
    whole = list(run(driver, order(plan, packed, driver_hosts_channel=False)))
    failure(
        list(
            run(
                driver,
                order(plan, packed, breaking(OSError("gone"), step=11), storage_url=url, attempt=1),
            )
        )
    )
    found = latest(storage, "0123456789abcdef")
    assert found is not None
    assert found.step in (4, 8)  # an aborted run abandons the checkpoint that is being written
    again = order(plan, packed, storage_url=url, attempt=2, resume_path=found.path)
    ((kind, payload),) = list(run(driver, again))
    assert kind == "result"
    report = json.loads(payload)
    assert report["steps"] == 12
    assert [record["epoch"] for record in report["history"]] == [1, 2, 3]
    assert (driver.folder / training.FINAL).read_bytes() == whole[1][1]
    end = latest(storage, "0123456789abcdef")
    assert end is not None
    assert end.step == (12 if keeper == "directory" else 8)


def test_windows_change_the_run_and_it_goes_on_in_them_with_the_same_bits(
    driver: Driver, plan: TrainPlan, packed: PackedModule, tmp_path: Path
) -> None:
    plan = dataclasses.replace(plan, windows=Windows(group_rows=3, groups_together=4))
    url = str(tmp_path / "checkpoints")
    config = dataclasses.replace(CONFIG, checkpoint=CheckpointConfig(interval=3))

    def weights(*orders: training.WorkOrder) -> bytes:
        for one in orders:
            list(run(driver, one))
        return (driver.folder / training.FINAL).read_bytes()

    whole = weights(order(plan, packed, config))
    other = order(dataclasses.replace(plan, windows=None), packed, config, attempt=1)
    assert whole != weights(other)
    breaks = dataclasses.replace(breaking(OSError("gone"), step=11), checkpoint=config.checkpoint)
    failure(list(run(driver, order(plan, packed, breaks, storage_url=url, attempt=2))))
    found = latest(open_storage(url), "0123456789abcdef")
    assert found is not None and found.step % plan.steps_per_epoch > 0
    assert found.environment[WINDOWS] == "3x4"
    later = order(plan, packed, config, storage_url=url, attempt=3, resume_path=found.path)
    assert weights(later) == whole


def test_a_checkpoint_of_other_conditions_is_named(
    driver: Driver, plan: TrainPlan, packed: PackedModule, tmp_path: Path
) -> None:
    url = str(tmp_path / "checkpoints")
    list(run(driver, order(plan, packed, storage_url=url)))
    found = latest(open_storage(url), "0123456789abcdef")
    assert found is not None
    driver.events("log")
    later = order(plan, packed, storage_url=url, attempt=1, resume_path=found.path, threads=2)
    list(run(driver, later))
    lines = [line for event in driver.events("log") for _, line in event["lines"]]
    assert any("threads: 1 -> 2" in line and "bits will differ" in line for line in lines)


def test_a_driver_that_is_gone_is_a_gang_failure(plan: TrainPlan, packed: PackedModule) -> None:
    server = ChannelServer(Hub(), bind="127.0.0.1", announce="127.0.0.1")
    lost = Driver(Hub(), server, Path())
    there = environment(lost)
    server.shutdown()
    found = failure(list(training.run(there, order(plan, packed))))
    assert (found["kind"], found["type"]) == ("gang", CommunicationError.__name__)


@pytest.mark.parametrize("error", [None, ValueError("x")])
def test_the_process_is_left_as_it_was(
    driver: Driver, plan: TrainPlan, packed: PackedModule, error: BaseException | None
) -> None:
    root, own = logging.getLogger(), logging.getLogger("sparkdl")

    def state() -> tuple[Any, ...]:
        return (
            sys.stdout, sys.stderr, list(root.handlers), root.level, own.level,
            torch.get_num_threads(), torch.distributed.is_initialized(),
            sorted(t.name for t in threading.enumerate() if t.name.startswith("sparkdl")
                   and not t.name.startswith("sparkdl-channel")),  # of the driver, which is here
        )  # fmt: skip

    before = state()
    config = CONFIG if error is None else breaking(error)
    list(run(driver, order(plan, packed, config, threads=2)))
    assert state() == before


def test_shards_whose_rows_have_another_order_begin_the_epoch_anew(
    driver: Driver, plan: TrainPlan, packed: PackedModule, tmp_path: Path
) -> None:
    url = str(tmp_path / "checkpoints")
    config = breaking(OSError("gone"), step=11)
    config = dataclasses.replace(config, checkpoint=CheckpointConfig(interval=3))
    failure(list(run(driver, order(plan, packed, config, storage_url=url))))
    found = latest(open_storage(url), "0123456789abcdef")
    assert found is not None and found.step % plan.steps_per_epoch > 0
    driver.events("log")
    other = [dataclasses.replace(shard, fingerprint="other") for shard in plan.shards]
    changed = dataclasses.replace(plan, shards=tuple(other))
    later = order(changed, packed, storage_url=url, attempt=1, resume_path=found.path)
    list(run(driver, later))
    lines = [line for event in driver.events("log") for _, line in event["lines"]]
    assert any("rows: " in line and "bits will differ" in line for line in lines)
    assert any("shards have changed: epoch " in line and "begins anew" in line for line in lines)


class Refusing(LocalStorage):
    """The driver's folder, which has no space for some files."""

    def __init__(self, root: Path, refused: Callable[[str], bool]) -> None:
        super().__init__(root)
        self._refused = refused

    def write(self, path: str, data: Data) -> None:
        if self._refused(path):
            raise StorageError(f"no space for {path}")
        super().write(path, data)


def weights_with(
    folder: Path, refused: Callable[[str], bool], *orders: training.WorkOrder
) -> tuple[list[str], bytes, list[str]]:
    """Kinds of the rows, the weights wherever they are, and what was logged."""
    hub = Hub()
    files = Refusing(folder, refused)
    server = ChannelServer(hub, bind="127.0.0.1", announce="127.0.0.1", files=files)
    there = Driver(hub, server, folder)
    try:
        for one in orders:
            rows = list(training.run(environment(there), one))
        lines = [line for event in there.events("log") for _, line in event["lines"]]
    finally:
        server.shutdown()
    in_rows = [payload for kind, payload in rows if kind == "weights"]
    data = in_rows[0] if in_rows else (folder / training.FINAL).read_bytes()
    return [kind for kind, _ in rows], data, lines


def test_a_full_driver_costs_neither_the_run_nor_its_weights(
    plan: TrainPlan, packed: PackedModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkdl.storage.retried.time", SimpleNamespace(sleep=lambda _: None))
    config = dataclasses.replace(CONFIG, checkpoint=CheckpointConfig(interval=1))
    one = order(plan, packed, config)
    whole = weights_with(tmp_path / "a", lambda path: False, one)
    assert whole[0] == ["result"]
    found = weights_with(tmp_path / "b", lambda path: True, one)
    assert found[:2] == (["result", "weights", "attributes"], whole[1])
    assert any("there is no checkpoint 0123456789abcdef/run-0/step-" in line for line in found[2])
    assert any("final.safetensors goes to the driver as a row" in line for line in found[2])
    # Where the user has named a place for checkpoints, one that is of no use ends the run.
    relayed = dataclasses.replace(one, storage_url="hdfs:///x", relays=True)
    found_error = weights_or_error(tmp_path / "c", relayed)
    assert found_error["type"] == "StorageError"
    assert "5 checkpoints in a row" in found_error["message"]


def weights_or_error(folder: Path, one: training.WorkOrder) -> dict[str, Any]:
    server = ChannelServer(
        Hub(), bind="127.0.0.1", announce="127.0.0.1", files=Refusing(folder, lambda path: True)
    )
    try:
        return failure(list(training.run(environment(Driver(Hub(), server, folder)), one)))
    finally:
        server.shutdown()


def test_a_checkpoint_that_a_worker_cannot_read_is_for_a_restart(
    driver: Driver, plan: TrainPlan, packed: PackedModule, tmp_path: Path
) -> None:
    url = str(tmp_path / "checkpoints")
    list(training.run(environment(driver), order(plan, packed, storage_url=url)))
    found = latest(open_storage(url), "0123456789abcdef")
    assert found is not None
    names = ("shared.safetensors", "rank-00000.safetensors", "manifest.json")
    for attempt, name in enumerate(names, start=1):
        open_storage(url).remove(f"{found.path}/{name}")
        later = order(plan, packed, storage_url=url, attempt=attempt, resume_path=found.path)
        driver.hub.begin(later.attempt)
        told = failure(list(training.run(environment(driver), later)))
        assert (told["kind"], told["type"]) == ("gang", CheckpointLost.__name__)
        assert f"the checkpoint {found.path} cannot be read: " in told["message"]


def test_initial_weights_are_asked_for_again(packed: PackedModule) -> None:
    """A network that was away for 40 s has cost a restart."""
    files = MagicMock()
    files.read.side_effect = [CommunicationError("the network is away"), packed.tensors]
    module = training.initial_module(None, packed.skeleton, files, LocalCommunicator())
    assert isinstance(module, nn.Sequential)
