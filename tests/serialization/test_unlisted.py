"""Does a module that a factory makes come back with what its state dict leaves out?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sparkdl.errors import ConfigError
from sparkdl.serialization.initial_weights import InitialWeights, load_initial_weights
from sparkdl.serialization.json_objects import DescribeError
from sparkdl.serialization.saved_module import (
    find_unlisted,
    open_module,
)
from tests.describable import Drawn, Plain
from tests.serialization.saving import load_module_from, save_module
from tests.storage.memory import MemoryStorage

X = torch.arange(6.0).reshape(2, 3)


def save(module: nn.Module, factory: Any, example: Any = None) -> MemoryStorage:
    storage = MemoryStorage()
    save_module(module, factory, storage, "m", example_inputs=example, extra={})
    return storage


def made(seed: int) -> Drawn:
    torch.manual_seed(seed)
    return Drawn()


def test_what_was_drawn_or_made_while_running_comes_back() -> None:
    module = made(1)
    expected = [module(X), module(2 * X)]
    storage = save(module, Drawn)
    torch.manual_seed(1)  # the seed of the module: not what it is loaded with
    back, _ = load_module_from(storage, "m")
    assert isinstance(back, Drawn) and back.calls == 2
    assert torch.equal(back(X), expected[0]) and torch.equal(back(2 * X), expected[1])
    assert back.aliases[0] is back.layer.weight and back.aliases[1] is back.inner
    assert "noise" not in open_module(storage, "m").weights()


def test_the_seed_of_the_process_does_not_hide_a_difference() -> None:
    module = made(1)
    torch.manual_seed(1)
    storage = save(module, Drawn)
    torch.manual_seed(2)
    back, _ = load_module_from(storage, "m")
    assert torch.equal(back(X), module(X))


def test_what_the_user_set_after_training_comes_back() -> None:
    module = Plain()
    module.scale = 2.5
    module.grid += 1
    back, _ = load_module_from(save(module, Plain), "m")
    assert torch.equal(back(X), module(X)) and back.scale == 2.5
    back.grid += 1  # its own memory, which can be written to


class Slotted(Plain):
    __slots__ = ("gain",)

    def __init__(self) -> None:
        super().__init__()
        self.gain = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gain


@pytest.mark.parametrize("factory", [Slotted, None])
def test_what_training_has_set_in_slots_comes_back(factory: Any) -> None:
    module = Slotted()
    object.__setattr__(module, "gain", 3.0)
    back, _ = load_module_from(save(module, factory), "m")
    assert torch.equal(back(X), module(X)) and back.gain == 3.0


def test_nothing_is_written_where_the_factory_makes_it_all() -> None:
    module = Plain()
    assert find_unlisted(module, Plain()) == {}
    assert save(module, Plain).list("m") == ["module.json", "weights.safetensors"]
    lstm = nn.LSTM(3, 2)
    assert find_unlisted(lstm, nn.LSTM(3, 2)) == {}


@pytest.mark.parametrize(
    ("ours", "theirs", "is_same"),
    [
        (1, 1.0, False),
        (float("nan"), float("nan"), True),
        (np.arange(3), np.arange(3), True),
        (np.arange(3), np.arange(3.0), False),
        (torch.zeros(2), torch.zeros(3), False),
        ((1, [2]), (1, [2]), True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (lambda: 1, lambda: 2, True),  # nobody knows
        (None, torch.zeros(1), False),
    ],
)
def test_values_are_compared(ours: Any, theirs: Any, is_same: bool) -> None:
    one, other = Plain(), Plain()
    one.scale, other.scale = ours, theirs
    assert (find_unlisted(one, other) == {}) == is_same


def test_an_attribute_that_cannot_be_written_takes_the_next_way() -> None:
    module = Plain()
    module.scale = range(2)
    with pytest.raises(DescribeError, match=r"attribute scale .* cannot be written.*'range'>"):
        find_unlisted(module, Plain())
    with pytest.raises(ConfigError, match=r"pickle: .*attribute scale.*\. Nor as an exported"):
        save(module, Plain)
    homeless = nn.Linear(1, 1)
    module = Plain()
    vars(module)["hidden"] = [homeless, lambda: 1]  # the constructor makes none
    storage = save(module, Plain, example=(X,))
    back, _ = load_module_from(storage, "m")
    assert torch.allclose(back(X), module(X)) and "program.pt2" in storage.list("m")


def test_initial_weights_are_those_of_the_state_dict(tmp_path: Any) -> None:
    from sparkdl.storage.storage import LocalStorage

    module, target = made(1), made(2)
    module(X)
    save_module(module, Drawn, LocalStorage(tmp_path), "m", example_inputs=None, extra={})
    load_initial_weights(target, InitialWeights(source=str(tmp_path / "m")))
    assert torch.equal(target.layer.weight, module.layer.weight)
    assert torch.equal(target.projection, made(2).projection)
