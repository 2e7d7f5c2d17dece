"""A subcommand of ``sparkdl``, which may be a script of ``jobs/`` too, and how it ends."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sparkdl.errors import SparkDLError

_NEEDED = ("pyspark", "py4j", "pandas", "torch")
"""Packages without which most commands cannot work; py4j comes with pyspark."""
_INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""

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
        """Run as a script of ``jobs/``; the arguments are those of the process if None.

        Returns:
            The exit status, see `ended`.
        """
        parser = argparse.ArgumentParser(**self._parser_arguments())
        run = self.set_up(parser)
        return run(parser.parse_args(arguments))

    def _parser_arguments(self) -> dict[str, Any]:
        return {
            "description": self.description,
            "epilog": self.examples,
            "formatter_class": argparse.RawDescriptionHelpFormatter,
        }


def ended(action: Callable[[], None], words: Callable[[str], str] = str) -> int:
    """Run ``action``; an error that the user can mend is one line on stderr.

    Args:
        action: does the work.
        words: puts a message into the words of what the user wrote.

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
