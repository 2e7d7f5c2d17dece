"""The command ``sparkdl``: the table of its subcommands, and how the arguments choose one.

Neither torch nor pyspark is imported before a subcommand runs: ``--help`` needs neither.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from sparkdl import __version__
from sparkdl.cli.clean_command import clean
from sparkdl.cli.command_line import Command, Commands, run
from sparkdl.cli.completion import completion
from sparkdl.cli.doctor_command import doctor
from sparkdl.cli.job_commands import EVALUATE, EXPLAIN, PREDICT, PREPARE, TRAIN, TUNE, Form
from sparkdl.errors import ConfigError

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

example:
  sparkdl export models/digits digits.onnx
  sparkdl export s3://models/digits digits.pt2
  sparkdl export models/digits exported/digits
"""

_PORT = 4050
"""Next to those of Spark's own pages, 4040 and up."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand, by default on the process's arguments; returns the exit status of `run`."""
    folder = str(Path.cwd())
    if folder not in sys.path:  # jobs may name the user's own modules, as with python -m
        sys.path.append(folder)
    return run(commands, arguments, "sparkdl")


@click.group(cls=Commands, epilog=_EPILOG, subcommand_metavar="COMMAND ...", no_args_is_help=False)
@click.version_option(__version__, message="sparkdl %(version)s")
def commands() -> None:
    """Train PyTorch models on Spark, apply them, and look after both."""


@click.command(cls=Command, epilog=_EXPORT_EXAMPLES)
@click.argument("model", metavar="MODEL", type=click.Path())
@click.argument("target", metavar="TARGET", type=click.Path())
@click.option("--overwrite", is_flag=True, help="replace what is there")
@click.option(
    "--trust",
    multiple=True,
    metavar="PACKAGE",
    help="a package whose code the model may name besides; may be given several times",
)
def export(model: str, target: str, overwrite: bool, trust: tuple[str, ...]) -> None:
    """Write a saved model in another form: ONNX, an exported program, or weights alone.

    MODEL is the folder of a saved model, TARGET the file or folder to write. Both are paths, or
    URLs that Python can open. Spark is not needed.
    """
    from sparkdl.serialization.export import export_saved
    from sparkdl.storage.storage import without_password

    exported = export_saved(model, target, overwrite=overwrite, trusted=trust)
    print(f"wrote {exported.what}: {without_password(target)}")
    for line in exported.inputs:
        print(f"  {line}")
    if exported.difference is not None:
        print(f"  largest difference from the model's outputs: {exported.difference:.2g}")


@click.command(cls=Command, epilog="example:\n  sparkdl ui runs --port 4050\n")
@click.argument("directory", metavar="DIR", type=click.Path())
@click.option("--port", default=_PORT, metavar="PORT", help=f"0 takes a free one (default {_PORT})")
@click.option(
    "--host",
    metavar="HOST",
    default="127.0.0.1",
    help="address to listen at; anyone who reaches another than 127.0.0.1 can read all runs",
)
def ui(directory: str, port: int, host: str) -> None:
    """Show the reports of runs, also of those under way, in a browser on this machine.

    DIR is the path or URL that was given to fits as reportDir, or to jobs as estimator.report_dir.
    """
    from sparkdl.report.record.run_folder import RunReader
    from sparkdl.report.run_server import RunServer
    from sparkdl.storage.storage import open_storage, without_password

    if "://" not in directory and not Path(directory).expanduser().is_dir():
        raise ConfigError(
            f"there is no folder {directory}; name the one that fits were given as "
            "reportDir; jobs leave their reports in 'runs' of the folder that they were started in"
        )
    try:
        server = RunServer((host, port), RunReader(open_storage(directory)))
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen at {host}, port {port}: {str(error).rstrip('.')}; choose another "
            "--port, or 0 for a free one"
        ) from error
    with server:
        shown = without_password(directory)
        print(f"the runs in {shown} are at {server.url} (Ctrl-C ends this)", flush=True)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print()


for _command in (
    doctor,
    *(job.command(Form.COMMAND) for job in (TRAIN, EVALUATE, PREDICT, TUNE, PREPARE, EXPLAIN)),
    export,
    ui,
    clean,
    completion,
):
    commands.add_command(_command)
