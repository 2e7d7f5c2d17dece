"""Completion of the arguments of ``sparkdl`` in a shell, by argcomplete.

The shell calls ``sparkdl`` itself with the line so far in its environment.
https://kislyuk.github.io/argcomplete/
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib import import_module
from typing import Any, Literal, get_args, get_origin, get_type_hints

from sparkdl.cli.command_line import Command, Run, ended
from sparkdl.cli.job_files.toml_values import dataclass_in
from sparkdl.errors import ConfigError, import_or
from sparkdl.spark.params.converters import parts_of

SHELLS = ("bash", "zsh", "fish")
_EXAMPLES = """\
example:
  source <(sparkdl completion bash)                       in this shell; for all, in ~/.bashrc
  source <(sparkdl completion zsh)                        in ~/.zshrc, after compinit
  sparkdl completion fish > ~/.config/fish/completions/sparkdl.fish
"""


def _set_up(parser: argparse.ArgumentParser) -> Run:
    parser.add_argument("shell", choices=SHELLS)
    return lambda given: ended(lambda: print(script(given.shell), end=""))


COMPLETION = Command(
    name="completion",
    description="Print what makes a shell complete the arguments of sparkdl.",
    examples=_EXAMPLES,
    set_up=_set_up,
)


def script(shell: str) -> str:
    """What the shell shall read; raises ConfigError without argcomplete."""
    remedy = "completion needs argcomplete; pip install argcomplete"
    with import_or(ConfigError(remedy)):
        argcomplete = import_module("argcomplete")
    text: str = argcomplete.shellcode(["sparkdl"], shell=shell)
    return f"{text.strip()}\n"


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell and end the process, if it is a shell that asks."""
    if "_ARGCOMPLETE" in os.environ:
        import_module("argcomplete").autocomplete(parser)


def complete_with(action: argparse.Action, completer: Callable[..., Any]) -> None:
    """Have an argument completed by what ``completer(prefix, ...)`` gives."""
    action.completer = completer  # type: ignore[attr-defined] # where argcomplete looks for it


def settings(job: type, prefix: str) -> Iterator[str]:
    """What may follow ``--set`` and begins with ``prefix``: a job's keys, then their values."""
    key, separator, _ = prefix.partition("=")
    for name, hint in keys(job):
        if separator and name == key:
            found = [f"{name}={value}" for value in _values(hint)]
        else:
            found = [f"{name}="]
        yield from (text for text in found if text.startswith(prefix))


def keys(job: type, above: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of a job file as ``section.key``, and the type of each."""
    hints = get_type_hints(job)
    for item in fields(job):
        hint, name = hints[item.name], f"{above}{item.name}"
        inner = dataclass_in(hint)
        if inner is not None and above.count(".") < 2:
            yield from keys(inner, f"{name}.")
        if above:
            yield name, hint


def _values(hint: Any) -> Iterator[str]:
    """The values of a key that can be listed."""
    for part in parts_of(hint):
        if get_origin(part) is Literal:
            yield from map(str, get_args(part))
        elif part is bool:
            yield from ("true", "false")
