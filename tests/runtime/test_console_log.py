from __future__ import annotations

import io
import logging

from sparkdl.runtime.console_log import ConsoleHandler, log_to_console


def test_lines_name_level_and_logger() -> None:
    stream = io.StringIO()
    log_to_console("INFO", stream=stream)
    logging.getLogger("sparkdl.train").info("epoch %s", 3)
    logging.getLogger("sparkdl.train").debug("not this")
    assert stream.getvalue().endswith("INFO sparkdl.train: epoch 3\n")
    assert stream.getvalue().count("\n") == 1


def test_the_last_call_decides() -> None:
    first, second = io.StringIO(), io.StringIO()
    log_to_console("INFO", stream=first)
    log_to_console("WARNING", stream=second)
    logging.getLogger("sparkdl").warning("once")
    logging.getLogger("sparkdl").info("never")
    assert first.getvalue() == ""
    assert second.getvalue().count("\n") == 1
    handlers = logging.getLogger("sparkdl").handlers
    assert sum(isinstance(handler, ConsoleHandler) for handler in handlers) == 1
