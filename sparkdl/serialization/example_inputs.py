"""The inputs with which a module is tried when it is exported, and their free sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from sparkdl.data.collate import Arguments, example_arguments
from sparkdl.data.plan import Column

Given: TypeAlias = "tuple[torch.Tensor, ...] | Mapping[str, torch.Tensor] | InputExample"
"""Inputs by position, by name, or with what is known of their sizes."""


@dataclass(frozen=True)
class InputExample:
    """One batch of inputs. The number of its rows is free."""

    arguments: Arguments
    lengths: tuple[bool, ...]
    """True for each input whose second dimension is a length, which is free too."""

    @property
    def values(self) -> tuple[torch.Tensor, ...]:
        """The tensors, ``(batch, ...)`` each."""
        return self.arguments.values

    def has_length(self, value: torch.Tensor) -> bool:
        """Return True if the second dimension of one of the tensors is a length."""
        return any(flag for flag, v in zip(self.lengths, self.values, strict=True) if v is value)

    def with_values(self, values: Sequence[torch.Tensor]) -> InputExample:
        """The same with other tensors."""
        return InputExample(Arguments(tuple(values), self.arguments.names), self.lengths)

    def rows(self, num_rows: int) -> InputExample:
        """The first rows, which begin anew where there are too few."""
        index = torch.arange(num_rows) % self.arguments.num_rows
        return self.with_values([value[index] for value in self.values])

    def shorter(self) -> InputExample:
        """The same with sequences that are a step shorter, where they have several."""
        return self.with_values(
            [
                value[:, : max(1, value.shape[1] - 1)] if flag else value
                for flag, value in zip(self.lengths, self.values, strict=True)
            ]
        )


def example_of(columns: Sequence[Column], num_rows: int = 2) -> InputExample:
    """Zeros in the shapes of a trained module's inputs."""
    arguments = example_arguments(columns, num_rows)
    lengths: list[bool] = []
    for column in columns:
        lengths += [column.kind.has_length] * (1 + len(column.kind.masks))
    # Lengths of 1 would be taken for constants.
    values = [
        torch.cat([value, value], dim=1) if flag and value.shape[1] == 1 else value
        for flag, value in zip(lengths, arguments.values, strict=True)
    ]
    return InputExample(Arguments(tuple(values), arguments.names), tuple(lengths))


def as_example(given: Given) -> InputExample:
    """Turn what a caller gave into an example."""
    if isinstance(given, InputExample):
        return given
    if isinstance(given, Mapping):
        arguments = Arguments(tuple(given.values()), tuple(given))
    else:
        arguments = Arguments(tuple(given))
    return InputExample(arguments, (False,) * len(given))
