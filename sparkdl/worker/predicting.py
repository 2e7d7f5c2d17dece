"""One worker of a gang that predicts with a module which no worker has room for.

The module is divided along a mesh as in training. Its forward passes wait for those of other ranks,
so all ranks run equally many: they agree before each batch who still has rows, and who has none
runs zeros. Ranks along ``tensor`` compute each batch together, those of each of them in turn.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from sparkdl.comm.channel import ChannelClient
from sparkdl.comm.worker_environment import WorkerEnvironment, local_rank
from sparkdl.errors import CommunicationError, SparkDLError
from sparkdl.mesh import Mesh
from sparkdl.runtime.process import default_dtype, spared_collector, torch_threads, tuned_allocator
from sparkdl.runtime.tracebacks import formatted
from sparkdl.worker.lifecycle import GangOrder, GangRank

if TYPE_CHECKING:
    import torch
    from torch import nn

    from sparkdl.comm.communicator import Communicator
    from sparkdl.inference.predict import PredictTask
    from sparkdl.storage.sharded_weights import ShardedWeights
    from sparkdl.sync.divided.mesh_ranks import MeshRanks
    from sparkdl.sync.regions import Region

_GRACE_SECONDS = 5.0
"""Wait of a rank that has lost a peer, so that Spark sees first what became of that one."""
ERROR = "error"
"""Field of what a rank gives, besides the outputs: why a row has none."""
_NONE, _ROWS, _FAILED = range(3)
"""Messages of a rank before each batch: it has no rows any more, has some, or cannot go on."""

Batches = Iterator[Sequence[pa.Array]]


class _RankFailed(Exception):
    """The error that all ranks raise together when the user's code has failed on one of them."""


def predict(
    environment: WorkerEnvironment,
    order: GangOrder,
    task: PredictTask,
    mesh: Mesh,
    batches: Batches,
) -> Iterator[pa.Array]:
    """Predict the rows of one rank, see `inference.predict.predict`. Called by all ranks.

    Spark would run the whole gang again after an error, several times. So what is raised on one
    rank, between the collectives of the module, stands in the field `ERROR` of all rows of all
    ranks that are not predicted.

    Raises:
        CommunicationError: a peer was lost.
    """
    num_taken = num_given = 0

    def counted() -> Batches:
        nonlocal num_taken
        for arrays in batches:
            num_taken += len(arrays[0])
            yield arrays

    try:
        for array in _predicted(environment, order, task, mesh, counted()):
            num_given += len(array)
            yield _with_error(array, None)
    except CommunicationError:
        time.sleep(_GRACE_SECONDS)
        raise
    except _RankFailed as failed:
        reason = str(failed)
        if num_taken > num_given:
            yield _failed_rows(num_taken - num_given, task, reason)
        for arrays in batches:
            yield _failed_rows(len(arrays[0]), task, reason)


def _predicted(
    environment: WorkerEnvironment,
    order: GangOrder,
    task: PredictTask,
    mesh: Mesh,
    batches: Batches,
) -> Iterator[pa.Array]:
    """See `predict`; raises _RankFailed on all ranks."""
    from sparkdl.comm.process_group import lost_peers
    from sparkdl.runtime.hardware import choose_device

    client = ChannelClient(environment.channel)
    rank = GangRank(environment, order, client)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(client))
        nodes = rank.meet()
        stack.enter_context(spared_collector())
        stack.enter_context(tuned_allocator(spares_memory=True))
        import torch  # after the allocator

        place = local_rank(nodes, environment.rank)
        device = choose_device(order.device, environment.gpu_addresses, place, os.environ)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        stack.enter_context(torch_threads(order.threads))
        comm = stack.enter_context(rank.communicator(device, nodes))
        stack.enter_context(lost_peers(CommunicationError, "the divided model"))
        stack.enter_context(default_dtype(task.default_dtype))
        module, ranks = divided_module(task, mesh, comm, device)
        try:
            yield from in_step(module, ranks, comm, task, device, batches)
        except _RankFailed:  # on all ranks
            rank.leave()
            raise
        rank.leave()


def _text_of(error: Exception) -> str:
    if isinstance(error, SparkDLError) and error.__cause__ is None:
        return f"{type(error).__name__}: {error}"
    return formatted(error)


def _with_error(array: pa.Array, reason: str | None) -> pa.Array:
    """The struct of a rank's outputs with the field `ERROR`."""
    errors = pa.array([reason] * len(array), pa.string())
    fields = [*array.type, pa.field(ERROR, pa.string())]
    parts = [array.field(number) for number in range(array.type.num_fields)]
    return pa.StructArray.from_arrays([*parts, errors], fields=fields, mask=array.is_null())


def _failed_rows(num_rows: int, task: PredictTask, reason: str) -> pa.Array:
    """Rows without outputs."""
    leaves = [pa.nulls(num_rows, leaf.arrow_type) for leaf in task.leaves]
    fields = [pa.field(leaf.name, leaf.arrow_type) for leaf in task.leaves]
    return _with_error(pa.StructArray.from_arrays(leaves, fields=fields), reason)


def divided_module(
    task: PredictTask, mesh: Mesh, comm: Communicator, device: torch.device
) -> tuple[nn.Module, MeshRanks]:
    """The module of ``task``, of which this rank has read its own parts only. Collective."""
    from sparkdl.serialization.travel.packed_module import unpack
    from sparkdl.sync.divided.dividing import divide
    from sparkdl.sync.divided.exchanges import Exchanges
    from sparkdl.sync.divided.mesh_ranks import MeshRanks
    from sparkdl.sync.frozen_layers import evaluating

    assert task.weights is not None
    packed, weights = task.fetch(), task.weights.open()
    module = evaluating(unpack(packed.skeleton, packed.tensors, weights.blank))
    ranks = MeshRanks.of(mesh, comm, device)
    regions = divide(module, ranks)
    _fill(module, weights, regions, device)
    if mesh.num_shards > 1 and device.type == "cpu":  # elsewhere steps are looked at, not calls
        Exchanges(module, ranks.shards, device)
    return module, ranks


def _fill(
    module: nn.Module, weights: ShardedWeights, regions: dict[str, Region], device: torch.device
) -> None:
    """Read the regions that are here of parameters that are on the meta device."""
    import torch

    from sparkdl.sync.divided.dividing import local
    from sparkdl.sync.regions import Region

    def placed(value: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(value, device=device) if value.is_meta else value.to(device)

    names: dict[int, str] = {}
    tied = {
        name: kept
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if (kept := names.setdefault(id(parameter), name)) != name
    }
    module._apply(placed)  # type: ignore[no-untyped-call]
    for name, kept in tied.items():  # of which torch may have made two
        part, _, leaf = name.rpartition(".")
        module.get_submodule(part)._parameters[leaf] = module.get_parameter(kept)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            region, target = regions[name], local(parameter)
            if not region.size:  # a single number, which is never cut
                target.copy_(weights.read(name))
            elif target.numel():
                first = region.start[0]
                rows = weights.rows(name, first, first + region.size[0])
                within = Region((0, *region.start[1:]), region.size)
                target.copy_(within.of(rows))


def in_step(
    module: nn.Module,
    ranks: MeshRanks,
    comm: Communicator,
    task: PredictTask,
    device: torch.device,
    batches: Batches,
) -> Iterator[pa.Array]:
    """Yield what the module gives for this rank's rows, which may be none; all ranks end together.

    Args:
        module: divided along ``ranks``.
        ranks: the mesh.
        comm: the gang.
        task: how to predict.
        device: where the module is.
        batches: one array per input column each.
    """
    import torch

    turns = [ranks.mesh.coordinates(rank)[-1] for rank in range(comm.world_size)]
    step = _Step(module, task, device)
    pieces = _pieces(batches, task.batch_size)
    while True:
        piece = next(pieces, None)
        state = _FAILED if step.failure else _NONE if piece is None else _ROWS
        states = comm.all_gather(torch.tensor([state], device=device)).flatten().tolist()
        if _FAILED in states:
            first = states.index(_FAILED)
            reason = step.failure.encode() if comm.rank == first else None
            raise _RankFailed(comm.broadcast_bytes(reason, first).decode())
        if _ROWS not in states:
            return
        for turn in range(ranks.mesh.tensor):
            if not any(has for has, own in zip(states, turns, strict=True) if own == turn):
                continue
            is_own = ranks.tensors.rank == turn
            shared = piece if is_own else None
            if ranks.mesh.tensor > 1:
                data = _as_bytes(piece) if is_own else None
                shared = _from_bytes(ranks.tensors.broadcast_bytes(data, turn))
            found = step(shared)
            if is_own and found is not None:
                yield found


class _Step:
    """Runs the module once on the rows of a piece, or on zeros, whatever the user's code raises."""

    def __init__(self, module: nn.Module, task: PredictTask, device: torch.device) -> None:
        from sparkdl.data.collate import example_arguments
        from sparkdl.inference.predict import RowRange

        self.failure = ""
        """Error that was raised first; empty: none."""
        self._module, self._task, self._device = module, task, device
        self._zeros = RowRange(example_arguments(task.columns).to(device), 2)
        self._begun = self._ended = 0
        """Numbers of calls of the module that have begun and that have returned."""
        module.register_forward_pre_hook(self._begin, prepend=True)
        module.register_forward_hook(self._end)

    def _begin(self, *_: object) -> None:
        self._begun += 1

    def _end(self, *_: object) -> None:
        self._ended += 1

    def __call__(self, piece: Sequence[pa.Array] | None) -> pa.Array | None:
        """Return what the module gives for these rows; None if there are none, or it has failed.

        What the module itself raises is raised, because other ranks wait in the middle of it.
        """
        import torch

        from sparkdl.comm.process_group import lost_peers
        from sparkdl.inference.predict import predicted, runs

        task, before, found = self._task, self._begun, None
        with torch.no_grad():  # gathered layers are changed in place, as inference_mode forbids
            if piece is not None and not self.failure:
                try:
                    (run,) = runs(piece, task.columns, task.batch_size, self._device)
                    with lost_peers(CommunicationError, "the divided model"):
                        found = predicted(self._module, run, task)
                except CommunicationError:
                    raise
                except Exception as error:
                    if self._begun > self._ended:
                        raise
                    self.failure = _text_of(error)
            if self._begun == before:  # no rows, or none that is kept: other ranks have theirs
                predicted(self._module, self._zeros, task)
        return found


def _pieces(batches: Batches, batch_size: int) -> Iterator[Sequence[pa.Array]]:
    """The rows, as many as are computed at a time."""
    for arrays in batches:
        for start in range(0, len(arrays[0]), batch_size):
            yield [array.slice(start, batch_size) for array in arrays]


def _as_bytes(piece: Sequence[pa.Array] | None) -> bytes:
    if piece is None:
        return b""
    batch = pa.RecordBatch.from_arrays(list(piece), names=[f"_{n}" for n in range(len(piece))])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def _from_bytes(data: bytes) -> Sequence[pa.Array] | None:
    if not data:
        return None
    with pa.ipc.open_stream(data) as reader:
        return list(reader.read_next_batch().columns)
