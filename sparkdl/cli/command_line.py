"""A subcommand of ``sparkdl``, which may be a script of ``jobs/`` too, and how it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import click

from sparkdl.config import require
from sparkdl.errors import SparkDLError, did_you_mean, meant

_NEEDED = ("pyspark", "py4j", "pandas", "torch")
"""Packages without which most commands cannot work; py4j comes with pyspark."""
_INTERRUPTED, _UNREAD = 130, 141
"""Exit status after Ctrl-C, and where nobody reads the output, as shells have them."""

CONF = click.option(
    "--conf",
    multiple=True,
    metavar="KEY=VALUE",
    help="an entry of Spark's configuration; may be given several times",
)


class Command(click.Command):
    """A subcommand, which ends as `ended` has it; its callback returns a status or None."""

    words: Callable[[str], str] = str
    """Puts the errors of the command as the user has to read them."""
    keys: Callable[[str], Iterable[str]] = staticmethod(lambda name: ())
    """The keys of a job file that may be meant by an unknown option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse them; what a job file has in other places is told as such."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name, own = error.option_name.lstrip("-"), [one.name or "" for one in self.params]
            found = None if meant(name, own) else next(iter(self.keys(name)), None)
            if found is None:
                raise
            raise click.UsageError(
                f"no such option {error.option_name!r}; write --set {found}=VALUE", ctx
            ) from error
        except click.UsageError as error:
            takes_job = any(one.name == "config" for one in self.params)
            file = next((one for one in given if one.endswith(".toml")), None)
            if type(error) is not click.UsageError or not takes_job:
                raise
            if file is None:
                raise click.UsageError(
                    f"{error.message}; a job's values are in its file, see --keys: write --set "
                    "SECTION.KEY=VALUE for others",
                    ctx,
                ) from error
            if "--config" in given or any(one.startswith("--config=") for one in given):
                raise
            raise click.UsageError(f"name the job file by its option: --config {file}", ctx) from (
                error
            )

    def get_short_help_str(self, limit: int = 45) -> str:
        """The first sentence, whole and as a part of a list."""
        first = (self.help or "").splitlines()[0].rstrip(".")
        return first[:1].lower() + first[1:]

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Examples, whose lines are left as they are."""
        formatter.write(f"\n{self.epilog}")

    def invoke(self, ctx: click.Context) -> int:
        """Do the work; returns the exit status."""
        call = super().invoke
        return ended(lambda: call(ctx), self.words)


class Commands(click.Group):
    """The subcommands in their order, one of which is suggested where another is asked for."""

    command_class = Command
    format_epilog = Command.format_epilog

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order in which they were added."""
        return list(self.commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The subcommand; ends the command with a usage error where there is none."""
        found = super().get_command(ctx, cmd_name)
        if found is None and not ctx.resilient_parsing:
            hint = did_you_mean(cmd_name, self.commands) or ";"
            known = ", ".join(self.commands)
            ctx.fail(f"unknown command {cmd_name!r}{hint} known: {known}")
        return found


def run(
    command: click.Command, arguments: Sequence[str] | None = None, name: str | None = None
) -> int:
    """Run a command, by default on the process's arguments.

    Returns:
        The exit status of `ended`; 2 after wrong arguments; 141 if the output has lost its reader.
    """
    settings: Any = {"help_option_names": ["-h", "--help"]}

    def act() -> int:
        try:
            status: int = command.main(arguments, name, standalone_mode=False, **settings)
        except click.ClickException as error:
            error.show()
            return error.exit_code
        except click.Abort:  # Ctrl-C before the command has begun
            return _INTERRUPTED
        return status

    return while_read(act)


def conf_of(texts: Sequence[str]) -> dict[str, str]:
    """The entries that ``--conf`` gives; raises ConfigError."""
    entries = [text.partition("=") for text in texts]
    for text, (key, separator, _) in zip(texts, entries, strict=True):
        require(bool(key and separator), "--conf takes key=value", text)
    return {key: value for key, _, value in entries}


def ended(action: Callable[[], int | None], words: Callable[[str], str] = str) -> int:
    """Run ``action``; an error that the user can mend is one line on stderr, as ``words`` puts it.

    Returns:
        The exit status: that of the action, or 0; 1 after an error that sparkdl raised on purpose,
        or where pyspark or torch are not installed; 130 after Ctrl-C.
    """
    try:
        return action() or 0
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
        if all(getattr(one, "is_read", True) for one in (sys.stdout, sys.stderr)):
            print("interrupted", file=sys.stderr)
        return _INTERRUPTED


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
