"""What an optimizer of the user's own keeps in attributes survives a restart, and goes round."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sparkdl.data.plan import RoundPart
from sparkdl.data.spool.mapped import MappedRows
from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.mesh import Mesh
from sparkdl.storage.checkpoint_format import decode, encode
from sparkdl.storage.tensor_tree import snapshot
from sparkdl.sync.asynchronous.async_sgd import AsyncSGD
from sparkdl.train.callbacks import NullObserver
from sparkdl.train.optimizers.check_optimizer import check_steps
from sparkdl.train.optimizers.nested_states import BESIDES, begin_states, give_state, plain_state
from sparkdl.train.optimizers.optimizers import resolve_optimizer
from sparkdl.train.round_replica import RoundReplica
from tests.sync.apart import assert_equal_bits
from tests.train.optimizers.test_stepping import config_of
from tests.train.optimizers.test_stepping import make_net as make_double_net
from tests.train.runs import Keeper, make_data, plan_for, run, weights

Make = Callable[[Any], torch.optim.Optimizer]


class Counting(torch.optim.SGD):
    """Warms up by a count of its own."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.t = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.t += 1
        for p in parameters_of(self):
            p.sub_(p.grad, alpha=0.1 * self.t)


class Means(torch.optim.SGD):
    """Keeps means in containers, by parameter, by id and by place, and draws numbers."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.by_parameter = {p: torch.zeros_like(p) for p in parameters_of(self)}
        self.by_id = {id(p): torch.zeros_like(p) for p in parameters_of(self)}
        self.slow = [p.detach().clone() for p in parameters_of(self)]
        self.recent: deque[float] = deque(maxlen=2)
        self.late: Any = None
        self.kept = Kept()
        self.seen: defaultdict[str, int] = defaultdict(int)
        self.draws = random.Random(3), np.random.default_rng(3), np.random.RandomState(3)
        self.generator = torch.Generator().manual_seed(3)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        draws = self.draws[0].random() + self.draws[1].random() + self.draws[2].random_sample()
        noise = draws + torch.rand((), generator=self.generator).item()
        self.late = {"noise": noise, "of": [1, (2.0, "x")]} if self.late is None else self.late
        self.recent.append(noise)
        self.seen["steps"] += 1
        self.kept.means.append(noise)
        share = 0.01 * self.late["noise"] * sum(self.recent) * self.seen["steps"]
        share *= len(self.kept.means) * self.kept.means[0]
        for p, slow in zip(parameters_of(self), self.slow, strict=True):
            mean, other = self.by_parameter[p], self.by_id[id(p)]
            mean.mul_(0.9).add_(p.grad)
            other.mul_(0.5).add_(p.grad)
            p.sub_(mean + other, alpha=share)
            slow.lerp_(p, 0.5)
            p.copy_(slow)


class Kept:
    """Something of the user's own with a list."""

    def __init__(self) -> None:
        self.means: list[float] = []


class Around(torch.optim.Optimizer):
    """Holds another optimizer that shares its groups, as SAM and Lookahead do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.base.param_groups
        self.defaults.update(self.base.defaults)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


class Teaching(torch.optim.SGD):
    """Keeps a module with the mean of its weights, towards which it pulls them."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.mean = nn.ParameterList([p.detach().clone() for p in parameters_of(self)])
        self.student = nn.ParameterList(parameters_of(self))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for p, mean in zip(parameters_of(self), self.mean, strict=True):
            mean.lerp_(p, 0.3)
            p.lerp_(mean, 0.1)


class Precise(torch.optim.SGD):
    """Has a state in float64, which torch makes one in float32 of."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in parameters_of(self):
            mean = self.state[p].setdefault("mean", torch.zeros_like(p, dtype=torch.float64))
            mean.mul_(0.9).add_(p.grad.double())
            p.sub_(mean.to(p.dtype), alpha=0.1)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def made(kind: Any, module: nn.Module) -> torch.optim.Optimizer:
    optimizer = resolve_optimizer(config_of(kind), module)(module.parameters())
    begin_states(optimizer)
    return optimizer


def steps(module: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    """Steps with gradients that follow from weights and number."""
    for number in numbers:
        for p in module.parameters():
            p.grad = torch.sin(p.detach() * 3 + number)
        optimizer.step()


def through_a_file(optimizer: torch.optim.Optimizer) -> Any:
    return decode(b"".join(encode(snapshot(plain_state(optimizer)))), "a state")


def make_net() -> nn.Module:
    return make_double_net().float()


def copied(module: nn.Module) -> nn.Module:
    other = make_net()
    other.load_state_dict(module.state_dict())
    return other


KINDS = (Counting, Means, Around, Teaching, Precise)


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_optimizer_goes_on_as_the_old_one_would(kind: Any) -> None:
    module = make_net()
    whole = made(kind, module)
    steps(module, whole, range(3))
    state, other = through_a_file(whole), copied(module)
    resumed = made(kind, other)
    give_state(resumed, state)
    steps(module, whole, range(3, 7))
    steps(other, resumed, range(3, 7))
    for one, two in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_that_is_used_again_begins_where_the_state_says(kind: Any) -> None:
    module = make_net()
    fresh = copied(module)
    whole, used = made(kind, module), made(kind, fresh)
    begin = through_a_file(whole)
    steps(fresh, used, range(5))
    fresh.load_state_dict(module.state_dict())
    give_state(used, begin)
    steps(module, whole, range(2))
    steps(fresh, used, range(2))
    for one, two in zip(module.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("kind", [Counting, Means, Around, Teaching])
def test_rounds_and_restarts_give_the_bits_of_a_gang(kind: Any) -> None:
    config, sink = config_of(kind), Keeper(steps=(4,))
    whole, resumed, shards = make_double_net(), make_double_net(), make_data([23])
    run(whole, config, make_data([23]), sink=sink)
    (point,) = sink.points.values()
    for name in ("shared", "rank_state"):
        tree = decode(b"".join(encode(snapshot(getattr(point, name)))), name)
        object.__setattr__(point, name, tree)
    run(resumed, config, make_data([23]), resume=point)
    assert_equal_bits(weights(whole), weights(resumed))
    plan = plan_for(shards, config, world_size=1)
    replicas = [
        RoundReplica(make_double_net(), config, plan, torch.device("cpu")) for _ in range(2)
    ]
    rows, state = MappedRows(shards[0], plan), {"model": make_double_net().state_dict()}
    for number in range(10):  # in turns, as tasks meet processes
        part = RoundPart(epoch=number // 5, step_in_epoch=number % 5, step=number, num_steps=1)
        outcome = replicas[number % 2].train(state, 0, rows, part, NullObserver())
        kept = {key: value for key, value in outcome.state.items() if key != "attributes"}
        state = decode(b"".join(encode(snapshot(kept))), "a state")
    found = torch.cat([value.flatten() for value in state["model"].values()])
    torch.testing.assert_close(found, weights(whole), rtol=0, atol=1e-12)


def test_shared_groups_stay_shared() -> None:
    module = make_net()
    first, second = made(Around, module), made(Around, module)
    steps(module, first, range(2))
    give_state(second, through_a_file(first))
    assert isinstance(second, Around)
    second.param_groups[0]["lr"] = 7.0
    assert second.base.param_groups[0]["lr"] == 7.0
    assert second.base.param_groups is second.param_groups


def test_what_the_user_has_set_otherwise_is_not_undone() -> None:
    class Scaled(Counting):
        def __init__(self, params: Any, factor: float) -> None:
            super().__init__(params)
            self.factor = factor

    module = make_net()
    first, second = (made(lambda p, f=f: Scaled(p, f), module) for f in (1.0, 2.0))
    steps(module, first, range(2))
    give_state(second, through_a_file(first))
    assert isinstance(second, Scaled)
    assert second.factor == 2.0
    assert second.t == 2


class Iterating(Counting):
    """Counts by something that no checkpoint can hold."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.numbers = itertools.count(1)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        next(self.numbers)
        super().step()


class Forgetting(Counting):
    """Leaves out of its state what it keeps there."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for p in parameters_of(self):
            self.state[p]["count"] = self.t

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict({**state_dict, "state": {}})


class Late(Counting):
    """Makes another optimizer in its first step."""

    base: Any = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base = self.base or torch.optim.Adam(self.param_groups)
        self.base.step()


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Iterating, "changes its attribute numbers, a count, which no checkpoint can hold"),
        (Forgetting, r"has not its state \(state\), so training could not go on"),
        (Late, "has not its attribute base, so training could not go on"),
    ],
)
def test_what_could_not_go_on_is_refused(kind: Any, told: str) -> None:
    module = make_net()
    with pytest.raises(ConfigError, match=told):
        checked(kind, module)


def checked(kind: Any, module: nn.Module, **changes: Any) -> None:
    config = config_of(kind, **changes)
    check_steps(made(kind, module), None, config, (), lambda: made(kind, copied(module)))


@pytest.mark.parametrize("changes", [{"sync_strategy": AsyncSGD()}, {"parallelism": Mesh(data=2)}])
def test_attributes_are_refused_where_only_states_of_parameters_are_kept(changes: Any) -> None:
    with pytest.raises(ConfigError, match="keeps its attribute t besides its state"):
        checked(Counting, make_net(), **changes)
    checked(Precise, make_net(), **changes)


@pytest.mark.parametrize("kind", KINDS)
def test_what_can_is_not(kind: Any) -> None:
    checked(kind, make_net())


def test_a_file_names_no_other_method() -> None:
    optimizer = made(Counting, make_net())
    state = plain_state(optimizer)
    for kind in ("_class__", "_init__", "read", ""):
        with pytest.raises(CheckpointError, match="has no kind"):
            give_state(optimizer, {**state, BESIDES: [{"t": [kind, 1]}]})
