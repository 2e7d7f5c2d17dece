"""Blocks of TOML are read by the jobs' own reader."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest

from sparkdl.cli.images.options import PrepareJob
from sparkdl.cli.job_file import EvaluateJob, PredictJob, TrainJob
from sparkdl.cli.job_objects import import_object
from sparkdl.cli.toml_values import convert
from sparkdl.cli.tune.study_file import TuneJob
from sparkdl.errors import ConfigError
from tests.docs.blocks import Block, blocks

JOBS = (TrainJob, TuneJob, EvaluateJob, PredictJob, PrepareJob)


def check(tables: dict[str, Any]) -> None:
    """Read some sections of a job file as the jobs do.

    Raises:
        ConfigError: no job takes them; with what is wrong in the job that comes nearest.
    """
    failures = []
    for kind in JOBS:
        hints = get_type_hints(kind)
        if set(tables) <= set(hints):
            try:
                for section, values in tables.items():
                    convert(values, hints[section], section)
            except ConfigError as error:
                failures.append(error)
            else:
                return
    raise failures[0] if failures else ConfigError(f"no job has the sections {list(tables)}")


def references(value: Any) -> Iterator[str]:
    """Whatever a table names as a factory."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "factory":
                yield inner
            else:
                yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_job_files_are_read_by_the_jobs_own_reader(block: Block) -> None:
    tables = tomllib.loads(block.text)
    check(tables)
    for reference in references(tables):
        assert import_object(reference) is not None


def test_a_wrong_key_is_found() -> None:
    with pytest.raises(ConfigError, match="unknown key 'epoch'"):
        check({"estimator": {"epoch": 1}})
    with pytest.raises(ConfigError, match="no job has the sections"):
        check({"estimators": {}})
    assert list(references({"a": [{"factory": "b:c", "args": {"x": {"factory": "d:e"}}}]})) == [
        "b:c",
        "d:e",
    ]
    assert get_args(get_type_hints(TrainJob)["test"])
