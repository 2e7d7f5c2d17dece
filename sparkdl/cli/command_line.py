"""How does a job read its command line, and how does it end?

A `JobCommand` is the same job in two forms: ``sparkdl train`` and ``spark-submit jobs/train.py``.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import resources
from typing import Any, Generic, TypeVar

from sparkdl.cli.job_file import load_job
from sparkdl.errors import SparkDLError
from sparkdl.runtime.console_log import log_to_console

T = TypeVar("T")

_SETTING_HELP = (
    "set one key of the job file; VALUE is a TOML value or, failing that, a string; may be given "
    "several times"
)
_EXTRAS = {"pyspark": "spark", "py4j": "spark", "pandas": "spark", "torch": "torch"}
"""Packages without which most commands cannot work, and the extra that installs each."""
_INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


class Form(Enum):
    """How the user has started a job, hence how they would start the next one."""

    SCRIPT = "spark-submit jobs/{}.py"
    COMMAND = "sparkdl {}"

    def start_of(self, name: str) -> str:
        """The beginning of the command line of the job ``name``."""
        return self.value.format(name)


@dataclass(frozen=True, kw_only=True)
class JobCommand(Generic[T]):
    """A job that a TOML file describes."""

    name: str
    kind: type[T]
    """The job's class in `jobfile`."""
    action: Callable[[T, Form], None]
    """Does the job and prints what came of it."""
    description: str
    """First line of ``--help``."""
    config: str
    """A file of ``conf/``, for the examples of the script."""
    starter: str
    """The job file to begin with, among those that come with `commands`."""
    settings: tuple[str, ...] = ("",)
    """What follows the file in each example, such as ``--set estimator.epochs=5``."""
    explain: Callable[[T, Form], None] | None = None
    """With ``--explain`` called in place of ``action``; None: there is no such option."""

    def examples(self, form: Form) -> str:
        """Last lines of ``--help``."""
        file = self.config if form is Form.SCRIPT else self.starter
        start = f"{form.start_of(self.name)} --config {file}"
        lines = [f"{start} {settings}".rstrip() for settings in self.settings]
        if form is Form.COMMAND:
            lines.insert(0, f"{form.start_of(self.name)} --starter > {file}")
        return "example:\n" + "\n".join(f"  {line}" for line in lines)

    def starter_text(self) -> str:
        """What stands in `starter`."""
        file = resources.files("sparkdl.cli") / "starters" / self.starter
        return file.read_text(encoding="utf-8")


def run_job(command: JobCommand[T], arguments: Sequence[str] | None = None) -> int:
    """Do a job as a script of ``jobs/``; its arguments are those of the process if None.

    Returns:
        The exit status, see `ended`.
    """
    parser = argparse.ArgumentParser(
        description=command.description,
        epilog=command.examples(Form.SCRIPT),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser, command)
    return do_job(command, parser, parser.parse_args(arguments), Form.SCRIPT)


def add_arguments(
    parser: argparse.ArgumentParser, command: JobCommand[Any]
) -> tuple[argparse.Action, argparse.Action]:
    """Add what the job takes. Returns ``--config`` and ``--set``, for their completion."""
    config = parser.add_argument("--config", metavar="FILE", help="the job file (TOML)")
    setting = parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="SECTION.KEY=VALUE",
        help=_SETTING_HELP,
    )
    parser.add_argument(
        "--starter", action="store_true", help="print a job file to begin with, and end"
    )
    if command.explain is not None:
        parser.add_argument(
            "--explain",
            action="store_true",
            help="only print the plan, the time that it would take, and what would be better",
        )
    parser.add_argument("--log-level", default="WARNING", help="level of sparkdl's log lines")
    return config, setting


def do_job(
    command: JobCommand[T], parser: argparse.ArgumentParser, given: argparse.Namespace, form: Form
) -> int:
    """Do the job that the parsed command line asks for.

    Returns:
        The exit status, see `ended`.
    """
    if given.starter:
        print(command.starter_text(), end="")
        return 0
    level = given.log_level.upper()
    if level not in logging.getLevelNamesMapping():
        parser.error(f"unknown --log-level {given.log_level}; known: DEBUG, INFO, WARNING, ERROR")
    if given.config is None and not given.settings:
        start = form.start_of(command.name)
        parser.error(
            f"a job file is needed: name it with --config FILE; '{start} --starter > "
            f"{command.starter}' writes one to begin with"
        )
    log_to_console(level)
    explains = command.explain is not None and given.explain
    action = command.explain if explains and command.explain is not None else command.action
    return ended(lambda: action(load_job(command.kind, given.config, given.settings), form))


def ended(action: Callable[[], None]) -> int:
    """Run ``action``; an error that the user can mend is one line on stderr.

    Returns:
        The exit status: 0; 1 after an error that sparkdl raised on purpose, or where pyspark or
        torch are not installed; 130 after Ctrl-C.
    """
    try:
        action()
    except SparkDLError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        print(
            f"error: this needs {package}, which is not installed for {sys.executable}; "
            f'pip install "sparkdl-torch[{_EXTRAS[package]}]"',
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    return 0
