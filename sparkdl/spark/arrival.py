"""How many executors will there be, once all have registered?

Where the configuration does not tell, as in a standalone cluster, they register one after the
other while the application starts, and a count taken then is a matter of luck.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from pyspark.sql import SparkSession

from sparkdl.spark.preflight import ClusterInfo, from_conf, inspect_cluster, registered_executors
from sparkdl.spark.session import conf, is_connect
from sparkdl.spark.settings import Settings

_STILL_SECONDS = 3.0
"""How long no executor may have come before they are taken to be all there."""
_STARTING_SECONDS = 30.0
"""Age of an application from which on its executors are there; also Spark's own patience."""


def await_executors(spark: SparkSession, settings: Settings) -> ClusterInfo:
    """The cluster when its executors have registered, for a number of workers made from theirs.

    Returns at once where the configuration gives their number, where it comes and goes with the
    jobs, and where the application is not new.
    """
    configured = from_conf(partial(conf, spark))
    if is_connect(spark) or configured.num_executors or configured.dynamic_allocation:
        return inspect_cluster(spark)
    age_seconds = time.time() - spark.sparkContext.startTime / 1000
    settle(
        partial(registered_executors, spark),
        still_seconds=_STILL_SECONDS if age_seconds < _STARTING_SECONDS else 0.0,
        timeout_seconds=settings.start_timeout_seconds,
    )
    return inspect_cluster(spark)


def settle(
    count: Callable[[], int],
    *,
    still_seconds: float,
    timeout_seconds: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return when ``count`` has been the same for a while and not 0, or when time is up."""
    began = since = clock()
    found = count()
    while clock() - began < timeout_seconds and (found == 0 or clock() - since < still_seconds):
        sleep(0.1)
        before, found = found, count()
        if found != before:
            since = clock()
