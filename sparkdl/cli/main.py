"""What does the command ``sparkdl`` do with its arguments?

Each subcommand is a row of a table. Neither torch nor pyspark is imported before one of them runs,
so that ``--help`` and the completion of a shell are quick, and work where these are missing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from sparkdl import __version__
from sparkdl.cli import completion, export_command
from sparkdl.cli.command_line import Form, JobCommand, add_arguments, do_job
from sparkdl.cli.doctor import doctor_command
from sparkdl.cli.job_commands import EVALUATE, EXPLAIN, PREDICT, PREPARE, TRAIN, TUNE

Run = Callable[[argparse.Namespace], int]

_JOBS: tuple[JobCommand[Any], ...] = (TRAIN, EVALUATE, PREDICT, TUNE, PREPARE, EXPLAIN)
_UI = "sparkdl.report.server.ui_command"
_DESCRIPTION = "Train PyTorch models on Spark, apply them, and look after both."
_EPILOG = """\
begin with:
  sparkdl doctor                          is everything there that training needs?
  sparkdl train --starter > train.toml    a job file to edit
  sparkdl train --config train.toml
  sparkdl COMMAND --help                  what a command takes, with examples
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; the arguments are those of the process if None.

    Returns:
        The exit status: 0; 1 after an error that the user can mend, which is one line on stderr;
        2 after wrong arguments.
    """
    parser = make_parser()
    completion.complete(parser)
    words = list(sys.argv[1:] if arguments is None else arguments)
    _see_own_modules()
    if words[:1] == ["ui"]:  # which has a parser of its own
        return _ui(words[1:])
    given = parser.parse_args(words)
    run: Run = given.run
    return run(given)


def make_parser() -> argparse.ArgumentParser:
    """The arguments of all subcommands."""
    parser = argparse.ArgumentParser(
        prog="sparkdl",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"sparkdl {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add(
        commands,
        "doctor",
        doctor_command.DESCRIPTION,
        doctor_command.EXAMPLES,
        doctor_command.add_arguments,
    )
    for job in _JOBS:
        setup = partial(_add_job, job)
        _add(commands, job.name, job.description, job.examples(Form.COMMAND), setup)
    _add(
        commands,
        "export",
        export_command.DESCRIPTION,
        export_command.EXAMPLES,
        export_command.add_arguments,
    )
    ui = "Show the reports of runs, also of those under way, in a browser on this machine."
    _add(commands, "ui", ui, "example:\n  sparkdl ui runs", _add_ui)
    _add(
        commands,
        "completion",
        completion.DESCRIPTION,
        completion.EXAMPLES,
        completion.add_arguments,
    )
    return parser


def _add(
    commands: Any,
    name: str,
    description: str,
    examples: str,
    setup: Callable[[argparse.ArgumentParser], None],
) -> None:
    first = description.rstrip(".")
    parser = commands.add_parser(
        name,
        help=first[0].lower() + first[1:],
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    setup(parser)


def _add_job(job: JobCommand[Any], parser: argparse.ArgumentParser) -> None:
    config, setting = add_arguments(parser, job)
    completion.files_for(config, "toml")
    completion.settings_for(setting, job.kind)

    def run(given: argparse.Namespace) -> int:
        return do_job(job, parser, given, Form.COMMAND)

    parser.set_defaults(run=run)


def _add_ui(parser: argparse.ArgumentParser) -> None:
    """For completion and the list of commands only; see `main`."""
    parser.add_argument("directory", metavar="DIR")


def _ui(arguments: Sequence[str]) -> int:
    status: int = import_module(_UI).main(arguments)
    return status


def _see_own_modules() -> None:
    """Let a job name the modules of the working directory, as ``python -m`` would."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
