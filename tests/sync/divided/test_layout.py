"""Which layers a layout divides, which part of a parameter lies where, and what is refused."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.mesh import Mesh
from sparkdl.sync.divided.dividing import trained_bytes, units
from sparkdl.sync.divided.layout import cut_parameters, divided_layers, spread
from sparkdl.sync.divided_state import DividedState, whole_part
from sparkdl.sync.regions import Region


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.out = nn.Linear(4, 6), nn.Linear(4, 6, bias=False), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.q(x) * self.k(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(4, 3)
        self.tokens = nn.Embedding(4, 3)
        self.padded = nn.Embedding(4, 3, padding_idx=0)


LAYOUT = {"*.q|k": "columns", "*.out": "rows"}


def test_a_pattern_has_alternatives_in_its_parts() -> None:
    assert spread("a.9-11") == ["a.9", "a.10", "a.11"]
    assert spread("a|b.*.c|d") == ["a.*.c", "a.*.d", "b.*.c", "b.*.d"]


def test_layers_are_divided_by_their_names() -> None:
    layers = divided_layers(Mesh(tensor=2, layout=LAYOUT), Net())
    assert layers == {
        f"blocks.{n}.{name}": cut
        for n, (name, cut) in product(
            range(2), (("q", "columns"), ("k", "columns"), ("out", "rows"))
        )
    }
    cuts = cut_parameters({"blocks.0.q": "columns", "blocks.0.k": "columns",
                           "blocks.1.out": "rows"}, Net())  # fmt: skip
    assert cuts == {"blocks.0.q.weight": 0, "blocks.0.q.bias": 0, "blocks.0.k.weight": 0,
                    "blocks.1.out.weight": 1}  # fmt: skip
    whole = {"tokens": "rows", "padded": "gathered", "blocks.0.q": "gathered"}
    cuts = cut_parameters(whole, Net())
    assert cuts == {"tokens.weight": 0, "padded.weight": 1, "blocks.0.q.weight": 0,
                    "blocks.0.q.bias": 0}  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "remedy"),
    [
        ({"blocks.*.v": "columns"}, "no layer fits 'blocks.\\*.v'"),
        ({"haed": "columns"}, "did you mean 'head'"),
        ({"blocks": "columns"}, "ModuleList; only Linear"),
        ({"head": "columns"}, "3 outputs, which 2 workers"),
        ({"head": "gathered"}, "3 outputs, which 2 workers"),
        ({"padded": "rows"}, "Embedding with padding_idx"),
        ({"head": "channels"}, "only a BatchNorm"),
        ({"*.q": "columns", "blocks.0.q": "rows"}, "both '\\*.q' and 'blocks.0.q'"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(layout: dict[str, str], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        divided_layers(Mesh(tensor=2, layout=layout), Net())


class Masked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("mask", torch.ones(4, 4))


def test_only_layers_with_weight_and_bias_alone_are_divided() -> None:
    whole = Mesh(tensor=2, layout={"*": "columns"})
    with pytest.raises(ConfigError, match=r"means the module itself; .* put it into an nn.Seq"):
        divided_layers(whole, nn.Linear(4, 4))
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    for layer in (Masked(), normed, nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))):
        with pytest.raises(ConfigError, match=r"whose parameters and buffers are .*, .*; only"):
            divided_layers(Mesh(tensor=2, layout={"0": "columns"}), nn.Sequential(layer))


@pytest.mark.parametrize(
    ("values", "remedy"),
    [
        ({"data": 0}, "at least 1"),
        ({"shard": True}, "whole number"),
        ({"shard": 2.0}, "whole number"),
        ({"tensor": 2, "layout": {}}, "set both or neither"),
        ({"layout": {"a": "rows"}}, "set both or neither"),
        ({"tensor": 2, "layout": {"a": "columns "}}, "must be one of"),
        ({"tensor": 2, "layout": "rows"}, "must be 'auto', or map patterns"),
        ({"stages": ["a", "b"]}, "those of a pipeline"),
        ({"micro_batches": 4}, "those of a pipeline"),
        ({"pipeline": 2, "stages": "a"}, "a list of patterns"),
        ({"pipeline": 2, "stages": ["a", "b", "c"]}, "give each worker one"),
        ({"pipeline": 2, "micro_batches": 1}, "fewer than the 2 stages"),
        ({"pipeline": 2, "micro_batches": 2.5}, "whole number"),
        ({"pipeline": 2, "schedule": "1f1B"}, "schedule must be one of"),
        ({"pipeline": 2, "schedule": "interleaved", "stages": ["a", "b"]}, "a multiple of 2"),
        ({"pipeline": 2, "schedule": "interleaved", "micro_batches": 5}, "a multiple of pipeline"),
        ({"pipeline": 2, "schedule": "interleaved", "shard": 2}, "cannot share them"),
        ({"pipeline": 2, "data": 2, "shard_optimizer": True}, "the other axes"),
        ({"data": 2, "shard_optimizer": "no"}, "shard_optimizer must be True or False"),
        ({"activation_checkpointing": 1}, "must be True or False"),
        ({"data": 2, "shard": 2, "shard_optimizer": True}, "leave them at 1"),
    ],
)
def test_a_mesh_that_makes_no_sense_is_refused(values: dict[str, object], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        Mesh(**values)  # type: ignore[arg-type]


def test_neighbours_differ_in_tensor_first_and_in_data_last() -> None:
    mesh = Mesh(data=2, shard=3, tensor=2, layout={"a": "rows"})
    assert mesh.size == 12 and mesh.num_readers == 6
    assert [mesh.coordinates(rank) for rank in (0, 1, 2, 5, 6, 11)] == [
        (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0), (0, 0, 2, 1), (1, 0, 0, 0), (1, 0, 2, 1),
    ]  # fmt: skip
    mesh = Mesh(data=2, shard=2, pipeline=2)
    assert [mesh.coordinates(rank)[:3] for rank in (1, 2, 4)] == [(0, 0, 1), (0, 1, 0), (1, 0, 0)]
    assert [mesh.reader(rank) for rank in range(mesh.size)] == [0, 1, 0, 1, 2, 3, 2, 3]
    mesh = Mesh(data=4, shard_optimizer=True)
    assert (mesh.size, mesh.num_readers, mesh.num_replicas) == (4, 4, 1)
    assert mesh.coordinates(3) == (0, 0, 3, 0)


def test_what_a_rank_trains_is_counted_by_the_axes() -> None:
    net = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))  # 28 and 15 numbers
    net[1].bias.requires_grad_(False)
    assert trained_bytes(None, net) == 4 * 40
    assert trained_bytes(Mesh(shard=2), net) == 4 * 20
    both = Mesh(shard=2, tensor=2, layout={"0": "columns"})
    staged = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4))  # 28 and 20 numbers
    assert trained_bytes(Mesh(pipeline=2), staged) == 4 * 28
    staged.insert(1, nn.Tanh())  # a stage may begin with it
    assert trained_bytes(Mesh(pipeline=2, stages=["0", "1-2"]), staged) == 4 * 28
    assert trained_bytes(both, net) == 4 * (7 + 6)


def test_large_layers_of_lists_are_gathered_one_by_one() -> None:
    net = Net()
    net.head.weight = nn.Parameter(net.head.weight.detach())
    assert units(net, 15) == [*net.blocks, net.head]
    assert units(net, 30) == list(net.blocks)
    net.blocks[0].out.weight = net.blocks[1].out.weight  # type: ignore[union-attr]
    assert units(net, 15) == [net.head]


def test_what_only_holds_layers_is_not_gathered_itself() -> None:
    net = nn.Module()
    net.encoder, net.weights = nn.Module(), nn.ParameterList([torch.zeros(40)])
    net.encoder.layers = nn.ModuleList(Attention() for _ in range(2))
    assert units(net, 15) == list(net.encoder.layers)


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_regions_lie_as_torch_cuts(parts: int) -> None:
    values = torch.arange(35).view(7, 5)
    chunks = list(values.chunk(parts)) + [values[:0]] * (parts - len(values.chunk(parts)))
    for number in range(parts):
        region = Region.whole(values.shape).cut(0, parts, number)
        assert torch.equal(region.of(values), chunks[number])


def test_regions_are_put_together_from_others() -> None:
    values = torch.arange(35).view(7, 5)
    theirs = [
        Region.whole(values.shape).cut(1, 2, n).cut(0, 3, m) for n in (0, 1) for m in (0, 1, 2)
    ]
    for number in range(4):
        own = Region.whole(values.shape).cut(0, 4, number)
        target = torch.full(own.size, -1)
        copied = [own.copy_from(other, other.of(values), target) for other in theirs]
        assert torch.equal(target, own.of(values))
        assert sum(copied) == target.numel()


def stepped(net: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return optimizer


def test_a_checkpoint_that_lacks_a_part_is_refused() -> None:
    net = nn.Linear(4, 3)
    optimizer = stepped(net)
    regions = {name: Region.whole(p.shape) for name, p in net.named_parameters()}
    state = DividedState(net, optimizer, regions)
    part = state.part()
    assert part is not None
    half = {**part, "regions": {**part["regions"], "weight": [[0, 0], [2, 4]]}}
    half["parameters"] = {**part["parameters"], "weight": net.weight.detach()[:2]}
    with pytest.raises(CheckpointError, match="weight"):
        state.load([half, half])  # the same part twice is half of it
    with pytest.raises(CheckpointError):
        state.load([])


def test_a_whole_state_is_taken_with_the_best_weights_and_the_optimizer() -> None:
    before, after = nn.Linear(4, 3), nn.Linear(4, 3)
    first, second = stepped(before), torch.optim.Adam(after.parameters(), lr=0.2)
    best = {name: value + 1 for name, value in before.state_dict().items()}
    shared = {"model": before.state_dict(), "best_model": {**best, "seen": torch.ones(1)},
              "optimizer": first.state_dict()}  # fmt: skip
    found = DividedState(after, second).load([whole_part(shared)])
    assert found is not None and found.keys() == {"weight", "bias", "seen"}
    assert torch.equal(found["weight"], best["weight"])
    assert torch.equal(after.weight, before.weight)
    assert second.param_groups[0]["lr"] == 0.1
    for own, other in zip(after.parameters(), before.parameters(), strict=True):
        assert torch.equal(second.state[own]["exp_avg"], first.state[other]["exp_avg"])
        assert second.state[own]["step"] == 1


def test_only_one_replica_is_kept() -> None:
    net = nn.Linear(4, 3)
    assert DividedState(net, stepped(net), is_kept=False).part() is None
