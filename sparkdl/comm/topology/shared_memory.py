"""Memory that the processes of one node share, through a file that has no name anywhere.

Rank 0 makes an anonymous file in memory (``memfd_create``), which its peers open by way of its
entry in ``/proc``. The kernel frees it with the last process that has it open or mapped; and the
size of ``/dev/shm``, 64 MB in many containers, is no limit. All pages are taken at once
(``posix_fallocate``), so that a lack of memory is an error here, instead of a signal at some later
access. A machine or container without room would end a process even so: what is free is looked at.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import secrets

from sparkdl.comm.communicator import Communicator
from sparkdl.errors import GangError
from sparkdl.runtime.process import free_memory_bytes

logger = logging.getLogger(__name__)

_SPARE_BYTES = 64 << 20
"""Memory that others take between a look at what is free and the end of taking it."""


class NoSharedMemory(GangError):
    """The ranks cannot share memory; all of them raise it together."""


class SharedFile:
    """Zeros that all ranks of a node have mapped: ``buffer``, and ``descriptor`` until `close`."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self.buffer = mmap.mmap(descriptor, num_bytes, flags=flags)
        self.descriptor = descriptor

    def close(self) -> None:
        """Close the file; the mapping stays."""
        os.close(self.descriptor)

    def discard(self) -> None:
        """Close the file and unmap it; nothing may refer to the mapping any more."""
        self.close()
        self.buffer.close()


def map_together(local: Communicator, num_bytes: int, everyone: Communicator) -> SharedFile:
    """Map a new file of ``num_bytes`` for the ranks ``local`` of each node.

    Collective over ``everyone``: all get their nodes' files together, or all raise NoSharedMemory.
    """
    file, problem, descriptor = None, "", -1
    try:
        descriptor = _open(local, num_bytes)
        file = SharedFile(descriptor, num_bytes)
    except (NoSharedMemory, OSError) as error:
        problem = str(error)
    try:
        agree(everyone, problem)  # after it, rank 0 may close the file
    except BaseException:
        if file is not None:
            file.discard()
        elif descriptor >= 0:
            os.close(descriptor)
        raise
    assert file is not None
    return file


def agree(everyone: Communicator, problem: str) -> None:
    """Raise NoSharedMemory on all ranks with the problem of the first that has one. Collective."""
    for rank, answer in enumerate(everyone.all_gather_bytes(problem.encode())):
        if answer:
            raise NoSharedMemory(f"rank {rank}: {answer.decode()}")


def say(everyone: Communicator, text: str, *arguments: object) -> None:
    """Log what all ranks have met: rank 0 as a warning."""
    level = logging.WARNING if everyone.rank == 0 else logging.DEBUG
    logger.log(level, text, *arguments)


def _open(local: Communicator, num_bytes: int) -> int:
    """A descriptor of the file that rank 0 of the node makes. Collective over ``local``."""
    with contextlib.ExitStack() as stack:
        offer, descriptor = None, -1
        if local.rank == 0:
            name, problem = f"sparkdl-{secrets.token_hex(8)}", ""
            try:
                descriptor = _create(name, num_bytes)
                stack.callback(os.close, descriptor)
            except OSError as error:
                problem = str(error)
            offer = json.dumps((f"/proc/{os.getpid()}/fd/{descriptor}", name, problem)).encode()
        path, name, problem = json.loads(local.broadcast_bytes(offer))
        if problem:
            raise NoSharedMemory(problem)
        if local.rank:
            # Under another container's process numbers the path may lead to a file of a stranger.
            if os.readlink(path) != f"/memfd:{name} (deleted)":  # noqa: PTH115  # no path there
                raise NoSharedMemory(
                    "it does not see the processes of its node; is it in a container?"
                )
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        stack.pop_all()
        return descriptor


def _create(name: str, num_bytes: int) -> int:
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memfd_create")
    free = free_memory_bytes()
    if free is not None and num_bytes > free - _SPARE_BYTES:
        raise OSError(
            f"it takes {num_bytes >> 20} MiB and {free >> 20} MiB are free in this container or "
            f"machine, of which {_SPARE_BYTES >> 20} MiB are left to others; give the executors "
            "more memory (spark.executor.memoryOverhead)"
        )
    descriptor = os.memfd_create(name)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
