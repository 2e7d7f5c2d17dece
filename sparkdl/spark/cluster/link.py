"""The link between driver and workers of a run: channel, files, and the place of checkpoints."""

from __future__ import annotations

import builtins
import contextlib
import logging
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from pyspark.sql import SparkSession

from sparkdl.comm.access import Address
from sparkdl.comm.channel import ChannelServer, Hub
from sparkdl.comm.file_chunks import gathered
from sparkdl.errors import ClusterError, StorageError
from sparkdl.runtime.activity import doing
from sparkdl.serialization.program.imported_values import ProgramValues
from sparkdl.spark.cluster.cluster_info import mib
from sparkdl.spark.cluster.probe import NO_NEEDS, Needs, probe
from sparkdl.spark.cluster.slots import Slots
from sparkdl.spark.daemon import DAEMON
from sparkdl.spark.session.compat import conf, driver_address, is_connect
from sparkdl.spark.session.settings import Settings
from sparkdl.spark.session.termination import removed_at_termination
from sparkdl.storage.checkpoint_format import MANIFEST, folders, run_keys
from sparkdl.storage.hadoop_storage import HadoopStorage, open_on_driver
from sparkdl.storage.mounted import Mounted
from sparkdl.storage.pruning import remove
from sparkdl.storage.retried import Retried
from sparkdl.storage.storage import Data, Storage, absolute, check_writable, is_full, open_storage
from sparkdl.worker.lifecycle import RELAYED

logger = logging.getLogger(__name__)

_MAX_TASK_BYTES = 16 * 2**20
"""Most bytes of weights, or of a function, that travel in the task itself."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """The connection between driver and workers, and the place of checkpoints."""

    hub: Hub
    channel: Address | None
    """The driver's channel, if executors reach it. Tasks get `address`."""
    files: DriverFolder
    """The driver's temporary folder, which the channel serves."""
    checkpoints: Storage | None
    url: str | None
    """``checkpointDir``, with scheme and host as other processes know it, or None."""
    relays: bool
    """True if workers reach ``checkpointDir`` by way of the driver's channel only."""
    values: ProgramValues = field(default_factory=ProgramValues)
    """Values that the program has changed in modules that workers import from files. They stand in
    front of all that is pickled for workers, so that these have them first."""

    def address(self) -> Address | None:
        """The channel, with what opens it in the present attempt: for tasks launched in that."""
        if self.channel is None:
            return None
        return replace(self.channel, secret=self.hub.access.secret)

    def send(
        self,
        name: str,
        data: bytes,
        *,
        what: str,
        remedy: str,
        in_task: bool = False,
        pieces: Callable[[], Iterable[bytes | memoryview]] | None = None,
    ) -> bytes | None:
        """Make bytes available to all workers of a run, through the channel if there is one.

        ``pieces``, if given, make them one after the other in place of ``data``.
        ``what`` and ``remedy`` are for the error. With ``in_task`` small ones travel in the task
        also where there is a channel.

        Returns:
            What must travel in the task; None: workers read the file ``name``.

        Raises:
            ClusterError: there is no channel, and they are too large for the task.
        """
        if pieces is not None:
            if self.channel is not None:
                if not self.files.exists(name):
                    self.files.write(name, pieces())
                return None
            data = gathered(pieces())
        is_small = len(data) <= _MAX_TASK_BYTES
        if is_small and (in_task or self.channel is None):
            return data
        if self.channel is None:
            raise ClusterError(
                f"{what} {len(data) >> 20} MiB; from a driver that executors cannot reach at most "
                f"{_MAX_TASK_BYTES >> 20} MiB can be sent; {remedy}"
            )
        if not self.files.exists(name):
            self.files.write(name, data)
        return None


def open_link(
    spark: SparkSession,
    slots: Slots,
    settings: Settings,
    *,
    checkpoint_dir: str | None,
    run_id: str,
    stack: contextlib.ExitStack,
    needs: Needs = NO_NEEDS,
    preloads: bool = False,
    before_jobs: Callable[[], None] | None = None,
    once_submitted: Callable[[], None] | None = None,
) -> Link:
    """Open the channel and the place for checkpoints, and try both from the executors.

    ``before_jobs`` is called when they are open on the driver; its job may go on meanwhile.
    ``once_submitted`` is called when executors are asked to try, which takes seconds where Python
    begins, and with ``preloads`` imports what training needs. What it submits comes after that, but
    may need what turns out to be missing there.
    """
    files = stack.enter_context(driver_folder())
    url, place = None, None
    checkpoints: Storage | None = None
    if checkpoint_dir is not None:
        place = open_on_driver(spark, checkpoint_dir)
        url = place.url if isinstance(place, HadoopStorage) else absolute(checkpoint_dir)
        checkpoints = Retried(place)
        check_writable(checkpoints)
    hub = Hub()
    served = Mounted(files)
    server = None
    if settings.channel != "workers":
        server = _serve(spark, hub, served, settings)
        stack.callback(server.shutdown)
    address = server.address if server is not None else None
    # Spark Connect and rounds do without.
    needs_channel = settings.channel == "driver" or (slots.is_gang and not is_connect(spark))
    if before_jobs is not None:
        before_jobs()
    doing("checking the executors")
    # In rounds the driver alone writes checkpoints, so executors need not see where.
    found = probe(
        spark,
        num_tasks=num_asked(spark, slots),
        profile=slots.profile,
        channel=address,
        needs_channel=needs_channel,
        storage_url=url,
        checkpoints=checkpoints if slots.is_gang else None,
        run_id=run_id,
        settings=settings,
        needs=needs,
        preloads=preloads,
        once_submitted=once_submitted,
    )
    if address is not None and not found.reaches_driver:
        if needs_channel:
            raise ClusterError(
                f"executors cannot reach the driver at {address.host}:{address.port}; open that "
                "port (spark.sparkdl.channel.port fixes its number), correct spark.driver.host, or "
                "set spark.sparkdl.channel=workers to train without progress, logs and driver-kept "
                "checkpoints"
            )
        logger.warning("executors cannot reach this client: training shows no progress and no logs")
        address = None
    relays = found.storage_failure is not None
    if relays:
        assert place is not None
        _require_relay(place, address, str(found.storage_failure))
        served.mount(RELAYED, place)  # workers try again what fails, so the driver need not
    if address is None and checkpoints is None and slots.is_gang:
        logger.warning(
            "the driver cannot keep checkpoints, since executors do not reach it, and no "
            "checkpointDir is set: a restart would begin at step 0"
        )
    if address is not None and checkpoints is None:
        checkpoints = files
    return Link(
        hub=hub,
        channel=address,
        files=files,
        checkpoints=checkpoints,
        url=url,
        relays=relays,
        values=found.values,
    )


def num_asked(spark: SparkSession, slots: Slots) -> int:
    """Return how many tasks try the executors of a run: about as many as it has workers."""
    if not slots.cluster.is_one_process:
        return slots.num_workers
    # Each slot has a process of Python, which all tasks share.
    is_ready = conf(spark, "spark.python.daemon.module") == DAEMON  # when it has begun
    return 1 if is_ready else min(slots.num_workers, slots.total or 1)


def _require_relay(checkpoints: Storage, address: Address | None, reason: str) -> None:
    """Executors cannot open ``checkpointDir``: the driver passes files on, or it is an error."""
    if address is None:
        raise StorageError(
            f"checkpointDir cannot be used from the executors: {reason}. Nor can the driver pass "
            "files on, since the workers have no channel to it; give the executors what they lack, "
            "choose another checkpointDir, or let them reach the driver (spark.sparkdl.channel)"
        )
    logger.info(
        "checkpoints reach %s by way of the driver, since executors cannot open it: %s",
        checkpoints,
        reason,
    )


def _serve(spark: SparkSession, hub: Hub, files: Mounted, settings: Settings) -> ChannelServer:
    bind, announce = driver_address(spark)
    port = settings.channel_port
    try:
        return ChannelServer(hub, bind=bind, announce=announce, port=port, files=files)
    except OSError as error:
        raise ClusterError(
            f"cannot open the channel to the workers on {bind}:{port or 'any port'}: {error}; "
            "choose another spark.sparkdl.channel.port (0 takes a free one; two fits at a time "
            "need two), or correct spark.driver.bindAddress"
        ) from error


_REMEDY = "set checkpointDir, or TMPDIR to a folder with more space"


@contextlib.contextmanager
def driver_folder() -> Iterator[DriverFolder]:
    """A new one, which is removed in the end, also by SIGTERM and SIGHUP."""
    with tempfile.TemporaryDirectory(prefix="sparkdl-") as path, removed_at_termination(path):
        yield DriverFolder(open_storage(path))


class DriverFolder:
    """A storage on local disk that gives up all but the newest whole checkpoint when it is full."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._lock = threading.Lock()
        self._has_warned = False

    def __str__(self) -> str:
        return str(self._storage)

    def check_space(
        self, *, weights_bytes: int, checkpoint_bytes: int, num_checkpoints: int
    ) -> None:
        """Warn if a run will not find the space for its weights, twice, and its checkpoints."""
        needed = 2 * weights_bytes + num_checkpoints * checkpoint_bytes
        free = shutil.disk_usage(str(self)).free
        if free < needed:
            logger.warning(
                "the driver's temporary folder %s has %d MiB free; this run needs about %d MiB "
                "there: %d checkpoint(s) of about %d MiB, and the weights twice. It keeps fewer if "
                "the folder is full; %s",
                self,
                mib(free),
                mib(needed),
                num_checkpoints,
                mib(checkpoint_bytes),
                _REMEDY,
            )

    def write(self, path: str, data: Data) -> None:
        for is_last_try in (False, True):
            try:
                return self._storage.write(path, data)
            except StorageError as error:
                if not is_full(error):
                    raise
                has_room = not is_last_try and self._made_room(path)
                # Pieces are gone; who has sent them sends them again.
                if not has_room or not isinstance(data, bytes | bytearray | memoryview):
                    raise StorageError(f"{error}; {_REMEDY}") from error.__cause__

    def read(self, path: str) -> bytes:
        return self._storage.read(path)

    def list(self, path: str) -> builtins.list[str]:
        return self._storage.list(path)

    def remove(self, path: str) -> None:
        self._storage.remove(path)

    def exists(self, path: str) -> bool:
        return self._storage.exists(path)

    def _made_room(self, path: str) -> bool:
        """Remove checkpoints, but the newest whole one and the one that is being written."""
        with self._lock:
            gone = 0
            for key in run_keys(self._storage):
                steps = folders(self._storage, key)
                whole = [s for s in steps if self._storage.exists(f"{s.path}/{MANIFEST}")]
                written = [s for s in steps if path.startswith(f"{s.path}/")] or steps[-1:]
                for step in steps:
                    if step not in whole[-1:] + written:
                        remove(self._storage, step)
                        gone += 1
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "the driver's temporary folder %s is full, so it keeps one checkpoint only; %s",
                    self,
                    _REMEDY,
                )
            return gone > 0
