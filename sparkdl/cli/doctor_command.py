"""The command ``sparkdl doctor``: its arguments, its lines and its exit status."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from functools import partial

from sparkdl.cli.command_line import Command, Run, ended
from sparkdl.cli.doctor.cluster_checks import Order, examine_cluster
from sparkdl.cli.doctor.finding import Finding
from sparkdl.cli.doctor.machine_checks import examine_machine
from sparkdl.errors import ConfigError
from sparkdl.report.live.choose_view import activity_view
from sparkdl.report.live.views import showing

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
    found: list[Finding] = []
    status = ended(lambda: found.extend(_look(given)))
    if status != 0:
        return status
    problems = [finding.subject for finding in found if finding.state == "wrong"]
    if not problems:
        print("\nnothing is wrong")
        return 0
    print(f"\n{len(problems)} wrong: {', '.join(problems)}")
    return 1


DOCTOR = Command(
    name="doctor",
    description=("Check whether this machine and a cluster have everything that training needs."),
    examples=_EXAMPLES,
    set_up=_set_up,
)


def _look(given: argparse.Namespace) -> Iterator[Finding]:
    """Print each finding as soon as it is there."""
    order = make_order(given)
    print("this machine")
    is_remote = is_client(order.master, os.environ) and not given.no_cluster
    yield from _shown("looking at this machine", examine_machine(os.environ, is_remote=is_remote))
    if given.no_cluster:
        return
    print(f"\nthe cluster: {order.master or 'the master of spark-submit or the configuration'}")
    yield from _shown("looking at the cluster", examine_cluster(order))


def is_client(master: str | None, environ: Mapping[str, str]) -> bool:
    """Whether the session would be one of Spark Connect, with Spark elsewhere."""
    return (master or environ.get("SPARK_REMOTE", "")).startswith("sc://")


def _shown(what: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """Print each finding; on a terminal the wait for the next one is shown too."""
    while True:
        with showing(what, partial(activity_view, has_lines=False)):
            finding = next(findings, None)
        if finding is None:
            return
        print(finding.line(), flush=True)
        yield finding


def make_order(given: argparse.Namespace) -> Order:
    """What the command line asks for.

    Raises:
        ConfigError: an argument is wrong.
    """
    conf = dict(_entry(text) for text in given.conf)
    if given.num_workers is not None and given.num_workers < 1:
        raise ConfigError(f"--num-workers must be at least 1; received {given.num_workers}")
    if not given.timeout > 0:
        raise ConfigError(f"--timeout must be a positive number; received {given.timeout:g}")
    if given.remote is not None and not given.remote.startswith("sc://"):
        raise ConfigError(
            f"--remote takes a URL such as sc://host:15002; received {given.remote!r}"
        )
    return Order(
        master=given.remote or given.master,
        conf=conf,
        checkpoint_dir=given.checkpoint_dir,
        num_workers=given.num_workers,
        timeout_seconds=given.timeout,
    )


def _entry(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise ConfigError(f"--conf takes key=value; received {text!r}")
    return key, value
