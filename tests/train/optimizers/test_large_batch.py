from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from sparkdl.config import TrainConfig
from sparkdl.data.spool.mapped import ShardData
from sparkdl.errors import ConfigError
from sparkdl.inference.classification import CLASSIFICATION
from sparkdl.train.optimizers.large_batch import LAMB, LARS
from sparkdl.train.optimizers.warmup import warmup
from tests.train.runs import run, seeded

Tensors = list[torch.Tensor]


def start(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    """A matrix, a vector, a convolution, a layer larger than LAMB's clip norm."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(4, 3), (4,), (2, 3, 3, 3), (40, 30)]
    made = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return [nn.Parameter(value.to(dtype)) for value in made]


def gradients(step: int, dtype: torch.dtype = torch.float64) -> Tensors:
    generator = torch.Generator().manual_seed(100 + step)
    return [
        torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype) for p in start()
    ]


def stepped(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: range
) -> list[nn.Parameter]:
    for step in steps:
        for parameter, gradient in zip(parameters, gradients(step), strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
    return parameters


def lars_by_the_paper(rates: list[float], decays_vectors: bool) -> Tensors:
    """Algorithm 1 of arXiv 1708.03888, one layer and one number at a time."""
    momentum, decay, trust = 0.9, 0.02, 0.001
    results = []
    for layer, parameter in enumerate(start()):
        w = parameter.detach().flatten().tolist()
        v = [0.0] * len(w)
        for step, rate in enumerate(rates):
            g = gradients(step)[layer].flatten().tolist()
            is_vector = parameter.ndim == 1
            beta = 0.0 if is_vector and not decays_vectors else decay
            norm_w, norm_g = math.hypot(*w), math.hypot(*g)
            local = 1.0 if is_vector else trust * norm_w / (norm_g + beta * norm_w)
            for i in range(len(w)):
                v[i] = momentum * v[i] + rate * local * (g[i] + beta * w[i])
                w[i] = w[i] - v[i]
        results.append(torch.tensor(w, dtype=torch.float64).view(parameter.shape))
    return results


def lamb_by_the_paper(rates: list[float], decays_vectors: bool) -> Tensors:
    """Algorithm 2 of arXiv 1904.00962 with phi = clip(0, 10)."""
    beta1, beta2, eps, decay = 0.8, 0.95, 1e-6, 0.02
    results = []
    for layer, parameter in enumerate(start()):
        w = parameter.detach().flatten().tolist()
        m, v = [0.0] * len(w), [0.0] * len(w)
        for step, rate in enumerate(rates):
            g = gradients(step)[layer].flatten().tolist()
            is_vector = parameter.ndim == 1
            lam = 0.0 if is_vector and not decays_vectors else decay
            r = []
            for i in range(len(w)):
                m[i] = beta1 * m[i] + (1 - beta1) * g[i]
                v[i] = beta2 * v[i] + (1 - beta2) * g[i] ** 2
                m_hat = m[i] / (1 - beta1 ** (step + 1))
                v_hat = v[i] / (1 - beta2 ** (step + 1))
                r.append(m_hat / (math.sqrt(v_hat) + eps) + lam * w[i])
            phi = min(max(math.hypot(*w), 0.0), 10.0)
            ratio = 1.0 if is_vector else phi / math.hypot(*r)
            w = [w[i] - rate * ratio * r[i] for i in range(len(w))]
        results.append(torch.tensor(w, dtype=torch.float64).view(parameter.shape))
    return results


LARS_OPTIONS = {"momentum": 0.9, "weight_decay": 0.02}
LAMB_OPTIONS = {"betas": (0.8, 0.95), "weight_decay": 0.02}
BOTH: list[tuple[Any, dict[str, Any], Any]] = [
    (LARS, LARS_OPTIONS, lars_by_the_paper),
    (LAMB, LAMB_OPTIONS, lamb_by_the_paper),
]
WITH_OPTIONS = [pytest.param(kind, options, id=kind.__name__) for kind, options, _ in BOTH]


@pytest.mark.parametrize("decays_vectors", [False, True])
@pytest.mark.parametrize(("kind", "options", "by_the_paper"), BOTH, ids=["LARS", "LAMB"])
def test_equals_the_paper(
    kind: Any, options: dict[str, Any], by_the_paper: Any, decays_vectors: bool
) -> None:
    rates = [0.5, 0.5, 0.1, 0.02]
    parameters = start()
    optimizer = kind(parameters, lr=0.5, decay_vectors=decays_vectors, **options)
    for step, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        stepped(optimizer, parameters, range(step, step + 1))
    expected = by_the_paper(rates, decays_vectors)
    for parameter, value in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.detach(), value, rtol=0, atol=1e-12)
    assert parameters[3].detach().norm() > 10


@pytest.mark.parametrize(("kind", "options"), WITH_OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_parameters_have_wide_state(
    kind: Any, options: dict[str, Any], dtype: torch.dtype
) -> None:
    parameters, exact = start(dtype), start()
    optimizer = kind(parameters, lr=0.1, **options)
    stepped(optimizer, parameters, range(3))
    stepped(kind(exact, lr=0.1, **options), exact, range(3))
    tolerance = 4 * torch.finfo(dtype).eps
    for parameter, value in zip(parameters, exact, strict=True):
        assert parameter.dtype == dtype
        torch.testing.assert_close(parameter.double(), value, rtol=tolerance, atol=tolerance)
        state = optimizer.state[parameter]
        assert {t.dtype for t in state.values()} == {torch.float32}


@pytest.mark.parametrize(("kind", "options"), WITH_OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_goes_on_from_its_state_dict_with_the_same_bits(
    kind: Any, options: dict[str, Any], dtype: torch.dtype
) -> None:
    straight = start(dtype)
    optimizer = kind(straight, lr=0.1, **options)
    stepped(optimizer, straight, range(2))
    resumed = copy.deepcopy(straight)
    other = kind(resumed, lr=7.0)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    stepped(optimizer, straight, range(2, 4))
    stepped(other, resumed, range(2, 4))
    for mine, theirs in zip(resumed, straight, strict=True):
        assert torch.equal(mine, theirs)
    assert other.param_groups[0]["weight_decay"] == 0.02


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_without_a_gradient_nothing_happens(kind: Any) -> None:
    parameters = start()
    before = parameters[0].detach().clone()
    parameters[1].grad = torch.ones_like(parameters[1])
    optimizer = kind(parameters, lr=0.1, weight_decay=0.5)
    optimizer.step()
    assert torch.equal(parameters[0], before)
    assert list(optimizer.state) == [parameters[1]]


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_the_closure_computes_gradients(kind: Any) -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = kind([weight], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 4.0
    assert (weight**2).sum() < 4.0


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_a_layer_of_zeros_leaves_zero_by_a_plain_step(kind: Any) -> None:
    weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    weight.grad = torch.full_like(weight, 3.0)
    kind([weight], lr=0.1, weight_decay=0.5).step()
    expected = -0.3 if kind is LARS else -0.1
    torch.testing.assert_close(weight.detach(), torch.full_like(weight, expected))


@pytest.mark.parametrize("kind", [LARS, LAMB])
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_a_gradient_of_zero_only_decays(kind: Any, decay: float) -> None:
    weight = nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
    weight.grad = torch.zeros_like(weight)
    kind([weight], lr=0.1, weight_decay=decay).step()
    # The ratio makes the step a share of the weights: lr * trust_coefficient, or lr.
    share = 0.0 if decay == 0 else 0.0001 if kind is LARS else 0.1
    torch.testing.assert_close(weight.detach(), torch.full_like(weight, 1 - share))


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_the_step_of_a_layer_does_not_depend_on_the_scale_of_its_gradient(kind: Any) -> None:
    moved = []
    for scale in (1.0, 1000.0):
        weight = nn.Parameter(torch.ones(3, 3, dtype=torch.float64))
        weight.grad = scale * torch.arange(1.0, 10.0, dtype=torch.float64).view(3, 3)
        kind([weight], lr=0.1).step()
        moved.append(weight.detach())
    torch.testing.assert_close(moved[0], moved[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_groups_have_options_of_their_own(kind: Any) -> None:
    parameters = start()
    optimizer = kind([{"params": parameters[:2], "lr": 0.0}, {"params": parameters[2:]}], lr=0.1)
    stepped(optimizer, parameters, range(1))
    same = [torch.equal(p, q) for p, q in zip(parameters, start(), strict=True)]
    assert same == [True, True, False, False]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (LARS, {"lr": -1.0}, "lr must not be negative; received -1.0"),
        (LARS, {"lr": 0.1, "momentum": 1.0}, "momentum must be at least 0 and below 1"),
        (LARS, {"lr": 0.1, "weight_decay": -0.1}, "weight_decay must not be negative"),
        (LARS, {"lr": 0.1, "trust_coefficient": 0.0}, "trust_coefficient must be positive"),
        (LAMB, {"betas": (0.9, 1.5)}, r"betas\[1\] must be at least 0 and below 1; received 1.5"),
        (LAMB, {"eps": 0.0}, "eps must be positive"),
        (LAMB, {"clip_norm": float("nan")}, "clip_norm must be positive"),
    ],
)
def test_wrong_options(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(start(), **options)


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_sparse_gradients_are_refused(kind: Any) -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="dense real gradients; "):
        kind(table.parameters(), lr=0.1).step()


def digits_accuracy(name: str, rate: float, options: dict[str, float]) -> float:
    """Of a small network on digits that it has not seen, after 20 epochs of 3 large steps."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32)[order] / 16
    y = torch.tensor(labels)[order]
    config = TrainConfig(
        task=CLASSIFICATION,
        loss="cross_entropy",
        optimizer=name,
        optimizer_params=options,
        learning_rate=rate,
        scheduler=warmup(steps=10),
        batch_size=512,
        epochs=20,
    )
    net = seeded(
        lambda: nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
        ),
        seed=0,
    )
    run(net, config, [ShardData("digits", {"feature x": x[:1437], "label y": y[:1437]})])
    return float((net(x[1437:]).argmax(1) == y[1437:]).float().mean())


def test_large_batches_train_where_sgd_at_the_scaled_rate_does_not() -> None:
    """SGD is good at 0.05 with 32 rows a batch, so linear scaling asks for 0.8 with 512."""
    assert digits_accuracy("sgd", 16 * 0.05, {"momentum": 0.9}) < 0.5
    assert digits_accuracy("lars", 5.0, {}) > 0.9
    assert digits_accuracy("lamb", 0.05, {}) > 0.9
