"""The command ``sparkdl doctor``: its arguments, its lines and its exit status."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import click

from sparkdl.cli.command_line import CONF, Command, conf_of
from sparkdl.cli.doctor.finding import Finding, Order, left_out
from sparkdl.cli.doctor.machine_checks import examine_machine
from sparkdl.config import require
from sparkdl.report.live.views import activity_view, showing
from sparkdl.runtime.versions import installed

_EXAMPLES = """\
example:
  sparkdl doctor                  this machine, and Spark's default master
  sparkdl doctor --master spark://host:7077 --checkpoint-dir hdfs:///checkpoints
  sparkdl doctor --remote sc://host:15002 --num-workers 4
  sparkdl doctor --master yarn --conf spark.executor.instances=4
  sparkdl doctor --no-cluster     this machine alone
  spark-submit --master yarn --archives env.tar.gz#env jobs/doctor.py
"""


@click.command(cls=Command, epilog=_EXAMPLES)
@click.option("--master", metavar="URL", help="local[2], spark://host:7077, yarn, k8s://...")
@click.option("--remote", metavar="URL", help="a Spark Connect server, sc://host:15002")
@click.option("--no-cluster", is_flag=True, help="look at this machine alone")
@CONF
@click.option("--checkpoint-dir", metavar="URL", help="a place for checkpoints to try")
@click.option(
    "--num-workers",
    type=int,
    metavar="N",
    help="workers to try (default: as many as fit would start, but two if there is room)",
)
@click.option(
    "--timeout",
    default=Order.timeout_seconds,
    metavar="SECONDS",
    help=f"longest wait for each answer (default: {Order.timeout_seconds:g})",
)
def doctor(no_cluster: bool, **given: Any) -> int:
    """Check whether this machine and a cluster have everything that training needs.

    Each line is ok, or says what is wrong and what to do. The exit status is 1 if something is
    wrong. A gang of workers is started on the cluster, which sums a few numbers.
    """
    where = {"--master": given["master"], "--remote": given["remote"], "--no-cluster": no_cluster}
    named = [name for name, value in where.items() if value]
    if len(named) > 1:
        raise click.UsageError(f"{named[1]} is not allowed with {named[0]}")
    cluster_only = {"--conf": given["conf"], "--checkpoint-dir": given["checkpoint_dir"],
                    "--num-workers": given["num_workers"]}  # fmt: skip
    useless = [name for name, value in cluster_only.items() if value]
    if no_cluster and useless:
        raise click.UsageError(f"{useless[0]} is about a cluster; leave --no-cluster out")
    problems: list[str] = []

    def show(findings: Iterator[Finding]) -> None:
        for finding in findings:
            print(finding.line(), flush=True)
            if finding.state == "wrong":
                problems.append(finding.subject)

    order = make_order(given)
    print("this machine")
    is_remote = is_client(order.master, os.environ) and not no_cluster
    show(_shown("looking at this machine", examine_machine(os.environ, is_remote=is_remote)))
    if not no_cluster:
        print(f"\nthe cluster: {order.master or 'the master of spark-submit or the configuration'}")
        show(_shown("looking at the cluster", examine_cluster(order)))
    shown = f"{len(problems)} wrong: {', '.join(problems)}" if problems else "nothing is wrong"
    print(f"\n{shown}")
    return int(bool(problems))


def examine_cluster(order: Order) -> Iterator[Finding]:
    """Start a session, ask it, try a gang, and stop it again, if pyspark is there."""
    if installed("pyspark") is None:
        yield left_out("session", "Spark cannot be asked without pyspark")
        return
    from sparkdl.cli.doctor import cluster_checks

    yield from cluster_checks.examine_cluster(order)


def is_client(master: str | None, environ: Mapping[str, str]) -> bool:
    """Return True if the session would be one of Spark Connect, with Spark elsewhere."""
    return (master or environ.get("SPARK_REMOTE", "")).startswith("sc://")


def _shown(what: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """The findings; a terminal shows what the next one is waited for."""
    while True:
        with showing(what, partial(activity_view, has_lines=False)):
            finding = next(findings, None)
        if finding is None:
            return
        yield finding


def make_order(given: Mapping[str, Any]) -> Order:
    """Make the order from the options of the command line; raises ConfigError."""
    conf = conf_of(given["conf"])
    workers, timeout, remote = given["num_workers"], given["timeout"], given["remote"]
    require(workers is None or workers >= 1, "--num-workers must be at least 1", workers)
    require(timeout > 0, "--timeout must be a positive number", timeout)
    is_remote = remote is None or remote.startswith("sc://")
    require(is_remote, "--remote takes a URL such as sc://host:15002", remote)
    return Order(
        master=remote or given["master"],
        conf=conf,
        checkpoint_dir=given["checkpoint_dir"],
        num_workers=workers,
        timeout_seconds=timeout,
    )
