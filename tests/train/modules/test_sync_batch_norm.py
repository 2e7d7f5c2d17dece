from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.errors import ConfigError
from sparkdl.train.modules.sync_batch_norm import batch_norms, synchronized
from tests.gang import Gang

CHANNELS = 3
Rows = list[int]
"""Rows of each rank, in one step."""

LAYERS: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "1d": (nn.BatchNorm1d, (CHANNELS,)),
    "1d with length": (nn.BatchNorm1d, (CHANNELS, 5)),
    "2d": (nn.BatchNorm2d, (CHANNELS, 4, 2)),
    "3d": (nn.BatchNorm3d, (CHANNELS, 2, 3, 2)),
    "torch's own": (nn.SyncBatchNorm, (CHANNELS, 4)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without affine": {"affine": False},
    "cumulative": {"momentum": None},
    "without running statistics": {"track_running_stats": False},
    "other numbers": {"momentum": 0.3, "eps": 0.1},
}


def make_layer(name: str, options: dict[str, Any]) -> nn.Module:
    layer = LAYERS[name][0](CHANNELS, dtype=torch.float64, **options)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        parameter.data = torch.randn(CHANNELS, generator=generator, dtype=torch.float64)
    return layer


def united(name: str, rows: Rows, step: int) -> torch.Tensor:
    """Values of all ranks, far from zero."""
    generator = torch.Generator().manual_seed(50 + step)
    shape = (sum(rows), *LAYERS[name][1])
    return 3 * torch.randn(shape, generator=generator, dtype=torch.float64) + 7


def slopes(output: torch.Tensor, rows: slice, num_rows: int) -> torch.Tensor:
    """The same gradient of a row's output on whatever rank the row is."""
    generator = torch.Generator().manual_seed(9)
    shape = (num_rows, *output.shape[1:])
    return torch.randn(shape, generator=generator, dtype=torch.float64)[rows]


def use(
    layer: nn.Module, name: str, all_rows: list[Rows], rank: int | None
) -> dict[str, torch.Tensor]:
    """Steps forward and backward on one rank's rows, or on all; what came of it."""
    result: dict[str, torch.Tensor] = {}
    for step, rows in enumerate(all_rows):
        mine = slice(0, sum(rows))
        if rank is not None:
            mine = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
        values = united(name, rows, step)[mine].clone().requires_grad_()
        output = layer(values)
        layer.zero_grad()
        output.backward(slopes(output, mine, sum(rows)))
        assert values.grad is not None
        result |= {f"output {step}": output.detach(), f"slope {step}": values.grad}
        for key, parameter in layer.named_parameters():
            assert parameter.grad is not None
            result[f"{key} {step}"] = parameter.grad.clone()
    return result | {key: value.clone() for key, value in layer.named_buffers()}


def use_on_rank(
    comm: Any, name: str, options: dict[str, Any], all_rows: list[Rows]
) -> dict[str, torch.Tensor]:
    layer = make_layer(name, options)
    with synchronized(layer, comm):
        result = use(layer, name, all_rows, comm.rank)
    for key in result:
        if key.startswith(("weight", "bias")):
            comm.all_reduce(result[key])
    return result


def assert_equals_united(
    results: list[dict[str, torch.Tensor]], name: str, options: dict[str, Any], rows: list[Rows]
) -> None:
    expected = use(make_layer(name, options), name, rows, None)
    for key, value in expected.items():
        found = [result[key] for result in results]
        if key.startswith(("output", "slope")):
            torch.testing.assert_close(torch.cat(found), value, rtol=0, atol=1e-12)
            continue
        for mine in found:
            assert torch.equal(mine, found[0]), key
            torch.testing.assert_close(mine, value, rtol=0, atol=1e-12)
    assert results[0].keys() == expected.keys()


@pytest.mark.gang
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", LAYERS)
def test_two_ranks_equal_the_united_batch(gang: Gang, name: str, options: str) -> None:
    rows = [[5, 2], [1, 1], [0, 4], [3, 0]]
    results = gang.run(use_on_rank, name, OPTIONS[options], rows)
    assert_equals_united(results, name, OPTIONS[options], rows)


@pytest.mark.gang
@pytest.mark.parametrize("name", LAYERS)
def test_three_ranks_equal_the_united_batch(gang3: Gang, name: str) -> None:
    rows = [[4, 1, 2], [0, 3, 0], [2, 0, 7]]
    assert_equals_united(gang3.run(use_on_rank, name, {}, rows), name, {}, rows)


@pytest.mark.gang
def test_without_any_rows_nothing_changes(gang: Gang) -> None:
    rows = [[2, 2], [0, 0]]
    expected = use(make_layer("2d", {}), "2d", rows[:1], None)
    for result in gang.run(use_empty, rows):
        assert result.pop("output 1").shape == (0, CHANNELS, 4, 2)
        for key in ("running_mean", "running_var", "num_batches_tracked"):
            torch.testing.assert_close(result[key], expected[key], rtol=0, atol=1e-12)


def use_empty(comm: Any, all_rows: list[Rows]) -> dict[str, torch.Tensor]:
    layer = make_layer("2d", {})
    with synchronized(layer, comm):
        use(layer, "2d", all_rows[:1], comm.rank)
        empty = layer(united("2d", all_rows[1], 1))
    return {"output 1": empty.detach(), **dict(layer.named_buffers())}


@pytest.mark.gang
def test_one_value_in_all_is_an_error_on_all_ranks(gang: Gang) -> None:
    messages = gang.run(use_one_value)
    assert messages[0] == messages[1]
    assert "all workers together have one; raise batchSize" in messages[0]


def use_one_value(comm: Any) -> str:
    layer = make_layer("1d", {})
    with synchronized(layer, comm), pytest.raises(ConfigError) as caught:
        use(layer, "1d", [[1, 0]], comm.rank)
    return str(caught.value)


@pytest.mark.gang
def test_far_from_zero_nothing_is_cancelled(gang: Gang) -> None:
    layer = nn.BatchNorm1d(1)
    values = 1e4 + torch.linspace(-1, 1, 64).unsqueeze(1)
    output = torch.cat(gang.run(use_far_values))
    torch.testing.assert_close(output, layer(values).detach(), rtol=0, atol=2e-3)
    assert output.std() == pytest.approx(1.0, abs=0.02)


def use_far_values(comm: Any) -> torch.Tensor:
    layer = nn.BatchNorm1d(1)
    values = 1e4 + torch.linspace(-1, 1, 64).unsqueeze(1)
    with synchronized(layer, comm):
        output: torch.Tensor = layer(values.tensor_split([13])[comm.rank])
    return output.detach()


@pytest.mark.gang
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_narrow", [True, False])
def test_narrow_values_give_narrow_results(gang: Gang, dtype: torch.dtype, is_narrow: bool) -> None:
    expected = use(make_layer("2d", {}), "2d", [[5, 2]], None)
    results = gang.run(use_narrow, dtype, is_narrow)
    tolerance = 8 * torch.finfo(dtype).eps
    for key in ("output 0", "slope 0"):
        found = torch.cat([result[key] for result in results])
        assert found.dtype == dtype
        torch.testing.assert_close(
            found.double(), expected[key], rtol=tolerance, atol=4 * tolerance
        )
    assert results[0]["weight 0"].dtype == (dtype if is_narrow else torch.float32)


def use_narrow(comm: Any, dtype: torch.dtype, is_narrow: bool) -> dict[str, torch.Tensor]:
    layer = make_layer("2d", {}).to(dtype if is_narrow else torch.float32)
    mine = slice(0, 5) if comm.rank == 0 else slice(5, 7)
    values = united("2d", [5, 2], 0)[mine].to(dtype).requires_grad_()
    with synchronized(layer, comm):
        output = layer(values)
        output.backward(slopes(output, mine, 7).to(dtype))
    assert values.grad is not None
    return {"output 0": output.detach(), "slope 0": values.grad, "weight 0": layer.weight.grad}


@pytest.mark.gang
def test_frozen_layers_and_inputs_without_gradient(gang: Gang) -> None:
    plain = make_layer("2d", {}).requires_grad_(False)
    expected = plain(united("2d", [5, 2], 0))
    output, bias_slope = zip(*gang.run(use_frozen), strict=True)
    torch.testing.assert_close(torch.cat(output), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(sum(bias_slope), torch.full((CHANNELS,), 56.0).double())


def use_frozen(comm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    layer = make_layer("2d", {}).requires_grad_(False)
    mine = slice(0, 5) if comm.rank == 0 else slice(5, 7)
    values = united("2d", [5, 2], 0)[mine]
    with synchronized(layer, comm):
        output = layer(values)
        assert not output.requires_grad
        layer.bias.requires_grad_()
        layer(values).sum().backward()
    assert layer.weight.grad is None
    return output, layer.bias.grad


@pytest.mark.gang
def test_evaluation_mode_is_plain_and_needs_no_peer(gang: Gang) -> None:
    assert gang.run(evaluate_alone) == [True, True]


def evaluate_alone(comm: Any) -> bool:
    same = []
    for options in OPTIONS.values():
        layer = make_layer("2d", options).eval()
        values = united("2d", [4], 0)
        expected = layer(values)
        with synchronized(layer, comm):
            same += [torch.equal(layer(values), expected) for _ in range(comm.rank + 1)]
    return all(same)


@pytest.mark.gang
def test_copies_and_the_layer_afterwards_are_plain(gang: Gang) -> None:
    assert gang.run(copies) == [[True] * 5] * 2


def copies(comm: Any) -> list[bool]:
    net = nn.Sequential(make_layer("2d", {}))
    names, before = list(net.state_dict()), copy.deepcopy(net)
    values = united("2d", [4], 0)
    with synchronized(net, comm):
        copied = copy.deepcopy(net)
        pickled = pickle.loads(pickle.dumps(net))
        seen = [list(net.state_dict()) == names]
    expected = before(values)
    seen += [torch.equal(one(values), expected) for one in (copied, pickled, net)]
    return [*seen, vars(net[0]).keys() == vars(before[0]).keys()]


@pytest.mark.gang
def test_gradients_may_be_sent_at_other_moments_than_on_the_peers(gang: Gang) -> None:
    assert gang.run(interleave) == [[1.0, 1.0, 1.0, 1.0]] * 2


def interleave(comm: Any) -> list[float]:
    """Rank 0 sends gradients during backward, rank 1 afterwards, as with unused parameters."""
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    gradients = [torch.full((1,), float(comm.rank)) for _ in net]
    pending = []

    def send(parameter: torch.Tensor) -> None:
        pending.append(comm.all_reduce_async(gradients[len(pending)]))

    if comm.rank == 0:
        for layer in net:
            layer.weight.register_post_accumulate_grad_hook(send)
    with synchronized(net, comm):
        net(torch.randn(4 * comm.rank, 3)).sum().backward()
    if comm.rank == 1:
        for layer in net:
            send(layer.weight)
    for message in pending:
        message.wait()
    return [gradient.item() for gradient in gradients]


class Mirror(LocalCommunicator):
    """Two ranks with equal rows, in one process."""

    world_size = 2

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack((tensor, tensor))

    def all_reduce(self, tensor: torch.Tensor) -> None:
        tensor.mul_(2)


ON_CUDA = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_CUDA)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_any_device(device: str, dtype: torch.dtype) -> None:
    values = united("2d", [6], 0).to(device, torch.float32)
    layer, plain = (make_layer("2d", {}).to(device, torch.float32) for _ in range(2))
    both = torch.cat((values, values)).requires_grad_()
    mine = values.to(dtype).requires_grad_()
    expected = plain(both)
    with synchronized(layer, Mirror()):
        output = layer(mine)
    expected.backward(expected.detach() ** 2)
    output.backward((expected.detach()[:6] ** 2).to(dtype))
    tolerance = 50 * torch.finfo(dtype).eps
    for found, wanted in (
        (output, expected[:6]),
        (mine.grad, both.grad[:6]),
        (2 * layer.weight.grad, plain.weight.grad),
        (layer.running_var, plain.running_var),
    ):
        torch.testing.assert_close(found.float(), wanted, rtol=tolerance, atol=10 * tolerance)
    assert output.dtype == mine.grad.dtype == dtype
    assert output.device == values.device


def test_a_gang_of_one_keeps_the_plain_forward() -> None:
    layer = make_layer("2d", {})
    with synchronized(layer, LocalCommunicator()):
        assert "forward" not in vars(layer)


class Own(nn.BatchNorm1d):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return super().forward(values).relu()


def test_what_cannot_be_synchronized_is_refused() -> None:
    patched = nn.BatchNorm1d(3)
    patched.forward = Own.forward.__get__(patched)  # type: ignore[method-assign]
    for layer in (Own(3), patched):
        with pytest.raises(ConfigError, match=r"the layer '1', a \w+ with a forward of its own"):
            batch_norms(nn.Sequential(nn.Linear(3, 3), layer))
    with pytest.raises(ConfigError, match="the module has no BatchNorm layer; unset it"):
        batch_norms(nn.Sequential(nn.Linear(3, 3), nn.InstanceNorm1d(3)))
