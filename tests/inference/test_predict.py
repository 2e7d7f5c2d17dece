from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

from sparkdl.data.plan import Column
from sparkdl.errors import ConfigError, DataError
from sparkdl.inference import predict
from sparkdl.inference.outputs import Forward, Output
from sparkdl.inference.predict import Leaf, Make, PredictTask
from sparkdl.inputs import Sequence
from sparkdl.serialization.program.process_settings import take_settings
from sparkdl.serialization.travel.packed_module import pack

ROWS = np.arange(21, dtype=np.float32).reshape(7, 3)
FLOATS = pa.list_(pa.float32())
INF, NAN = float("inf"), float("nan")


def leaf(make: Make, arrow_type: pa.DataType, *path: Any, layer: str | None = None) -> Leaf:
    output = Output(key=path, layer=layer)
    return Leaf(name="x", output=output, make=make, arrow_type=arrow_type)


def task(module: nn.Module, *leaves: Leaf, batch_size: int = 3, **forward: Any) -> PredictTask:
    packed = pack(module)
    return PredictTask(
        digest=packed.digest,
        fetch=lambda: packed,
        columns=(Column(name="features", role="feature", dtype="float32", shape=(3,)),),
        batch_size=batch_size,
        device="cpu",
        forward=Forward(**forward),
        leaves=leaves,
    )


def arrays(rows: np.ndarray) -> list[pa.Array]:
    return [pa.array(list(rows), FLOATS)]


def predicted(job: PredictTask, *parts: np.ndarray) -> list[pa.Array]:
    return list(predict.predict(iter([arrays(part) for part in parts]), job))


def test_rows_are_predicted_in_order_whatever_the_batches() -> None:
    job = task(nn.Identity(), leaf("array", FLOATS))
    first, second, *others = predicted(job, ROWS[:5], ROWS[5:])
    assert not others
    assert (len(first), len(second)) == (5, 2)
    values = pa.concat_arrays([first, second]).field(0).to_pylist()
    assert values == ROWS.tolist()


def test_a_record_batch_without_rows_gives_nothing_and_runs_nothing() -> None:
    class Refuses(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError

    assert predicted(task(Refuses(), leaf("array", FLOATS)), ROWS[:0]) == []


class Raises(nn.Module):
    """Sets how numpy meets errors, and says how it has found that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = np.seterr(all="raise")["divide"]
        return torch.full((len(x), 1), float(found == "call"))


def test_settings_of_a_module_end_with_its_task() -> None:
    """Spark runs other functions of the user in the same process."""
    job = task(Raises(), leaf("array", FLOATS), batch_size=7)
    before = np.geterr()
    set_before = {"numpy errors": {**before, "divide": "call"}}
    take_settings(set_before)  # as the task's values do, which come with it
    (rows,) = predicted(job, ROWS)
    assert rows.field(0).to_pylist() == [[1.0]] * 7
    assert np.geterr() == before


def test_large_outputs_leave_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "FLUSH_BYTES", 1)
    pieces = predicted(task(nn.Identity(), leaf("array", FLOATS)), ROWS)
    assert [len(piece) for piece in pieces] == [3, 3, 1]
    assert pa.concat_arrays(pieces).field(0).to_pylist() == ROWS.tolist()


class MeanOfTokens(nn.Module):
    """Remembers the shapes that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 4)
        self.shapes: list[torch.Size] = []

    def forward(self, tokens: torch.Tensor, is_token: torch.Tensor) -> torch.Tensor:
        self.shapes.append(tokens.shape)
        summed = (self.embedding(tokens) * is_token.unsqueeze(-1)).sum(1)
        return summed / is_token.sum(1, keepdim=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize("flush_bytes", [1, 100, 1 << 20])
def test_sequences_of_similar_length_are_padded_together(
    flush_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict, "FLUSH_BYTES", flush_bytes)
    generator = np.random.default_rng(3)
    texts = [generator.integers(0, 50, generator.integers(1, 40)).tolist() for _ in range(60)]
    module = MeanOfTokens()
    job = task(module, leaf("array", FLOATS), batch_size=4)
    tokens = Column(
        name="t", role="feature", dtype="int64", shape=(), argument="tokens",
        specification=Sequence("t", mask="is_token"), longest=40,
    )  # fmt: skip
    job = replace(job, columns=(tokens,))
    batches = [[pa.array(texts[:50])], [pa.array(texts[50:])]]
    found = pa.concat_arrays(list(predict.predict(iter(batches), job))).field(0).to_pylist()
    alone = [module(torch.tensor([t]), torch.ones(1, len(t), dtype=torch.bool)) for t in texts]
    assert torch.tensor(found).allclose(torch.cat(alone), atol=1e-6)
    kept = list(predict.load(job, torch.device("cpu")).shapes)
    assert sum(shape[0] for shape in kept) == 60
    cells = sum(shape.numel() for shape in kept)
    as_they_are = sum(
        max(map(len, texts[first : first + 4])) * len(texts[first : first + 4])
        for first in (*range(0, 50, 4), *range(50, 60, 4))
    )
    assert (cells < 0.75 * as_they_are) == (flush_bytes > 100)


def test_longer_sequences_are_fewer_that_are_sorted_together() -> None:
    lengths = [2] * 100 + [50] * 20
    tokens = Column(
        name="t", role="feature", dtype="int64", shape=(), argument="tokens",
        specification=Sequence("t"), longest=50,
    )  # fmt: skip
    inputs = predict.Inputs([pa.array([[1] * length for length in lengths])], [tokens])
    assert len(inputs.together(0, 0.0, 4)) == 4  # how large outputs are is not known yet
    assert inputs.together(8, 100.0, 4).tolist() == list(range(8, 56))
    assert inputs.together(96, 110.0, 4).tolist() == [96, 97, 98, 99]
    assert inputs.together(100, 110.0, 4).tolist() == [100, 101, 102, 103]
    assert inputs.together(118, 1e9, 4).tolist() == [118, 119]
    plain = predict.Inputs(
        [pa.array([[1.0, 2.0, 3.0]] * 9, FLOATS)],
        list(task(nn.Identity(), leaf("array", FLOATS)).columns),
    )
    assert len(plain.together(0, 1e9, 4)) == 4 and plain.lengths is None


def test_batches_of_different_width_stay_lists() -> None:
    class Padded(nn.Module):
        """As wide as the longest row of the batch."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.new_ones(len(x), len(x))

    (piece,) = predicted(task(Padded(), leaf("array", FLOATS)), ROWS)
    assert [len(row) for row in piece.field(0).to_pylist()] == [3] * 6 + [1]


def test_shapes_are_kept_or_flattened() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(3, 8), nn.Unflatten(1, (2, 2, 2)))
    nested = leaf("nested", pa.list_(pa.list_(FLOATS)))
    (piece,) = predicted(task(module, nested, leaf("array", FLOATS)), ROWS)
    expected = module(torch.from_numpy(ROWS)).detach()
    np.testing.assert_allclose(np.array(piece.field(0).to_pylist()), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        np.array(piece.field(1).to_pylist()), expected.flatten(1), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("dtype", "arrow"),
    [
        (torch.float16, pa.float32()),
        (torch.bfloat16, pa.float32()),
        (torch.float64, pa.float64()),
        (torch.bool, pa.bool_()),
        (torch.uint8, pa.int16()),
        (torch.int8, pa.int8()),
        (torch.int64, pa.int64()),
    ],
)
def test_dtypes_become_arrow_types(dtype: torch.dtype, arrow: pa.DataType) -> None:
    values = torch.tensor([0, 1, 1]).to(dtype)
    got = predict.to_arrow(values, leaf("value", arrow))
    assert got.type == arrow
    assert got.to_pylist() == [0, 1, 1]
    both = predict.to_arrow(values.reshape(3, 1), leaf("array", pa.list_(arrow)))
    assert both.to_pylist() == [[0], [1], [1]]


def test_classes_logits_and_probabilities() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 0.0, 0.0]])
    assert predict.likeliest_class(logits).tolist() == [1, 0]
    assert torch.equal(predict.class_logits(logits), logits.double())
    assert torch.equal(predict.class_probabilities(logits), logits.double().softmax(1))
    assert torch.equal(predict.raw_predictions(logits), logits.double())


def test_of_two_classes_the_second_raw_prediction_ranks_as_the_probability_does() -> None:
    logits = torch.randn(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    raw = predict.raw_predictions(logits)
    assert torch.allclose(raw.softmax(1), logits.softmax(1))
    assert torch.allclose(raw, torch.stack([-raw[:, 1], raw[:, 1]], 1))
    assert torch.equal(raw[:, 1].argsort(), logits.softmax(1)[:, 1].argsort())
    assert not torch.equal(logits[:, 1].argsort(), raw[:, 1].argsort())
    assert torch.equal(predict.raw_predictions(logits[:, :1])[:, 1], logits[:, 0])


@pytest.mark.parametrize(
    "rows",
    [
        [[0.0, 2.0], [1.0, NAN], [NAN, NAN]],
        [[-INF, 2.0], [INF, 0.0], [-INF, -INF]],
        [[1.0], [NAN], [NAN]],
    ],
)
def test_what_is_no_number_predicts_no_class(rows: list[list[float]]) -> None:
    predicted = predict.predicted_class(torch.tensor(rows))
    torch.testing.assert_close(
        predicted, torch.tensor([1.0, NAN, NAN], dtype=torch.float64), equal_nan=True
    )
    chances = predict.class_probabilities(torch.tensor(rows))
    assert torch.equal(chances.isnan().any(1), predicted.isnan())


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_one_logit_stands_for_two_classes(shape: tuple[int, ...]) -> None:
    logits = torch.tensor([-1.0, 0.0, 2.0]).reshape(shape)
    assert predict.likeliest_class(logits).tolist() == [0, 0, 1]
    assert predict.class_logits(logits).tolist() == [[1, -1], [0, 0], [-2, 2]]
    chances = predict.class_probabilities(logits)
    assert torch.equal(chances[:, 1], torch.sigmoid(logits.double().reshape(-1)))
    torch.testing.assert_close(chances.sum(1), torch.ones(3, dtype=torch.float64))


def test_parts_of_several_sources_side_by_side() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(3, 4)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            h = self.body(x)
            return {"sum": h.sum(1), "both": (h, x)}

    module = Heads()
    leaves = [
        leaf("value", pa.float32(), "sum"),
        leaf("array", FLOATS, "both", 1),
        leaf("array", FLOATS, layer="body"),
        leaf("number", pa.float64(), "sum"),
    ]
    (piece,) = predicted(task(module, *leaves, layers=("body",)), ROWS)
    h = module.body(torch.from_numpy(ROWS)).detach()
    np.testing.assert_allclose(piece.field(0).to_pylist(), h.sum(1), rtol=1e-5, atol=1e-5)
    assert piece.field(1).to_pylist() == ROWS.tolist()
    np.testing.assert_allclose(np.array(piece.field(2).to_pylist()), h, rtol=1e-5, atol=1e-5)
    assert piece.field(3).type == pa.float64()


def test_hooks_do_not_stay_in_the_worker() -> None:
    job = task(nn.Sequential(nn.Linear(3, 3)), leaf("array", FLOATS, layer="0"), layers=("0",))
    predicted(job, ROWS)
    kept: Any = predict.load(job, torch.device("cpu"))
    assert not kept[0]._forward_hooks


@pytest.mark.parametrize(
    ("after", "made", "message"),
    [
        (lambda y: y[1:], leaf("array", FLOATS), "for 3 samples"),
        (lambda y: y, leaf("value", pa.float32()), "predicts one number"),
        (lambda y: y[:, :, None], leaf("nested", FLOATS), "another number of dimensions"),
        (lambda y: {"a": y}, leaf("array", FLOATS, "b"), "there is no 'b'"),
    ],
)
def test_outputs_that_break_the_promise_are_refused(after: Any, made: Leaf, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        predicted(task(nn.Identity(), made, postprocessing=after), ROWS)


def test_more_than_an_arrow_array_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "_MOST_IN_A_LIST", 8)
    with pytest.raises(ConfigError, match="lower batchSize"):
        predicted(task(nn.Identity(), leaf("array", FLOATS)), ROWS)


def test_bad_rows_are_named() -> None:
    job = task(nn.Identity(), leaf("array", FLOATS))
    wrong = [pa.array([[1.0, 2.0, 3.0], None], FLOATS)]
    with pytest.raises(DataError, match='column "features" has 1 null row'):
        list(predict.predict(iter([wrong]), job))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_predictions_on_a_gpu() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    leaves = [leaf("array", FLOATS), leaf("array", FLOATS, layer="0")]
    on_cpu = task(module, *leaves, layers=("0",))
    on_gpu = PredictTask(**{**vars(on_cpu), "device": "cuda"})
    for left, right in zip(predicted(on_cpu, ROWS), predicted(on_gpu, ROWS), strict=True):
        for field in range(2):
            np.testing.assert_allclose(
                np.array(left.field(field).to_pylist()),
                np.array(right.field(field).to_pylist()),
                rtol=1e-3,
                atol=1e-4,
            )
