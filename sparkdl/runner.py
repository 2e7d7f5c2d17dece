"""`TorchRunner`: a training function or script of the user's on the workers of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

from pyspark.sql import DataFrame, SparkSession

from sparkdl.config import RULES, require
from sparkdl.data.source import Source
from sparkdl.errors import ClusterError, ConfigError, StorageError, TrainingFailed
from sparkdl.inputs import Specification, check_names, named
from sparkdl.mesh import Mesh
from sparkdl.report.listeners.listener import Listener
from sparkdl.runtime.arguments import refusal, takes
from sparkdl.runtime.tracebacks import plainly
from sparkdl.spark.frames import user_data
from sparkdl.spark.functions.run_function import (
    FunctionRequest,
    in_driver,
    on_workers,
    run_recorded,
)
from sparkdl.spark.params.converters import to_device, to_inputs, to_run_name
from sparkdl.spark.run.run_facts import shown
from sparkdl.spark.session.interrupts import interruptible
from sparkdl.worker.function_mesh import check_axes
from sparkdl.worker.function_rank import Script

_ARGUMENTS = {
    "numWorkers": "num_workers",
    "maxRestarts": "max_restarts",
    "checkpointDir": "checkpoint_dir",
    "cpusPerWorker": "cpus_per_worker",
    "gpusPerWorker": "gpus_per_worker",
}
"""Param of the estimators -> the argument here that means the same."""


class TorchRunner:
    """Runs a function on all workers at once, with ``torch.distributed`` initialized.

    Inside, `sparkdl.context` gives rank, device, batches and the latest checkpoint. When a worker
    or an executor is lost, the function is begun again with that checkpoint.

    Args:
        num_workers: ranks, each on a slot of its own; None: one per GPU, or else per executor.
            0: one rank in this process, for debugging: breakpoints work, and its part of the data
            is brought to the driver. A pair ``(fewest, most)``: after the loss of some, the
            function is begun again with those that are left; when there are slots for more, with
            more.
        parallelism: a `Mesh` whose axes name the workers in `Context.mesh`, and whose product is
            their number; workers along ``tensor`` read the same rows. The function divides its
            model itself, by ``fully_shard``, ``parallelize_module`` and the like, so the mesh has
            nothing but axes. With ``num_workers=0`` all of them have size 1.
        data: what `Context.loader` reads: a DataFrame, or a source such as `ParquetSource`, or
            several by name. Each worker gets an equal part of the rows, on its own disk.
        inputs: what a batch holds, by name, where that is not all columns: images, sequences, text
            (see `Image`, `Sequence`, `Sparse`, `Tensor`; a column's name is a `Tensor`). All data
            sets need these columns.
        device: ``auto`` (the GPU that Spark assigned, where there is one), ``cpu`` or ``cuda``.
        num_shards: fixed parts of each data set, of which a worker has one or more; None: as many
            as the most workers. With ``num_workers=0`` all rows are one part.
        grow_after_seconds: how long fewer workers than there are slots for go on at least; the
            function is begun again with more at the next checkpoint after that. ``math.inf``:
            never. Only with a range of workers.
        max_restarts: how often the function is begun again after the loss of workers; a new
            checkpoint refills it. An error of its own ends the run at once.
        checkpoint_dir: where checkpoints are kept, as `docs/storage.md` says; None: on the driver,
            for the time of the run.
        resume: whether to go on from what an earlier run has left in ``checkpoint_dir``. A run that
            restarts goes on from its own checkpoints only, whoever else writes there.
        keep_checkpoints: how many of the newest are kept.
        results: whose value `run` returns: ``first`` that of rank 0, ``all`` a list of all ranks'.
        cpus_per_worker: cores of a worker; None: Spark's ``spark.task.cpus``.
        gpus_per_worker: GPUs of a worker; None: Spark's ``spark.task.resource.gpu.amount``.
        report_dir: directory or URL in which each run leaves its report; None: nowhere.
        run_name: what the runs are called there, in their lines and in Spark's UI.
        listeners: observers on the driver, such as `TensorBoard`.
        verbose: 0: only warnings; 1: also what is reported; 2: also what workers log and print.

    Raises:
        ConfigError: an option is wrong.
    """

    def __init__(
        self,
        *,
        num_workers: int | tuple[int, int] | None = None,
        parallelism: Mesh | None = None,
        data: DataFrame | Source | Mapping[str, DataFrame | Source] | None = None,
        inputs: Mapping[str, Specification | str] | None = None,
        device: str = "auto",
        num_shards: int | None = None,
        grow_after_seconds: float = 60.0,
        max_restarts: int = 3,
        checkpoint_dir: str | None = None,
        resume: bool = False,
        keep_checkpoints: int = 2,
        results: Literal["first", "all"] = "first",
        cpus_per_worker: int | None = None,
        gpus_per_worker: float | None = None,
        report_dir: str | None = None,
        run_name: str | None = None,
        listeners: Sequence[Listener] = (),
        verbose: int = 1,
    ) -> None:
        fewest, most = _range(num_workers)
        readers = most
        if parallelism is not None:
            most = _size(check_axes(parallelism), num_workers)
            readers = min(most, parallelism.num_readers)
        is_count = num_shards is None or _is_count(num_shards)
        require(is_count, "num_shards must be an integer", num_shards)
        enough = num_shards is None or num_shards >= max(1, readers or 0)
        require(enough, "each worker needs a shard of its own: raise num_shards", num_shards)
        if num_shards is not None and data is None:
            raise ConfigError(f"num_shards={num_shards} cuts data, which is None; give data too")
        is_time = grow_after_seconds >= 0
        require(is_time, "grow_after_seconds must be at least 0", grow_after_seconds)
        device = to_device("auto, cpu or cuda", device)
        RULES["device"].check(device, "device")
        require(max_restarts >= 0, "max_restarts must be at least 0", max_restarts)
        require(keep_checkpoints >= 1, "keep_checkpoints must be at least 1", keep_checkpoints)
        require(results in ("first", "all"), "results must be 'first' or 'all'", results)
        if resume and checkpoint_dir is None:
            raise ConfigError("resume=True needs a checkpoint_dir")
        self.history: list[dict[str, float]] = []
        """Values that the last run has reported; empty if it failed."""
        self._ask = partial(
            FunctionRequest,
            data=_by_name(data),
            inputs=_inputs(inputs),
            num_workers=most,
            min_workers=fewest,
            parallelism=parallelism,
            num_shards=num_shards,
            grow_after_seconds=grow_after_seconds,
            device=device,
            max_restarts=max_restarts,
            checkpoint_dir=checkpoint_dir,
            resume=resume,
            keep_checkpoints=keep_checkpoints,
            results=results,
            cpus_per_worker=cpus_per_worker,
            gpus_per_worker=gpus_per_worker,
            report_dir=report_dir,
            run_name=_run_name(run_name),
            listeners=tuple(listeners),
            verbose=verbose,
        )
        self._in_driver = most == 0

    @plainly
    def run(self, train: Callable[..., Any] | str | Path, *args: Any, **kwargs: Any) -> Any:
        """Call ``train(*args, **kwargs)`` on every rank, or run a script with ``args``.

        Args:
            train: a function that can be pickled by cloudpickle, or the path of a Python script on
                the driver, which runs as ``__main__``.
            args: of the function; of a script its command line, as texts.
            kwargs: of the function.

        Returns:
            What rank 0's function returned, or a list of what all did; of a script None. Tensors
            are on the CPU.

        Raises:
            ConfigError: an option is wrong, or the function's value cannot be pickled.
            DataError: the data cannot be used.
            ClusterError: the cluster cannot run that many workers.
            StorageError: checkpoints cannot be kept.
            WorkerError: the function failed; with its traceback on the rank that failed first.
            TrainingFailed: workers were lost more than ``max_restarts`` times without a new
                checkpoint.
            KeyboardInterrupt: the user has interrupted; nothing is left behind.
        """
        self.history = []
        request = self._ask(function=_callable(train, args, kwargs))
        request = replace(request, params=_shown(request, train))
        with _arguments_named():
            session = user_data.session_of(list(request.data.values()))
            if self._in_driver:
                session = session or SparkSession.getActiveSession()
                result = run_recorded(in_driver, session, request)
            else:
                session = session or user_data.active_session()
                with interruptible(session, request.checkpoint_dir):
                    result = run_recorded(on_workers, session, request)
        self.history = result.history
        return result.values if request.results == "all" else result.values[0]


def _shown(request: FunctionRequest, train: Any) -> tuple[Mapping[str, Any], ...]:
    """Return what is asked for, as a run's record shows it."""
    names = ("num_workers", "parallelism", "num_shards", "device", "max_restarts",
             "checkpoint_dir", "resume", "keep_checkpoints", "cpus_per_worker",
             "gpus_per_worker")  # fmt: skip
    values = {"run": train, **{name: getattr(request, name) for name in names}}
    if request.min_workers is not None:
        values["num_workers"] = (request.min_workers, request.num_workers)
    values |= {f"data: {name}": user_data.described(value) for name, value in request.data.items()}
    return tuple(
        {"name": name, "value": shown(value), "is_set": True}
        for name, value in values.items()
        if value is not None
    )


@contextmanager
def _arguments_named() -> Iterator[None]:
    """Errors that speak of the estimators' Params name the arguments of `TorchRunner` instead."""
    try:
        yield
    except (ClusterError, ConfigError, StorageError, TrainingFailed) as error:
        message = str(error)
        for param, argument in _ARGUMENTS.items():
            message = message.replace(param, argument)
        error.args = (message,)
        raise


def _range(value: Any) -> tuple[int | None, int | None]:
    """Fewest and most workers, of which the first is None if there is no choice."""
    rule = "num_workers is a number, or a pair of the fewest (at least 1) and the most"
    if not isinstance(value, (tuple, list)):
        require(value is None or _is_count(value), rule, value)
        require(value is None or value >= 0, "num_workers must be at least 0", value)
        return None, value
    is_pair = len(value) == 2 and all(map(_is_count, value))
    require(is_pair and 1 <= value[0] <= value[1], rule, value)
    return value[0], value[1]


def _size(mesh: Mesh, num_workers: int | tuple[int, int] | None) -> int:
    """Workers of a mesh; ConfigError if as many were not asked for."""
    if isinstance(num_workers, (tuple, list)):
        raise ConfigError(
            f"parallelism=Mesh({mesh}) has {mesh.size} workers, and num_workers={num_workers} lets "
            "them come and go, which leaves gaps in a mesh; leave num_workers unset. A later run "
            "with resume=True may have another mesh"
        )
    if num_workers not in (None, 0, mesh.size):
        raise ConfigError(
            f"parallelism=Mesh({mesh}) is made of {mesh.size} workers, and num_workers is "
            f"{num_workers}; leave num_workers unset, or choose axes whose product it is"
        )
    return mesh.size if num_workers is None else num_workers


def _is_count(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _by_name(data: Any) -> dict[str, user_data.Data]:
    if data is None:
        return {}
    given = data if isinstance(data, Mapping) else {"train": data}
    sets = {name: user_data.spark_frame(value) for name, value in given.items()}
    for value in sets.values():
        user_data.require_data(value)
    return sets


def _run_name(value: Any) -> str | None:
    try:
        return to_run_name(value)
    except TypeError as error:
        raise ConfigError(f"run_name: {error}") from error


def _inputs(value: Any) -> dict[str, Specification] | None:
    if value is None:
        return None
    require(isinstance(value, Mapping), "inputs must be a mapping by name", value)
    try:
        found: dict[str, Specification] = to_inputs(value)
    except TypeError as error:
        raise ConfigError(f"inputs: {error}") from error
    check_names(named(found))
    return found


def _callable(train: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
    if isinstance(train, (str, Path)):
        path = Path(train)
        rule = "a script takes no keyword arguments: pass its command line as texts"
        require(not kwargs, rule, kwargs)
        require(path.is_file(), "there is no such script", str(path))
        return Script(path.name, path.read_text(encoding="utf-8"), tuple(map(str, args)))
    if not callable(train):
        raise ConfigError(
            f"run takes a function or the path of a script; received {train!r}; pass the function "
            "itself and its arguments, run(train, ...), without calling it"
        )
    if not takes(train, args, kwargs) and (refused := refusal(train, args, kwargs)):
        raise refused
    return partial(train, *args, **kwargs)
