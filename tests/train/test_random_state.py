from __future__ import annotations

import random

import numpy as np
import torch

from sparkdl.train.random_state import (
    SharedDraws,
    deterministic_algorithms,
    random_state,
    seed_everything,
    set_random_state,
)


def draw() -> tuple[float, float, float]:
    return float(torch.rand(())), float(np.random.rand()), random.random()


def drawn(seed: int, rank: int, step: int = 0) -> tuple[float, float, float]:
    seed_everything(seed, rank, step)
    return draw()


def test_streams_follow_from_seed_rank_and_step() -> None:
    assert drawn(1, 0) == drawn(1, 0)
    values = [drawn(1, 0), drawn(2, 0), drawn(1, 1), drawn(1, 0, 5), drawn(-1, 0), drawn(0, 1)]
    for stream in zip(*values, strict=True):
        assert len(set(stream)) == len(values)


def test_state_comes_back() -> None:
    seed_everything(3, 0)
    draw()
    random.gauss(0, 1)
    np.random.randn()
    state = random_state()
    expected = [draw(), (random.gauss(0, 1), np.random.randn())]
    set_random_state(state)
    assert [draw(), (random.gauss(0, 1), np.random.randn())] == expected


def test_deterministic_algorithms_restores_what_was_set() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic_algorithms(True):
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
            assert torch.backends.cudnn.deterministic
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.backends.cudnn.deterministic
    finally:
        torch.use_deterministic_algorithms(False)


def test_ranks_draw_alike_inside_and_go_on_with_their_own() -> None:
    found = []
    for rank in (0, 1):
        seed_everything(7, rank)
        own = [draw() for _ in range(3)]
        seed_everything(7, rank)
        before = draw()
        with SharedDraws(7, 5) as draws:
            shared = [draw()]
            with draws.apart():
                within = draw()
            shared.append(draw())
        assert [before, within, draw()] == own
        found.append((own, shared))
    (first, one), (second, other) = found
    assert one == other
    assert first != second
    with SharedDraws(7, 6):
        assert draw() != one[0]
