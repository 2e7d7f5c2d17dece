"""How does a task of `evaluate` read labels and weights, as training reads them?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from sparkdl.data import collate
from sparkdl.data.arrow_arrays import to_numpy
from sparkdl.data.column_readers import BadRows, read
from sparkdl.data.column_rules import bad_values, made_dtype
from sparkdl.data.plan import Column
from sparkdl.data.ragged import Ragged
from sparkdl.errors import DataError
from sparkdl.inputs import Specification


@dataclass(frozen=True)
class Beside:
    """A column that comes beside the inputs: label or weight."""

    name: str
    dtype: str
    """numpy name of the dtype in which it comes."""
    as_classes: bool = False

    def read(self, array: Any) -> torch.Tensor:
        """Its values, ``(rows, ...)``.

        Raises:
            DataError: a null, a value that is not finite, or one that is no class number where
                one is needed.
        """
        values = to_numpy(array, "float64" if self.as_classes else self.dtype, name=self.name)
        wrong = bad_values(values, "label", as_classes=self.as_classes)
        if wrong.any() and self.as_classes:
            raise DataError(
                f'column "{self.name}" has the label {values[wrong][0]}: no class number (index '
                "strings with StringIndexer, or filter such rows out)"
            )
        if wrong.any():
            raise DataError(
                f'column "{self.name}" has a label that is infinite or NaN; filter such rows out'
            )
        tensor = torch.from_numpy(values.copy())
        return tensor.long() if self.as_classes else tensor

    def read_weights(self, array: Any) -> torch.Tensor:
        """Its values as weights of rows.

        Raises:
            DataError: one is null, negative or not finite.
        """
        values = to_numpy(array, self.dtype, name=self.name)
        wrong = bad_values(values, "weight", as_classes=False)
        if wrong.any():
            raise DataError(
                f'column "{self.name}" has the weight {values[wrong][0]}; weights are numbers '
                "from 0"
            )
        return torch.from_numpy(values.copy())


@dataclass(frozen=True, kw_only=True)
class NamedLabel:
    """One of several labels; picklable."""

    name: str
    specification: Specification
    dtype: str
    """numpy name of the dtype in which it comes; for a transform's result that of floats."""
    as_classes: bool

    def read(self, array: pa.Array) -> torch.Tensor | Ragged:
        """Its values, one per row.

        Raises:
            DataError: some cannot be used.
        """
        try:
            rows = read(array, self.specification)
        except BadRows as error:
            raise DataError(error.findings.message(self.specification.name)) from None
        values = rows.parts[-1] if isinstance(rows, Ragged) else rows
        dtype = np.dtype(self.dtype)
        if self.specification.transform is not None:
            dtype = made_dtype(values.dtype, "label", self.dtype)
        if isinstance(rows, Ragged):
            last = values.astype(dtype, copy=False)
            return Ragged((*rows.parts[:-1], last), rows.offsets, rows.shape)
        wrong = bad_values(values, "label", as_classes=self.as_classes)
        if wrong.any():
            raise DataError(
                f'label "{self.name}" has the value {values[wrong][0].tolist()}, which '
                f"{'is no class number' if self.as_classes else 'is not finite'}; drop such rows"
            )
        return torch.from_numpy(values.astype(dtype))

    def tensor(self, rows: torch.Tensor | Ragged) -> torch.Tensor:
        """What the loss compares with, ``(rows, ...)``; sequences are padded."""
        if isinstance(rows, torch.Tensor):
            return rows
        column = Column(
            name=self.name,
            role="label",
            dtype=rows.parts[-1].dtype.name,
            shape=rows.shape or (),
            argument=self.name,
            specification=self.specification,
        )
        return collate.arguments([column], [rows]).values[0]
