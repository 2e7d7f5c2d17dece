"""The settings of a process that are changed for our work, and put back afterwards.

Spark reuses its Python workers for other tasks, and the driver's process is the user's, so
everything changed here is restored.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import logging
import os
import platform
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

lent = threading.RLock()
"""Held by whoever borrows what is the process's, such as its generators, maybe more than once."""

# glibc's mallopt parameters and defaults, from malloc.h and mallopt(3)
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -2, -3, -4, -8
_DEFAULTS = {_TRIM_THRESHOLD: 128 * 1024, _MMAP_MAX: 65536, _TOP_PAD: 128 * 1024, _ARENA_MAX: 0}
_TUNED = {_TRIM_THRESHOLD: 512 * 2**20, _MMAP_MAX: 0, _TOP_PAD: 16 * 2**20}
_SPARING = {
    _TRIM_THRESHOLD: 64 * 2**20, _MMAP_THRESHOLD: 4 * 2**20, _TOP_PAD: 2**20, _ARENA_MAX: 1,
}  # fmt: skip


@contextlib.contextmanager
def tuned_allocator(*, spares_memory: bool = False) -> Iterator[None]:
    """Keep freed memory in the process for the time of the block (glibc only).

    By default glibc maps and unmaps large blocks at every use, and the page faults take up to
    half of the CPU time of training small models. At most 512 MiB of free memory stay with the
    process, and are given back at the end. Between blocks in use there may be more: over two fifths
    of what the tensors took, where layers were gathered and freed one by one. So with
    ``spares_memory`` blocks of 4 MiB and more go back at once, and of others 64 MiB stay. Threads
    then share one arena, since each reserves 64 MiB of addresses, which Spark's limit counts.
    """
    libc = glibc()
    if libc is None:
        yield
        return
    chosen = dict(_SPARING if spares_memory else _TUNED)
    if "MALLOC_ARENA_MAX" in os.environ:
        chosen.pop(_ARENA_MAX, None)
    for parameter, value in chosen.items():
        libc.mallopt(parameter, value)
    try:
        yield
    finally:
        for parameter in chosen.keys() & _DEFAULTS.keys():
            libc.mallopt(parameter, _DEFAULTS[parameter])
        give_back_memory()


def give_back_memory() -> None:
    """Give the system the memory that this process has freed and kept (glibc only)."""
    libc = glibc()
    if libc is not None:
        libc.malloc_trim(0)


@contextlib.contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Let torch compute with ``number`` threads for the time of the block."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Let torch make floating tensors of ``dtype`` for the time of the block."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def spared_collector() -> Iterator[None]:
    """Spare the garbage collector what a task of Spark's has loaded, after its process's first one.

    Spark has its Python workers collect after every task. With torch in memory each of these
    rounds takes 0.2 s of CPU time, and the worker's next task waits for it.
    """
    try:
        yield
    finally:
        freeze_once()


@functools.cache
def freeze_once() -> None:
    """Leave what this process holds out of all later rounds of the garbage collector."""
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def kept_generators() -> Iterator[None]:
    """Leave torch's generator of the CPU, numpy's and Python's as they were."""
    import random

    import numpy as np
    import torch

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


@contextlib.contextmanager
def borrowed_generator(seed: int | None = None) -> Iterator[None]:
    """Draw from torch's generator of the CPU, then leave it, numpy's and Python's as they were.

    They belong to the process, and fits may run on several threads at once, as those of a
    CrossValidator do: one block waits for another. Without a seed it goes on from its state, as
    the other two always do.
    """
    import torch

    with lent, kept_generators():
        if seed is not None:
            torch.manual_seed(seed)
        yield


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators of torch's CPU, numpy and Python, then leave them as they were."""
    import random

    import numpy as np

    with borrowed_generator(seed):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        yield


def glibc() -> ctypes.CDLL | None:
    """Return the C library if it is glibc, whose allocator can be tuned."""
    if platform.libc_ver()[0] != "glibc":
        return None
    try:
        return ctypes.CDLL("libc.so.6")
    except OSError as error:
        logger.debug("cannot load libc to tune its allocator: %s", error)
        return None


def cpu_model() -> str:
    """Name of the CPU type, which decides the bits of floating-point results."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


_GROUPS, _GROUP_ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def memory_bytes() -> int:
    """Memory that this process may use: that of the machine, or less if a control group limits it.

    Of a container that is the container's, whatever its machine has.
    """
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [group.limit for group in memory_groups(_GROUPS, _GROUP_ROOT)]
    return min([physical, *limits])


def free_memory_bytes() -> int | None:
    """Memory that can still be taken before the kernel ends a process; None: not known here.

    What the kernel keeps of files counts as free: it gives that back when memory is asked for.
    """
    free = [group.free for group in memory_groups(_GROUPS, _GROUP_ROOT)]
    with contextlib.suppress(OSError), _MEMINFO.open(encoding="utf-8") as file:
        lines = (line.split() for line in file)
        free += [int(words[1]) << 10 for words in lines if words[0] == "MemAvailable:"]
    return min(free, default=None)


@dataclass(frozen=True, kw_only=True)
class MemoryGroup:
    """A control group that limits memory, in bytes."""

    limit: int
    usage: int
    """Memory that its processes have taken, the kernel's copies of their files included."""
    files: int
    """Such copies, which the kernel gives back."""

    @property
    def free(self) -> int:
        """Bytes that its processes can still take."""
        return max(0, self.limit - self.usage + self.files)


def memory_groups(groups: Path, root: Path) -> Iterator[MemoryGroup]:
    """The process's control groups and those above that have a limit, of both versions (Linux).

    ``groups`` is the file that lists them; ``root`` is where they are mounted.
    """
    lines = groups.read_text(encoding="utf-8").splitlines() if groups.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        folder, limit_name, usage_name = root, "memory.max", "memory.current"
        if "memory" in controllers.split(","):
            folder = root / "memory"
            limit_name, usage_name = "memory.limit_in_bytes", "memory.usage_in_bytes"
        elif controllers:
            continue
        # In a container the path may be the machine's, of which only the container's end is here.
        for part in ("", *Path(path).parts[1:]):
            folder = folder / part
            limit, usage = _number_in(folder / limit_name), _number_in(folder / usage_name)
            if limit is not None:
                yield MemoryGroup(limit=limit, usage=usage or 0, files=_file_bytes(folder))


def _number_in(path: Path) -> int | None:
    """The number in a file of a group; None if it is absent, or there is no limit."""
    text = path.read_text(encoding="utf-8").strip() if path.exists() else "max"
    return None if text == "max" else int(text)


def _file_bytes(group: Path) -> int:
    """Copies of files that a group holds, those of the groups inside it included."""
    stat = group / "memory.stat"
    lines = stat.read_text(encoding="utf-8").splitlines() if stat.exists() else []
    found = {name: int(value) for name, _, value in (line.partition(" ") for line in lines)}
    prefix = "total_" if "total_inactive_file" in found else ""
    return sum(found.get(f"{prefix}{state}_file", 0) for state in ("active", "inactive"))
