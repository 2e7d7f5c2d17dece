"""A rank of a gang that runs a user's training function or script.

The function runs in the gang's process, between the meeting of the ranks and their results;
`context.Context` is what it sees of them.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import cloudpickle

from sparkdl.comm.access import OF_DRIVER
from sparkdl.comm.worker_environment import WorkerEnvironment
from sparkdl.errors import CheckpointError, CollectiveError, ConfigError
from sparkdl.runtime.versions import versions
from sparkdl.storage.retried import OUTAGE_SECONDS, again
from sparkdl.worker.lifecycle import (
    GangOrder,
    Member,
    Results,
    checkpoint_storage,
    deliver,
    live,
    may_be_lost,
    resumed,
)

if TYPE_CHECKING:
    import torch

    from sparkdl.comm.communicator import Communicator
    from sparkdl.data.plan import Holding
    from sparkdl.mesh import Mesh
    from sparkdl.storage.checkpoint_format import CheckpointInfo, Writer
    from sparkdl.storage.checkpoint_writer import CheckpointManager, KeyValue
    from sparkdl.storage.storage import Storage
    from sparkdl.worker.context import Context, Save
    from sparkdl.worker.function_loader import DataSet

logger = logging.getLogger(__name__)

FUNCTION = f"{OF_DRIVER}/function.pkl"
"""File of the driver that holds a function too large for the task."""
VALUE = "value-{}.pkl"
"""File of the driver that holds what a rank's function returned."""
_DTYPES = "?bhilqBHILQefdgFDGSUMm"
"""numpy's letters for what pickles of arrays may hold."""


@dataclass(frozen=True)
class Script:
    """A program that every rank runs, as ``python name arguments`` would."""

    name: str
    source: str
    arguments: tuple[str, ...]

    def __call__(self) -> None:
        """Run it as ``__main__``; what it imports from its own folder must be shipped otherwise."""
        # Spark removes its own folders, also after a worker that was killed.
        place = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or None
        with tempfile.TemporaryDirectory(prefix="sparkdl-script-", dir=place) as folder:
            path = Path(folder) / self.name
            path.write_text(self.source, encoding="utf-8")
            before = sys.argv
            sys.argv = [str(path), *self.arguments]
            try:
                runpy.run_path(str(path), run_name="__main__")
            finally:
                sys.argv = before


@dataclass(frozen=True, kw_only=True)
class FunctionOrder(GangOrder):
    """The driver's order to every rank to call a function."""

    payload: bytes
    """cloudpickle of a callable without arguments; empty: it is in the driver's `FUNCTION`."""
    sets: Mapping[str, DataSet] = field(default_factory=dict)
    results: Literal["first", "all"] = "first"
    """Ranks whose value the driver gets."""
    keep: int = 2
    """Checkpoints that are kept."""
    holding: Holding = "here"
    """How ranks come to their shards."""
    mesh: Mesh | None = None
    """Mesh of the ranks; None: each reads rows of its own."""


def run(environment: WorkerEnvironment, order: FunctionOrder) -> Iterator[tuple[str, bytes]]:
    """Call the function.

    Yields:
        ``("error", JSON)`` alone, or, where the driver keeps no files or cannot take this one,
        ``("value", pickle)`` of the ranks whose value is wanted; rank 0's has the reported metrics
        besides.
    """
    yield from live(environment, order, partial(_call, order))


def _call(order: FunctionOrder, member: Member) -> Results:
    from sparkdl.comm.process_group import lost_peers, peer_errors
    from sparkdl.worker.context import Context, entered
    from sparkdl.worker.function_mesh import device_mesh

    function = _loaded(order, member)
    comm, reporter, mesh = member.comm, member.reporter, order.mesh
    sets = _held(order, member)
    storage = checkpoint_storage(order, member.files)
    with contextlib.ExitStack() as stack:
        stack.enter_context(default_group(member.device, order.collective_timeout_seconds))
        save: Save | None = None
        if storage is not None:
            manager = stack.enter_context(
                checkpoints(
                    storage,
                    order.keep,
                    order.writer,
                    member.client,
                    order.collective_timeout_seconds,
                    is_required=order.storage_url is not None,
                    on_written=lambda step: reporter.send({"kind": "checkpoint", "step": step}),
                    rank=comm.rank,
                    world_size=comm.world_size,
                )
            )
            save = partial(save_checkpoint, manager)
        found = _resumed(order, storage, comm)
        with peer_errors("the meeting of the mesh's ranks"):
            seconds = order.collective_timeout_seconds
            ranks = None if mesh is None else device_mesh(mesh, member.device, seconds)
        place = Context(
            rank=comm.rank,
            nodes=comm.nodes,
            device=member.device,
            num_restarts=order.attempt,
            sets=sets,
            resumed=None if found is None else found[1],
            save=save,
            show=reporter.epoch,
            gather=comm.all_gather_bytes,
            parts=None if found is None else partial(_parts, order, found[0], comm.rank),
            mesh=ranks,
            reader=None if mesh is None else (mesh.reader(comm.rank), mesh.num_readers),
        )
        stack.enter_context(environment_variables(place))
        stack.enter_context(entered(place))
        reporter.phase("train")
        with lost_peers(CollectiveError, "the function"):
            value = called(function)
        reporter.phase("finish")
    if comm.rank != 0 and order.results == "first":
        return []
    data = pickled({"value": value, "history": place.history})
    return deliver(member, "value", VALUE.format(comm.rank), lambda: [data])


def _held(order: FunctionOrder, member: Member) -> dict[str, DataSet]:
    """The data sets in the shards that each rank finds or fetches. Collective."""
    from sparkdl.worker.held_shards import hold_shards

    if order.holding == "here":
        return dict(order.sets)
    found, mesh = {}, order.mesh
    readers = member.comm.world_size if mesh is None else mesh.num_readers
    for name, data in order.sets.items():
        plan = hold_shards(
            data.plan(readers, batch_size=1),
            data.source,
            member.comm,
            run_id=order.run_id,
            say=member.reporter.send,
            holding=order.holding,
            readers=None if mesh is None else [mesh.reader(rank) for rank in range(mesh.size)],
        )
        found[name] = replace(data, shards=plan.shards, shards_by_rank=plan.shards_by_rank)
    return found


def _loaded(order: FunctionOrder, member: Member) -> Callable[[], Any]:
    payload = order.payload
    if not payload:
        assert member.files is not None
        payload = again(partial(member.files.read, FUNCTION), OUTAGE_SECONDS)
    try:
        function: Callable[[], Any] = cloudpickle.loads(payload)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the function needs the module {error.name!r}, which this worker does not have: ship "
            "it with --py-files or --archives, or define the function in the main program"
        ) from error
    return function


def called(function: Callable[[], Any]) -> Any:
    """Return the result of a function or a script; ``sys.exit(0)`` ends either well, with None."""
    try:
        return function()
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
        return None


def _resumed(
    order: FunctionOrder, storage: Storage | None, comm: Communicator
) -> tuple[CheckpointInfo, Mapping[str, Any]] | None:
    """The newest checkpoint, and what of it is equal on all ranks. Collective."""
    found = resumed(order, storage, comm, versions())
    if found is None:
        return None
    info, state = found
    if not isinstance(state, dict) or not {"checkpoint", "history", "number"} <= set(state):
        raise CheckpointError(f"{info.path} is no checkpoint of a TorchRunner; use another folder")
    return info, state


def _parts(order: FunctionOrder, info: CheckpointInfo, own: int) -> Iterator[Any]:
    for rank in in_turn(info, own):
        with may_be_lost(order):
            part = load_part(info, rank)
        yield part


def in_turn(info: CheckpointInfo, own: int) -> Iterator[int]:
    """The ranks that wrote a checkpoint, from this one's own number on.

    Along the same mesh a rank mostly finds what it needs in its own file.
    """
    return ((own + number) % info.world_size for number in range(info.world_size))


def load_part(info: CheckpointInfo, rank: int) -> Any:
    """Read a rank's part of a divided checkpoint, to be copied from; raises CheckpointError."""
    from sparkdl.storage.checkpoint_format import rank_file, read_file, views

    name = rank_file(rank)
    return views(read_file(info, name), f"{info.path}/{name}")


def save_checkpoint(
    manager: CheckpointManager, number: int, shared: dict[str, Any], part: dict[str, Any] | None
) -> None:
    """Write a checkpoint; without a part it is rank 0's alone."""
    manager.save(number, shared, part or {}, world_size=1 if part is None else None)


def checkpoints(
    storage: Storage,
    keep: int,
    writer: Writer,
    signal: KeyValue,
    timeout_seconds: float,
    *,
    is_required: bool,
    on_written: Callable[[int], None] = lambda _: None,
    rank: int = 0,
    world_size: int = 1,
) -> CheckpointManager:
    """The manager of a rank, which takes part in those checkpoints that are divided."""
    from sparkdl.config import CheckpointConfig
    from sparkdl.storage.checkpoint_writer import CheckpointManager

    return CheckpointManager(
        storage,
        CheckpointConfig(keep=keep),
        rank=rank,
        world_size=world_size,
        writer=writer,
        environment=versions(),
        signal=signal,
        timeout_seconds=timeout_seconds,
        is_required=is_required,
        on_written=on_written,
    )


@contextlib.contextmanager
def default_group(device: torch.device, timeout_seconds: float) -> Iterator[None]:
    """Let torch.distributed be initialized also where there is but one rank; see `kept_group`."""
    import torch.distributed as dist

    from sparkdl.comm.process_group import kept_group, process_group

    if dist.is_initialized():
        with kept_group():
            yield
        return
    made = process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        store=dist.HashStore(),  # type: ignore[attr-defined]
        rank=0,
        world_size=1,
        timeout_seconds=timeout_seconds,
        address="127.0.0.1",
    )
    with made, kept_group():
        yield


@contextlib.contextmanager
def environment_variables(place: Context) -> Iterator[None]:
    """Set what `torchrun` sets, but for the address of a server that is not there."""
    values = {
        "RANK": place.rank,
        "WORLD_SIZE": place.world_size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_world_size,
        "GROUP_RANK": place.node_rank,
        "TORCHELASTIC_RESTART_COUNT": place.num_restarts,
    }
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({name: str(value) for name, value in values.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def pickled(value: Any) -> bytes:
    """As bytes that `unpickled` reads, also where there is no GPU; ConfigError if impossible."""
    import torch

    buffer = io.BytesIO()
    try:
        torch.save(value, buffer, pickle_module=cloudpickle)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise ConfigError(
            f"what the function returned cannot be sent to the driver: {error}; return plain "
            "values and tensors, such as a state dict"
        ) from error
    return buffer.getvalue()


def unpickled(data: bytes) -> Any:
    """Inverse of `pickled`, tensors on the CPU; ConfigError if it needs a module that is not here.

    Plain values, tensors and numpy arrays are read by torch's restricted unpickler, which runs no
    code. Only values with objects of other classes are unpickled, which may run any.
    """
    import torch

    try:
        with torch.serialization.safe_globals(_of_numpy()):
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        logger.debug("the value has objects of other classes than torch reads by itself")
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"what the function returned needs the module {error.name!r}, which the driver does "
            "not have: install it there, or return plain values and tensors"
        ) from error


def _of_numpy() -> list[Any]:
    """Return what pickles of numpy's arrays and numbers name, for all dtypes but Python objects."""
    import numpy as np

    makers = [np.zeros(0).__reduce__()[0], np.float64(0).__reduce__()[0]]
    return [np.ndarray, np.dtype, *makers, *(type(np.dtype(code)) for code in _DTYPES)]
