"""What the tests of descriptions import by name."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Plain(nn.Module):
    """Made without arguments."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.width = width
        self.layer = nn.Linear(3, width)
        self.scale: Any = 1.0
        self.register_buffer("grid", torch.arange(3.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * self.grid) * self.scale

    @classmethod
    def wide(cls) -> Plain:
        return cls(8)


class Meter:
    """An object of a class of one's own, in an attribute."""

    def __init__(self, inner: Meter | None = None) -> None:
        self.count, self.inner, self.lock = 0, inner, threading.Lock()
        self.of: Any = self


class Slotted:
    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 1


class WithObjects(Plain):
    """Keeps values in objects, some of which no file can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.meter: Any = Meter(Meter())
        self.alias = self.meter
        self.slotted, self.where, self.listed = Slotted(), Path("here"), [Meter()]
        self.last: deque[int] = deque([1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.meter.count


def lazy_net() -> nn.Module:
    """Its layers find their widths with the first batch."""
    return nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(2))


class Counting(nn.Module):
    """Keeps a state that is no tensor, and one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.batches, self.sums = nn.Linear(3, 2), 0, torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.batches += 1
        self.sums = self.sums + x.shape[0]
        return self.layer(x)

    def get_extra_state(self) -> dict[str, Any]:
        return {"batches": self.batches, "sums": self.sums}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.batches, self.sums = state["batches"], state["sums"]


class NeedsWidth(nn.Module):
    """Made with an argument only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 7)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


@dataclass(frozen=True, kw_only=True)
class Options:
    """Frozen, as strategies are."""

    period: int = 3
    shape: tuple[int, ...] = (1, 2)
    twice: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "twice", self.period * 2)


@dataclass
class Mutable:
    """Not frozen."""

    period: int = 3


def make_net(width: int = 4) -> nn.Module:
    """A factory."""
    return nn.Sequential(nn.Linear(3, width), nn.ReLU())


def add(a: Any, b: Any) -> Any:
    """A function of two arguments."""
    return a + b


def not_a_module() -> int:
    """A factory that makes something else."""
    return 1


renamed = lambda: None  # noqa: E731


def tokenize(batch: Any) -> list[list[int]]:
    """Words of the first column as numbers; a transform for `sparkdl.Sequence`."""
    return [[len(word) for word in (text or "").split()] for text in batch.column(0).to_pylist()]


class Drawn(nn.Module):
    """What its state dict leaves out is drawn at random, or made while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.inner = nn.Sequential(nn.Linear(2, 2))
        self.inner.register_buffer("noise", torch.randn(2), persistent=False)
        self.projection = torch.randn(3, 3)
        self.factors: Any = [float(torch.rand(())), {"shift": torch.randn(2)}]
        self.aliases = [self.layer.weight, self.inner]
        self.act = lambda x: x
        self.calls = 0
        self.cache: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.cache is None:
            self.cache = torch.ones(2) * self.calls
        inner = self.inner(self.layer(x @ self.projection)) * self.inner.noise
        return self.act(inner) * self.factors[0] + self.factors[1]["shift"] * self.cache
