from __future__ import annotations

import pytest
import torch
from torch import nn

from sparkdl.comm.communicator import LocalCommunicator, Pending
from sparkdl.errors import ConfigError
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.sync.gradients.gradient_sums import AllReduceSynchronizer


class Recorder(LocalCommunicator):
    """Two ranks with equal gradients, whose order of messages is written down."""

    world_size = 2

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def all_reduce_async(self, tensor: torch.Tensor) -> Pending:
        self.sizes.append(tensor.numel())
        tensor.mul_(2)
        return super().all_reduce_async(tensor)


def make_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.Linear(2, 1))


def set_up(net: nn.Module, comm: LocalCommunicator, bucket_bytes: int) -> AllReduceSynchronizer:
    strategy = AllReduce(bucket_bytes=bucket_bytes)
    return strategy.setup(net, lambda parameters: torch.optim.SGD(parameters, lr=0.1), comm)


def take_first_step(synchronizer: AllReduceSynchronizer, net: nn.Module, x: torch.Tensor) -> None:
    """In which all is sent at the end."""
    synchronizer.zero_gradients()
    net(x).sum().backward()
    synchronizer.reduce_gradients(torch.ones(2, dtype=torch.float64), 1.0)


def test_messages_have_one_order_with_and_without_backward() -> None:
    net, comm = make_net(), Recorder()
    synchronizer = set_up(net, comm, 16)
    x = torch.randn(5, 3)
    take_first_step(synchronizer, net, x)
    comm.sizes.clear()
    synchronizer.zero_gradients()
    output = net(x).sum()
    synchronizer.start_sums(torch.ones(2, dtype=torch.float64))
    output.backward()
    sent_while_running = len(comm.sizes)
    sums = synchronizer.reduce_gradients(torch.ones(2, dtype=torch.float64), 1.0)[0]
    with_backward = list(comm.sizes)
    comm.sizes.clear()
    synchronizer.zero_gradients()
    synchronizer.reduce_gradients(torch.zeros(2, dtype=torch.float64), 1.0)

    assert sums.tolist() == [2.0, 2.0]
    assert sent_while_running == len(with_backward) > 2
    assert comm.sizes == with_backward


def test_gradients_are_summed_once_after_accumulation() -> None:
    net, comm = make_net(), Recorder()
    plain = make_net()
    plain.load_state_dict(net.state_dict())
    synchronizer = set_up(net, comm, 16)
    x = torch.randn(6, 3)
    for _ in range(2):
        synchronizer.zero_gradients()
        with synchronizer.no_sync():
            net(x[:2]).sum().backward()
        net(x[2:]).sum().backward()
        sums = synchronizer.reduce_gradients(torch.ones(2, dtype=torch.float64), 1.0)[0]
    plain(x).sum().backward()

    assert sums.tolist() == [2.0, 2.0]
    for mine, expected in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, 2 * expected.grad)


def test_views_survive_the_optimizers_own_zero_grad() -> None:
    net, comm, x = make_net(), Recorder(), torch.randn(2, 3)
    net(x).sum().backward()
    expected = net[0].weight.grad.clone()
    synchronizer = set_up(net, comm, 16)
    synchronizer.optimizer.zero_grad(set_to_none=True)
    synchronizer.zero_gradients()
    net(x).sum().backward()
    synchronizer.reduce_gradients(torch.zeros(1, dtype=torch.float64), 1.0)
    torch.testing.assert_close(net[0].weight.grad, 2 * expected)


def test_frozen_parameters_stay_out() -> None:
    net, comm = make_net(), Recorder()
    net[0].requires_grad_(False)
    synchronizer = set_up(net, comm, 1 << 20)
    net(torch.randn(2, 3)).sum().backward()
    assert net[0].weight.grad is None
    assert sum(p.numel() for p in synchronizer.optimizer.param_groups[0]["params"]) == 13


def test_second_arrival_in_one_backward_is_an_error() -> None:
    net, comm = nn.Linear(2, 1), Recorder()
    synchronizer, x = set_up(net, comm, 1), torch.ones(1, 2)
    take_first_step(synchronizer, net, x)
    synchronizer.zero_gradients()
    net(x).sum().backward()
    with pytest.raises(RuntimeError, match="twice in one backward pass, which it did not in the"):
        net(x).sum().backward()


def test_gradients_that_a_callback_computes_are_no_steps() -> None:
    net, comm = make_net(), Recorder()
    synchronizer, x = set_up(net, comm, 16), torch.randn(5, 3)
    for _ in range(2):
        take_first_step(synchronizer, net, x)
        sent = len(comm.sizes)
        net.zero_grad()
        for _ in range(2):
            net(x).sum().backward()
        assert len(comm.sizes) == sent
        expected = torch.autograd.grad(net(x).sum(), net[0].weight)[0]
        torch.testing.assert_close(net[0].weight.grad, 2 * expected)


def test_one_rank_sends_nothing_and_close_lets_go() -> None:
    net = make_net()
    synchronizer = set_up(net, LocalCommunicator(), 16)
    synchronizer.zero_gradients()
    net(torch.randn(2, 3)).sum().backward()
    sums, divisor, ranks = synchronizer.reduce_gradients(torch.tensor([3.0]), 7.0)
    assert (sums.tolist(), divisor, ranks) == ([3.0], 7.0, None)
    assert synchronizer.after_step(0) is True
    synchronizer.close_round()
    synchronizer.close()
    assert all(p.grad is None for p in net.parameters())


def test_wrong_option() -> None:
    with pytest.raises(ConfigError, match="bucket_bytes"):
        AllReduce(bucket_bytes=0)
