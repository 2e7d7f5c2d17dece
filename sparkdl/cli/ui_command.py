"""The command ``sparkdl ui DIR``, which starts the server of runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from sparkdl.cli.command_line import Command, Run, ended
from sparkdl.errors import ConfigError

_PORT = 4050
"""Next to those of Spark's own pages, 4040 and up."""


def _set_up(parser: argparse.ArgumentParser) -> Run:
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
    """Serve the runs of a directory until Ctrl-C."""
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
    set_up=_set_up,
)
