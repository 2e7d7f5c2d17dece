"""How ranks of a gang meet and leave: a channel in this process, each rank a client of it."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import pickle
import random
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from sparkdl.comm import communicator, process_group
from sparkdl.comm.channel import ChannelClient, ChannelServer, Hub
from sparkdl.comm.worker_environment import WorkerEnvironment
from sparkdl.errors import CommunicationError
from sparkdl.runtime.versions import versions
from sparkdl.serialization.program.process_settings import present_settings
from sparkdl.worker import lifecycle
from sparkdl.worker.lifecycle import GangOrder, GangRank, Member, Results, describe_failure, live


@pytest.fixture
def server() -> Iterator[ChannelServer]:
    server = ChannelServer(Hub(), bind="127.0.0.1", announce="127.0.0.1")
    yield server
    server.shutdown()


def environment_of(server: ChannelServer, rank: int) -> WorkerEnvironment:
    return WorkerEnvironment(
        rank=rank, world_size=2, address="127.0.0.1", gpu_addresses=(),
        channel=server.address.of_rank(rank),
    )  # fmt: skip


def order(**changes: Any) -> GangOrder:
    values: dict[str, Any] = {
        "run_id": "run", "run_key": "key", "attempt": 0, "device": "cpu", "payload": b"",
        "storage_url": None, "relays": False, "driver_hosts_channel": False, "resume_path": None,
        "threads": 1, "versions": versions(), "start_timeout_seconds": 10.0,
        "collective_timeout_seconds": 0.5,
    }  # fmt: skip
    return GangOrder(**{**values, **changes})


def rank_of(server: ChannelServer, rank: int, its_order: GangOrder | None = None) -> GangRank:
    environment = environment_of(server, rank)
    return GangRank(environment, its_order or order(), ChannelClient(environment.channel))


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_LISTEN_SECONDS", 0.1)


@pytest.mark.usefixtures("listening")
def test_rank_0_waits_as_long_as_its_peer_is_heard(server: ChannelServer) -> None:
    def work_on() -> None:
        for _ in range(15):
            server._hub.report(0, 1, [])
            time.sleep(0.1)
        server._hub.set("0/bye/1", b"")

    server._hub.report(0, 1, [])
    peer = threading.Thread(target=work_on)
    peer.start()
    rank_of(server, 0).leave()
    assert server._hub.get("0/bye/1") is not None  # three times the time-out of a collective
    peer.join()


@pytest.mark.usefixtures("listening")
def test_rank_0_gives_up_a_peer_that_is_silent(server: ChannelServer) -> None:
    server._hub.report(0, 1, [])
    with pytest.raises(CommunicationError, match="rank 1 has not reported"):
        rank_of(server, 0).leave()


def test_nobody_waits_where_the_driver_hosts_the_channel(server: ChannelServer) -> None:
    patient = order(driver_hosts_channel=True, collective_timeout_seconds=600.0)
    rank_of(server, 0, patient).leave()


def test_only_where_no_driver_listens_a_rank_that_hangs_is_ended_on_its_host(
    server: ChannelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stopped process kept the job alive for ever: the others' errors do not end it."""
    asked: list[float] = []

    def noted(timeout_seconds: float) -> contextlib.nullcontext[None]:
        asked.append(timeout_seconds)
        return contextlib.nullcontext()

    monkeypatch.setattr(lifecycle, "ended_when_hung", noted)
    for driver_hosts in (True, False):
        foreign = order(versions={}, driver_hosts_channel=driver_hosts, heartbeat_timeout_seconds=7)
        list(live(environment_of(server, 1), foreign, lambda member: []))
    assert asked == [7]


def test_a_rank_that_fails_lets_rank_0_leave(server: ChannelServer) -> None:
    def work(member: Member) -> Results:
        raise AssertionError("never met")

    foreign = order(versions={**versions(), "torch": "0.1"})
    ((kind, payload),) = live(environment_of(server, 1), foreign, work)
    assert (kind, json.loads(payload)["type"]) == ("error", "ClusterError")
    assert server._hub.get("0/bye/1") is not None


def test_a_process_is_after_its_task_as_it_was(server: ChannelServer) -> None:
    """Spark has it run the user's other functions, and other fits."""

    def state() -> Any:
        drawn = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()
        return drawn, present_settings(travelling=False)

    def work(member: Member) -> Results:
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(1)
        np.seterr(all="raise")
        torch.set_grad_enabled(False)
        return [("done", b"")]

    before = state()
    alone = dataclasses.replace(environment_of(server, 0), world_size=1)
    assert list(live(alone, order(), work)) == [("done", b"")]
    assert state() == before


def test_nobody_begins_before_all_have_connected(
    server: ChannelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []

    @contextlib.contextmanager
    def connect(*, rank: int, **_: Any) -> Iterator[None]:
        time.sleep(1.0 * rank)  # rank 1 is still busy with its connections
        assert begun == []
        yield

    def enter(rank: int) -> None:
        with rank_of(server, rank).communicator(torch.device("cpu"), (0, 0)):
            begun.append(rank)

    monkeypatch.setattr(process_group, "process_group", connect)
    monkeypatch.setattr(communicator, "ProcessGroupCommunicator", lambda **_: None)
    peers = [threading.Thread(target=enter, args=(rank,)) for rank in (0, 1)]
    for peer in peers:
        peer.start()
    for peer in peers:
        peer.join(20)
    assert sorted(begun) == [0, 1]


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "lower batchSize"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "lower batchSize"),
        (MemoryError(), "gradientAccumulationSteps"),
        (ModuleNotFoundError("No module named 'nets'"), "send your own modules with --py-files"),
        (FileNotFoundError(errno.ENOENT, "No such file", "words.txt"), "pyspark.SparkFiles.get"),
        (torch._dynamo.exc.TorchDynamoException("no graph"), "train without compile"),
        (
            AssertionError(
                "FSDP does not support deepcopy. Please use state dict for serialization."
            ),
            "keep the numbers, {name: p.detach().clone()",
        ),
        (RuntimeError("aten.addmm: got mixed torch.Tensor and DTensor"), "call the module itself"),
        (AttributeError("'Tensor' object has no attribute '_local_tensor'"), "torch.autograd"),
    ],
)
def test_errors_that_do_not_say_what_to_do_get_a_remedy(error: Exception, remedy: str) -> None:
    found = describe_failure(error, 1)
    assert found["message"].startswith(str(error))
    assert remedy in found["message"]
    assert (found["kind"], found["host"]) == ("user", socket.gethostname())
    assert describe_failure(ValueError("x"), 1)["message"] == "x"
    whole = FileNotFoundError(errno.ENOENT, "No such file", "/data/words.txt")
    assert describe_failure(whole, 1)["message"] == str(whole)


def test_packages_that_fail_by_themselves_name_a_version_that_nobody_tested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def describe(act: Callable[[], object]) -> str:
        with pytest.raises(TypeError) as caught:
            act()
        error = caught.value
        if act is by_torch:  # without this test's own frame, which is a user's
            assert error.__traceback__ is not None
            error.__traceback__ = error.__traceback__.tb_next.tb_next  # type: ignore[union-attr]
        message: str = describe_failure(error, 0)["message"]
        return message

    def by_torch() -> None:
        torch.distributed.init_process_group(no_such=1)  # type: ignore[call-arg]

    def by_user() -> None:
        raise TypeError("mine")

    monkeypatch.setattr("sparkdl.runtime.versions.TESTED", {"torch": ("2.0", "2.1")})
    assert describe(by_user) == "mine"
    assert describe(by_torch).endswith(" is newer than the newest tested, 2.1")
    monkeypatch.setattr("sparkdl.runtime.versions.TESTED", {"torch": ("2.0", "99")})
    assert "tested" not in describe(by_torch)


def test_a_limit_on_addresses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def told() -> str:
        message: str = describe_failure(MemoryError(), 0)["message"]
        return message

    assert "of addresses" not in told() and told().startswith("no more memory; the worker's")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4 << 30, 4 << 30))
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    monkeypatch.delenv("ARROW_DEFAULT_MEMORY_POOL", raising=False)
    assert "its limit is 4.3 GB of addresses, used or not" in told()
    assert told().endswith(": set spark.executorEnv.ARROW_DEFAULT_MEMORY_POOL=system, for fewer")
    monkeypatch.setenv("ARROW_DEFAULT_MEMORY_POOL", "system")
    assert told().endswith("(spark.executor.pyspark.memory)")


def test_who_has_asked_for_a_missing_module_is_not_told() -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        pickle.loads(b"cnowhere_to_be_found\nNet\n.")
    caught.value.__traceback__ = None
    text = describe_failure(caught.value, 0)["traceback"]
    assert text == "ModuleNotFoundError: No module named 'nowhere_to_be_found'\n"
