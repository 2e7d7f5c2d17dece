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
    """Random numbers that all ranks draw alike inside; what each draws for itself goes on later."""

    def __init__(self, seed: int, step: int) -> None:
        self._seed, self._step = seed, step
        self._own: dict[str, Any] = {}

    def __enter__(self) -> SharedDraws:
        self._own = random_state()
        seed_everything(self._seed, _NO_RANK, self._step)
        return self

    def __exit__(self, *_: object) -> None:
        set_random_state(self._own)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Draw what this rank draws for itself."""
        shared = random_state()
        set_random_state(self._own)
        try:
            yield
        finally:
            self._own = random_state()
            set_random_state(shared)


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
