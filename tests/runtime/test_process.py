"""What a worker changes in its process is put back, also after a failure."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from sparkdl.runtime import process
from sparkdl.runtime.process import (
    borrowed_generator,
    cpu_model,
    free_memory_bytes,
    freeze_once,
    memory_bytes,
    memory_groups,
    spared_collector,
    torch_threads,
    tuned_allocator,
)

ROOT = Path(__file__).parents[2]


class FakeLibc:
    """Remembers the allocator's parameters; everything is "set" that glibc would set."""

    def __init__(self) -> None:
        self.parameters: dict[int, int] = {}
        self.trimmed = 0

    def mallopt(self, parameter: int, value: int) -> int:
        self.parameters[parameter] = value
        return 1

    def malloc_trim(self, pad: int) -> int:
        self.trimmed += 1
        return 1


@pytest.fixture
def libc(monkeypatch: pytest.MonkeyPatch) -> FakeLibc:
    fake = FakeLibc()
    monkeypatch.setattr(process, "glibc", lambda: fake)
    return fake


def test_the_allocator_is_restored(libc: FakeLibc) -> None:
    with tuned_allocator():
        inside = dict(libc.parameters)
        assert libc.trimmed == 0
    assert inside[-4] == 0  # M_MMAP_MAX: no block is mapped of its own
    assert inside[-1] == 512 * 2**20  # M_TRIM_THRESHOLD: what stays with the process is bounded
    assert libc.parameters == {-1: 128 * 1024, -2: 128 * 1024, -4: 65536}
    assert set(inside) == set(libc.parameters)
    assert libc.trimmed == 1


def test_large_blocks_go_back_where_memory_is_spared(
    libc: FakeLibc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    with tuned_allocator(spares_memory=True):
        inside = dict(libc.parameters)
    assert (inside[-8], libc.parameters[-8]) == (1, 0)  # M_ARENA_MAX
    libc.parameters.clear()
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    with tuned_allocator(spares_memory=True):
        assert -8 not in libc.parameters  # it is the user's choice
    assert inside[-3] == 4 * 2**20  # M_MMAP_THRESHOLD: larger blocks are mapped, and go at once
    assert -4 not in inside  # as many as there are
    assert (libc.parameters[-1], libc.trimmed) == (128 * 1024, 2)


def test_the_allocator_is_restored_after_a_failure(libc: FakeLibc) -> None:
    with pytest.raises(RuntimeError), tuned_allocator():
        raise RuntimeError
    assert libc.parameters[-4] == 65536
    assert libc.trimmed == 1


def test_without_glibc_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "glibc", lambda: None)
    ran = []
    with tuned_allocator():
        ran.append(1)
    assert ran == [1]


ALLOCATOR = """
import torch
from sparkdl.runtime.process import tuned_allocator

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

before = resident()
with tuned_allocator():
    blocks = [torch.ones(16 * 2**20 // 4) for _ in range(8)]
    print(resident() - before)
    blocks.clear()
    print(resident() - before)
print(resident() - before)
"""


@pytest.mark.slow
def test_the_real_allocator_gives_memory_back() -> None:
    if process.glibc() is None:
        pytest.skip("not glibc")
    # A process of its own: the heap of this one has holes.
    done = subprocess.run(
        [sys.executable, "-c", ALLOCATOR], capture_output=True, text=True, check=True, cwd=ROOT
    )
    taken, kept, left = (int(line) / 2**20 for line in done.stdout.split())
    assert taken > 100
    assert kept > 100  # for the next step
    assert left < 50


def test_threads_are_restored() -> None:
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError), torch_threads(before + 2):
        assert torch.get_num_threads() == before + 2
        raise RuntimeError
    assert torch.get_num_threads() == before


def test_the_cpu_has_a_name() -> None:
    assert cpu_model()
    assert cpu_model() == cpu_model()


def test_torchs_generator_is_restored() -> None:
    before = torch.random.get_rng_state()
    with borrowed_generator(), borrowed_generator(seed=5):
        inside = torch.rand(3)
    assert torch.equal(torch.random.get_rng_state(), before)
    with pytest.raises(RuntimeError), borrowed_generator(seed=5):
        assert torch.equal(torch.rand(3), inside)
        raise RuntimeError
    assert torch.equal(torch.random.get_rng_state(), before)


def test_one_thread_at_a_time_draws_from_torchs_generator() -> None:
    begun = threading.Barrier(2, timeout=30)

    def draw(_: int) -> torch.Tensor:
        begun.wait()
        with borrowed_generator(seed=1):
            return torch.stack([torch.rand(64) for _ in range(500)])

    before = torch.random.get_rng_state()
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(draw, range(2))
    assert torch.equal(one, two)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_memory_is_at_most_that_of_the_machine() -> None:
    assert 0 < memory_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("groups", "files", "limits"),
    [
        ("0::/pods/one\n", {"pods/memory.max": "900", "pods/one/memory.max": "500"}, [900, 500]),
        ("0::/pods/one\n", {"pods/memory.max": "max"}, []),
        ("0::/machine/path\n", {"memory.max": "700"}, [700]),
        (
            "4:memory:/a/b\n2:cpu:/c\n0::/\n",
            {"memory/memory.limit_in_bytes": "9000", "memory/a/b/memory.limit_in_bytes": "300",
             "cpu/c/memory.max": "1"},
            [9000, 300],
        ),
        ("", {}, []),
    ],
)  # fmt: skip
def test_control_groups_limit_it(
    tmp_path: Path, groups: str, files: dict[str, str], limits: list[int]
) -> None:
    (tmp_path / "cgroup").write_text(groups)
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    found = memory_groups(tmp_path / "cgroup", tmp_path / "root")
    assert [group.limit for group in found] == limits
    assert list(memory_groups(tmp_path / "none", tmp_path / "root")) == []


GROUP_OF_VERSION_2 = {
    "memory.max": "1000", "memory.current": "900",
    "memory.stat": "anon 500\nfile 400\nshmem 100\ninactive_file 250\nactive_file 50\n",
}  # fmt: skip
GROUP_OF_VERSION_1 = {
    "memory/memory.limit_in_bytes": "1000", "memory/memory.usage_in_bytes": "900",
    "memory/memory.stat": "inactive_file 1\nactive_file 1\ntotal_inactive_file 250\n"
    "total_active_file 50\n",
}  # fmt: skip


@pytest.mark.parametrize(
    ("groups", "files", "meminfo", "free"),
    [
        ("0::/\n", GROUP_OF_VERSION_2, "MemTotal: 9 kB\nMemAvailable: 8 kB\n", 400),
        ("4:memory:/\n0::/\n", GROUP_OF_VERSION_1, "MemAvailable: 8 kB\n", 400),
        ("0::/\n", {"memory.max": "1000", "memory.current": "1200"}, None, 0),
        ("0::/\n", {"memory.max": "max", "memory.current": "1200"}, "MemAvailable: 8 kB\n", 8192),
        ("0::/\n", GROUP_OF_VERSION_2, "MemAvailable: 0 kB\n", 0),
        ("", {}, None, None),
    ],
)
def test_files_that_the_kernel_keeps_count_as_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    groups: str, files: dict[str, str], meminfo: str | None, free: int | None,
) -> None:  # fmt: skip
    for name, text in {**files, "../groups": groups, "../meminfo": meminfo}.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            (tmp_path / "root").mkdir(exist_ok=True)
            path.write_text(text)
    monkeypatch.setattr(process, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(process, "_GROUP_ROOT", tmp_path / "root")
    monkeypatch.setattr(process, "_MEMINFO", tmp_path / "meminfo")
    assert free_memory_bytes() == free


def test_what_a_worker_has_loaded_leaves_the_garbage_collector_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[str] = []
    for name in ("collect", "freeze"):
        monkeypatch.setattr(gc, name, lambda name=name: called.append(name))
    freeze_once.cache_clear()
    try:
        with pytest.raises(ArithmeticError), spared_collector():
            assert called == []
            raise ArithmeticError
        with spared_collector():
            assert called == ["collect", "freeze"]
        assert called == ["collect", "freeze"]
    finally:
        freeze_once.cache_clear()
