from __future__ import annotations

import pytest
import torch
from torch import nn

from sparkdl.errors import ConfigError
from sparkdl.sync.frozen_layers import freeze, moving_buffers, still_names, thaw, training_mode


class Averaged(nn.Module):
    """Counts the batches that it has trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.zeros(()))
        self.drop = nn.Dropout()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += 1
        return self.drop(x * self.weight)


def make() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False), nn.Dropout(),
        Averaged(), nn.Linear(4, 2),
    )  # fmt: skip


def trained(module: nn.Module) -> list[str]:
    return [name for name, p in module.named_parameters() if p.requires_grad]


def test_what_patterns_mean_takes_no_part_until_it_is_thawed() -> None:
    module = make()
    module[0].bias.requires_grad_(False)
    names = freeze(module, ("0", "1", "4"))
    assert names == ["0.weight", "1.weight", "1.bias", "4.weight"]
    assert trained(module) == ["5.weight", "5.bias"]
    thaw(module, names)
    assert trained(module) == [n for n, _ in module.named_parameters() if n != "0.bias"]


@pytest.mark.parametrize(
    ("patterns", "held"),
    [
        ((), set()),
        (("0", "1"), {"1"}),
        (("1.weight", "1.bias"), {"1"}),
        (("1.weight",), set()),
        (("*.weight",), {"4"}),
        (("2",), {"2"}),
        (("2.running_*",), set()),
        (("1", "2", "4"), {"1", "2", "4"}),
    ],
)
def test_layers_with_buffers_whose_parameters_are_all_frozen_keep_them(
    patterns: tuple[str, ...], held: set[str]
) -> None:
    module = make()
    freeze(module, patterns)
    training_mode(module, patterns)
    assert {name for name, part in module.named_modules() if not part.training} == held
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module(torch.randn(8, 3))
    changed = {n for n, b in module.named_buffers() if not torch.equal(b, before[n])}
    assert {name.partition(".")[0] for name in changed} == {"1", "2", "4"} - held
    ours = {id(buffer) for buffer in moving_buffers(module)}
    names = {name for name, buffer in module.named_buffers() if id(buffer) in ours}
    assert {name.partition(".")[0] for name in names} == {"1", "2", "4"} - held


def test_a_later_training_without_patterns_holds_nothing() -> None:
    module = make()
    names = freeze(module, ("1",))
    training_mode(module, ("1",))
    thaw(module, names)
    training_mode(module, ())
    assert all(part.training for part in module.modules())
    assert len(moving_buffers(module)) == len(list(module.buffers()))


def test_names_of_what_stays_are_those_of_the_state_dict() -> None:
    module = make()
    freeze(module, ("0", "1"))
    training_mode(module, ("0", "1"))
    assert still_names(module) == {n for n in module.state_dict() if n[0] in "01"}


def test_tied_parameters_are_frozen_by_either_name() -> None:
    module = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4)})
    module["head"].weight = module["embed"].weight
    freeze(module, ("head.weight",))
    assert trained(module) == ["head.bias"]
    assert still_names(module) == {"embed.weight", "head.weight"}


def test_lazy_layers_can_be_frozen_before_they_have_a_shape() -> None:
    module = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))
    freeze(module, ("0",))
    module(torch.zeros(2, 3))
    assert trained(module) == ["1.weight", "1.bias"]


def test_mistakes_are_named_and_change_nothing() -> None:
    module = make()
    with pytest.raises(ConfigError, match=r"no parameter of the module fits '9'"):
        freeze(module, ("0", "9"))
    with pytest.raises(ConfigError, match=r"leave no parameter to train; freeze fewer"):
        freeze(module, ("*",))
    assert len(trained(module)) == len(list(module.parameters()))
