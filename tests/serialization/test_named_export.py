"""Are modules exported whose inputs have names, and lengths that differ?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from sparkdl.data.plan import Column
from sparkdl.errors import ConfigError
from sparkdl.inputs import Image, Sequence, Sparse, Tensor
from sparkdl.serialization.example_inputs import example_of
from sparkdl.serialization.exported_program import read_program, write_program
from sparkdl.serialization.load import ModelSignature
from sparkdl.serialization.onnx_export import export_onnx
from sparkdl.storage.storage import LocalStorage
from tests.serialization.saving import load_module_from, save_module


def column(
    kind: Any, dtype: str, *shape: int, argument: str | None = None, longest: int = 0
) -> Column:
    return Column(
        name=kind.name, role="feature", dtype=dtype, shape=shape, argument=argument,
        specification=kind, longest=longest,
    )  # fmt: skip


COLUMNS = (
    column(Tensor("user.age"), "float32", argument="age"),
    column(Sequence("text", mask="is_word"), "int64", argument="words", longest=5),
    column(Sparse("tags"), "float32", 4, argument="tags"),
    column(Image("jpeg"), "uint8", 3, 6, 6, argument="photo"),
)


def local_net() -> nn.Module:
    """A module of a class that nobody can import."""

    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 4)
            self.last = nn.Linear(12, 2)

        def forward(
            self, *, photo: Any, words: Any, is_word: Any, age: Any, tags: Any
        ) -> torch.Tensor:
            weight = is_word[..., None].to(torch.float32)
            text = (self.embed(words) * weight).sum(1) / weight.sum(1).clamp(min=1)
            colours = (photo.float() / 255).mean((2, 3))
            logits: torch.Tensor = self.last(torch.cat([text, colours, age[:, None], tags], 1))
            return logits

    return Local().eval()


def batch(rows: int, length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    lengths = torch.randint(1, length + 1, (rows, 1), generator=generator)
    return {
        "age": torch.randn(rows, generator=generator),
        "words": torch.randint(0, 9, (rows, length), generator=generator),
        "is_word": torch.arange(length) < lengths,
        "tags": torch.randn(rows, 4, generator=generator),
        "photo": torch.randint(0, 256, (rows, 3, 6, 6), generator=generator, dtype=torch.uint8),
    }


def test_a_program_takes_names_and_any_lengths() -> None:
    module = local_net()
    program = read_program(write_program(module, example_of(COLUMNS)))
    for rows, length in ((1, 1), (3, 2), (2, 9)):
        inputs = batch(rows, length)
        torch.testing.assert_close(program(**inputs), module(**inputs))


def test_a_module_with_named_inputs_is_saved_as_a_program(tmp_path: Path) -> None:
    module = local_net()
    storage = LocalStorage(tmp_path)
    save_module(module, None, storage, "m", example_inputs=example_of(COLUMNS), extra={})
    loaded, _ = load_module_from(storage, "m")
    torch.testing.assert_close(loaded(**batch(4, 7)), module(**batch(4, 7)))


class Fitted:
    """What export_onnx looks at in a fitted model."""

    def __init__(self, module: nn.Module, columns: tuple[Column, ...]) -> None:
        self.module, self.columns = module, columns


def run(path: Path, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert [node.name for node in session.get_inputs()] == list(inputs)
    given = {name: value.numpy() for name, value in inputs.items()}
    return torch.from_numpy(session.run(None, given)[0])


@pytest.mark.slow
def test_onnx_has_the_names_of_forward_and_takes_any_length(tmp_path: Path) -> None:
    model = Fitted(local_net(), COLUMNS)
    assert export_onnx(model, tmp_path / "named.onnx") < 1e-4
    for rows, length in ((1, 1), (3, 2), (2, 9)):
        inputs = batch(rows, length)
        found = run(tmp_path / "named.onnx", inputs)
        torch.testing.assert_close(found, model.module(**inputs), rtol=1e-4, atol=1e-5)


class Mixed(nn.Module):
    def forward(self, words: torch.Tensor, *, is_word: torch.Tensor) -> torch.Tensor:
        return torch.where(is_word, words, 0.0).sum(1)


def test_positions_are_named_after_columns_and_masks_after_themselves(tmp_path: Path) -> None:
    columns = (column(Sequence("a text", mask="is_word"), "float32", longest=1),)
    export_onnx(Fitted(Mixed(), columns), tmp_path / "mixed.onnx")
    words, is_word = torch.randn(2, 6), torch.rand(2, 6) < 0.5
    found = run(tmp_path / "mixed.onnx", {"a text": words, "is_word": is_word})
    torch.testing.assert_close(found, Mixed()(words, is_word=is_word))


def test_a_plain_module_takes_examples_by_name(tmp_path: Path) -> None:
    example = {"is_word": torch.rand(2, 3) < 0.5, "words": torch.randn(2, 3)}
    export_onnx(Mixed(), tmp_path / "m.onnx", example_inputs=example)
    wanted = Mixed()(**example)
    torch.testing.assert_close(run(tmp_path / "m.onnx", example), wanted)


class OfFixedLength(nn.Module):
    """Knows sequences of 5 only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logit: torch.Tensor = self.layer(x)
        return logit


def test_a_module_that_needs_one_length_is_refused(tmp_path: Path) -> None:
    columns = (column(Sequence("x"), "float32", longest=5),)
    with pytest.raises(ConfigError, match=r"torch.export cannot export it"):
        write_program(OfFixedLength(), example_of(columns))
    with pytest.raises(ConfigError, match=r"torch.export cannot export it"):
        export_onnx(Fitted(OfFixedLength(), columns), tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def test_sparse_inputs_are_refused_by_programs_and_dense_in_onnx(tmp_path: Path) -> None:
    columns = (column(Sparse("x", dense=False), "float32", 4),)
    with pytest.raises(ConfigError, match=r"no sparse tensors; use Sparse\(..., dense=True\)"):
        write_program(nn.Linear(4, 1), example_of(columns))
    module = nn.Linear(4, 1)
    export_onnx(Fitted(module, columns), tmp_path / "m.onnx")
    x = torch.randn(3, 4)
    torch.testing.assert_close(run(tmp_path / "m.onnx", {"x": x}), module(x).detach())


def test_the_signature_knows_names_and_lengths() -> None:
    signature = ModelSignature(inputs=COLUMNS, num_classes=None)
    arguments = signature.example_arguments(3)
    assert arguments.names == ("age", "words", "is_word", "tags", "photo")
    assert arguments.call(local_net()).shape == (3, 2)
    assert arguments.values[1].shape == (3, 5)
    with pytest.raises(ConfigError, match=r"by name; use signature.example_arguments\(\).call"):
        signature.example_inputs(3)
    plain = ModelSignature(inputs=(column(Tensor("x"), "float32", 2),), num_classes=None)
    assert [x.shape for x in plain.example_inputs(3)] == [(3, 2)]


def test_examples_can_be_cut_and_shortened() -> None:
    example = example_of(COLUMNS, num_rows=2)
    assert np.unique([len(value) for value in example.rows(5).values]).tolist() == [5]
    shorter = example.shorter()
    assert [value.shape[1] for value in shorter.values[1:3]] == [4, 4]
    assert shorter.values[0].shape == example.values[0].shape
