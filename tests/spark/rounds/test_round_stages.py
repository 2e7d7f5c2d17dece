"""How states of shards are merged on the way to the driver."""

from __future__ import annotations

import pyarrow as pa
import pytest
import torch

from sparkdl.comm import file_chunks
from sparkdl.comm.file_chunks import joined_results, result_batches
from sparkdl.spark.rounds import round_stages
from sparkdl.spark.rounds.round_stages import merge_groups, merge_states, tree_levels
from sparkdl.storage.checkpoint_format import decode, encode
from sparkdl.storage.tensor_tree import snapshot


def payload(weight: float, value: float, size: int = 3) -> bytes:
    state = {"w": torch.full((size,), value, dtype=torch.float64)}
    return b"".join(encode(snapshot({"weight": weight, "state": state})))


@pytest.mark.parametrize(
    ("shards", "depth", "levels"),
    [(1, 2, []), (2, 2, []), (4, 2, []), (5, 2, []), (7, 2, [3]), (16, 2, [4]),
     (100, 2, [10]), (100, 1, []), (100, 3, [20, 4]), (1000, 3, [100, 10])],
)  # fmt: skip
def test_levels_of_the_tree(shards: int, depth: int, levels: list[int]) -> None:
    assert tree_levels(shards, depth) == levels


def test_a_group_is_merged_in_the_order_of_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_chunks, "CHUNK_BYTES", 64)  # so that results come in several chunks
    rows = []
    for rank, weight, value in ((3, 1.0, 8.0), (2, 3.0, 4.0), (7, 2.0, 1.0)):
        for batch in result_batches(rank, "state", payload(weight, value)):
            rows += batch.append_column("group", pa.array([rank // 4])).to_pylist()
    for batch in result_batches(2, "result", b"{}"):
        rows += batch.append_column("group", pa.array([0])).to_pylist()
    rows.reverse()
    merged = joined_results(
        [
            row
            for batch in merge_groups([pa.RecordBatch.from_pylist(rows)])
            for row in batch.to_pylist()
        ]
    )
    by_key = {(rank, kind): data for rank, kind, data in merged}
    assert by_key.keys() == {(2, "state"), (7, "state"), (2, "result")}
    first = decode(by_key[2, "state"], "a state")
    assert first["weight"] == 4.0
    assert first["state"]["w"].tolist() == [5.0] * 3
    assert by_key[7, "state"] == payload(2.0, 1.0)


def test_merging_in_levels_is_merging_at_once() -> None:
    payloads = [payload(weight, value) for weight, value in ((1, 0.1), (2, 0.7), (5, -3), (4, 9))]
    weight, at_once = merge_states(payloads)
    halves = [round_stages.merge_payloads(payloads[:2]), round_stages.merge_payloads(payloads[2:])]
    again, in_levels = merge_states(halves)
    assert weight == again == 12
    torch.testing.assert_close(at_once["w"], in_levels["w"], rtol=0, atol=1e-15)
