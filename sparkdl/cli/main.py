"""The command ``sparkdl``: the table of its subcommands, and how the arguments choose one.

Neither torch nor pyspark is imported before a subcommand runs: ``--help`` needs neither.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sparkdl import __version__
from sparkdl.cli.clean_command import CLEAN
from sparkdl.cli.command_line import Command, Parser, Run, ended, while_read
from sparkdl.cli.completion import COMPLETION, complete
from sparkdl.cli.doctor_command import DOCTOR
from sparkdl.cli.job_commands import EVALUATE, EXPLAIN, PREDICT, PREPARE, TRAIN, TUNE, Form
from sparkdl.errors import ConfigError

_DESCRIPTION = "Train PyTorch models on Spark, apply them, and look after both."
_EPILOG = """\
begin with:
  sparkdl doctor                          checks whether training can run here
  sparkdl train --starter > train.toml    a job file to edit
  sparkdl train --config train.toml
  sparkdl COMMAND --help                  what a command takes, with examples
"""
_EXPORT_EXAMPLES = """\
The ending of TARGET chooses the form:
  .onnx          an ONNX file, compared with the model on batches of several sizes
  .pt2           an exported program, for torch.export.load
  .safetensors   the weights alone, by name
  none of these  a folder for sparkdl.load_module, which needs none of the model's own code

Spark is not needed. MODEL and TARGET are paths, or URLs that Python can open.

example:
  sparkdl export models/digits digits.onnx
  sparkdl export s3://models/digits digits.pt2
  sparkdl export models/digits exported/digits
"""

_PORT = 4050
"""Next to those of Spark's own pages, 4040 and up."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand, by default on the process's arguments.

    Returns:
        The exit status of `ended`; 2 after wrong arguments.
    """
    parser = make_parser()
    complete(parser)
    folder = str(Path.cwd())
    if folder not in sys.path:  # jobs may name the user's own modules, as with python -m
        sys.path.append(folder)
    given = parser.parse_args(arguments)
    run: Run = given.run
    return while_read(lambda: run(given))


def make_parser() -> argparse.ArgumentParser:
    """The arguments of all subcommands."""
    parser = Parser(
        prog="sparkdl",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"sparkdl {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    jobs = (TRAIN, EVALUATE, PREDICT, TUNE, PREPARE, EXPLAIN)
    commands_of_jobs = (job.command(Form.COMMAND) for job in jobs)
    for command in (DOCTOR, *commands_of_jobs, EXPORT, UI, CLEAN, COMPLETION):
        command.add_to(commands)
    return parser


def _set_up_export(parser: argparse.ArgumentParser) -> Run:
    parser.add_argument("model", metavar="MODEL", help="folder of a saved model")
    parser.add_argument("target", metavar="TARGET", help="file or folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")
    parser.add_argument(
        "--trust",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="a package whose code the model may name besides; may be given several times",
    )
    return lambda given: ended(lambda: _export(given))


def _export(given: argparse.Namespace) -> None:
    from sparkdl.serialization.export import export_saved
    from sparkdl.storage.storage import without_password

    exported = export_saved(
        given.model, given.target, overwrite=given.overwrite, trusted=given.trust
    )
    print(f"wrote {exported.what}: {without_password(given.target)}")
    for line in exported.inputs:
        print(f"  {line}")
    if exported.difference is not None:
        print(f"  largest difference from the model's outputs: {exported.difference:.2g}")


EXPORT = Command(
    name="export",
    description="Write a saved model in another form: ONNX, an exported program, or weights alone.",
    examples=_EXPORT_EXAMPLES,
    set_up=_set_up_export,
)


def _set_up_ui(parser: argparse.ArgumentParser) -> Run:
    parser.add_argument(
        "directory",
        metavar="DIR",
        help="path or URL that was given to fits as reportDir, or to jobs as estimator.report_dir",
    )
    parser.add_argument(
        "--port", type=int, default=_PORT, help=f"port; 0 takes a free one (default {_PORT})"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen at; anyone who reaches another than 127.0.0.1 can read all runs",
    )
    return lambda given: ended(lambda: _serve(given))


def _serve(given: argparse.Namespace) -> None:
    from sparkdl.report.record.run_folder import RunReader
    from sparkdl.report.run_server import RunServer
    from sparkdl.storage.storage import open_storage, without_password

    if "://" not in given.directory and not Path(given.directory).expanduser().is_dir():
        raise ConfigError(
            f"there is no folder {given.directory}; name the one that fits were given as "
            "reportDir; jobs leave their reports in 'runs' of the folder that they were started in"
        )
    try:
        server = RunServer((given.host, given.port), RunReader(open_storage(given.directory)))
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen at {given.host}, port {given.port}: {error}; choose another --port, "
            "or 0 for a free one"
        ) from error
    with server:
        shown = without_password(given.directory)
        print(f"the runs in {shown} are at {server.url} (Ctrl-C ends this)", flush=True)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print()


UI = Command(
    name="ui",
    description="Show the reports of runs, also of those under way, in a browser on this machine.",
    examples="example:\n  sparkdl ui runs --port 4050",
    set_up=_set_up_ui,
)
