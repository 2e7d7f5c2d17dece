from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from sparkdl.cli.job_files.toml_values import (
    apply_settings,
    build,
    convert,
    parse_value,
    read_toml,
)
from sparkdl.errors import ConfigError
from sparkdl.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int = 1

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"size must be positive; received {self.size}")


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    ratio: float = 0.5
    flag: bool = False
    kind: Literal["a", "b"] = "a"
    shape: tuple[int | tuple[int, ...], ...] = ()
    options: Mapping[str, str | bool | int] = field(default_factory=dict)
    either: str | Inner | None = None
    chosen: Literal["x", "y"] | None = None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("0.5", 0.5),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ('"3"', "3"),
        ("{a = 1}", {"a": 1}),
        ("adam", "adam"),
        ("data/digits", "data/digits"),
        ("a b:c", "a b:c"),
        ("2024-01-31", "2024-01-31"),
        ("1\nother = 2", "1\nother = 2"),
        ("", ""),
        ("9" * 5_000, "9" * 5_000),
        ("[" * 20_000, "[" * 20_000),
    ],
)
def test_a_setting_is_a_toml_value_or_else_a_string(text: str, value: Any) -> None:
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


def test_settings_replace_and_add_keys_and_leave_their_source_alone() -> None:
    tables = {"a": {"x": 1, "y": {"z": 2}}}
    merged = apply_settings(tables, ["a.x=3", "b.n=text", "a.y.z=4"])
    assert merged == {"a": {"x": 3, "y": {"z": 4}}, "b": {"n": "text"}}
    assert tables == {"a": {"x": 1, "y": {"z": 2}}}


def test_what_follows_the_second_dot_is_one_key() -> None:
    merged = apply_settings({}, ["spark.conf.spark.sql.shuffle.partitions=4"])
    assert merged == {"spark": {"conf": {"spark.sql.shuffle.partitions": 4}}}


def test_the_last_setting_wins_and_values_may_hold_equal_signs() -> None:
    assert apply_settings({}, ["a.b=1", "a.b=x=y"]) == {"a": {"b": "x=y"}}


@pytest.mark.parametrize("setting", ["a.b", "a=1", ".b=1", "a.=1", "=1", "a..b=1"])
def test_a_setting_of_another_form_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"--set takes section\.key=value"):
        apply_settings({}, [setting])
    with pytest.raises(ConfigError, match=r"section\.key=value: did you mean --set a\.epochs=3;"):
        apply_settings({"data": {}, "a": {"epochs": 1}}, ["epochs=3"])


def test_a_setting_below_a_plain_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="b is not a table but 1"):
        apply_settings({"a": {"b": 1}}, ["a.b.c=2"])


def test_build_converts_every_kind_of_value() -> None:
    table = {
        "name": "n",
        "ratio": 1,
        "flag": True,
        "kind": "b",
        "shape": [1, [2, 3]],
        "options": {"header": True, "sep": ";"},
        "either": {"size": 3},
    }
    made = build(Outer, table)
    assert made == Outer(
        name="n",
        ratio=1.0,
        flag=True,
        kind="b",
        shape=(1, (2, 3)),
        options={"header": True, "sep": ";"},
        either=Inner(size=3),
    )
    assert type(made.ratio) is float
    assert build(Outer, {"name": "n", "either": "text"}).either == "text"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "missing key 'name' in [outer]"),
        ({"name": 3}, "outer.name must be a string; received 3"),
        ({"name": "n", "ratio": "1"}, "outer.ratio must be a number; received '1'"),
        ({"name": "n", "ratio": True}, "outer.ratio must be a number; received True"),
        ({"name": "n", "flag": 1}, "outer.flag must be true or false; received 1"),
        ({"name": "n", "kind": "c"}, "outer.kind must be one of 'a', 'b'; received 'c'"),
        ({"name": "n", "shape": 1}, "outer.shape must be a list"),
        ({"name": "n", "shape": [1.5]}, "outer.shape[0] must be an integer or a list"),
        ({"name": "n", "options": []}, "outer.options must be a table; received []"),
        ({"name": "n", "options": {"o": 0.5}}, "outer.options.o must be a string or true"),
        ({"name": "n", "either": 3}, "outer.either must be a string or a table with 'size'"),
        ({"name": "n", "either": {"size": 0}}, "[outer.either] size must be positive; received 0"),
        ({"name": "n", "flagg": True}, "unknown key 'flagg' in [outer]; did you mean 'flag'?"),
        ({"name": "n", "q": 1}, "in [outer]; known: name, ratio, flag, kind, shape, options,"),
        ("text", "outer must be a table; received 'text'"),
    ],
)
def test_build_says_what_is_wrong_and_where(table: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(Outer, table, "outer")
    assert message in str(error.value)


def test_the_top_level_is_made_of_sections() -> None:
    with pytest.raises(ConfigError, match=r"unknown section \[nam\]; did you mean 'name'\?"):
        build(Outer, {"nam": {}})
    with pytest.raises(ConfigError, match=r"missing section \[name\]"):
        build(Outer, {})


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        read_toml(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    for content in ("a = = 1", f"a = {'9' * 5_000}", f"a = {'[' * 20_000}", "a = \x00"):
        broken.write_text(content, encoding="utf-8")
        with pytest.raises(ConfigError, match=r"broken\.toml is not valid TOML"):
            read_toml(broken)
    with pytest.raises(ConfigError, match="must be a number of at most 64 bits"):
        convert(-(10**400), float, "rate")


def test_a_choice_may_be_left_out() -> None:
    assert build(Outer, {"name": "n", "chosen": "y"}).chosen == "y"
    assert build(Outer, {"name": "n"}).chosen is None
    with pytest.raises(ConfigError, match=r"chosen must be one of 'x', 'y'; received 'z'"):
        build(Outer, {"name": "n", "chosen": "z"})


def test_a_mesh_is_a_table() -> None:
    stages = {"pipeline": 2, "stages": ["blocks.0-1", "blocks.2-3"], "micro_batches": 4}
    assert build(Mesh, stages) == Mesh(**stages)
    assert build(Mesh, {"tensor": 2, "layout": {"a": "rows"}}) == Mesh(
        tensor=2, layout={"a": "rows"}
    )
    with pytest.raises(ConfigError, match=r"parallelism\.stages must be a list"):
        build(Mesh, {"pipeline": 2, "stages": 3}, "estimator.parallelism")


def test_a_file_of_notepad_is_read(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(b"\xef\xbb\xbf[data]\r\npath = 'x'\r\n")
    assert read_toml(path) == {"data": {"path": "x"}}
