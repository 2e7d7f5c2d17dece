from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from sparkdl.comm.communicator import Topology
from sparkdl.comm.topology.shared_sum import PIECE_BYTES, Shared
from sparkdl.errors import CommunicationError
from tests.comm.topology.placing import CPU, arranged
from tests.gang import Gang, started_gang

DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
]
SIZES = [1, 2, 3, 7, 63, 64, 65, 1000, 1001, 40_003, 300_001]


def shared(comm: Any) -> closing[Shared]:
    topology = arranged(comm, "shared")
    assert isinstance(topology.topology, Shared)
    return closing(topology)


def whole_numbers(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Small ones, whose sums every type holds exactly."""
    generator = torch.Generator().manual_seed(100 * rank + numel)
    return torch.randint(0, 9, (numel,), generator=generator).to(dtype)


def reals(rank: int, numel: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(numel, generator=generator)


def test_sums_of_every_type_and_size(gang: Gang) -> None:
    assert gang.run(sum_all) == [0, 0]


@pytest.mark.slow
def test_sums_of_three(gang3: Gang) -> None:
    assert gang3.run(sum_all) == [0, 0, 0]


@pytest.mark.slow
def test_sums_of_four(gang4: Gang) -> None:
    assert gang4.run(sum_all) == [0, 0, 0, 0]


def sum_all(comm: Any) -> int:
    """Compares with gloo, in place and staged; returns the bytes sent."""
    with shared(comm) as topology:
        for dtype in DTYPES:
            for numel in SIZES:
                staged = whole_numbers(comm.rank, numel, dtype)
                inside = topology.allocate(numel, dtype, CPU)
                inside += staged
                expected = staged.to(torch.int32) if dtype == torch.int16 else staged.clone()
                comm.all_reduce(expected)  # gloo has no int16
                expected = expected.to(dtype)
                topology.all_reduce(staged)
                topology.all_reduce(inside)
                assert torch.equal(staged, expected), (dtype, numel)
                assert torch.equal(inside, expected), (dtype, numel)
        return topology.bytes_sent


def test_bits_are_equal_on_all_ranks_and_every_time(gang3: Gang) -> None:
    results = gang3.run(sum_reals)
    in_rank_order = reals(0, 100_001) + reals(1, 100_001) + reals(2, 100_001)
    for rank_results in results:
        for result in rank_results:
            assert torch.equal(result, in_rank_order)


def sum_reals(comm: Any) -> list[torch.Tensor]:
    results = []
    with shared(comm) as topology:
        inside = topology.allocate(100_001, torch.float32, CPU)
        for _ in range(3):
            inside.copy_(reals(comm.rank, 100_001))
            staged = inside.clone()
            topology.all_reduce(inside)
            topology.all_reduce(staged)
            results += [inside.clone(), staged]
    return results


def test_half_precision_is_rounded_once(gang4: Gang) -> None:
    for result in gang4.run(sum_halves):
        assert result == [258.0, 258.0]  # one after the other: 256 + 1 + 0.5 + 0.5 = 256


def sum_halves(comm: Any) -> list[float]:
    mine = [256.0, 1.0, 0.5, 0.5][comm.rank]
    with shared(comm) as topology:
        tensor = torch.tensor([mine, mine], dtype=torch.bfloat16)
        topology.all_reduce(tensor)
    return tensor.tolist()


def test_many_pending(gang: Gang) -> None:
    assert gang.run(start_many) == [True, True]


def start_many(comm: Any) -> bool:
    """Inside and outside of allocations, more than fit into the staging area; waited anyhow."""
    with shared(comm) as topology:
        inside = topology.allocate(90_000, torch.float32, CPU)
        inside.copy_(reals(comm.rank, 90_000))
        tensors = [*inside.split(3_000), *(reals(comm.rank, 40_000, seed) for seed in range(30))]
        tensors.append(reals(comm.rank, 8 * PIECE_BYTES))
        tensors += [reals(comm.rank, 1, seed) for seed in range(100)]
        expected = [tensor.clone() for tensor in tensors]
        for tensor in expected:
            comm.all_reduce(tensor)
        pending = [topology.all_reduce_async(tensor) for tensor in tensors]
        if comm.rank == 0:
            pending.reverse()
        for one in pending:
            one.wait()
            one.wait()
        return all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))


def test_ranks_may_wait_at_different_moments(gang: Gang) -> None:
    assert gang.run(wait_early_or_late) == [[3.0] * 20] * 2


def wait_early_or_late(comm: Any) -> list[float]:
    numel = PIECE_BYTES // 8
    tensors = [torch.full((numel,), comm.rank + 1.0) for _ in range(20)]
    with shared(comm) as topology:
        pending = []
        for tensor in tensors:
            pending.append(topology.all_reduce_async(tensor))
            if comm.rank == 0:
                pending.pop().wait()
        for one in pending:
            one.wait()
    return [tensor.mean().item() for tensor in tensors]


def test_a_rank_that_is_late(gang3: Gang) -> None:
    assert gang3.run(sum_late) == [6.0, 6.0, 6.0]


def sum_late(comm: Any) -> float:
    with shared(comm) as topology:
        tensor = torch.tensor(comm.rank + 1.0)
        time.sleep(0.15 * comm.rank)
        topology.all_reduce(tensor)
        return tensor.item()


def test_other_tensors(gang: Gang) -> None:
    gang.run(sum_others)


def sum_others(comm: Any) -> None:
    """Not contiguous, without elements, parameters, and what the backend must sum."""
    with shared(comm) as topology:
        inside = topology.allocate(12, torch.float32, CPU)
        for matrix in (inside.view(3, 4), torch.zeros(3, 4), torch.zeros(PIECE_BYTES // 2, 2)):
            matrix += comm.rank + 1
            topology.all_reduce(matrix.t()[1:])
            assert matrix[:, 0].tolist() == [comm.rank + 1.0] * len(matrix)
            assert matrix[:, 1:].eq(3).all()
        topology.all_reduce(torch.zeros(0))
        parameter = torch.nn.Parameter(torch.ones(5))
        topology.all_reduce(parameter)
        assert parameter.tolist() == [2.0] * 5
        assert topology.bytes_sent == 0
        number = torch.tensor([1.0 + 1.0j])
        topology.all_reduce(number)
        assert number.item() == 2.0 + 2.0j
        assert topology.bytes_sent == 8
        assert topology.allocate(3, torch.complex64, CPU).tolist() == [0, 0, 0]


def test_the_rest_goes_to_the_backend(gang: Gang) -> None:
    gang.run(call_the_rest)


def call_the_rest(comm: Any) -> None:
    with shared(comm) as topology:
        before = comm.bytes_sent
        peer, mine = 1 - comm.rank, torch.tensor([float(comm.rank)])
        assert topology.all_gather(mine).flatten().tolist() == [0.0, 1.0]
        assert topology.exchange(mine, peer).item() == peer
        assert topology.broadcast_bytes(b"x" if comm.rank == 1 else None, 1) == b"x"
        topology.barrier()
        assert topology.split([[0, 1]]).world_size == 2
        assert topology.bytes_sent > 0
        assert comm.bytes_sent == before


# What can go wrong


def refusals() -> Iterator[tuple[str, int, Callable[[], Any]]]:
    full = OSError(28, "No space left on device")
    yield "posix_fallocate", 0, lambda: mock.patch("os.posix_fallocate", side_effect=full)
    yield "memfd_create", 0, lambda: mock.patch("os.memfd_create", side_effect=full)
    gone = FileNotFoundError(2, "No such file")
    yield "other container", 1, lambda: mock.patch("os.readlink", side_effect=gone)
    stranger = "/memfd:stranger (deleted)"
    yield "other processes", 1, lambda: mock.patch("os.readlink", return_value=stranger)
    yield "no mmap", 1, lambda: mock.patch("mmap.mmap", side_effect=full)
    yield "no locks", 1, lambda: mock.patch("fcntl.lockf", side_effect=full)


REFUSALS = {name: (rank, refusal) for name, rank, refusal in refusals()}


@pytest.mark.parametrize("name", REFUSALS)
def test_all_ranks_fall_back_together(gang: Gang, name: str) -> None:
    for num_logged, num_open in gang.run(fall_back, name):
        assert num_logged == 1
        assert num_open == 0


def open_files() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def fall_back(comm: Any, name: str) -> tuple[int, int]:
    rank, refusal = REFUSALS[name]
    before = open_files()
    with mock.patch("sparkdl.comm.topology.shared_memory.logger") as logger:
        if comm.rank == rank:
            with refusal():
                topology = arranged(comm, "auto")
        else:
            topology = arranged(comm, "auto")
    level = logging.WARNING if comm.rank == 0 else logging.DEBUG
    levels = [call.args[0] for call in logger.log.call_args_list]
    assert type(topology.topology) is Topology
    tensor = torch.ones(3)
    topology.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 3
    return levels.count(level), len(open_files() - before)


def test_an_allocation_that_does_not_fit_is_plain_memory(gang: Gang) -> None:
    gang.run(allocate_too_much)


def allocate_too_much(comm: Any) -> None:
    with shared(comm) as topology:
        with mock.patch("os.posix_fallocate", side_effect=OSError(28, "No space left")):
            plain = topology.allocate(100, torch.float32, CPU)
        plain += 1
        topology.all_reduce(plain)
        assert plain.tolist() == [2.0] * 100
        assert topology.bytes_sent == 0


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["killed", "left", "killed while asleep"])
def test_a_peer_that_is_gone(tmp_path: Path, moment: str) -> None:
    before = set(Path("/dev/shm").iterdir())
    with started_gang(tmp_path, 3) as gang:
        with suppress(EOFError, ConnectionError):  # a killed rank answers nothing
            gang.run(lose_a_peer, moment, str(tmp_path))
        deadline = time.monotonic() + 10
        while len(list(tmp_path.glob("found-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
    for rank in (0, 2):
        error, waited = (tmp_path / f"found-{rank}").read_text().split("\n")
        assert error == "all_reduce failed: rank 1 is gone"
        assert float(waited) < 1
    assert set(Path("/dev/shm").iterdir()) == before


def lose_a_peer(comm: Any, moment: str, folder: str) -> None:
    topology = arranged(comm, "shared")
    tensor = topology.allocate(1000, torch.float32, CPU)
    topology.all_reduce(tensor)
    if comm.rank == 1:
        if moment == "killed while asleep":
            time.sleep(0.5)
        if moment == "left":
            topology.close()
            return
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    for _ in range(2):  # also when it is tried again
        with pytest.raises(CommunicationError) as caught:
            topology.all_reduce(tensor)
    waited = time.monotonic() - started - (0.5 if moment == "killed while asleep" else 0)
    part = Path(folder) / f"part-{comm.rank}"
    part.write_text(f"{caught.value}\n{waited}")
    part.rename(Path(folder) / f"found-{comm.rank}")


def test_the_last_signal_of_a_peer_that_left_counts(gang: Gang) -> None:
    assert gang.run(leave_early) == [2.0, 2.0]


def leave_early(comm: Any) -> float:
    tensor = torch.ones(1)
    with shared(comm) as topology:
        pending = topology.all_reduce_async(tensor)
        if comm.rank == 0:
            time.sleep(0.3)
        pending.wait()
    return tensor.item()


def test_waiting_has_an_end(gang: Gang) -> None:
    gang.run(wait_in_vain)


def wait_in_vain(comm: Any) -> None:
    before, comm.timeout_seconds = comm.timeout_seconds, 0.3
    try:
        with shared(comm) as topology:
            if comm.rank == 0:
                started = time.monotonic()
                for _ in range(2):
                    with pytest.raises(CommunicationError, match=r"did not answer within 0\.3 s"):
                        topology.all_reduce(torch.ones(1))
                assert 0.2 < time.monotonic() - started < 10
            comm.barrier()
    finally:
        comm.timeout_seconds = before


def test_memory_is_given_back(gang: Gang) -> None:
    assert gang.run(count_what_is_left) == [0, 0]


def count_what_is_left(comm: Any) -> int:
    def taken() -> int:
        maps = Path("/proc/self/maps").read_text().count("memfd:sparkdl")
        return maps + len(open_files())

    before = taken()
    with shared(comm) as topology:
        tensor = topology.allocate(1000, torch.float32, CPU)
        topology.all_reduce(tensor)
        assert taken() > before
    del topology, tensor
    return taken() - before


pytestmark = pytest.mark.gang


def test_waiting_for_a_late_rank_is_told_from_summing(gang: Gang) -> None:
    early, late = gang.run(wait_for_the_late)
    assert early > 0.15
    assert late < 0.1


def wait_for_the_late(comm: Any) -> float:
    with shared(comm) as topology:
        topology.all_reduce(torch.ones(10))
        before = topology.waited_seconds
        if comm.rank == 1:
            time.sleep(0.2)
        topology.all_reduce(torch.ones(10))
        return topology.waited_seconds - before
