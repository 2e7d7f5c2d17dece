"""Does the augmentation change the inputs of training batches, and nothing else?"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparkdl.data.batches import Batch
from sparkdl.errors import ConfigError
from sparkdl.train.step import augmented


def batch(names: tuple[str | None, ...] = (), num_inputs: int = 1) -> Batch:
    inputs = tuple(torch.full((2, 3), float(i)) for i in range(num_inputs))
    return Batch(inputs, torch.zeros(2), None, 2, names)


def test_one_input_goes_as_a_tensor() -> None:
    changed = augmented(batch(), lambda x: x + 1)
    assert changed.inputs[0].tolist() == [[1.0] * 3] * 2 and changed.target.tolist() == [0, 0]  # type: ignore[union-attr]


def test_named_inputs_go_as_a_dict() -> None:
    changed = augmented(batch(("a", "b"), 2), lambda x: {**x, "a": x["a"] - 1})
    assert [float(value[0, 0]) for value in changed.inputs] == [-1.0, 1.0]


@pytest.mark.parametrize(
    ("augmentation", "said"),
    [
        (lambda x: None, "expected tensors; received NoneType"),
        (lambda x: x[:1], r"must keep the 2 samples of a batch; .* shape \(1, 3\)"),
        (lambda x: x.sum(), "must keep the 2 samples"),
    ],
)
def test_something_else_is_refused(augmentation: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        augmented(batch(), augmentation)
