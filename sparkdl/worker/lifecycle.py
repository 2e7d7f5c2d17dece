"""Every rank of a gang does the same, whatever its work is.

It meets the others, joins torch's process group, works, and reports the result to the driver. It
knows nothing of Spark: the launcher gives it an environment and an order.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.comm.channel import ChannelClient, ChannelStorage
from sparkdl.comm.file_chunks import gathered
from sparkdl.comm.worker_environment import WorkerEnvironment, local_rank, numbered
from sparkdl.errors import (
    CheckpointLost,
    ClusterError,
    CommunicationError,
    GangError,
    SparkDLError,
    StorageError,
)
from sparkdl.runtime.hardware import hardware
from sparkdl.runtime.process import (
    kept_generators,
    spared_collector,
    torch_threads,
    tuned_allocator,
)
from sparkdl.runtime.tracebacks import formatted, is_of_packages
from sparkdl.runtime.versions import difference, untested, versions
from sparkdl.serialization.program.process_settings import settings_of_task
from sparkdl.storage.mounted import Subfolder
from sparkdl.storage.retried import Retried, again
from sparkdl.storage.storage import Storage, open_storage, without_password
from sparkdl.worker.reporter import Reporter, captured_output
from sparkdl.worker.watcher import ended_when_hung

if TYPE_CHECKING:
    import torch

    from sparkdl.comm.communicator import Communicator
    from sparkdl.storage.checkpoint_format import CheckpointInfo, Writer

logger = logging.getLogger(__name__)

RELAYED = "relayed"
"""Folder of the driver's channel behind which ``storage_url`` lies if workers cannot open it."""
_LISTEN_SECONDS = 5.0
"""Pause after which a rank that waits for another's end makes sure that it still reports."""
_MOST_CHARACTERS = 1_000_000
"""Most characters of an error's message, and of its traceback, that travel to the driver."""

Results = list[tuple[str, bytes]]
"""(kind, payload) of what a rank gives back."""


@dataclass(frozen=True, kw_only=True)
class GangOrder:
    """The driver's order to every rank in one attempt, whatever the work. Picklable and small."""

    run_id: str
    run_key: str
    """Names the run's checkpoints."""
    attempt: int
    device: str
    """``auto``, ``cpu`` or ``cuda``."""
    payload: bytes
    """Work to do, by cloudpickle."""
    storage_url: str | None
    """URL of the folder of checkpoints; None: the driver keeps them, if it hosts the channel."""
    relays: bool
    """True if only the driver can open ``storage_url``; it passes files on through its channel."""
    driver_hosts_channel: bool
    resume_path: str | None
    """Checkpoint to go on from, or None."""
    threads: int
    versions: Mapping[str, str]
    """The driver's, which every worker compares with its own."""
    start_timeout_seconds: float
    collective_timeout_seconds: float
    slots_timeout_seconds: float = 0.0
    """Further time that the other workers may take to come: they may wait for slots."""
    heartbeat_timeout_seconds: float = 60.0
    """Silence after which a rank counts as hung."""
    spares_memory: bool = False
    """True if a model is divided, of which a rank may have no room for more; see
    `tuned_allocator`."""

    @property
    def writer(self) -> Writer:
        """The writer as which a rank writes its checkpoints."""
        from sparkdl.storage.checkpoint_format import Writer

        return Writer(run_key=self.run_key, run_id=self.run_id, attempt=self.attempt)


@dataclass(frozen=True, kw_only=True)
class Member:
    """A rank that has met its peers, and what it can use."""

    comm: Communicator
    device: torch.device
    client: ChannelClient
    files: ChannelStorage | None
    """Files that the driver keeps; None if it hosts no channel."""
    reporter: Reporter


def live(
    environment: WorkerEnvironment, order: GangOrder, work: Callable[[Member], Results]
) -> Iterator[tuple[str, bytes]]:
    """Meet the others and do one rank's work; yields ``("error", JSON)`` alone, or its results."""
    client = ChannelClient(environment.channel)
    rank = GangRank(environment, order, client)
    reporter = Reporter(
        client,
        attempt=order.attempt,
        rank=environment.rank,
        task=environment.task,
        heartbeat_timeout_seconds=order.heartbeat_timeout_seconds,
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(client))
        if not order.driver_hosts_channel:  # which would notice a rank that hangs
            stack.enter_context(ended_when_hung(order.heartbeat_timeout_seconds))
        results = reported(reporter, environment.rank, lambda: _work(rank, work, reporter))
        if results and results[0][0] == "error":
            with contextlib.suppress(CommunicationError):  # then rank 0 is gone too
                rank.sign_off()
    yield from results


def reported(reporter: Reporter, rank: int, work: Callable[[], Results]) -> Results:
    """Return what a rank's work gives, or ``("error", JSON)``; its output and end are reported.

    The process's settings are what they were then: Spark has it do other tasks next.
    """
    with reporter, captured_output(reporter) as last_lines, settings_of_task():
        try:
            results = work()
            reporter.send({"kind": "done"})
            return results
        except BaseException as error:  # also SystemExit of the user's code; all of it is reported
            failure = describe_failure(error, rank, last_lines())
            reporter.send({"kind": "error", "failure": failure})
            return [("error", json.dumps(failure).encode())]


def _work(rank: GangRank, work: Callable[[Member], Results], reporter: Reporter) -> Results:
    environment, order = rank.environment, rank.order
    nodes = rank.meet()
    with contextlib.ExitStack() as stack:
        stack.enter_context(spared_collector())
        stack.enter_context(tuned_allocator(spares_memory=order.spares_memory))
        import torch  # after the allocator, so that torch's first blocks are tuned too

        stack.enter_context(kept_generators())

        from sparkdl.runtime.hardware import choose_device

        place = local_rank(nodes, environment.rank)
        device = choose_device(order.device, environment.gpu_addresses, place, os.environ)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        reporter.send({"kind": "hardware", "hardware": hardware(device, order.threads)})
        stack.enter_context(torch_threads(order.threads))
        comm = stack.enter_context(rank.communicator(device, nodes))
        files = None
        if order.driver_hosts_channel:
            seconds = order.collective_timeout_seconds
            files = ChannelStorage(environment.channel, timeout_seconds=seconds)
            stack.enter_context(contextlib.closing(files))
        results = work(
            Member(comm=comm, device=device, client=rank.client, files=files, reporter=reporter)
        )
        rank.leave()
        return results


@dataclass(frozen=True)
class GangRank:
    """A rank that meets its peers and leaves them, through the channel."""

    environment: WorkerEnvironment
    order: GangOrder
    client: ChannelClient

    def meet(self) -> tuple[int, ...]:
        """Wait for all ranks, and compare versions; returns the number of each rank's node.

        Raises:
            ClusterError: a worker runs other versions than the driver.
            CommunicationError: not all ranks came in time.
        """
        address = self.environment.address
        require_same_versions(self.order.versions, f"rank {self.environment.rank} on {address}")
        more = self.order.slots_timeout_seconds
        return numbered(self._gather("hello", f"{address}/{socket.gethostname()}", more))

    @contextlib.contextmanager
    def communicator(self, device: torch.device, nodes: tuple[int, ...]) -> Iterator[Communicator]:
        """Torch's process group of all ranks; CommunicationError if not all came in time."""
        from sparkdl.comm.communicator import LocalCommunicator, ProcessGroupCommunicator
        from sparkdl.comm.process_group import ChannelStore, process_group

        environment, order = self.environment, self.order
        if environment.world_size == 1:
            yield LocalCommunicator()
            return
        with process_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            store=ChannelStore(self.client, timeout_seconds=order.start_timeout_seconds),
            rank=environment.rank,
            world_size=environment.world_size,
            timeout_seconds=order.collective_timeout_seconds,
            address=environment.address,
        ):
            # A rank that is done before its peer has opened all connections would close them on it.
            self._gather("met", "")
            yield ProcessGroupCommunicator(
                nodes=nodes,
                device=str(device),
                timeout_seconds=order.collective_timeout_seconds,
                address=environment.address,
                certificate=environment.channel.worker,
            )

    def leave(self) -> None:
        """A rank 0 that hosts the channel leaves last: CommunicationError if another is silent.

        Not by a collective: the user's function may have ended torch's process group.
        """
        self.sign_off()
        if self.order.driver_hosts_channel or self.environment.rank != 0:
            return
        patience = self.order.collective_timeout_seconds
        for rank in range(1, self.environment.world_size):
            while True:
                try:
                    self.client.wait([f"bye/{rank}"], _LISTEN_SECONDS)
                    break
                except TimeoutError as error:
                    silence = self.client.seconds_since_report(
                        attempt=self.order.attempt, rank=rank
                    )
                    if silence is None or silence > patience:
                        raise CommunicationError(
                            f"rank {rank} has not reported for {patience:g} s"
                        ) from error

    def sign_off(self) -> None:
        """Tell the rank that hosts the channel that this one, failed or not, needs it no more."""
        if self.environment.rank != 0 and not self.order.driver_hosts_channel:
            self.client.set(f"bye/{self.environment.rank}", b"")

    def _gather(self, what: str, value: str, more_seconds: float = 0.0) -> list[str]:
        """Give this rank's value, and wait for those of all ranks."""
        rank, size = self.environment.rank, self.environment.world_size
        seconds = self.order.start_timeout_seconds + more_seconds
        try:
            return self.client.gather(what, rank, size, value, seconds)
        except TimeoutError as error:
            raise CommunicationError(f"not all workers started in time: {error}") from error


def describe_failure(
    error: BaseException, rank: int, last_lines: Sequence[str] = ()
) -> dict[str, Any]:
    """An exception as plain values.

    ``kind`` is ``gang`` for what a restart may heal, ``sparkdl`` for our own errors, which name
    their remedy, and ``user`` for everything else. A program that exits has said why on stderr, in
    its ``last_lines``.
    """
    kind, message = "user", _message(error)
    if isinstance(error, SystemExit) and last_lines:
        message += "; it had last printed to stderr:\n" + "\n".join(last_lines)
    if isinstance(error, SparkDLError):
        kind = "gang" if isinstance(error, GangError) else "sparkdl"
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "kind": kind,
        "type": type(error).__name__,
        "message": message[:_MOST_CHARACTERS] + _remedy(error),
        "traceback": formatted(error)[-_MOST_CHARACTERS:],
    }


_ALONG_MESH = {
    "FSDP does not support deepcopy": "a worker has a part of each weight, and nobody can copy the "
    "module: keep the numbers, {name: p.detach().clone() for name, p in "
    "state.model.named_parameters()}",
    "mixed torch.Tensor and DTensor": "weights are gathered while the module is called, or the "
    "layers that a first step calls: call the module itself, or the same layers in each step",
    "'_local_tensor'": "torch.func does not know the parts of weights that workers have: compute "
    "with torch.autograd, or leave parallelism unset",
}
"""What torch says of divided weights -> why, and what to do."""


def _remedy(error: BaseException) -> str:
    """Say what to do about an error of Python's or torch's that does not say it."""
    if isinstance(error, ModuleNotFoundError):
        return (
            "; the workers cannot import it: send your own modules with --py-files "
            "(spark.submit.pyFiles), sparkContext.addPyFile(path) or spark.addArtifacts(path, "
            "pyfile=True), and install packages there"
        )
    if isinstance(error, FileNotFoundError) and _is_relative(error.filename):
        return (
            f"; this worker's folder is {Path.cwd()}: give the whole path, which all hosts must "
            "have, or send the file with --files (spark.files), and open what "
            "pyspark.SparkFiles.get(name) returns"
        )
    if type(error).__module__.startswith(("torch._dynamo.", "torch._inductor.")):
        return "; torch.compile cannot compile it on this worker: train without compile"
    signs = type(error).__name__ + _message(error)  # torch has a type for GPUs only
    for sign, remedy in _ALONG_MESH.items():
        if sign in signs:
            return f"; along a mesh {remedy}"
    of_torch = "OutOfMemoryError" in signs or "DefaultCPUAllocator" in signs
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and of_torch):
        return (
            "; the worker's memory is too small for this: lower batchSize, raise "
            "gradientAccumulationSteps, which cuts each batch into smaller ones, or divide the "
            f"model among workers with parallelism=Mesh(shard=...){_limit_of_addresses()}"
        )
    of_user = isinstance(error, SparkDLError) or not is_of_packages(error)
    return "" if of_user else untested()


def _is_relative(path: object) -> bool:
    return isinstance(path, str) and not Path(path).is_absolute()


def _limit_of_addresses() -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return ""
    entries = {"MALLOC_ARENA_MAX": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
    unset = [
        f"spark.executorEnv.{name}={value}"
        for name, value in entries.items()
        if os.environ.get(name) != value
    ]
    fewer = f": set {' and '.join(unset)}, for fewer" if unset else ""
    return (
        f"; its limit is {limit / 1e9:.1f} GB of addresses, used or not "
        f"(spark.executor.pyspark.memory){fewer}"
    )


def _message(error: BaseException) -> str:
    try:
        return str(error) or ("no more memory" if isinstance(error, MemoryError) else "")
    except Exception:  # of the user's class; what failed must be reported all the same
        return "(no message: its __str__ failed)"


def checkpoint_storage(order: GangOrder, files: ChannelStorage | None) -> Storage | None:
    """Return the storage to which this rank writes its checkpoints, or None."""
    if order.storage_url is None:
        return None if files is None else Retried(files)
    if not order.relays:
        return Retried(open_storage(order.storage_url))
    assert files is not None
    return Retried(Subfolder(files, RELAYED, without_password(order.storage_url)))


def deliver(
    member: Member, kind: str, name: str, data: Callable[[], Iterable[bytes | memoryview]]
) -> Results:
    """Send a result to the driver: as the file ``name`` over its channel, else as a row.

    A row, too, where the driver cannot take the file, whose disk may be full: what has been
    computed must not be lost for that. ``data`` makes the pieces each time it is called.
    """
    if member.files is not None:
        files = member.files
        try:
            again(lambda: files.write(name, data()))
            return []
        except (StorageError, CommunicationError) as error:
            logger.warning("%s goes to the driver as a row of Spark's: %s", name, error)
    return [(kind, gathered(data()))]


def require_same_versions(expected: Mapping[str, str], where: str) -> None:
    """Raise ClusterError if this worker has other versions than the driver."""
    problem = difference(expected, versions(), where)
    if problem is not None:
        raise ClusterError(problem)


def resumed(
    order: GangOrder, storage: Storage | None, comm: Communicator, now: Mapping[str, str]
) -> tuple[CheckpointInfo, Any] | None:
    """The checkpoint to go on from, and its shared part, which rank 0 reads; or CheckpointLost.

    Collective. ``now`` is what the bits of this run depend on.
    """
    from sparkdl.storage import checkpoint_format as layout

    if order.resume_path is None:
        return None
    assert storage is not None
    with may_be_lost(order):
        info = layout.read_manifest(storage, order.resume_path)
        own = layout.read_file(info, layout.SHARED) if comm.rank == 0 else None
    before = info.environment
    pairs = [(k, v, now.get(k)) for k, v in before.items() if now.get(k) != v]
    changed = [f"{name}: {was:.80} -> {is_now!s:.80}" for name, was, is_now in pairs]
    if comm.rank == 0 and changed:
        logger.warning(
            "the checkpoint was written under other conditions (%s); training goes on, but its "
            "bits will differ from those of an undisturbed run",
            ", ".join(changed),
        )
    data = comm.broadcast_bytes(own)
    return info, layout.decode(data, f"{info.path}/{layout.SHARED}")


@contextlib.contextmanager
def may_be_lost(order: GangOrder) -> Iterator[None]:
    """Raise CheckpointLost if the block cannot read the checkpoint; then another is chosen."""
    try:
        yield
    except StorageError as error:
        raise CheckpointLost(
            f"the checkpoint {order.resume_path} cannot be read: {error}"
        ) from error
