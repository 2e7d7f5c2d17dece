from __future__ import annotations

from typing import Any

import pytest
import torch

from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.comm.topology.shared_memory import NoSharedMemory
from sparkdl.config import TrainConfig
from sparkdl.errors import ClusterError, ConfigError
from sparkdl.sync import resolve
from sparkdl.sync.asynchronous import hogwild
from sparkdl.sync.asynchronous.hogwild import Hogwild
from sparkdl.sync.averaging.local_sgd import LocalSGD
from tests.comm.topology.placing import placed
from tests.gang import Gang
from tests.sync.apart import (
    SHARE_BYTES,
    assert_equal_bits,
    bytes_by_pattern,
    make_net,
    train_and_resume,
)
from tests.train.runs import but, make_data, run, seeded, weights

SGD = TrainConfig(optimizer="sgd", learning_rate=0.05, batch_size=4, epochs=3, loss="mse")
MOMENTUM = but(SGD, optimizer_params={"momentum": 0.9, "weight_decay": 0.01})
ADAM = but(SGD, optimizer="adamw", learning_rate=0.01)


def train_on(
    comm: Any, nodes: tuple[int, ...], config: TrainConfig, rows: list[int], weighted: bool = False
) -> tuple[torch.Tensor, int, list[float]]:
    net = make_net()
    with placed(comm, nodes):
        outcome = run(net, config, make_data(rows), comm=comm, weighted=weighted)
    return weights(net), outcome.bytes_sent, [record["loss"] for record in outcome.history]


def decay(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


@pytest.mark.gang
@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("rows", [[16, 16], [23, 9], [0, 9]])
def test_on_nodes_of_one_rank_it_is_local_sgd(gang: Gang, rows: list[int], period: int) -> None:
    config = but(MOMENTUM, scheduler=decay)
    local = LocalSGD(averaging_period=period, warmup_steps=0, optimizer_state="keep")
    mine = gang.run(
        train_on, (0, 1), but(config, sync_strategy=Hogwild(averaging_period=period)), rows, True
    )
    theirs = gang.run(train_on, (0, 1), but(config, sync_strategy=local), rows, True)
    for (found, *_), (expected, *_) in zip(mine, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.gang
@pytest.mark.parametrize("config", [MOMENTUM, ADAM], ids=["momentum", "adamw"])
def test_where_one_rank_has_all_samples_it_is_allreduce(gang: Gang, config: TrainConfig) -> None:
    config = but(config, scheduler=decay, gradient_clip_norm=1.0)
    mine = gang.run(train_on, (0, 0), but(config, sync_strategy=Hogwild()), [0, 13])
    theirs = gang.run(train_on, (0, 0), config, [0, 13])
    for (found, sent, _), (expected, *_) in zip(mine, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        assert sent == 0


@pytest.mark.gang
def test_together_the_ranks_of_a_node_go_as_far_as_synchronous_steps(gang: Gang) -> None:
    """With gradients that do not depend on the weights; a few updates may be overwritten."""
    config = but(SGD, loss=product, divergence_factor=None)
    (mine, start), (theirs, _) = gang.run(train_linear, but(config, sync_strategy=Hogwild()))
    (expected, _), _ = gang.run(train_linear, config)
    assert torch.equal(mine, theirs)
    distance = (expected - start).norm()
    assert (mine - expected).norm() < 0.5 * distance


def product(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.squeeze(1) * target


def train_linear(comm: Any, config: TrainConfig) -> tuple[torch.Tensor, torch.Tensor]:
    net = seeded(lambda: torch.nn.Linear(4, 1).double())
    start = weights(net)
    with placed(comm):
        run(net, config, make_data([40, 25]), comm=comm)
    return weights(net), start


@pytest.mark.slow
@pytest.mark.gang
@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 0, 0, 1), (0, 1, 1, 0)])
def test_nodes_of_several_ranks_agree_in_the_end_and_have_learnt(
    gang4: Gang, nodes: tuple[int, ...]
) -> None:
    config = but(SGD, epochs=4, sync_strategy=Hogwild(averaging_period=3))
    first, *others = gang4.run(train_on, nodes, config, [24, 20, 13, 17])
    assert first[2][-1] < first[2][0]
    for other in others:
        assert torch.equal(other[0], first[0])
        assert other[2] == first[2]


@pytest.mark.gang
def test_weights_are_shared_within_a_round_only(gang: Gang) -> None:
    for seen, kept in gang.run(write_and_read):
        assert seen == [7.0, 7.0]
        assert kept == [7.0, 7.0]


def write_and_read(comm: Any) -> tuple[list[float], list[float]]:
    net = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(3, 2).bfloat16())
    own = [parameter.data_ptr() for parameter in net.parameters()]
    with placed(comm):
        synchronizer = Hogwild().setup(net, lambda p: torch.optim.SGD(p, lr=1), comm)
    comm.barrier()
    weights_of(net, 0).fill_(3 if comm.rank == 0 else 4)
    synchronizer.zero_gradients()
    assert weights_of(net, 0).item() == 3  # the first rank says what the weights are
    comm.barrier()
    assert weights_of(net, 0).data_ptr() % 64 == weights_of(net, 1).data_ptr() % 64 == 0
    if comm.rank == 0:
        for place in range(3):
            weights_of(net, place).fill_(7)
    comm.barrier()
    seen = [weights_of(net, place).flatten()[0].item() for place in (0, 1)]
    synchronizer.after_step(0)
    synchronizer.close_round()
    assert [parameter.data_ptr() for parameter in net.parameters()] == own
    if comm.rank == 0:
        weights_of(net, 0).fill_(9)
    comm.barrier()
    kept = [7.0 if comm.rank == 0 else weights_of(net, 0).item(), weights_of(net, 2)[0].item()]
    synchronizer.close()
    return seen, kept


def weights_of(net: torch.nn.Module, place: int) -> torch.Tensor:
    return list(net.parameters())[place].data


@pytest.mark.gang
def test_after_a_failure_each_rank_has_weights_of_its_own(gang: Gang) -> None:
    for before, after in gang.run(close_within_a_round):
        assert before == after


def close_within_a_round(comm: Any) -> tuple[list[int], list[int]]:
    net = make_net()
    own = [parameter.data_ptr() for parameter in net.parameters()]
    with placed(comm):
        synchronizer = Hogwild().setup(net, lambda p: torch.optim.SGD(p, lr=1), comm)
    synchronizer.zero_gradients()
    comm.barrier()
    synchronizer.close()
    return own, [parameter.data_ptr() for parameter in net.parameters()]


@pytest.mark.gang
def test_resumed_run_has_the_same_bits(gang: Gang) -> None:
    """With gradients of one rank only, so that the course is always the same."""
    config = but(ADAM, sync_strategy=Hogwild(), scheduler=decay)
    for step, whole, resumed in gang.run(on_one_node, config, [0, 17]):
        assert step == 3
        assert_equal_bits(whole, resumed)


@pytest.mark.gang
def test_resumed_run_of_two_nodes_has_the_same_bits(gang: Gang) -> None:
    config = but(ADAM, sync_strategy=Hogwild(averaging_period=2))
    for step, whole, resumed in gang.run(train_and_resume, config, [22, 17], 3):
        assert step == 4
        assert_equal_bits(whole, resumed)


def on_one_node(comm: Any, config: TrainConfig, rows: list[int]) -> Any:
    with placed(comm):
        return train_and_resume(comm, config, rows, 3)


@pytest.mark.gang
@pytest.mark.parametrize("period", [1, 4])
def test_bytes_between_nodes_are_those_of_the_formula(gang: Gang, period: int) -> None:
    strategy = Hogwild(averaging_period=period)
    shapes = [tuple(p.shape) for p in make_net().parameters()]
    expected = bytes_by_pattern(strategy, shapes, 2, more=SHARE_BYTES)
    results = gang.run(train_on, (0, 1), but(SGD, sync_strategy=strategy), [16, 15])
    assert [sent for _, sent, _ in results] == [3 * 4 * expected] * 2


@pytest.mark.gang
def test_without_shared_memory_all_ranks_say_so(gang: Gang) -> None:
    for message in gang.run(fail_to_map):
        assert "rank 1: it does not see" in message
        assert "use another strategy, such as AsyncSGD" in message


def fail_to_map(comm: Any) -> str:
    def refuse(*_: Any) -> None:
        raise NoSharedMemory("rank 1: it does not see the processes of its node")

    patch = pytest.MonkeyPatch()
    with patch.context() as patched, placed(comm):
        patched.setattr(hogwild, "map_together", refuse)
        with pytest.raises(ClusterError) as caught:
            Hogwild().setup(make_net(), lambda p: torch.optim.SGD(p, lr=1), comm)
    return str(caught.value)


@pytest.mark.parametrize("weighted", [True, False])
def test_alone_nothing_changes(weighted: bool) -> None:
    plain, shared = make_net(), make_net()
    run(plain, but(ADAM, sync_strategy=None), make_data([13]), weighted=weighted)
    run(shared, but(ADAM, sync_strategy=Hogwild()), make_data([13]), weighted=weighted)
    assert torch.equal(weights(plain), weights(shared))


def test_it_is_for_cpus() -> None:
    with pytest.raises(ConfigError, match="use device='cpu'"):
        Hogwild().check(but(SGD, device="cuda"), 2)
    Hogwild().check(SGD, 2)
    net = torch.nn.Linear(2, 1, device="meta")
    with pytest.raises(ConfigError, match="the module is on meta"):
        Hogwild().setup(net, lambda weights: torch.optim.SGD(weights, 0.1), LocalCommunicator())


def test_the_name_is_known() -> None:
    assert resolve("Hogwild") == Hogwild()
    assert Hogwild().trains_apart
    assert not Hogwild().deterministic
    assert "share memory" in (Hogwild().why_not_rounds() or "")


@pytest.mark.parametrize("period", [0, "often", True])
def test_wrong_options(period: Any) -> None:
    with pytest.raises(ConfigError, match="averaging_period"):
        Hogwild(averaging_period=period)
