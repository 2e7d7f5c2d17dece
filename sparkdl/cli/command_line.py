"""A subcommand of ``sparkdl``, which may be a script of ``jobs/`` too, and how it ends."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from sparkdl.errors import SparkDLError, did_you_mean

_NEEDED = ("pyspark", "py4j", "pandas", "torch")
"""Packages without which most commands cannot work; py4j comes with pyspark."""
_INTERRUPTED, _UNREAD = 130, 141
"""Exit status after Ctrl-C, and where nobody reads the output, as shells have them."""

Run = Callable[[argparse.Namespace], int]
"""Does what the parsed arguments ask for; returns the exit status."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A row in the table of subcommands."""

    name: str
    description: str
    """First line of ``--help``."""
    examples: str
    """Last lines of ``--help``."""
    set_up: Callable[[argparse.ArgumentParser], Run]
    """Adds the arguments; gives what runs with them."""

    def add_to(self, commands: Any) -> None:
        """Make this a subcommand; the parsed arguments will have its ``run``."""
        first = self.description.rstrip(".")
        parser = commands.add_parser(
            self.name, help=first[0].lower() + first[1:], **self._parser_arguments()
        )
        parser.set_defaults(run=self.set_up(parser))

    def run_script(self, arguments: Sequence[str] | None = None) -> int:
        """Run as a script of ``jobs/``, by default on the process's arguments; see `ended`."""
        parser = Parser(**self._parser_arguments())
        run = self.set_up(parser)
        given = parser.parse_args(arguments)
        return while_read(lambda: run(given))

    def _parser_arguments(self) -> dict[str, Any]:
        return {
            "description": self.description,
            "epilog": self.examples,
            "formatter_class": _Formatter,
        }


class Parser(argparse.ArgumentParser):
    """Says which command, choice or option may be meant where one is unknown."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        known = action.choices
        if known is not None and value not in known:
            names = [str(one) for one in known]
            hint = did_you_mean(value, names) or ";"
            what = "command" if isinstance(known, dict) else "choice"
            raise argparse.ArgumentError(
                action if what == "choice" else None,
                f"unknown {what} {value!r}{hint} known: {', '.join(names)}",
            )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse has it; a command refuses unknown options itself, which knows its own."""
        found, others = super().parse_known_args(args, namespace)
        if others and not self._subparsers:
            known = [one for action in self._actions for one in action.option_strings]
            hints = [did_you_mean(one.partition("=")[0], known) for one in others if one[0] == "-"]
            self.error(f"unrecognized arguments: {' '.join(others)}{''.join(hints)}")
        return found, others


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Breaks sentences where the terminal ends, and leaves examples, which are indented."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = (
            [line] if line.startswith(" ") else textwrap.wrap(line, width) or [""]
            for line in text.splitlines()
        )
        return "\n".join(indent + line for group in lines for line in group)


def ended(action: Callable[[], None], words: Callable[[str], str] = str) -> int:
    """Run ``action``; an error that the user can mend is one line on stderr, as ``words`` puts it.

    Returns:
        The exit status: 0; 1 after an error that sparkdl raised on purpose, or where pyspark or
        torch are not installed; 130 after Ctrl-C.
    """
    try:
        action()
    except SparkDLError as error:
        print(f"error: {words(str(error))}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _NEEDED:
            raise
        print(
            f"error: this needs {package}, which is not installed for {sys.executable}; "
            f"pip install {package.replace('py4j', 'pyspark')}, in a version that 'sparkdl doctor' "
            "names",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    return 0


class _Output:
    """stdout or stderr; when nobody reads it any more, the command ends as by Ctrl-C.

    SIGPIPE ends other commands. Python ignores it, and must: lost workers would raise it too.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_read = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if self.is_read:
            with self._watched():
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        if self.is_read:
            with self._watched():
                self._stream.flush()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            self.is_read = False
            # Python flushes what is left when it ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            signal.raise_signal(signal.SIGINT)


def while_read(run: Callable[[], int]) -> int:
    """Run a command until it ends; 141 if its output has lost its reader, such as ``head``."""
    with contextlib.ExitStack() as stack:
        none = stack.enter_context(Path(os.devnull).open("w"))  # a service may have no streams
        return _while_read(run, _Output(sys.stdout or none), _Output(sys.stderr or none))


def _while_read(run: Callable[[], int], out: _Output, err: _Output) -> int:
    streams: Any = out, err
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        try:
            status = run()
            out.flush()
        except KeyboardInterrupt:
            if out.is_read and err.is_read:
                raise
    return status if out.is_read and err.is_read else _UNREAD
