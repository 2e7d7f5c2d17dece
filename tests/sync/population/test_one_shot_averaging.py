"""One-shot averaging is the mean of independent runs, whatever is shown between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from sparkdl.errors import ConfigError
from sparkdl.sync.averaging.mean import merge
from sparkdl.sync.population.one_shot_averaging import OneShotAveraging
from tests.gang import Gang
from tests.sync.apart import SGD, make_net
from tests.train.runs import Keeper, but, make_data, run

pytestmark = pytest.mark.gang

ROWS = [24, 21]
"""Six steps of an epoch, apart as well as together."""
# Not Adam, which makes much of the rounding errors of a bias before BatchNorm.
CONFIG = but(SGD, optimizer_params={"momentum": 0.9}, epochs=3)


def train(
    comm: Any, strategy: OneShotAveraging, checkpoints: Sequence[int] = ()
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    net, shards = make_net(norm=True), make_data(ROWS)
    outcome = run(
        net,
        but(CONFIG, sync_strategy=strategy),
        shards,
        validation=shards,
        comm=comm,
        sink=Keeper(steps=tuple(checkpoints)),
    )
    return net.state_dict(), outcome.history


def apart(shard: int) -> dict[str, torch.Tensor]:
    """What an independent run on one shard ends with."""
    net = make_net(norm=True)
    run(net, CONFIG, [make_data(ROWS)[shard]])
    return net.state_dict()


@pytest.mark.parametrize(("weighting", "weights"), [("examples", ROWS), ("equal", [1, 1])])
def test_it_is_the_mean_of_independent_runs(
    gang: Gang, weighting: Any, weights: list[float]
) -> None:
    """Weights and BatchNorm's statistics, although the mean is shown and kept on the way."""
    expected = merge([apart(0), apart(1)], weights)
    for found, _ in gang.run(train, OneShotAveraging(weighting=weighting), [2, 5, 11]):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


def test_epochs_show_the_mean_as_it_is_then(gang: Gang) -> None:
    found, history = gang.run(train, OneShotAveraging())[0]
    net = make_net(norm=True)
    net.load_state_dict(found)
    net.eval()
    squares = [
        (net(shard.columns["feature x"]).squeeze(1) - shard.columns["label y"]) ** 2
        for shard in make_data(ROWS)
    ]
    assert history[-1]["val_loss"] == pytest.approx(torch.cat(squares).mean().item(), abs=1e-12)
    assert len({record["val_loss"] for record in history}) == 3


def test_wrong_weighting() -> None:
    with pytest.raises(ConfigError, match="weighting must be 'examples' or 'equal'"):
        OneShotAveraging(weighting="rows")  # type: ignore[arg-type]
