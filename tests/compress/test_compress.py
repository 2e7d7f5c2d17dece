from __future__ import annotations

from typing import Any

import pytest

from sparkdl import compress
from sparkdl.compress.base import Compression
from sparkdl.compress.powersgd import PowerSGD
from sparkdl.compress.topk import TopKCompression
from sparkdl.errors import ConfigError
from sparkdl.sync.allreduce import AllReduce


@pytest.mark.parametrize("name", compress.COMPRESSIONS)
def test_each_name_has_its_class(name: str) -> None:
    found = compress.resolve(name.upper())
    assert isinstance(found, Compression)
    assert type(found).__module__ + ":" + type(found).__name__ == compress.COMPRESSIONS[name]


def test_objects_classes_paths_and_nothing() -> None:
    mine = TopKCompression(density=0.1)
    assert compress.resolve(mine) is mine
    assert compress.resolve(PowerSGD) == PowerSGD()
    assert compress.resolve("sparkdl.compress.powersgd:PowerSGD") == PowerSGD()
    assert compress.resolve(None) is None


@pytest.mark.parametrize(
    "value",
    ["zip", "no.such.module:Class", "sparkdl.compress.topk:Missing", AllReduce(), AllReduce, 3],
    ids=str,
)
def test_what_is_no_compression(value: Any) -> None:
    with pytest.raises(ConfigError, match="compression"):
        compress.resolve(value)


def test_what_needs_options() -> None:
    with pytest.raises(ConfigError, match="pass an object"):
        compress.resolve(Compression)
