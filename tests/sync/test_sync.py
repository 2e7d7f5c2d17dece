from __future__ import annotations

import dataclasses
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sparkdl import sync
from sparkdl.errors import ConfigError
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.sync.strategy import Synchronizer, SyncStrategy


@dataclass(frozen=True, kw_only=True)
class Mine(SyncStrategy):
    def setup(self, model: Any, make_optimizer: Any, comm: Any) -> Synchronizer:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class NeedsOption(Mine):
    period: int


DRIVEN_BY_TIME = {"asyncsgd", "hogwild"}


def test_every_name_makes_a_picklable_strategy() -> None:
    assert len(sync.STRATEGIES) == len(sync.known_strategies()) >= 14
    for name in sync.STRATEGIES:
        strategy = sync.resolve(name)
        assert type(strategy).__name__.lower() == name
        assert pickle.loads(pickle.dumps(strategy)) == strategy
        assert strategy.deterministic == (name not in DRIVEN_BY_TIME)
        assert all(type(form) is type(strategy) for form in strategy.examples())


TABLE = re.compile(r"^\| `(\w+)` \| .*? \| .*? \| (\w+).*? \| (.*?) \|", re.MULTILINE)


def test_the_table_of_strategies_has_all_of_them() -> None:
    """What docs/strategies.md says of bits and options is what the classes say."""
    page = (Path(__file__).parents[2] / "docs/strategies.md").read_text(encoding="utf-8")
    section = page.split("## All strategies")[1].split("`compression=` works")[0]
    rows = {name: (bits, options) for name, bits, options in TABLE.findall(section)}
    assert set(rows) == {kind.__name__ for kind in sync.known_strategies()}
    for kind in sync.known_strategies():
        bits, options = rows[kind.__name__]
        assert (bits == "yes") == kind().deterministic
        fields = {field.name for field in dataclasses.fields(kind)}
        assert set(re.findall(r"`(\w+)`", options)) <= fields, kind


def test_default_object_class_and_path() -> None:
    assert sync.resolve(None) == AllReduce()
    assert sync.resolve("AllReduce") == AllReduce()
    mine = Mine()
    assert sync.resolve(mine) is mine
    assert isinstance(sync.resolve(Mine), Mine)
    assert type(sync.resolve(f"{__name__}:Mine")).__name__ == "Mine"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("alreduce", r"'alreduce'; did you mean 'allreduce'. known: adasum, allreduce"),
        ("no.such.module:X", "cannot import 'no.such.module:X'"),
        (f"{__name__}:Missing", "cannot import"),
        ("json:dumps", "must be a SyncStrategy"),
        (7, "must be a SyncStrategy"),
        ([], "must be a SyncStrategy"),
        (NeedsOption, "cannot be made without options"),
    ],
)
def test_what_is_no_strategy_is_refused(wrong: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sync.resolve(wrong)
