"""The installed wheel goes the whole way, from a starter to an exported model."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.packaging.archives import run

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow, pytest.mark.spark]

OTHERS = sysconfig.get_paths()["purelib"]
"""torch and pyspark of the tests' environment; its sparkdl is a link that this does not follow."""
SPARK = ["--set", "spark.master=local[2]", "--set", "spark.conf.spark.ui.enabled=false"]


def write_rows(path: Path, num_rows: int) -> None:
    """Two classes that a plane tells apart."""
    features = np.random.default_rng(0).normal(size=(num_rows, 64)).astype(np.float32)
    labels = (features[:, 0] > 0).astype(np.int64)
    columns = {"features": list(features), "label": labels}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


def test_from_a_starter_to_an_exported_model(clean: Path, tmp_path: Path) -> None:
    def sparkdl(*arguments: str) -> str:
        done = run(
            [str(clean / "sparkdl"), *arguments],
            folder=tmp_path,
            PYTHONPATH=OTHERS,
            SPARK_LOCAL_IP="127.0.0.1",
        )
        return done.stdout

    (tmp_path / "train.toml").write_text(sparkdl("train", "--starter"), encoding="utf-8")
    write_rows(tmp_path / "data" / "train" / "part.parquet", 400)
    # A module of the user's own, in the folder in which the command is given.
    (tmp_path / "own.py").write_text(
        "from sparkdl.models import MLP\n\nclass Net(MLP):\n    pass\n", encoding="utf-8"
    )
    ours = ["--set", "model.factory=own:Net", "--set", "estimator.epochs=8"]
    # Of use only where the JVM starts with the command.
    memory = ["--set", "spark.conf.spark.driver.memory=700m"]
    text = sparkdl("train", "--config", "train.toml", *ours, *SPARK, *memory)
    assert "trained 8 epochs" in text
    assert "sparkdl evaluate --set model.path=models/model" in text
    place = ["--set", "model.path=models/model", "--set", "data.path=data/train"]
    assert "accuracy" in sparkdl("evaluate", *place, *SPARK)
    assert "400 rows in out" in sparkdl("predict", *place, "--set", "output.path=out", *SPARK)
    assert "wrote an exported program" in sparkdl("export", "models/model", "model.pt2")
    assert (tmp_path / "model.pt2").is_file()
