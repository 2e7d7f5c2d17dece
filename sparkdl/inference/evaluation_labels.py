"""Labels and weights of an evaluation, as its tasks read them from Arrow."""

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
from sparkdl.data.plan import Column, Role
from sparkdl.data.ragged import Ragged
from sparkdl.errors import DataError
from sparkdl.inputs import Specification


@dataclass(frozen=True, kw_only=True)
class LabelColumn:
    """A label or the weight of each row; picklable."""

    name: str
    role: Role
    dtype: str
    """numpy name of the dtype in which it comes; for a transform's result that of floats."""
    as_classes: bool = False
    """True if the values must be class numbers."""
    argument: str | None = None
    """What the loss calls it where there are several labels."""
    specification: Specification | None = None
    """How it is read where there are several labels."""

    def read(self, array: pa.Array) -> torch.Tensor | Ragged:
        """Its values, one per row.

        Raises:
            DataError: a null, a value that is not finite, a negative weight, or a value that is no
                class number where one is needed.
        """
        if self.specification is None:
            read_as = "float64" if self.as_classes else self.dtype
            values = to_numpy(array, read_as, name=self.name)
            return self._checked(values, np.dtype(self.dtype))
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
        return self._checked(values, dtype)

    def _checked(self, values: np.ndarray, dtype: np.dtype[Any]) -> torch.Tensor:
        wrong = bad_values(values, self.role, as_classes=self.as_classes)
        if wrong.any():
            what = "which is not finite"
            if self.as_classes:
                what = "which is no class number (index strings with StringIndexer)"
            elif self.role == "weight":
                what = "but weights are finite numbers from 0"
            raise DataError(
                f'column "{self.name}" has the {self.role} {values[wrong][0].tolist()}, {what}; '
                "filter such rows out"
            )
        return torch.from_numpy(values.astype(dtype))

    def padded(self, rows: torch.Tensor | Ragged) -> torch.Tensor:
        """What the loss compares with, ``(rows, ...)``; sequences are padded."""
        if isinstance(rows, torch.Tensor):
            return rows
        column = Column(
            name=self.name,
            role="label",
            dtype=rows.parts[-1].dtype.name,
            shape=rows.shape or (),
            argument=self.argument,
            specification=self.specification,
        )
        return collate.arguments([column], [rows]).values[0]
