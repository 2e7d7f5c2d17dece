"""The log lines of sparkdl on a console, which leave the progress bar intact.

Importing the package adds no handler: a library's host decides. Job scripts and workers, which
are their own hosts, call `log_to_console`.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
TIME_FORMAT = "%H:%M:%S"


class ConsoleHandler(logging.Handler):
    """Writes lines above a live tqdm bar, which is then drawn again below them."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record; called by logging."""
        from tqdm import tqdm

        try:
            tqdm.write(self.format(record), file=self._stream or sys.stderr)
        except Exception:
            self.handleError(record)


def log_to_console(level: int | str = logging.INFO, *, stream: TextIO | None = None) -> None:
    """Send the package's records of ``level`` and above to ``stream``, stderr by default.

    Calling it again changes level and stream; there is never more than one such handler.
    """
    logger = logging.getLogger("sparkdl")
    for handler in list(logger.handlers):
        if isinstance(handler, ConsoleHandler):
            logger.removeHandler(handler)
    handler = ConsoleHandler(stream)
    handler.setFormatter(logging.Formatter(FORMAT, TIME_FORMAT))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
