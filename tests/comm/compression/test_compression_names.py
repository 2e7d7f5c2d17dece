"""Names of compressions, and the table in which users find them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sparkdl.comm import compression
from sparkdl.comm.compression.compression import Compression
from sparkdl.comm.compression.powersgd import PowerSGD
from sparkdl.comm.compression.topk import TopKCompression
from sparkdl.errors import ConfigError
from sparkdl.serialization.json_objects import import_path
from sparkdl.sync.gradients.allreduce import AllReduce


@pytest.mark.parametrize("name", compression.COMPRESSIONS)
def test_each_name_has_its_class(name: str) -> None:
    found = compression.resolve(name.upper())
    assert isinstance(found, Compression)
    assert import_path(type(found)) == compression.COMPRESSIONS[name]


def test_the_table_of_compressions_has_all_of_them() -> None:
    """What docs/strategies.md says of names and residuals is what the classes say."""
    page = (Path(__file__).parents[3] / "docs/strategies.md").read_text(encoding="utf-8")
    section = page.split("| compression | sent")[1].split("\n\n")[0]
    rows = re.findall(r"^\| (`.*?`) \| .*? \| (\w+)", section, re.MULTILINE)
    kept = {name: keeps for names, keeps in rows for name in re.findall(r'"(\w+)"', names)}
    assert set(kept) == set(compression.COMPRESSIONS)
    for name, keeps in kept.items():
        found = compression.resolve(name)
        assert found is not None
        assert (keeps == "residual") == found.keeps_residual, name


def test_objects_classes_paths_and_nothing() -> None:
    mine = TopKCompression(density=0.1)
    assert compression.resolve(mine) is mine
    assert compression.resolve(PowerSGD) == PowerSGD()
    assert compression.resolve("sparkdl.comm.compression.powersgd:PowerSGD") == PowerSGD()
    assert compression.resolve(None) is None


@pytest.mark.parametrize(
    "value",
    [
        "zip",
        "no.such.module:Class",
        "sparkdl.comm.compression.topk:Missing",
        AllReduce(),
        AllReduce,
        3,
    ],
    ids=str,
)
def test_what_is_no_compression(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"compression|cannot import"):
        compression.resolve(value)


def test_what_needs_options() -> None:
    with pytest.raises(ConfigError, match="pass an object"):
        compression.resolve(Compression)
