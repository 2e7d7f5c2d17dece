"""How do driver and workers reach each other in a fit, and where do its checkpoints lie?"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import SparkSession

from sparkdl.comm.channel import Address, ChannelServer, Hub
from sparkdl.errors import ClusterError, StorageError
from sparkdl.spark.cluster.cluster_info import is_encrypted
from sparkdl.spark.cluster.probe import Findings, probe
from sparkdl.spark.session.compat import conf, driver_address, is_connect
from sparkdl.spark.session.settings import Settings
from sparkdl.storage.hadoop_storage import HadoopStorage, open_on_driver
from sparkdl.storage.mounted import Mounted
from sparkdl.storage.storage import Storage, absolute, check_writable, open_storage
from sparkdl.worker.lifecycle import RELAYED

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Link:
    """How driver and workers reach each other, and where checkpoints lie."""

    hub: Hub
    channel: Address | None
    """The driver's channel, if executors reach it."""
    files: Storage
    """The driver's temporary folder, which the channel serves."""
    checkpoints: Storage | None
    url: str | None
    """``checkpointDir``, with scheme and host as other processes know it, or None."""
    relays: bool
    """Whether workers reach ``checkpointDir`` by way of the driver's channel only."""


def open_link(
    spark: SparkSession,
    *,
    checkpoint_dir: str | None,
    num_workers: int,
    profile: ResourceProfile | None,
    settings: Settings,
    run_id: str,
    stack: contextlib.ExitStack,
    in_rounds: bool = False,
) -> Link:
    """Open the channel and the place for checkpoints, and try both from the executors.

    Rounds do without the channel where it would carry in clear what Spark encrypts.
    """
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sparkdl-"))
    files = open_storage(folder)
    url, checkpoints = _open_checkpoints(spark, checkpoint_dir)
    hub = Hub()
    served = Mounted(files)
    server = None
    is_clear = is_encrypted(partial(conf, spark)) and not settings.allow_unencrypted
    if settings.channel != "workers" and not (in_rounds and is_clear):
        server = _serve(spark, hub, served, settings)
        stack.callback(server.shutdown)
    address = server.address if server is not None else None
    # In rounds the driver alone writes checkpoints, so executors need not see where.
    seen = checkpoints if not in_rounds else None
    found = _probe(spark, num_workers, profile, address, url, seen, run_id)
    if address is not None and not found.reaches_driver:
        _require_no_channel(spark, address, settings, in_rounds=in_rounds)
        address = None
    relays = found.storage_failure is not None
    if relays:
        assert checkpoints is not None
        _require_relay(checkpoints, address, str(found.storage_failure))
        served.mount(RELAYED, checkpoints)
    if address is None and checkpoints is None and not in_rounds:
        logger.warning(
            "the driver cannot keep checkpoints, since executors do not reach it, and no "
            "checkpointDir is set: a restart would begin at step 0"
        )
    if address is not None and checkpoints is None:
        checkpoints = files
    return Link(
        hub=hub, channel=address, files=files, checkpoints=checkpoints, url=url, relays=relays
    )


def _open_checkpoints(
    spark: SparkSession, checkpoint_dir: str | None
) -> tuple[str | None, Storage | None]:
    """``checkpointDir`` as other processes know it, and the place itself, if there is one."""
    if checkpoint_dir is None:
        return None, None
    storage = open_on_driver(spark, checkpoint_dir)
    check_writable(storage)
    url = storage.url if isinstance(storage, HadoopStorage) else absolute(checkpoint_dir)
    return url, storage


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
    except (pa.ArrowException, OSError) as error:
        raise ClusterError(
            f"cannot open the channel to the workers on {bind}:{port or 'any port'}: {error}; "
            "choose another spark.sparkdl.channel.port (0 takes a free one; two fits at a time "
            "need two), or correct spark.driver.bindAddress"
        ) from error


def _probe(
    spark: SparkSession,
    num_workers: int,
    profile: ResourceProfile | None,
    address: Address | None,
    url: str | None,
    checkpoints: Storage | None,
    run_id: str,
) -> Findings:
    ask = partial(
        probe,
        spark,
        num_tasks=num_workers,
        profile=profile,
        channel=address,
        storage_url=url,
        run_id=run_id,
    )
    if checkpoints is None:
        return ask(marker=None)
    marker = f"sparkdl-marker-{run_id}"
    checkpoints.write(marker, b"")
    try:
        return ask(marker=marker)
    finally:
        checkpoints.remove(marker)


def _require_no_channel(
    spark: SparkSession, address: Address, settings: Settings, *, in_rounds: bool
) -> None:
    """Executors do not reach the driver: fine from Spark Connect and in rounds, else an error."""
    if settings.channel == "driver" or not (in_rounds or is_connect(spark)):
        raise ClusterError(
            f"executors cannot reach the driver at {address.host}:{address.port}; open that port "
            "(spark.sparkdl.channel.port fixes its number), correct spark.driver.host, or set "
            "spark.sparkdl.channel=workers to train without progress, logs and driver-kept "
            "checkpoints"
        )
    logger.warning("executors cannot reach this client: training shows no progress and no logs")
