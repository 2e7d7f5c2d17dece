"""A task's part for a member of a population, without Spark."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torchmetrics

from sparkdl.config import TrainConfig
from sparkdl.data.plan import TrainPlan
from sparkdl.sync.population.tournament import Tournament
from sparkdl.worker import population_member, round_task
from sparkdl.worker.kept import KEPT
from sparkdl.worker.population_member import (
    MODEL,
    OPTIONS,
    REST,
    RIVAL_MODEL,
    RIVAL_REST,
    decoded,
    encoded,
    pack_parts,
    unpack_parts,
)
from tests.worker import test_training
from tests.worker.test_round_task import PART, Net, order, place

plan = test_training.plan
CONFIG = dataclasses.replace(test_training.CONFIG, epochs=1, sync_strategy=Tournament())


@pytest.fixture(autouse=True)
def cold() -> Iterator[None]:
    KEPT.release()
    yield
    KEPT.release()


def model(seed: int, scale: float = 1.0) -> bytes:
    torch.manual_seed(seed)
    state = Net().state_dict()
    return encoded({"model": {name: scale * value for name, value in state.items()}})


def parts(may_diverge: bool = False, **values: float) -> dict[str, bytes]:
    options = {"hyperparameters": values, "rival": {}, "may_diverge": may_diverge}
    return {MODEL: model(3), REST: b"", OPTIONS: json.dumps(options).encode()}


def work(
    plan: TrainPlan,
    state: Mapping[str, bytes],
    config: TrainConfig = CONFIG,
    module: torch.nn.Module | None = None,
    **changes: Any,
) -> dict[str, bytes]:
    module = module or Net()
    wanted = order(
        plan, module, config, **{"work": population_member.work, "part": PART, **changes}
    )
    return dict(round_task.run(place(plan), wanted, pack_parts(state)))


def losses(plan: TrainPlan, *models: bytes) -> list[float]:
    state = {str(number): data for number, data in enumerate(models)}
    report = json.loads(work(plan, state, part=None)["result"])
    return [report[name]["loss_sum"] / report[name]["weight"] for name in state]


@pytest.mark.parametrize("given", [{}, {"a": b""}, {"a b": b"\n{}", "b": b"", "c": bytes(99)}])
def test_parts_come_back(given: dict[str, bytes]) -> None:
    assert unpack_parts(pack_parts(given)) == given


def test_a_member_goes_on_from_its_own_state(plan: TrainPlan) -> None:
    found = work(plan, parts())
    assert found.keys() == {"result", MODEL, REST}
    report = json.loads(found["result"])
    assert report["rows"] == report["weight"] > 0
    assert report["learning_rate"] == CONFIG.learning_rate
    again = work(plan, {**parts(), **{name: found[name] for name in (MODEL, REST)}})
    assert decoded(again[REST])["optimizer"]["state"][0]["step"] == 4
    twice = work(plan, parts())
    assert (twice[MODEL], twice[REST]) == (found[MODEL], found[REST])


def test_it_trains_with_its_own_hyperparameters(plan: TrainPlan) -> None:
    plain, mine = work(plan, parts()), work(plan, parts(learning_rate=0.2, eps=1e-3))
    assert mine[MODEL] != plain[MODEL]
    assert json.loads(mine["result"])["learning_rate"] == 0.2
    group = decoded(mine[REST])["optimizer"]["param_groups"][0]
    assert (group["lr"], group["eps"]) == (0.2, 1e-3)
    same = work(plan, parts(learning_rate=CONFIG.learning_rate or 0.0))
    assert same[MODEL] == plain[MODEL]


class Halving(Net):
    """Halves a weight without gradient whenever it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.share = torch.nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.share.data.mul_(0.5)
        return super().forward(x)


def test_a_member_keeps_the_weights_that_its_forward_changes(plan: TrainPlan) -> None:
    found, shares = parts(), []
    found[MODEL] = encoded({"model": Halving().state_dict()})
    for _ in range(2):
        done = work(plan, found, module=Halving())
        found |= {name: done[name] for name in (MODEL, REST)}
        shares.append(decoded(done[MODEL])["model"]["share"].item())
    assert shares == [0.5**PART.num_steps, 0.5 ** (2 * PART.num_steps)]


@pytest.mark.parametrize("with_rest", [True, False])
def test_the_better_of_two_models_goes_on(plan: TrainPlan, with_rest: bool) -> None:
    trained = work(plan, parts())
    rival = {RIVAL_MODEL: trained[MODEL]} | ({RIVAL_REST: trained[REST]} if with_rest else {})
    bad = model(3, scale=20.0)
    own_loss, rival_loss = losses(plan, bad, trained[MODEL])
    assert rival_loss < own_loss
    found = work(plan, {**parts(), MODEL: bad, **rival})
    assert json.loads(found["result"])["contest"] == {
        "value": own_loss, "rival_value": rival_loss, "is_lost": True
    }  # fmt: skip
    steps = decoded(found[REST])["optimizer"]["state"][0]["step"]
    assert steps == (4 if with_rest else 2)
    alone = {MODEL: trained[MODEL], REST: trained[REST] if with_rest else b""}
    assert found[MODEL] == work(plan, {**parts(), **alone})[MODEL]


def test_hyperparameters_travel_with_the_model_that_wins(plan: TrainPlan) -> None:
    own, rivals = {"learning_rate": 0.2}, {"learning_rate": 0.01}
    options = json.dumps({"hyperparameters": own, "rival": rivals, "may_diverge": False}).encode()
    good, bad = model(3), model(3, scale=20.0)
    for mine, other, rate in ((good, bad, 0.2), (bad, good, 0.01)):
        found = work(plan, {MODEL: mine, REST: b"", OPTIONS: options, RIVAL_MODEL: other})
        assert json.loads(found["result"])["learning_rate"] == rate


def test_any_metric_may_judge(plan: TrainPlan) -> None:
    metrics = {"right": torchmetrics.classification.MulticlassAccuracy(3, average="micro")}
    contests = []
    for mode in ("min", "max"):
        strategy = Tournament(monitor="val_right", mode=mode)  # type: ignore[arg-type]
        config = dataclasses.replace(CONFIG, sync_strategy=strategy, metrics=metrics)
        KEPT.release()  # the process has kept the other configuration
        found = work(plan, {**parts(), RIVAL_MODEL: model(4)}, config)
        contests.append(json.loads(found["result"])["contest"])
    smallest, largest = contests
    assert (
        smallest["value"] == largest["value"] != largest["rival_value"] == smallest["rival_value"]
    )
    assert smallest["is_lost"] is (smallest["rival_value"] < smallest["value"])
    assert largest["is_lost"] is not smallest["is_lost"]


def test_a_worse_rival_changes_nothing(plan: TrainPlan) -> None:
    for bad in (model(3, scale=50.0), model(3, scale=math.nan)):
        found = work(plan, {**parts(), RIVAL_MODEL: bad, RIVAL_REST: b""})
        assert json.loads(found["result"])["contest"]["is_lost"] is False
        assert found[MODEL] == work(plan, parts())[MODEL]


def test_without_rows_to_judge_by_a_member_keeps_its_own(plan: TrainPlan) -> None:
    blind = dataclasses.replace(plan.shards[0], num_validation_rows=0)
    wanted = order(
        dataclasses.replace(plan, shards=(blind,)),
        Net(),
        CONFIG,
        work=population_member.work,
        part=PART,
    )
    state = pack_parts({**parts(), RIVAL_MODEL: model(4), RIVAL_REST: b""})
    found = dict(round_task.run(place(plan, num_validation_rows=0), wanted, state))
    report = json.loads(found["result"])
    assert report["contest"]["is_lost"] is False
    assert math.isnan(report["contest"]["value"])
    assert found[MODEL] == work(plan, parts())[MODEL]


def test_models_are_measured_together(plan: TrainPlan) -> None:
    found = work(plan, {"2": model(3), "11": model(4)}, part=None)
    assert found.keys() == {"result", "metrics 2", "metrics 11"}
    report = json.loads(found["result"])
    assert {entry["weight"] for entry in report.values()} == {plan.num_validation_rows}
    assert report["2"]["loss_sum"] != report["11"]["loss_sum"]


def test_divergence_is_an_error_unless_members_are_replaced(plan: TrainPlan) -> None:
    broken = {MODEL: model(3, scale=math.nan)}
    failure = json.loads(work(plan, {**parts(), **broken})["error"])
    assert failure["type"] == "TrainingDiverged"
    found = work(plan, {**parts(may_diverge=True), **broken})
    assert found.keys() == {"result"}
    report = json.loads(found["result"])
    assert report["diverged"] == failure["message"]
    assert (report["rows"], report["weight"]) == (0, 0.0)


def test_rows_that_are_set_aside_are_measured_on_and_not_trained_on(plan: TrainPlan) -> None:
    shard = dataclasses.replace(plan.shards[0], num_validation_rows=0)
    amended = Tournament(holdout_fraction=0.25).hold_out(dataclasses.replace(plan, shards=(shard,)))
    held = amended.shards[0]
    wanted = order(amended, Net(), CONFIG, work=population_member.work)
    where = place(plan, num_validation_rows=0)
    list(round_task.run(where, wanted, pack_parts(parts())))
    warm = KEPT.value
    train, validation = (warm.open(where.shard, split) for split in ("train", "validation"))
    assert (train.num_rows, validation.num_rows) == (held.num_rows, held.num_validation_rows)
    KEPT.release()
    list(round_task.run(place(plan), order(plan, Net()), encoded({"model": {}})))
    whole = KEPT.value.open(plan.shards[0], "train")
    kept, held_out, all_rows = (rows._shard.columns for rows in (train, validation, whole))
    for name, column in all_rows.items():
        assert torch.equal(torch.cat([kept[name], held_out[name]]), column)
