from __future__ import annotations

import contextlib
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from sparkdl.comm.communicator import LocalCommunicator, ProcessGroupCommunicator
from sparkdl.comm.process_group import gloo_at, is_own, process_group
from tests.gang import Gang


def test_alone_every_collective_is_the_identity() -> None:
    comm, mine = LocalCommunicator(), torch.arange(3.0)
    out = torch.empty(1, 3)
    comm.all_gather_async(mine, out).wait()
    assert out.tolist() == comm.all_gather(mine).tolist() == [[0.0, 1.0, 2.0]]
    swapped = torch.empty(1, 3)
    comm.all_to_all_async(out, swapped).wait()
    assert torch.equal(swapped, out)
    assert torch.equal(comm.exchange(mine, 0), mine)
    assert comm.split([[0]]) is comm
    assert comm.bytes_sent == 0
    with pytest.raises(AssertionError):
        comm.send(mine, 1)


@pytest.mark.gang
def test_collectives_and_what_they_send(gang3: Gang) -> None:
    for rank, found in enumerate(gang3.run(call_all)):
        assert found["all_reduce"] == ([6.0, 6.0, 6.0], 2 * 2 * 12 // 3)
        assert found["all_gather"] == ([[1.0], [2.0], [3.0]], 2 * 4)
        assert found["all_to_all"] == ([[float(rank)], [10.0 + rank], [20.0 + rank]], 2 * 4)
        assert found["broadcast"] == ([2.0], 8 if rank == 1 else 0)
        assert found["ring"] == ([float((rank - 1) % 3)], 4)
        assert found["bytes"] == [b"", b"a", b"aa"]


def call_all(comm: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def note(name: str, result: torch.Tensor) -> None:
        found[name] = (result.tolist(), comm.bytes_sent)
        comm.bytes_sent = 0

    comm.bytes_sent = 0
    mine = torch.full((3,), comm.rank + 1.0)
    comm.all_reduce(mine)
    note("all_reduce", mine)
    note("all_gather", comm.all_gather(torch.tensor([comm.rank + 1.0])))
    out = torch.empty(3, 1)
    comm.all_to_all_async(torch.arange(3.0).view(3, 1) + 10 * comm.rank, out).wait()
    note("all_to_all", out)
    mine = torch.tensor([comm.rank + 1.0])
    comm.broadcast(mine, 1)
    note("broadcast", mine)
    mine, theirs = torch.tensor([float(comm.rank)]), torch.empty(1)
    if comm.rank == 0:
        comm.send(mine, 1)
        comm.receive(theirs, 2)
    else:
        comm.receive(theirs, comm.rank - 1)
        comm.send(mine, (comm.rank + 1) % 3)
    note("ring", theirs)
    found["bytes"] = comm.all_gather_bytes(b"a" * comm.rank)
    return found


@pytest.mark.gang
def test_parts_of_a_gang(gang3: Gang) -> None:
    assert gang3.run(call_part) == [
        (0, 2, [0, 1], 2.0, 2.0),
        (0, 1, [0], 1.0, None),
        (1, 2, [0, 1], 2.0, 0.0),
    ]


def call_part(comm: Any) -> tuple[int, int, list[int], float, float | None]:
    part = comm.split([[2, 0], [1]])
    one = torch.ones(1)
    part.all_reduce(one)
    swapped = None
    if part.world_size == 2:
        swapped = part.exchange(torch.tensor([float(comm.rank)]), 1 - part.rank).item()
    return part.rank, part.world_size, list(part.nodes), one.item(), swapped


@pytest.mark.slow
@pytest.mark.gang
def test_a_model_may_outlive_a_group_that_was_destroyed(tmp_path: Path) -> None:
    # With torch alone, nearly every such run hangs within a few groups.
    program = (
        "import sys; from tests.comm.test_communicator import destroy; "
        "destroy(int(sys.argv[1]), sys.argv[2])"
    )
    ranks = [
        subprocess.Popen([sys.executable, "-c", program, str(rank), str(tmp_path)])
        for rank in range(2)
    ]
    try:
        assert [rank.wait(timeout=60) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def destroy(rank: str, folder: str) -> None:
    """Make a group, train and destroy it, often; one rank of two."""
    for number in range(40):
        store = torch.distributed.FileStore(f"{folder}/{number}", 2)
        with process_group(
            backend="gloo", store=store, rank=int(rank), world_size=2, timeout_seconds=30,
            address="127.0.0.1",
        ):  # fmt: skip
            train_and_destroy()


def train_and_destroy() -> None:
    """What a script does whose model lives until its end."""
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(10, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(32, 10)).square().mean().backward()
        optimizer.step()
    torch.distributed.destroy_process_group()


def test_all_groups_have_the_address_and_the_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch itself gives neither to a group: it looks the host's name up, and waits for 30 min."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    before = dist.distributed_c10d.ProcessGroupGloo
    with process_group(
        backend="gloo", store=dist.HashStore(), rank=0, world_size=1, timeout_seconds=7,
        address="127.0.0.2",
    ):  # fmt: skip
        part = ProcessGroupCommunicator(timeout_seconds=7).split([[0]])
        assert isinstance(part, ProcessGroupCommunicator)
        for group in (dist.group.WORLD, part._group):
            backend = group._get_backend(torch.device("cpu"))
            assert backend.options._timeout.total_seconds() == 7
        assert listening() == {"127.0.0.2"}
    assert dist.distributed_c10d.ProcessGroupGloo is before


def test_a_group_takes_what_a_newer_torch_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options that this torch has are set; with others torch makes the group as it knows best."""

    class Newer(dist.ProcessGroupGloo):
        given: ClassVar[dict[str, object]] = {}

        def __init__(self, store: Any, rank: int, size: int, *rest: Any, **later: object) -> None:
            super().__init__(store, rank, size, *rest)
            self.given.update(later)

    monkeypatch.setattr(dist, "ProcessGroupGloo", Newer)
    group, timeout = gloo_at("127.0.0.2"), timedelta(seconds=7)
    known = group(dist.HashStore(), 0, 1, timeout=timeout, _threads=3)
    assert known.options._threads == 3 and listening() == {"127.0.0.2"}
    assert Newer.given == {}
    unknown = group(dist.HashStore(), 0, 1, timeout=timeout, of_a_later_torch=True)
    assert unknown.options._timeout == timeout
    assert Newer.given == {"of_a_later_torch": True}


def test_an_address_of_another_host_is_not_ones_own() -> None:
    """What Spark calls this host may be an address that a network translates."""
    assert is_own("127.0.0.1") and is_own("localhost")
    assert not is_own("198.51.100.7")


def listening() -> set[str]:
    """Addresses at which this process listens."""
    links = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the folder itself
            links.add(entry.readlink().name)
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    found = [row[1][:8] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links]
    return {".".join(str(byte) for byte in bytes.fromhex(one)[::-1]) for one in found}
