"""Metadata of stages that somebody has changed, sum and all: see `test_hostile_files`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.ml import Pipeline
from torch import nn

import sparkdl
from sparkdl import TorchClassifier
from sparkdl.spark.params.stage_metadata import load_instance, sum_of
from tests.fuzz.test_hostile_files import FUZZ, IS_LONG, NUM_FILES, changed, ours

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def saved(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline of one estimator; Spark's files of sums, which it need not have, are left out."""
    folder = tmp_path_factory.mktemp("saved") / "pipeline"
    stage = TorchClassifier(
        module=nn.Linear(3, 2), epochs=3, optimizerParams={"betas": (0.9, 0.99)},
        metrics={"score": "accuracy"}, earlyStopping=sparkdl.EarlyStopping(patience=2),
        syncStrategy=sparkdl.LocalSGD(averaging_period=4), learningRate=0.1,
    )  # fmt: skip
    Pipeline(stages=[stage]).write().save(str(folder))
    for file in folder.rglob(".*.crc"):
        file.unlink()
    return folder


@settings(FUZZ, max_examples=NUM_FILES if IS_LONG else 20)
@given(st.data())
def test_the_metadata_of_a_stage(saved: Path, spark: SparkSession, data: st.DataObject) -> None:
    files = sorted(saved.rglob("metadata/part-*"))
    file = data.draw(st.sampled_from(files))
    content = file.read_bytes()
    found: Any = changed(data, json.loads(content))
    if isinstance(found, dict) and isinstance(found.get("sparkdl"), dict):
        found["sparkdl"]["sha256"] = sum_of(found)
    try:
        file.write_text(json.dumps(found) + "\n", encoding="utf-8", errors="replace")
        ours(load_instance, str(saved), spark)
    finally:
        file.write_bytes(content)


def test_what_is_changed_is_what_loads(saved: Path, spark: SparkSession) -> None:
    (stage,) = load_instance(str(saved), spark).getStages()
    assert stage.getOrDefault("epochs") == 3
