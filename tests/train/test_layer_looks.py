from __future__ import annotations

import base64
import dataclasses
import json
import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sparkdl.comm.channel import _MOST_BYTES
from sparkdl.config import Looks, TrainConfig
from sparkdl.data.batches import Batch
from sparkdl.data.plan import RoundPart
from sparkdl.data.spool.mapped import MappedRows
from sparkdl.errors import ConfigError
from sparkdl.sync.asynchronous.async_sgd import AsyncSGD
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.train import layer_looks
from sparkdl.train.callbacks import NullObserver
from sparkdl.train.layer_looks import LayerLooks
from sparkdl.train.round_replica import RoundReplica
from tests.train.runs import NUM_FEATURES, but, make_data, plan_for, run, seeded, weights

CONFIG = TrainConfig(epochs=3, batch_size=5, learning_rate=0.02)
LOOKS = Looks(every=10, histograms=True, images=4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(NUM_FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(1, 1).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.body(x)
        return result


class Kept(NullObserver):
    def __init__(self) -> None:
        self.found: dict[int, dict[str, Any]] = {}

    def layers(self, step: int, found: Mapping[str, Any]) -> None:
        self.found[step] = json.loads(json.dumps(found))


def data(rows: int = 50) -> Any:
    return make_data([rows], dtype=torch.float32)


def looked(config: TrainConfig = CONFIG, looks: Looks | None = LOOKS) -> tuple[Kept, nn.Module]:
    net, kept = seeded(Net), Kept()
    run(net, config, data(), observer=kept, looks=looks)
    return kept, net


def test_ratios_are_those_of_the_step() -> None:
    """With plain SGD an update is the learning rate times the gradient."""
    before, after = (looked(but(CONFIG, max_steps=n), None)[1] for n in (9, 10))
    kept, _ = looked(but(CONFIG, max_steps=10))
    (found,) = (of["ratios"] for step, of in kept.found.items() if step == 10)
    assert list(found) == ["body.0", "body.2", "unused"]
    for layer in ("body.0", "body.2"):
        old, new = (list(net.get_submodule(layer).parameters()) for net in (before, after))
        moved = sum((b - a).abs().sum().item() for a, b in zip(old, new, strict=True))
        wanted = moved / sum(a.abs().sum().item() for a in old)
        assert found[layer] == pytest.approx(wanted, rel=2e-3)
    assert found["unused"] == 0.0


def test_histograms_are_of_weights_and_gradients_of_what_trains() -> None:
    kept, _ = looked()
    found = kept.found[10]["histograms"]
    names = [f"{x}.{y}" for x in ("body.0", "body.2", "unused") for y in ("weight", "bias")]
    assert set(found) == {f"{x}/{name}" for x in ("weights", "gradients") for name in names}
    assert found["gradients/unused.weight"]["counts"] == [9]  # all are zero
    weight = found["weights/body.0.weight"]
    assert sum(weight["counts"]) == 8 * NUM_FEATURES and len(weight["counts"]) == 40
    assert weight["low"] < 0 < weight["high"]
    assert 0 < weight["sum_squares"] < 8 * NUM_FEATURES
    single = found["weights/body.2.bias"]
    assert single["counts"] == [1] and single["low"] == single["high"]


def test_who_asks_for_nothing_gets_ratios_only() -> None:
    kept, _ = looked(looks=Looks())
    assert {name for found in kept.found.values() for name in found} == {"ratios"}


def test_looks_change_no_bit() -> None:
    config = but(CONFIG, optimizer="adam", seed=5)
    with_looks = looked(config, Looks(every=1, histograms=True, images=8))
    assert torch.equal(weights(with_looks[1]), weights(looked(config, None)[1]))
    assert sorted(with_looks[0].found) == list(range(1, 31))


@pytest.mark.parametrize(
    ("rows", "epochs", "every", "steps"),
    [
        (100, 5, None, [25, 50, 75, 100]),  # 20 steps an epoch
        (500, 30, None, [*range(100, 3001, 100)]),
        (5000, 1, None, [*range(50, 1001, 50)]),  # twenty in a single epoch
        (35, 1, None, [7]),
        (35, 2, 4, [4, 8, 12, 14]),
    ],
)
def test_when_it_looks(rows: int, epochs: int, every: int | None, steps: list[int]) -> None:
    plan = plan_for(data(rows), but(CONFIG, epochs=epochs))
    net, kept = nn.Linear(1, 1), Kept()
    looks = LayerLooks(Looks(every=every), net, plan)
    for step in range(plan.total_steps):
        looks.before_update(step)
        net.weight.data += 1
        looks.after_update()
        looks.after_step(step, kept)
    assert list(kept.found) == steps


@pytest.mark.parametrize("strategy", [AsyncSGD(), ParameterAveraging(averaging_period=4)])
def test_other_strategies_have_ratios_too(strategy: Any) -> None:
    kept, _ = looked(but(CONFIG, sync_strategy=strategy))
    assert all(0 < found["ratios"]["body.0"] < 1 for found in kept.found.values())
    assert len(kept.found) == 3


def test_in_rounds_the_first_shard_is_looked_at() -> None:
    shards = make_data([50, 50], dtype=torch.float32)
    plan, net = plan_for(shards, CONFIG, world_size=2), seeded(Net)
    replica = RoundReplica(net, CONFIG, plan, torch.device("cpu"), Looks(every=10))
    state = {"model": seeded(Net).state_dict()}
    found = []
    for shard in (0, 1):
        kept = Kept()
        part = RoundPart(epoch=0, step_in_epoch=0, step=0, num_steps=10)
        replica.train(state, shard, MappedRows(shards[shard], plan), part, kept)
        found.append(list(kept.found))
    assert found == [[10], []]


def images(*shape: int) -> Batch:
    values = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) / 7 - 3
    return Batch((torch.zeros(shape[0], 2), values), values, None, shape[0], (None, "picture"))


def seen(batch: Batch, module: nn.Module | None = None) -> dict[str, Any]:
    looks = LayerLooks(LOOKS, module or nn.Linear(1, 1), plan_for(data(), CONFIG))
    looks.see(batch)
    kept = Kept()
    looks.before_update(9)
    looks.after_step(9, kept)
    return kept.found[10]


def test_images_of_the_first_batch_are_kept() -> None:
    found = seen(images(6, 3, 16, 8))["images"]
    assert (found["name"], found["shape"]) == ("picture", [4, 3, 16, 8])
    shades = np.frombuffer(zlib.decompress(base64.b64decode(found["data"])), np.uint8)
    assert (shades[0], shades[-1]) == (0, 255) and (np.diff(shades.astype(int)) >= 0).all()


@pytest.mark.parametrize("shape", [(6, 2, 16, 16), (6, 3, 4, 16), (6, 16, 16)])
def test_what_is_no_image_is_left_out(shape: tuple[int, ...]) -> None:
    assert "images" not in seen(images(*shape))


def test_a_large_module_and_large_images_make_a_small_message() -> None:
    module = nn.Sequential(*(nn.Linear(200, 200) for _ in range(300)))
    found = seen(images(6, 3, 512, 300), module)
    assert found["images"]["shape"] == [4, 3, 128, 75]
    assert len(found["histograms"]) == 200
    assert len(json.dumps(found)) < 2**20 < _MOST_BYTES / 100


def test_values_that_are_not_finite_or_nothing_do_no_harm() -> None:
    net = nn.Linear(4, 1)
    net.weight.data[0, 0] = math.nan
    net.bias.data.zero_()
    found = seen(images(1, 1, 8, 8), net)
    assert sum(found["histograms"]["weights/weight"]["counts"]) == 3
    assert found["histograms"]["weights/bias"] == {
        "low": 0.0, "high": 0.0, "counts": [1], "sum": 0.0, "sum_squares": 0.0,
    }  # fmt: skip


def test_what_only_shows_does_not_end_what_trains(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("CUDA out of memory")

    unseen = looked(looks=None)[1]
    monkeypatch.setattr(layer_looks, "_sample", broken)
    kept, net = looked()
    assert kept.found == {} and torch.equal(weights(net), weights(unseen))
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert warning == "reports have no more of the layers: CUDA out of memory"


def test_options_are_joined_and_checked() -> None:
    joined = Looks(every=7) | Looks(images=3) | Looks(every=5, histograms=True)
    assert dataclasses.astuple(joined) == (5, True, 3)
    with pytest.raises(ConfigError, match="at least 1"):
        Looks(every=0)
