"""Optimizers as people write them train as in a plain loop, alone, in gangs and in rounds."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CyclicLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
)
from torch.optim.swa_utils import SWALR

from sparkdl.data.plan import RoundPart
from sparkdl.data.spool.mapped import MappedRows
from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.serialization.travel.packed_module import pack_blank, unpack
from sparkdl.storage.checkpoint_format import decode, encode
from sparkdl.storage.tensor_tree import snapshot
from sparkdl.sync.averaging.block_momentum import BlockMomentum
from sparkdl.sync.module_tensors import tensors_of
from sparkdl.train.callbacks import Callback, CallbackState, NullObserver
from sparkdl.train.optimizers.check_optimizer import check_schedule, check_steps
from sparkdl.train.optimizers.nested_states import copied, give_state, plain_state
from sparkdl.train.optimizers.optimizers import resolve_optimizer
from sparkdl.train.round_replica import RoundReplica
from sparkdl.train.training_state import method_of
from tests.gang import Gang
from tests.train.optimizers.test_stepping import config_of, make_net, plain_loop
from tests.train.runs import make_data, plan_for, run, weights

ROWS = [23, 14]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


class KeepsGradients(torch.optim.SGD):
    """Remembers the last gradient itself, not a copy."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in parameters_of(self):
            last = self.state[p].get("last", p.grad)
            p.sub_(p.grad + 0.5 * (p.grad - last), alpha=0.05)
            self.state[p]["last"] = p.grad


class Beginning(torch.optim.SGD):
    """Its first momentum is the gradient, changed in place later."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in parameters_of(self):
            own = self.state[p]
            if "momentum" in own:
                own["momentum"].mul_(0.9).add_(p.grad)
            else:
                own["momentum"] = p.grad
            p.sub_(own["momentum"], alpha=0.05)


class CountsFirst(torch.optim.SGD):
    """Counts, and follows a mean, before it finds that it has no closure."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.t = 0

    def step(self, closure: Any = None) -> Any:
        self.t += 1
        with torch.no_grad():
            for p in parameters_of(self):
                self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p, 0.5)
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            for p in parameters_of(self):
                p.sub_(0.1 * p.grad / self.t + 0.05 * self.state[p]["mean"])
        return loss


class SlowWeights(torch.optim.SGD):
    """Copies the weights when it is made."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.slow = [p.detach().clone() for p in parameters_of(self)]
        self.t = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.t += 1
        if self.t % 3 == 0:
            for p, slow in zip(parameters_of(self), self.slow, strict=True):
                p.copy_(slow.lerp_(p, 0.5))


class Anchored(torch.optim.SGD):
    """Has the first weights in its state."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        for p in parameters_of(self):
            self.state[p]["anchor"] = p.detach().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in parameters_of(self):
            p.grad.add_(p - self.state[p]["anchor"], alpha=0.3)
        super().step()


class Flat(torch.optim.SGD):
    """Lays all parameters into one memory, on which it steps."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        every = parameters_of(self)
        self.flat = torch.cat([p.detach().reshape(-1) for p in every])
        pieces = torch.split(self.flat, [p.numel() for p in every])
        for p, piece in zip(every, pieces, strict=True):
            p.data = piece.view_as(p)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = torch.cat([p.grad.reshape(-1) for p in parameters_of(self)])
        self.flat.sub_(gradients, alpha=0.1)


class NoGroups(torch.optim.Optimizer):
    """Has a state dict of its own form, without groups."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.inner = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.inner.param_groups:
            group["lr"] = self.param_groups[0]["lr"]
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict["inner"])


class Hook:
    """A hook of steps that follows a mean."""

    def __init__(self) -> None:
        self.t, self.means = 0, list[torch.Tensor]()

    @torch.no_grad()
    def __call__(self, optimizer: Any, *_: Any) -> None:
        self.t += 1
        self.means = self.means or [p.detach().clone() for p in parameters_of(optimizer)]
        for p, mean in zip(parameters_of(optimizer), self.means, strict=True):
            p.lerp_(mean.lerp_(p, 1 / self.t), 0.3)


def hooked(params: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer.register_step_post_hook(Hook())
    return optimizer


class Noisy(torch.optim.SGD):
    """Stochastic gradient Langevin dynamics, and noise of numpy's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for p in parameters_of(self):
            p.add_(torch.randn_like(p), alpha=0.01 * float(np.random.rand()))


def keeps_gradients(params: Any) -> torch.optim.Optimizer:
    return KeepsGradients(params, lr=0.05)


def beginning(params: Any) -> torch.optim.Optimizer:
    return Beginning(params, lr=0.05)


def noisy(params: Any) -> torch.optim.Optimizer:
    return Noisy(params, lr=0.05)


KINDS = [keeps_gradients, beginning, CountsFirst, SlowWeights, Anchored, Flat, hooked, NoGroups]


def step_once(optimizer: Any, closure: Callable[[], torch.Tensor]) -> None:
    if isinstance(optimizer, CountsFirst):
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


def train_on_rank(comm: Any, make: Any) -> torch.Tensor:
    net = make_net()
    run(net, config_of(make), make_data(ROWS), comm=comm)
    return weights(net)


@pytest.mark.parametrize("make", KINDS)
def test_alone_and_in_rounds(make: Any) -> None:
    expected, net = plain_loop(config_of(make), [23], step_once), make_net()
    run(net, config_of(make), make_data([23]))
    torch.testing.assert_close(weights(net), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(in_rounds(make), expected, rtol=0, atol=1e-10)


def in_rounds(make: Any) -> torch.Tensor:
    """What tasks of one step come to, whose processes get modules with zeros for weights."""
    config, shards = config_of(make), make_data([23])
    plan, packed = plan_for(shards, config, world_size=1), pack_blank(make_net())
    replicas = [
        RoundReplica(unpack(packed.skeleton, packed.tensors), config, plan, torch.device("cpu"))
        for _ in range(2)
    ]
    state: Any = {"model": copy.deepcopy(tensors_of(make_net()))}
    for number in range(10):  # in turns, as tasks meet processes
        part = RoundPart(epoch=number // 5, step_in_epoch=number % 5, step=number, num_steps=1)
        rows = MappedRows(shards[0], plan)
        found = replicas[number % 2].train(state, 0, rows, part, NullObserver()).state
        kept = {key: value for key, value in found.items() if key != "attributes"}
        state = decode(b"".join(encode(snapshot(kept))), "a state")
    return torch.cat([value.flatten() for value in state["model"].values()])


@pytest.mark.parametrize("make", KINDS)
def test_in_a_gang(gang: Gang, make: Any) -> None:
    first, second = gang.run(train_on_rank, make)
    torch.testing.assert_close(
        first, plain_loop(config_of(make), ROWS, step_once), rtol=0, atol=1e-10
    )
    assert torch.equal(first, second)


class Watching(Callback):
    """Notes the weights after each step."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_step_end(self, state: CallbackState) -> None:
        self.seen.append(weights(state.model))


def watched_on_rank(comm: Any, make: Any) -> list[torch.Tensor]:
    net, watching = make_net(), Watching()
    run(net, config_of(make, callbacks=(watching,)), make_data(ROWS), comm=comm)
    return watching.seen


def test_ranks_draw_the_same_numbers_in_a_step(gang: Gang) -> None:
    first, second = gang.run(watched_on_rank, noisy)
    assert len(first) == 10
    assert all(map(torch.equal, first, second))


class Lookahead(torch.optim.Optimizer):
    """As a widely used package has it: the slow weights lie under ids in its state dict."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups = inner, inner.param_groups
        self.state = defaultdict(dict)
        for group in self.param_groups:
            group["counter"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        for group in self.param_groups:
            for p in group["params"] if group["counter"] == 0 else ():
                slow = self.state[p].setdefault("slow", p.clone())
                p.copy_(slow.lerp_(p, 0.5))
            group["counter"] = (group["counter"] + 1) % 5

    def state_dict(self) -> dict[str, Any]:
        slow = {id(k) if isinstance(k, torch.Tensor) else k: v for k, v in self.state.items()}
        return {"slow": slow, **self.inner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "state": state_dict["slow"]})
        self.inner.load_state_dict(state_dict)


def lookahead(params: Any) -> torch.optim.Optimizer:
    return Lookahead(torch.optim.SGD(params, lr=0.1, momentum=0.9))


def counting_step(params: Any) -> torch.optim.Optimizer:
    """Torch's, with a step that counts in a variable."""
    optimizer, t, inner = torch.optim.SGD(params, lr=0.1), 0, torch.optim.SGD.step

    def step(closure: Any = None) -> None:
        nonlocal t
        t += 1
        optimizer.param_groups[0]["lr"] = 0.1 / t
        inner(optimizer)

    optimizer.step = step  # type: ignore[method-assign]
    return optimizer


def counting_hook(params: Any) -> torch.optim.Optimizer:
    """Torch's, with a hook that counts in a variable."""
    optimizer, seen = torch.optim.SGD(params, lr=0.1), list[int]()

    @torch.no_grad()
    def hook(*_: Any) -> None:
        seen.append(1)
        for p in parameters_of(optimizer):
            p.mul_(1 - 0.1 / len(seen))

    optimizer.register_step_post_hook(hook)
    return optimizer


class CountsInClass(torch.optim.SGD):
    """Counts for all of its kind."""

    t = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        type(self).t += 1
        self.param_groups[0]["lr"] = 0.1 / type(self).t
        super().step()


class Slots(torch.optim.SGD):
    """Counts in a slot."""

    __slots__ = ("t",)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.t = getattr(self, "t", 0) + 1
        with torch.no_grad():
            for p in parameters_of(self):
                p.sub_(p.grad, alpha=0.1 / self.t)


class Growing(torch.optim.SGD):
    """Gets its last parameter in the third step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        *some, self.last = params
        super().__init__(some, lr=lr)
        self.t = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.t += 1
        if self.t == 3:
            self.add_param_group({"params": [self.last]})
        super().step()


def counts_in_class(params: Any) -> torch.optim.Optimizer:
    return CountsInClass(params, lr=0.1)


def slots(params: Any) -> torch.optim.Optimizer:
    return Slots(params, lr=0.1)


@pytest.mark.parametrize("make", [lookahead, counting_step, counting_hook, counts_in_class, slots])
def test_what_steps_otherwise_with_the_state_of_another_is_refused(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"a new optimizer .* training could not go on"):
        checked(make)


class Calls:
    """A factor that counts its calls in an attribute, which torch keeps."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 1 / self.calls


def by_variable(optimizer: torch.optim.Optimizer) -> LRScheduler:
    calls = list[int]()

    def factor(step: int) -> float:
        calls.append(step)
        return 1 / len(calls)

    return LambdaLR(optimizer, factor)


class OfItsOwn(LRScheduler):
    """Forgets in load_state_dict() what it has in an attribute."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.t = 0
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        self.t += 1
        return [base / self.t for base in self.base_lrs]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "t": 0})


def small_optimizer() -> torch.optim.Optimizer:
    groups = [{"params": [p], "lr": 0.1 * (n + 1)} for n, p in enumerate(make_net().parameters())]
    return torch.optim.SGD(groups, momentum=0.9)


@pytest.mark.parametrize("make", [by_variable, OfItsOwn])
def test_a_schedule_that_forgets_is_refused(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"a new scheduler .* goes on otherwise"):
        check_schedule(small_optimizer(), make)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: LambdaLR(o, Calls()),
        lambda o: OneCycleLR(o, 0.1, total_steps=30),
        lambda o: SequentialLR(o, [LinearLR(o, 0.1), CosineAnnealingLR(o, 9)], [3]),
        lambda o: CyclicLR(o, 0.01, 0.1, step_size_up=2),
        lambda o: SWALR(o, 0.01, 4),
    ],
)
def test_a_schedule_that_goes_on_is_not(make: Any) -> None:
    check_schedule(small_optimizer(), make)


def test_what_gets_parameters_later_is_refused() -> None:
    with pytest.raises(ConfigError, match="Growing fails after some steps, or a new one"):
        checked(Growing)


def test_groups_come_along_where_a_state_dict_has_none() -> None:
    one, other = NoGroups(make_net().parameters()), NoGroups(make_net().parameters())
    one.param_groups[0]["lr"] = 0.02  # as a schedule or a callback does
    state = plain_state(one)
    assert "params" not in state["param_groups"][0]
    give_state(other, state)
    assert other.param_groups[0]["lr"] == 0.02
    config = config_of(NoGroups)
    (options,) = method_of(config, make_net(), "gang").options
    assert options["lr"] == 0.1


def clamped(params: Any) -> torch.optim.Optimizer:
    """Torch's, with a hook that keeps nothing."""
    optimizer = torch.optim.AdamW(params, lr=0.1)

    @torch.no_grad()
    def hook(optimizer: Any, *_: Any) -> None:
        for p in parameters_of(optimizer):
            p.clamp_(-1, 1)

    optimizer.register_step_post_hook(hook)
    return optimizer


@pytest.mark.parametrize("make", [*KINDS, noisy, clamped, torch.optim.Adam])
def test_what_goes_on_is_not(make: Any) -> None:
    checked(make)


def test_of_a_large_module_only_states_are_compared() -> None:
    config, net = config_of(counting_hook), make_net()
    made = resolve_optimizer(config, net)
    check_steps(made(net.parameters()), None, config, (), lambda: made(net.parameters()))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (SlowWeights, "keeps its attribute .* which BlockMomentum clears after each round"),
        (Anchored, "makes its state in __init__, and BlockMomentum clears it"),
    ],
)
def test_what_cannot_begin_anew_after_a_round_is_refused(make: Any, told: str) -> None:
    resets = BlockMomentum(averaging_period=2)
    assert resets.optimizer_state == "reset"
    with pytest.raises(ConfigError, match=told):
        checked(make, sync_strategy=resets)
    checked(beginning, sync_strategy=resets)


def checked(make: Callable[[Any], torch.optim.Optimizer], **changes: Any) -> None:
    config = config_of(make, **changes)

    def made() -> torch.optim.Optimizer:
        net: nn.Module = make_net()
        return resolve_optimizer(config, net)(net.parameters())

    check_steps(made(), None, config, (), made)


@pytest.mark.parametrize(
    ("kind", "key", "options"),
    [
        ("Adam", "exp_avg", {}),
        ("AdamW", "max_exp_avg_sq", {"amsgrad": True}),
        ("SGD", "momentum_buffer", {"momentum": 0.9}),
        ("Adagrad", "sum", {}),
    ],
)
@pytest.mark.parametrize("is_fused", [True, False])
def test_states_that_a_fused_step_believes_are_looked_at(
    kind: str, key: str, options: dict[str, Any], is_fused: bool
) -> None:
    """It writes as many numbers as the parameter has, wherever they lie; a file says that it is."""
    parameter = nn.Parameter(torch.ones(8))
    optimizer = getattr(torch.optim, kind)([parameter], lr=0.1, fused=is_fused, **options)
    parameter.grad = torch.ones(8)
    optimizer.step()
    state = copied(plain_state(optimizer))
    give_state(optimizer, copied(state))
    state["param_groups"][0]["fused"] = True
    for wrong in (torch.ones(2), torch.ones(8, dtype=torch.int8), torch.ones(2, 4)):
        state["state"][0][key] = wrong
        with pytest.raises(CheckpointError, match=f"the state '{key}' of an optimizer"):
            give_state(optimizer, copied(state))
