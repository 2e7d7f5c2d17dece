"""Optimizers with modes and with closures step as in a plain loop; what cannot be is refused."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler

from sparkdl.config import EarlyStopping, TrainConfig
from sparkdl.data.batches import Batches
from sparkdl.data.plan import RoundPart
from sparkdl.data.spool.mapped import MappedRows
from sparkdl.errors import ConfigError
from sparkdl.storage.checkpoint_format import decode, encode
from sparkdl.storage.tensor_tree import snapshot
from sparkdl.sync.asynchronous.async_sgd import AsyncSGD
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.train.callbacks import NullObserver
from sparkdl.train.optimizers.check_optimizer import check_length, check_steps, step_once
from sparkdl.train.optimizers.nested_states import give_state, plain_state
from sparkdl.train.optimizers.optimizers import Schedule
from sparkdl.train.optimizers.stepping import Stepper
from sparkdl.train.round_replica import RoundReplica
from tests.gang import Gang
from tests.sync.apart import assert_equal_bits
from tests.train.runs import NUM_FEATURES, Keeper, but, make_data, plan_for, run, seeded, weights

ROWS = [23, 14]


class Sharpened(torch.optim.SGD):
    """Moves the weights before it calls a closure, which its signature says may be missing."""

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            for p in parameters:
                p.add_(p.grad)
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            for p in parameters:
                p.sub_(1.0)
        super().step()
        return loss


def test_an_optimizer_that_fails_after_it_has_moved_weights_begins_where_it_was() -> None:
    weight = nn.Parameter(torch.tensor([2.0]))
    weight.grad = torch.tensor([1.0])
    seen: list[float] = []

    def again() -> torch.Tensor:
        seen.append(weight.item())
        weight.grad = torch.tensor([1.0])
        return torch.tensor(0.0)

    Stepper(Sharpened([weight], lr=0.5))(lambda: torch.tensor(0.0), again)
    assert seen == [3.0]
    assert weight.item() == 1.5


class ScheduleFree(torch.optim.Optimizer):
    """SGD without a schedule (Defazio et al., 2024): the gradients are taken between two points."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.8) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "trains": False})

    def train(self) -> None:
        self._swap(True)

    def eval(self) -> None:
        self._swap(False)

    @torch.no_grad()
    def _swap(self, trains: bool) -> None:
        for group in self.param_groups:
            if group["trains"] != trains:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        beta = group["beta"]
                        share = 1 - beta if trains else 1 - 1 / beta
                        p.lerp_(self.state[p]["z"], share)
                group["trains"] = trains

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["trains"]:
                raise RuntimeError("call train() before training, and eval() before evaluation")
            group["k"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone())
                x = p.lerp(z, 1 - 1 / group["beta"])
                z.sub_(p.grad, alpha=group["lr"])
                x.lerp_(z, 1 / group["k"])
                p.copy_(x.lerp(z, 1 - group["beta"]))


class SAM(torch.optim.SGD):
    """Two steps, of which the second has the gradients where the first has gone (Foret, 2020)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "SAM requires a closure"
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in every]).norm() + 1e-12
        moves = [0.05 * p.grad / norm for p in every]
        for p, move in zip(every, moves, strict=True):
            p.data.add_(move)
            p.grad = None
        with torch.enable_grad():
            closure()
        for p, move in zip(every, moves, strict=True):
            p.data.sub_(move)
        super().step()


class Lookahead(torch.optim.Optimizer):
    """Wraps another, as many write it: without ``super().__init__()`` (Zhang, 2019)."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.count = inner, 0
        self.param_groups = inner.param_groups
        self.slow = [[p.detach().clone() for p in g["params"]] for g in inner.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.count += 1
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            for p, kept in zip(group["params"], slow, strict=True):
                if self.count % 3 == 0:
                    p.copy_(kept.lerp_(p, 0.5))

    def state_dict(self) -> dict[str, Any]:
        return {**self.inner.state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        self.slow, self.count = state.pop("slow"), state.pop("count")
        self.inner.load_state_dict(state)


class Annealing(torch.optim.SGD):
    """Does what belongs to a step where a plain loop begins it."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            group["lr"] *= 0.9
        super().zero_grad(set_to_none)


class Leaving(torch.optim.SGD):
    """Has gradients fade, in place of a momentum."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.9)


def annealing(parameters: Any) -> torch.optim.Optimizer:
    return Annealing(parameters, lr=0.2, momentum=0.9)


def lookahead(parameters: Any) -> torch.optim.Optimizer:
    return Lookahead(torch.optim.SGD(parameters, lr=0.1, momentum=0.9))


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.5, max_iter=4, history_size=3)


def with_search(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, max_iter=3, line_search_fn="strong_wolfe")


def sam(parameters: Any) -> torch.optim.Optimizer:
    return SAM(parameters, lr=0.05, momentum=0.9)


CLOSURES = [lbfgs, with_search, sam]


def make_net() -> nn.Module:
    return seeded(
        lambda: nn.Sequential(nn.Linear(NUM_FEATURES, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    )


def config_of(optimizer: Any, **changes: Any) -> TrainConfig:
    return TrainConfig(optimizer=optimizer, epochs=2, batch_size=5, loss="mse", seed=4, **changes)


def step_as_wanted(optimizer: Any, closure: Callable[[], torch.Tensor]) -> None:
    """Give a closure to the optimizers that want one."""
    if isinstance(optimizer, SAM | ScheduleFree | Lookahead | Annealing):
        closure()
    optimizer.step(None if isinstance(optimizer, ScheduleFree | Annealing) else closure)


def plain_loop(config: TrainConfig, rows: list[int], step: Any = step_as_wanted) -> torch.Tensor:
    """A user's own loop over the rows of all ranks."""
    net, shards = make_net(), make_data(rows)
    plan = plan_for(shards, config, world_size=len(rows))
    optimizer: Any = config.optimizer(net.parameters())  # type: ignore[operator]
    for epoch in range(config.epochs):
        if hasattr(optimizer, "train"):
            optimizer.train()
        ranks = [
            Batches([MappedRows(s, plan)], plan, r, seed=config.seed, epoch=epoch)
            for r, s in enumerate(shards)
        ]
        for parts in zip(*ranks, strict=True):
            x = torch.cat([part.inputs[0] for part in parts])
            y = torch.cat([part.target for part in parts])

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = (net(x).squeeze(1) - y).square().mean()
                loss.backward()
                return loss

            step(optimizer, closure)
        if hasattr(optimizer, "eval"):
            optimizer.eval()
    return weights(net)


def train_on_rank(comm: Any, config: TrainConfig) -> torch.Tensor:
    net = make_net()
    run(net, config, make_data(ROWS), comm=comm)
    return weights(net)


@pytest.mark.parametrize("optimizer", [*CLOSURES, ScheduleFree, lookahead, annealing])
def test_alone_they_train_as_in_a_plain_loop(optimizer: Any) -> None:
    expected = plain_loop(config_of(optimizer), [23])
    for strategy in (AllReduce(), ParameterAveraging(averaging_period=2)):
        net = make_net()
        validation = make_data([8])
        config = config_of(optimizer, sync_strategy=strategy)
        run(net, config, make_data([23]), validation=validation)
        torch.testing.assert_close(weights(net), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("elasticity", ["rounding", "bits"])
@pytest.mark.parametrize("optimizer", [*CLOSURES, ScheduleFree, lookahead, annealing])
def test_in_a_gang_they_do_so_too(gang: Gang, optimizer: Any, elasticity: Any) -> None:
    config = config_of(optimizer, sync_strategy=AllReduce(), elasticity=elasticity)
    first, second = gang.run(train_on_rank, config)
    torch.testing.assert_close(first, plain_loop(config, ROWS), rtol=0, atol=1e-8)
    assert torch.equal(first, second)


@pytest.mark.parametrize("optimizer", [lbfgs, sam, ScheduleFree, lookahead, annealing])
def test_a_resumed_run_has_the_same_bits(optimizer: Any) -> None:
    config, sink = config_of(optimizer), Keeper(steps=(3,))
    whole, resumed = make_net(), make_net()
    run(whole, config, make_data([23]), sink=sink)
    assert_equal_bits(weights(whole), weights(run_from(resumed, config, sink)))


def test_zero_grad_of_their_own_sets_to_zero_or_drops() -> None:
    class Keeping(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = False) -> None:
            super().zero_grad(set_to_none)

    used, unused = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = Keeping([used, unused], lr=0.1, weight_decay=0.5)
    stepper = Stepper(optimizer)
    for gradient in (torch.ones(2), None):  # the second step does not use it
        stepper.zero()
        used.grad = gradient
        stepper(float, float)
    assert used.tolist() == pytest.approx([0.85 * 0.95] * 2)  # decays without a gradient of its own
    assert unused.tolist() == [1.0, 1.0]
    used.grad = torch.ones(2)
    with pytest.raises(ConfigError, match=r"Leaving leaves gradients.*in step"):
        Stepper(Leaving([used], lr=0.1)).zero()


def run_from(net: nn.Module, config: TrainConfig, sink: Keeper) -> nn.Module:
    (point,) = sink.points.values()
    run(net, config, make_data([23]), resume=point)
    return net


def test_rounds_evaluate_what_is_to_be_evaluated() -> None:
    config = config_of(ScheduleFree)
    shards = make_data([23])
    plan = plan_for(shards, config, world_size=1)
    replica = RoundReplica(make_net(), config, plan, torch.device("cpu"))
    part = RoundPart(epoch=0, step_in_epoch=0, step=0, num_steps=5)
    rows = MappedRows(shards[0], plan)
    state = replica.train({"model": make_net().state_dict()}, 0, rows, part, NullObserver()).state
    expected = plain_loop(but(config, epochs=1), [23])
    found = torch.cat([value.flatten() for value in state["model"].values()])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


class Nested(LRScheduler):
    """A schedule that has another one inside, and takes turns with it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inner = ExponentialLR(optimizer, 0.5)
        self.parts = [ExponentialLR(optimizer, 0.9)]
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, epoch: Any = None) -> None:
        super().step()
        if self.last_epoch > 0:
            (self.inner if self.last_epoch % 2 else self.parts[0]).step()


class Remembering(torch.optim.SGD):
    """Keeps its last gradients in a deque, and other things."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    own = self.state[p]
                    own.setdefault("last", deque(maxlen=2)).append(p.grad.norm().item())
                    own["kind"] = "remembered"
                    own["seen"] = {*own.get("seen", ()), len(own["last"])}


class Holding(torch.optim.SGD):
    """Has something in its state that nobody can store."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["lock"] = object()


def remembering(parameters: Any) -> torch.optim.Optimizer:
    return Remembering(parameters, lr=0.1, momentum=0.9)


def test_states_of_any_kind_come_back() -> None:
    config, sink = config_of(remembering, scheduler=Nested), Keeper(steps=(4,))
    whole, resumed = make_net(), make_net()
    run(whole, config, make_data([23]), sink=sink)
    for name in ("shared", "rank_state"):
        point = sink.points[4]
        tree = decode(b"".join(encode(snapshot(getattr(point, name)))), name)
        object.__setattr__(point, name, tree)
    kept = sink.points[4].shared["optimizer"]["state"][0]
    assert kept["last"].maxlen == 2 and len(kept["last"]) == 2
    assert kept["kind"] == "remembered" and kept["seen"] == {1, 2}
    assert_equal_bits(weights(whole), weights(run_from(resumed, config, sink)))


def test_objects_inside_stay_those_that_they_are() -> None:
    made = [torch.optim.SGD(make_net().parameters(), lr=1.0) for _ in range(2)]
    first, second = (Nested(optimizer) for optimizer in made)
    made[0].step()
    first.step()
    inner = second.inner
    give_state(second, copy.deepcopy(plain_state(first)))
    assert second.inner is inner and inner.last_epoch == first.inner.last_epoch
    assert second.optimizer is made[1]


def check(optimizer: Callable[[Any], torch.optim.Optimizer], **changes: Any) -> None:
    check_steps(optimizer(make_net().parameters()), None, config_of(optimizer, **changes))


def test_what_cannot_be_is_refused_before_any_job() -> None:
    for optimizer in (*CLOSURES, ScheduleFree, remembering):
        check(optimizer)
    with pytest.raises(ConfigError, match=r"no checkpoint can hold: .*lock"):
        check(lambda parameters: Holding(parameters, lr=0.1))
    for strategy in (AsyncSGD(), AllReduce(double_buffering=True)):
        with pytest.raises(ConfigError, match=r"wants a closure.*AllReduce\(\)"):
            check(sam, sync_strategy=strategy)
    with pytest.raises(ConfigError, match=r"zero_grad\(\) of the optimizer Leaving leaves"):
        check(lambda parameters: Leaving(parameters, lr=0.1))
    with pytest.raises(ConfigError, match="leave out precision='fp16'"):
        check(lbfgs, precision="fp16")
    with pytest.raises(ConfigError, match=r"train\(\) and eval\(\)"):
        check(ScheduleFree, sync_strategy=AsyncSGD())

    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise KeyError("what")

    with pytest.raises(ConfigError, match="Failing fails in its first step: KeyError"):
        check(lambda parameters: Failing(parameters, lr=0.1))


def one_cycle(total_steps: int, optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=total_steps)


def nested(total_steps: int, optimizer: torch.optim.Optimizer) -> Any:
    parts = [torch.optim.lr_scheduler.ConstantLR(optimizer), one_cycle(total_steps - 4, optimizer)]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[4])


def table(total_steps: int, optimizer: torch.optim.Optimizer) -> Any:
    rates = [1.0] * (total_steps + 1)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rates[step])


@pytest.mark.parametrize(
    ("make", "num_steps"), [(one_cycle, 20), (nested, 20), (table, 20), (one_cycle, 60_000)]
)
def test_a_schedule_lasts_for_all_steps(
    make: Any, num_steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = TrainConfig()

    def check(total_steps: int, config: TrainConfig = config) -> None:
        def made() -> Schedule:
            optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
            return Schedule(make(total_steps, optimizer))

        check_length(made(), num_steps, config, made)

    check(num_steps)
    with pytest.raises(ConfigError, match=f"within the {num_steps} steps.*total_steps"):
        check(num_steps - 1)
    check(num_steps - 1, but(config, early_stopping=EarlyStopping(monitor="loss")))
    assert "unless training is stopped before" in caplog.text


def test_a_schedule_may_read_what_a_step_leaves() -> None:
    """As in a loop, in which the optimizer steps first."""

    def made(*, is_stepped: bool) -> Schedule:
        parameter = nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.Adam([parameter], lr=0.1)

        def factor(step: int) -> float:
            return 1.0 if step == 0 else float(optimizer.state[parameter]["step"])

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        if is_stepped:
            step_once(optimizer)
        return Schedule(schedule)

    check_length(made(is_stepped=False), 5, TrainConfig(), partial(made, is_stepped=True))
    with pytest.raises(ConfigError, match=r"fails within the 5 steps.*KeyError: 'step'"):
        check_length(made(is_stepped=False), 5, TrainConfig(), partial(made, is_stepped=False))
