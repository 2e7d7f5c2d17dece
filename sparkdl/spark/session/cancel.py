"""Ends a Spark job from the driver, also one that Spark does not know yet.

Spark cancels active jobs only. The call that submits one may still be on its way, and a barrier
stage that found too few slots is not active until Spark tries it again.
"""

from __future__ import annotations

import logging
import threading
import time

from pyspark.sql import SparkSession

from sparkdl.spark.session.compat import cancel_jobs
from sparkdl.spark.session.interrupts import is_hurried

logger = logging.getLogger(__name__)

_AGAIN_SECONDS = 0.5
_WAIT_SECONDS = 60.0


def end_job(spark: SparkSession, tag: str, is_over: threading.Event) -> None:
    """Cancel what is tagged until it has ended, and wait for that, but no longer than a minute.

    A user who is in a hurry need not wait that long. The cancelling goes on in the background.

    Args:
        spark: the session.
        tag: of `tag_jobs`, in the thread that submits the job.
        is_over: is set when the job has ended.
    """
    cancelling = threading.Thread(
        target=_keep_cancelling, args=(spark, tag, is_over), name="sparkdl-cancel", daemon=True
    )
    cancelling.start()
    deadline = time.monotonic() + _WAIT_SECONDS
    while not is_over.wait(timeout=_AGAIN_SECONDS):
        if time.monotonic() > deadline or is_hurried():
            logger.warning(
                "the Spark job with the tag %s could not be cancelled yet, and may take slots; it "
                "is cancelled as soon as Spark lets it begin, or kill it in Spark's UI",
                tag,
            )
            return
    cancelling.join()


def _keep_cancelling(spark: SparkSession, tag: str, is_over: threading.Event) -> None:
    while True:
        try:
            cancel_jobs(spark, tag)
        except Exception as error:  # whatever py4j or gRPC raise where Spark is gone
            logger.info("Spark does not cancel jobs any more: %s", error)
        if is_over.wait(timeout=_AGAIN_SECONDS):
            return
