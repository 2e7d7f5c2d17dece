"""TOML tables become frozen dataclasses here, whose fields are all keys and types known."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from sparkdl.config import require
from sparkdl.errors import ConfigError, Problems, did_you_mean
from sparkdl.spark.params.converters import NAMES, parts_of
from sparkdl.storage.storage import at_home

T = TypeVar("T")
Tables = dict[str, Any]
_MOST = 2**64


class MissingKey(ConfigError):
    """A key or section is not there, for which no other can be blamed."""


def read_toml(path: str | Path) -> Tables:
    """Read a TOML file; raises ConfigError."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read the job file {path}: {error.strerror}") from error
    except ValueError as error:  # also of the encoding, or a number of thousands of digits
        raise ConfigError(
            f"{path} is not valid TOML: {error}; texts stand in quotes, true and false in small "
            "letters, and --starter prints a file to begin with"
        ) from error
    except RecursionError:
        raise ConfigError(f"{path} is not valid TOML: it is nested too deeply") from None


def parse_value(text: str) -> Any:
    """``text`` as a TOML value where it is one (``3``, ``true``, ``[1, 2]``), else as a string."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    value = parsed["value"]
    # No setting is a date, and a line break would let a second key in.
    is_one_value = len(parsed) == 1 and isinstance(value, str | int | float | bool | list | dict)
    return value if is_one_value else text


def apply_settings(tables: Mapping[str, Any], settings: Iterable[str]) -> Tables:
    """``tables`` with each ``section.key=value`` of the command line put in its place.

    What follows the second dot is one key of a table, dots included:
    ``spark.conf.spark.sql.shuffle.partitions=4`` sets one entry of ``[spark.conf]``. Raises
    ConfigError.
    """
    merged: Tables = {
        name: dict(table) if isinstance(table, Mapping) else table for name, table in tables.items()
    }
    for setting in settings:
        path, separator, text = setting.partition("=")
        keys = path.strip().split(".", 2)
        is_key = bool(separator) and len(keys) > 1 and all(keys)
        named = [
            name for name, table in merged.items() if isinstance(table, dict) and path in table
        ]
        hint = f": did you mean --set {named[0]}.{setting}" if named else ""
        require(is_key, f"--set takes section.key=value{hint}", setting)
        put(merged, keys, parse_value(text.strip()))
    return merged


def put(tables: Tables, keys: Sequence[str], value: Any) -> None:
    """Set one key in tables within tables, which are copied; raises ConfigError if it cannot."""
    table = tables
    for key in keys[:-1]:
        inner = table.get(key, {})
        if not isinstance(inner, Mapping):
            raise ConfigError(
                f"{'.'.join(keys)}: {key} is not a table but {inner!r}; set it as a whole"
            )
        table[key] = dict(inner)
        table = table[key]
    table[keys[-1]] = value


def build(kind: type[T], table: Any, where: str = "") -> T:
    """Make a dataclass of what TOML gave; fields without a default are required.

    ``where`` is the table's name for messages, empty for a whole file. Raises ConfigError, which
    names all that is wrong in the table.
    """
    require(isinstance(table, Mapping), f"{where} must be a table", table)
    hints = get_type_hints(kind)
    known = {item.name: item for item in fields(kind)}  # type: ignore[arg-type]
    problems = Problems()
    for key in table:
        if key not in known:
            what = f"unknown key '{key}' in [{where}]" if where else f"unknown section [{key}]"
            hint = did_you_mean(key, known) or f"; known: {', '.join(known)}"
            problems.add(f"{what}{hint}")
    values = {}
    for key in [key for key in table if key in known]:
        with problems.caught():
            values[key] = convert(table[key], hints[key], f"{where}.{key}" if where else key)
    problems.raise_all()  # a key that is missing may be one that is written otherwise
    for name in known:
        if name in required(kind) and name not in table:
            place = f"key '{name}' in [{where}]" if where else f"section [{name}]"
            raise MissingKey(f"missing {place}")
    if isinstance(values.get("path"), str):
        values["path"] = at_home(values["path"])
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"[{where}] {error}" if where else str(error)) from error


def to_tables(value: Any) -> Any:
    """Return the tables of which `build` makes the value; keys without a value are left out."""
    if is_dataclass(value):
        found = {item.name: getattr(value, item.name) for item in fields(value)}
        return {key: to_tables(item) for key, item in found.items() if item is not None}
    if isinstance(value, Mapping):
        return {key: to_tables(item) for key, item in value.items()}
    return [to_tables(item) for item in value] if isinstance(value, tuple) else value


def dataclass_in(hint: Any) -> Any:
    """The dataclass that a key's table becomes, if it becomes one; else None."""
    return next((part for part in parts_of(hint) if is_dataclass(part)), None)


def required(kind: Any) -> set[str]:
    """Fields of a dataclass without a default."""
    return {
        item.name
        for item in fields(kind)
        if item.default is MISSING and item.default_factory is MISSING
    }


_LISTS = (tuple, Sequence)
"""Types that a list of a job file becomes."""


def convert(value: Any, hint: Any, name: str) -> Any:
    """``value`` as the type ``hint``; ``name`` is its place for messages; raises ConfigError.

    Of a union the first member whose TOML type fits decides, so that its own errors reach the user.
    """
    is_whole = isinstance(value, int) and abs(value) >= _MOST
    require(not is_whole, f"{name} must be a number of at most 64 bits", value)
    fitting = [kind for kind in parts_of(hint) if _fits(value, kind)]
    require(bool(fitting), f"{name} must be {describe(hint)}", value)
    # Where any table is taken, one with the required keys of a dataclass is that.
    named = (kind for kind in fitting if is_dataclass(kind) and required(kind) <= set(value))
    others = [kind for kind in fitting if not is_dataclass(kind)] or fitting
    kind = next(named, others[0])
    if isinstance(kind, type) and is_dataclass(kind):
        return build(kind, value, name)
    inner = get_args(kind)
    if get_origin(kind) in _LISTS:
        return tuple(convert(item, inner[0], f"{name}[{i}]") for i, item in enumerate(value))
    if get_origin(kind) is Mapping:
        return {key: convert(item, inner[1], f"{name}.{key}") for key, item in value.items()}
    return float(value) if kind is float else value


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin is Literal:
        return value in get_args(hint)
    if origin in _LISTS:
        return isinstance(value, list)
    if is_dataclass(hint) or origin is Mapping:
        return isinstance(value, Mapping)
    if hint is float:
        return type(value) in (int, float)
    return hint is Any or type(value) is hint  # bool is an int in Python but not in TOML


def describe(hint: Any) -> str:
    """A type in a job file author's words."""
    origin, parts = get_origin(hint), parts_of(hint)
    if len(parts) > 1:
        return " or ".join(describe(part) for part in parts if part is not type(None))
    if origin is Literal:
        return "one of " * (len(get_args(hint)) > 1) + _listed(get_args(hint))
    if origin in _LISTS:
        return f"a list (each {describe(get_args(hint)[0])})"
    if is_dataclass(hint):
        return f"a table with {_listed([item.name for item in fields(hint)])}"
    return "a table" if origin is Mapping else NAMES.get(hint, str(hint))


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(f"'{name}'" for name in names)
