"""The command ``sparkdl clean``: removes the spools that fits have kept."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from sparkdl.cli.command_line import Command, Run, ended
from sparkdl.cli.job_files.job_file import SparkSection
from sparkdl.config import require
from sparkdl.errors import ConfigError
from sparkdl.report.live.views import activity_view, showing
from sparkdl.storage.storage import scheme_of

_DAY_SECONDS = 86400.0
_EXAMPLES = """\
DIR is what fits were given as cacheDir. What a process has in use stays, and so does whatever \
else lies in DIR. \
With --master the executors of that cluster remove it on their hosts too.

example:
  sparkdl clean /data/sparkdl
  sparkdl clean /data/sparkdl --older-than 7
  sparkdl clean /data/sparkdl --master spark://host:7077
"""


def _set_up(parser: argparse.ArgumentParser) -> Run:
    parser.add_argument("directory", metavar="DIR", help="folder of local disks")
    parser.add_argument(
        "--older-than",
        type=float,
        default=0.0,
        metavar="DAYS",
        help="leave what was used since (default: leave nothing)",
    )
    parser.add_argument("--master", metavar="URL", help="local[2], spark://host:7077, yarn, ...")
    parser.add_argument(
        "--conf",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an entry of Spark's configuration; may be given several times",
    )
    return lambda given: ended(lambda: _clean(given))


def _clean(given: argparse.Namespace) -> None:
    from sparkdl.data.spool.kept_spools import clean

    require(given.older_than >= 0, "--older-than must be 0 or more days", given.older_than)
    entries = [text.partition("=") for text in given.conf]
    for text, (key, separator, _) in zip(given.conf, entries, strict=True):
        require(bool(key and separator), "--conf takes key=value", text)
    seconds = given.older_than * _DAY_SECONDS
    is_path = given.directory != "" and scheme_of(given.directory) is None
    require(is_path, "DIR must be a folder of local disks", given.directory)
    directory = str(Path(given.directory).absolute())
    if Path(directory).is_dir():
        _show("this machine", clean(directory, seconds))
    elif given.master is None:
        raise ConfigError(f"this machine has no folder {directory}; for executors give --master")
    else:
        print(f"this machine: no folder {directory}", flush=True)
    if given.master is None:
        return
    with showing("starting Spark"):
        from sparkdl.cli.job_files.spark_session import make_session
        from sparkdl.spark.frames.kept_frames import clean_executors

        conf = {key: value for key, _, value in entries}
        spark = make_session(SparkSection(master=given.master, conf=conf), "sparkdl clean")
    try:
        for host, found in clean_executors(spark, directory, seconds).items():
            _show(host, found)
    finally:
        with showing("stopping Spark", partial(activity_view, has_lines=False)):
            spark.stop()


def _show(where: str, found: tuple[int, int]) -> None:
    removed, left = found
    rest = f", {left:,} bytes are in use or newer" if left else ""
    print(f"{where}: removed {removed:,} bytes{rest}", flush=True)


CLEAN = Command(
    name="clean",
    description="Remove the spools that fits have kept on local disks.",
    examples=_EXAMPLES,
    set_up=_set_up,
)
