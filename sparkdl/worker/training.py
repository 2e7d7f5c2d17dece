"""One worker of a fit, from its start to its end.

Read `_train` top to bottom. Every rank of the gang calls it, and all of them reach the end or none
does. What is not training is in `lifecycle`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import cloudpickle

from sparkdl import sync
from sparkdl.comm.access import OF_DRIVER
from sparkdl.comm.channel import ChannelStorage
from sparkdl.comm.file_chunks import gathered
from sparkdl.comm.worker_environment import WorkerEnvironment
from sparkdl.config import Looks
from sparkdl.data.plan import Holding, TrainPlan
from sparkdl.data.source import ShardSource, open_shards
from sparkdl.data.spool.local_disk import ScratchFile
from sparkdl.data.spool.spool_source import SpoolSource
from sparkdl.errors import CommunicationError
from sparkdl.mesh import Mesh
from sparkdl.runtime.process import cpu_model
from sparkdl.runtime.versions import versions
from sparkdl.storage.retried import OUTAGE_SECONDS, again
from sparkdl.storage.storage import Storage
from sparkdl.worker.held_shards import hold_shards
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
    from torch import nn

    from sparkdl.comm.communicator import Communicator
    from sparkdl.storage.checkpoint_format import CheckpointInfo
    from sparkdl.storage.checkpoint_writer import CheckpointManager
    from sparkdl.train.loop import TrainOutcome
    from sparkdl.train.rank_state import ResumePoint

INITIAL = f"{OF_DRIVER}/initial.safetensors"
FINAL = "final.safetensors"
STATE = f"{OF_DRIVER}/state.safetensors"
"""File that an earlier fit has left."""
LEFT = "left.safetensors"
"""File that this one leaves."""
ATTRIBUTES = "attributes.pickle"
"""File of the module's changes besides parameters and buffers, see `Attributes.packed`."""
_MESH = "mesh"
"""Key in a checkpoint's manifest of the mesh along which the model was divided."""


@dataclass(frozen=True, kw_only=True)
class WorkOrder(GangOrder):
    """The driver's order to every rank of a fit; the run key stands for data, model, options."""

    plan: TrainPlan
    payload: bytes
    """Pickle of values of the program, `TrainConfig`, `PackedModule.skeleton`, and what module and
    configuration share, see `shared_values`."""
    weights: bytes | None
    """safetensors of the initial weights; None: rank 0 reads the driver's `INITIAL`."""
    recipe: bytes = b""
    """Recipe of weights that are not in there, see `RecordedWeights`; empty: all are there."""
    begins_from_state: bool = False
    """True if training goes on from the state of an earlier fit."""
    state: bytes | None = None
    """safetensors of that; None: rank 0 reads the driver's `STATE`."""
    keeps_state: bool = False
    """True if rank 0 sends what this fit leaves for another."""
    source: ShardSource = field(default_factory=SpoolSource)
    """Opens the plan's shards."""
    speeds: Mapping[str, float] = field(default_factory=dict)
    """Rows per second of a worker by its host, where that was measured."""
    holding: Holding = "here"
    """How ranks come to their shards."""
    looks: Looks | None = None
    """Options of rank 0's looks at its layers for reports; None: no looks."""
    stored_at: str | None = None
    """Folder of the storage for the weights of a divided model; None: rank 0 sends them."""


def run(environment: WorkerEnvironment, order: WorkOrder) -> Iterator[tuple[str, bytes]]:
    """Train one rank's replica.

    Yields:
        ``("error", JSON)`` alone, or ``("result", JSON)`` and, from rank 0, ``("stored", folder)``
        or those of "weights", "left" and "attributes" that do not go to the driver as files.
    """
    yield from live(environment, order, partial(_begin, order))


def _begin(order: WorkOrder, member: Member) -> Results:
    from sparkdl.train.optimizers.without_compiler import without_compiler

    with without_compiler(in_steps=True):
        return _train(order, member)


def _train(order: WorkOrder, member: Member) -> Results:
    from sparkdl.comm.process_group import lost_peers
    from sparkdl.serialization.program.program_watch import ProgramWatch
    from sparkdl.serialization.travel.attributes import Attributes
    from sparkdl.serialization.travel.packed_module import as_on_driver
    from sparkdl.serialization.travel.pickling import shared_globals
    from sparkdl.storage.checkpoint_format import encode
    from sparkdl.storage.checkpoint_writer import CheckpointManager
    from sparkdl.storage.tensor_tree import snapshot
    from sparkdl.sync.module_tensors import tensors_of
    from sparkdl.train.loop import train
    from sparkdl.train.training_state import left_by
    from sparkdl.worker.divided.sent_weights import MadeWeights, SentWeights, Unfilled
    from sparkdl.worker.divided.stored_weights import write_weights

    spaces: dict[str, dict[str, Any]] = {}
    with shared_globals(spaces):
        _, config, skeleton, shared = cloudpickle.loads(order.payload)
    strategy, mesh = sync.resolve(config.sync_strategy), config.parallelism
    comm, files, reporter = member.comm, member.files, member.reporter
    reporter.phase("setup")
    plan = hold_shards(
        order.plan,
        order.source,
        comm,
        run_id=order.run_id,
        speeds=order.speeds,
        work_shares=strategy.work_shares,
        say=reporter.send,
        holding=order.holding,
        readers=None if mesh is None else [mesh.reader(rank) for rank in range(mesh.size)],
    )
    reader = comm.rank if mesh is None else mesh.reader(comm.rank)
    with contextlib.ExitStack() as stack:
        stack.enter_context(as_on_driver(skeleton))
        unfilled: Unfilled | None = None
        if order.weights is None and mesh is not None and mesh.is_divided:
            assert files is not None
            with shared_globals(spaces):
                unfilled = SentWeights(skeleton, INITIAL, files, comm, order.recipe)
        elif order.weights is not None and order.recipe:
            with shared_globals(spaces):
                unfilled = MadeWeights(skeleton, order.weights, order.recipe, comm)
        fill = None
        if unfilled is None:
            with shared_globals(spaces):
                module = initial_module(order.weights, skeleton, files, comm)
        else:
            stack.enter_context(contextlib.closing(unfilled))
            module, fill = unfilled.module, partial(unfilled.fill, device=member.device)
        is_divided = mesh is not None and mesh.is_divided
        held = Attributes(module, is_divided=is_divided, shared=shared)
        storage = checkpoint_storage(order, files)
        environment = _bits_depend_on(order, mesh, module)
        checkpoints = None
        if storage is not None:
            checkpoints = stack.enter_context(
                CheckpointManager(
                    storage,
                    config.checkpoint,
                    rank=comm.rank,
                    world_size=comm.world_size,
                    writer=order.writer,
                    environment=environment,
                    signal=member.client,
                    timeout_seconds=order.collective_timeout_seconds,
                    copies=mesh is None or not mesh.divides_model,
                    is_required=order.storage_url is not None,
                    on_written=lambda step: reporter.send({"kind": "checkpoint", "step": step}),
                )
            )
        if mesh is not None:  # torch's own collectives gather and divide it
            stack.enter_context(lost_peers(CommunicationError, "the divided model"))
        outcome = train(
            module=module,
            config=config,
            plan=plan,
            shards=open_shards(order.source, plan, reader, "train"),
            validation=open_shards(order.source, plan, reader, "validation"),
            comm=comm,
            device=member.device,
            checkpoints=checkpoints,
            resume=_resume_point(
                order,
                storage,
                files,
                comm,
                is_elastic=strategy.is_elastic,
                by_shard=config.elasticity == "bits",
                mesh=mesh,
                now=environment,
            ),
            observer=reporter,
            looks=order.looks,
            fill=fill,
            held=held,
            parts=[ProgramWatch(module, config)] if config.callbacks and comm.rank == 0 else [],
        )
        reporter.phase("finish")
        if checkpoints is not None and order.storage_url is not None:
            end = outcome.final
            checkpoints.final(end.step, end.shared, end.rank_state)
        report = _report(outcome, reporter.rows, checkpoints)
        results = [("result", json.dumps(report).encode())]
        if mesh is not None and order.stored_at is not None:
            assert storage is not None
            writers = mesh.size // mesh.num_replicas
            write_weights(
                module, comm, storage, order.stored_at,
                num_writers=writers, pipeline=outcome.pipeline,
            )  # fmt: skip
            if comm.rank == 0:
                results.append(("stored", order.stored_at.encode()))
        elif mesh is not None:
            results += _gathered(module, outcome, member)
        elif comm.rank == 0:
            weights = snapshot(tensors_of(module))
            results += deliver(member, "weights", FINAL, lambda: encode(weights))
            if order.keeps_state:
                left = snapshot(left_by(outcome.final.shared))
                results += deliver(member, "left", LEFT, lambda: encode(left))
        if comm.rank == 0:
            packed = pickle.dumps(held.packed())
            results += deliver(member, "attributes", ATTRIBUTES, lambda: [packed])
    return results


def _gathered(module: nn.Module, outcome: TrainOutcome, member: Member) -> Results:
    """The weights of a divided module, of which rank 0 has a file on its disk. Collective."""
    from sparkdl.sync.divided.dividing import whole_weights

    pieces = whole_weights(module, outcome.pipeline)
    if member.comm.rank > 0:
        deque(pieces, maxlen=0)
        return []
    with contextlib.closing(ScratchFile()) as scratch:
        scratch.write(pieces)
        return deliver(member, "weights", FINAL, scratch.pieces)


def initial_module(
    weights: bytes | None, skeleton: bytes, files: ChannelStorage | None, comm: Communicator
) -> nn.Module:
    """The module with its initial weights, which rank 0 reads unless all have them."""
    from sparkdl.serialization.travel.packed_module import unpack

    return unpack(skeleton, _read(INITIAL, files, comm) if weights is None else weights)


def _read(name: str, files: ChannelStorage | None, comm: Communicator) -> bytes:
    """A file of the driver's, which rank 0 reads."""
    assert files is not None
    read = again(partial(files.read, name), OUTAGE_SECONDS) if comm.rank == 0 else None
    return comm.broadcast_bytes(read)


def _bits_depend_on(order: WorkOrder, mesh: Mesh | None, module: nn.Module) -> dict[str, str]:
    """Return what must be equal, besides the world size, for a resumed run to give equal bits."""
    # Spark may hash or cut the rows otherwise than before: shards tell by their fingerprints.
    rows = hashlib.sha256("".join(s.fingerprint for s in order.plan.shards).encode()).hexdigest()
    own = {"cpu": cpu_model(), "threads": str(order.threads), "rows": rows[:16]}
    divided = {} if mesh is None else {_MESH: _divided(mesh, module)}
    return {**versions(), **own, **divided, **order.plan.notes()}


def _divided(mesh: Mesh, module: nn.Module) -> str:
    """Describe which part of ``module`` lies on which rank of ``mesh``."""
    from sparkdl.sync.divided.layout import divided_layers
    from sparkdl.sync.divided.stages import cut_layers

    text = str(mesh)
    if mesh.tensor > 1:
        layers = json.dumps(divided_layers(mesh, module), sort_keys=True)
        text += f", layers {hashlib.sha256(layers.encode()).hexdigest()[:16]}"
    if mesh.pipeline > 1:
        text += f", stages from {', '.join(cut_layers(mesh, module))}"
        text += f", {mesh.num_micro_batches} micro-batches, {mesh.schedule}"
    return text


def _resume_point(
    order: WorkOrder,
    storage: Storage | None,
    files: ChannelStorage | None,
    comm: Communicator,
    *,
    is_elastic: bool,
    by_shard: bool,
    mesh: Mesh | None,
    now: Mapping[str, str],
) -> ResumePoint | None:
    """The checkpoint to go on from, or what an earlier fit has left; None: training begins.

    ``is_elastic`` is the strategy's; ``by_shard``: states are the shards', which another rank may
    have had; ``mesh``: along which the model is divided; ``now``: what bits depend on. Collective.
    """
    from sparkdl.storage.checkpoint_format import decode, load_rank
    from sparkdl.train.rank_state import ResumePoint

    found = resumed(order, storage, comm, now)
    if found is None:
        if not order.begins_from_state:
            return None
        data = _read(STATE, files, comm) if order.state is None else order.state
        return ResumePoint(step=order.plan.first_step, shared=decode(data, STATE), rank_state=None)
    info, shared = found
    state, was = None, info.environment.get(_MESH)
    is_alike = info.world_size == comm.world_size and was == now.get(_MESH)
    parts = None
    if was is not None:
        ranks: Iterable[int] = range(info.world_size)
        if is_alike and mesh is not None:  # the first replica's rank that has the same part
            ranks = [comm.rank % (mesh.size // mesh.num_replicas)]
        parts = partial(_parts, order, info, ranks)
    if info.environment.get("rows") == now["rows"]:
        with may_be_lost(order):
            if is_alike and not by_shard:
                state = load_rank(info, comm.rank)
            elif is_elastic:
                state = _united_states(info, comm)
    return ResumePoint(step=info.step, shared=shared, rank_state=state, parts=parts)


def _parts(order: WorkOrder, info: CheckpointInfo, ranks: Iterable[int]) -> Iterator[Any]:
    """Yield what ``ranks`` had of a divided model, one after the other."""
    from sparkdl.storage.checkpoint_format import load_rank
    from sparkdl.train.rank_state import DIVIDED

    for rank in ranks:
        with may_be_lost(order):
            part = load_rank(info, rank)[DIVIDED]
        if part is not None:
            yield part


def _united_states(info: CheckpointInfo, comm: Communicator) -> dict[str, Any]:
    """Return the states of another gang's ranks, united by rank 0. Collective."""
    from sparkdl.storage.checkpoint_format import decode, encode, load_rank
    from sparkdl.storage.tensor_tree import snapshot
    from sparkdl.train.rank_state import DIVIDED, united

    data = None
    if comm.rank == 0:
        states = []
        for rank in range(info.world_size):
            state = load_rank(info, rank)
            state.pop(DIVIDED, None)  # which may be large
            states.append(state)
        data = gathered(encode(snapshot(united(states))))
    found: dict[str, Any] = decode(comm.broadcast_bytes(data), info.path)
    return found


def _report(
    outcome: TrainOutcome, rows: int, checkpoints: CheckpointManager | None
) -> dict[str, Any]:
    """Return what the driver's summary needs of one rank; ``rows`` are those it has trained on."""
    from sparkdl.train.time_spent import TRAINING

    busy = sum(outcome.seconds[name] for name in TRAINING)
    stall = checkpoints.stall_seconds if checkpoints is not None else 0.0
    return {
        "history": outcome.history,
        "steps": outcome.steps,
        "was_stopped": outcome.stopped_early,
        "seconds": {**outcome.seconds, "checkpoint stall": stall},
        "rows_per_second": rows / busy if busy > 0 else 0.0,
        "bytes_sent": outcome.bytes_sent,
    }
