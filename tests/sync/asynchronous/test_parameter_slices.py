from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.errors import ConfigError
from sparkdl.sync.asynchronous.parameter_slices import (
    ServedOptimizer,
    SlicedOptimizer,
    check_learning_rates,
    cut,
    group_options,
    server_ranks,
)
from sparkdl.train.optimizers.optimizers import OPTIMIZERS


def test_slices_are_even_and_hold_every_tensor_once() -> None:
    sizes = [7, 1, 30, 12, 12, 0, 5, 30, 3]
    for num_slices in (1, 2, 3, 5):
        slices = cut(sizes, num_slices)
        assert sorted(place for places in slices for place in places) == list(range(len(sizes)))
        loads = [sum(sizes[place] for place in places) for places in slices]
        assert max(loads) <= 4 / 3 * max(sum(sizes) / num_slices, max(sizes))
    assert cut([5, 5], 3) == [[0], [1], []]
    assert cut([], 2) == [[], []]


def test_few_of_many_ranks_serve_and_nodes_share_the_work() -> None:
    for world_size in (1, 2, 16, 64):
        assert server_ranks((0,) * world_size) == list(range(world_size))
    nodes = [0] * 500 + [rank // 10 for rank in range(10, 510)]
    servers = server_ranks(nodes)
    assert servers == sorted(set(servers)) and len(servers) == 64
    on_node = Counter(nodes[rank] for rank in servers)
    assert len(on_node) == 51 and max(on_node.values()) == 2
    assert len(server_ranks(range(1000))) == 64


def make_parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [
        nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 4), (3,), (4, 4))
    ]


def give_gradients(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"sparseadam"}))
def test_slices_step_as_the_whole_optimizer_does(name: str) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        matrices = [p for p in parameters if p.ndim == 2]
        others = [] if name == "muon" else [{"params": [p for p in parameters if p.ndim != 2]}]
        groups = [{"params": matrices, "lr": 0.01}, *others]
        return OPTIMIZERS[name](groups, lr=0.02)  # type: ignore[call-arg, arg-type]

    model = [p for p in make_parameters() if name != "muon" or p.ndim == 2]
    whole = [nn.Parameter(p.detach().clone()) for p in model]
    served = [nn.Parameter(p.detach().clone()) for p in model]
    reference = make(whole)
    places = cut([p.numel() for p in model], 2)
    slices = [SlicedOptimizer(make, model, {i: served[i] for i in mine}) for mine in places]
    for step in range(3):
        give_gradients(whole, step)
        give_gradients(served, step)
        reference.step()
        for one in slices:
            one.step(group_options(reference), 1.0)
        if step == 1:  # as after a resume, with the slices the other way round
            state = {**slices[0].state(), **slices[1].state()}
            places = places[::-1]
            slices = [SlicedOptimizer(make, model, {i: served[i] for i in mine}) for mine in places]
            for one in slices:
                one.load_state(state)
    for mine, expected in zip(served, whole, strict=True):
        assert torch.equal(mine, expected)
    merged = {**slices[0].state(), **slices[1].state()}
    torch.testing.assert_close(merged, reference.state_dict()["state"], rtol=0, atol=0)


def test_a_share_of_the_learning_rate_scales_the_step() -> None:
    (model, *_), (served, *_) = make_parameters(), make_parameters()
    one = SlicedOptimizer(lambda p: torch.optim.SGD(p, lr=0.5), [model], {0: served})
    served.grad = torch.ones_like(served)
    for share in (0.25, 0.5):
        one.step([{"lr": 0.1}], share)
    torch.testing.assert_close(served, model - 0.1 * 0.75)


def test_names_of_parameters_go_with_them() -> None:
    model, served = make_parameters(), make_parameters()

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(zip("abc", parameters, strict=True)), lr=0.1)

    one = SlicedOptimizer(make, model, {0: served[0], 2: served[2]})
    (group,) = one._optimizer.param_groups
    assert group["param_names"] == ["a", "c"]


def test_served_optimizer_keeps_schedules_and_the_whole_state() -> None:
    parameters = make_parameters()
    served = ServedOptimizer(torch.optim.Adam(parameters, lr=torch.tensor(0.5), betas=(0.5, 0.6)))
    schedule = torch.optim.lr_scheduler.ExponentialLR(served, 0.5)
    assert served.take() is None
    served.step()
    schedule.step()
    (noted,) = served.take() or []
    assert (noted["lr"], noted["betas"], noted["amsgrad"]) == (0.5, [0.5, 0.6], False)
    assert "params" not in noted
    assert served.take() is None
    assert float(served.param_groups[0]["lr"]) == 0.25
    reference = torch.optim.Adam(parameters, lr=0.1)
    give_gradients(parameters, 0)
    reference.step()
    served.load_state_dict(reference.state_dict())
    assert served.param_groups[0]["lr"] == 0.1
    assert served.state_dict()["state"].keys() == {0, 1, 2}
    reference.load_state_dict(served.state_dict())


def test_an_optimizer_without_learning_rate_is_refused() -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"speed": 3})

    with pytest.raises(ConfigError, match="Own has no learning rate"):
        check_learning_rates(Own(make_parameters()))
    check_learning_rates(torch.optim.SGD(make_parameters(), lr=1))
