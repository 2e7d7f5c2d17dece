"""Context of a training function that `TorchRunner` runs: its place, and how it reports.

`context()` gives the place to the function, on a worker and, for debugging, on the driver.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sparkdl.errors import CommunicationError, ConfigError

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from sparkdl.worker.function_loader import DataSet, Loader

Save = Callable[[int, dict[str, Any], dict[str, Any] | None], None]
"""``save(number, shared, part)`` writes a checkpoint: what is equal on all ranks, and this rank's
part. Without a part rank 0 calls it alone."""

_current: Context | None = None


def context() -> Context:
    """The place of the running training function.

    Raises:
        ConfigError: no `TorchRunner` runs this code.
    """
    if _current is None:
        raise ConfigError(
            "sparkdl.context() is for functions and scripts that TorchRunner runs; to try one out "
            "in this process, use TorchRunner(num_workers=0).run(...)"
        )
    return _current


@contextlib.contextmanager
def entered(place: Context) -> Iterator[None]:
    """Let `context` give ``place`` for the time of the block."""
    global _current
    before, _current = _current, place
    try:
        yield
    finally:
        _current = before


class Context:
    """A rank's place and data, and its way to report.

    Attributes:
        rank: this rank, from 0.
        world_size: number of ranks; with a range of workers another one after each restart.
        local_rank: this rank's number among those of its host.
        local_world_size: ranks of this host.
        node_rank: number of this host.
        device: where this rank shall compute: the GPU that Spark gave it, or the CPU.
        num_restarts: how often the function was begun before in this run, because workers were
            lost, or because there was room for more.
        checkpoint: what rank 0 last passed to `report`, after a restart or with ``resume=True``;
            its tensors are on the CPU. Of DTensors it has the shapes only, and
            `load_checkpoint` reads them. None: begin at the beginning.
        history: the metrics that this rank has reported so far, after those that rank 0 had
            reported when ``checkpoint`` was written.
    """

    def __init__(
        self,
        *,
        rank: int,
        nodes: tuple[int, ...],
        device: torch.device,
        num_restarts: int,
        sets: Mapping[str, DataSet],
        resumed: Mapping[str, Any] | None,
        save: Save | None,
        show: Callable[[dict[str, float]], None],
        gather: Callable[[bytes], list[bytes]] = lambda data: [data],
        parts: Callable[[], Iterable[Any]] | None = None,
        mesh: DeviceMesh | None = None,
        reader: tuple[int, int] | None = None,
    ) -> None:
        """Made by the runner.

        ``nodes`` numbers the hosts, ``resumed`` is what ``save`` got last as shared, ``parts``
        reads what the ranks gave then, and ``show`` shows a record of metrics. ``save`` is None if
        checkpoints have no place. ``gather`` gives all ranks' bytes to each. ``reader`` is the
        number of this rank among those that read different rows, and how many they are; None: all
        ranks do.
        """
        self.rank = rank
        self.world_size = len(nodes)
        self.local_rank = nodes[:rank].count(nodes[rank])
        self.local_world_size = nodes.count(nodes[rank])
        self.node_rank = nodes[rank]
        self.device = device
        self.num_restarts = num_restarts
        self.checkpoint: Any = None if resumed is None else _joined(resumed)
        self.history: list[dict[str, float]] = [] if resumed is None else list(resumed["history"])
        self._num_checkpoints = 0 if resumed is None else int(resumed["number"])
        self._sets = sets
        self._save = save
        self._show = show
        self._gather = gather
        self._parts = parts
        self._mesh = mesh
        self._reader = reader or (rank, len(nodes))

    @property
    def mesh(self) -> DeviceMesh:
        """Torch's mesh of all ranks, with the axes of ``TorchRunner(parallelism=Mesh(...))``.

        The axes are ``"data"``, ``"pipeline"``, ``"shard"`` and ``"tensor"``, also those of size 1.
        So ``fully_shard(model, mesh=context().mesh["shard"])`` divides weights,
        ``mesh["data", "shard"]`` also sums gradients along ``data``, and
        ``parallelize_module(block, context().mesh["tensor"], plan)`` divides layers.

        Raises:
            ConfigError: the run has no mesh.
        """
        if self._mesh is None:
            raise ConfigError("this run has no mesh: pass TorchRunner(parallelism=Mesh(...))")
        return self._mesh

    def loader(
        self,
        name: str = "train",
        *,
        batch_size: int,
        columns: list[str] | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> Loader:
        """Batches of this rank's rows of a data set, on this rank's device.

        Every row is in one batch of one rank. With shuffling all ranks get equally many batches,
        and which rows the batches of a number hold together does not depend on how many ranks
        there are. Ranks along the axis ``tensor`` of a mesh get the same batches.

        Args:
            name: the data set's name; a DataFrame that was given alone is ``"train"``.
            batch_size: largest number of rows of a shard in a batch. A rank has one shard, or
                several where there are fewer workers than shards.
            columns: which, and in this order: a batch is then a tuple of tensors
                ``(batch, *shape)``. None: a dict of all.
            shuffle: whether each epoch has an order of its own, a pure function of ``seed``, the
                epoch's number and the rows; otherwise the stored order.
            seed: of the order.

        Raises:
            ConfigError: there is no such data set or column, or ``batch_size`` is not positive.
            DataError: with shuffling, a rank has too few rows to have one in each batch; with a
                range of workers, a shard has.
        """
        from sparkdl.worker.function_loader import Loader

        if name not in self._sets:
            known = ", ".join(map(repr, self._sets)) or "none: pass TorchRunner(data=...)"
            raise ConfigError(f"there is no data set {name!r}; there are {known}")
        return Loader(
            self._sets[name],
            name=name,
            rank=self._reader[0],
            world_size=self._reader[1],
            device=self.device,
            batch_size=batch_size,
            columns=columns,
            shuffle=shuffle,
            seed=seed,
        )

    def report(self, metrics: Mapping[str, float] | None = None, *, checkpoint: Any = None) -> None:
        """Tell the driver how training goes, and keep a state from which it can go on.

        What rank 0 reports counts; the other ranks should call it too, so that all of them have as
        long a `history`. Checkpoints are copied here, and written while training goes on; they are
        visible when they are whole.

        Along a mesh, and where the checkpoint holds DTensors, all ranks must pass one. Each rank
        writes the regions of these that it has and no rank before it. Other values are rank 0's,
        and those that only other ranks have under their names. So ranks along ``pipeline`` must
        give their tensors names of their own.

        Args:
            metrics: numbers by name; they are shown on the driver, and kept in `history`.
            checkpoint: dicts, lists, numbers, strings and tensors, such as state dicts.

        Raises:
            ConfigError: a metric is not a number, or is named ``report``, as their counter is.
            CheckpointError: the checkpoint holds something that cannot be stored.
            StorageError: several checkpoints in a row could not be written to ``checkpoint_dir``;
                a single one that fails is a warning.
        """
        if metrics is not None:
            record = {"report": float(len(self.history) + 1), **_numbers(metrics)}
            self.history.append(record)
            if self.rank == 0:
                self._show(record)
        if checkpoint is None or self._save is None:
            return
        from sparkdl.worker.divided_checkpoint import Division, check_stages, is_divided

        if self._mesh is not None or is_divided(checkpoint):
            own = Division(checkpoint)
            stage = 0 if self._mesh is None else self._mesh.get_local_rank("pipeline")
            told = json.dumps([self._num_checkpoints, own.held(), stage, own.whole_tensors()])
            try:
                ranks = [json.loads(data) for data in self._gather(told.encode())]
            except CommunicationError as error:
                raise CommunicationError(
                    f"rank {self.rank} waited in report for the checkpoints of the others, since "
                    f"all ranks of a mesh must pass one: {error}"
                ) from error
            check_stages([(stage, names) for _, _, stage, names in ranks])
            before = {name for _, held, *_ in ranks[: self.rank] for name in held}
            self._num_checkpoints = ranks[0][0]
            self._keep(own.shared, own.part(before if self.rank else None))
        elif self.rank == 0:
            self._keep({"checkpoint": checkpoint}, None)

    def _keep(self, shared: dict[str, Any], part: dict[str, Any] | None) -> None:
        assert self._save is not None
        self._num_checkpoints += 1
        number = self._num_checkpoints
        self._save(number, {**shared, "history": self.history, "number": number}, part)

    def load_checkpoint(self, state: Any) -> Any:
        """Take values from the checkpoint, which may have been written along another mesh.

        Each rank reads for itself, and of DTensors only what it has of them, so ranks need not
        call this together.

        Args:
            state: a tree with the names of the checkpoint, or with some of them, such as
                ``{"model": model.state_dict(), "epoch": 0}``. Its tensors are filled in place, its
                other values replaced. An empty dict gets all that the checkpoint has there.

        Returns:
            ``state``.

        Raises:
            ConfigError: there is no checkpoint.
            CheckpointError: it lacks something, has it in another shape, or holds DTensors where
                ``state`` has no tensor.
        """
        from sparkdl.worker.divided_checkpoint import fill

        if self._parts is None:
            raise ConfigError(
                "there is no checkpoint to load: call load_checkpoint only where "
                "context().checkpoint is not None"
            )
        return fill(state, self.checkpoint, self._parts)


def _joined(resumed: Mapping[str, Any]) -> Any:
    from sparkdl.worker.divided_checkpoint import joined

    return joined(resumed)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    if "report" in metrics:
        raise ConfigError("'report' counts the reports: give that metric another name")
    found = {}
    for name, value in metrics.items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"metrics are numbers by name; {name!r} is {type(value).__name__}"
            ) from error
    return found
