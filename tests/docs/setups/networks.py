"""What do the blocks of docs/networks.md find?"""

from __future__ import annotations

from typing import Any

import numpy as np
from pyspark.sql import SparkSession

import sparkdl
from sparkdl.models import MLP, Autoencoder, LanguageModel, LSTMNet, SequenceToSequence
from tests.docs.setups.data import tokenize


def prepare(spark: SparkSession) -> dict[str, Any]:
    values = np.random.default_rng(0).random((64, 64))
    rows = [(row.tolist(), "so " * (1 + i % 3), i % 2) for i, row in enumerate(values)]
    df = spark.createDataFrame(rows, "features array<float>, text string, label int").cache()
    texts = [("Once upon a time there was a king. " * 8,), ("The end.",)]
    names = ("InitialWeights", "Output", "Sequence", "TorchEstimator")
    return {
        **{name: getattr(sparkdl, name) for name in names},
        "MLP": MLP,
        "Autoencoder": Autoencoder,
        "LSTMNet": LSTMNet,
        "LanguageModel": LanguageModel,
        "SequenceToSequence": SequenceToSequence,
        "tokenize": tokenize,
        "df": df,
        "rows": df,
        "books": spark.createDataFrame(texts, "text string"),
        "params": {"numWorkers": 1, "verbose": 0},
    }


def check(names: dict[str, Any]) -> None:
    assert names["pieces"].count() == 4  # of 264 bytes; the other text is too short
    assert names["story"].startswith("Once")
    assert len(names["classifier"].fit(names["df"]).module.encoder) == 3
