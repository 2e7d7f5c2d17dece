from __future__ import annotations

import torch
from torch import nn

from sparkdl.sync.gradient_buckets import FlatGradients, make_buckets, zeros
from tests.sync.gradients.test_allreduce import make_net


def test_buckets_are_in_reverse_order_and_share_one_buffer() -> None:
    net = make_net()
    buckets = make_buckets(list(net.parameters()), 16, zeros)
    assert [p.numel() for bucket in buckets for p in bucket.parameters] == [1, 2, 2, 8, 4, 12]
    assert [bucket.flat.numel() for bucket in buckets] == [5, 8, 4, 12][: len(buckets)]
    ends = [b.flat.data_ptr() + b.flat.numel() * 4 for b in buckets[:-1]]
    assert ends == [b.flat.data_ptr() for b in buckets[1:]]


def test_dtypes_do_not_mix() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64), nn.Linear(2, 2))
    buckets = make_buckets(list(net.parameters()), 1 << 20, zeros)
    assert sorted(str(bucket.flat.dtype) for bucket in buckets) == [
        "torch.float32",
        "torch.float64",
    ]
    assert sum(bucket.flat.numel() for bucket in buckets) == 18


def test_gradients_stay_views_and_can_be_let_go() -> None:
    net = make_net()
    gradients = FlatGradients(list(net.parameters()), 1 << 20, zeros)
    net(torch.randn(5, 3)).sum().backward()
    (bucket,) = gradients.buckets
    assert bucket.flat.abs().sum() > 0
    net[0].weight.grad = None
    gradients.zero()
    assert net[0].weight.grad is not None
    assert bucket.flat.abs().sum() == 0
    gradients.release()
    assert all(p.grad is None for p in net.parameters())


def test_gradients_that_stand_in_a_views_place_are_taken() -> None:
    net = make_net()
    gradients = FlatGradients(list(net.parameters()), 1 << 20, zeros)
    (bucket,) = gradients.buckets
    views = dict(zip(map(id, bucket.parameters), bucket.gradients, strict=True))
    first, second = list(net.parameters())[:2]
    gradients.used[:] = b"\1" * len(gradients.used)
    for _ in range(2):  # a view that was moved is one again in the next step
        bucket.flat.fill_(7)
        first.grad = torch.full_like(first, 2)
        assert second.grad is not None
        second.grad.data = torch.full_like(second, 3)
        others = list(net.parameters())[2:]
        others[0].grad = None
        gradients.settle()
        assert all(p.grad is views[id(p)] for p in net.parameters())
        assert sum(map(torch.numel, views.values())) == len(bucket.values)
        expected = 2.0 * first.numel() + 3 * second.numel()
        expected += 7 * sum(p.numel() for p in others[1:])
        assert bucket.values.sum() == expected
        assert list(gradients.used) == [1, 1, 0, *[1] * len(others[1:])]
        gradients.zero()
        assert bucket.flat.abs().sum() == 0
        gradients.used[:] = b"\1" * len(gradients.used)
