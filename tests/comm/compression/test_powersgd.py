from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparkdl.comm.compression.powersgd import Plan, PowerSGD, orthonormal
from sparkdl.errors import ConfigError
from tests.comm.compression.ranks import Threads, exchange, make, random_share
from tests.gang import Gang

SHAPES = [(24, 10, 2), (5,), (30, 20)]


def test_which_tensors_are_compressed() -> None:
    plan = Plan([(24, 10, 2), (5,), (30, 20), (4, 4), (), (0, 3)], 2, 2.0)
    assert plan.matrices == [(0, 24, 20), (485, 30, 20)]
    assert plan.others == [(480, 485), (1085, 1101), (1101, 1102)]
    assert plan.first_numel == 2 * 54 + 5 + 16 + 1
    assert plan.second_numel == 2 * 40
    # It would become 5.45 times smaller.
    assert Plan([(24, 20)], 2, 5.4).matrices
    assert not Plan([(24, 20)], 2, 5.5).matrices


def test_a_gradient_of_low_rank_is_sent_exactly() -> None:
    for estimate, expected in Threads(3).run(send_low_rank):
        torch.testing.assert_close(estimate, expected, rtol=0, atol=1e-12)


def send_low_rank(comm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    left = torch.randn(24, 2, generator=generator, dtype=torch.float64)
    right = torch.randn(2, 20, generator=generator, dtype=torch.float64)
    mixed = torch.diag(torch.tensor([1.0 + comm.rank, 2.0], dtype=torch.float64))
    flat = (left @ mixed @ right).flatten()
    expected = (left @ torch.diag(torch.tensor([6.0, 6.0]).double()) @ right).flatten()
    compressor, _ = make(comm, PowerSGD(rank=2), [(24, 20)], torch.float64)
    compressor.start(flat).wait()
    return flat, expected


@pytest.mark.gang
def test_the_same_as_torchs_hook(gang: Gang) -> None:
    for ours, torchs in gang.run(beside_torch):
        torch.testing.assert_close(ours, torchs, rtol=0, atol=1e-10)


def beside_torch(comm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks

    compressor, numel = make(comm, PowerSGD(rank=2), SHAPES, torch.float64)
    state = hooks.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    state.iter = 2
    qs = [q.T.flatten() for q in compressor._plan.qs(compressor._q)]  # type: ignore[attr-defined]
    state.q_memory_dict[0] = torch.cat(qs)
    state.p_memory_dict[0] = torch.zeros(2 * 54, dtype=torch.float64)
    ours, torchs = [], []
    for step in range(5):
        flat = random_share(comm, step, numel, torch.float64)
        theirs = flat * 2  # the hook takes gradients and gives their mean
        compressor.start(flat).wait()
        parts = torch.split(theirs, [480, 5, 600])
        bucket = SimpleNamespace(
            buffer=lambda theirs=theirs: theirs,
            gradients=lambda parts=parts: [
                part.view(shape) for part, shape in zip(parts, SHAPES, strict=True)
            ],
            index=lambda: 0,
            is_last=lambda: True,
        )
        hooks.powerSGD_hook(state, bucket).wait()  # type: ignore[arg-type]
        ours.append(flat)
        torchs.append(theirs.clone())
    return torch.stack(ours), torch.stack(torchs)


def test_one_constant_gradient_is_approached_by_power_iteration() -> None:
    # The residual brings what the first approximations lacked.
    (found,) = Threads(1).run(exchange, PowerSGD(rank=1), [(40, 30)], torch.float64, 40)
    errors = [
        (sum(found.estimates[:n], torch.zeros(1200)) - found.shares * n / 40).norm().item() / n
        for n in (1, 40)
    ]
    assert errors[1] < errors[0] / 3


@pytest.mark.parametrize("p", [torch.zeros(5, 2), torch.ones(5, 2), torch.eye(5)[:, 1:3] * 1e-30])
def test_columns_are_orthonormal_whatever_they_are(p: torch.Tensor) -> None:
    q = orthonormal(p)
    torch.testing.assert_close(q.T @ q, torch.eye(2))
    torch.testing.assert_close(q @ (q.T @ p), p)


def test_warmup_is_exact() -> None:
    (found,) = Threads(1).run(exchange, PowerSGD(warmup_steps=1), [(40, 30)], torch.float64, 1)
    assert torch.equal(found.estimates[0], found.shares)


def test_bytes() -> None:
    first, second = 2 * 54 + 5, 2 * 40
    assert PowerSGD().wire_bytes(SHAPES, 4, 3) == 2 * 2 * first * 4 // 3 + 2 * 2 * second * 4 // 3


@pytest.mark.parametrize(
    "options", [{"rank": 0}, {"warmup_steps": -1}, {"min_compression": 0.5}], ids=str
)
def test_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        PowerSGD(**options)
