"""A run on the cluster: what all runs have, and how their gangs are ordered and launched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from pyspark.sql import DataFrame, SparkSession

from sparkdl.comm.file_chunks import JobResults
from sparkdl.errors import ClusterError
from sparkdl.report.live.progress import View
from sparkdl.runtime.versions import versions
from sparkdl.spark.cluster.gang import GangTask, Work, launch
from sparkdl.spark.cluster.link import Link
from sparkdl.spark.cluster.slots import Slots
from sparkdl.spark.session.settings import Settings
from sparkdl.worker.lifecycle import GangOrder

OrderType = TypeVar("OrderType", bound=GangOrder)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A run on the cluster, whatever its workers do. `supervisor.supervise` takes it to its end."""

    spark: SparkSession
    run_id: str
    """Names the run's jobs, so that they can be cancelled."""
    slots: Slots
    link: Link
    settings: Settings
    view: View
    """Gets what the workers report; of a fit it is the recorder."""
    max_restarts: int

    def gang_order(self, kind: Callable[..., OrderType], *, attempt: int, **work: Any) -> OrderType:
        """An order for a gang's workers: ``work``, and all that orders have in common."""
        return kind(
            run_id=self.run_id,
            attempt=attempt,
            storage_url=self.link.url,
            relays=self.link.relays,
            driver_hosts_channel=self.link.channel is not None,
            threads=self.slots.threads,
            versions=versions(),
            start_timeout_seconds=self.settings.start_timeout_seconds,
            # The driver knows better, and ends them before.
            slots_timeout_seconds=(
                0.0 if self.slots.is_barrier else self.settings.queue_timeout_seconds
            ),
            collective_timeout_seconds=self.settings.collective_timeout_seconds,
            heartbeat_timeout_seconds=self.settings.heartbeat_timeout_seconds,
            **work,
        )

    def gang_job(
        self,
        table: DataFrame,
        work: Work,
        order: GangOrder,
        *,
        num_workers: int,
        keeps_process: bool = True,
    ) -> Callable[[], JobResults]:
        """The call that runs ``work`` on a worker for each row of ``table``; see `gang.launch`.

        Raises:
            ClusterError: the stage is a plain one, and workers do not reach the driver's channel.
        """
        if not self.slots.is_barrier and self.link.channel is None:
            raise ClusterError(
                "under dynamic allocation, and with minWorkers on Spark Connect, the workers of a "
                "gang meet through the driver's channel, which executors do not reach; set "
                "spark.dynamicAllocation.enabled=false and leave minWorkers unset, or use a "
                "strategy that runs in rounds"
            )
        task = GangTask(
            work=work,
            order=order,
            channel=self.link.address(),
            attempt=order.attempt,
            num_tasks=None if self.slots.is_barrier else num_workers,
            keeps_process=keeps_process,
        )
        return partial(launch, table, task, self.slots.profile)
