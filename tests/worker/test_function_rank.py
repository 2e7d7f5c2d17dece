"""One rank calls a function, without Spark: a channel in this process."""

from __future__ import annotations

import argparse
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist

import sparkdl
from sparkdl.comm.channel import ChannelServer, ChannelStorage, Hub
from sparkdl.comm.worker_environment import WorkerEnvironment
from sparkdl.errors import CommunicationError, ConfigError
from sparkdl.runtime.versions import versions
from sparkdl.storage.checkpoint_format import Writer, folders, latest
from sparkdl.storage.storage import open_storage
from sparkdl.worker import function_rank
from sparkdl.worker.function_rank import FunctionOrder, Script, checkpoints, pickled, unpickled


@dataclass
class Driver:
    """The driver's side of a channel."""

    hub: Hub
    server: ChannelServer
    folder: Path

    def value(self) -> Any:
        return unpickled((self.folder / function_rank.VALUE.format(0)).read_bytes())


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    folder = tmp_path / "driver"
    hub = Hub()
    files = open_storage(str(folder))
    server = ChannelServer(hub, bind="127.0.0.1", announce="127.0.0.1", files=files)
    yield Driver(hub, server, folder)
    server.shutdown()


def call(driver: Driver, function: Callable[[], Any], **changes: Any) -> list[tuple[str, bytes]]:
    values: dict[str, Any] = {
        "run_id": "run", "run_key": "function", "attempt": 0, "device": "cpu",
        "payload": cloudpickle.dumps(function), "relays": False, "storage_url": None,
        "driver_hosts_channel": True, "resume_path": None, "threads": 1, "versions": versions(),
        "start_timeout_seconds": 10.0, "collective_timeout_seconds": 10.0,
    }  # fmt: skip
    order = FunctionOrder(**{**values, **changes})
    driver.hub.begin(order.attempt)
    channel = driver.server.address.of_rank(0)
    place = WorkerEnvironment(
        rank=0, world_size=1, address="127.0.0.1", gpu_addresses=(), channel=channel
    )
    return list(function_rank.run(place, order))


def failure(results: list[tuple[str, bytes]]) -> dict[str, Any]:
    ((kind, payload),) = results
    assert kind == "error"
    found: dict[str, Any] = json.loads(payload)
    return found


NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


def test_the_function_finds_a_process_group_and_its_variables(driver: Driver) -> None:
    def look() -> dict[str, Any]:
        total = torch.ones(2)
        dist.all_reduce(total)
        place = sparkdl.context()
        return {
            "sum": total, "size": dist.get_world_size(), "rank": place.rank,
            "device": place.device.type, "env": {name: os.environ[name] for name in NAMES},
        }  # fmt: skip

    before = dict(os.environ)
    assert call(driver, look, attempt=0) == []
    found = driver.value()["value"]
    assert found["sum"].tolist() == [1, 1]
    assert (found["size"], found["rank"], found["device"]) == (1, 0, "cpu")
    expected = dict.fromkeys(NAMES, "0") | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    assert found["env"] == expected
    assert dict(os.environ) == before
    assert not dist.is_initialized()
    with pytest.raises(ConfigError):
        sparkdl.context()


def test_a_function_may_destroy_the_process_group(driver: Driver) -> None:
    assert call(driver, dist.destroy_process_group) == []
    assert driver.value() == {"value": None, "history": []}


def test_lines_of_other_launchers_do_no_harm(driver: Driver) -> None:
    """Also by the names under which they were imported before."""

    def train() -> list[Any]:
        init(backend="gloo")
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method="env://", rank=0, world_size=1)
        part = dist.new_group([0])
        destroy(part)
        destroy()
        init()
        value = torch.ones(1)
        dist.all_reduce(value)
        return [float(value), dist.get_world_size()]

    init, destroy = dist.init_process_group, dist.destroy_process_group
    assert call(driver, train) == []
    assert driver.value()["value"] == [1.0, 1]
    assert not dist.is_initialized()
    init("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torch's own again
    with pytest.raises(ValueError, match="twice"):
        init("gloo")
    destroy()
    assert not dist.is_initialized()


def test_another_group_than_there_is_is_refused_with_a_remedy(driver: Driver) -> None:
    def train() -> None:
        dist.init_process_group("nccl", world_size=4, rank=0)

    found = failure(call(driver, train))
    assert "asks for world_size=4, backend='nccl'" in str(found)
    assert "drop the line" in str(found)


@pytest.mark.parametrize("hosts", [True, False])
def test_a_function_goes_on_from_its_checkpoint(
    driver: Driver, tmp_path: Path, *, hosts: bool
) -> None:
    def train() -> Any:
        place = sparkdl.context()
        begun = place.checkpoint or {"epoch": 0, "weight": torch.zeros(2)}
        for epoch in range(begun["epoch"], begun["epoch"] + 2):
            state = {"epoch": epoch + 1, "weight": begun["weight"] + epoch}
            place.report({"epoch": epoch}, checkpoint=state)
        return begun

    url = None if hosts else str(tmp_path / "checkpoints")
    kept = open_storage(str(driver.folder) if hosts else str(url))
    options = {"storage_url": url, "driver_hosts_channel": hosts}
    first = call(driver, train, **options)
    value = driver.value() if hosts else unpickled(first[0][1])
    assert value["value"]["epoch"] == 0
    assert [kind for kind, _ in first] == ([] if hosts else ["value"])
    newest = latest(kept, "function", lambda _: True)
    assert newest is not None
    assert newest.step == 2
    second = call(driver, train, **options, attempt=1, resume_path=newest.path)
    value = driver.value() if hosts else unpickled(second[0][1])
    assert value["value"]["epoch"] == 2
    assert torch.equal(value["value"]["weight"], torch.ones(2))
    assert value["history"] == [{"report": n + 1, "epoch": n} for n in range(4)]
    newest = latest(kept, "function", lambda _: True)
    assert newest is not None
    assert newest.step == 4


def test_as_many_checkpoints_are_kept_as_were_asked_for(driver: Driver, tmp_path: Path) -> None:
    def train() -> None:
        for number in range(5):
            sparkdl.context().report(checkpoint={"number": number})

    call(driver, train, storage_url=str(tmp_path / "c"), keep=3)
    assert len(folders(open_storage(str(tmp_path / "c")), "function")) == 3


def test_what_it_reports_is_heard(driver: Driver) -> None:
    call(driver, lambda: sparkdl.context().report({"loss": 0.5}))
    bodies = []
    while not driver.hub.events.empty():
        bodies.append(driver.hub.events.get().body)
    (record,) = [body["record"] for body in bodies if body["kind"] == "epoch"]
    assert record == {"report": 1.0, "loss": 0.5}


def test_the_functions_error_is_told_with_its_traceback(driver: Driver) -> None:
    def fail() -> None:
        raise LookupError("no such layer")

    found = failure(call(driver, fail))
    assert (found["kind"], found["type"]) == ("user", "LookupError")
    assert "no such layer" in found["message"]
    assert "in fail" in found["traceback"]


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:1234", "gang"),
        ("NCCL error: remote process exited or there was a network error", "gang"),
        ("mat1 and mat2 shapes cannot be multiplied", "user"),
    ],
)
def test_the_loss_of_a_peer_is_no_mistake_of_the_function(
    driver: Driver, message: str, kind: str
) -> None:
    def fail() -> None:
        raise RuntimeError(message)

    found = failure(call(driver, fail))
    assert found["kind"] == kind
    assert message in found["message"]


def test_a_value_that_cannot_be_sent_is_named(driver: Driver) -> None:
    found = failure(call(driver, lambda: (n for n in range(3))))
    assert (found["kind"], found["type"]) == ("sparkdl", "ConfigError")
    assert "return plain values and tensors" in found["message"]


def test_a_checkpoint_that_cannot_be_stored_is_named(driver: Driver) -> None:
    found = failure(call(driver, lambda: sparkdl.context().report(checkpoint={"f": print})))
    assert found["type"] == "CheckpointError"


def test_the_checkpoint_of_something_else_is_refused(driver: Driver, tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    writer = Writer(run_key="function", run_id="run", attempt=0)
    with checkpoints(storage, 2, writer, Hub(), 10.0, is_required=True) as manager:
        manager.save(1, {"state": {}}, {})
    newest = latest(storage, "function", lambda _: True)
    assert newest is not None
    options = {"storage_url": str(tmp_path), "resume_path": newest.path}
    found = failure(call(driver, print, **options))
    assert found["type"] == "CheckpointError"
    assert "is no checkpoint of a TorchRunner" in found["message"]


SCRIPT = """
import os, sys
import torch.distributed as dist
import sparkdl
if __name__ == "__main__":
    with open(sys.argv[1], "w") as file:
        file.write(" ".join([os.path.basename(sys.argv[0]), sys.argv[2], os.environ["RANK"]]))
    sparkdl.context().report({"loss": 1.0})
    sys.exit(int(sys.argv[3]))
"""


@pytest.mark.parametrize("code", [0, 3])
def test_a_script_runs_as_main_with_its_arguments(
    driver: Driver, tmp_path: Path, code: int
) -> None:
    script = Script("train.py", SCRIPT, (str(tmp_path / "out"), "--fast", str(code)))
    before = list(sys.argv)
    results = call(driver, script)
    assert (tmp_path / "out").read_text() == "train.py --fast 0"
    assert sys.argv == before
    if code:
        assert failure(results)["type"] == "SystemExit"
    else:
        assert driver.value() == {"value": None, "history": [{"report": 1.0, "loss": 1.0}]}


def test_a_program_that_exits_is_quoted(driver: Driver) -> None:
    def parse() -> None:
        argparse.ArgumentParser("train").parse_args(["--speed"])

    found = failure(call(driver, parse))
    assert found["type"] == "SystemExit"
    assert "usage: train" in found["message"]
    assert "unrecognized arguments: --speed" in found["message"]


def test_a_function_may_end_by_exiting(driver: Driver) -> None:
    assert call(driver, lambda: sys.exit(0)) == []
    assert driver.value()["value"] is None


@pytest.fixture
def foreign() -> Iterator[type]:
    """A class of a module that the reader will not have."""
    module = types.ModuleType("sparkdl_elsewhere")
    exec("class Thing:\n    def __call__(self): return 1", module.__dict__)
    sys.modules[module.__name__] = module
    yield module.Thing
    sys.modules.pop(module.__name__, None)


def test_a_module_that_is_missing_is_named(driver: Driver, foreign: type) -> None:
    function, value = cloudpickle.dumps(foreign()), pickled(foreign())
    del sys.modules["sparkdl_elsewhere"]
    found = failure(call(driver, print, payload=function))
    assert found["type"] == "ConfigError"
    assert "'sparkdl_elsewhere', which this worker does not have: ship it" in found["message"]
    with pytest.raises(ConfigError, match="'sparkdl_elsewhere', which the driver does not have"):
        unpickled(value)


def test_a_large_function_comes_over_the_channel(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the network is away for a while."""
    function = cloudpickle.dumps(lambda: "large")
    open_storage(str(driver.folder)).write(function_rank.FUNCTION, function)
    losses = [CommunicationError("the network is away")]
    read = ChannelStorage.read

    def read_again(self: ChannelStorage, path: str) -> bytes:
        if losses:
            raise losses.pop()
        return read(self, path)

    monkeypatch.setattr(ChannelStorage, "read", read_again)
    assert call(driver, print, payload=b"") == []
    assert driver.value()["value"] == "large"


def test_a_script_lies_where_spark_cleans_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path},/nowhere")
    with pytest.raises(SystemExit, match=str(tmp_path)):
        Script("where.py", "import sys\nsys.exit(__file__)", ())()
    assert list(tmp_path.iterdir()) == []


def test_plain_values_need_no_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*arguments: Any, weights_only: bool, **options: Any) -> Any:
        assert weights_only, "this value was unpickled"
        return original(*arguments, weights_only=weights_only, **options)

    original = torch.load
    monkeypatch.setattr(torch, "load", load)
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    value = {
        "state": net.state_dict(), "optimizer": torch.optim.Adam(net.parameters()).state_dict(),
        "metrics": {"loss": 0.5, "steps": 1 << 80, 3: None}, "text": ("ä", b"\x00\xff", [True]),
        "arrays": [np.arange(6.0).reshape(2, 3), np.float32(3), np.array(["a", "bc"])],
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }  # fmt: skip
    found = unpickled(pickled({"value": value, "history": [{"loss": 0.25}]}))
    assert found["history"] == [{"loss": 0.25}]
    torch.testing.assert_close(found["value"]["state"], net.state_dict())
    assert found["value"]["metrics"] == value["metrics"]
    assert found["value"]["text"] == value["text"]
    assert found["value"]["parameter"].requires_grad
    for one, other in zip(found["value"]["arrays"], value["arrays"], strict=True):
        assert np.array_equal(one, other) and one.dtype == other.dtype


def test_values_come_back_as_they_were() -> None:
    class Local:
        size = 3

    shared = torch.arange(4.0)
    value = {"a": shared, "b": [shared[1:], None, "text"], "c": Local()}
    found = unpickled(pickled(value))
    assert found["c"].size == 3
    assert torch.equal(found["b"][0], shared[1:])
    found["a"][1] = 7
    assert found["b"][0][0] == 7  # still one memory
