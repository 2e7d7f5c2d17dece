"""The command ``sparkdl ui DIR``, which starts the server of runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sparkdl.errors import SparkDLError

_PORT = 4050
"""Next to those of Spark's own pages, 4040 and up."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve the runs of a directory until Ctrl-C.

    Args:
        arguments: the command line; that of the process if None.

    Returns:
        The exit status.
    """
    given = parser().parse_args(arguments)

    from sparkdl.report.record.run_folder import RunReader
    from sparkdl.report.server.report_server import RunServer
    from sparkdl.storage.storage import open_storage, without_password

    if "://" not in given.directory and not Path(given.directory).expanduser().is_dir():
        print(
            f"error: there is no folder {given.directory}; name the one that fits were given as "
            "reportDir; jobs leave their reports in 'runs' of the folder that they were started in",
            file=sys.stderr,
        )
        return 1
    try:
        server = RunServer((given.host, given.port), RunReader(open_storage(given.directory)))
    except SparkDLError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (OSError, OverflowError) as error:
        where = f"{given.host}, port {given.port}"
        remedy = "choose another --port, or 0 for a free one"
        print(f"error: cannot listen at {where}: {error}; {remedy}", file=sys.stderr)
        return 1
    with server:
        shown = without_password(given.directory)
        print(f"the runs in {shown} are at {server.url} (Ctrl-C ends this)", flush=True)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print()
    return 0


def parser() -> argparse.ArgumentParser:
    """What the command line may say."""
    made = argparse.ArgumentParser(
        prog="sparkdl ui",
        description="Show the runs of a directory in the browser, also while they go on.",
        epilog="example:\n  sparkdl ui runs --port 4050",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "directory",
        metavar="DIR",
        help="path or URL that was given to fits as reportDir, or to jobs as estimator.report_dir",
    )
    made.add_argument(
        "--port", type=int, default=_PORT, help=f"port; 0 takes a free one (default {_PORT})"
    )
    made.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen at; anyone who reaches another than 127.0.0.1 can read all runs",
    )
    return made


if __name__ == "__main__":
    sys.exit(main())
