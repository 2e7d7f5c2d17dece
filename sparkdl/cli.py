"""How does a job script read its arguments, and how does it end?"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from sparkdl.errors import SparkDLError
from sparkdl.jobfile import load_job
from sparkdl.log import log_to_console

T = TypeVar("T")

_SETTING_HELP = (
    "set one key of the job file; VALUE is a TOML value or, failing that, a string; may be given "
    "several times"
)


def run_job(
    kind: type[T],
    action: Callable[[T], None],
    *,
    description: str,
    example: str,
    arguments: Sequence[str] | None = None,
) -> int:
    """Read the job file that the command line names and do the job.

    Args:
        kind: the job's class in `jobfile`.
        action: does the job and prints what came of it.
        description: first line of ``--help``.
        example: last line of ``--help``.
        arguments: the command line; that of the process if None.

    Returns:
        The exit status: 0, or 1 after an error that sparkdl raised on purpose, which is printed
        without a traceback of its own.
    """
    parser = argparse.ArgumentParser(
        description=description,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the job file (TOML)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="SECTION.KEY=VALUE",
        help=_SETTING_HELP,
    )
    parser.add_argument("--log-level", default="WARNING", help="level of sparkdl's log lines")
    given = parser.parse_args(arguments)
    level = given.log_level.upper()
    if level not in logging.getLevelNamesMapping():
        parser.error(f"unknown --log-level {given.log_level}; known: DEBUG, INFO, WARNING, ERROR")
    log_to_console(level)
    try:
        action(load_job(kind, given.config, given.settings))
    except SparkDLError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
