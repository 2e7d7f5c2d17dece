"""Modules as other people write them train as in a plain loop over the same batches.

They leave parameters out of some steps, freeze and unfreeze, keep state in buffers of any kind,
follow themselves with a teacher, and have a state dict of their own.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.comm.compression.topk import TopKCompression
from sparkdl.config import TrainConfig
from sparkdl.data.batches import Batches
from sparkdl.data.plan import RoundPart
from sparkdl.data.spool.mapped import MappedRows
from sparkdl.errors import ConfigError
from sparkdl.inference.classification import CLASSIFICATION
from sparkdl.inference.regression import REGRESSION
from sparkdl.serialization.travel.attributes import Attributes
from sparkdl.serialization.travel.packed_module import travelled
from sparkdl.sync.asynchronous.async_sgd import AsyncSGD
from sparkdl.sync.averaging.diloco import DiLoCo
from sparkdl.sync.averaging.local_sgd import LocalSGD
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.sync.module_tensors import tensors_of
from sparkdl.train.callbacks import Callback, CallbackState, NullObserver
from sparkdl.train.optimizers.large_batch import LAMB
from sparkdl.train.round_replica import RoundReplica
from tests.gang import Gang
from tests.sync.apart import assert_equal_bits, on_nodes
from tests.train.runs import NUM_FEATURES, Keeper, but, make_data, plan_for, run, seeded

CONFIG = TrainConfig(epochs=3, batch_size=5, loss="mse", seed=4)
ROWS = [23, 14]


class Net(nn.Module):
    """Two heads, of which `uses` says which a step uses; the base of all modules here."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(NUM_FEATURES, 5)
        self.head = nn.Linear(5, 1)
        self.spare = nn.Linear(5, 1)
        self.steps = 0

    def uses(self, x: torch.Tensor) -> bool:
        return False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += self.training
        is_used, x = self.uses(x), self.body(x).tanh()
        return self.head(x) + (self.spare(x) if is_used else 0)


class InSomeSteps(Net):
    def uses(self, x: torch.Tensor) -> bool:
        return self.steps % 3 == 1


class OnSomeRanks(Net):
    def uses(self, x: torch.Tensor) -> bool:
        return bool(x.sum() > 0)


class Gated(Net):
    """A hundred small parameters, of which a batch uses those that its numbers choose."""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList([torch.ones(1) for _ in range(100)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = int(x.abs().sum() * 1000) % 100
        return super().forward(x) * self.many[first]


class LaidOut(Net):
    """A weight that lies in memory column by column, as transposed ones and channels last do.

    Fused optimizers go through weight and gradient in the order of memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body.weight = nn.Parameter(self.body.weight.detach().t().contiguous().t())


UNUSED: dict[str, Callable[[], nn.Module]] = {
    "always": Net, "some steps": InSomeSteps, "some ranks": OnSomeRanks, "many": Gated,
    "laid out": LaidOut,
}  # fmt: skip
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 0.03}),
    "adamw": (torch.optim.AdamW, {"lr": 0.03, "weight_decay": 0.3}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "weight_decay": 0.1}),
    "lamb": (LAMB, {"lr": 0.03, "weight_decay": 0.1}),
}


def config_of(optimizer: str, **changes: Any) -> TrainConfig:
    options = OPTIMIZERS[optimizer][1]
    params = {key: value for key, value in options.items() if key != "lr"}
    return but(
        CONFIG, optimizer=optimizer, learning_rate=options["lr"], optimizer_params=params, **changes
    )


def made(make: Callable[[], nn.Module]) -> nn.Module:
    return seeded(lambda: make().double())


def plain_loop(
    net: nn.Module,
    config: TrainConfig,
    rows: list[int],
    *,
    world_size: int,
    after_epoch: Callable[[nn.Module, int], None] | None = None,
    is_one_pass: bool = False,
) -> dict[str, Any]:
    """A user's own loop: each part of the global batch forward and backward, then one step."""
    shards = make_data(rows)
    plan = plan_for(shards, config, world_size=world_size)
    kind, options = OPTIMIZERS[str(config.optimizer)]
    optimizer = kind(net.parameters(), **options)
    net.train()
    for epoch in range(config.epochs):
        batches = [
            Batches(
                [MappedRows(shards[shard.shard_id], plan) for shard in plan.shards_of(rank)],
                plan, rank, seed=config.seed, epoch=epoch,
            )
            for rank in range(world_size)
        ]  # fmt: skip
        for parts in zip(*batches, strict=True):
            optimizer.zero_grad()
            total = sum(part.num_rows for part in parts)
            pairs = [(part.inputs[0], part.target) for part in parts if part.num_rows]
            if is_one_pass:
                pairs = [tuple(map(torch.cat, zip(*pairs, strict=True)))]
            for x, y in pairs:
                loss = (net(x).squeeze(1) - y).square().sum() / total
                loss.backward()
            if config.gradient_clip_norm is not None:
                nn.utils.clip_grad_norm_(net.parameters(), config.gradient_clip_norm)
            optimizer.step()
        if after_epoch is not None:
            after_epoch(net, epoch + 1)
    return tensors_of(net)


def assert_alike(found: dict[str, Any], expected: dict[str, Any], atol: float = 1e-12) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[name], value, rtol=0, atol=atol, msg=name)
        else:
            assert found[name] == value, name


def train_on_rank(
    comm: Any, make: Callable[[], nn.Module], config: TrainConfig, rows: list[int]
) -> dict[str, Any]:
    net = made(make)
    if getattr(config.sync_strategy, "topology", None) == "shared":
        comm = on_nodes(comm, (0, 0))
    run(net, config, make_data(rows), comm=comm)
    return copy.deepcopy(tensors_of(net))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", ["always", "some steps", "many"])
def test_alone_what_a_step_does_not_use_has_no_gradient(case: str, optimizer: str) -> None:
    config, net = config_of(optimizer), made(UNUSED[case])
    expected = plain_loop(made(UNUSED[case]), config, [23], world_size=1)
    run(net, config, make_data([23]))
    assert_alike(tensors_of(net), expected)
    averaged, alone = made(UNUSED[case]), but(config, sync_strategy=ParameterAveraging())
    run(averaged, alone, make_data([23]))
    assert_alike(tensors_of(averaged), expected)


STRATEGIES: dict[str, tuple[dict[str, Any], float]] = {
    "auto": ({"sync_strategy": AllReduce()}, 1e-12),
    "small buckets": ({"sync_strategy": AllReduce(bucket_bytes=16)}, 1e-12),
    "ring": ({"sync_strategy": AllReduce(topology="ring")}, 1e-12),
    "tree": ({"sync_strategy": AllReduce(topology="tree")}, 1e-12),
    "hierarchical": ({"sync_strategy": AllReduce(topology="hierarchical")}, 1e-12),
    "shared": ({"sync_strategy": AllReduce(topology="shared")}, 1e-12),
    "bits": ({"sync_strategy": AllReduce(), "elasticity": "bits"}, 1e-12),
    "fp16": ({"sync_strategy": AllReduce(compression="fp16")}, 2e-2),
    "bulk server": ({"sync_strategy": AsyncSGD(staleness_bound=0)}, 1e-12),
    "clipped": ({"sync_strategy": AllReduce(), "gradient_clip_norm": 0.5}, 1e-12),
}


@pytest.mark.parametrize("case", UNUSED)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_in_a_gang_it_has_none_either(gang: Gang, strategy: str, case: str) -> None:
    options, atol = STRATEGIES[strategy]
    config = config_of("adamw", **options)
    if strategy == "bulk server":  # clipping and means of its own are of each rank's batch
        config = config_of("sgd", **options)
    if case == "some steps" and strategy == "bits":
        pytest.skip("a rank counts the passes of all its shards")
    net = made(UNUSED[case])
    expected = plain_loop(net, config, ROWS, world_size=2)
    if case == "some steps":  # each rank counts its own steps
        per_rank = made(PerRank)
        expected = plain_loop(per_rank, config, ROWS, world_size=2)
    for found in gang.run(train_on_rank, UNUSED[case], config, ROWS):
        assert_alike(found, expected, atol)


class Reentrant(Net):
    """Computes again in the backward pass, within which gradients come by parts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x).requires_grad_()
        for _ in range(2):
            x = checkpoint(lambda x: x + self.head(x.tanh()), x, use_reentrant=True)
        return self.head(x) + self.spare(x)


@pytest.mark.parametrize("strategy", ["auto", "small buckets", "shared", "clipped"])
def test_gradients_that_come_by_parts_are_whole(gang: Gang, strategy: str) -> None:
    config = config_of("adamw", **STRATEGIES[strategy][0])
    expected = plain_loop(made(Reentrant), config, ROWS, world_size=2)
    for found in gang.run(train_on_rank, Reentrant, config, ROWS):
        assert_alike(found, expected, 1e-12)


class PerRank(InSomeSteps):
    """As `InSomeSteps` on two ranks, each of which counts its own."""

    def uses(self, x: torch.Tensor) -> bool:
        return (self.steps + 1) // 2 % 3 == 1


@pytest.mark.parametrize("case", ["some ranks", "laid out"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_leaves_it_alone(gang: Gang, optimizer: str, case: str) -> None:
    config = config_of(optimizer, sync_strategy=AllReduce())
    expected = plain_loop(made(UNUSED[case]), config, ROWS, world_size=2)
    for found in gang.run(train_on_rank, UNUSED[case], config, ROWS):
        assert_alike(found, expected)


@pytest.mark.parametrize(
    "strategy",
    [
        ParameterAveraging(averaging_period=2),
        ParameterAveraging(averaging_period=2, compression="fp16"),
        LocalSGD(averaging_period=2, optimizer_state="average"),
        DiLoCo(averaging_period=2),
        AllReduce(double_buffering=True),
        AllReduce(compression="powersgd"),
        AsyncSGD(),
    ],
    ids=lambda strategy: type(strategy).__name__,
)
def test_replicas_agree_whatever_each_has_used(gang: Gang, strategy: Any) -> None:
    """Weight decay moves nothing that nobody has used."""
    config = config_of("adamw", sync_strategy=strategy)
    for make in (Net, OnSomeRanks):
        first, second = gang.run(train_on_rank, make, config, ROWS)
        assert_equal_bits(first, second)
        spare = made(make).get_parameter("spare.weight")
        assert torch.equal(first["spare.weight"], spare) == (make is Net)


class UsesOnce(Net):
    """Uses a layer in the first step alone."""

    def uses(self, x: torch.Tensor) -> bool:
        return self.steps == 1


@pytest.mark.parametrize(
    "compression", [TopKCompression(density=0.2, momentum=0.0), "powersgd", "int8"], ids=str
)
def test_what_a_compression_has_kept_arrives(gang: Gang, compression: Any) -> None:
    """Also in steps in which nobody uses the parameter."""
    config = but(config_of("sgd"), optimizer_params={})
    expected = moved_by_one_step(UsesOnce, but(config, sync_strategy=AllReduce()), gang)
    found = moved_by_one_step(
        UsesOnce, but(config, sync_strategy=AllReduce(compression=compression)), gang
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def moved_by_one_step(make: Callable[[], nn.Module], config: TrainConfig, gang: Gang) -> Any:
    """How far the layer has moved that one step has used."""
    first, _ = gang.run(train_on_rank, make, but(config, epochs=6), ROWS)
    return first["spare.weight"] - made(make).get_parameter("spare.weight")


class SetByRows(Net):
    """Sets a weight by the first rows that it gets, as ActNorm does, and each rank has others."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(NUM_FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.steps == 0:
            self.scale.data.copy_(1 / (x.std(0) + 1e-3))
        return super().forward(x * self.scale)


def told_on_rank(comm: Any, make: Callable[[], nn.Module], config: TrainConfig) -> list[str]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("sparkdl.train.rank_epoch")
    logger.addHandler(handler)
    try:
        run(made(make), config, make_data(ROWS), comm=comm)
    finally:
        logger.removeHandler(handler)
    return told


def test_weights_that_come_apart_are_told_once(gang: Gang) -> None:
    """The driver tells it first, unless it cannot try the module."""
    config = config_of("sgd", sync_strategy=AllReduce())
    first, second = gang.run(told_on_rank, SetByRows, config)
    assert len(first) == 1 and not second
    assert "the parameter 'scale' was another on each worker" in first[0]
    assert gang.run(told_on_rank, OnSomeRanks, config) == [[], []]


class Freezing(Callback):
    """Sets ``requires_grad`` of a layer at the ends of epochs."""

    def __init__(self, plan: dict[int, tuple[str, bool]]) -> None:
        self.plan = plan

    def on_epoch_end(self, state: CallbackState, record: Any) -> None:
        self.act(state.model, int(record["epoch"]))

    def act(self, model: nn.Module, epoch: int) -> None:
        if epoch in self.plan:
            name, flag = self.plan[epoch]
            model.get_submodule(name).requires_grad_(flag)


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body.requires_grad_(False)


THAW = {1: ("body", True), 2: ("head", False), 3: ("head", True), 4: ("body", False)}


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_alone_callbacks_freeze_and_unfreeze(optimizer: str) -> None:
    callback = Freezing(THAW)
    config = config_of(optimizer, epochs=5, callbacks=(callback,))
    expected = plain_loop(made(Frozen), config, [23], world_size=1, after_epoch=callback.act)
    for strategy in (AllReduce(), ParameterAveraging(averaging_period=2)):
        net = made(Frozen)
        run(net, but(config, sync_strategy=strategy), make_data([23]))
        assert_alike(tensors_of(net), expected)


@pytest.mark.parametrize("options", ["auto", "small buckets", "bits", "fp16"])
def test_in_a_gang_callbacks_freeze_and_unfreeze(gang: Gang, options: str) -> None:
    callback, (more, atol) = Freezing(THAW), STRATEGIES[options]
    config = config_of("adam", epochs=5, callbacks=(callback,), **more)
    expected = plain_loop(made(Frozen), config, ROWS, world_size=2, after_epoch=callback.act)
    for found in gang.run(train_on_rank, Frozen, config, ROWS):
        assert_alike(found, expected, atol)


class Changing(Callback):
    """Changes layers at the end of the first epoch, and prunes for good after the second."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def on_epoch_end(self, state: CallbackState, record: Any) -> None:
        self.act(state.model, int(record["epoch"]))

    def act(self, model: Any, epoch: int) -> None:
        if epoch == 1 and self.kind == "pruned":
            prune.l1_unstructured(model.body, "weight", amount=0.4)  # type: ignore[no-untyped-call]
        if epoch == 2 and self.kind == "pruned":
            prune.remove(model.body, "weight")  # type: ignore[no-untyped-call]
        if epoch == 1 and self.kind == "replaced":
            other = nn.Linear(5, 1, bias=False).double()
            with torch.no_grad():
                other.weight.copy_(model.head.weight * 0.5)
            model.head = other
        if epoch == 1 and self.kind == "hooked":
            model.body.register_forward_hook(lambda layer, inputs, output: output * 0.5)
            model.head.weight.register_hook(lambda gradient: gradient * 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pruned", "replaced", "hooked"])
@pytest.mark.parametrize("strategy", [AllReduce(), AllReduce(bucket_bytes=16)])
def test_in_a_gang_callbacks_change_layers(gang: Gang, kind: str, strategy: Any) -> None:
    callback = Changing(kind)
    config = config_of("adam", callbacks=(callback,), sync_strategy=strategy)
    expected = plain_loop(made(Net), config, ROWS, world_size=2, after_epoch=callback.act)
    for found in gang.run(train_on_rank, Net, config, ROWS):
        assert_alike(found, expected)


class Sharing(Net):
    """Uses a layer under two names, and what shows the memory of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.body
        self.double()
        self.row = self.body.weight.detach()[0]
        self.array = self.head.weight.detach().numpy()[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.again(x).tanh() * self.row.sum()
        return self.head(hidden + torch.from_numpy(self.array)) + self.body(x).mean(1, keepdim=True)


def arrived_on_rank(comm: Any, config: TrainConfig, rows: list[int]) -> dict[str, Any]:
    net: Any = travelled(made(Sharing), copies=True)
    run(net, config, make_data(rows), comm=comm)
    assert net.again is net.body
    assert torch.equal(net.row, net.body.weight[0])
    assert torch.equal(torch.from_numpy(net.array), net.head.weight[0])
    return copy.deepcopy(tensors_of(net))


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [AllReduce(), AllReduce(bucket_bytes=16), AllReduce(topology="ring")]
)
def test_in_a_gang_layers_and_memory_are_shared(gang: Gang, strategy: Any) -> None:
    config = config_of("adam", sync_strategy=strategy)
    expected = plain_loop(made(Sharing), config, ROWS, world_size=2)
    for found in gang.run(arrived_on_rank, config, ROWS):
        assert_alike(found, expected)


def test_averaging_with_a_period_of_one_follows_freezing(gang: Gang) -> None:
    callback = Freezing(THAW)
    averaging = ParameterAveraging(averaging_period=1)
    config = config_of("sgd", epochs=5, callbacks=(callback,), sync_strategy=averaging)
    config = but(config, optimizer_params={})
    results = gang.run(train_on_rank, Frozen, config, ROWS)
    summed = gang.run(train_on_rank, Frozen, but(config, sync_strategy=AllReduce()), ROWS)
    for found, expected in zip(results, summed, strict=True):
        assert_alike(found, expected)


def test_a_resumed_run_trains_what_callbacks_have_unfrozen(gang: Gang) -> None:
    config = config_of("adam", epochs=5, callbacks=(Freezing(THAW),), sync_strategy=AllReduce())
    for whole, resumed in gang.run(train_and_resume, Frozen, config, 9):
        assert_equal_bits(whole, resumed)


def train_and_resume(
    comm: Any, make: Callable[[], nn.Module], config: TrainConfig, due: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    sink, net, again = Keeper(steps=(due,)), made(make), made(make)
    run(net, config, make_data(ROWS), comm=comm, sink=sink)
    (point,) = sink.points.values()
    run(again, config, make_data(ROWS), comm=comm, resume=point)
    return copy.deepcopy(tensors_of(net)), copy.deepcopy(tensors_of(again))


def test_who_cannot_follow_freezing_says_so() -> None:
    callback = Freezing(THAW)
    config = config_of("sgd", callbacks=(callback,), sync_strategy=AsyncSGD())
    with pytest.raises(ConfigError, match="use AllReduce or ParameterAveraging"):
        run(made(Frozen), config, make_data([23]))


class Alternating(Net):
    """Trains two of its layers in turns, by requires_grad in forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.body.requires_grad_(self.steps % 2 == 0)
            self.head.requires_grad_(self.steps % 2 == 1)
        return super().forward(x)


@torch.no_grad()
def step_at_once(parameter: torch.Tensor) -> None:
    parameter.sub_(0.05 * parameter.grad)
    parameter.grad = None


class InBackward(Net):
    """Steps its body in the backward pass, as torch's tutorial does to save memory."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.body.parameters():
            parameter.register_post_accumulate_grad_hook(step_at_once)


def test_steps_in_the_backward_pass_are_for_one_worker(gang: Gang) -> None:
    config = config_of("sgd", sync_strategy=AllReduce())
    net = made(InBackward)
    run(net, config, make_data([23]))
    expected = plain_loop(made(InBackward), config, [23], world_size=1)
    assert_alike(tensors_of(net), expected)
    with pytest.raises(AssertionError, match=r"changes the parameter 'body\.weight' itself"):
        gang.run(train_on_rank, InBackward, config, ROWS)


class Clears(Net):
    """Clears its gradients in forward, as many training steps do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.zero_grad()
        return super().forward(x)


class ClearsAfter(Net):
    """Takes a backward pass of its own, for an adversarial example, and clears what that left."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            x = x.clone().requires_grad_(True)
            super().forward(x).square().mean().backward()
            assert x.grad is not None
            x = (x + 0.1 * x.grad.sign()).detach()
            self.zero_grad()
        return super().forward(x)


class Looks(Net):
    """Looks at its gradients, of which a plain loop has none yet."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 if self.body.weight.grad is None else 2)


def replace(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 0.5


def replace_data(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.data = parameter.grad.data * 0.5


class Hooked(Net):
    hook = staticmethod(replace)

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self.hook)


class HookedByData(Hooked):
    hook = staticmethod(replace_data)


@pytest.mark.parametrize("make", [Clears, ClearsAfter, Looks, Hooked, HookedByData])
@pytest.mark.parametrize("strategy", ["auto", "small buckets", "shared", "bits", "bulk server"])
def test_gradients_may_be_replaced_within_a_step(gang: Gang, make: Any, strategy: str) -> None:
    """Else a bucket would travel in which they are not."""
    config = config_of("sgd", **STRATEGIES[strategy][0])
    expected = plain_loop(made(make), config, ROWS, world_size=2, is_one_pass=True)
    for found in gang.run(train_on_rank, make, config, ROWS):
        assert_alike(found, expected)


class Thawing(Frozen):
    """Unfreezes a layer in forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.body.requires_grad_(self.steps > 1)
        return super().forward(x)


def test_forward_may_freeze_and_unfreeze_alone_only(gang: Gang) -> None:
    config = config_of("sgd", sync_strategy=AllReduce())
    net = made(Alternating)
    run(net, config, make_data([23]))
    assert_alike(tensors_of(net), plain_loop(made(Alternating), config, [23], world_size=1))
    with pytest.raises(AssertionError, match=r"forward has unfrozen the parameter 'head\.weight'"):
        gang.run(train_on_rank, Alternating, config, ROWS)


def test_rounds_do_not_forget_what_forward_has_unfrozen() -> None:
    shards, config = make_data([23]), config_of("sgd")
    plan, net = plan_for(shards, config, world_size=1), made(Thawing)
    replica = RoundReplica(net, config, plan, torch.device("cpu"), None, Attributes(net))
    state: dict[str, Any] = {"model": copy.deepcopy(tensors_of(net))}
    with pytest.raises(ConfigError, match="was unfrozen while training runs"):
        for number in range(5):
            part = RoundPart(epoch=0, step_in_epoch=number, step=number, num_steps=1)
            rows = MappedRows(shards[0], plan)
            state = replica.train(state, 0, rows, part, NullObserver()).state


class Teacher(Net):
    """A teacher without gradient follows the body; its outputs are part of the loss."""

    way = "lerp"

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(NUM_FEATURES, 5).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            pairs = zip(self.teacher.parameters(), self.body.parameters(), strict=True)
            with torch.no_grad():
                for mean, own in pairs:
                    if self.way == "lerp":
                        mean.lerp_(own, 0.5)
                    elif self.way == "data":
                        mean.data = mean.data * 0.5 + own.data * 0.5
                    else:
                        mean.data.copy_(mean.data * 0.5 + own.data * 0.5)
        return super().forward(x) + self.teacher(x).sum(1, keepdim=True)


class ByData(Teacher):
    way = "data"


class ByCopy(Teacher):
    way = "copy"


class Clamped(Net):
    """Forward itself changes a parameter that trains."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.body.weight.clamp_(-0.3, 0.3)
        return super().forward(x)


@pytest.mark.parametrize("make", [Teacher, ByData, ByCopy, Clamped])
@pytest.mark.parametrize(
    "strategy", [AllReduce(), ParameterAveraging(averaging_period=3), LocalSGD(averaging_period=3)]
)
def test_what_forward_changes_is_equal_on_all_ranks(gang: Gang, make: Any, strategy: Any) -> None:
    """Ranks without rows in a step run no forward; a plain loop moves the teacher all the same."""
    config = config_of("sgd", sync_strategy=strategy)
    first, second = gang.run(train_on_rank, make, config, [23, 2])
    assert_equal_bits(first, second)
    if make is not Clamped:
        assert not torch.equal(first["teacher.weight"], made(make).get_parameter("teacher.weight"))
        alone = made(make)
        run(alone, config_of("sgd"), make_data([23]))
        assert_alike(tensors_of(alone), plain_loop(made(make), config, [23], world_size=1))


class Buffers(Net):
    """Every kind of buffer, next to a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(NUM_FEATURES)
        self.register_buffer("center", torch.zeros(NUM_FEATURES), persistent=False)
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.register_buffer("seen", None)
        self.register_buffer("scale", torch.tensor([0.5]).expand(NUM_FEATURES))
        self.register_buffer("last", torch.ones(3))
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.center = self.center * 0.5 + x.detach().mean(0) * 0.5
            self.cache = torch.arange(float(len(x)))
            self.seen = torch.full((2,), 1.0) if self.seen is None else self.seen + 1
            self.last = None
            self.register_buffer("late", x.detach().mean(0) * 0 + 1, persistent=False)
        return super().forward(self.norm(x * self.scale))


def test_all_buffers_are_averaged_by_their_names(gang: Gang) -> None:
    """The mean over ranks, at the end of each epoch, of what each rank's own passes have made."""
    config = but(config_of("sgd", sync_strategy=AllReduce()), epochs=1)
    first, second = gang.run(train_on_rank, Buffers, config, [25, 17])
    ranks = [alone(rank, config) for rank in (0, 1)]
    for name in ("norm.running_mean", "norm.running_var", "center"):
        mean = (ranks[0][name] + ranks[1][name]) / 2
        for found in (first, second):
            torch.testing.assert_close(found[name], mean, rtol=0, atol=1e-12)
    assert first["last"] is None and first["seen"].tolist() == [5, 5]
    assert first["late"].tolist() == [1] * NUM_FEATURES
    assert (len(first["cache"]), len(second["cache"])) == (5, 4)
    assert first["scale"].tolist() == [0.5] * NUM_FEATURES
    assert first["phase"].is_complex()


def alone(rank: int, config: TrainConfig) -> dict[str, Any]:
    """What the rank's own rows do to the buffers that no weight is part of."""
    shards = make_data([25, 17])
    plan = plan_for(shards, config, world_size=2)
    net = made(Buffers).train()
    for batch in Batches([MappedRows(shards[rank], plan)], plan, rank, seed=config.seed, epoch=0):
        net(batch.inputs[0])
    return tensors_of(net)


@pytest.mark.parametrize("elasticity", [None, "bits"])
def test_buffers_come_back_from_checkpoints_and_best_weights(gang: Gang, elasticity: Any) -> None:
    options = {} if elasticity is None else {"elasticity": elasticity}
    config = config_of("adam", sync_strategy=AllReduce(), **options)
    for whole, resumed in gang.run(train_and_resume, Buffers, config, 7):
        assert_equal_bits(whole, resumed)


class Attributed(InSomeSteps):
    """Computes with plain attributes, which each rank has of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.center, self.seen = 0.0, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.center = 0.5 * self.center + 0.5 * x.detach().mean(0)
            self.seen.append(len(x))
        return super().forward(x - self.center) / len(self.seen)


def test_attributes_come_back_from_checkpoints(gang: Gang) -> None:
    config = config_of("adam", sync_strategy=AllReduce())
    for whole, resumed in gang.run(train_and_resume, Attributed, config, 7):
        assert_equal_bits(whole, resumed)


class Clipped(nn.Module):
    """Clips gradients in hooks, and notes those that a hook has seen."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(NUM_FEATURES, 5), nn.Linear(5, outputs)
        self.seen: list[torch.Tensor] = []
        self.body.weight.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
        self.head.weight.register_hook(self.seen.append)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x).tanh()
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return self.head(hidden)


CLASS_WEIGHTS = torch.tensor([0.2, 3.0, 1.5], dtype=torch.float64)


def pair(output: torch.Tensor, target: torch.Tensor) -> Any:
    weights = target.abs()
    return (weights * (output.squeeze(1) - target) ** 2).sum(), weights.sum()


WEIGHED: dict[str, tuple[Any, bool, str]] = {
    "weight column": ("mse", True, REGRESSION),
    "class weights": (nn.CrossEntropyLoss(CLASS_WEIGHTS), False, CLASSIFICATION),
    "both": (nn.CrossEntropyLoss(CLASS_WEIGHTS), True, CLASSIFICATION),
    "ignored": (nn.CrossEntropyLoss(ignore_index=1), False, CLASSIFICATION),
    "a pair": (pair, False, REGRESSION),
}


def mean_loss(loss: Any, output: torch.Tensor, target: torch.Tensor, weight: Any) -> Any:
    """The weighted mean, as torch has it where there is no column of weights."""
    if not isinstance(loss, str) and weight is None:
        value = loss(output, target)
        return value if isinstance(value, torch.Tensor) else value[0] / value[1]
    if isinstance(loss, str):
        return (weight * (output.squeeze(1) - target) ** 2).sum() / weight.sum()
    both = weight * CLASS_WEIGHTS[target]
    losses = nn.functional.cross_entropy(output, target, reduction="none")
    return (both * losses).sum() / both.sum()


def hooked_run(comm: Any, kind: str, rows: list[int], **changes: Any) -> dict[str, Any]:
    loss, weighted, task = WEIGHED[kind]
    config = but(config_of("sgd", **changes), loss=loss)
    net = made(lambda: Clipped(3 if task == CLASSIFICATION else 1))
    run(net, config, make_data(rows, task=task), comm=comm, weighted=weighted)
    seen = torch.stack(net.seen) if net.seen else torch.zeros(0)
    return {**copy.deepcopy(tensors_of(net)), "seen": seen}


@pytest.mark.parametrize("strategy", [AllReduce(), ParameterAveraging(averaging_period=2)])
@pytest.mark.parametrize("kind", WEIGHED)
def test_hooks_see_the_gradient_of_the_weighted_mean(kind: str, strategy: Any) -> None:
    loss, weighted, task = WEIGHED[kind]
    config = config_of("sgd")
    net = made(lambda: Clipped(3 if task == CLASSIFICATION else 1))
    shards = make_data([23], task=task)
    plan = plan_for(shards, config, weighted=weighted)
    optimizer = torch.optim.SGD(net.parameters(), **OPTIMIZERS["sgd"][1])
    for epoch in range(config.epochs):
        for part in Batches([MappedRows(shards[0], plan)], plan, 0, seed=config.seed, epoch=epoch):
            optimizer.zero_grad()
            mean_loss(loss, net(part.inputs[0]), part.target, part.weight).backward()
            optimizer.step()
    expected = {**tensors_of(net), "seen": torch.stack(net.seen)}
    found = hooked_run(LocalCommunicator(), kind, [23], sync_strategy=strategy)
    assert_alike(found, expected)


@pytest.mark.parametrize("kind", ["weight column", "class weights"])
def test_hooks_of_several_workers_see_what_adds_up(gang: Gang, kind: str) -> None:
    """The first step's gradient is that of one worker; a worker without rows waits along."""
    loss, weighted, task = WEIGHED[kind]
    hooked = partial(hooked_run, sync_strategy=AllReduce(), epochs=1)
    first, second = gang.run(hooked, kind, [9, 5])
    config, shards = config_of("sgd"), make_data([9, 5], task=task)
    plan = plan_for(shards, config, world_size=2, weighted=weighted)
    parts = [
        next(iter(Batches([MappedRows(shards[i], plan)], plan, i, seed=config.seed, epoch=0)))
        for i in (0, 1)
    ]
    net = made(lambda: Clipped(3 if task == CLASSIFICATION else 1))
    weight = torch.cat([part.weight for part in parts]) if weighted else None
    output = net(torch.cat([part.inputs[0] for part in parts]))
    mean_loss(loss, output, torch.cat([part.target for part in parts]), weight).backward()
    summed = first["seen"][0] + second["seen"][0]
    torch.testing.assert_close(summed, net.seen[0], rtol=0, atol=1e-12)
    with_rows, without = gang.run(hooked, kind, [9, 0])
    assert len(without.pop("seen")) == 0 < len(with_rows.pop("seen"))
    assert_equal_bits(with_rows, without)


class OtherShapes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("lengths", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.lengths = torch.zeros(len(x))
        return super().forward(x)


def fails_on_rank(comm: Any, config: TrainConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        run(made(OtherShapes), config, make_data([25, 17]), comm=comm)
    return str(caught.value)


@pytest.mark.parametrize(
    "strategy", [AllReduce(), AllReduce(topology="ring"), ParameterAveraging(averaging_period=2)]
)
def test_a_persistent_buffer_has_one_shape(gang: Gang, strategy: Any) -> None:
    first, second = gang.run(fails_on_rank, but(CONFIG, sync_strategy=strategy))
    assert first == second
    assert "'lengths'" in first and "persistent=False" in first


class OwnStateDict(Net):
    """Leaves the body out of its state dict, and refuses to be given one."""

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        found = super().state_dict(*arguments, **options)
        return {name: value for name, value in found.items() if "body" not in name}

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        raise AssertionError("nobody has trained this with sparkdl in mind")


def test_a_module_may_have_a_state_dict_of_its_own(gang: Gang) -> None:
    config = config_of("adam", sync_strategy=AllReduce())
    expected = plain_loop(made(OwnStateDict), config, ROWS, world_size=2)
    for whole, resumed in gang.run(train_and_resume, OwnStateDict, config, 6):
        assert_alike(whole, expected)
        assert_equal_bits(whole, resumed)
