"""How executors take the mean of what shards return."""

from __future__ import annotations

import pyarrow as pa
import pytest
import torch

from sparkdl.comm import file_chunks
from sparkdl.comm.file_chunks import joined_results, result_batches
from sparkdl.spark.rounds.round_stages import MeanOfPieces, num_merge_tasks
from sparkdl.sync.averaging.state_pieces import FRAME, Pieces

MIB = 2**20


@pytest.mark.parametrize(
    ("shards", "mib", "tasks"),
    [(1, 1000, 0), (2, 4, 0), (2, 5, 1), (8, 344, 8), (64, 10, 10), (1000, 31, 485)],
)
def test_how_many_tasks_take_the_mean(shards: int, mib: int, tasks: int) -> None:
    assert num_merge_tasks(shards, mib * MIB) == tasks


def test_the_mean_is_taken_in_the_order_of_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_chunks, "CHUNK_BYTES", 64)  # so that results come in several chunks
    pieces = Pieces(piece_bytes=1 << 20)
    values = {3: 1e16, 2: 1.0, 7: -1e16, 5: 1.0}  # whose sum depends on their order
    rows = [row for batch in result_batches(2, "result", b"{}") for row in batch.to_pylist()]
    for rank, value in values.items():
        state = {"w": torch.full((300,), value, dtype=torch.float64), "step": rank}
        for name, data in pieces.cut(state, 1.0):
            rows += [row for batch in result_batches(rank, name, data) for row in batch.to_pylist()]
    rows.sort(key=lambda row: (row["kind"], row["rank"], row["seq"]))  # as Spark sorts them
    batches = [pa.RecordBatch.from_pylist(rows[at : at + 3]) for at in range(0, len(rows), 3)]
    merged = [row for batch in MeanOfPieces(pieces=pieces)(batches) for row in batch.to_pylist()]
    found = {kind: (rank, data) for rank, kind, data in joined_results(merged)}
    assert found.pop("result") == (2, b"{}")
    assert {rank for rank, _ in found.values()} == {2}
    state = pieces.put_together((kind, data) for kind, (_, data) in found.items())
    expected = sum(0.25 * values[rank] for rank in sorted(values))
    assert state["w"].tolist() == [expected] * 300
    assert state["step"] == 7
    assert set(found) == {FRAME, f"{FRAME}/w[300]#0"}
