"""The command ``sparkdl doctor``: its arguments, its lines and its exit status."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from functools import partial

from sparkdl.cli.command_line import Command, Run, ended
from sparkdl.cli.doctor.finding import Finding, Order, left_out
from sparkdl.cli.doctor.machine_checks import examine_machine
from sparkdl.config import require
from sparkdl.report.live.views import activity_view, showing
from sparkdl.runtime.versions import installed

_EXAMPLES = """\
Each line is ok, or says what is wrong and what to do. The exit status is 1 if something is wrong.
A gang of workers is started on the cluster, which sums a few numbers.

example:
  sparkdl doctor                  this machine, and Spark's default master
  sparkdl doctor --master spark://host:7077 --checkpoint-dir hdfs:///checkpoints
  sparkdl doctor --remote sc://host:15002 --num-workers 4
  sparkdl doctor --master yarn --conf spark.executor.instances=4
  sparkdl doctor --no-cluster     this machine alone
  spark-submit --master yarn --archives env.tar.gz#env jobs/doctor.py
"""


def _set_up(parser: argparse.ArgumentParser) -> Run:
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--master", metavar="URL", help="local[2], spark://host:7077, yarn, k8s://..."
    )
    where.add_argument("--remote", metavar="URL", help="a Spark Connect server, sc://host:15002")
    where.add_argument("--no-cluster", action="store_true", help="look at this machine alone")
    parser.add_argument(
        "--conf",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an entry of Spark's configuration; may be given several times",
    )
    parser.add_argument("--checkpoint-dir", metavar="URL", help="a place for checkpoints to try")
    parser.add_argument(
        "--num-workers",
        type=int,
        metavar="N",
        help="workers to try (default: as many as fit would start, but two if there is room)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=Order.timeout_seconds,
        metavar="SECONDS",
        help="longest wait for each answer (default: %(default)g)",
    )
    return _run


def _run(given: argparse.Namespace) -> int:
    """Look at everything, line by line; the exit status says whether something is wrong."""
    problems: list[str] = []

    def show(findings: Iterator[Finding]) -> None:
        for finding in findings:
            print(finding.line(), flush=True)
            if finding.state == "wrong":
                problems.append(finding.subject)

    def look() -> None:
        order = make_order(given)
        print("this machine")
        is_remote = is_client(order.master, os.environ) and not given.no_cluster
        show(_shown("looking at this machine", examine_machine(os.environ, is_remote=is_remote)))
        if not given.no_cluster:
            where = order.master or "the master of spark-submit or the configuration"
            print(f"\nthe cluster: {where}")
            show(_shown("looking at the cluster", examine_cluster(order)))

    status = ended(look)
    if status == 0:
        shown = f"{len(problems)} wrong: {', '.join(problems)}" if problems else "nothing is wrong"
        print(f"\n{shown}")
    return status or int(bool(problems))


def examine_cluster(order: Order) -> Iterator[Finding]:
    """Start a session, ask it, try a gang, and stop it again, if pyspark is there."""
    if installed("pyspark") is None:
        yield left_out("session", "Spark cannot be asked without pyspark")
        return
    from sparkdl.cli.doctor import cluster_checks

    yield from cluster_checks.examine_cluster(order)


DOCTOR = Command(
    name="doctor",
    description=("Check whether this machine and a cluster have everything that training needs."),
    examples=_EXAMPLES,
    set_up=_set_up,
)


def is_client(master: str | None, environ: Mapping[str, str]) -> bool:
    """Whether the session would be one of Spark Connect, with Spark elsewhere."""
    return (master or environ.get("SPARK_REMOTE", "")).startswith("sc://")


def _shown(what: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """The findings; a terminal shows what the next one is waited for."""
    while True:
        with showing(what, partial(activity_view, has_lines=False)):
            finding = next(findings, None)
        if finding is None:
            return
        yield finding


def make_order(given: argparse.Namespace) -> Order:
    """What the command line asks for; raises ConfigError."""
    entries = [text.partition("=") for text in given.conf]
    for text, (key, separator, _) in zip(given.conf, entries, strict=True):
        require(bool(key and separator), "--conf takes key=value", text)
    few = given.num_workers is not None and given.num_workers < 1
    require(not few, "--num-workers must be at least 1", given.num_workers)
    require(given.timeout > 0, "--timeout must be a positive number", given.timeout)
    is_remote = given.remote is None or given.remote.startswith("sc://")
    require(is_remote, "--remote takes a URL such as sc://host:15002", given.remote)
    return Order(
        master=given.remote or given.master,
        conf={key: value for key, _, value in entries},
        checkpoint_dir=given.checkpoint_dir,
        num_workers=given.num_workers,
        timeout_seconds=given.timeout,
    )
