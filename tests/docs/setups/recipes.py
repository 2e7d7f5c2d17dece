"""The files of docs/recipes.md's reader, a stand-in for wandb, and what the recipes must reach."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyspark.sql import SparkSession

from sparkdl.storage.storage import open_storage
from tests.s3 import make_bucket

LOGGED: list[dict[str, float]] = []
EXITS: list[int] = []


class _Run:
    def log(self, values: dict[str, float], step: int) -> None:
        LOGGED.append({**values, "step": step})

    def finish(self, exit_code: int) -> None:
        EXITS.append(exit_code)


def _small_bert(folder: str) -> None:
    """A model and its tokenizer, as ``save_pretrained`` leaves them."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    words = {w: i for i, w in enumerate(["[PAD]", "[UNK]", "the", "bird", "cat", "dog", "is"])}
    plain = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=128, num_labels=2,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)


def prepare(spark: SparkSession) -> None:
    wandb = ModuleType("wandb")
    wandb.init = lambda **options: _Run()  # type: ignore[attr-defined]
    sys.modules["wandb"] = wandb
    _small_bert("bert")
    make_bucket("bucket")
    values = torch.randn(100, 4, generator=torch.Generator().manual_seed(1))
    table = pa.table({"features": values.tolist(), "price": values.sum(1).tolist()})
    file = pa.BufferOutputStream()
    pq.write_table(table, file, row_group_size=20)
    open_storage("s3://bucket/prices").write("part-0.parquet", file.getvalue().to_pybytes())


def check(names: dict[str, Any]) -> None:
    del sys.modules["wandb"]
    assert names["longer"].summary.history[-1]["epoch"] == 3
    assert Path("scores/day=2026-01-02").is_dir()
    assert names["tagged"].count() == 400
    assert names["module"](torch.zeros(1, 4)).shape == (1, 1)
    assert LOGGED and "loss" in LOGGED[0] and EXITS == [0]
