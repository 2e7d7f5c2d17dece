"""What does every rank of a gang do, whatever its work is?

It says hello, waits for the others, joins torch's process group, works, and tells the driver what
came of it. It knows nothing of Spark: the launcher gives it an environment and an order.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkdl.comm.channel import ChannelClient, ChannelStorage
from sparkdl.comm.worker_environment import WorkerEnvironment, local_rank, numbered
from sparkdl.errors import ClusterError, CommunicationError, GangError, SparkDLError
from sparkdl.runtime.hardware import hardware
from sparkdl.runtime.process import torch_threads, tuned_allocator
from sparkdl.runtime.versions import difference, versions
from sparkdl.storage.mounted import Subfolder
from sparkdl.storage.storage import Storage, open_storage, without_password
from sparkdl.worker.reporter import Reporter, captured_output

if TYPE_CHECKING:
    import torch

    from sparkdl.comm.communicator import Communicator

logger = logging.getLogger(__name__)

RELAYED = "relayed"
"""Folder of the driver's channel behind which ``storage_url`` lies if workers cannot open it."""

_LISTEN_SECONDS = 5.0
"""How often a rank that waits for another's end makes sure that it is still heard."""

Results = list[tuple[str, bytes]]
"""(kind, payload) of what a rank gives back."""


@dataclass(frozen=True, kw_only=True)
class GangOrder:
    """What the driver asks of every rank in one attempt, whatever the work. Picklable and small."""

    run_id: str
    run_key: str
    """Names the run's checkpoints."""
    attempt: int
    device: str
    """``auto``, ``cpu`` or ``cuda``."""
    payload: bytes
    """What the work is, by cloudpickle."""
    storage_url: str | None
    """Where checkpoints lie; None: the driver keeps them, if it hosts the channel."""
    relays: bool
    """Whether only the driver can open ``storage_url``, and passes files on through its channel."""
    driver_hosts_channel: bool
    resume_path: str | None
    """Checkpoint to go on from, or None."""
    threads: int
    versions: Mapping[str, str]
    """The driver's, which every worker compares with its own."""
    start_timeout_seconds: float
    collective_timeout_seconds: float


@dataclass(frozen=True, kw_only=True)
class Member:
    """A rank that has met its peers, and what it can use."""

    environment: WorkerEnvironment
    nodes: tuple[int, ...]
    """Number of each rank's node."""
    comm: Communicator
    device: torch.device
    client: ChannelClient
    files: ChannelStorage | None
    """What the driver keeps; None if it hosts no channel."""
    reporter: Reporter


def live(
    environment: WorkerEnvironment, order: GangOrder, work: Callable[[Member], Results]
) -> Iterator[tuple[str, bytes]]:
    """Meet the others and do one rank's work.

    Yields:
        ``("error", JSON)`` alone, or what the work gave.
    """
    scope = f"{order.run_id}/{order.attempt}/"
    client = ChannelClient(environment.channel, scope=scope)
    reporter = Reporter(client, attempt=order.attempt, rank=environment.rank)
    results: Results = []
    with contextlib.closing(client), reporter, captured_output(reporter) as last_lines:
        try:
            results = _work(environment, order, work, client, reporter)
            reporter.send({"kind": "done"})
        except BaseException as error:  # also SystemExit of the user's code; all of it is reported
            failure = describe_failure(error, environment.rank, last_lines())
            reporter.send({"kind": "error", "failure": failure})
            with contextlib.suppress(CommunicationError):  # then rank 0 is gone too
                _say_farewell(environment, order, client)
            results = [("error", json.dumps(failure).encode())]
    yield from results


def _work(
    environment: WorkerEnvironment,
    order: GangOrder,
    work: Callable[[Member], Results],
    client: ChannelClient,
    reporter: Reporter,
) -> Results:
    """Everything between the start of the process's part and its results."""
    nodes = meet(environment, order, client)
    with contextlib.ExitStack() as stack:
        stack.enter_context(tuned_allocator())
        import torch  # after the allocator, so that torch's first blocks are tuned too

        from sparkdl.runtime.hardware import choose_device

        place = local_rank(nodes, environment.rank)
        device = choose_device(order.device, environment.gpu_addresses, place, os.environ)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        reporter.send({"kind": "hardware", "hardware": hardware(device, order.threads)})
        stack.enter_context(torch_threads(order.threads))
        comm = stack.enter_context(_communicator(environment, order, client, device, nodes))
        files = None
        if order.driver_hosts_channel:
            seconds = order.collective_timeout_seconds
            files = ChannelStorage(environment.channel, transfer_timeout_seconds=seconds)
            stack.enter_context(contextlib.closing(files))
        results = work(
            Member(
                environment=environment,
                nodes=nodes,
                comm=comm,
                device=device,
                client=client,
                files=files,
                reporter=reporter,
            )
        )
        _leave(environment, order, client)
        return results


def _leave(environment: WorkerEnvironment, order: GangOrder, client: ChannelClient) -> None:
    """A rank 0 that hosts the channel leaves last: the others need it to the end.

    Not by a collective: the user's function may have ended torch's process group. It waits as long
    as the others are heard, for their work may well take longer than its own.

    Raises:
        CommunicationError: a rank is silent.
    """
    if order.driver_hosts_channel or environment.rank != 0:
        _say_farewell(environment, order, client)
        return
    for rank in range(1, environment.world_size):
        while True:
            try:
                client.wait([_farewell(rank)], _LISTEN_SECONDS)
                break
            except TimeoutError as error:
                silence = client.silence(attempt=order.attempt, rank=rank)
                if silence is None or silence > order.collective_timeout_seconds:
                    raise CommunicationError(
                        f"rank {rank} has not been heard for {order.collective_timeout_seconds:g} s"
                    ) from error


def _say_farewell(environment: WorkerEnvironment, order: GangOrder, client: ChannelClient) -> None:
    """Tell the rank that hosts the channel that this one needs it no more, whatever became of it.

    A failed rank too, or its error would reach the driver only when rank 0 had given it up.
    """
    if environment.rank != 0 and not order.driver_hosts_channel:
        client.set(_farewell(environment.rank), b"")


def _farewell(rank: int) -> str:
    return f"bye/{rank}"


def describe_failure(
    error: BaseException, rank: int, last_lines: Sequence[str] = ()
) -> dict[str, Any]:
    """An exception as plain values.

    ``kind`` is ``gang`` for what a restart may heal, ``sparkdl`` for our own errors, which name
    their remedy, and ``user`` for everything else, with the traceback as this worker formats it.
    A program that exits says why on stderr, such as how it is to be called: these are its
    ``last_lines``.
    """
    kind, message = "user", _message(error)
    if isinstance(error, SystemExit) and last_lines:
        message += "; it had last printed to stderr:\n" + "\n".join(last_lines)
    if isinstance(error, SparkDLError):
        kind = "gang" if isinstance(error, GangError) else "sparkdl"
    return {
        "rank": rank,
        "kind": kind,
        "type": type(error).__name__,
        "message": message,
        "traceback": "".join(traceback.format_exception(error)),
    }


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # of the user's class; what failed must be reported all the same
        return "(no message: its __str__ failed)"


def checkpoint_storage(order: GangOrder, files: ChannelStorage | None) -> Storage | None:
    """Where this rank writes its checkpoints, or None."""
    if order.storage_url is None:
        return files
    if not order.relays:
        return open_storage(order.storage_url)
    assert files is not None
    return Subfolder(files, RELAYED, without_password(order.storage_url))


def say_what_differs(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Warn that the bits of a resumed run will be others than those of an undisturbed one."""
    changed = [f"{k}: {v} -> {now.get(k)}" for k, v in before.items() if now.get(k) != v]
    if changed:
        logger.warning(
            "the checkpoint was written under other conditions (%s); training goes on, but its "
            "bits will differ from those of an undisturbed run",
            ", ".join(changed),
        )


def meet(
    environment: WorkerEnvironment, order: GangOrder, client: ChannelClient
) -> tuple[int, ...]:
    """Wait for all ranks, compare versions, and find out who shares a node.

    Returns:
        Number of each rank's node.

    Raises:
        ClusterError: a worker runs other versions than the driver.
        CommunicationError: not all ranks came in time.
    """
    host = f"{environment.address}/{socket.gethostname()}"
    where = f"rank {environment.rank} on {environment.address}"
    problem = difference(order.versions, versions(), where)
    if problem is not None:
        raise ClusterError(problem)
    keys = _gather("hello", host.encode(), environment, order, client)
    hosts = [(client.get(key) or b"").decode() for key in keys]
    return numbered(hosts)


def _gather(
    what: str,
    value: bytes,
    environment: WorkerEnvironment,
    order: GangOrder,
    client: ChannelClient,
) -> list[str]:
    """Set this rank's key and wait for those of all ranks, which it returns.

    Raises:
        CommunicationError: not all ranks came in time.
    """
    client.set(f"{what}/{environment.rank}", value)
    keys = [f"{what}/{rank}" for rank in range(environment.world_size)]
    try:
        client.wait(keys, order.start_timeout_seconds)
    except TimeoutError as error:
        raise CommunicationError(f"not all workers started in time: {error}") from error
    return keys


@contextlib.contextmanager
def _communicator(
    environment: WorkerEnvironment,
    order: GangOrder,
    client: ChannelClient,
    device: torch.device,
    nodes: tuple[int, ...],
) -> Iterator[Communicator]:
    from sparkdl.comm.communicator import LocalCommunicator, ProcessGroupCommunicator
    from sparkdl.comm.process_group import process_group
    from sparkdl.comm.rendezvous_store import ChannelStore

    if environment.world_size == 1:
        yield LocalCommunicator()
        return
    store = ChannelStore(client, timeout_seconds=order.start_timeout_seconds)
    with process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=environment.rank,
        world_size=environment.world_size,
        timeout_seconds=order.collective_timeout_seconds,
        address=environment.address,
    ) as options:
        # A rank that is done before its peer has opened all connections would close them on it.
        _gather("met", b"", environment, order, client)
        yield ProcessGroupCommunicator(
            nodes=nodes,
            device=str(device),
            options=options,
            timeout_seconds=order.collective_timeout_seconds,
            address=environment.address,
        )
