"""What does one worker do, from its start to its end?

Read `run` top to bottom. Every rank of the gang calls it, and all of them reach the end or none
does. It knows nothing of Spark: the launcher gives it an environment and an order.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import socket
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import cloudpickle

from sparkdl.channel import ChannelClient, ChannelStorage
from sparkdl.checkpoint.folders import Subfolder
from sparkdl.checkpoint.storage import Storage, open_storage, without_password
from sparkdl.config import TrainConfig
from sparkdl.data.source import ShardSource, SpoolSource
from sparkdl.environment import WorkerEnvironment, difference, local_rank, numbered, versions
from sparkdl.errors import ClusterError, CommunicationError, GangError, SparkDLError
from sparkdl.plan import TrainPlan
from sparkdl.process import cpu_model, torch_threads, tuned_allocator
from sparkdl.reporter import Reporter, captured_output
from sparkdl.windows import WINDOWS, as_text

if TYPE_CHECKING:
    import torch
    from torch import nn

    from sparkdl.checkpoint.manager import CheckpointManager
    from sparkdl.comm import Communicator
    from sparkdl.train.loop import ResumePoint, TrainOutcome

logger = logging.getLogger(__name__)

INITIAL = "initial.safetensors"
FINAL = "final.safetensors"
RELAYED = "relayed"
"""Folder of the driver's channel behind which ``storage_url`` lies if workers cannot open it."""


@dataclass(frozen=True, kw_only=True)
class WorkOrder:
    """What the driver asks of every rank in one attempt. Picklable and small."""

    run_id: str
    run_key: str
    """Names the run's checkpoints; equal for equal data, model and configuration."""
    attempt: int
    plan: TrainPlan
    payload: bytes
    """cloudpickle of ``(TrainConfig, structure of the module)``."""
    weights: bytes | None
    """safetensors of the initial weights; None: read them from the storage."""
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
    source: ShardSource = field(default_factory=SpoolSource)
    """Opens the plan's shards."""


def run(environment: WorkerEnvironment, order: WorkOrder) -> Iterator[tuple[str, bytes]]:
    """Train one rank's replica.

    Yields:
        ``("error", JSON)`` alone, or ``("result", JSON)`` and, from rank 0 when the driver keeps
        no files, ``("weights", safetensors)``.
    """
    scope = f"{order.run_id}/{order.attempt}/"
    client = ChannelClient(environment.channel, scope=scope)
    reporter = Reporter(client, attempt=order.attempt, rank=environment.rank)
    results: list[tuple[str, bytes]] = []
    with contextlib.closing(client), reporter, captured_output(reporter):
        try:
            results = _work(environment, order, client, reporter)
            reporter.send({"kind": "done"})
        except BaseException as error:  # also SystemExit of the user's code; all of it is reported
            failure = describe_failure(error, environment.rank)
            reporter.send({"kind": "error", "failure": failure})
            results = [("error", json.dumps(failure).encode())]
    yield from results


def describe_failure(error: BaseException, rank: int) -> dict[str, Any]:
    """An exception as plain values.

    ``kind`` is ``gang`` for what a restart may heal, ``sparkdl`` for our own errors, which name
    their remedy, and ``user`` for everything else, with the traceback as this worker formats it.
    """
    kind = "user"
    if isinstance(error, SparkDLError):
        kind = "gang" if isinstance(error, GangError) else "sparkdl"
    return {
        "rank": rank,
        "kind": kind,
        "type": type(error).__name__,
        "message": _message(error),
        "traceback": "".join(traceback.format_exception(error)),
    }


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # of the user's class; what failed must be reported all the same
        return "(no message: its __str__ failed)"


def _work(
    environment: WorkerEnvironment, order: WorkOrder, client: ChannelClient, reporter: Reporter
) -> list[tuple[str, bytes]]:
    """Everything between the start of the process's part and its results."""
    nodes = meet(environment, order, client)
    with tuned_allocator():
        import torch  # after the allocator, so that torch's first blocks are tuned too

        from sparkdl.device import choose_device

        config, structure = cloudpickle.loads(order.payload)
        place = local_rank(nodes, environment.rank)
        device = choose_device(config.device, environment.gpu_addresses, place, os.environ)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with (
            torch_threads(order.threads),
            _communicator(environment, order, client, device, nodes) as comm,
        ):
            return _train(environment, order, config, structure, comm, device, client, reporter)


def _train(
    environment: WorkerEnvironment,
    order: WorkOrder,
    config: TrainConfig,
    structure: bytes,
    comm: Communicator,
    device: torch.device,
    client: ChannelClient,
    reporter: Reporter,
) -> list[tuple[str, bytes]]:
    from sparkdl.train.loop import train

    reporter.phase("setup")
    plan, mine = order.plan, order.plan.shards_of(comm.rank)
    with contextlib.ExitStack() as stack:
        files = None
        if order.driver_hosts_channel:
            files = ChannelStorage(
                environment.channel, transfer_timeout_seconds=order.collective_timeout_seconds
            )
            stack.enter_context(contextlib.closing(files))
        module = _module(order, structure, files, comm)
        storage = _storage(order, files)
        checkpoints = None
        if storage is not None:
            checkpoints = stack.enter_context(_checkpoints(order, config, storage, comm, client))
        outcome = train(
            module=module,
            config=config,
            plan=plan,
            shards=order.source.open(plan, mine, "train"),
            validation=order.source.open(plan, mine, "validation"),
            comm=comm,
            device=device,
            checkpoints=checkpoints,
            resume=_resume_point(order, storage, comm),
            observer=reporter,
        )
        reporter.phase("finish")
        if checkpoints is not None and order.storage_url is not None:
            end = outcome.final
            checkpoints.final(end.step, end.shared, end.rank_state)
        report = _report(outcome, reporter.rows, checkpoints)
        results = [("result", json.dumps(report).encode())]
        if comm.rank == 0:
            results += _deliver(module, files)
        comm.barrier()  # nobody leaves, taking channel or files along, while a peer needs them
    return results


def _storage(order: WorkOrder, files: ChannelStorage | None) -> Storage | None:
    """Where this rank writes its checkpoints, or None."""
    if order.storage_url is None:
        return files
    if not order.relays:
        return open_storage(order.storage_url)
    assert files is not None
    return Subfolder(files, RELAYED, without_password(order.storage_url))


def _module(
    order: WorkOrder, structure: bytes, files: ChannelStorage | None, comm: Communicator
) -> nn.Module:
    """The module with its initial weights, which rank 0 reads and all ranks get."""
    from sparkdl.packing import PackedModule, unpack

    weights = order.weights
    if weights is None:
        assert files is not None
        weights = comm.broadcast_bytes(files.read(INITIAL) if comm.rank == 0 else None)
    return unpack(PackedModule(digest="", skeleton=structure, tensors=weights))


@contextlib.contextmanager
def _checkpoints(
    order: WorkOrder,
    config: TrainConfig,
    storage: Storage,
    comm: Communicator,
    client: ChannelClient,
) -> Iterator[CheckpointManager]:
    """The manager; on success it ends what it has begun, after a failure it abandons it."""
    from sparkdl.checkpoint.manager import CheckpointManager

    manager = CheckpointManager(
        storage,
        config.checkpoint,
        rank=comm.rank,
        world_size=comm.world_size,
        run_key=order.run_key,
        environment=_bits_depend_on(order),
        signal=client,
        timeout_seconds=order.collective_timeout_seconds,
    )
    try:
        yield manager
    except BaseException:
        manager.close(abort=True)
        raise
    manager.close()


def _bits_depend_on(order: WorkOrder) -> dict[str, str]:
    """What must be equal, besides the world size, for a resumed run to give the same bits."""
    # Spark may hash or cut the rows otherwise than before: shards tell by their fingerprints.
    rows = hashlib.sha256("".join(s.fingerprint for s in order.plan.shards).encode()).hexdigest()
    own = {
        "cpu": cpu_model(),
        "threads": str(order.threads),
        "rows": rows[:16],
        WINDOWS: as_text(order.plan.windows),
    }
    return {**versions(), **own}


def _resume_point(
    order: WorkOrder, storage: Storage | None, comm: Communicator
) -> ResumePoint | None:
    """The checkpoint to go on from; rank 0 reads the shared part and all ranks get it."""
    from sparkdl.checkpoint import format as layout
    from sparkdl.train.loop import ResumePoint

    if order.resume_path is None:
        return None
    assert storage is not None
    info = layout.read_manifest(storage, order.resume_path)
    now = _bits_depend_on(order)
    if comm.rank == 0:
        _say_what_differs(info.environment, now)
    data = comm.broadcast_bytes(layout.read_file(info, layout.SHARED) if comm.rank == 0 else None)
    same_shards = info.world_size == comm.world_size and info.environment.get("rows") == now["rows"]
    return ResumePoint(
        step=info.step,
        shared=layout.decode(data, f"{info.path}/{layout.SHARED}"),
        rank_state=layout.load_rank(info, comm.rank) if same_shards else None,
    )


def _say_what_differs(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    changed = [f"{k}: {v} -> {now.get(k)}" for k, v in before.items() if now.get(k) != v]
    if changed:
        logger.warning(
            "the checkpoint was written under other conditions (%s); training goes on, but its "
            "bits will differ from those of an undisturbed run",
            ", ".join(changed),
        )


def _report(
    outcome: TrainOutcome, rows: int, checkpoints: CheckpointManager | None
) -> dict[str, Any]:
    """What the driver's summary needs of one rank; ``rows`` are those it has trained on."""
    busy = sum(outcome.seconds[name] for name in ("data", "compute", "communication"))
    stall = checkpoints.stall_seconds if checkpoints is not None else 0.0
    return {
        "history": outcome.history,
        "steps": outcome.steps,
        "seconds": {**outcome.seconds, "checkpoint stall": stall},
        "rows_per_second": rows / busy if busy > 0 else 0.0,
        "bytes_sent": outcome.bytes_sent,
    }


def _deliver(module: nn.Module, files: ChannelStorage | None) -> list[tuple[str, bytes]]:
    """Send the trained weights to the driver: over its channel, else as rows."""
    from sparkdl.checkpoint.format import encode
    from sparkdl.checkpoint.tree import snapshot

    chunks = encode(snapshot(module.state_dict()))
    if files is None:
        return [("weights", b"".join(chunks))]
    files.write(FINAL, chunks)
    return []


def meet(
    environment: WorkerEnvironment, order: WorkOrder, client: ChannelClient
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
    client.set(f"hello/{environment.rank}", host.encode())
    keys = [f"hello/{rank}" for rank in range(environment.world_size)]
    try:
        client.wait(keys, order.start_timeout_seconds)
    except TimeoutError as error:
        raise CommunicationError(f"not all workers started in time: {error}") from error
    hosts = [(client.get(key) or b"").decode() for key in keys]
    return numbered(hosts)


@contextlib.contextmanager
def _communicator(
    environment: WorkerEnvironment,
    order: WorkOrder,
    client: ChannelClient,
    device: torch.device,
    nodes: tuple[int, ...],
) -> Iterator[Communicator]:
    from sparkdl.comm import LocalCommunicator, ProcessGroupCommunicator, process_group
    from sparkdl.store import ChannelStore

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
        yield ProcessGroupCommunicator(
            nodes=nodes,
            device=str(device),
            options=options,
            timeout_seconds=order.collective_timeout_seconds,
            address=environment.address,
        )
