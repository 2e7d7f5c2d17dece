"""A LightningModule keeps its logs, validation step and hooks; what cannot be called is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.optim import lr_scheduler

from sparkdl.config import EarlyStopping, TrainConfig
from sparkdl.data.plan import RoundPart
from sparkdl.data.spool.mapped import MappedRows
from sparkdl.errors import ConfigError
from sparkdl.train.callbacks import NullObserver
from sparkdl.train.objective.lightning import TrainerStandIn, check_in_rounds, check_module
from sparkdl.train.objective.logs import fill, from_text
from sparkdl.train.objective.metric_states import added
from sparkdl.train.objective.training_step import objective_of
from sparkdl.train.optimizers.optimizers import resolve_optimizer
from sparkdl.train.round_replica import RoundReplica
from tests.train.runs import NUM_FEATURES, Keeper, but, make_data, plan_for, run, seeded, weights

lightning = pytest.importorskip("lightning")
CONFIG = TrainConfig(epochs=2, batch_size=5, optimizer="auto", seed=4)


class Lit(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """Logs numbers, and metrics as objects, as Lightning's tutorials do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(NUM_FEATURES, 1, dtype=torch.float64)
        self.train_mae = torchmetrics.MeanAbsoluteError()
        self.val_mae = torchmetrics.MeanAbsoluteError()
        self.seen: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).squeeze(1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        output = self(x)
        loss = (output - y).square().mean()
        self.train_mae(output, y)
        self.log("train_mae", self.train_mae)
        self.log_dict({"train_loss": loss, "twice": 2 * loss}, on_step=False, on_epoch=True)
        self.log("largest", float(y.max()), reduce_fx="max")
        self.log("rows", float(len(y)), reduce_fx="sum", sync_dist=True)
        return loss

    def validation_step(self, batch: Any) -> None:
        x, y = batch
        assert not self.training
        assert not torch.is_grad_enabled()
        self.val_mae.update(self(x), y)
        self.log("val_mae", self.val_mae, prog_bar=True)
        self.log("val_loss", (self(x) - y).abs().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02)


def make_lit(kind: type[Lit] = Lit) -> Any:
    return seeded(kind)


def shown(history: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in record.items() if k != "seconds"} for record in history]


def test_what_is_logged_is_in_the_history() -> None:
    lit = make_lit()
    outcome = run(lit, CONFIG, make_data([18]), validation=make_data([7]))
    y = make_data([18])[0].columns["label y"]
    for record in outcome.history:
        assert record["train_loss"] == pytest.approx(record["loss"])  # batches of 4 and 5 rows
        assert record["twice"] == pytest.approx(2 * record["loss"])
        assert record["largest"] == pytest.approx(float(y.max()))
        assert record["rows"] == 18
        assert 0 < record["train_mae"] ** 2 < record["loss"]
        assert record["val_mae"] == pytest.approx(record["val_loss"], rel=1e-6)  # its own, not ours
    assert outcome.history[1]["train_mae"] < outcome.history[0]["train_mae"]
    assert lit._trainer is None
    assert "log" not in vars(lit)


class Changing(Lit):
    """Its logs depend on what has been seen before, so that a wrong restart would show."""

    def __init__(self) -> None:
        super().__init__()
        self.best = torchmetrics.MinMetric()

    def on_validation_epoch_end(self) -> None:
        self.best(self.val_mae.compute())
        self.log("best", self.best.compute())


@pytest.mark.parametrize("step", [1, 3, 4, 6])
def test_logs_resume_bit_for_bit(step: int) -> None:
    sink = Keeper(steps=tuple(range(1, 100)))
    data, validation = make_data([18]), make_data([7])
    whole = run(make_lit(Changing), CONFIG, data, validation=validation, sink=sink)
    lit = make_lit(Changing)
    got = run(lit, CONFIG, data, validation=validation, resume=sink.points[step])
    assert shown(got.history) == shown(whole.history)
    assert whole.history[1]["best"] == min(record["val_mae"] for record in whole.history)


class Hooked(Lit):
    """Notes what is called, and when."""

    def note(self, name: str, *more: Any) -> None:
        self.seen.append(" ".join([name, *map(str, more)]))

    def on_fit_start(self) -> None:
        self.note("fit start")

    def on_train_start(self) -> None:
        self.note("train start", self.trainer.max_epochs, self.trainer.estimated_stepping_batches)

    def on_train_epoch_start(self) -> None:
        self.note("epoch", self.current_epoch)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.note("batch", batch_idx, len(batch[0]), self.global_step)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert optimizer is self.optimizers()
        norm = torch.cat([p.grad.flatten() for p in self.parameters()]).norm()
        self.log("norm", norm)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note("end", batch_idx, outputs.numel(), self.global_step)

    def on_validation_epoch_start(self) -> None:
        self.note("validation")

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note("validated", batch_idx, len(batch[0]))

    def on_validation_epoch_end(self) -> None:
        self.log("own", float(self.current_epoch))

    def on_train_epoch_end(self) -> None:
        assert self.trainer.callback_metrics["val_loss"] > 0
        self.note("epoch end")

    def on_train_end(self) -> None:
        self.note("train end")


def test_hooks_are_called_in_lightnings_order() -> None:
    lit = make_lit(Hooked)
    outcome = run(lit, but(CONFIG, batch_size=10), make_data([18]), validation=make_data([7]))
    epoch = lambda n: [  # noqa: E731
        f"epoch {n}",
        *(f"batch 0 9 {2 * n}", f"end 0 1 {2 * n + 1}", f"batch 1 9 {2 * n + 1}"),
        *(f"end 1 1 {2 * n + 2}", "validation", "validated 0 7", "epoch end"),
    ]
    assert lit.seen == ["fit start", "train start 2 4", *epoch(0), *epoch(1), "train end"]
    assert [record["own"] for record in outcome.history] == [0, 1]
    assert outcome.history[0]["norm"] > outcome.history[1]["norm"] > 0


def test_without_validation_step_validation_leaves_no_trace_in_the_logs() -> None:
    class Plain(Lit):
        validation_step = lightning.LightningModule.validation_step

    data = make_data([18])
    alone = run(make_lit(Plain), CONFIG, data)
    validated = run(make_lit(Plain), CONFIG, data, validation=make_data([7]))
    assert [{k: v for k, v in r.items() if k != "val_loss"} for r in shown(validated.history)] == (
        shown(alone.history)
    )
    assert validated.history[0]["val_loss"] > 0


def with_method(name: str, value: Any = lambda self, *a, **k: None) -> Any:
    return make_lit(type("Own", (Lit,), {name: value}))


def step_with(**options: Any) -> Any:
    def training_step(self: Any, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = Lit.training_step(self, batch, batch_idx)
        self.log(**{"name": "more", "value": loss, **options})
        return loss

    return with_method("training_step", training_step)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("configure_gradient_clipping", "gradientClipNorm"),
        ("optimizer_step", "on_before_optimizer_step"),
        ("setup", "__init__"),
        ("on_after_batch_transfer", "augmentation"),
        ("on_save_checkpoint", "buffers"),
        ("configure_callbacks", "sparkdl.Callback"),
    ],
)
def test_what_nobody_would_call_is_refused_by_name(name: str, remedy: str) -> None:
    check_module(make_lit())
    with pytest.raises(ConfigError, match=f"Own.{name}: .*{remedy}"):
        objective_of(CONFIG, with_method(name))


class Manual(Lit):
    """Two optimizers that take turns, as Lightning's pages show it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = (self.scale * self(x) - y).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            assert sum(p.grad is not None for p in self.parameters()) <= 3
            self.clip_gradients(optimizer, gradient_clip_val=0.5)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        schedule = self.lr_schedulers()
        schedule.step()
        self.log("rate", schedule.get_last_lr()[0])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(type(optimizer).__name__)

    def configure_optimizers(self) -> Any:
        one = torch.optim.SGD(self.layer.parameters(), lr=0.02)
        other = torch.optim.Adam([self.scale], lr=0.02)
        return {"optimizer": one, "lr_scheduler": lr_scheduler.ExponentialLR(one, 0.5)}, {
            "optimizer": other
        }


def test_optimizers_take_turns() -> None:
    lit = make_lit(Manual)
    before = {name: value.clone() for name, value in lit.named_parameters()}
    history = run(lit, but(CONFIG, epochs=1), make_data([18]), validation=make_data([7])).history
    assert lit.seen == ["SGD", "Adam"] * 4
    assert all(p.requires_grad for p in lit.parameters())
    assert not any(torch.equal(before[name], p) for name, p in lit.named_parameters())
    assert history[0]["learning_rate"] == 0.02 * 0.5**4
    assert history[0]["rate"] == pytest.approx(
        sum(0.02 * 0.5 ** (n + 1) * rows for n, rows in enumerate((4, 5, 4, 5))) / 18
    )


def test_hooks_of_epochs_are_refused_in_rounds() -> None:
    check_in_rounds(make_lit())
    with pytest.raises(ConfigError, match=r"on_train_start, .*on_validation_epoch_end.*rounds"):
        check_in_rounds(make_lit(Hooked))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "seconds"}, "has an entry of that name"),
        ({"reduce_fx": torch.median}, "reduce_fx must be one of"),
        ({"on_step": False, "on_epoch": False}, "nothing is kept"),
        ({"value": torch.ones(2)}, "one number"),
        ({"value": "low"}, "one number"),
        ({"name": "train_mae"}, "in two ways"),
        ({"value": torchmetrics.MeanMetric()}, "set it in __init__"),
        ({"sync_dist_group": 1}, "sync_dist_group"),
    ],
)
def test_what_cannot_be_logged_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(step_with(**options), CONFIG, make_data([18]))


def test_batch_size_and_reductions_as_lightning_has_them() -> None:
    def training_step(self: Any, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("index", float(batch_idx), batch_size=batch_idx + 1)
        self.log("first", float(batch_idx), reduce_fx=torch.min, rank_zero_only=True)
        return Lit.training_step(self, batch, batch_idx)

    record = run(with_method("training_step", training_step), CONFIG, make_data([18])).history[0]
    assert record["index"] == pytest.approx((1 * 2 + 2 * 3 + 3 * 4) / 10)
    assert record["first"] == 0


def test_early_stopping_monitors_what_is_logged() -> None:
    stopping = EarlyStopping(monitor="val_mae", patience=1, min_delta=1e6)
    config = but(CONFIG, epochs=9, early_stopping=stopping)
    data, validation = make_data([18]), make_data([7])
    assert len(run(make_lit(), config, data, validation=validation).history) == 2
    missing = but(config, early_stopping=EarlyStopping(monitor="accuracy"))
    with pytest.raises(ConfigError, match=r"'accuracy'.*val_mae, .*train_mae"):
        run(make_lit(), missing, data, validation=validation)


@pytest.mark.parametrize("inside", [True, False])
def test_a_plateau_of_what_is_logged_lowers_the_rate(inside: bool) -> None:
    def configure(self: Any, monitor: str | None = "val_mae", **options: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02)
        schedule = lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=0.99, threshold_mode="abs", mode="max"
        )
        given = {"scheduler": schedule, "monitor": monitor, **options}
        if not inside:
            return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": monitor}
        return {"optimizer": optimizer, "lr_scheduler": given}

    def trained(configure: Any, **more: Any) -> Any:
        lit = with_method("configure_optimizers", configure)
        config = but(CONFIG, epochs=3)
        found = run(lit, config, make_data([18]), validation=make_data([7]), **more)
        return shown(found.history)

    sink = Keeper(steps=tuple(range(1, 100)))
    history = trained(configure, sink=sink)
    assert [record["learning_rate"] for record in history] == [0.02, 0.02, 0.01]
    assert trained(configure, resume=sink.points[6]) == history
    if not inside:
        return
    for monitor, message in (("val_f1", "'val_f1'.*val_mae"), (None, "needs a 'monitor'")):
        with pytest.raises(ConfigError, match=message):
            trained(lambda self, m=monitor: configure(self, m))
    with pytest.raises(ConfigError, match="nor a frequency"):
        trained(lambda self: configure(self, frequency=2))


def test_the_learning_rate_schedule_may_ask_the_trainer() -> None:
    def configure(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    lit = with_method("configure_optimizers", configure)
    resolve_optimizer(CONFIG, lit)(lit.parameters())  # on the driver, which knows no rows
    history = run(lit, CONFIG, make_data([20])).history
    assert [record["learning_rate"] for record in history] == pytest.approx([0.05, 0])
    with pytest.raises(AttributeError, match=r"trainer.datamodule is not there.*max_epochs"):
        TrainerStandIn(lit, CONFIG).datamodule  # noqa: B018


def test_a_module_without_the_package_logs_too() -> None:
    class Duck(nn.Module):
        log: Any

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(NUM_FEATURES, 1, dtype=torch.float64)

        def training_step(self, batch: Any) -> torch.Tensor:
            loss = (self.layer(batch[0]).squeeze(1) - batch[1]).square().mean()
            self.log("mine", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.02)

        def on_train_epoch_end(self) -> None:
            self.log("epochs", 1)

    for record in run(seeded(Duck), CONFIG, make_data([18])).history:
        assert record["mine"] == pytest.approx(record["loss"])
        assert record["epochs"] == 1
    Duck.optimizer_step = lambda self: None  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"Duck.optimizer_step"):
        objective_of(CONFIG, Duck())


@pytest.fixture
def rounds() -> Iterator[tuple[RoundReplica, Any]]:
    shards = make_data([10, 8])
    plan = plan_for(shards, CONFIG, validation=make_data([3, 4]), world_size=2)
    yield RoundReplica(make_lit(), CONFIG, plan, torch.device("cpu")), (shards, plan)


def test_rounds_add_up_to_the_epoch(rounds: tuple[RoundReplica, Any]) -> None:
    replica, (shards, plan) = rounds
    start = {"model": make_lit().state_dict()}
    parts, loss, weight = [], 0.0, 0.0
    for step in range(plan.steps_per_epoch):
        for shard in (0, 1):
            part = RoundPart(epoch=0, step_in_epoch=step, step=step, num_steps=1)
            rows = MappedRows(shards[shard], plan)
            outcome = replica.train(start, shard, rows, part, NullObserver())
            assert outcome.logs is not None
            parts.append(from_text(outcome.logs))
            loss, weight = loss + outcome.loss_sum, weight + outcome.weight
    together = [added(parts[:2], replica_module(replica).get_submodule), *parts[2:]]
    record: dict[str, float] = {}
    fill(record, together, replica_module(replica))
    assert record["train_loss"] == pytest.approx(loss / weight)
    assert record["rows"] == 18
    x = torch.cat([shard.columns["feature x"] for shard in shards])
    y = torch.cat([shard.columns["label y"] for shard in shards])
    assert record["train_mae"] == pytest.approx(
        float((make_lit()(x) - y).abs().mean().detach()), rel=1e-5
    )
    *_, text = replica.evaluate(start, MappedRows(make_data([3])[0], plan))
    assert text is not None
    fill(record, [from_text(text)], replica_module(replica))
    assert record["val_mae"] == pytest.approx(record["val_loss"], rel=1e-6)


def replica_module(replica: RoundReplica) -> nn.Module:
    return make_lit()


def test_logs_change_no_weights() -> None:
    class Silent(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return (self(batch[0]) - batch[1]).square().mean()

    loud, silent = make_lit(), make_lit(Silent)
    run(loud, CONFIG, make_data([18]), validation=make_data([7]))
    run(silent, CONFIG, make_data([18]), validation=make_data([7]))
    assert torch.equal(weights(loud), weights(silent))
