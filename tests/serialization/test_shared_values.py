"""Objects that a module has in common with a loss or a callback, of which workers have two."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import pickle
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sparkdl import Callback
from sparkdl.config import TrainConfig
from sparkdl.data.plan import RoundPart
from sparkdl.data.spool.mapped import MappedRows
from sparkdl.errors import ConfigError
from sparkdl.mesh import Mesh
from sparkdl.serialization.program.shared_objects import shared_values
from sparkdl.serialization.travel.attributes import Attributes
from sparkdl.serialization.travel.packed_module import travelled
from sparkdl.serialization.travel.pickling import dumps
from sparkdl.spark.fit.begin_module import begin_module
from sparkdl.spark.fit.check_request import check_values
from sparkdl.train.callbacks import NullObserver
from sparkdl.train.round_replica import RoundReplica
from tests.spark.fit.requests import request
from tests.spark.fit.test_trial_step import step
from tests.train.runs import but, make_data, plan_for, run, seeded


class Beta:
    """As users anneal with: a number that grows."""

    def __init__(self) -> None:
        self.value, self.steps = 1.0, [0]


class Net(nn.Module):
    def __init__(
        self, kept: Any, grow: Callable[[Any], None] | None = None, outputs: int = 3
    ) -> None:
        super().__init__()
        self.layer, self.kept, self.grow = nn.Linear(4, outputs), kept, grow

    def forward(self, x: torch.Tensor) -> Any:
        if self.grow is not None and self.training:
            self.grow(self.kept)
        return self.layer(x)


class Reads:
    """A loss that has an object of the program."""

    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target)


class Anneals(Callback):
    def __init__(self, beta: Beta, grow: Callable[[Beta], None]) -> None:
        self.beta, self.grow = beta, grow

    def on_epoch_end(self, state: Any, record: Any) -> None:
        self.grow(self.beta)


def add(beta: Beta) -> None:
    beta.value += 1


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda one: one, "kept"),
        (lambda one: {"a": [1, one]}, "kept['a'][1]"),
        (lambda one: (Reads(one),), "kept[0].kept"),
    ],
)
def test_what_is_shared_is_found_wherever_it_is(make: Callable[[Any], Any], path: str) -> None:
    for one in (Beta(), [1], {"a": 1}, np.zeros(3), np.random.default_rng(0)):
        net = nn.Sequential(Net(make(one)))
        for owner in ((Reads(one),), [lambda one=one: one], {"a": {"b": one}}):
            (found,) = shared_values(net, {"callbacks": owner, "loss": Reads(Beta())})
            assert (found.path, found.owner) == (f"0.{path}", "callbacks")
            assert found.value is one is found.in_module(net)
    assert not shared_values(Net(Beta()), {"callbacks": (Reads(Beta()),), "loss": "mse"})


def test_what_module_and_loss_share_may_be_read() -> None:
    beta = Beta()
    step(check_values(request(Net(beta), loss=Reads(beta))))


@pytest.mark.parametrize("is_factory", [False, True])
@pytest.mark.parametrize(
    ("make", "grow"),
    [
        (Beta, add),
        (Beta, lambda beta: beta.steps.append(1)),
        (list, lambda kept: kept.append(1)),
        (lambda: np.random.default_rng(0), lambda rng: rng.normal()),
    ],
)
def test_forward_that_changes_what_the_loss_has_is_refused(
    make: Callable[[], Any], grow: Callable[[Any], None], is_factory: bool
) -> None:
    kept = make()
    given = (lambda: Net(kept, grow)) if is_factory else Net(kept, grow)
    message = "kept of the module is also in loss: workers have two .* the module has changed"
    with pytest.raises(ConfigError, match=message):
        step(check_values(request(given, loss=Reads(kept))))


def test_where_a_mesh_records_weights_it_is_found_too() -> None:
    beta = Beta()
    asked = request(lambda: Net(beta), loss=Reads(beta), parallelism=Mesh(shard=2))
    begun = begin_module(asked)
    assert begun.weights is not None
    assert [(one.path, one.owner) for one in begun.shared] == [("kept", "loss")]


FILE = """
import torch
from torch import nn

class Beta:
    def __init__(self):
        self.value, self.parts = 1.0, {"a": [1.0]}

BETA = Beta()

class Holds(nn.Linear):
    def __init__(self, kept):
        super().__init__(4, 3)
        self.kept = kept

    def forward(self, x):
        return super().forward(x)

def reads(output, target):
    return nn.functional.cross_entropy(output, target, reduction="none") * BETA.value

def grows(output, target):
    BETA.value += 1
    BETA.parts["a"].append(1.0)
    return reads(output, target) * 0 + nn.functional.cross_entropy(output, target)
"""


def test_an_imported_file_has_another_one_on_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "annealed.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    lib: Any = importlib.import_module("annealed")
    monkeypatch.delitem(sys.modules, "annealed", raising=False)
    monkeypatch.setitem(sys.modules, "annealed", lib)
    for kept, name in ((lib.BETA, "BETA"), (lib.BETA.parts["a"], "BETA.parts['a']")):
        net = lib.Holds(kept)
        (found,) = shared_values(net, {"loss": lib.reads})
        assert (found.path, found.owner) == ("kept", f"the global {name} of annealed")
        assert found.of_owner() is kept is found.in_module(net)
        (there,) = pickle.loads(dumps([found]))
        assert there.of_owner() is kept  # no third one travels
        step(check_values(request(net, loss=lib.reads)))
        message = rf"kept of the module is also in {re.escape(found.owner)}: workers have two"
        with pytest.raises(ConfigError, match=message):
            step(check_values(request(net, loss=lib.grows)))
    assert not shared_values(lib.Holds(lib.Beta()), {"loss": lib.grows})
    found = dataclasses.replace(found, place=dataclasses.replace(found.place, file="absent_file"))
    Attributes(net, shared=(found,)).check_shared()  # nothing is known of it there


CONFIG = TrainConfig(epochs=3, batch_size=6, learning_rate=0.1)


def apart(net: nn.Module, config: TrainConfig) -> tuple[nn.Module, TrainConfig, Any]:
    """Both as a worker gets them."""
    sent = dumps((config, shared_values(net, vars(config))))
    return travelled(net, copies=True), *pickle.loads(sent)


def test_a_callback_that_changes_what_the_module_has_is_told_when_the_epoch_ends() -> None:
    beta, data = Beta(), make_data([12], dtype=torch.float32)
    net = seeded(lambda: Net(beta, outputs=1))
    for grow, is_refused in ((add, True), (lambda beta: None, False)):
        config = but(CONFIG, callbacks=(Anneals(beta, grow),))
        module, own, shared = apart(net, config)
        assert shared[0].value is own.callbacks[0].beta is not module.kept
        if is_refused:
            with pytest.raises(ConfigError, match=r"callbacks has changed .* state\.model\.kept"):
                run(module, own, data, shared=shared)
            assert own.callbacks[0].beta.value == 2.0  # after one epoch
        else:
            run(module, own, data, shared=shared)


def test_both_may_change_in_the_same_way() -> None:
    beta, data = Beta(), make_data([12], dtype=torch.float32)
    grow = lambda beta: setattr(beta, "value", 5.0)  # noqa: E731
    net = seeded(lambda: Net(beta, grow, outputs=1))
    module, own, shared = apart(net, but(CONFIG, callbacks=(Anneals(beta, grow),)))
    run(module, own, data, shared=shared)
    assert module.kept.value == own.callbacks[0].beta.value == 5.0


class AnnealsSteps(Anneals):
    def on_step_end(self, state: Any) -> None:
        self.grow(self.beta)


def test_a_task_of_a_round_tells_it_too() -> None:
    beta, data = Beta(), make_data([12], dtype=torch.float32)
    config = but(CONFIG, callbacks=(AnnealsSteps(beta, add),))
    module, own, shared = apart(seeded(lambda: Net(beta, outputs=1)), config)
    plan = plan_for(data, own)
    held = Attributes(module, resets=True, shared=shared)
    replica = RoundReplica(module, own, plan, torch.device("cpu"), held=held)
    part = RoundPart(epoch=0, step=0, step_in_epoch=0, num_steps=1)
    state = {"model": copy.deepcopy(module.state_dict())}
    with pytest.raises(ConfigError, match=r"callbacks has changed"):
        replica.train(state, 0, MappedRows(data[0], plan), part, NullObserver())


def keep_in(seen: dict[str, Any], layer: nn.Module, given: Any, output: Any) -> None:
    seen["of"] = output


def hooked(where: str) -> tuple[nn.Module, Callable[..., Any]]:
    """A net whose hook leaves in a variable what the training step reads, as many programs do."""
    seen: dict[str, Any] = {}
    net = Net(None)

    def keep(number: int, *given: Any) -> None:
        seen["of"] = given[-1]

    if where == "layer":
        net.layer.register_forward_hook(lambda layer, args, output: keep(0, output))
    elif where == "partial":
        net.layer.register_forward_hook(partial(keep, 0))
    elif where == "argument":
        net.layer.register_forward_hook(partial(keep_in, seen))
    elif where == "gradient":
        net.layer.weight.register_hook(lambda gradient: keep(1, gradient))
    else:
        net.layer.register_forward_pre_hook(lambda layer, args: keep(1, args[0]))

    def training_step(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(module(x), y)
        if where == "gradient" and "of" not in seen:
            return loss
        return loss + seen["of"].pow(2).mean()

    return net, training_step


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("where", ["layer", "partial", "argument", "before", "gradient"])
def test_what_a_hook_leaves_for_the_training_step_is_told(where: str, is_warm: bool) -> None:
    net, training_step = hooked(where)
    if is_warm:
        net(torch.zeros(2, 4)).sum().backward()
    owner = "layer.weight" if where == "gradient" else "layer"
    message = f"what a hook of {owner} uses is also in training_step: workers have two of it"
    with pytest.raises(ConfigError, match=f"{message}.*keep it in an attribute of a layer"):
        step(check_values(request(net, training_step=training_step)))


class Criterion(nn.Module):
    """A loss that is a layer of the module, too."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.counts, self.hidden, self.calls = counts, torch.zeros(1), 0
        self.register_buffer("scale", torch.ones(()))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += self.counts
        return nn.functional.cross_entropy(output, target) * self.scale + self.hidden.mean()


class WithCriterion(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.criterion, self.way = nn.Linear(4, 3), Criterion(way == "loss"), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.layer(x)
        if self.way == "attribute":
            self.criterion.hidden = found.pow(2)
        elif self.way == "buffer":
            self.criterion.scale.mul_(0.5)
        return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", ["attribute", "buffer", "loss", "nothing"])
def test_a_loss_that_is_a_layer_is_refused_once_one_of_them_changes(way: str) -> None:
    net = WithCriterion(way)
    checked = check_values(request(net, loss=net.criterion))
    if way == "nothing":
        step(checked)
        return
    with pytest.raises(ConfigError, match="criterion of the module is also in loss: workers have"):
        step(checked)
