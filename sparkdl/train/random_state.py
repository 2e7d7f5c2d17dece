"""The sources of random numbers, and how they repeat.

Every rank draws dropout masks and the like from its own streams, which follow from the seed, and
whose states travel in its checkpoints. The order of samples is not drawn from them.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

_NO_RANK = 2**32
"""In place of a rank, for numbers that belong to none."""


def seed_everything(seed: int, rank: int, step: int = 0) -> None:
    """Seed torch, numpy and Python for one rank.

    ``step`` tells apart the parts of a run that was resumed without its random states.
    """
    words = np.random.SeedSequence([seed % 2**64, rank, step]).generate_state(4, np.uint64)
    torch.manual_seed(int(words[0]))
    np.random.seed(words[1:3].view(np.uint32))
    random.seed(int(words[3]))


def random_state() -> dict[str, Any]:
    """The states of all streams, as plain values and tensors."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore what `random_state` gave."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


class SharedDraws:
    """Random numbers that all ranks draw alike inside; what each draws for itself goes on later.

    It is entered in each step, and torch looks for devices whenever it is asked to seed all.
    """

    def __init__(self, seed: int, step: int) -> None:
        self._words = np.random.SeedSequence([seed % 2**64, _NO_RANK, step]).generate_state(2)
        cuda: Any = torch.cuda
        self._on_cuda = cuda.is_initialized()
        self._own: tuple[Any, ...] = ()

    def __enter__(self) -> SharedDraws:
        self._own = self._states()
        first, second = map(int, self._words)
        torch.default_generator.manual_seed(first)
        if self._on_cuda:
            torch.cuda.manual_seed(first)
        np.random.seed(second)
        random.seed(second)
        return self

    def __exit__(self, *_: object) -> None:
        self._give(self._own)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Draw what this rank draws for itself."""
        shared = self._states()
        self._give(self._own)
        try:
            yield
        finally:
            self._own = self._states()
            self._give(shared)

    def _states(self) -> tuple[Any, ...]:
        on_cuda = torch.cuda.get_rng_state() if self._on_cuda else None
        states = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
        return (*states, on_cuda)

    def _give(self, states: tuple[Any, ...]) -> None:
        torch.default_generator.set_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        if self._on_cuda:
            torch.cuda.set_rng_state(states[3])


@contextlib.contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Ask torch for deterministic algorithms inside; what was set before comes back."""
    if not enabled:
        yield
        return
    cudnn: Any = torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    flags = (cudnn.benchmark, cudnn.deterministic)
    # cuBLAS reads it when its first handle is made; without it torch refuses matrix products.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    cudnn.benchmark, cudnn.deterministic = False, True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned_only)
        cudnn.benchmark, cudnn.deterministic = flags
