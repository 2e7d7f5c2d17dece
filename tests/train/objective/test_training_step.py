"""A training step of the user's in place of forward and loss; LightningModules bring theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

from sparkdl.config import CUSTOM, TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.inference.regression import REGRESSION
from sparkdl.models import GAN, gan_step
from sparkdl.train.objective.lightning import OwnOptimizer
from sparkdl.train.objective.loss import resolve_loss
from sparkdl.train.objective.training_step import StepLoss, objective_of, taken
from sparkdl.train.optimizers.optimizers import make_scheduler, resolve_optimizer
from tests.gang import Gang
from tests.train.runs import NUM_FEATURES, Keeper, but, make_data, run, seeded, weights

CONFIG = TrainConfig(epochs=3, batch_size=5, optimizer="adam", learning_rate=0.02, seed=4)


def make_net() -> nn.Module:
    return seeded(lambda: nn.Linear(NUM_FEATURES, 1, dtype=torch.float64))


def data(rows: int = 20) -> Any:
    return make_data([rows])


def losses(module: nn.Module, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (module(inputs).squeeze(1) - target).square()


def mean(module: nn.Module, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return losses(module, inputs, target).mean()


def pair(module: nn.Module, inputs: torch.Tensor, target: torch.Tensor) -> Any:
    values = losses(module, inputs, target)
    return values.sum(), float(len(values))


@pytest.mark.parametrize("step", [losses, mean, pair])
def test_a_step_that_computes_the_loss_trains_as_the_loss_does(step: Any) -> None:
    plain, own = make_net(), make_net()
    metrics = {"mae": torchmetrics.MeanAbsoluteError}
    validation = make_data([6])
    config = but(CONFIG, task=REGRESSION, metrics=metrics)
    expected = run(plain, config, data(), validation=validation)
    got = run(own, but(config, training_step=step), data(), validation=validation)
    torch.testing.assert_close(weights(own), weights(plain), rtol=1e-12, atol=1e-12)
    for name in ("loss", "val_loss", "val_mae"):
        found = [record[name] for record in got.history]
        assert found == pytest.approx([record[name] for record in expected.history])


def test_a_step_takes_the_place_of_the_loss() -> None:
    net = make_net()
    outcome = run(net, but(CONFIG, training_step=lambda m, x, y: 3 * losses(m, x, y)), data())
    plain = run(make_net(), CONFIG, data())
    assert outcome.history[0]["loss"] == pytest.approx(3 * plain.history[0]["loss"], rel=0.1)


def test_rows_are_weighted_where_the_step_tells_them_apart() -> None:
    plain, own = make_net(), make_net()
    run(plain, CONFIG, data(), weighted=True)
    run(own, but(CONFIG, training_step=losses), data(), weighted=True)
    torch.testing.assert_close(weights(own), weights(plain), rtol=1e-12, atol=1e-12)
    with pytest.raises(ConfigError, match="weight column"):
        run(make_net(), but(CONFIG, training_step=mean), data(), weighted=True)


def two_ranks(comm: Any) -> torch.Tensor:
    net = make_net()
    run(net, but(CONFIG, training_step=losses, batch_size=4), make_data([12, 8]), comm=comm)
    return weights(net)


def two_ranks_plain(comm: Any) -> torch.Tensor:
    net = make_net()
    run(net, but(CONFIG, batch_size=4), make_data([12, 8]), comm=comm)
    return weights(net)


@pytest.mark.slow
def test_uneven_ranks_train_as_with_the_loss(gang: Gang) -> None:
    for own, plain in zip(gang.run(two_ranks), gang.run(two_ranks_plain), strict=True):
        torch.testing.assert_close(own, plain, rtol=1e-12, atol=1e-12)


def test_what_a_step_may_not_give() -> None:
    with pytest.raises(ConfigError, match=r"sum of weights\); received \(2, 1\)$"):
        run(make_net(), but(CONFIG, training_step=lambda m, x, y: m(x)[:2]), data())


def test_each_player_of_a_gan_moves_by_its_own_loss_only() -> None:
    gan: Any = seeded(lambda: GAN(num_features=1, noise=2, widths=(16,)))
    real = torch.randn(8, 1)
    torch.manual_seed(0)
    gan_step(gan, real, None).mean().backward()
    grads = {name: p.grad.clone() for name, p in gan.named_parameters()}
    gan.zero_grad()
    torch.manual_seed(0)
    made = gan.generate(8)
    (nn.functional.softplus(-gan.critic(real)) + nn.functional.softplus(gan.critic(made.detach()))
     ).mean().backward()  # fmt: skip
    for name, parameter in gan.critic.named_parameters():
        torch.testing.assert_close(grads[f"critic.{name}"], parameter.grad)
    assert grads["generator.1.weight"].abs().sum() > 0


class Lit(nn.Module):
    """What a LightningModule has, without Lightning."""

    def __init__(self, configure: Any = None, returns: Any = None) -> None:
        super().__init__()
        self.layer = nn.Linear(NUM_FEATURES, 1, dtype=torch.float64)
        self.configure = configure or (lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
        self.returns = returns or (lambda loss: loss)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return self.returns((self(x).squeeze(1) - y).square().mean())

    def configure_optimizers(self) -> Any:
        return self.configure(self)


AUTO = but(CONFIG, optimizer="auto", learning_rate=None)


@pytest.mark.parametrize("returns", [None, lambda loss: {"loss": loss, "more": 1}])
def test_a_lightning_module_brings_step_and_optimizer(returns: Any) -> None:
    lit: Any = seeded(lambda: Lit(returns=returns))
    plain = nn.Linear(NUM_FEATURES, 1, dtype=torch.float64)
    plain.load_state_dict(lit.layer.state_dict())
    run(lit, AUTO, data())
    run(plain, but(CONFIG, optimizer="sgd", learning_rate=0.1), data())
    torch.testing.assert_close(weights(lit), weights(plain), rtol=1e-12, atol=1e-12)


def test_what_the_user_says_wins_over_the_module() -> None:
    lit = seeded(Lit)
    config = but(AUTO, optimizer="adam", learning_rate=0.5, training_step=losses)
    assert objective_of(config, lit).step is losses  # type: ignore[attr-defined]
    assert resolve_optimizer(config, lit)(lit.parameters()).defaults["lr"] == 0.5


def test_auto_is_adam_for_other_modules() -> None:
    net = make_net()
    assert isinstance(resolve_optimizer(AUTO, net)(net.parameters()), torch.optim.Adam)
    assert not isinstance(objective_of(AUTO, net), StepLoss)


def rates(configure: Any, **changes: Any) -> list[float]:
    outcome = run(seeded(lambda: Lit(configure)), but(AUTO, **changes), data())
    return [record["learning_rate"] for record in outcome.history]


def halved(module: nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.08)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def listed(module: nn.Module) -> Any:
    optimizer, scheduler = halved(module)
    return [optimizer], [scheduler]


def mapped(**options: Any) -> Any:
    def configure(module: nn.Module) -> Any:
        optimizer, scheduler = halved(module)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **options}}

    return configure


@pytest.mark.parametrize(
    ("configure", "expected"),
    [
        (listed, [0.04, 0.02, 0.01]),
        (mapped(), [0.04, 0.02, 0.01]),
        (mapped(frequency=2), [0.08, 0.04, 0.04]),
        (mapped(interval="step"), [0.005, 0.0003125, 0.00001953125]),
    ],
)
def test_its_schedule_is_stepped_as_lightning_does(configure: Any, expected: list[float]) -> None:
    assert rates(configure) == pytest.approx(expected)


@pytest.mark.parametrize("step", [1, 4, 6, 11])
def test_a_lightning_module_resumes_bit_for_bit(step: int) -> None:
    sink = Keeper(steps=tuple(range(1, 100)))
    whole, resumed = seeded(lambda: Lit(listed)), seeded(lambda: Lit(listed), seed=99)
    run(whole, AUTO, data(), sink=sink)
    run(resumed, AUTO, data(), resume=sink.points[step])
    assert torch.equal(weights(whole), weights(resumed))


def two_optimizers(module: nn.Module) -> Any:
    return [torch.optim.SGD(module.parameters(), lr=0.1) for _ in range(2)]


@pytest.mark.parametrize(
    ("configure", "message"),
    [
        (two_optimizers, "must return one optimizer"),
        (lambda module: None, "must return one optimizer"),
        (lambda module: torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1), "must train all"),
        (mapped(interval="batch"), "'step' or 'epoch'"),
        (
            lambda module: (
                [made := torch.optim.SGD(module.parameters(), lr=1)],
                [torch.optim.lr_scheduler.ReduceLROnPlateau(made)],
            ),
            "ReduceLROnPlateau",
        ),
    ],
)
def test_what_one_loop_cannot_do_is_refused(configure: Any, message: str) -> None:
    lit: Any = Lit(configure)
    with pytest.raises(ConfigError, match=message):
        make = resolve_optimizer(AUTO, lit)
        make_scheduler(AUTO, make(lit.parameters()), make, 4)


def test_options_do_not_reach_an_optimizer_that_the_module_makes() -> None:
    with pytest.raises(ConfigError, match=r"configure_optimizers .* set \['lr'\] there"):
        resolve_optimizer(but(AUTO, learning_rate=0.1), Lit())
    assert isinstance(resolve_optimizer(AUTO, Lit()), OwnOptimizer)


def unlabeled(rows: int = 20) -> Any:
    """The rows without their labels."""
    shards = data(rows)
    for shard in shards:
        del shard.columns["label y"]
    return shards


@pytest.mark.parametrize(
    "changes", [{}, {"gradient_accumulation_steps": 2}, {"augmentation": lambda x: x + 1}]
)
def test_without_a_label_there_is_no_target(changes: dict[str, Any]) -> None:
    seen: list[Any] = []

    def step(module: nn.Module, inputs: torch.Tensor, target: Any) -> torch.Tensor:
        seen.append(target)
        return module(inputs).square().squeeze(1)

    config = but(CONFIG, training_step=step, **changes)
    run(make_net(), config, unlabeled(), validation=unlabeled(6))
    assert len(seen) > 12
    assert set(seen) == {None}


def test_a_lightning_module_without_label_gets_the_inputs_alone() -> None:
    class Alone(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert isinstance(batch, torch.Tensor)
            return self(batch).square().mean()

    run(seeded(Alone), AUTO, unlabeled(), validation=unlabeled(6))


def penalized(module: nn.Module, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """With a penalty on the gradient by the inputs, as WGAN-GP has it."""
    inputs = inputs.clone().requires_grad_()
    (slope,) = torch.autograd.grad(module(inputs).sum(), inputs, create_graph=True)
    return losses(module, inputs, target) + slope.square().sum(1)


def test_a_step_may_take_gradients_also_in_evaluation() -> None:
    net = make_net()
    outcome = run(net, but(CONFIG, training_step=penalized), data(), validation=make_data([6]))
    assert all(record["val_loss"] > 0 for record in outcome.history)
    assert all(parameter.grad is None for parameter in net.parameters())


def test_a_step_without_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match="must return a loss"):
        run(Lit(returns=lambda loss: {"accuracy": 1}), AUTO, data())


def test_losses_of_torchs_kind_take_the_logits_of_several_outputs() -> None:
    output = {"logits": torch.ones(2), "hidden": torch.zeros(2, 3)}
    assert taken(resolve_loss("cross_entropy", CUSTOM), output) is output["logits"]
    assert taken(resolve_loss(lambda o, t: o["hidden"], CUSTOM), output) is output
    assert taken(resolve_loss("mse", CUSTOM), output["hidden"]) is output["hidden"]
    assert taken(resolve_loss("mse", CUSTOM), {"hidden": 1}) == {"hidden": 1}
