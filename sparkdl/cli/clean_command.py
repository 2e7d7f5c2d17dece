"""The command ``sparkdl clean``: removes the spools that fits have kept."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from sparkdl.cli.command_line import CONF, Command, conf_of
from sparkdl.cli.job_files.job_file import SparkSection
from sparkdl.config import require
from sparkdl.errors import ConfigError
from sparkdl.report.live.views import activity_view, showing
from sparkdl.storage.storage import scheme_of

_DAY_SECONDS = 86400.0
_EXAMPLES = """\
example:
  sparkdl clean /data/sparkdl
  sparkdl clean /data/sparkdl --older-than 7
  sparkdl clean /data/sparkdl --master spark://host:7077
"""


@click.command(cls=Command, epilog=_EXAMPLES)
@click.argument("directory", metavar="DIR", type=click.Path())
@click.option(
    "--older-than",
    default=0.0,
    metavar="DAYS",
    help="leave what was used since (default: leave nothing)",
)
@click.option("--master", metavar="URL", help="local[2], spark://host:7077, yarn, ...")
@CONF
def clean(directory: str, older_than: float, master: str | None, conf: tuple[str, ...]) -> None:
    """Remove the spools that fits have kept on local disks.

    DIR is what fits were given as cacheDir. What a process has in use stays, and so does whatever
    else lies in DIR. With --master the executors of that cluster remove it on their hosts too.
    """
    from sparkdl.data.spool import kept_spools

    require(older_than >= 0, "--older-than must be 0 or more days", older_than)
    entries = conf_of(conf)
    seconds = older_than * _DAY_SECONDS
    is_path = directory != "" and scheme_of(directory) is None
    require(is_path, "DIR must be a folder of local disks", directory)
    directory = str(Path(directory).absolute())
    if _is_folder(directory):
        _show("this machine", kept_spools.clean(directory, seconds))
    elif master is None:
        raise ConfigError(f"this machine has no folder {directory}; for executors give --master")
    else:
        print(f"this machine: no folder {directory}", flush=True)
    if master is None:
        return
    with showing("starting Spark"):
        from sparkdl.cli.job_files.spark_session import make_session
        from sparkdl.spark.frames.kept_frames import clean_executors

        spark = make_session(SparkSection(master=master, conf=entries), "sparkdl clean")
    try:
        for host, found in clean_executors(spark, directory, seconds).items():
            _show(host, found)
    finally:
        with showing("stopping Spark", partial(activity_view, has_lines=False)):
            spark.stop()


def _is_folder(directory: str) -> bool:
    try:
        return Path(directory).is_dir()
    except OSError as error:
        raise ConfigError(f"cannot look at {directory}: {error.strerror}") from error


def _show(where: str, found: tuple[int, int]) -> None:
    removed, left = found
    rest = f", {left:,} bytes are in use or newer" if left else ""
    print(f"{where}: removed {removed:,} bytes{rest}", flush=True)
