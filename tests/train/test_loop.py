from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

from sparkdl.config import EarlyStopping, TrainConfig
from sparkdl.data.spool.mapped import MappedRows
from sparkdl.errors import ConfigError, DataError, StorageError, TrainingDiverged
from sparkdl.inference.classification import CLASSIFICATION
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.sync.gradients.gradient_sums import AllReduceSynchronizer
from sparkdl.train.callbacks import Callback, CallbackState, NullObserver
from sparkdl.train.objective.named_metrics import NamedMetric
from sparkdl.train.rank_state import ResumePoint
from sparkdl.train.time_spent import SPENT_ON
from tests.train.runs import NUM_FEATURES, Keeper, but, make_data, plan_for, run, seeded, weights


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.stack = nn.Sequential(
            nn.Linear(NUM_FEATURES, 8, dtype=dtype),
            nn.BatchNorm1d(8, dtype=dtype),
            nn.Dropout(0.25),
            nn.Linear(8, 1, dtype=dtype),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stack(x)


def make_net() -> nn.Module:
    return seeded(Net)


def data(rows: int = 20) -> Any:
    return make_data([rows], dtype=torch.float32)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


CONFIG = TrainConfig(
    epochs=3, batch_size=5, optimizer="adam", learning_rate=0.02, scheduler=halving, seed=4
)


def shown(history: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in record.items() if k != "seconds"} for record in history]


def test_equals_a_plain_loop() -> None:
    config = TrainConfig(epochs=2, batch_size=7, learning_rate=0.1)
    net = seeded(lambda: nn.Linear(NUM_FEATURES, 1))
    plain = seeded(lambda: nn.Linear(NUM_FEATURES, 1))
    outcome = run(net, config, data())

    from sparkdl.data.batches import Batches

    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for epoch in range(2):
        for batch in Batches(
            [MappedRows(shard, plan_for(data(), config)) for shard in data()],
            plan_for(data(), config),
            0,
            seed=0,
            epoch=epoch,
        ):
            optimizer.zero_grad()
            nn.functional.mse_loss(plain(*batch.inputs).squeeze(1), batch.target).backward()
            optimizer.step()
    torch.testing.assert_close(weights(net), weights(plain), rtol=1e-6, atol=1e-7)
    assert [record["epoch"] for record in outcome.history] == [1, 2]
    assert outcome.history[1]["loss"] < outcome.history[0]["loss"]
    assert (outcome.steps, outcome.rows) == (6, 40)
    assert set(outcome.seconds) == set(SPENT_ON)
    assert all(parameter.grad is None for parameter in net.parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("step", [1, 3, 4, 8, 11])
def test_resume_is_bit_exact_at_every_point(precision: Any, step: int) -> None:
    stopping = EarlyStopping(patience=9)
    config = but(CONFIG, precision=precision, early_stopping=stopping, gradient_clip_norm=1.0)
    sink = Keeper(steps=tuple(range(1, 100)))
    whole, resumed = make_net(), seeded(Net, seed=99)
    validation = make_data([6], dtype=torch.float32)
    expected = run(whole, config, data(), validation=validation, sink=sink)
    got = run(resumed, config, data(), validation=validation, resume=sink.points[step])

    assert sorted(sink.points) == list(range(1, 12))  # never the last step, which is 12
    assert shown(got.history) == shown(expected.history)
    for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert (got.steps, got.rows) == (expected.steps, expected.rows) == (12, 60)
    assert got.final.shared["scaler"] == expected.final.shared["scaler"]
    assert bool(got.final.shared["scaler"]) == (precision == "fp16")


def lower(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    # Never satisfied, so that each evaluation but the first lowers the rate.
    return torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=0, threshold=0.99
    )


@pytest.mark.parametrize("step", [1, 3, 6, 7, 8, 10])
def test_resume_between_evaluations_is_bit_exact(step: int) -> None:
    stopping = EarlyStopping(patience=9)
    config = but(CONFIG, early_stopping=stopping, validation_interval=3, scheduler=lower)
    sink, validation = Keeper(steps=tuple(range(1, 100))), make_data([6], dtype=torch.float32)
    whole, resumed = make_net(), seeded(Net, seed=99)
    expected = run(whole, config, data(), validation=validation, sink=sink)
    got = run(resumed, config, data(), validation=validation, resume=sink.points[step])
    assert shown(got.history) == shown(expected.history)
    for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_evaluations_within_epochs_change_nothing_but_the_history() -> None:
    validation = make_data([6], dtype=torch.float32)
    often, plain, seen = make_net(), make_net(), Evaluations()
    callback = Ends()
    config = but(CONFIG, validation_interval=3, callbacks=(callback,))
    found = run(often, config, data(), validation=validation, observer=seen)
    once = run(plain, CONFIG, data(), validation=validation)
    assert torch.equal(weights(often), weights(plain))
    history = shown(found.history)
    assert [record["epoch"] for record in history] == [0.75, 1, 1.5, 2, 2.25, 3]
    assert [record["steps"] for record in history] == [3, 4, 2, 4, 1, 4]
    assert [record for record in history if record["epoch"] in (1, 2, 3)] == shown(once.history)
    assert shown(seen.records) == history
    assert callback.epochs == [1, 2, 3]  # of whole epochs only
    assert callback.evaluations == [0.75, 1, 1.5, 2, 2.25, 3]


class Evaluations(NullObserver):
    def __init__(self) -> None:
        self.records: list[dict[str, float]] = []

    def epoch(self, record: Mapping[str, float]) -> None:
        self.records.append(dict(record))


class Ends(Callback):
    def __init__(self) -> None:
        self.epochs: list[float] = []
        self.evaluations: list[float] = []

    def on_evaluation_end(self, state: CallbackState, record: Mapping[str, float]) -> None:
        self.evaluations.append(record["epoch"])

    def on_epoch_end(self, state: CallbackState, record: Mapping[str, float]) -> None:
        self.epochs.append(record["epoch"])


def test_the_rate_falls_when_evaluations_get_no_better() -> None:
    validation = make_data([6], dtype=torch.float32)
    config = but(CONFIG, scheduler=lower, validation_interval=2)
    history = run(make_net(), config, data(), validation=validation).history
    rates = [record["learning_rate"] for record in history]
    assert rates == pytest.approx([0.02, *(0.02 * 0.5**k for k in range(len(rates) - 1))])
    alone = run(make_net(), but(CONFIG, scheduler=lower), data()).history  # by the training loss
    assert [record["learning_rate"] for record in alone] == pytest.approx([0.02, 0.02, 0.01])
    wanted = EarlyStopping(monitor="val_loss", mode="max")
    with pytest.raises(ConfigError, match="mode='max'; give it that mode too"):
        run(make_net(), but(config, early_stopping=wanted), data(), validation=validation)
    only_best = EarlyStopping(monitor="val_loss", mode="max", patience=sys.maxsize)  # of a search
    found = run(make_net(), but(config, early_stopping=only_best), data(), validation=validation)
    assert shown(found.history) == shown(history)


def test_a_run_stops_within_an_epoch_with_the_best_weights() -> None:
    validation = make_data([6], dtype=torch.float32)
    stopping = EarlyStopping(patience=1, mode="max")  # the loss falls, which is worse
    ends = Ends()
    config = but(CONFIG, validation_interval=1, early_stopping=stopping, callbacks=(ends,))
    best, first = make_net(), make_net()
    outcome = run(best, config, data(40), validation=validation)
    assert outcome.stopped_early and outcome.steps < 8
    assert outcome.history[-1]["epoch"] == outcome.steps / 8
    assert ends.epochs == [outcome.steps / 8]  # the epoch in which the run has ended
    assert ends.evaluations == [record["epoch"] for record in outcome.history]
    run(first, but(CONFIG, max_steps=outcome.steps - 1), data(40))
    assert torch.equal(weights(best), weights(first))
    resumed = run(make_net(), config, data(40), validation=validation, resume=outcome.final)
    assert resumed.steps == outcome.steps


def test_same_seed_same_bits_and_another_seed_others() -> None:
    nets = [make_net() for _ in range(3)]
    for net, seed in zip(nets, (4, 4, 5), strict=True):
        torch.rand(seed)  # what happened before does not matter
        run(net, but(CONFIG, seed=seed), data())
    assert torch.equal(weights(nets[0]), weights(nets[1]))
    assert not torch.equal(weights(nets[0]), weights(nets[2]))


def test_complete_run_returns_at_once() -> None:
    net, again = make_net(), seeded(Net, seed=99)
    first = run(net, CONFIG, data())
    second = run(again, CONFIG, data(), resume=first.final)
    assert torch.equal(weights(net), weights(again))
    assert second.history == first.history


def test_complete_run_goes_on_with_more_epochs() -> None:
    whole, part = make_net(), make_net()
    expected = run(whole, CONFIG, data())
    first = run(part, but(CONFIG, epochs=1), data())
    got = run(part, CONFIG, data(), resume=first.final)
    assert shown(got.history) == shown(expected.history)
    assert torch.equal(weights(whole), weights(part))


def test_more_steps_replace_the_record_of_a_cut_epoch() -> None:
    part = make_net()
    first = run(part, but(CONFIG, max_steps=6), data())
    assert [(r["epoch"], r["steps"]) for r in first.history] == [(1, 4), (2, 2)]
    got = run(part, CONFIG, data(), resume=first.final)
    whole = run(make_net(), CONFIG, data())
    assert shown(got.history) == shown(whole.history)


def test_other_world_size_begins_the_epoch_anew(caplog: pytest.LogCaptureFixture) -> None:
    sink = Keeper(steps=(6,))
    run(make_net(), CONFIG, data(), sink=sink)
    point = sink.points[6]
    moved = ResumePoint(step=6, shared=point.shared, rank_state=None)
    with caplog.at_level(logging.WARNING):
        got = run(make_net(), CONFIG, data(), resume=moved)
    assert "epoch 2 begins anew after 2 of its steps" in caplog.text
    assert got.steps == 14
    assert [record["steps"] for record in got.history] == [4, 4, 4]


@pytest.mark.parametrize(
    ("key", "value"), [("watch", 5), ("own", {"x": 1}), ("rng", {}), ("gradient_norms", None)]
)
def test_a_rank_state_of_another_form_is_told(key: str, value: Any) -> None:
    sink = Keeper(steps=(6,))
    run(make_net(), CONFIG, data(), sink=sink)
    point = sink.points[6]
    assert point.rank_state is not None
    moved = ResumePoint(step=6, shared=point.shared, rank_state={**point.rank_state, key: value})
    with pytest.raises(StorageError, match=r"rank 0 has kept in the .* step 6 is of"):
        run(make_net(), CONFIG, data(), resume=moved)


def changed_weights(config: TrainConfig, **changes: Any) -> bool:
    """Whether the weights differ when these fields are changed."""
    base, other = make_net(), make_net()
    weighted = changes.pop("weighted", False)
    run(base, config, data())
    run(other, but(config, **changes), data(), weighted=weighted)
    return not torch.equal(weights(base), weights(other))


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": "l1"},
        {"optimizer": "sgd"},
        {"optimizer_params": {"betas": (0.5, 0.5)}},
        {"learning_rate": 0.01},
        {"scheduler": None},
        {"epochs": 4},
        {"max_steps": 5},
        {"batch_size": 4},
        {"seed": 5},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"gradient_accumulation_steps": 2},
        {"gradient_clip_norm": 0.1},
        {"weighted": True},
    ],
)
def test_every_option_changes_training(changes: dict[str, Any]) -> None:
    assert changed_weights(CONFIG, **changes)


class Spy(AllReduceSynchronizer):
    closed = 0

    def close(self) -> None:
        type(self).closed += 1
        super().close()


class SpyStrategy(AllReduce):
    def setup(self, model: Any, make_optimizer: Any, comm: Any) -> Spy:
        return Spy(model, make_optimizer, comm, bucket_bytes=self.bucket_bytes)


def test_own_strategy_is_used_and_closed_also_after_a_failure() -> None:
    Spy.closed = 0
    run(make_net(), but(CONFIG, sync_strategy=SpyStrategy()), data())
    assert Spy.closed == 1

    class Failing(Callback):
        def on_step_end(self, state: CallbackState) -> None:
            raise ZeroDivisionError

    failing = but(CONFIG, sync_strategy=SpyStrategy(), callbacks=(Failing(),))
    with pytest.raises(ZeroDivisionError):
        run(make_net(), failing, data())
    assert Spy.closed == 2


class RoundsOfThree(AllReduceSynchronizer):
    def after_step(self, step: int) -> bool:
        return (step + 1) % 3 == 0


class RoundsStrategy(AllReduce):
    def setup(self, model: Any, make_optimizer: Any, comm: Any) -> RoundsOfThree:
        return RoundsOfThree(model, make_optimizer, comm, bucket_bytes=self.bucket_bytes)


def test_checkpoints_wait_for_the_end_of_the_round() -> None:
    sink = Keeper(steps=(2, 5, 7))
    run(make_net(), but(CONFIG, sync_strategy=RoundsStrategy()), data(), sink=sink)
    assert sorted(sink.points) == [3, 6, 8]  # 8 is the end of an epoch, which closes the round


def test_deterministic_is_asked_for_and_taken_back() -> None:
    seen = []

    class Look(Callback):
        def on_step_end(self, state: CallbackState) -> None:
            seen.append(torch.are_deterministic_algorithms_enabled())

    run(make_net(), but(CONFIG, max_steps=1, deterministic=True, callbacks=(Look(),)), data())
    run(make_net(), but(CONFIG, max_steps=1, callbacks=(Look(),)), data())
    assert seen == [True, False]
    assert not torch.are_deterministic_algorithms_enabled()


class Journal(NullObserver):
    def __init__(self) -> None:
        self.steps: list[tuple[int, int, int]] = []
        self.phases: list[str] = []
        self.records: list[Mapping[str, float]] = []

    def step(self, *, epoch: int, step: int, loss: float, rows: int) -> None:
        assert math.isfinite(loss)
        self.steps.append((epoch, step, rows))

    def phase(self, name: str) -> None:
        self.phases.append(name)

    def epoch(self, record: Mapping[str, float]) -> None:
        self.records.append(record)


def test_observer_and_callbacks_see_everything() -> None:
    events: list[str] = []

    class Log(Callback):
        def on_train_begin(self, state: CallbackState) -> None:
            assert math.isnan(state.loss)
            events.append("begin")

        def on_step_end(self, state: CallbackState) -> None:
            assert math.isfinite(state.loss)
            events.append(f"step {state.step}")

        def on_epoch_end(self, state: CallbackState, record: Mapping[str, float]) -> None:
            assert (state.rank, state.world_size, state.epoch) == (0, 1, record["epoch"])
            events.append("epoch")

        def on_train_end(self, state: CallbackState) -> None:
            assert isinstance(state.model, Net)
            events.append("end")

    journal = Journal()
    config = but(CONFIG, epochs=2, batch_size=10, callbacks=(Log(),))
    outcome = run(
        make_net(),
        config,
        data(),
        validation=make_data([3], dtype=torch.float32),
        observer=journal,
        sink=Keeper(steps=(1,)),
    )
    assert events == ["begin", *("step 1", "step 2", "epoch", "step 3", "step 4", "epoch"), "end"]
    assert journal.steps == [(1, 1, 10), (1, 2, 10), (2, 3, 10), (2, 4, 10)]
    assert journal.phases == [
        *("setup", "train", "checkpoint", "train", "evaluate", "train", "evaluate", "finish")
    ]
    assert journal.records == outcome.history


def test_learning_rate_is_the_users_and_is_in_the_history() -> None:
    outcome = run(make_net(), CONFIG, data())
    assert [r["learning_rate"] for r in outcome.history] == [0.02 / 4, 0.02 / 16, 0.02 / 64]


def test_best_weights_come_back_and_the_last_stay_in_the_checkpoint() -> None:
    kept: list[torch.Tensor] = []

    class Keep(Callback):
        def on_epoch_end(self, state: CallbackState, record: Mapping[str, float]) -> None:
            kept.append(weights(state.model))

    stopping = EarlyStopping(monitor="val_loss", patience=2, min_delta=1e6)
    config = but(CONFIG, epochs=9, early_stopping=stopping, callbacks=(Keep(),))
    validation = make_data([6], dtype=torch.float32)
    net, again = make_net(), make_net()
    outcome = run(net, config, data(), validation=validation)
    assert outcome.stopped_early
    assert len(outcome.history) == 3
    assert torch.equal(weights(net), kept[0])
    last = torch.cat(
        [outcome.final.shared["model"][n].flatten() for n, _ in net.named_parameters()]
    )
    assert torch.equal(last, kept[2])

    run(again, config, data(), validation=validation, resume=outcome.final)
    assert torch.equal(weights(again), kept[0])

    keep_last = but(stopping, restore_best=False)  # type: ignore[type-var]
    run(again := make_net(), but(config, early_stopping=keep_last), data(), validation=validation)
    assert torch.equal(weights(again), kept[-1])


def test_divergence_is_an_error_before_the_weights_are_lost() -> None:
    shards = data()
    shards[0].columns["feature x"][3] = math.inf
    net = seeded(lambda: nn.Linear(NUM_FEATURES, 1))
    said = r'the loss is inf at step .\. Among the 20 training rows .* are in: feature "x" of 1;'
    with pytest.raises(TrainingDiverged, match=said):
        run(net, TrainConfig(batch_size=5), shards)
    assert torch.isfinite(weights(net)).all()


def test_fp16_that_never_fits_is_an_error() -> None:
    shards = data()
    shards[0].columns["feature x"][:] = math.nan
    with pytest.raises(TrainingDiverged, match="fp16"):
        run(make_net(), but(CONFIG, precision="fp16", epochs=20, scheduler=None), shards)


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")
def test_fp16_skips_a_step_that_overflows() -> None:
    shards = data(5)
    shards[0].columns["feature x"][:] = 60000.0
    net = seeded(lambda: nn.Linear(NUM_FEATURES, 1))
    before = weights(net)
    outcome = run(net, but(CONFIG, precision="fp16", epochs=1), shards)
    assert torch.equal(weights(net), before)
    assert math.isnan(outcome.history[0]["loss"])
    assert outcome.final.shared["scaler"]["scale"] < 65536
    assert outcome.history[0]["learning_rate"] == 0.02


def test_rows_of_weight_zero_do_not_count() -> None:
    shards = data()
    shards[0].columns["weight w"][:] = 0.0
    net = seeded(lambda: nn.Linear(NUM_FEATURES, 1))
    before = weights(net)
    with pytest.raises(DataError, match=r"no row of epoch 1 counts.*weightCol"):
        run(net, TrainConfig(batch_size=5, learning_rate=0.5), shards, weighted=True)
    assert torch.equal(weights(net), before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"early_stopping": EarlyStopping()}, r"monitors 'val_loss'.*only loss, learning_rate"),
        ({"metrics": {"mse": torchmetrics.MeanSquaredError}}, "there are none"),
        ({"loss": "no such"}, "unknown loss"),
        ({"optimizer": "no such"}, "unknown optimizer"),
        ({"sync_strategy": "no such"}, "unknown strategy"),
    ],
)
def test_contradictions_are_found_before_training(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(make_net(), but(CONFIG, **changes), data())


def test_frozen_parts_keep_their_mode_through_evaluation() -> None:
    modes = []

    class Look(Callback):
        def on_step_end(self, state: CallbackState) -> None:
            modes.append(tuple(part.training for part in state.model.children()))

    class Frozen(nn.Dropout):
        def train(self, mode: bool = True) -> Frozen:
            return super().train(False)

    net = nn.Sequential(Frozen(0.9), nn.Dropout(0.1), nn.Linear(NUM_FEATURES, 1)).eval()
    validation = make_data([6], dtype=torch.float32)
    config = TrainConfig(epochs=2, batch_size=20, callbacks=(Look(),))
    run(net, config, data(), validation=validation)
    assert modes == [(False, True, True)] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("elasticity", ["rounding", "bits"])
def test_cuda_equals_cpu_and_resumes(elasticity: Any) -> None:
    def make() -> nn.Module:
        return seeded(lambda: nn.Linear(NUM_FEATURES, 1))

    config = TrainConfig(
        epochs=2, batch_size=4, learning_rate=0.05, deterministic=True, elasticity=elasticity
    )
    validation = make_data([6], dtype=torch.float32)
    sink = Keeper(steps=(3,))
    host, device, resumed = make(), make(), make()
    expected = run(host, config, data(), validation=validation)
    got = run(device, config, data(), validation=validation, device="cuda", sink=sink)
    again = run(
        resumed, config, data(), validation=validation, device="cuda", resume=sink.points[3]
    )
    torch.testing.assert_close(weights(device).cpu(), weights(host), rtol=1e-4, atol=1e-5)
    assert torch.equal(weights(device), weights(resumed))
    assert shown(again.history) == shown(got.history)
    assert got.history[-1]["val_loss"] == pytest.approx(expected.history[-1]["val_loss"], rel=1e-4)


def test_the_history_has_the_norm_of_the_gradient_before_it_is_clipped() -> None:
    plain, clipped, last = make_line(), make_line(), make_line()
    config = TrainConfig(epochs=2, batch_size=20, learning_rate=0.1)
    history = run(plain, config, data()).history
    nn.functional.mse_loss(last(data()[0].columns["feature x"]).squeeze(1),
                           data()[0].columns["label y"]).backward()  # fmt: skip
    norm = torch.nn.utils.get_total_norm([p.grad for p in last.parameters() if p.grad is not None])
    assert history[0]["gradient_norm"] == pytest.approx(norm.item(), rel=1e-5)
    assert history[1]["gradient_norm"] < history[0]["gradient_norm"]
    small = run(clipped, but(config, gradient_clip_norm=1e-6), data()).history
    assert small[0]["gradient_norm"] == history[0]["gradient_norm"]
    apart = but(config, sync_strategy=ParameterAveraging())
    assert "gradient_norm" not in run(make_line(), apart, data()).history[0]


def test_every_epoch_has_a_norm_and_some_steps_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    whole = torch.nn.utils.get_total_norm
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", lambda g: taken.append(g) or whole(g))
    config = TrainConfig(epochs=2, batch_size=1, learning_rate=0.01)
    history = run(make_line(), config, data(20)).history
    assert len(taken) == 4  # of the first and the seventeenth of twenty steps
    assert all(math.isfinite(record["gradient_norm"]) for record in history)


def make_line() -> nn.Module:
    return seeded(lambda: nn.Linear(NUM_FEATURES, 1))


CLASSES: dict[str, Any] = {
    "task": CLASSIFICATION, "loss": "cross_entropy", "training_metrics": True,
    "metrics": {
        "accuracy": NamedMetric(name="accuracy", num_classes=3),
        "auroc": NamedMetric(name="auroc", num_classes=3),
    },
}  # fmt: skip


def make_classes() -> nn.Module:
    return seeded(lambda: nn.Linear(NUM_FEATURES, 3))


def test_training_metrics_are_those_of_the_batches_of_the_epoch() -> None:
    shards = make_data([20], task=CLASSIFICATION, dtype=torch.float32)
    config = TrainConfig(
        epochs=2, batch_size=6, gradient_accumulation_steps=2, learning_rate=1e-30, **CLASSES
    )
    history = run(make_classes(), config, shards, validation=shards).history
    for record in history:  # with weights that stay as they are, both are of equal rows
        assert record["accuracy"] == pytest.approx(record["val_accuracy"])
        assert record["auroc"] == pytest.approx(record["val_auroc"])
    alone = run(make_classes(), config, shards).history
    assert "val_accuracy" not in alone[0]
    assert shown(alone)[0].items() <= shown(history)[0].items()
    plain, watched = make_classes(), make_classes()
    run(plain, but(config, learning_rate=0.1, training_metrics=False, metrics={}), shards)
    run(watched, but(config, learning_rate=0.1), shards)
    assert torch.equal(weights(plain), weights(watched))


@pytest.mark.parametrize("step", [1, 3, 5])
def test_training_metrics_resume(step: int) -> None:
    shards = make_data([20], task=CLASSIFICATION, dtype=torch.float32)
    config = TrainConfig(epochs=2, batch_size=5, learning_rate=0.1, **CLASSES)
    sink = Keeper(steps=tuple(range(1, 9)))
    expected = run(make_classes(), config, shards, sink=sink).history
    assert shown(run(make_classes(), config, shards, resume=sink.points[step]).history) == shown(
        expected
    )
