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

from sparkdl.channel import Address, ChannelServer, Hub
from sparkdl.checkpoint.storage import Storage, absolute, check_writable, open_storage
from sparkdl.errors import ClusterError
from sparkdl.spark.preflight import is_encrypted
from sparkdl.spark.probe import probe
from sparkdl.spark.session import conf, driver_address, is_connect
from sparkdl.spark.settings import Settings

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
    """``checkpointDir``, as all processes can open it, or None."""


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
    hub = Hub()
    server = None
    is_clear = is_encrypted(partial(conf, spark)) and not settings.allow_unencrypted
    if settings.channel != "workers" and not (in_rounds and is_clear):
        server = _serve(spark, hub, files, settings)
        stack.callback(server.shutdown)
    url = absolute(checkpoint_dir) if checkpoint_dir is not None else None
    checkpoints = open_storage(url) if url is not None else None
    if checkpoints is not None:
        check_writable(checkpoints)
    address = server.address if server is not None else None
    reached = _probe(spark, num_workers, profile, address, url, checkpoints, run_id)
    if address is not None and not reached:
        _require_no_channel(spark, address, settings, in_rounds=in_rounds)
        address = None
    if address is None and checkpoints is None and not in_rounds:
        logger.warning(
            "the driver cannot keep checkpoints, since executors do not reach it, and no "
            "checkpointDir is set: a restart would begin at step 0"
        )
    if address is not None and checkpoints is None:
        checkpoints = files
    return Link(hub=hub, channel=address, files=files, checkpoints=checkpoints, url=url)


def _serve(spark: SparkSession, hub: Hub, files: Storage, settings: Settings) -> ChannelServer:
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
) -> bool:
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
