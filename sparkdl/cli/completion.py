"""Completion of the arguments of ``sparkdl`` in a shell, by Click.

The shell calls ``sparkdl`` itself with the line so far in its environment.
https://click.palletsprojects.com/en/stable/shell-completion/
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    ZshComplete,
    add_completion_class,
    get_completion_class,
    split_arg_string,
)

from sparkdl.cli.command_line import Command
from sparkdl.cli.job_files.toml_values import dataclass_in
from sparkdl.errors import meant
from sparkdl.spark.params.converters import parts_of

_EXAMPLES = """\
example:
  source <(sparkdl completion bash)                       in this shell; for all, in ~/.bashrc
  source <(sparkdl completion zsh)                        in ~/.zshrc, after compinit
  sparkdl completion fish > ~/.config/fish/completions/sparkdl.fish
"""


@click.command(cls=Command, epilog=_EXAMPLES)
@click.argument("shell", metavar="SHELL", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print what makes a shell complete the arguments of sparkdl."""
    made = get_completion_class(shell)
    assert made is not None
    root = ctx.find_root().command
    print(made(root, {}, "sparkdl", "_SPARKDL_COMPLETE").source(), end="")


@add_completion_class
class _Bash(BashComplete):
    """To bash, = and : are words, and no space shall follow a key or a folder."""

    source_template = BashComplete.source_template.replace(
        "-o nosort", "-o nosort -o nospace"
    ).replace("${COMP_WORDS[*]}", "${COMP_LINE:0:COMP_POINT}")

    def get_completion_args(self) -> tuple[list[str], str]:
        line = os.environ["COMP_WORDS"]
        *args, last = split_arg_string(f"{line}x")  # there is a last word, also behind a space
        self._is_quoted = (line.count("'") + line.count('"')) % 2 == 1
        self._before = "" if self._is_quoted else re.sub(r"^--[^=]*=|[^=:]*$", "", last[:-1])
        return args[1:], last[:-1]

    def format_completion(self, item: CompletionItem[str]) -> str:
        value = item.value.removeprefix(self._before)
        if not self._is_quoted:
            value = re.sub(r"([^\w=:/.,+@%~-])", r"\\\\\1", value)  # of two, Click's read takes one
            value += "" if value.endswith(("=", "/")) else " "
        return f"{item.type},{value}"


@add_completion_class
class _Zsh(ZshComplete):
    """No space follows what has no description: a key, a folder."""

    source_template = ZshComplete.source_template.replace("compadd -U", "compadd -S '' -U")


def job_files(ctx: click.Context, param: click.Parameter, prefix: str) -> list[str]:
    """The folders and the TOML files whose paths begin with ``prefix``."""
    folder = prefix[: prefix.rfind("/") + 1]
    found = sorted(Path(folder or ".").expanduser().glob("*"))
    names = [f"{folder}{one.name}{'/' * one.is_dir()}" for one in found]
    return [one for one in names if one.startswith(prefix) and one.endswith((".toml", "/"))]


def settings(job: type, prefix: str) -> Iterator[str]:
    """Yield what may follow ``--set`` and begins with ``prefix``: a job's keys, or their values."""
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


def keys_meant(job: type, name: str) -> Iterator[str]:
    """The keys that another name than theirs, without its section, means; or a section's name."""
    own = [key for key, _ in keys(job)]
    within = [key for key in own if key.startswith(f"{name}.")]
    yield from sorted(within, key=lambda key: key != f"{name}.path")
    known = {key.rpartition(".")[2]: key for key in reversed(own)}
    found = meant(name.replace("-", "_"), known)
    if found is not None:
        yield known[found]


def _values(hint: Any) -> Iterator[str]:
    """The values of a key that can be listed."""
    for part in parts_of(hint):
        if get_origin(part) is Literal:
            yield from map(str, get_args(part))
        elif part is bool:
            yield from ("true", "false")
