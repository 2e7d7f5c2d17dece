"""Does a saved module come back, and does a damaged directory build nothing?"""

from __future__ import annotations

import copy
import functools
import io
import json
import os
import pickle
import re
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import nn

from sparkdl.errors import ConfigError, StorageError
from sparkdl.runtime.process import default_dtype
from sparkdl.serialization.exported_program import read_program
from sparkdl.serialization.initial_weights import InitialWeights, load_initial_weights
from sparkdl.serialization.saved_module import give_unlisted, open_module
from sparkdl.storage.storage import LocalStorage
from tests.describable import (
    Counting,
    NeedsWidth,
    Plain,
    Tied,
    WithObjects,
    lazy_net,
    make_net,
    not_a_module,
)
from tests.serialization.saving import load_module_from, save_module
from tests.storage.memory import MemoryStorage

X = torch.arange(6.0).reshape(2, 3)


class Homeless(nn.Module):
    """Like a class of a notebook: in no module that others can import."""

    __module__ = "__main__"

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.drop = nn.Dropout()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(self.layer(x)))


def save(
    module: nn.Module,
    factory: Any = None,
    *,
    storage: MemoryStorage | None = None,
    example: tuple[torch.Tensor, ...] | None = None,
    **extra: Any,
) -> MemoryStorage:
    storage = storage or MemoryStorage()
    save_module(module, factory, storage, "m", example_inputs=example, extra=extra)
    return storage


def recipe(storage: MemoryStorage) -> set[str]:
    return set(json.loads(storage.read("m/module.json"))["recipe"])


@pytest.mark.parametrize(
    ("make", "factory", "kind"),
    [
        (lambda: NeedsWidth(5), functools.partial(NeedsWidth, width=5), "factory"),
        (lambda: make_net(6), functools.partial(make_net, 6), "factory"),
        (Plain, Plain, "factory"),
        (lambda: Plain(8), Plain.wide, "factory"),
        (Plain, None, "module"),
        (Plain, lambda: Plain(), "module"),
        (lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double(), None, "module"),
    ],
)
def test_modules_come_back_with_weights_in_evaluation_mode(
    make: Any, factory: Any, kind: str
) -> None:
    module = make()
    storage = save(module, factory, columns=("a", "b"), labels=[1, 2.5])
    assert kind in recipe(storage)
    back, extra = load_module_from(storage, "m")
    assert extra == {"columns": ("a", "b"), "labels": [1, 2.5]}
    assert module.training and not any(part.training for part in back.modules())
    x = X.to(next(module.parameters()).dtype)
    assert torch.equal(back(x), module.eval()(x))


def test_tied_weights_are_stored_once_and_stay_tied() -> None:
    storage = save(Tied(), Tied)
    assert len(load(storage.read("m/weights.safetensors"))) == 2
    back, _ = load_module_from(storage, "m")
    assert back.head.weight is back.embed.weight


def test_frozen_parameters_stay_frozen() -> None:
    module = Plain().requires_grad_(False)
    for factory in (Plain, None):
        back, _ = load_module_from(save(module, factory), "m")
        assert not any(p.requires_grad for p in back.parameters())


def test_saving_again_replaces(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    for width in (2, 5):
        factory = functools.partial(NeedsWidth, width)
        save_module(factory(), factory, storage, "m", example_inputs=None, extra={})
    back, _ = load_module_from(storage, "m")
    assert back.layer.out_features == 5


def test_a_factory_of_another_module_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"differs in layer\.bias"):
        save(NeedsWidth(5), functools.partial(NeedsWidth, 6))
    with pytest.raises(ConfigError, match=r"must make an nn.Module"):
        save(NeedsWidth(5), not_a_module)


@pytest.mark.parametrize("make", [lazy_net, Counting])
def test_a_module_that_its_factory_makes_otherwise_comes_back(make: Any) -> None:
    module = make()
    for _ in range(3):
        module(torch.randn(6, 3))
    module.eval()
    storage = save(module, make)
    assert recipe(storage) >= {"factory"}
    back, _ = load_module_from(storage, "m")
    assert repr(back) == repr(module)
    state, expected = back.state_dict(), module.state_dict()
    extra, wanted = state.pop("_extra_state", None), expected.pop("_extra_state", None)
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert wanted is None or (extra["batches"] == 3 and torch.equal(extra["sums"], wanted["sums"]))
    assert torch.equal(back(X), module(X))


def test_attributes_that_training_has_changed_are_saved_with_an_instance() -> None:
    module = Plain()
    module.steps, module.center = 7, torch.ones(2)  # type: ignore[assignment]
    storage = save(module)
    assert recipe(storage) >= {"factory"}
    back, _ = load_module_from(storage, "m")
    assert (back.steps, back.center.tolist()) == (7, [1.0, 1.0])  # type: ignore[union-attr, operator]
    assert torch.equal(back(X), module.eval()(X))


def test_attributes_of_own_objects_are_saved_too() -> None:
    module: Any = WithObjects()
    module.meter.count, module.meter.inner.names = 3, ["a"]
    module.meter.inner.mean, module.last = torch.ones(2), deque([4, 5])
    module.meter.new = {"x": 1}
    back: Any = load_module_from(save(module, WithObjects), "m")[0]
    assert (back.meter.count, back.meter.inner.names, back.meter.new) == (3, ["a"], {"x": 1})
    assert back.meter.inner.mean.tolist() == [1, 1] and list(back.last) == [4, 5]
    assert back.alias is back.meter
    assert torch.equal(back(X), module.eval()(X))


@pytest.mark.parametrize("name", ["slotted", "where", "listed"])
def test_attributes_that_cannot_be_saved_are_refused_by_name(name: str) -> None:
    module: Any = WithObjects()
    if name == "slotted":
        module.slotted.number = 2
    elif name == "where":
        module.where = Path("elsewhere")
    else:
        module.listed[0].count = 5
    with pytest.raises(ConfigError, match=f"the attribute {name} is not what the factory makes"):
        save(module, WithObjects)


def test_a_file_sets_attributes_of_objects_only() -> None:
    for path in ("code.name", "part.training", "_parameters.weight"):
        module: Any = WithObjects()
        module.code = os
        object.__setattr__(module, "part", nn.Linear(1, 1))  # no layer of it
        with pytest.raises(ConfigError, match="a saved file sets"):
            give_unlisted(module, {"buffers": {}, "attributes": [("", path, 1)]})


@pytest.mark.parametrize(
    ("make", "factory"), [(Plain, Plain), (lambda: Plain(8), Plain.wide), (Plain, None)]
)
def test_modules_are_made_under_the_default_dtype_of_their_weights(make: Any, factory: Any) -> None:
    with default_dtype(torch.float64):
        double = make()
        saved_now = save(double, factory)
    saved_later = save(double, factory)  # the default dtype is float32 again
    with default_dtype(torch.float64):
        single = load_module_from(save(make().float(), factory), "m")[0]
        assert torch.get_default_dtype() == torch.float64
    assert single.layer.weight.dtype == torch.float32
    for storage in (saved_now, saved_later):
        again, _ = load_module_from(storage, "m")
        assert torch.get_default_dtype() == torch.float32
        assert again.grid.dtype == torch.float64
        assert torch.equal(again.layer.weight, double.layer.weight)
        assert torch.equal(load_module_from(save(again, factory), "m")[0].grid, double.grid)


def test_a_file_without_the_default_dtype_says_what_to_call() -> None:
    with default_dtype(torch.float64):
        storage = save(Plain(), Plain)
    index = json.loads(storage.read("m/module.json"))
    del index["recipe"]["dtype"]  # as earlier versions wrote it
    saved = replace(open_module(storage, "m"), index=index)
    with pytest.raises(ConfigError, match=r"another dtype.*set_default_dtype\(torch\.float64\)"):
        saved.make()
    with default_dtype(torch.float64):
        assert saved.make().layer.weight.dtype == torch.float64


def test_code_that_changed_since_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = save(Plain(), Plain)
    monkeypatch.setattr("tests.describable.Plain", lambda: Plain().double())
    with pytest.raises(ConfigError, match=r"layer.bias is torch.float64 \(4,\), saved was"):
        load_module_from(storage, "m")
    monkeypatch.delattr("tests.describable.Plain")
    with pytest.raises(ConfigError, match="cannot import 'tests"):
        load_module_from(storage, "m")


@pytest.fixture(scope="module")
def exported() -> tuple[Homeless, MemoryStorage]:
    module = Homeless()
    module(torch.randn(8, 3))
    return module, save(module, Homeless, example=(X[:1],), label="y")


def test_a_class_of_main_comes_back_as_a_program(exported: tuple[Homeless, MemoryStorage]) -> None:
    module, storage = exported
    assert recipe(storage) == {"program"}
    assert module.training and module.norm.training
    back, extra = load_module_from(storage, "m")
    module = copy.deepcopy(module).eval()
    for rows in (1, 2, 7):
        x = torch.randn(rows, 3)
        assert torch.allclose(back(x), module(x))
    assert extra == {"label": "y"} and not back.eval().training
    weights = load(storage.read("m/weights.safetensors"))
    assert torch.equal(weights["layer.weight"], module.layer.weight)


def test_a_program_can_be_pickled_copied_and_saved_again(
    exported: tuple[Homeless, MemoryStorage],
) -> None:
    back, _ = load_module_from(exported[1], "m")
    again, _ = load_module_from(save(back, example=(X,)), "m")
    for other in (pickle.loads(pickle.dumps(back)), copy.deepcopy(back), again):
        assert torch.equal(other(X), back(X))


def test_the_weights_of_a_program_have_the_names_of_its_module(
    exported: tuple[Homeless, MemoryStorage],
) -> None:
    module, storage = exported
    program, _ = load_module_from(storage, "m")
    assert program.state_dict().keys() == module.state_dict().keys()
    program.load_state_dict(program.state_dict())
    resaved = save(program, example=(torch.ones(2, 3),))
    for again in (program, load_module_from(resaved, "m")[0]):
        other = Homeless()
        load_initial_weights(other, InitialWeights(source=again))
        assert all(torch.equal(v, module.state_dict()[n]) for n, v in other.state_dict().items())
    saved = open_module(resaved, "m")  # the file too
    assert saved.weights().keys() == module.state_dict().keys()


def test_a_program_cannot_train(exported: tuple[Homeless, MemoryStorage]) -> None:
    back, _ = load_module_from(exported[1], "m")
    with pytest.raises(ConfigError, match="can only predict"):
        back.train()


def test_a_program_tells_no_paths_of_the_machine_that_made_it(
    exported: tuple[Homeless, MemoryStorage],
) -> None:
    assert b".py" not in exported[1].read("m/program.pt2")


class Branches(nn.Module):
    __module__ = "__main__"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class FixedBatch(nn.Module):
    __module__ = "__main__"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(4, -1)[: x.shape[0]]


class Random(nn.Module):
    __module__ = "__main__"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


@pytest.mark.parametrize("make", [Branches, FixedBatch, Random])
def test_what_no_way_can_save_names_the_causes(make: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        save(make(), lambda: make(), example=(X,))
    words = r"a lambda cannot be imported .*\. Nor as an exported program.*: torch.export cannot"
    assert re.search(words, str(caught.value))


def test_without_example_inputs_the_message_asks_for_them() -> None:
    with pytest.raises(ConfigError, match=r"__main__.*move it into a .*needs example inputs"):
        save(Homeless())


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("name", ["weights.safetensors", "program.pt2"])
@pytest.mark.parametrize("damage", [flip, lambda data: data[:-1], lambda data: b"", None])
def test_damage_is_found_before_anything_is_built(
    exported: tuple[Homeless, MemoryStorage],
    name: str,
    damage: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def build(*_: Any) -> None:
        raise AssertionError("built from a damaged directory")

    storage = copy_of(exported[1])
    data = storage.read(f"m/{name}")
    storage.remove(f"m/{name}")
    if damage is not None:
        storage.write(f"m/{name}", damage(data))
    for builder in ("read_program", "restore", "views"):
        monkeypatch.setattr(f"sparkdl.serialization.saved_module.{builder}", build)
    with pytest.raises(StorageError, match=f"{name}"):
        load_module_from(storage, "m")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b'{"version": 9}',
        b'{"version": 1, "recipe": {}, "files": {}, "extra": {}}',
        b'{"version": 1, "recipe": {"module": 1}, "files": {}, "extra": {}}',
        b'{"version": 1, "recipe": 5, "files": {"weights.safetensors": 1}}',
    ],
)
def test_a_damaged_index_is_a_storage_error(content: bytes) -> None:
    storage = save(Plain())
    storage.write("m/module.json", content)
    with pytest.raises(StorageError, match=r"m/module.json (is damaged|has version 9)"):
        load_module_from(storage, "m")


def test_no_directory_is_a_storage_error() -> None:
    with pytest.raises(StorageError, match=r"cannot read m/module.json"):
        load_module_from(MemoryStorage(), "m")


def copy_of(storage: MemoryStorage) -> MemoryStorage:
    twin = MemoryStorage()
    for name in storage.list("m"):
        twin.write(f"m/{name}", storage.read(f"m/{name}"))
    return twin


def test_programs_saved_by_torch_itself_are_refused() -> None:
    program = torch.export.export(nn.Linear(3, 2), (X,))
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    with pytest.raises(StorageError, match="pickled sample inputs"):
        read_program(buffer.getvalue())


def made_here() -> type[nn.Module]:
    class Local(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    return Local


def in_a_notebook() -> nn.Module:
    return Branches()


in_a_notebook.__module__ = "__main__"


@pytest.mark.parametrize(
    ("factory", "cause"),
    [
        (lambda: made_here()(), "a lambda cannot be imported by name"),
        (made_here(), r"made_here\.<locals>\.Local is defined inside a function"),
        (in_a_notebook, "in_a_notebook is defined in __main__, a notebook or script"),
        (functools.partial(in_a_notebook), "in_a_notebook is defined in __main__, a notebook or"),
    ],
)
def test_what_cannot_be_imported_is_told_with_the_remedy(factory: Any, cause: str) -> None:
    remedy = (
        r"move it into a \.py file that driver and workers import, and pass it itself or its pa"
    )
    for given, told in ((factory, cause), (None, "is defined in")):
        with pytest.raises(ConfigError, match=rf"without pickle: .*{told}.*{remedy}"):
            save(factory(), given, example=(X,))


class Branching(nn.Module):
    """No graph has all that it may do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


def test_a_module_that_branches_is_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    """It was the graph, twice, and 700 characters."""
    Branching.__module__ = "__main__"
    with pytest.raises(ConfigError) as caught:
        save(Branching(), Branching, example=(X,))
    said = str(caught.value)
    assert "Branching is defined in __main__" in said
    assert said.endswith("cannot export it (forward branches on values of its tensors)")
    assert len(said) < 350
    assert capfd.readouterr() == ("", "")
